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


@pytest.mark.parametrize("source", ["megatron/legacy_buckets", "megatron/dist_adam_tp2", "megatron/fsdp_tp2"])
@pytest.mark.parametrize("target", [one.format("tp = 1") for one in MEGATRON if one != "megatron_core({})"])
def test_megatrons_distributed_optimizer_has_both_moments_or_a_way_to_them(
    source: str, target: str, tmp_path: Path
) -> None:
    with pytest.raises(UcplError, match="E547: the target has exp_avg, fp32 without exp_avg_sq") as caught:
        ucpl.convert(FIXTURES / source, tmp_path / "made", target, drop=["exp_avg_sq"])
    remedy = caught.value.diagnostics[0].remedy
    assert "--weights-alone" in remedy and "--fill exp_avg_sq=0" in remedy and "a megatron_core() folder" in remedy
    ucpl.convert(FIXTURES / source, tmp_path / "first", "megatron_core()", drop=["exp_avg_sq"])
    ucpl.convert(tmp_path / "first", tmp_path / "made", target, fill=["exp_avg_sq=0"])
    ucpl.convert(tmp_path / "made", tmp_path / "back", "plain()")
    assert "exp_avg_sq" not in states_of(tmp_path / "first", tmp_path / "second")
    held = torch.load(tmp_path / "back" / "plain.pt", weights_only=True)["params"]
    moments = [one["exp_avg_sq"] for one in held.values() if "exp_avg_sq" in one]
    assert moments and not any(moment.count_nonzero() for moment in moments)
    form = ', optimizer = "dp_reshardable"'
    assert ("and no `optimizer = " in remedy) == (form in target)
    ucpl.convert(FIXTURES / source, tmp_path / "alone", target.replace(form, ""), weights_alone=True)
    alone = states_of(tmp_path / "alone", tmp_path / "weights")
    assert (
        "exp_avg" not in alone and "exp_avg_sq" not in alone
    )  # a master is made of a weight where there are no weights


def test_names_of_stacks_in_another_format_have_a_way_to_ranks(tmp_path: Path) -> None:
    """A plain file keeps torch_dist names.

    A torch_dist folder made of it is read as modules.
    """
    ucpl.convert(FIXTURES / "megatron" / "dist_adam_tp2", tmp_path / "plain", "plain()")
    for target in ("megatron_legacy()", 'megatron_core(optimizer = "dp_reshardable")', "megatron_fsdp()"):
        with pytest.raises(UcplError, match=r"E547.*is a name of torch_dist") as caught:
            ucpl.convert(tmp_path / "plain", tmp_path / "made", target)
        assert "megatron_core()" in caught.value.diagnostics[0].remedy
    ucpl.convert(tmp_path / "plain", tmp_path / "first", "megatron_core()")
    for number, target in enumerate(("megatron_legacy()", "megatron_fsdp()")):
        for way, source in (("first", tmp_path / "first"), ("own", FIXTURES / "megatron" / "dist_adam_tp2")):
            ucpl.convert(source, tmp_path / f"{way}{number}", target)
            ucpl.convert(tmp_path / f"{way}{number}", tmp_path / f"{way}{number}.pt", "plain()")
        first, own = (torch.load(tmp_path / f"{way}{number}.pt", weights_only=True) for way in ("first", "own"))
        assert first["params"].keys() == own["params"].keys()
        for name, states in own["params"].items():
            for state, value in states.items():
                assert torch.equal(torch.as_tensor(first["params"][name][state]), torch.as_tensor(value)), (name, state)
