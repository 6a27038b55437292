"""Non-tensor values in torch files that only a spec describes.

Each fate is tested over real files with random states.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.cli.command import good
from ucpl.errors import UcplError

SPEC = """ucpl 1

model m {{
  dim a = 12
  dtype f32
  w : a
}}

layout x(dp) of m {{
  mesh dp
  framework torch()
  file weights = torch "w_{{dp}}.pt"
  file meta    = torch "meta_{{dp}}.pt"
  w = a@dp  as "w"
  {lines}
}}
"""
KEEP = 'blob rng @dp keep as "state/rng"\n  blob step keep in weights'


def spec(folder: Path, lines: str, name: str = "spec") -> str:
    (folder / f"{name}.ucpl").write_text(SPEC.format(lines=lines))
    return f"{folder / name}.ucpl"


def rng(rank: int) -> dict[Any, Any]:
    torch.manual_seed(rank)
    return {"torch": torch.get_rng_state(), "numpy": ("MT19937", (rank, 2, 3), 0.5), 0: [rank], "none": None}


def source(folder: Path, dp: int, step: Any = None) -> Path:
    """Ranks with part of w and a random state each.

    All files hold the same step.
    """
    top = folder / "source"
    top.mkdir()
    for rank, part in enumerate(torch.arange(12.0).chunk(dp)):
        held = {"n": 7, 0: "seven"} if step is None else step(rank)
        torch.save({"w": part.clone(), "step": held}, top / f"w_{rank}.pt")
        torch.save({"state": {"rng": rng(rank)}}, top / f"meta_{rank}.pt")
    return top


def converted(folder: Path, lines: str, dp: int, to: int) -> tuple[Any, Path]:
    ours, theirs = spec(folder, KEEP, "ours"), spec(folder, lines, "theirs")
    top = folder / f"target{to}"
    done = ucpl.convert(source(folder, dp), top, layout=f"{ours}:x(dp={dp})", to=f"{theirs}:x(dp={to})")
    return done.plan, top


def same(a: object, b: object) -> bool:
    match a, b:
        case dict(), dict():
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        case torch.Tensor(), torch.Tensor():
            return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def ranks(top: Path, dp: int) -> list[Any]:
    """Of each rank: which of the source's random states it has."""
    out = []
    for rank in range(dp):
        weights = torch.load(top / f"w_{rank}.pt")
        assert torch.equal(weights["w"], torch.arange(12.0).chunk(dp)[rank])
        assert same(weights["step"], {"n": 7, 0: "seven"})
        held = torch.load(top / f"meta_{rank}.pt", weights_only=False)["state"]["rng"]
        out.append(next(r for r in range(8) if same(held, rng(r))))
    return out


@pytest.mark.parametrize(
    ("fate", "dp", "to", "want", "said"),
    [
        ("keep", 3, 3, [0, 1, 2], "rng: kept, one for each of dp = 3"),
        ("first", 2, 3, [0, 0, 0], "rng: the value at dp=0, for each of dp = 3"),
        (
            "remap", 2, 4, [0, 1, 0, 1],
            "rng: dp = 2 to dp = 4, each coordinate modulo the source's:"
            " dp=2 gets the value of dp=0, dp=3 gets the value of dp=1",
        ),
        (
            "remap", 4, 2, [0, 1],
            "rng: dp = 4 to dp = 2, each coordinate modulo the source's: 2 of the source's values are left out",
        ),
    ],
)  # fmt: skip
def test_each_rank_has_the_value_that_its_fate_says(
    fate: str, dp: int, to: int, want: list[int], said: str, tmp_path: Path
) -> None:
    plan, top = converted(tmp_path, KEEP.replace("keep", fate, 1), dp, to)
    assert ranks(top, to) == want
    assert [b.said for b in plan.target.blobs] == [said, "step: kept, one for all"]
    assert plan.dropped == ()
    assert not ucpl.verify(top).findings  # by the layout that it carries


def test_what_is_dropped_is_named_and_is_not_there(tmp_path: Path) -> None:
    plan, top = converted(tmp_path, 'blob rng @dp drop as "state/rng"', 2, 4)
    assert plan.dropped == (
        "blob of rng: its line in the target says drop",
        "blob of step: the target names no such blob",
    )
    assert sorted(p.name for p in top.glob("*.pt")) == [f"w_{r}.pt" for r in range(4)]
    assert set(torch.load(top / "w_0.pt")) == {"w"}


def test_a_name_on_the_command_line_drops_it_too(tmp_path: Path) -> None:
    ours = spec(tmp_path, KEEP)
    top = source(tmp_path, 2)
    done = ucpl.convert(top, tmp_path / "out", layout=f"{ours}:x(dp=2)", to=f"{ours}:x(dp=3)", drop=("rng",))
    assert done.plan.dropped == ("blob of rng: dropped by name",)


def test_a_plan_carries_it_into_another_process(tmp_path: Path) -> None:
    top, one = source(tmp_path, 2), spec(tmp_path, KEEP.replace("keep", "remap", 1))
    printed = good("plan", "--from", f"{one}:x(dp=2)", "--to", f"{one}:x(dp=4)", "-o", tmp_path / "a.plan").out
    assert "carried    step: kept, one for all" in printed
    good("apply", tmp_path / "a.plan", top, tmp_path / "out")
    assert ranks(tmp_path / "out", 4) == [0, 1, 0, 1]


def test_copies_of_one_value_that_differ_are_refused_and_found(tmp_path: Path) -> None:
    top, one = source(tmp_path, 2, step=lambda rank: {"n": 7 + rank}), spec(tmp_path, KEEP)
    with pytest.raises(UcplError, match=r"E334: two copies of blob `step` differ: step.n is 7 and 8"):
        ucpl.convert(top, tmp_path / "out", layout=f"{one}:x(dp=2)", to=f"{one}:x(dp=2)")
    assert not (tmp_path / "out").exists()
    assert [d.code for d in ucpl.verify(top, layout=f"{one}:x(dp=2)").findings] == ["E334"]
    free = spec(tmp_path, KEEP.replace("step keep", "step first"), "free")
    ucpl.convert(top, tmp_path / "out", layout=f"{one}:x(dp=2)", to=f"{free}:x(dp=2)")
    assert torch.load(tmp_path / "out" / "w_1.pt")["step"] == {"n": 7}


def test_compare_holds_them_against_each_other(tmp_path: Path) -> None:
    _, there = converted(tmp_path, KEEP, 2, 2)
    layouts = f"{spec(tmp_path, KEEP)}:x(dp=2)"
    assert ucpl.compare(tmp_path / "source", there, a_layout=layouts, b_layout=layouts)
    held = torch.load(there / "meta_1.pt", weights_only=False)
    held["state"]["rng"]["torch"][9] += 1
    torch.save(held, there / "meta_1.pt")
    (found,) = ucpl.compare(tmp_path / "source", there, a_layout=layouts, b_layout=layouts).differences
    assert found.kind == "carried" and found.name == "blob rng.torch[9]" and "meta_1.pt" in found.b_place


def test_a_value_that_is_not_where_the_layout_says_is_refused(tmp_path: Path) -> None:
    top, one = source(tmp_path, 2), spec(tmp_path, 'blob rng @dp keep as "state/rngs"')
    with pytest.raises(UcplError, match=r"E391: meta_0\.pt has no state/rngs") as caught:
        ucpl.convert(top, tmp_path / "out", layout=f"{one}:x(dp=2)", to=f"{one}:x(dp=2)")
    assert caught.value.diagnostics[0].labels[-1].line


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch harmed",)


def test_what_would_run_code_is_carried_only_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    top, one = source(tmp_path, 2), spec(tmp_path, KEEP)
    torch.save({"state": {"rng": Harmful()}}, top / "meta_1.pt")
    with pytest.raises(UcplError, match=r"E504.*system"):
        ucpl.convert(top, tmp_path / "out", layout=f"{one}:x(dp=2)", to=f"{one}:x(dp=2)")
    assert not (tmp_path / "out").exists() and not (tmp_path / "harmed").exists()


def test_dicts_of_numbers_stay_dicts_and_tensors_go_over_with_their_strides(tmp_path: Path) -> None:
    top, one = source(tmp_path, 2), spec(tmp_path, 'blob rng @dp keep as "state/rng"')
    shared = torch.arange(6).view(2, 3)
    value = {0: "a", 1: {0: shared.T, 1: shared}, "empty": torch.zeros(0, 2)}
    for rank in range(2):
        torch.save({"state": {"rng": value}}, top / f"meta_{rank}.pt")
    ucpl.convert(top, tmp_path / "out", layout=f"{one}:x(dp=2)", to=f"{one}:x(dp=2)")
    found = torch.load(tmp_path / "out" / "meta_1.pt")["state"]["rng"]
    assert same(found, value)
