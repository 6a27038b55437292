"""Laws of shares.

The needs of all single ranks of a target are the complete plan, element by element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings

from tests.laws import moves as mv
from tests.laws.test_live import Vocabulary, pairs
from tests.laws.test_locate import GPT, LAYOUTS, MEGATRON, MOE
from ucpl.conversion.share import has_live_rows
from ucpl.errors import UcplError
from ucpl.extents import Key
from ucpl.graph import build
from ucpl.graph.build import DtypeOf, RankShare
from ucpl.language import parse_call
from ucpl.layout import Layout, load, resolve
from ucpl.placement import locate
from ucpl.placement.rank_ranges import Wanted
from ucpl.planning import Plan, order
from ucpl.testing import Example, layout_pairs, models
from ucpl.texts import text_at

EXPERTS = "megatron_zero1(tp = {}, pp = {}, dp = {}, ep = {})"


def share(source: Layout, target: Layout, rank: int, dtype_of: DtypeOf | None = None) -> Plan:
    """The shares of `conversion.share` for two layouts."""
    there = locate(target, rank=rank)
    here = locate(source, wanted=Wanted.of(there))
    live = (locate(source), locate(target)) if has_live_rows(source) and has_live_rows(target) else None
    return order(build(here, there, dtype_of=dtype_of, share=RankShare(live)))


def f32(file: str, key: Key) -> str:
    """Of models that say no dtypes: those of a checkpoint."""
    return "f32"


def agree(sides: Iterable[Layout], dtype_of: DtypeOf | None = None) -> int:
    """The shares of all ranks, compared with the complete plan.

    Returns the number of moved elements.
    """
    source, target = sides
    whole = order(build(locate(source), locate(target), dtype_of=dtype_of))
    want, filled = mv.fills(whole), mv.filled(whole)
    moved, checked = set[mv.Fill](), set[mv.Fill]()
    put: dict[tuple[str, str, int], list[float]] = {}
    for rank in range(max(1, target.ranks)):
        mine = share(source, target, rank, dtype_of)
        told = mv.fills(mine)
        assert all(n == 1 for n in Counter(told).values())
        moved |= {f for f in told if f.kind != "check"}
        checked |= {f for f in told if f.kind == "check"}
        put |= mv.filled(mine)
        assert len(mine.source_shelves) <= len(whole.source_shelves)
    assert moved == {f for f in want if f.kind != "check"}
    assert checked >= {f for f in want if f.kind == "check"}
    assert put == filled
    return len(moved)


def laid(file: str, call: str, sizes: dict[str, Any]) -> Layout:
    path = LAYOUTS / file
    return resolve(load((str(path), path.read_text()), read=text_at), parse_call(call), define_sizes=sizes)


@pytest.mark.parametrize(
    ("file", "source", "target", "sizes"),
    [
        ("deepspeed.ucpl", "zero3(dp = 4)", "zero3(dp = 3)", GPT),
        ("deepspeed.ucpl", "zero2_roundrobin(dp = 3)", "zero1_aligned(dp = 2)", GPT),
        ("deepspeed.ucpl", "pipe_zero1(pp = 2, dp = 3)", "pipe_zero1(pp = 2, dp = 2)", GPT),
        ("fsdp.ucpl", "fsdp2_tp(fsdp = 5, tp = 1)", "fsdp2_tp(fsdp = 3, tp = 2)", {"v": 7, "h": 6, "f": 9, "d": 2}),
        ("megatron.ucpl", "distopt(tp = 2, dp = 3)", "distopt(tp = 1, dp = 2)", MEGATRON),
        ("megatron.ucpl", "interleaved(pp = 2, vp = 2)", "legacy_pp(tp = 2, pp = 4)", MEGATRON),
        ("megatron.ucpl", "legacy_moe(tp = 2, ep = 2)", "legacy_moe(tp = 1, ep = 4)", {**MEGATRON, "e": 4}),
        ("megatron_moe.ucpl", EXPERTS.format(2, 2, 2, 2), EXPERTS.format(1, 1, 4, 4), MOE),
    ],
)  # fmt: skip
def test_the_shares_of_all_ranks_are_the_plan(file: str, source: str, target: str, sizes: dict[str, int]) -> None:
    known = None if file == "megatron_moe.ucpl" else f32
    assert agree((laid(file, call, sizes) for call in (source, target)), known)


@given(models().flatmap(layout_pairs))
@settings(max_examples=12)
def test_the_shares_of_any_two_layouts_are_their_plan(pair: tuple[Example, Example]) -> None:
    agree(e.layout() for e in pair)


@given(pairs())
@settings(max_examples=10)
def test_live_rows_go_over_in_shares_as_in_the_plan(pair: tuple[Vocabulary, Vocabulary]) -> None:
    agree(one.example.layout() for one in pair)


TEXT = """ucpl 1
model m {
  dim a = 8, b = 2
  dtype f32
  w : a b
  state s : f32
}
layout x(dp, left = 8) of m {
  mesh dp
  file weights = torch "{dp}"
  w[a] = b as "{a}"
  index a = a@spread(dp)
  state s = like in weights as "s.{a}"
}
layout less(dp) of m extends x(dp = dp) {
  w[a[..5]] = b as "{a}"
}
"""


def test_a_share_reads_of_the_source_what_meets_it_alone() -> None:
    source, target = (resolve(load(("x.ucpl", TEXT)), parse_call(call)) for call in ("x(dp = 8)", "x(dp = 3)"))
    assert [len(share(source, target, rank).source_shelves) for rank in range(3)] == [6, 6, 4]


def test_a_hole_under_a_share_is_named_and_one_next_to_it_is_not() -> None:
    source, target = (resolve(load(("x.ucpl", TEXT)), parse_call(call)) for call in ("less(dp = 2)", "x(dp = 4)"))
    assert len(share(source, target, 0).target_shelves) == 4
    with pytest.raises(
        UcplError,
        match=r"E308: 2 elements of weight that this rank holds are nowhere in the source, the first w\[a=5, b=0\]",
    ):
        share(source, target, 2)
