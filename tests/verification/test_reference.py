"""A checkpoint held against a genuine one under its own layout.

The comparison, and the guesses.
"""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import ucpl
from tests.cli.command import FIXTURES
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (pickle looks for these)
from ucpl.conversion.opening import open_alike
from ucpl.conversion.opening import open_checkpoint as open_headers
from ucpl.conversion.requests import Given, called
from ucpl.conversion.sides import source_side as describe
from ucpl.errors import Diagnostic
from ucpl.extents import ParameterGroup
from ucpl.files.groups import matched
from ucpl.runtime.sources import SourceFiles
from ucpl.verification.diagnosis import Diagnosis
from ucpl.verification.reference import Boxes, ReferenceComparison, _Counted, compare_with_reference
from ucpl.verification.tiles import TILE

Tensors = dict[str, torch.Tensor]

SPEC = """ucpl 1

model m {
  dim r = 5, c = 4, l = 3
  w  : r c
  u  : l c
  s  : c
}

layout x(tp = 2) of m {
  framework torch()
  mesh tp
  file weights = torch "{tp}.pt"
  w    = pad(r, 2 * tp, undefined)@tp c  as "w"
  u[l] = c                               as "u.{l}"
  s    = c  mean @tp                     as "s"
}
"""


def rank(tp: int) -> Tensors:
    rows = torch.cat([torch.arange(20.0).view(5, 4), torch.full((3, 4), -1.0)])
    layers = {f"u.{layer}": torch.arange(4.0) * (layer + 1) + 100 * layer for layer in range(3)}
    return {"w": rows.chunk(2)[tp].contiguous(), **layers, "s": torch.arange(4.0)}


def save(folder: Path, ranks: list[Tensors]) -> None:
    folder.mkdir()
    for tp, tensors in enumerate(ranks):
        torch.save(tensors, folder / f"{tp}.pt")


def held(folder: Path, change: Callable[[list[Tensors]], object]) -> ReferenceComparison:
    (folder / "x.ucpl").write_text(SPEC)
    ranks = [rank(0), rank(1)]
    save(folder / "mine", ranks)
    change(ranks)
    save(folder / "genuine", ranks)
    found = ucpl.verify(folder / "mine", layout=f"{folder / 'x.ucpl'}:x()", against=folder / "genuine")
    assert found.against is not None and bool(found) == bool(found.against)
    return found.against


def one(found: ReferenceComparison) -> Diagnostic:
    (finding,) = found.findings
    return finding


def test_what_counts_is_worked_out_for_stored_tensors_that_differ_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    boxes = _Counted.boxes

    def counted(part: _Counted, number: int) -> Boxes:
        asked.append(number)
        return boxes(part, number)

    monkeypatch.setattr(_Counted, "boxes", counted)
    (tmp_path / "same").mkdir()
    assert held(tmp_path / "same", lambda ranks: None) and asked == []
    assert held(tmp_path, lambda ranks: ranks[1]["u.2"].zero_()).differing == 1 and len(asked) == 1


def test_what_is_the_same_is_reported_with_how_much_it_was(tmp_path: Path) -> None:
    found = held(tmp_path, lambda ranks: None)
    assert found and (found.tensors, found.elements, found.differing) == (10, 2 * (16 + 12 + 4), 0)


def test_padding_and_members_of_a_mean_have_no_say(tmp_path: Path) -> None:
    def change(ranks: list[Tensors]) -> None:
        ranks[1]["w"][1:] = 77.0
        ranks[1]["s"] += 1

    assert held(tmp_path, change)


ZERO = SPEC.replace("pad(r, 2 * tp, undefined)", "pad(r, 2 * tp)")


def padded(folder: Path, spec: str, value: float) -> ReferenceComparison:
    """Two checkpoints that differ only in padding.

    It is zero in mine and a value in the other one.
    """
    (folder / "x.ucpl").write_text(spec)
    for name, fill in (("mine", 0.0), ("genuine", value)):
        ranks = [rank(0), rank(1)]
        ranks[1]["w"][1:] = fill
        save(folder / name, ranks)
    found = ucpl.verify(folder / "mine", layout=f"{folder / 'x.ucpl'}:x()", against=folder / "genuine")
    assert found.against is not None
    return found.against


def test_padding_of_the_genuine_checkpoint_is_zero_where_the_layout_says_so(tmp_path: Path) -> None:
    """The author wrote `pad` for `pad live`: the framework trains these rows."""
    found = padded(tmp_path, ZERO, 7.0)
    finding = one(found)
    assert not found and finding.code == "E634" and "in the genuine checkpoint" in finding.message
    assert Path(finding.labels[0].file).parent.name == "genuine" and "7.0" in finding.labels[0].text
    assert "pad(x, n, live)" in finding.remedy


@pytest.mark.parametrize(("spec", "value"), [(ZERO, 0.0), (SPEC, 7.0)])
def test_padding_that_is_zero_or_may_be_anything_is_no_finding(spec: str, value: float, tmp_path: Path) -> None:
    assert padded(tmp_path, spec, value)


def test_a_comparison_that_could_not_fail_is_no_witness(tmp_path: Path) -> None:
    """Zeros under swapped names are zeros.

    The same bits, and nothing is shown.
    """

    def zeros(ranks: list[Tensors]) -> None:
        for tensors in ranks:
            for value in tensors.values():
                value.zero_()

    (tmp_path / "x.ucpl").write_text(SPEC)
    for name in ("mine", "genuine"):
        ranks = [rank(0), rank(1)]
        zeros(ranks)
        save(tmp_path / name, ranks)
    found = ucpl.verify(tmp_path / "mine", layout=f"{tmp_path / 'x.ucpl'}:x()", against=tmp_path / "genuine")
    assert found.against is not None and found.against.doubts == ("all 64 elements are 0",)
    assert any(note.startswith("not witnessed: the identity of each tensor") for note in found.notes)


def test_an_element_next_to_padding_is_compared(tmp_path: Path) -> None:
    def change(ranks: list[Tensors]) -> None:
        ranks[1]["w"][0, 3] = -5.0
        ranks[1]["w"][1:] = 77.0

    finding = one(held(tmp_path, change))
    assert finding.message == "weight of w[r=4, c=3] is 19.0 here and -5.0 there"
    assert [label.where for label in finding.labels[:2]] == ["w[0, 3]", "w[0, 3]"]
    assert [Path(label.file).parent.name for label in finding.labels[:2]] == ["mine", "genuine"]
    assert finding.notes[0] == "1 of 16 elements of this stored tensor differ"


def swap(ranks: list[Tensors]) -> None:
    for tensors in ranks:
        tensors["u.0"], tensors["u.1"] = tensors["u.1"], tensors["u.0"]


GUESSES: dict[str, tuple[Callable[[list[Tensors]], object], str]] = {
    "another layer": (swap, "these numbers are u.1 of 0.pt there: another tensor, layer or expert"),
    "another rank": (
        lambda ranks: [t.update(w=w) for t, w in zip(ranks, (ranks[1]["w"], ranks[0]["w"]), strict=True)],
        "these numbers are w of 1.pt there: another rank or stage",
    ),
    "one more": (
        lambda ranks: [t["u.2"].sub_(1) for t in ranks],
        "every element is 1 more here: `value x - 1` is missing or wrong",
    ),
    "transposed": (lambda ranks: ranks[0].update(w=ranks[0]["w"].T.contiguous()), "it is transposed"),
    "rows in another order": (
        lambda ranks: ranks[0].update(w=ranks[0]["w"][[1, 2, 0, 3]]),
        "the same numbers in another order along axis 0: position 0 here is position 2 there",
    ),
    "columns swapped": (
        lambda ranks: ranks[0].update(w=ranks[0]["w"][:, [2, 3, 0, 1]]),
        "another order along axis 1: two parts of 2 are swapped, from 0 and from 2 on",
    ),
    "all mixed": (
        lambda ranks: ranks[0].update(w=ranks[0]["w"].flatten()[[3, 9, *range(2), *range(4, 9), 2, *range(10, 16)]].view(4, 4)),
        "the same numbers in another order",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GUESSES)
def test_what_may_be_wrong_is_guessed(name: str, tmp_path: Path) -> None:
    change, said = GUESSES[name]
    found = held(tmp_path, change)
    assert found.findings and said in " ".join(found.findings[0].notes)


def test_of_a_line_the_first_is_named_and_the_others_counted(tmp_path: Path) -> None:
    found = held(tmp_path, lambda ranks: [t[f"u.{n}"].zero_() for t in ranks for n in range(3)])
    assert found.differing == 6
    assert one(found).notes[-1] == "and 5 more stored tensors of this line differ"


def test_numbers_that_stand_under_another_name_are_found(tmp_path: Path) -> None:
    found = held(tmp_path, lambda ranks: [t.update({"v.2": t.pop("u.2")}) for t in ranks])
    here, there = found.findings
    assert (here.code, there.code) == ("E703", "E704")
    assert here.notes[0] == "there, its numbers are v.2 of 0.pt"
    assert there.notes == ("here, its numbers are u.2 of 0.pt", "and 1 more that are called so, but for numbers")


def test_a_file_that_no_line_names_and_one_that_is_missing(tmp_path: Path) -> None:
    assert held(tmp_path, lambda ranks: None)
    torch.save({"w": torch.ones(1)}, tmp_path / "genuine" / "2.pt")
    (tmp_path / "genuine" / "1.pt").unlink()
    found = ucpl.verify(tmp_path / "mine", layout=f"{tmp_path / 'x.ucpl'}:x()", against=tmp_path / "genuine").against
    assert found is not None
    assert found.findings[0].message == "2.pt is there, and no line of the layout names it"
    assert {f.code for f in found.findings[1:]} == {"E703"} and found.differing == 6


STRIDED = """ucpl 1

model m {
  dim r = 3000, c = 1500
  w  : r c
}

layout x() of m {
  framework torch()
  file weights = torch "w.pt"
  w = r c  as "w"
}
"""


@pytest.fixture
def most_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read, as the files are asked for them."""
    sizes: list[int] = []
    read_into = SourceFiles.read_into

    def counted(self: SourceFiles, index: int, position: int, views: list[memoryview], size: int) -> None:
        sizes.append(size)
        read_into(self, index, position, views, size)

    read_runs = SourceFiles.read_runs

    def counted_runs(self: SourceFiles, index: int, position: int, step: int, views: Sequence[memoryview]) -> None:
        sizes.extend(map(len, views))
        read_runs(self, index, position, step, views)

    monkeypatch.setattr(SourceFiles, "read_into", counted)
    monkeypatch.setattr(SourceFiles, "read_runs", counted_runs)
    return sizes


@pytest.mark.parametrize("strided", [(True, False), (False, True), (True, True), (False, False)])
def test_a_tensor_of_any_strides_is_held_against_another_in_little_memory(
    tmp_path: Path, strided: tuple[bool, bool], most_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """18 MB of elements, and a change of two.

    No read is larger than a tile, gaps are skipped, no buffer is a tensor.
    """
    monkeypatch.setattr(Diagnosis, "of", lambda self, place: "")  # they have a bound of their own
    (tmp_path / "x.ucpl").write_text(STRIDED)
    numbers = torch.arange(3000 * 1500, dtype=torch.float32).view(3000, 1500)
    for name, lies, last in (("mine", strided[0], 0), ("genuine", strided[1], 1)):
        (tmp_path / name).mkdir()
        held = numbers.clone()
        held[2999, 0] += last
        held[2500, 1400] += last
        torch.save({"w": held.t().contiguous().t() if lies else held}, tmp_path / name / "w.pt")
    layout = called(f"{tmp_path / 'x.ucpl'}:x()")
    mine = open_headers(tmp_path / "mine", layout, Given())
    placement = describe(mine, layout, Given()).placement
    genuine = open_alike(tmp_path / "genuine", placement)
    most_read.clear()
    tracemalloc.start()
    finding = one(compare_with_reference(mine, placement, genuine))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "w[r=2500, c=1400]" in finding.message and "2 of 4,500,000 elements" in finding.notes[0]
    assert max(most_read) <= TILE and peak < 8 * TILE
    assert 2 * numbers.nbytes <= sum(most_read) <= 1.5 * 2 * numbers.nbytes


PACKED = """ucpl 1

model m {{
  dim f = 4, h = 3
  gate : f h
  up   : f h
}}

layout x(tp = 2) of m {{
  framework torch()
  mesh tp
  file weights = torch "{{tp}}.pt"
  gu = ({parts}) h  as "gu"
}}
"""


@pytest.mark.parametrize("equal", [True, False])
def test_parts_of_equal_numbers_witness_no_order(equal: bool, tmp_path: Path) -> None:
    """Gate and up that are copies, as after upcycling.

    A spec that swaps them compares equal, and says so.
    """
    gate = torch.arange(12.0).view(4, 3)
    up = gate if equal else gate + 100
    ranks = [{"gu": torch.cat([gate.chunk(2)[tp], up.chunk(2)[tp]])} for tp in range(2)]
    save(tmp_path / "mine", ranks)
    save(tmp_path / "genuine", ranks)
    for parts in ("gate: f@tp + up: f@tp", "up: f@tp + gate: f@tp"):
        (tmp_path / "x.ucpl").write_text(PACKED.format(parts=parts))
        found = ucpl.verify(tmp_path / "mine", layout=f"{tmp_path / 'x.ucpl'}:x()", against=tmp_path / "genuine")
        assert found.against is not None and found.against.is_witness
        assert any("gu and 1 more" in text for text in found.against.doubts) == equal, found.against.doubts


# ---- values of the optimizer ------------------------------------------------------------------------------------------

RUN = FIXTURES / "z1_dp2_bf16"


def changed(folder: Path, change: Callable[[Any], object]) -> Path:
    """A copy of a run with another value in each shard."""
    source = Path(shutil.copytree(RUN, folder / "genuine"))
    for file in source.rglob("*optim_states.pt"):
        value = torch.load(file, weights_only=False)
        change(value["optimizer_state_dict"]["base_optimizer_state"])
        torch.save(value, file)
    return source


GENUINE: dict[str, tuple[Callable[[Any], object], str]] = {
    "nothing": (lambda base: None, ""),
    "lr": (lambda base: base["param_groups"][1].update(lr=0.5), "lr of `"),
    "a key more": (lambda base: base["param_groups"][0].update(margin=3), "margin of `"),
    "a key less": (lambda base: base["param_groups"][0].pop("weight_decay"), "weight_decay of `"),
    "swapped": (
        lambda base: [
            g.update(lr=o["lr"], weight_decay=o["weight_decay"])
            for g, o in zip(base["param_groups"], [dict(g) for g in base["param_groups"][::-1]], strict=True)
        ],
        "weight_decay of `",
    ),
    "a step": (lambda base: [s.update(step=s["step"] + 1) for s in base["state"].values()], "step of `"),
}


@pytest.mark.parametrize("what", GENUINE)
def test_values_of_the_optimizer_are_compared_with_the_genuine_ones(tmp_path: Path, what: str) -> None:
    change, said = GENUINE[what]
    ucpl.convert(RUN, tmp_path / "mine", "zero1(dp=2)")
    found = ucpl.verify(tmp_path / "mine", against=changed(tmp_path, change), witness=False)
    assert found.against is not None
    assert bool(found) is (not said), found.against.findings
    assert {one.code for one in found.against.findings} == ({"E709"} if said else set())
    assert not said or any(one.message.startswith(said) for one in found.against.findings)


@pytest.mark.parametrize(
    "target", ["zero1(dp=3)", "zero3(dp=2)", "zero0(dp=1)", "universal()", "dcp(fsdp=2)", "plain()"]
)
def test_a_target_with_wrong_groups_is_not_kept(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hyper-parameters of two groups are swapped on their way."""

    def swapped(*args: Any) -> tuple[ParameterGroup, ...]:
        made = matched(*args)
        return tuple(evolve(one, hyper=other.hyper) for one, other in zip(made, made[::-1], strict=True))

    monkeypatch.setattr("ucpl.conversion.regrouping.matched", swapped)
    with pytest.raises(ucpl.UcplError, match="E609: ") as caught:
        ucpl.convert(RUN, tmp_path / "target", target)
    assert any("lr of `" in one.message or "weight_decay of `" in one.message for one in caught.value.diagnostics)
    assert not (tmp_path / "target").exists()
