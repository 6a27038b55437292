"""A plan that is made ahead of a restart.

It never leaves new data of the source out in silence.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl import UcplError

SPEC = """ucpl 1
model m {
  dim r = 4, c = 3
  w : r c
  b : r
}
layout ranks(tp) of m {
  framework torch()
  mesh tp
  file weights = torch "{tp}.pt"
  w = r@tp c  as "w"
  b = r@tp    as "b"
}
layout whole() of m {
  framework torch()
  file weights = torch "all.pt"
  w = r c  as "w"
}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two ranks; a plan reads only their `w`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.ucpl").write_text(SPEC)
    folder = tmp_path / "source"
    folder.mkdir()
    for rank in range(2):
        saved(folder, rank)
    plan = ucpl.plan("x.ucpl:ranks(tp = 2)", "x.ucpl:whole()", checkpoint="source", drop=("b",))
    ucpl.save_plan(plan, "ahead.plan")
    return folder


def saved(folder: Path, rank: int, **others: torch.Tensor) -> None:
    numbers = torch.arange(8.0) + 8 * rank
    torch.save({"w": numbers[:6].reshape(2, 3), "b": numbers[6:], **others}, folder / f"{rank}.pt")


def applied() -> list[str]:
    """Codes of the refusal, none where it was done."""
    try:
        ucpl.apply("ahead.plan", "source", "target")
    except UcplError as error:
        assert error.exit_status == 5 and not Path("target").exists()
        return [d.code for d in error.diagnostics]
    return []


def test_other_numbers_are_what_a_plan_is_for(source: Path) -> None:
    torch.save({"w": torch.full((2, 3), 7.0), "b": torch.zeros(2)}, source / "1.pt")
    assert applied() == []
    assert torch.load("target/all.pt")["w"].tolist() == [[0, 1, 2], [3, 4, 5], [7, 7, 7], [7, 7, 7]]


@pytest.mark.fault(
    "Disk and files",
    "a source with a new tensor, file, dtype or shape since the plan was made",
    "refused by name, status 5",
)
@pytest.mark.parametrize(
    "others", [{"late": torch.zeros(3)}, {"b": torch.zeros(2, dtype=torch.float16)}, {"b": torch.zeros(1, 2)}]
)
def test_a_tensor_that_came_since_or_is_another_now_is_refused_by_name(
    source: Path, others: dict[str, torch.Tensor]
) -> None:
    saved(source, 1, **others)
    with pytest.raises(UcplError, match=f"1.pt has {next(iter(others))}, .* and the plan was made without it"):
        ucpl.apply("ahead.plan", "source", "target")
    assert applied() == ["E606"]


def test_a_file_of_another_rank_is_refused_and_one_of_another_name_is_not(source: Path) -> None:
    (source / "notes.pt").write_bytes((source / "1.pt").read_bytes())
    assert applied() == []
    (source / "2.pt").write_bytes((source / "1.pt").read_bytes())
    with pytest.raises(UcplError, match=r"2\.pt is called like a file of the plan's source"):
        ucpl.apply("ahead.plan", "source", "again")


def test_an_empty_tensor_is_nothing_to_lose(source: Path) -> None:
    saved(source, 0, late=torch.zeros(0))
    assert applied() == []
