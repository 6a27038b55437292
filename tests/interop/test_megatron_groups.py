"""Parameter groups of Megatron's targets, with its own loader and schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

import ucpl
from ucpl.formats.opening import open_checkpoint

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parents[1] / "fixtures"
OWN = {1.0: {"max_lr": 0.5, "min_lr": 0.125, "lr": 0.25}, 0.0: {"max_lr": 0.03, "min_lr": 0.01, "lr": 0.02}}
WAYS: dict[str, tuple[str, ...]] = {
    "megatron_core()": (),
    "megatron_legacy()": ("zero1(dp = 2)",),
    'megatron_core(optimizer = "dp_reshardable")': ("dcp(fsdp = 2)", "zero3(dp = 2)"),
    "megatron_fsdp()": ("universal()",),
}


def groups_in(folder: Path) -> list[dict[str, Any]]:
    """Groups of a Megatron folder, as torch reads the files.

    Those of buckets and of Megatron-FSDP are read by ucpl.
    """
    for common in folder.glob("iter_*/common.pt"):
        held = torch.load(common, weights_only=False).get("optimizer", {}).get("optimizer", {})
        if found := held.get("param_groups"):
            return found
    for model in folder.glob("iter_*/mp_rank_*/model_optim_rng.pt"):
        return torch.load(model, weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    return [{**group.hyper} for group in open_checkpoint(folder).state.groups]


def stepped(groups: list[dict[str, Any]], *, current: dict[float, float]) -> dict[float, float]:
    """The rate of each group after a step of Megatron's schedule.

    Its own rates are 1.0 and 0.1.
    """
    saved = [{**group, "params": []} for group in groups]
    mine = [
        {"wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "params": []}
        for decay in sorted(current)
    ]
    found = MegatronOptimizer._filter_and_reorder_param_groups(mine, saved)
    assert {group["wd_mult"]: group["lr"] for group in found} == current

    class Held:
        param_groups = found

    schedule = OptimizerParamScheduler(
        Held(), init_lr=0.0, max_lr=1.0, min_lr=0.1, lr_warmup_steps=0, lr_decay_steps=4, lr_decay_style="linear",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=4, wd_incr_style="constant",
    )  # fmt: skip
    schedule.step(3)
    return {group["wd_mult"]: group["lr"] for group in found}


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, Any]:
    ucpl.convert(FIXTURES / "megatron" / "legacy_buckets", tmp_path / "plain", "plain()")
    return torch.load(tmp_path / "plain" / "plain.pt", weights_only=False)


@pytest.mark.parametrize("target", WAYS)
def test_rates_of_groups_come_back_and_step_as_they_did(target: str, plain: dict[str, Any], tmp_path: Path) -> None:
    for group in plain["groups"]:
        group |= OWN[group["wd_mult"]]
    source = tmp_path / "source.pt"
    torch.save(plain, source)
    for n, way in enumerate((*WAYS[target], target)):
        ucpl.convert(source, tmp_path / str(n), way)
        source = tmp_path / str(n)
    rates = stepped(groups_in(source), current={1.0: 0.25, 0.0: 0.02})
    wanted = {decay: own["max_lr"] - 0.75 * (own["max_lr"] - own["min_lr"]) for decay, own in OWN.items()}
    assert rates == pytest.approx(wanted)


@pytest.mark.parametrize("target", WAYS)
def test_rates_that_a_source_lacks_are_the_jobs_own(target: str, plain: dict[str, Any], tmp_path: Path) -> None:
    """A group of torch has one rate: its bounds are the schedule's."""
    for group in plain["groups"]:
        kept = {key: group[key] for key in ("params", "betas", "eps")}
        group.clear()
        group |= {**kept, "lr": 0.25, "weight_decay": 0.1}
    torch.save(plain, tmp_path / "source.pt")
    ucpl.convert(tmp_path / "source.pt", tmp_path / "made", target)
    groups = groups_in(tmp_path / "made")
    assert not any({"max_lr", "min_lr"} & group.keys() for group in groups)
    assert stepped(groups, current={1.0: 0.25, 0.0: 0.25}) == pytest.approx({1.0: 0.325, 0.0: 0.325})
