"""Refusals whose remedy is a line to write.

The printed line is the remedy.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ucpl
from tests.cli.command import FIXTURES
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)


def test_the_layout_that_is_shown_takes_one_rank_s_buffer(tmp_path: Path) -> None:
    """At stage 3 each rank saves its own running means of BatchNorm."""
    source = shutil.copytree(FIXTURES / "z3_dp2_subgroup", tmp_path / "source")
    file = next(source.glob("global_step*/zero_pp_rank_1_mp_rank_00_model_states.pt"))
    held = torch.load(file, weights_only=False)
    held["module"]["calls"] += 1
    torch.save(held, file)
    with pytest.raises(ucpl.UcplError, match=r"E613.*calls") as caught:
        ucpl.convert(source, tmp_path / "target", "plain()")
    remedy = caught.value.diagnostics[0].remedy
    assert '"calls" = ...  any @dp' in remedy
    (tmp_path / "own.ucpl").write_text(remedy[remedy.index("ucpl 2\n") :] + "\n")
    ucpl.convert(source, tmp_path / "target", "plain()", layout=f"{tmp_path}/own.ucpl:own()")
    ucpl.convert(FIXTURES / "z3_dp2_subgroup", tmp_path / "whole", "plain()")
    found, whole = (
        torch.load(tmp_path / name / "plain.pt", weights_only=True)["buffers"] for name in ("target", "whole")
    )
    assert torch.equal(found["calls"], whole["calls"])  # the first rank's


def test_a_frozen_expert_at_stage_2_is_refused_with_a_remedy(tmp_path: Path) -> None:
    expert = "*.deepspeed_experts.*.h.weight"
    source = FIXTURES / "moe_ep2_dp2_z1"
    with pytest.raises(
        ucpl.UcplError, match=r"E471.*deepspeed_experts.0.* is frozen and an expert's: stage 2"
    ) as caught:
        ucpl.convert(source, tmp_path / "target", "zero2(dp=2)", freeze=(expert,))
    assert "zero1(...)" in caught.value.diagnostics[0].remedy
    ucpl.convert(source, tmp_path / "target", "zero1(dp=2)", freeze=(expert,))
