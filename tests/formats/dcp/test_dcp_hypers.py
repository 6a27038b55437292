"""Keys of parameter groups in DCP targets: the source's, without torch's defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_all

import ucpl
from tests.cli.command import ucpl as command
from ucpl.errors import UcplError

OPEN = "decoupled_weight_decay"


def job(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = torch.nn.Linear(4, 3)
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.01, weight_decay=0.1)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def save(kind: str, folder: Path, without: tuple[str, ...] = ()) -> Path:
    """A folder as torch saves it.

    `without`: keys that an older release lacks.
    """
    states: Any
    weights, states = get_state_dict(*job(kind))
    for group in states["param_groups"]:
        for key in without:
            del group[key]
    save_all({"model": weights, "optim": states}, checkpoint_id=folder)
    return folder


def loaded(kind: str, folder: Path) -> dict[str, Any]:
    """The groups of a job that has loaded a folder."""
    module, optimizer = job(kind)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    weights, states = get_state_dict(module, optimizer)
    held: dict[str, Any] = {"model": weights, "optim": states}
    load(held, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"])
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


@pytest.fixture(autouse=True)
def quiet(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    recwarn.clear()


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad"])
def test_a_job_finds_its_own_keys_and_values(kind: str, tmp_path: Path) -> None:
    source = save(kind, tmp_path / "source")
    ucpl.convert(source, tmp_path / "made", "dcp(fsdp = 2)")
    before = {key: value for key, value in job(kind)[1].param_groups[0].items() if key != "params"}
    assert loaded(kind, tmp_path / "made") == before
    ucpl.convert(tmp_path / "made", tmp_path / "plain.pt", "plain()")
    (group,) = torch.load(tmp_path / "plain.pt", weights_only=True)["groups"]
    assert group.keys() - {"params"} == before.keys()  # no key more than torch's own


def test_which_of_adam_and_adamw_it_is_is_left_to_the_user(tmp_path: Path) -> None:
    source = save("Adam", tmp_path / "source", without=(OPEN,))
    told = command("convert", str(source), str(tmp_path / "made"), "--to", "dcp(fsdp = 2)")
    assert told.status == 0 and f"lack {OPEN}" in told.err + told.out
    with pytest.raises(CheckpointException, match=OPEN):
        loaded("Adam", tmp_path / "made")
    for value, kind in ((0, "Adam"), (1, "AdamW")):
        ucpl.convert(source, tmp_path / kind, f"dcp(fsdp = 2, {OPEN} = {value})")
        assert loaded(kind, tmp_path / kind)[OPEN] is bool(value)


def test_a_source_that_says_it_is_not_contradicted(tmp_path: Path) -> None:
    source = save("Adam", tmp_path / "source")
    with pytest.raises(UcplError) as caught:
        ucpl.convert(source, tmp_path / "made", f"dcp(fsdp = 2, {OPEN} = 1)")
    assert caught.value.diagnostics[0].code == "E471"


@pytest.mark.parametrize(("kind", "params", "value"), [("AdamW", {}, True), ("Adam", {"adam_w_mode": False}, False)])
def test_what_ds_config_says_of_an_optimizer_that_deepspeed_makes(
    kind: str, params: dict[str, object], value: bool, tmp_path: Path
) -> None:
    states = {s: torch.ones(3) for s in ("weight", "exp_avg", "exp_avg_sq")} | {"step": torch.tensor(1.0)}
    hyper = {
        "lr": 0.1,
        "bias_correction": True,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.2,
        "params": ["w"],
    }
    config = {"optimizer": {"type": kind, "params": params}}
    made = {"params": {"w": states}, "groups": [hyper], "scalars": {"ds_config": config}}
    torch.save(made, tmp_path / "source.pt")
    ucpl.convert(tmp_path / "source.pt", tmp_path / "made", "dcp(fsdp = 1)")
    ucpl.convert(tmp_path / "made", tmp_path / "back.pt", "plain()")
    (group,) = torch.load(tmp_path / "back.pt", weights_only=True)["groups"]
    assert group[OPEN] is value and group["amsgrad"] is False and group["bias_correction"] is True


@pytest.mark.parametrize("groups", [1, 2])
def test_a_parameter_without_elements_whose_group_is_not_known_is_noted(groups: int, tmp_path: Path) -> None:
    """torch requests `optimizer.state.none.step`; in one group, the others' is used."""
    net = torch.nn.Module()
    net.a, net.b, net.none = (torch.nn.Parameter(torch.ones(*shape)) for shape in ((3, 2), (3,), (0, 3)))
    sets = [[net.a, net.none], [net.b]] if groups == 2 else [[net.a, net.none, net.b]]
    chosen = torch.optim.AdamW([{"params": one, "lr": 0.1 * (i + 1)} for i, one in enumerate(sets)])
    (net.a.sum() + net.b.sum() + net.none.sum()).backward()
    chosen.step()
    model, states = get_state_dict(net, chosen)
    save_all({"model": model, "optim": states}, checkpoint_id=tmp_path / "s", no_dist=True)
    ucpl.convert(tmp_path / "s", tmp_path / "zero", "zero1(dp=2)")
    told = command("convert", tmp_path / "zero", tmp_path / "made", "--to", "dcp(fsdp=2)")
    assert ("none has no elements" in told.out) == (groups == 2)
    again = {"model": model, "optim": states}
    planner = DefaultLoadPlanner(allow_partial_load=groups == 2)
    load(again, checkpoint_id=tmp_path / "made", no_dist=True, planner=planner)
