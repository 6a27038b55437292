"""Compare two plans: stored tensors, moves, bytes, states.

Ends 0 if they do the same, otherwise 1.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ucpl.cli.console import bytes_text
from ucpl.cli.options import add_json
from ucpl.errors import Exit

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.planning.difference import PlanDifference, Stores

EXAMPLE = "ucpl diff before.plan after.plan"
SHOWN = 8  # of one kind


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("one", metavar="A.plan")
    parser.add_argument("two", metavar="B.plan")
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    from ucpl.conversion.opening import load_plan
    from ucpl.planning.difference import difference

    found = difference(load_plan(options.one), load_plan(options.two))
    for what, ours, theirs in found.calls:
        console.say(f"{what:<10} {ours}", f"{'':<10} {theirs}")
    for text in lines(found):
        console.say(text)
    console.say("different" if found else "the same: both plans do the same")
    console.answer(difference_json(found))
    return Exit.ANSWER_IS_NO if found else Exit.DONE


def lines(found: PlanDifference) -> Iterator[str]:
    """The differences, a line each; the first of many."""
    for name, ours, theirs in found.settings:
        yield f"setting    {name}: {ours}, and {theirs}"
    for name, stores in (("reads", found.reads), ("writes", found.writes)):
        yield from _stored(name, stores)
    yield from _some("made", "of other elements, or in another way", found.made)
    for state, kind, (_, first), (_, second) in found.tallies:
        yield f"moves      {state}, {kind}: {first:,} elements, and {second:,}"
    for which in ("first", "second"):
        for name in dict.fromkeys(what for what, whose, _ in found.said if whose == which):
            texts = tuple(text for what, whose, text in found.said if (what, whose) == (name, which))
            yield from _some(name, f"by the {which} alone", texts)
    for name, which in (("read", "bytes_read"), ("sent", "bytes_sent"), ("written", "bytes_written")):
        a, b = (getattr(cost, which) for cost in found.costs)
        if a != b:
            yield f"{name:<10} {bytes_text(a)}, and {bytes_text(b)}"


def _stored(name: str, stores: Stores) -> Iterator[str]:
    yield from _some(name, "by the first alone", stores.first)
    yield from _some(name, "by the second alone", stores.second)
    yield from _some(name, "in another form", stores.other)


def _some(name: str, what: str, texts: tuple[str, ...]) -> Iterator[str]:
    if texts:
        yield f"{name:<10} {what}: {len(texts):,}"
    yield from (f"{'':<12} {text}" for text in texts[:SHOWN])
    if len(texts) > SHOWN:
        yield f"{'':<12} and {len(texts) - SHOWN:,} more"


def difference_json(found: PlanDifference) -> dict[str, object]:
    stores = {
        name: {"first": list(s.first), "second": list(s.second), "other": list(s.other)}
        for name, s in (("reads", found.reads), ("writes", found.writes))
    }
    names = ("bytes_read", "bytes_sent", "bytes_written", "runs", "files_read", "files_written")
    return {
        "equal": not found,
        "calls": [list(row) for row in found.calls],
        **stores,
        "made": list(found.made),
        "moves": [
            {
                "state": s,
                "kind": k,
                "first": {"runs": a[0], "elements": a[1]},
                "second": {"runs": b[0], "elements": b[1]},
            }
            for s, k, a, b in found.tallies
        ],
        "said": [list(row) for row in found.said],
        "settings": [list(row) for row in found.settings],
        "costs": [{name: getattr(cost, name) for name in names} for cost in found.costs],
    }
