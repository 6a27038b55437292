"""Results of the compiler's rooms can be printed.

A head with the layout's name, and a line for each thing in it.
"""

from __future__ import annotations

from pathlib import Path

from ucpl.graph import build
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate
from ucpl.planning import order

JOB = Path(__file__).parents[2] / "examples" / "ranks" / "job.ucpl"


def test_each_value_prints_on_its_way_from_text_to_plan() -> None:
    library = load((JOB.name, JOB.read_text()))
    four, two = (resolve(library, parse_call(f"job(dp = {dp}, tp = 2)")) for dp in (4, 2))
    assert str(four) == "job(dp = 4, tp = 2, pp = 1) of gpt, 8 ranks: 8 tensors, 2 files, 8 entries, 1 state lines"
    here, there = locate(four), locate(two)
    head, *lines = str(here).split("\n")
    assert head == "job(dp = 4, tp = 2, pp = 1): 8 tensors in 88 stored ones"
    assert lines[0] == "  weight of embed (torch): 2 boxes in 2 stored tensors"
    assert len(lines) == len(here.parts) + len(here.blobs)
    graph = build(here, there)
    plan = order(graph)
    head, *lines = str(plan).split("\n")
    assert head == "convert: job(dp = 4, tp = 2, pp = 1) -> job(dp = 2, tp = 2, pp = 1)"
    assert len(lines) == len(plan.nodes) and str(graph).split("\n") == lines[: len(graph.net)]
