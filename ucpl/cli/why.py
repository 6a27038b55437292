"""Trace an element of a target to file, key and position.

Of every state. Needs the plan alone.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from ucpl.cli.options import add_json
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.conversion.tracing import Traced

EXAMPLE = "ucpl why grow.plan 'wte.weight[3, 17]'\nucpl why grow.plan wte.weight --state exp_avg"

SHOWN = 50
VERBS = {
    "copy": "is",
    "check": "must equal",
    "mean": "is the mean of copies, one of them",
    "sum": "is a sum, one part of it",
    "max": "is the greatest of copies, one of them",
    "scale": "times the scale",
}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("plan", metavar="FILE.plan")
    parser.add_argument(
        "element", metavar="TENSOR[INDEX...]", help="an element, wte.weight[3, 17]; or a tensor, for all its runs"
    )
    parser.add_argument("--state", metavar="STATE", help="only this state: weight, fp32, exp_avg, ...")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.conversion.opening import load_plan
    from ucpl.conversion.tracing import traced

    name, found = traced(load_plan(options.plan), options.plan, options.element, options.state)
    for one in found[:SHOWN]:
        console.say(*lines(one))
    if len(found) > SHOWN:
        console.say(f"... and {len(found) - SHOWN:,} more; --json has all")
    if not found:
        console.say(f"{name} has no such state in this plan")
    console.answer({"tensor": name, "from": [trace_json(one) for one in found]})
    return Exit.DONE if found else Exit.ANSWER_IS_NO


def lines(one: Traced) -> tuple[str, str, str]:
    """The element, its place, and its origin."""
    size = f" ({one.elements:,} elements from there on)" if one.elements > 1 else ""
    rounded = ", rounded to nearest even" if one.rounded else ""
    return (
        f"{one.state} of {one.element}",
        f"  at   {one.target.file}: {one.target.key}{[*one.target.index]}",
        f"  {VERBS[one.kind].ljust(4)} {one.source.file}: {one.source.key}{[*one.source.index]}{size}{rounded}",
    )


def trace_json(one: Traced) -> dict[str, object]:
    """The same for --json."""
    return {
        "element": one.element,
        "state": one.state,
        "kind": one.kind,
        "rounded": one.rounded,
        "elements": one.elements,
        "source_file": one.source.file,
        "source_key": one.source.key,
        "source_index": [*one.source.index],
        "target_file": one.target.file,
        "target_key": one.target.key,
        "target_index": [*one.target.index],
    }
