"""Parse, resolve and type-check all models, layouts and plans of .ucpl files.

Exit 1 if anything is wrong. A parameter without a default is tried at 1, a list at small drawn ones, axes of the mesh
at the least degrees above 1 that divide: each alone, then all together. A layout of any model is tried over the
file's own model or a small one of ours. Dims without a size, or with one of a config that is not given, get small
drawn sizes. If a failed assert or cut depends on a value that was only tried, it is a remark; otherwise it is an
error. A tensor that no entry stores is a remark.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ucpl.cli.console import diagnostic_object
from ucpl.cli.options import add_json, add_sizes, given_of
from ucpl.errors import Exit, UcplError

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = "ucpl check model.ucpl --config config.json -D vocab=50257\nucpl check 'model.ucpl:megatron(tp = 6)'"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE[:LAYOUT]", help="a .ucpl file, or one layout of it at degrees given"
    )
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from attrs import evolve

    from ucpl.conversion.checking import check
    from ucpl.lint.unused_names import CONFIG_UNREAD

    given = given_of(options)
    checked = [check(name, given) for name in options.files]
    if not all(CONFIG_UNREAD in one.remarks for one in checked):  # of several files one has a use for it
        checked = [evolve(one, noted=tuple(r for r in one.noted if r.text != CONFIG_UNREAD)) for one in checked]
    checked = [evolve(one, noted=(*one.outdated, *one.noted)) for one in checked]
    for one in checked:
        for text in (*one.tried, *one.noted):
            console.say(f"{one.name}: {text}")
        if one.findings:
            console.diagnostics(one.findings)
        else:
            more = f", {counted({'remark': len(one.remarks)})}" if one.remarks else ""
            good = f"good, except for unchecked parts ({', '.join(one.unchecked)})" if one.unchecked else "good"
            console.say(f"{one.name}: {good}{more}; {counted(one.counts)}")
    findings = [d for one in checked for d in one.findings]
    console.answer(
        {
            "good": not findings,
            "diagnostics": [diagnostic_object(d) for d in findings],
            "tried": [f"{one.name}: {text}" for one in checked for text in one.tried],
            "unchecked": [f"{one.name}:{layout}" for one in checked for layout in one.unchecked],
            "remarks": [f"{one.name}: {text}" for one in checked for text in one.remarks],
            "lints": [
                {"file": one.name, "line": remark.line, "rule": remark.rule, "text": remark.text}
                for one in checked
                for remark in one.noted
                if remark.rule
            ],
        }
    )
    if not findings:
        return Exit.DONE
    from ucpl.cli.run import status_of  # it imports the verbs

    return status_of(UcplError(*findings), is_about_texts=True)


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {word}{'s' if n > 1 else ''}" for word, n in counts.items()) or "nothing to resolve"
