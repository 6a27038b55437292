"""The share of one rank as a caller asks for it.

Of a checkpoint, of specs, with changes by name; compared with the complete plan.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.command import FIXTURES
from tests.laws import moves as mv
from ucpl.cli.plan import rank_lines
from ucpl.conversion import share, sides
from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked, described, statement
from ucpl.conversion.requests import Given
from ucpl.conversion.share import share_of
from ucpl.errors import UcplError
from ucpl.vault.layout_writer import LayoutWriter

SOURCE = str(FIXTURES / "z1_dp4")
SPECS = Path(__file__).parents[2] / "benchmarks"


def agree(asked: Asked, given: Given) -> None:
    made = planned(asked, given)
    want = {f for f in mv.fills(made.plan) if f.kind != "check"}
    shares = [share_of(asked, given, rank) for rank in range(made.target.layout.ranks)]
    assert {f for one in shares for f in mv.fills(one.plan) if f.kind != "check"} == want
    held = [{(t.file, t.key) for t in one.plan.targets} for one in shares]
    assert set().union(*held) == {(t.file, t.key) for t in made.plan.targets}


@pytest.mark.parametrize("to", ["zero3(dp=3)", "zero1(dp=2)", "dcp(fsdp=3)"])
def test_shares_of_a_checkpoint_s_target_are_its_plan(to: str) -> None:
    agree(Asked(SOURCE, to), Given())


@pytest.mark.parametrize("to", ["zero3(dp=3)", "zero1(dp=2)", "dcp(fsdp=3)"])
def test_a_share_of_tensors_planned_as_one_is_that_of_each(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(SOURCE, to)
    monkeypatch.setattr(sides, "FAMILIES_FROM", 1)
    agree(asked, Given())
    made = {}
    for count in (1, 10**9):
        monkeypatch.setattr(sides, "FAMILIES_FROM", count)
        made[count] = share_of(asked, Given(), 1).plan
    together, alone = made.values()
    assert together.families and not alone.families
    assert Counter(mv.fills(together)) == Counter(mv.fills(alone))
    assert {(t.file, t.key) for t in together.targets} == {(t.file, t.key) for t in alone.targets}
    lines = rank_lines(together, 1)
    assert len(lines) < len(rank_lines(alone, 1))
    assert lines and all(line.startswith("rank 1     ") for line in lines)
    assert any(re.search(r", and [0-9]+ more$", line) for line in lines)


def test_the_source_of_a_share_is_not_enumerated() -> None:
    file = SPECS / "fsdp.ucpl"
    made = share_of(Asked(f"{file}:fsdp(dp = 4096)", f"{file}:fsdp(dp = 3072)"), Given(), 1000)
    assert len(made.plan.source_shelves) < 12_000 < len(made.plan.target_shelves) * 4
    ranks = {rank for shelf in made.plan.source_shelves.shelves for rank in shelf.block.rank.tolist()}
    assert len(ranks) <= 12


def test_nor_is_that_of_a_statement() -> None:
    """`ucpl plan FILE NAME --rank R` takes as long as the same calls with --from and --to."""
    one, other, statement_ = statement(str(SPECS / "moe.ucpl"), "shrink", Given())
    made = share_of(Asked(one, other, name=statement_.name), Given(), 1999)
    assert made.source.given.bare and len(made.plan.source_shelves) < 50_000
    here, there = (f"{SPECS / 'moe.ucpl'}:{text}" for text in (made.plan.source_call, made.plan.target_call))
    again = share_of(Asked(here, there), Given(), 1999)
    assert [str(node) for node in made.plan.nodes] == [str(node) for node in again.plan.nodes]


def test_a_writer_of_a_layout_describes_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of all ranks and one rank's share use one description."""
    calls: list[object] = []

    def counted(*given: object) -> object:
        calls.append(given)
        return described(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(share, "described", counted)
    (tmp_path / "own.ucpl").write_text(
        "ucpl 2\nlet high = 4, wide = 2\nmodel m {\n  a : high wide\n  dtype f32\n}\n"
        "layout own(dp) of m {\n  framework torch()\n  mesh dp\n"
        '  file weights = torch "part_{dp}.pt"\n  a = high@dp wide  as "a"\n}\n'
    )
    made = LayoutWriter.of(f"{tmp_path / 'own.ucpl'}:own(dp=2)", 1)
    assert {text: tensor.shape for text, tensor in made.wanted.items()} == {"a": (2, 2)} and len(calls) == 1


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(UcplError, match="E180"):
        share_of(Asked(SOURCE, "zero1(dp=2)"), Given(), 2)


def test_shares_follow_what_is_changed_by_name() -> None:
    example = Path(__file__).parents[2] / "examples" / "checkpoint"
    agree(Asked(str(example), "zero1(dp=2)"), Given(train=("position.weight",), freeze=("norm.*",), drop=("seen",)))
    agree(Asked(str(example), "zero3(dp=3)"), Given(drop=("exp_avg",)))
