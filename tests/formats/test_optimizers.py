"""Each optimizer of torch, with three groups, through each format to torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl

Groups = list[dict[str, Any]]


class CountsInNumbers(torch.optim.Optimizer):
    """A bare number as `step`, as in Adafactor of transformers."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 0.1, "scale": 2.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = state.get("mean", 0) + parameter.grad
                parameter -= group["lr"] / group["scale"] * state["mean"]


OPTIMIZERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "SGD without momentum": torch.optim.SGD,
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "numbers": CountsInNumbers,
}
WAYS = (
    "dcp(fsdp = 3)",
    "dcp(fsdp = 2, flat = 1)",
    "plain()",
    "zero0(dp = 1)",
    "zero1(dp = 2)",
    "zero3(dp = 2)",
    "universal()",
)
# DeepSpeed's loader requests a tensor of the parameter's shape for each state of a universal checkpoint.
REFUSED = {("NAdam", "universal()"), ("ASGD", "universal()")}


def job(kind: str, seed: int) -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    parts = {"a": torch.nn.Linear(5, 7), "n": torch.nn.LayerNorm(7), "z": torch.nn.Linear(7, 3)}
    module = torch.nn.ModuleDict(parts)
    named = dict(module.named_parameters())
    groups: Groups = [
        {"params": [named["a.weight"], named["z.weight"]], "lr": 0.1},
        {"params": [named["a.bias"], named["n.weight"]], "lr": 0.02},
        {"params": [named["n.bias"], named["z.bias"]], "lr": 0.003},
    ]
    if kind != "Rprop":
        groups[0]["weight_decay"] = 0.3
    return module, OPTIMIZERS[kind](groups)


def trained(kind: str) -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    module, optimizer = job(kind, 0)
    for _ in range(2):
        module["z"](module["n"](module["a"](torch.randn(4, 5)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_job_resumes_with_its_state(kind: str, way: str, tmp_path: Path) -> None:
    module, optimizer = trained(kind)
    held: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))
    save(held, checkpoint_id=tmp_path / "source")
    if (kind, way) in REFUSED:
        with pytest.raises(ucpl.UcplError, match=r"E471: .*a number"):
            ucpl.convert(tmp_path / "source", tmp_path / "made", way)
        return
    ucpl.convert(tmp_path / "source", tmp_path / "made", way)
    if not way.startswith("dcp"):
        ucpl.convert(tmp_path / "made", tmp_path / "back", "dcp(fsdp = 1)")
    found, other = job(kind, 1)
    for group in other.param_groups:
        group["lr"] = 9.0
    options = StateDictOptions(flatten_optimizer_state_dict="flat" in way)
    held = dict(zip(("model", "optim"), get_state_dict(found, other, options=options), strict=True))
    load(held, checkpoint_id=tmp_path / ("made" if way.startswith("dcp") else "back"))
    set_state_dict(found, other, model_state_dict=held["model"], optim_state_dict=held["optim"], options=options)
    for ours, theirs in zip(module.parameters(), found.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        mine, its = optimizer.state[ours], other.state[theirs]
        assert mine.keys() == its.keys()
        assert all(torch.equal(*map(torch.as_tensor, (mine[state], its[state]))) for state in mine)
        assert kind != "numbers" or (type(its["step"]) is int and mine["step"] == 2)
    values = [[{k: v for k, v in g.items() if k != "params"} for g in one.param_groups] for one in (optimizer, other)]
    assert values[0] == values[1]


@pytest.mark.parametrize("kind", ["numbers", "Adam"])
def test_a_number_of_steps_is_filled_in_the_form_of_the_job(kind: str, tmp_path: Path) -> None:
    module, optimizer = trained(kind)
    model, states = get_state_dict(module, optimizer)
    save({"model": model, "optim": states}, checkpoint_id=tmp_path / "source")
    found, other = job(kind, 1)
    ucpl.load_into(found, other, str(tmp_path / "source"))
    steps = [other.state[parameter]["step"] for parameter in found.parameters()]
    assert {type(one) for one in steps} == {int if kind == "numbers" else torch.Tensor} and len(steps) == 6
    assert all(one == 2 for one in steps)


def test_an_optimizer_of_groups_alone_is_accounted_for(tmp_path: Path) -> None:
    module, optimizer = trained("SGD without momentum")
    model, states = get_state_dict(module, optimizer)
    save({"model": model, "optim": states}, checkpoint_id=tmp_path / "source")
    for target in WAYS:
        account = ucpl.plan(str(tmp_path / "source"), target).account
        assert account is not None and [e.count for e in account.of("moved") if e.kind == "group"] == [3]
    (entry,) = (e for e in ucpl.plan(str(tmp_path / "source"), "safetensors()").account.of("dropped"))  # type: ignore[union-attr]
    assert (entry.kind, entry.count) == ("group", 3)
