"""Second names of tied tensors.

Over the same bytes, a name is read once. Over bytes of its own, it is compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.errors import UcplError

SOURCE = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed" / "z1_dp4"


def rewritten(tmp_path: Path, change: object = None) -> Path:
    """The checkpoint with the tied head as a tensor of its own.

    `change` optionally changes one of its values.
    """
    import shutil

    there = tmp_path / "source"
    shutil.copytree(SOURCE, there)
    file = there / "global_step3" / "mp_rank_00_model_states.pt"
    value = torch.load(file, weights_only=False)
    head = value["module"]["lm_head.weight"].clone()
    if change is not None:
        head[3, 4] += 1
    value["module"]["lm_head.weight"] = head
    torch.save(value, file)
    return there


def test_one_storage_under_two_names_is_read_once(tmp_path: Path) -> None:
    tied = ucpl.convert(SOURCE, tmp_path / "a", to="zero1(dp=2)").report
    apart = ucpl.convert(rewritten(tmp_path), tmp_path / "b", to="zero1(dp=2)").report
    assert apart.bytes_read - tied.bytes_read == 67 * 24 * 4


def test_two_storages_under_two_names_are_compared(tmp_path: Path) -> None:
    with pytest.raises(UcplError, match="E613") as caught:
        ucpl.convert(rewritten(tmp_path, change=True), tmp_path / "b", to="zero1(dp=2)")
    assert "lm_head.weight" in str(caught.value.diagnostics[0])
    assert not (tmp_path / "b").exists()
