"""FSDP1's flat parameters of each rank, with truth gathered by torch.

A job of four ranks wrote the fixture. A module's flat parameter has a run on each rank, which begins and ends within
rows; of the smallest ones the last ranks have nothing. Three steps of AdamW; its states are flat, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.files.values import bare
from tests.formats.dcp.test_dcp import FIXTURES, assert_equal, held_by_plain
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint

FOLDER = FIXTURES / "fsdp1_local_w4"


def truth() -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = torch.load(f"{FOLDER}.truth.pt", weights_only=True)
    return held


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(FOLDER, tmp_path / "copy")


def changed(folder: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / f"rank_{rank}.pt"
    held = torch.load(file, weights_only=True)
    change(held)
    torch.save(held, file)


def refused(folder: Path, code: str, said: str) -> None:
    with pytest.raises(UcplError, match=said) as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == code


def test_weights_and_states_are_read_exactly(tmp_path: Path) -> None:
    ucpl.convert(FOLDER, tmp_path / "plain.pt", to="plain()")
    assert_equal(held_by_plain(tmp_path / "plain.pt"), truth())
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert plain["groups"][0]["lr"] == 0.01 and len(plain["groups"][0]["params"]) == len(plain["params"]) == 12
    assert plain["envelope"]["carried"] == {"step": 3} and [*plain["buffers"]] == ["seen"]


def test_what_infer_writes_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "own.ucpl").write_text(ucpl.infer(FOLDER).text())
    ucpl.convert(FOLDER, tmp_path / "plain.pt", to="plain()", layout=f"{tmp_path}/own.ucpl:stored()")
    assert_equal(held_by_plain(tmp_path / "plain.pt"), truth())


@pytest.mark.parametrize("form", ["zero1(dp=3)", "dcp(fsdp=3)", "universal()"])
def test_it_goes_to_other_forms(tmp_path: Path, form: str) -> None:
    """No mesh makes such chunks: they have a layout of their own.

    DeepSpeed's masters are made from the weights.
    """
    ucpl.convert(FOLDER, tmp_path / "there", to=form)
    assert ucpl.compare(FOLDER, tmp_path / "there") and ucpl.verify(tmp_path / "there")


def test_parts_under_their_own_names_are_views(copy: Path) -> None:
    """`use_orig_params`: the optimizer's numbers count parameters in an unknown order."""
    for rank in range(4):
        changed(copy, rank, lambda held: held["state"].update({"layers.0.a.weight": torch.zeros(rank)}))  # noqa: B023
    found = open_checkpoint(copy)
    assert {t.states for t in found.state.tensors} == {()}
    assert [("use_orig_params" in one.why, one.is_optimizer) for one in found.not_read] == [(True, True)]
    ucpl.convert(copy, copy.parent / "plain.pt", to="plain()", weights_alone=True)
    assert_equal(held_by_plain(copy.parent / "plain.pt"), {k: t for k, t in truth().items() if k.startswith("model.")})


def test_alignment_between_parameters_has_no_tensor(copy: Path) -> None:
    """FSDP1's alignment with use_orig_params: a gap behind the first tensor."""
    flat = torch.cat(
        [torch.load(copy / f"rank_{r}.pt", weights_only=True)["state"]["tiny._flat_param"] for r in (0, 1)]
    )
    said = {"numels_with_padding": [1, 3, 1, 1], "is_padding_mask": [False, True, False, True]}
    whole = torch.cat([flat[:1], torch.full((3,), 7.0), flat[1:], torch.full((1,), 7.0)])
    for rank in range(4):
        changed(
            copy,
            rank,
            lambda held: (
                held["flat_meta"]["_fsdp_wrapped_module.tiny"].update(said),
                held["state"].update({"tiny._flat_param": whole[2 * rank : 2 * rank + 2]}),  # noqa: B023
                held.pop("optim"),
            ),
        )
    ucpl.convert(copy, copy.parent / "plain.pt", to="plain()")
    assert_equal(held_by_plain(copy.parent / "plain.pt"), {k: t for k, t in truth().items() if k.startswith("model.")})


def test_what_does_not_agree_is_refused(copy: Path) -> None:
    kept = (copy / "rank_1.pt").read_bytes()
    changed(copy, 1, lambda held: held["state"].pop("layers.0.a._flat_param"))
    refused(copy, "E456", r"rank_1\.pt lacks elements 10 to 20 of `layers\.0\.a\._flat_param`")
    (copy / "rank_1.pt").write_bytes(kept)
    changed(copy, 1, lambda held: held["state"].update({"layers.0.a._flat_param": torch.zeros(9)}))
    refused(copy, "E455", "10 elements of a flat parameter of 40")
    (copy / "rank_1.pt").write_bytes(kept)
    changed(copy, 1, lambda held: held["flat_meta"].pop("_fsdp_wrapped_module.tiny"))
    refused(copy, "E456", r"rank_1\.pt has other flat parameters than rank_0\.pt")
    (copy / "rank_1.pt").write_bytes(kept)
    changed(copy, 1, lambda held: held["state"].update(seen=torch.arange(3) + 1))
    refused(copy, "E700", "copies of `seen` differ")
    for file in copy.glob("*.pt"):
        bare(file)
    refused(copy, "E700", "copies of `seen` differ")
    (copy / "rank_1.pt").write_bytes(kept)
    changed(copy, 1, lambda held: held["state"].update(seen=torch.arange(4)))
    refused(copy, "E456", r"`seen` is \[3\] i64 in one file, and \[4\] i64 in another")
    (copy / "rank_1.pt").unlink()
    refused(copy, "E452", r"rank_1\.pt is missing")


def test_handles_that_contradict_themselves_are_refused(copy: Path) -> None:
    kept = {file: file.read_bytes() for file in copy.iterdir()}
    for change, said in (
        ({"numels_with_padding": [1, 2]}, r"expected is 1 for `bias`"),
        ({"is_padding_mask": [False]}, "as many names, shapes and lengths"),
        ({"fqns": ["weight", "weight"]}, "each parameter in one flat parameter"),
    ):
        for file, data in kept.items():
            file.write_bytes(data)
        changed(copy, 0, lambda held: held["flat_meta"]["_fsdp_wrapped_module.tiny"].update(change))  # noqa: B023
        refused(copy, "E455", said)


def test_other_files_of_that_name_are_no_such_checkpoint(tmp_path: Path) -> None:
    torch.save({"state": {}}, tmp_path / "rank_0.pt")
    refused(tmp_path, "E435", "is no known checkpoint")
    (tmp_path / "rank_0.pt").write_bytes(b"a text")
    refused(tmp_path, "E435", "is no known checkpoint")
