"""Try the layouts of a spec there and back through changed degrees.

Every element is numbered, moved, and compared.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.cli.options import add_json, add_model, add_sizes, given_of, whole_number
from ucpl.errors import Exit, Label, UcplError, fail
from ucpl.texts import read_text

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.requests import Given
    from ucpl.language import nodes
    from ucpl.testing import Report

_EXAMPLES_MAX = 1_000_000
_DEGREE_MAX = 262_144
_DIVIDED = re.compile(r"(\d+) does not divide by (\w+) = ")
_DIVISOR_MAX = 4096
_NUMBERS = re.compile(r"[0-9]+(?:[,; ]+[0-9]+)*")
_SAID = re.compile(r"([A-Za-z_]\w*)\s*[=:]\s*([1-9][0-9]*(?:[,; ]+[0-9]+(?!\w))*)")  # in whatever form
EXAMPLE = "ucpl roundtrip model.ucpl:megatron --examples 50\nucpl roundtrip model.ucpl --config config.json --degrees tp=1,2,6"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE[:LAYOUT]", help="a .ucpl file, or one layout of it")
    parser.add_argument(
        "--examples", default="20", metavar="N", help="pairs of degrees to try for each layout (default 20)"
    )
    parser.add_argument(
        "--degrees", action="append", default=[], metavar="AXIS=N,N", help="degrees of an axis to try; may repeat"
    )
    add_model(parser, "of layouts that are of any")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed tries other degrees")
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.testing import roundtrip

    examples = whole_number("--examples", options.examples, _EXAMPLES_MAX, "write --examples 20")
    head, colon, layout = options.file.partition(".ucpl:")
    name = head + ".ucpl" if colon else options.file
    given = given_of(options)
    layout, fixed = _call_of(layout, name) if "(" in layout else (layout, ())
    try:
        reports = roundtrip(
            read_text(Path(name)),
            layout or None,
            examples,
            name=name,
            model=given.model,
            config=given.config,
            sizes=given.sizes,
            degrees=degrees_of(options.degrees),
            seed=options.seed,
            arguments=fixed,
        )
    except AssertionError as error:
        console.say(f"differs       {error}")
        console.answer({"good": False, "difference": str(error)})
        return Exit.ANSWER_IS_NO
    for report in reports:
        console.say(*str(report).split("\n"))
    remarks = unread(name, given)
    for text in remarks:
        console.say(f"remark: {text}")
    good = all(report.tried for report in reports)
    if not good:
        alone = [r.layout for r in reports if not r.tried and not r.refused]
        console.say(
            f"{alone[0]} was tried at one degree of each axis alone, and a round trip is between two:"
            f" write {two_of(options.degrees)}"
            if alone
            else f"no pair of degrees suits the sizes: {_others(reports, read_text(Path(name)), name)}"
        )
    console.answer({"good": good, "layouts": list(map(report_object, reports)), "remarks": remarks})
    return Exit.DONE if good else Exit.ANSWER_IS_NO


def _call_of(text: str, name: str) -> tuple[str, tuple[nodes.Argument, ...]]:
    """A layout's name, and the lists and words of its call.

    Raises: UcplError E177 for a number, which is a degree.
    """
    from ucpl.language import nodes, parse_call, print_expr

    try:
        call = parse_call(text)
    except UcplError:
        call = None  # the degrees are wrong all the same
    arguments = () if call is None else call.arguments
    numbers = {a.name: a.value.value for a in arguments if isinstance(a.value, nodes.Number)}
    if call is not None and not numbers and all(a.name for a in arguments):
        return call.name, arguments
    two = [f"--degrees {axis}={n},{1 if n == 2 else 2}" for axis, n in numbers.items() if axis]
    rest = [a for a in arguments if a.name and a.name not in numbers]
    layout = text.partition("(")[0]
    kept = ", ".join(f"{a.name} = {print_expr(a.value)}" for a in rest)
    shown = f"'{name}:{layout}({kept})'" if kept else f"{name}:{layout}"
    fail(
        "E177",
        f"{text[:60]}: a round trip is between degrees, and a call has one of each",
        Label("<command line>", where=text[:60]),
        remedy=f"write ucpl roundtrip {shown} {' '.join(two) or '--degrees tp=1,2'}",
    )


def unread(name: str, given: Given) -> list[str]:
    """The options that neither the file nor its imports use."""
    if given.config is None:
        return []
    from ucpl.conversion.requests import library_of
    from ucpl.lint.unused_names import CONFIG_UNREAD, reads_config

    models = [given.model] if given.model is not None else []
    return [] if reads_config([*models, *library_of(name).files.values()]) else [CONFIG_UNREAD]


def report_object(r: Report) -> dict[str, object]:
    return {
        "layout": r.layout,
        "tried": list(r.tried),
        "refused": list(r.refused),
        "sizes": r.sizes,
        "elements": r.elements,
    }


def _others(reports: Sequence[Report], text: str, name: str) -> str:
    """The remedy: degrees that divide a size, and sizes to set.

    Sizes only if the text names any.
    """
    from ucpl.language import nodes, parse
    from ucpl.language.walk import walk

    out = "give other degrees with --degrees"
    divided = (_DIVIDED.search(reason) for r in reports if not r.tried for reason in r.refused)
    if (found := next((match for match in divided if match is not None), None)) is not None:
        size = int(found[1][:18])
        other = next((n for n in range(2, min(size, _DIVISOR_MAX) + 1) if size % n == 0), None)
        if other is not None:
            out = f"{size} divides by {other}, write --degrees {found[2]}=1,{other}"
    is_named = any(isinstance(node, nodes.Let | nodes.Dims) for node in walk(parse(text, name)))
    return out + (", or give other sizes with -D" if is_named else "; the text has its sizes as numbers")


def two_of(texts: Sequence[str]) -> str:
    """The options again, with two degrees of the first axis."""
    axis, numbers = next(iter(degrees_of(texts).items()), ("tp", [2]))
    two = f"{axis}=1,{numbers[0] if numbers[0] > 1 else 2}"
    return " ".join(f"--degrees {text}" for text in (two, *texts[1:]))


def degrees_of(texts: Sequence[str]) -> dict[str, list[int]]:
    """The values of --degrees. Raises: UcplError E173, E177."""
    out: dict[str, list[int]] = {}
    for text in texts:
        axis, equals, numbers = text.partition("=")
        found = _SAID.findall(text[:60])
        better = "write " + (" ".join(f"--degrees {a}={_listed(n)}" for a, n in found) or "--degrees tp=1,2,4")
        if not (axis and equals) or len(found) > 1:
            some = f"--degrees tp={_listed(text[:60])}, once for each axis" if _NUMBERS.fullmatch(text) else ""
            fail(
                "E177",
                f"--degrees {text[:60]}: not of the form AXIS=N,N",
                Label("<command line>", where=f"--degrees {text[:60]}"),
                remedy=f"write {some}" if some else better,
            )
        out[axis] = [whole_number("--degrees", n, _DEGREE_MAX, better) for n in numbers.split(",")]
    return out


def _listed(numbers: str) -> str:
    return ",".join(re.findall(r"[0-9]+", numbers))
