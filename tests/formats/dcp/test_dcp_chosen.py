"""Several models and optimizers in one folder: the source's call names one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.files.refusals import refusal
from tests.gathered import plain_of

NAMES = ("a.weight", "a.bias", "b.weight")
Dicts = tuple[dict[str, Any], dict[str, Any]]


def trained(seed: int) -> Dicts:
    """A model and its optimizer, with names that other models have, too."""
    torch.manual_seed(seed)
    model = {name: torch.randn(6, 4) if "weight" in name else torch.randn(6) for name in NAMES} | {
        "seen": torch.tensor(3)
    }
    states = {
        name: {
            "step": torch.tensor(2.0),
            "exp_avg": torch.randn_like(model[name]),
            "exp_avg_sq": torch.rand_like(model[name]),
        }
        for name in NAMES
    }
    return model, {"state": states, "param_groups": [{"lr": 0.1 * (seed + 1), "weight_decay": 0.0, "params": [*NAMES]}]}


GEN, DISC = trained(0), trained(1)
FLAT = {"gen": GEN[0], "disc": DISC[0], "opt_gen": GEN[1], "opt_disc": DISC[1]}
NESTED = {"gen": {"model": GEN[0], "optim": GEN[1]}, "disc": {"model": DISC[0], "optim": DISC[1]}}
AVERAGE = {"net": GEN[0], "net_ema": DISC[0], "opt": GEN[1]}
CALLS = {
    'dcp(prefix = "gen.", states = "opt_gen.state.")': (FLAT, GEN),
    'dcp(prefix = "disc.", states = "opt_disc.state.")': (FLAT, DISC),
    'dcp(states = "gen.optim.state.")': (NESTED, GEN),
    'dcp(prefix = "disc.model.")': (NESTED, DISC),
    'dcp(prefix = "net.")': (AVERAGE, GEN),
}


def leaves(value: Any, *steps: object) -> Iterator[tuple[tuple[object, ...], Any]]:
    if not isinstance(value, dict | list):
        yield steps, value.tolist() if isinstance(value, torch.Tensor) else value
        return
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(one, *steps, key)


def blank(value: Any) -> Any:
    if isinstance(value, dict | list):
        found = [blank(one) for one in (value.values() if isinstance(value, dict) else value)]
        return dict(zip(value, found, strict=True)) if isinstance(value, dict) else found
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("call", CALLS)
def test_a_call_names_the_model_and_its_optimizer(call: str, tmp_path: Path) -> None:
    state, (model, optimizer) = CALLS[call]
    save(state, checkpoint_id=tmp_path / "in")
    ucpl.convert(tmp_path / "in", tmp_path / "plain", "plain()", layout=call)
    made = torch.load(tmp_path / "plain" / "plain.pt", weights_only=True)
    for name in NAMES:
        held = made["params"][name]
        assert torch.equal(held["weight"], model[name])
        assert all(torch.equal(held[one], optimizer["state"][name][one]) for one in ("exp_avg", "exp_avg_sq"))
    assert [group["lr"] for group in made["groups"]] == [group["lr"] for group in optimizer["param_groups"]]


@pytest.mark.parametrize("call", CALLS)
def test_a_target_has_the_others_too(call: str, tmp_path: Path) -> None:
    state, _ = CALLS[call]
    save(state, checkpoint_id=tmp_path / "in")
    ucpl.convert(tmp_path / "in", tmp_path / "out", "dcp(fsdp=2)", layout=call)
    loaded = blank(state)
    load(loaded, checkpoint_id=tmp_path / "out")
    assert dict(leaves(loaded)) == dict(leaves(state))
    assert ucpl.verify(tmp_path / "out", layout=call)


def test_a_plan_reads_its_source_again_by_the_same_choice(tmp_path: Path) -> None:
    save(FLAT, checkpoint_id=tmp_path / "in")
    call = 'dcp(prefix = "disc.", states = "opt_disc.state.")'
    plan = ucpl.plan(call, "zero1(dp=2)", checkpoint=tmp_path / "in")
    ucpl.save_plan(plan, tmp_path / "a.plan")
    ucpl.apply(tmp_path / "a.plan", tmp_path / "in", tmp_path / "out")
    made = plain_of(tmp_path / "out")["params"]
    assert torch.equal(made["a.weight"]["exp_avg"], DISC[1]["state"]["a.weight"]["exp_avg"])


def test_weights_alone_of_one_model(tmp_path: Path) -> None:
    save(FLAT, checkpoint_id=tmp_path / "in")
    ucpl.convert(tmp_path / "in", tmp_path / "out", "plain()", layout='dcp(prefix = "gen.")', weights_alone=True)
    made = torch.load(tmp_path / "out" / "plain.pt", weights_only=True)
    assert made["params"].keys() | made["buffers"].keys() == GEN[0].keys()
    assert torch.equal(made["params"]["b.weight"]["weight"], GEN[0]["b.weight"])


@pytest.mark.parametrize(
    ("state", "call", "said", "way"),
    [
        (FLAT, None, "several models have one: `gen.a.bias` and `disc.a.bias`", 'dcp(prefix = "disc.")'),
        (FLAT, 'dcp(prefix = "gen.")', "has 2 optimizers: ", 'dcp(prefix = "gen.", states = "opt_gen.state.")'),
        (NESTED, None, "has 2 optimizers: ", 'dcp(prefix = "gen.model.", states = "gen.optim.state.")'),
        (AVERAGE, None, "several models have one: `net.a.bias` and `net_ema.a.bias`", 'dcp(prefix = "net.")'),
    ],
)
def test_without_a_name_none_is_chosen(
    state: dict[str, Any], call: str | None, said: str, way: str, tmp_path: Path
) -> None:
    save(state, checkpoint_id=tmp_path / "in")
    error = refusal(lambda: ucpl.convert(tmp_path / "in", tmp_path / "out", "plain()", layout=call), "E524")
    assert said in error.message and way in (error.remedy or "")


def test_two_optimizers_of_one_model_are_not_one(tmp_path: Path) -> None:
    """The parameters of the other optimizer would be frozen."""
    model, whole = GEN
    parts = [[*NAMES[:1]], [*NAMES[1:]]]
    halves = [
        {"state": {n: whole["state"][n] for n in some}, "param_groups": [{**whole["param_groups"][0], "params": some}]}
        for some in parts
    ]
    save({"model": model, "first": halves[0], "second": halves[1]}, checkpoint_id=tmp_path / "in")
    error = refusal(lambda: ucpl.convert(tmp_path / "in", tmp_path / "out", "zero1(dp=2)"), "E524")
    assert error.message == "the folder has 2 optimizers: `first.state.`, `second.state.`"
