"""A clause about copies holds along its axes.

Different members are put together; copies of one member are equal.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ucpl
from tests.cli.command import good
from ucpl.errors import UcplError

MODEL = "ucpl 1\n\nmodel m {\n  dim a = 4\n  dtype f32\n  w : a\n  v : a\n}\n\n"
LAYOUT = """layout x(dp, tp) of m {{
  mesh dp tp
  framework torch()
  file weights = torch "{{dp}}.{{tp}}.pt"
  w = a {clauses} as "w"
  v = a as "v"
}}
layout y(tp) of m {{
  mesh tp
  framework torch()
  file weights = torch "{{tp}}.pt"
  w = a@tp as "w"
  v = a as "v"
}}
"""


def spec(folder: Path, clauses: str) -> Path:
    path = folder / "spec.ucpl"
    path.write_text(MODEL + LAYOUT.format(clauses=clauses))
    return path


def written(folder: Path, clauses: str, change: tuple[int, int] | None = None) -> Path:
    """A checkpoint of dp 2 x tp 3 ranks.

    Member t holds its element numbers times 10 ** t, on every dp. `change`: a rank with other numbers.
    """
    (folder / "in").mkdir(parents=True)
    numbers = torch.arange(1.0, 5.0)
    for dp in range(2):
        for tp in range(3):
            own = numbers * 10**tp + (0.5 if (dp, tp) == change else 0)
            torch.save({"w": own, "v": numbers}, folder / "in" / f"{dp}.{tp}.pt")
    return spec(folder, clauses)


def converted(folder: Path, clauses: str, change: tuple[int, int] | None = None) -> list[float]:
    path = written(folder, clauses, change)
    ucpl.convert(folder / "in", folder / "out", layout=f"{path}:x(dp=2, tp=3)", to=f"{path}:y(tp=2)")
    return [x for tp in range(2) for x in torch.load(folder / "out" / f"{tp}.pt")["w"].tolist()]


@pytest.mark.parametrize(
    ("clauses", "wanted"),
    [
        ("sum @tp", [111.0, 222.0, 333.0, 444.0]),
        ("sum @tp same @dp", [111.0, 222.0, 333.0, 444.0]),
        ("any @dp sum @tp", [111.0, 222.0, 333.0, 444.0]),
        ("sum @tp @dp", [222.0, 444.0, 666.0, 888.0]),
        ("max @tp", [100.0, 200.0, 300.0, 400.0]),
        ("mean @tp", [37.0, 74.0, 111.0, 148.0]),
    ],
)
def test_copies_along_the_axes_that_are_named_are_put_together(
    tmp_path: Path, clauses: str, wanted: list[float]
) -> None:
    assert converted(tmp_path, clauses) == wanted


def test_copies_along_other_axes_are_equal_or_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UcplError, match="E613") as caught:
        converted(tmp_path, "sum @tp", change=(1, 2))
    (found,) = caught.value.diagnostics
    assert [label.file for label in found.labels] == ["0.2.pt", "1.2.pt"] and not (tmp_path / "out").exists()
    assert "sum @tp @dp" in found.remedy and "any @dp" in found.remedy


def test_of_copies_under_any_the_first_coordinate_s_is_trusted_and_the_others_are_not_looked_at(tmp_path: Path) -> None:
    for change, wanted in (((1, 2), 444.0), ((0, 2), 444.5)):
        assert converted(tmp_path / str(change), "any @dp sum @tp", change)[3] == wanted


def test_any_along_one_axis_does_not_excuse_the_other(tmp_path: Path) -> None:
    numbers = torch.arange(1.0, 5.0)
    path = written(tmp_path, "any @dp")
    for dp, tp, off in ((1, 0, 7), (1, 1, 8), (1, 2, 9), (0, 1, 0), (0, 2, 0), (0, 0, 0)):
        torch.save({"w": numbers + off, "v": numbers}, tmp_path / "in" / f"{dp}.{tp}.pt")
    here, there = f"{path}:x(dp=2, tp=3)", f"{path}:y(tp=2)"
    ucpl.convert(tmp_path / "in", tmp_path / "out", layout=here, to=there)
    assert torch.load(tmp_path / "out" / "1.pt")["w"].tolist() == [3.0, 4.0]
    torch.save({"w": numbers + 1, "v": numbers}, tmp_path / "in" / "0.2.pt")
    with pytest.raises(UcplError, match="E613"):
        ucpl.convert(tmp_path / "in", tmp_path / "other", layout=here, to=there)


def test_why_distinguishes_parts_from_their_copies(tmp_path: Path) -> None:
    path = spec(tmp_path, "sum @tp")
    good("plan", "--from", f"{path}:x(dp=2, tp=3)", "--to", f"{path}:y(tp=2)", "-o", tmp_path / "p.plan")
    printed = good("why", tmp_path / "p.plan", "w[3]").out
    assert printed.count("is a sum, one part of it") == 3 and printed.count("must equal") == 3


@pytest.mark.parametrize(
    ("clauses", "code"),
    [("mean @tp sum @dp", "E154"), ("mean @tp any @tp", "E154"), ("sum @pp", "E148")],
)
def test_clauses_that_contradict_each_other_are_refused(tmp_path: Path, clauses: str, code: str) -> None:
    with pytest.raises(UcplError, match=code) as caught:
        converted(tmp_path, clauses)
    assert re.search("@|write:", caught.value.diagnostics[0].remedy)


def test_two_homes_are_put_together_in_one_way(tmp_path: Path) -> None:
    path = written(tmp_path, "sum @tp")
    path.write_text(path.read_text().replace('  v = a as "v"', '  w = a mean @tp as "v"', 1).replace("  v : a\n", ""))
    path.write_text(path.read_text().replace('  v = a as "v"', ""))
    with pytest.raises(UcplError, match="E314"):
        ucpl.convert(tmp_path / "in", tmp_path / "out", layout=f"{path}:x(dp=2, tp=3)", to=f"{path}:y(tp=2)")


def test_the_greatest_of_copies_is_nan_where_one_is_and_zero_is_positive_where_one_is(tmp_path: Path) -> None:
    path, nan = written(tmp_path, "max @tp"), float("nan")
    held = [[nan, -0.0, -3.0, -0.0], [1.0, 0.0, -7.0, -0.0], [2.0, -0.0, -5.0, -0.0]]
    for dp in range(2):
        for tp in range(3):
            torch.save({"w": torch.tensor(held[tp]), "v": torch.arange(1.0, 5.0)}, tmp_path / "in" / f"{dp}.{tp}.pt")
    ucpl.convert(tmp_path / "in", tmp_path / "out", layout=f"{path}:x(dp=2, tp=3)", to=f"{path}:y(tp=2)")
    found = torch.cat([torch.load(tmp_path / "out" / f"{tp}.pt")["w"] for tp in range(2)])
    assert found[0].isnan() and found[1:].tolist() == [0.0, -3.0, 0.0]
    assert torch.signbit(found[1:]).tolist() == [False, True, True]


NAMES = {torch.int64: "i64", torch.uint64: "u64", torch.int32: "i32", torch.float64: "f64"}
NEAR = 2**53  # the next whole number is none of fp64


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.int64, [[NEAR, -NEAR - 2, 2**62, -1], [NEAR + 1, -NEAR - 1, 2**62 + 1, -2], [1, -(2**60), 0, -3]]),
        (torch.uint64, [[NEAR, 2**63, 1, 0], [NEAR + 1, 2**63 + 1, 2**64 - 1, 0], [1, 2, 2**64 - 2, 0]]),
        (torch.int32, [[1, -2, 3, -4], [2, -3, 2, -5], [0, -9, 1, -6]]),
        (torch.float64, [[NEAR, -1.5, 2.5, 0], [NEAR + 2, -1.25, 2.25, 0], [1, -3, 0, 0]]),
    ],
)
def test_the_greatest_of_whole_numbers_is_one_of_them(
    tmp_path: Path, dtype: torch.dtype, held: list[list[float]]
) -> None:
    path = written(tmp_path, "max @tp")
    path.write_text(path.read_text().replace("w : a", f"w : a dtype {NAMES[dtype]}"))
    for dp in range(2):
        for tp in range(3):
            mine = torch.tensor(held[tp], dtype=dtype)
            torch.save({"w": mine, "v": torch.arange(1.0, 5.0)}, tmp_path / "in" / f"{dp}.{tp}.pt")
    ucpl.convert(tmp_path / "in", tmp_path / "out", layout=f"{path}:x(dp=2, tp=3)", to=f"{path}:y(tp=2)")
    found = [x for tp in range(2) for x in torch.load(tmp_path / "out" / f"{tp}.pt")["w"].tolist()]
    assert found == [max(column) for column in zip(*held, strict=True)]


def test_the_greatest_of_whole_numbers_that_another_type_does_not_hold_is_refused_where_it_is_to_be_exact(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "max @tp")
    text = path.read_text().replace("w : a", "w : a dtype i64")
    path.write_text(text.replace('w = a@tp as "w"', 'w = a@tp as "w" dtype f64 exact'))
    for dp in range(2):
        for tp in range(3):
            mine = torch.tensor([1, 2, NEAR + tp - 1, 4], dtype=torch.int64)
            torch.save({"w": mine, "v": torch.arange(1.0, 5.0)}, tmp_path / "in" / f"{dp}.{tp}.pt")
    with pytest.raises(UcplError, match=f"E605.*{NEAR + 1}"):
        ucpl.convert(tmp_path / "in", tmp_path / "out", layout=f"{path}:x(dp=2, tp=3)", to=f"{path}:y(tp=2)")


def test_verify_holds_copies_of_a_member_against_each_other_and_members_against_nothing(tmp_path: Path) -> None:
    for name, change in (("good", None), ("bad", (1, 2))):
        path = written(tmp_path / name, "sum @tp", change)
        found = ucpl.verify(tmp_path / name / "in", layout=f"{path}:x(dp=2, tp=3)")
        assert [f.code for f in found.findings] == (["E700"] if change else []), found
        assert "w[a=0]" in found.findings[0].message if change else True
