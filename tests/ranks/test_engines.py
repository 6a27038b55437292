"""Engines are filled part by part, by their own attributes.

These are stand-ins; tests/interop/test_engines.py uses DeepSpeed's.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.testing._internal.distributed.fake_pg import FakeStore

import ucpl
from ucpl.errors import UcplError
from ucpl.ranks.engines import boxes


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (4, 3, 2), (2, 1, 5)])
def test_an_interval_is_boxes_in_order(shape):
    """Every interval: each of its elements once, in memory order."""
    numbers = torch.arange(prod(shape)).view(shape)
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            found = list(boxes(start, stop, shape))
            parts = [
                numbers[tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))] for low, sizes, _ in found
            ]
            joined = torch.cat([part.reshape(-1) for part in parts]) if parts else numbers.new_empty(0)
            assert torch.equal(joined, torch.arange(start, stop))
            assert all(b[2] - a[2] == prod(a[1]) for a, b in pairwise(found))
            assert len(found) <= max(1, 2 * len(shape) - 1)


class Small(nn.Module):
    """One parameter with two names, a frozen one, two kinds of buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(5, 7, bias=False)
        self.down.weight = self.up.weight
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("calls", torch.full((2,), float(seed)))
        self.register_buffer("passing", torch.full((2,), float(seed)), persistent=False)


def saved(
    top: Any, steps: tuple[float, float] = (3.0, 3.0), kind: type[Small] = Small
) -> tuple[Small, torch.optim.Optimizer]:
    """A model and its optimizer, saved as a DCP folder.

    Moments are random, step numbers are those given.
    """
    model = kind(1)
    optimizer = torch.optim.AdamW([model.up.weight, model.up.bias], lr=0.05)
    for param, step in zip((model.up.weight, model.up.bias), steps, strict=True):
        state: dict[str, Any] = optimizer.state[param]
        state |= {"step": torch.tensor(step), "exp_avg": torch.randn_like(param), "exp_avg_sq": torch.randn_like(param)}
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optim": states}, checkpoint_id=top, no_dist=True)
    return model, optimizer


class StandIn:
    """The optimizer of ZeRO 1 on one rank of two.

    It has the second half of a flat buffer of weight and bias.
    """

    def __init__(self, module: Small) -> None:
        self.single_partition_of_fp32_groups = [torch.full((21,), -7.0)]
        self.round_robin_bit16_groups = [[module.up.weight, module.up.bias]]
        self.round_robin_bit16_offsets = [[0, 35]]
        self.real_dp_process_group = [dist.group.WORLD]
        self.optimizer = torch.optim.AdamW(self.single_partition_of_fp32_groups, lr=0.3)
        self.updated = 0

    def update_lp_params(self) -> None:
        self.updated += 1


def engine(optimizer: Any = None, stage: int = 1, module: Small | None = None, **more: Any) -> Any:
    module = Small(2) if module is None else module
    made = StandIn(module) if optimizer is None else optimizer
    zero = {"module": module, "optimizer": made, "lr_scheduler": None, "zero_optimization_stage": lambda: stage}
    return SimpleNamespace(**zero, **more)


@pytest.fixture
def second():
    """The second of two ranks, without real ranks.

    torch's fake group has the numbers, and nothing is communicated.
    """
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_rank_has_its_part_of_masters_and_states_and_reads_no_more(tmp_path, second):
    model, optimizer = saved(tmp_path)
    made = engine()
    reader = ucpl.load_into(made, made.optimizer, tmp_path)
    flat = made.optimizer.single_partition_of_fp32_groups[0]
    state = made.optimizer.optimizer.state[flat]
    params = model.up.weight, model.up.bias
    assert torch.equal(flat, torch.cat([p.detach().reshape(-1) for p in params])[21:])
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[name], torch.cat([optimizer.state[p][name].reshape(-1) for p in params])[21:])
    assert isinstance(state["step"], torch.Tensor)
    assert state["step"] == 3
    assert made.optimizer.optimizer.param_groups[0]["lr"] == 0.05
    assert made.optimizer.updated == 1  # the ranks exchange the rounded values
    assert torch.equal(made.module.fixed, model.fixed)
    assert made.module.calls.tolist() == [1, 1]
    assert made.module.passing.tolist() == [2, 2]
    assert reader.bytes_read == 4 * (3 * 21 + 3 + 2)


def test_without_an_optimizer_weights_alone_are_filled(tmp_path, second):
    model, _ = saved(tmp_path)
    made = engine()
    ucpl.load_into(made, None, tmp_path)
    assert torch.equal(made.optimizer.single_partition_of_fp32_groups[0][-7:], model.up.bias)
    assert not made.optimizer.optimizer.state
    assert made.optimizer.optimizer.param_groups[0]["lr"] == 0.3


class Turned(Small):
    """A model with a non-contiguous buffer and frozen parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("turned", torch.randn(3, 5).t())
        self.stepping = nn.Parameter(torch.randn(4, 6)[:, :3], requires_grad=False)


def test_what_does_not_lie_end_to_end_is_filled(tmp_path, second):
    model, made = Turned(1), engine(module=Turned(2))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save({"model": weights}, checkpoint_id=tmp_path, no_dist=True)
    ucpl.load_into(made, None, tmp_path)
    assert torch.equal(torch.as_tensor(made.module.turned), torch.as_tensor(model.turned))
    assert made.module.turned.stride() == (1, 5)
    assert torch.equal(made.module.stepping, model.stepping)
    assert torch.equal(made.module.fixed, model.fixed)


class Void(Small):
    """With a trained parameter without elements, and a buffer without."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.void = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("cache", torch.empty(0, 4))


@pytest.mark.parametrize("known", [False, True])
def test_what_has_no_elements_keeps_no_engine_from_being_filled(tmp_path, second, known):
    """The checkpoint has it, or has not."""
    model, _ = saved(tmp_path, kind=Void if known else Small)
    made = engine(module=Void(2))
    made.optimizer.round_robin_bit16_groups[0].insert(0, made.module.void)
    made.optimizer.round_robin_bit16_offsets[0].insert(0, 0)
    ucpl.load_into(made, made.optimizer, tmp_path)
    flat = made.optimizer.single_partition_of_fp32_groups[0]
    assert torch.equal(flat[-7:], model.up.bias)
    assert {"exp_avg", "exp_avg_sq", "step"} == made.optimizer.optimizer.state[flat].keys()
    assert made.optimizer.optimizer.param_groups[0]["lr"] == 0.05


class Longer(Small):
    """With a buffer of another length."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.calls = torch.zeros(4)


class Wider(Small):
    """With a trained parameter of another shape."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.up.weight = nn.Parameter(torch.zeros(5, 7))


class More(Small):
    """With a buffer that the checkpoint has not."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("more", torch.full((2,), -1.0))


@pytest.mark.parametrize(
    ("has", "had", "said"),
    [
        (Longer, Small, r"calls is \[4\] in the job, and \[2\] in the checkpoint"),
        (Wider, Small, r"up\.weight is \[5, 7\] in the job, and \[7, 5\] in the checkpoint"),
        (More, Small, "the model has more, and the checkpoint has not"),
        (Small, More, "the checkpoint has more, and the model has not"),
    ],
)
def test_a_tensor_of_another_model_is_named(tmp_path, second, has, had, said):
    saved(tmp_path, kind=had)
    made = engine(module=has(2))
    with pytest.raises(UcplError, match=said) as caught:
        ucpl.load_into(made, made.optimizer, tmp_path)
    assert caught.value.diagnostics[0].code == "E646" and str(tmp_path) in str(caught.value.diagnostics[0].labels)
    assert made.optimizer.single_partition_of_fp32_groups[0].eq(-7).all()


class Twice(Small):
    """With a module of two names, which has a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.one = nn.BatchNorm1d(3, affine=False)
        self.two = self.one
        torch.nn.init.constant_(self.one.running_mean, float(seed))  # type: ignore[arg-type]


class Beside(Small):
    """A module with extra state besides its tensors, as in some libraries."""

    kept: object = None

    def get_extra_state(self) -> object:
        return self.kept

    def set_extra_state(self, state: object) -> None:
        raise AssertionError


@pytest.mark.parametrize("kept", [None, {"a": 1}, torch.ones(3)], ids=["twice", "a dict", "a tensor"])
def test_an_engine_is_filled_for_any_module_names_and_extra_state(tmp_path, second, monkeypatch, kept):
    monkeypatch.setattr(Beside, "kept", kept)
    kind = Twice if kept is None else Beside
    model, _ = saved(tmp_path, kind=kind)
    made = engine(module=kind(2))
    ucpl.load_into(made, made.optimizer, tmp_path)
    assert torch.equal(made.module.fixed, model.fixed)
    assert kept is not None or torch.equal(made.module.two.running_mean, torch.ones(3))


@pytest.mark.parametrize(("has", "had"), [(More, Small), (Small, More)])
def test_an_engine_of_another_model_is_filled_with_what_both_have_where_that_is_asked_for(tmp_path, second, has, had):
    model, _ = saved(tmp_path, kind=had)
    made = engine(module=has(2))
    ucpl.load_into(made, made.optimizer, tmp_path, strict=False)
    assert torch.equal(made.optimizer.single_partition_of_fp32_groups[0][-7:], model.up.bias)
    assert made.module.calls.tolist() == [1, 1]
    assert has is Small or made.module.more.tolist() == [-1, -1]


def test_a_flat_buffer_has_one_number(tmp_path, second):
    saved(tmp_path, (3.0, 4.0))
    made = engine()
    with pytest.raises(UcplError, match=r"step of up\.bias is 4\.0 and of up\.weight 3\.0") as caught:
        ucpl.load_into(made, made.optimizer, tmp_path)
    assert caught.value.diagnostics[0].code == "E645"
    assert made.optimizer.single_partition_of_fp32_groups[0].eq(-7).all()


def test_a_flat_buffer_has_a_state_of_all_its_parameters(tmp_path, second):
    """The bias was frozen, and is trained now."""
    model, optimizer = saved(tmp_path)
    model.up.bias.requires_grad_(False)
    alone = torch.optim.AdamW([model.up.weight])
    alone.state[model.up.weight] = optimizer.state[model.up.weight]
    weights, states = get_state_dict(model, alone)
    save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "less", no_dist=True)
    made = engine()
    with pytest.raises(UcplError, match=r"has exp_avg of all its parameters, and the checkpoint has none of up\.bias"):
        ucpl.load_into(made, made.optimizer, tmp_path / "less")


def test_a_checkpoint_without_an_optimizer_is_asked_for_none(tmp_path, second):
    from safetensors.torch import save_file

    weights = Small(1).state_dict()
    save_file({name: value.clone() for name, value in weights.items()}, tmp_path / "model.safetensors")
    made = engine()
    with pytest.raises(UcplError, match="give None for the engine's"):
        ucpl.load_into(made, made.optimizer, tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pipeline_parallelism": True}, "has stages of a pipeline"),
        ({"has_moe_layers": True}, "has experts"),
        ({"mp_world_size": 2}, "cuts its tensors"),
        (
            {"_config": SimpleNamespace(zero_config=SimpleNamespace(offload_optimizer=object()))},
            "offloads its optimizer",
        ),
        ({"_config": SimpleNamespace(zero_config=SimpleNamespace(zero_hpz_partition_size=2))}, "second copies"),
        ({"_config": SimpleNamespace(zero_config=SimpleNamespace(mics_shard_size=2))}, "smaller groups"),
        ({"_config": SimpleNamespace(zero_config=SimpleNamespace(zenflow=object()))}, "ZenFlow"),
        ({"stage": 0}, "stage 0: give engine.module"),
        ({"optimizer": object()}, "is not known"),
    ],
)
def test_engines_that_are_not_filled_are_refused(tmp_path, second, more, said):
    saved(tmp_path)
    made = engine(**more)
    with pytest.raises(UcplError, match=said) as caught:
        ucpl.load_into(made, made.optimizer, tmp_path)
    assert caught.value.diagnostics[0].code == "E645"
