"""The work of `load_into`: reads, copies, collectives and states.

The states of a new optimizer are compared with those that torch makes by a step.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import ucpl
from tests.forking import run_all
from tests.ranks.test_load_checks import Lm, adam, saved
from ucpl.errors import UcplError
from ucpl.ranks.optimizer_states import make_states
from ucpl.ranks.storage_reader import StorageReader
from ucpl.runtime.reading import Reader

LIKE_PARAMETERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam, a rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "RMSprop, centred": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
}
BY_TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD without states": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad, which has its states": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "a class that is not torch's": lambda p: Own(p, lr=0.1),
}


class Own(torch.optim.AdamW):
    """An optimizer of a script."""


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 7).bfloat16())
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", LIKE_PARAMETERS)
def test_states_are_those_of_a_step_of_torch(name):
    model = model_of()
    other = copy.deepcopy(model)
    ours, theirs = (LIKE_PARAMETERS[name](m.parameters()) for m in (model, other))
    hooked: list[object] = []
    ours.register_step_pre_hook(lambda *_: hooked.append(1))
    before = [p.detach().clone() for p in model.parameters()]
    assert make_states(model, ours, lambda *_: True)
    found: Any
    wanted: Any
    found, wanted = (get_optimizer_state_dict(m, o)["state"] for m, o in ((model, ours), (other, theirs)))
    assert list(found) == list(wanted) and len(found) == 7
    for param, states in wanted.items():
        assert list(found[param]) == list(states)
        for state, value in states.items():
            mine = found[param][state]
            assert (mine.shape, mine.dtype, mine.stride(), mine.device) == (
                value.shape, value.dtype, value.stride(), value.device
            )  # fmt: skip
            assert mine.dim() or torch.equal(mine, value), (param, state)  # counters have their values
    counters = [v.data_ptr() for s in ours.state.values() for v in s.values() if torch.is_tensor(v) and not v.dim()]
    assert len(counters) == len(set(counters))
    assert not hooked and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


@pytest.mark.parametrize("name", BY_TORCH)
def test_what_is_not_like_a_parameter_is_left_to_torch(name):
    model = model_of().float()
    optimizer = BY_TORCH[name]([p for p in model.parameters() if p.requires_grad])
    before = len(optimizer.state)
    assert not make_states(model, optimizer, lambda *_: True)
    assert len(optimizer.state) == before


def test_states_that_the_checkpoint_lacks_are_zeros(tmp_path):
    """Only torch makes values that no file has."""
    source, _ = saved(tmp_path)
    model = Lm(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    ucpl.load_into(model, optimizer, source, strict=False)
    states = optimizer.state[model.emb.weight]
    assert not states["max_exp_avg_sq"].any() and states["exp_avg"].any()


def test_a_parameter_with_a_gradient_is_left_to_torch():
    model = model_of()
    model[0].weight.grad = torch.ones(7, 5)
    assert not make_states(model, torch.optim.AdamW(model.parameters()), lambda *_: True)


def test_one_step_is_made_for_all_parameters_that_are_alike(monkeypatch):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters())
    steps: list[int] = []
    step: Any = torch.optim.AdamW.step

    def counted(self: torch.optim.Optimizer) -> object:
        steps.append(sum(len(group["params"]) for group in self.param_groups))
        return step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    assert make_states(model, optimizer, lambda *_: True)
    assert steps == [2] and len(optimizer.state) == 100


def test_a_refused_load_leaves_a_new_optimizer_without_states(tmp_path, monkeypatch):
    source, _ = saved(tmp_path)
    model = Lm(2)
    optimizer = adam(model)

    def failing(*_: object) -> None:
        assert optimizer.state
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(StorageReader, "_tensor", failing)
    with pytest.raises(OSError):
        ucpl.load_into(model, optimizer, source)
    assert not optimizer.state
    amsgrad = torch.optim.Adam(model.parameters(), amsgrad=True)
    with pytest.raises(UcplError, match="keeps max_exp_avg_sq"):
        ucpl.load_into(model, amsgrad, source)
    assert not amsgrad.state


def test_boxes_that_do_not_have_all_elements_are_refused(tmp_path, monkeypatch):
    source, _ = saved(tmp_path)
    plan_of = DefaultLoadPlanner.create_local_plan

    def shortened(self: Any) -> Any:
        plan = plan_of(self)
        plan.items = [item for item in plan.items if item.dest_index.fqn != "model.emb.weight"]
        return plan

    monkeypatch.setattr(DefaultLoadPlanner, "create_local_plan", shortened)
    with pytest.raises(UcplError, match=r"has 0 of the [0-9]+ elements of model\.emb.weight that this rank holds"):
        ucpl.load_into(Lm(2), None, source)


def work(rank: int, port: int, source: Path, out: Path) -> None:
    """A rank of FSDP2 that counts."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adam(model)
    count: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def calling(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return real(*args, **kwargs)

        setattr(owner, name, calling)

    for name in ("all_gather_object", "all_reduce", "gather_object", "scatter_object_list", "broadcast_object_list"):
        counted(dist, name)
    for name in ("run", "scatter", "comb"):
        counted(Reader, name)
    copy_ = torch.Tensor.copy_

    def copying(self: Any, other: Any, *more: Any) -> Any:
        into, values = (getattr(one, "_local_tensor", one) for one in (self, other))
        count["copied"] += into.numel() * (into.data_ptr() != values.data_ptr())
        return copy_(self, other, *more)

    torch.Tensor.copy_ = copying  # type: ignore[method-assign, assignment]
    step: Any = torch.optim.AdamW.step

    def stepping(self: torch.optim.Optimizer) -> Any:
        count["step"] += any(not p.is_meta for group in self.param_groups for p in group["params"])
        return step(self)

    torch.optim.AdamW.step = stepping  # type: ignore[method-assign, assignment]
    reader = ucpl.load_into(model, optimizer, source)
    count["bytes"] = reader.bytes_read
    count["second places"] = len(reader._values._bytes)
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    dist.destroy_process_group()
    torch.save((dict(count), 3 * 4 * held), out / str(rank))


def test_ranks_read_each_byte_once_into_its_place(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = adam(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ucpl.convert(tmp_path / "dcp", tmp_path / "zero1", to="zero1(dp=4)")
    run_all(2, work, tmp_path / "zero1", tmp_path)
    for rank in range(2):
        count, needed = torch.load(tmp_path / str(rank))
        assert count["bytes"] == needed
        assert count.get("step", 0) == count.get("scatter", 0) == count.get("comb", 0) == 0
        assert count["run"] == (12, 20)[rank]  # a parameter's part in each file, of the weights and of two states
        assert count["second places"] == 0 and count["copied"] == 4, count  # a step for each parameter
        assert count["all_gather_object"] == 5 and count["all_reduce"] == 8, count
        assert not {"gather_object", "scatter_object_list", "broadcast_object_list"} & set(count)
