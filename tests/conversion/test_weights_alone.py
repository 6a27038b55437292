"""A run whose optimizer shards are all gone is converted as weights only where somebody says that this is meant."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import ucpl
from tests.cli.command import ucpl as command
from tests.stores import deepspeed_stand_ins  # noqa: F401  (what pickle looks for)

FIXTURES = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[1] / "fixtures")) / "deepspeed"
GONE = {
    "z1_dp4": "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing .and 3 more, to zero_pp_rank_3_mp_rank_00_",
    "z1_dp2_bf16": "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt is missing .and 1 more",
    "z2_dp3_frozen": "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing .and 2 more",
    "pp2_dp2_z1": "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing .and 3 more, to zero_pp_rank_1_mp_rank_01_",
}


def without_shards(name: str, to: Path) -> Path:
    shutil.copytree(FIXTURES / name, to)
    for shard in to.glob("global_step*/*_optim_states.pt"):
        shard.unlink()
    return to


@pytest.mark.parametrize("name", GONE)
def test_it_is_refused_by_the_files_that_are_gone(name: str, tmp_path: Path) -> None:
    source = without_shards(name, tmp_path / "source")
    with pytest.raises(ucpl.UcplError, match=f"E467.*{GONE[name]}"):
        ucpl.convert(source, tmp_path / "target", "plain()")
    with pytest.raises(ucpl.UcplError, match="E467"):
        ucpl.plan(str(source), "plain()")
    assert not (tmp_path / "target").exists()
    assert "no shard of the optimizer is there" in command("inspect", source).out


@pytest.mark.parametrize("name", GONE)
def test_the_weights_go_over_where_that_is_said(name: str, tmp_path: Path) -> None:
    source = without_shards(name, tmp_path / "source")
    done = command("convert", source, tmp_path / "target", "--to", "plain()", "--weights-alone")
    assert done.status == 0, done.err
    found = torch.load(tmp_path / "target" / "plain.pt", weights_only=True)["params"]
    whole = ucpl.convert(FIXTURES / name, tmp_path / "whole", "plain()")
    assert whole
    held = torch.load(tmp_path / "whole" / "plain.pt", weights_only=True)["params"]
    assert found.keys() == held.keys()
    for tensor, states in held.items():
        for state in ("weight", "buffer"):
            assert state not in states or torch.equal(found[tensor][state], states[state])


def test_a_folder_that_never_had_an_optimizer_needs_no_word(tmp_path: Path) -> None:
    source = without_shards("z1_dp4", tmp_path / "source")
    ucpl.convert(source, tmp_path / "there", "zero0(dp=2)", weights_alone=True)
    ucpl.convert(tmp_path / "there", tmp_path / "back", "plain()")
