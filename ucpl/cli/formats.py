"""Print the formats that are read and written, and their test status."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ucpl.cli.options import SHOWN, add_json
from ucpl.cli.verbs import nearest
from ucpl.errors import Exit, Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.registry.support import Claim, Support

EXAMPLE = "ucpl formats\nucpl formats dcp\nucpl formats --json"

_WIDTH = 14


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="one of them, in full")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.registry.support import MEANINGS, support

    every = support()
    chosen = [one for one in every if options.name in (None, one.name)]
    if not chosen:
        _refuse(options.name, [one.name for one in every])
    calls = parameters_of(chosen[0].layouts) if options.name is not None else {}
    for one in chosen:
        console.say(*_lines(one))
        console.say(*(f"    {layout}({', '.join(map(_shown, known.items()))})" for layout, known in calls.items()))
        if options.name is not None:
            for row in one.rows:
                console.say("", row.checkpoint, f"  read        {row.read}", f"  written     {row.written}")
        console.say("")
    meanings = {standing.value: said for standing, said in MEANINGS.items()}
    console.say(*(f"{word.ljust(_WIDTH)}{said}" for word, said in meanings.items()))
    if options.name is None:
        console.say("", "`ucpl formats NAME` shows one format with its layouts and cases")
    words = {standing.name.lower(): said for standing, said in MEANINGS.items()}
    more = {"parameters": calls} if calls else {}
    console.answer({"formats": [{**_object(one), **more} for one in chosen], "meanings": words})
    return Exit.DONE


def parameters_of(layouts: Sequence[str]) -> dict[str, dict[str, str | None]]:
    """The parameters of shipped layouts, with their defaults.

    None: the call or the source gives the value.
    """
    from ucpl.language import nodes, print_expr
    from ucpl.layout import load

    library = load()
    found = {layout: library.layout(layout).node for layout in layouts}
    return {
        layout: {p.name: None if p.default is None else print_expr(p.default) for p in node.parameters}
        for layout, node in found.items()
        if isinstance(node, nodes.Layout)
    }


def _shown(parameter: tuple[str, str | None]) -> str:
    name, default = parameter
    return name if default is None else f"{name} = {default}"


def _lines(one: Support) -> list[str]:
    said = {
        "files": one.files,
        "--to": ", ".join(one.layouts),
        "read": one.read.value,
        "written": one.written.value,
        "states": ", ".join(one.states),
        "parallelism": ", ".join(one.parallelism),
        "tried with": ", ".join(one.releases),
    }
    return [f"{one.name}: {one.title}", *(f"  {word.ljust(_WIDTH - 2)}{text}" for word, text in said.items() if text)]


def _object(one: Support) -> dict[str, object]:
    """A form as `--json` has it."""
    return {
        "name": one.name,
        "title": one.title,
        "files": one.files,
        "framework": one.framework,
        "layouts": list(one.layouts),
        "read": one.read.name.lower(),
        "written": one.written.name.lower(),
        "states": list(one.states),
        "parallelism": list(one.parallelism),
        "releases": list(one.releases),
        "rows": [
            {"id": row.id, "checkpoint": row.checkpoint, "read": _claim(row.read), "written": _claim(row.written)}
            for row in one.rows
        ],
    }


def _claim(claim: Claim) -> dict[str, object]:
    return {"is": claim.standing.name.lower(), "codes": list(claim.codes), "note": claim.note.lstrip(":, ")}


def _refuse(name: str, names: list[str]) -> None:
    """Raises: UcplError E174."""
    from ucpl.registry.support import support

    of_layout = next((one.name for one in support() if name.partition("(")[0] in one.layouts), "")
    close = of_layout or nearest(name, names)
    fail(
        "E174",
        f"no form of checkpoints is called `{name[:SHOWN]}`",
        Label("<command line>", where=name[:SHOWN]),
        remedy=f"write ucpl formats {close}" if close else "`ucpl formats` lists all",
    )
