"""A plan as people read it: what moves where, what was decided and by whom. The head of a .plan file."""

from __future__ import annotations

from ucpl.extents import DTYPES
from ucpl.schedule.plan import Moves, Plan

LINES_MAX = 40  # of one kind, in the head of a file


def summary(plan: Plan) -> str:
    """Stable text: the same plan gives the same lines."""
    lines = [
        f"plan       {plan.name}",
        f"source     {plan.source_call}",
        f"target     {plan.target_call}",
        f"spec       sha256:{plan.spec_digest}",
        f"structure  sha256:{plan.structure_digest}",
        f"reads      {len(plan.sources):,} stored tensors in {len({s.file for s in plan.sources}):,} files",
        f"writes     {len(plan.targets):,} stored tensors in {len({t.file for t in plan.targets}):,} files,"
        f" {sum(t.numel * DTYPES[t.dtype].itemsize for t in plan.targets if t.shares is None and t.dtype):,} bytes",
    ]
    lines += [f"origin     {o.name} = {o.value!r}: {o.origin}" for o in plan.origins]
    lines += [f"derived    {text}" for text in plan.derived]
    lines += _limited([f"dropped    {text}" for text in plan.dropped])
    lines += [_line(m) for m in plan.moves]
    return "\n".join(lines) + "\n"


def _limited(lines: list[str]) -> list[str]:
    if len(lines) <= LINES_MAX:
        return lines
    return [*lines[:LINES_MAX], f"dropped    ... and {len(lines) - LINES_MAX} more"]


def _line(moves: Moves) -> str:
    word = {"copy": "extract, merge, split", "check": "check", "mean": "reduce by mean", "sum": "reduce by sum"}[
        moves.kind
    ]
    value = "" if moves.source_value == moves.target_value == (1.0, 0.0) else ", values changed"
    return f"moves      {moves.state}: {word}, {len(moves):,} runs, {moves.elements:,} elements{value}"
