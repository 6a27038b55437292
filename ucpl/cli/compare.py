"""Compare two checkpoints, whatever their layouts.

Prints the tensor, the state and the element of each difference.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.options import add_data_plane, add_json, add_order, add_quiet, data_plane
from ucpl.errors import Exit, plural

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.verification.rounding import Rounded

SHOWN = 8  # tensors that have a line each
EXAMPLE = "ucpl compare runs/on-4 runs/on-8\nucpl compare runs/on-4 exported --weights"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--as", dest="a_layout", metavar="LAYOUT", help="A's layout (default: inferred)")
    parser.add_argument("--with", dest="b_layout", metavar="LAYOUT", help="B's layout (default: inferred)")
    parser.add_argument(
        "--weights", action="store_true", help="compare weights alone, those of two dtypes in the narrower one"
    )
    parser.add_argument("--config", metavar="CONFIG", help="a config.json with the sizes of --as and --with")
    add_order(parser)
    add_data_plane(parser)
    add_quiet(parser)
    add_json(parser)


def rounded_lines(found: Sequence[Rounded]) -> list[str]:
    """One line each, if they are few.

    Otherwise one line for all of two dtypes, and the one with the largest difference.
    """
    if len(found) <= SHOWN:
        return [str(one) for one in found]
    out = []
    for a, b in dict.fromkeys((one.a, one.b) for one in found):
        some = [one for one in found if (one.a, one.b) == (a, b)]
        worst = max(some, key=lambda one: one.largest)
        differ, elements = (sum(n) for n in zip(*((one.differ, one.elements) for one in some), strict=True))
        out.append(
            f"weights of {len(some):,} tensors: {a} in A, {b} in B; {differ:,} of {elements:,} elements differ, by"
            f" {worst.largest:.3g} at most, in {worst.name} (--json names each)"
        )
    return out


def run(options: Namespace, console: Console) -> int:
    import attrs

    from ucpl import api

    found = api.compare(
        options.a,
        options.b,
        a_layout=options.a_layout,
        b_layout=options.b_layout,
        weights=options.weights,
        order=options.order or "",
        config=options.config,
        **data_plane(options),
    )
    for difference in found.differences:
        console.say(f"differs       {difference}")
    values = plural(found.values, "value")
    compared = f"{plural(found.tensors, 'tensor')}, {plural(found.elements, 'element')}, {values} next to them"
    console.say(f"compared      {compared}; buffers {bytes_text(found.bytes_live_max)} at most")
    for text in rounded_lines(found.rounded):
        console.say(f"rounded       {text}")
    for one in found.unsaid:
        console.say(f"unsaid        {one}")
    for text in found.derived:
        console.say(f"derived       {text}")
    for text in found.around:
        console.say(f"companions    {text}")
    if found.is_empty:
        console.say("not witnessed neither side has a tensor, so that nothing could differ")
    elif found and options.weights:
        console.say(f"equal         weights alone{f', in {found.narrow} where dtypes differ' if found.narrow else ''}")
    elif found:
        console.say("equal" if not found.rounded else "equal         except for rounded weights that have masters")
    else:
        console.say(
            f"different     in {plural(len(found.differences), 'place')}; of each stored tensor, the first is named"
        )
        if not found.tensors and options.a_layout is None and options.b_layout is None:
            console.say(
                "help          the tensors have other names on each side: name both, as in --as 'llama.ucpl:hf()'"
                " --with 'llama.ucpl:torch_dist(tp=2)' --config CONFIG"
            )
        if found.alone:
            console.say(f"              {found.alone} has weights alone: --weights compares these")
    console.answer({"equal": bool(found), **attrs.asdict(found)})
    return Exit.DONE if found else Exit.ANSWER_IS_NO
