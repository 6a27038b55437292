"""Hold two checkpoints against each other, whatever their layouts. Says which tensor, state and element differs, and where."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.options import add_data_plane, add_json, data_plane
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console

EXAMPLE = "ucpl compare runs/on-4 runs/on-8"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--as", dest="a_layout", metavar="LAYOUT", help="A's layout (default: inferred)")
    parser.add_argument("--with", dest="b_layout", metavar="LAYOUT", help="B's layout (default: inferred)")
    add_data_plane(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    import attrs

    from ucpl import api

    found = api.compare(
        options.a, options.b, a_layout=options.a_layout, b_layout=options.b_layout, **data_plane(options)
    )
    for difference in found.differences:
        console.say(f"differs       {difference}")
    compared = f"{found.tensors:,} tensors, {found.elements:,} elements, {found.values:,} values beside them"
    console.say(f"compared      {compared}; buffers {bytes_text(found.bytes_live_max)} at most")
    for one in found.unsaid:
        console.say(f"unsaid        {one}")
    for text in found.derived:
        console.say(f"derived       {text}")
    for text in found.around:
        console.say(f"beside        {text}")
    if found:
        console.say("equal")
    else:
        more = "in 1 place" if len(found.differences) == 1 else f"in {len(found.differences):,} places"
        console.say(f"different     {more}; of each stored tensor, the first is named")
    console.answer({"equal": bool(found), **attrs.asdict(found)})
    return Exit.DONE if found else Exit.ANSWER_IS_NO
