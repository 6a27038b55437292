"""`--drop STATE`: the target lacks the state, or the call is refused.

The target says so; the refusal has a way that works.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.errors import UcplError

FIXTURES = Path(__file__).parents[1] / "fixtures"
SOURCES = {
    "megatron/legacy_buckets": "tp = 1",
    "megatron/dist_dp_reshardable_tp2": "tp = 2",
    "megatron/fsdp_tp2": "tp = 1",
    "deepspeed/z1_dp4": "dp = 2",
    "dcp/fsdp2_w4": "fsdp = 2",
}
MEGATRON = (
    "megatron_legacy({})", 'megatron_core({}, optimizer = "dp_reshardable")', "megatron_core({})", "megatron_fsdp({})"
)  # fmt: skip
TARGETS: dict[str, tuple[str, ...]] = {name: MEGATRON if name.startswith("megatron") else () for name in SOURCES}
TARGETS["deepspeed/z1_dp4"] = ("zero0()", "zero1({})", "zero3({})", "universal()", "plain()", "dcp(fsdp = 2)")
TARGETS["dcp/fsdp2_w4"] = ("dcp({})", "zero1(dp = 2)", "zero3(dp = 2)", "plain()")
CASES = [(source, target.format(SOURCES[source])) for source in SOURCES for target in TARGETS[source]]


def states_of(path: Path, to: Path) -> set[str]:
    ucpl.convert(path, to, "plain()")
    found = torch.load(to / "plain.pt", weights_only=True)
    return {state for states in found["params"].values() for state in states}


@pytest.mark.parametrize(("source", "target"), CASES)
@pytest.mark.parametrize("state", ["exp_avg_sq", "fp32"])
def test_a_state_that_is_dropped_is_named_and_absent_or_refused(
    state: str, source: str, target: str, tmp_path: Path
) -> None:
    try:
        done = ucpl.convert(FIXTURES / source, tmp_path / "made", target, drop=[state])
    except UcplError as error:
        (found,) = error.diagnostics
        assert found.code in ("E327", "E547", "E300"), found
        assert "--weights-alone" in found.remedy or "weights alone" in found.remedy or found.code == "E300"
        assert not (tmp_path / "made").exists()
        return
    assert any(text.startswith(f"{state} of ") and "dropped by name" in text for text in done.plan.dropped)
    assert state not in states_of(tmp_path / "made", tmp_path / "back")


@pytest.mark.parametrize("target", [one.format("tp = 1") for one in MEGATRON if one != "megatron_core({})"])
def test_megatrons_distributed_optimizer_has_both_moments_or_a_way_to_them(target: str, tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / "legacy_buckets"
    with pytest.raises(UcplError, match="E547: the target has exp_avg, fp32 without exp_avg_sq") as caught:
        ucpl.convert(source, tmp_path / "made", target, drop=["exp_avg_sq"])
    assert "--drop exp_avg --drop fp32" in caught.value.diagnostics[0].remedy
    ucpl.convert(source, tmp_path / "first", "plain()", drop=["exp_avg_sq"])
    ucpl.convert(tmp_path / "first", tmp_path / "made", target, fill=["exp_avg_sq=0"])
    ucpl.convert(tmp_path / "made", tmp_path / "back", "plain()")
    for folder, is_moment in ((tmp_path / "back", True), (tmp_path / "first", False)):
        held = torch.load(folder / "plain.pt", weights_only=True)["params"]
        moments = [one["exp_avg_sq"] for one in held.values() if "exp_avg_sq" in one]
        assert bool(moments) == is_moment and all(not moment.count_nonzero() for moment in moments)
    if "buckets" not in target and "dp_reshardable" not in target:
        ucpl.convert(source, tmp_path / "alone", target, drop=["exp_avg", "exp_avg_sq", "fp32"])
        assert states_of(tmp_path / "alone", tmp_path / "weights") == {"weight"}
