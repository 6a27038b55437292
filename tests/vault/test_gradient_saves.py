"""Conditions for a save of gradients alone.

The step must be replayable bit for bit; otherwise the complete state is saved.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from tests.vault.trained import Net, Training, code_of, same, training
from ucpl.errors import UcplError
from ucpl.storage.vaults import adamw
from ucpl.vault import gradient_saves
from ucpl.vault.persisted import persist
from ucpl.vault.restore import restore_newest


def test_gradients_take_a_third_of_what_all_takes(tmp_path):
    with training(tmp_path / "job") as here:
        here.model = nn.Linear(300, 300)  # type: ignore[assignment]
        here.optimizer = torch.optim.AdamW(here.model.parameters())
        here.schedule = torch.optim.lr_scheduler.ExponentialLR(here.optimizer, 0.9)
        sizes = []
        for _ in range(2):
            here.optimizer.zero_grad()
            here.model(torch.randn(6, 300)).square().mean().backward()
            here.optimizer.step()
            sizes.append(here.save().bytes)
        assert sizes[0] > 3 * 300 * 300 * 4 and sizes[1] < 0.36 * sizes[0]


def two_steps(here: Training) -> None:
    here.step()
    here.step()


def no_step(here: Training) -> None:
    here.model(torch.randn(6, 37))


def gradients_gone(here: Training) -> None:
    here.step()
    here.optimizer.zero_grad()


def gradients_zeroed(here: Training) -> None:
    here.step()
    here.optimizer.zero_grad(set_to_none=False)


def gradients_of_the_next_step(here: Training) -> None:
    here.step()
    here.model(torch.randn(6, 37)).square().mean().backward()


def weight_written_after(here: Training) -> None:
    here.step()
    with torch.no_grad():
        here.model.last.weight[3, 5] += 1


def weight_written_before(here: Training) -> None:
    with torch.no_grad():
        here.model.last.weight[3, 5] += 1
    here.step()


def moment_written(here: Training) -> None:
    here.step()
    here.optimizer.state[here.model.last.weight]["exp_avg"][2] = 0


def storage_exchanged(here: Training) -> None:
    here.step()
    here.model.last.weight.data = here.model.last.weight.data.clone() + 1


def optimizer_loaded(here: Training) -> None:
    here.step()
    here.optimizer.load_state_dict(copy.deepcopy(here.optimizer.state_dict()))


def rate_is_a_tensor(here: Training) -> None:
    here.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    here.backward()
    here.optimizer.step()
    here.optimizer.param_groups[0]["lr"] = 0.01


def value_of_another_length(here: Training) -> None:
    here.step()
    here.optimizer.param_groups[0]["seen"] = [1] * 500


def step_with_a_closure(here: Training) -> None:
    """A closure may change parameters while gradients remain."""
    here.backward()

    def closure() -> float:
        with torch.no_grad():
            here.model.last.weight[0, 0] = 0
        return 0.0

    here.optimizer.step(closure)


def smallest_numbers_are_flushed(here: Training) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        here.step()
    finally:
        torch.set_flush_denormal(False)


def one_tensor_of_two_parameters(here: Training) -> None:
    here.model.last.bias = nn.Parameter(here.model.first.bias.data[:37])
    here.model.first.bias = nn.Parameter(here.model.last.bias.data)


def something_else_between(here: Training) -> None:
    here.done += 1
    here.writer.save(here.done, {"other": torch.ones(3)})
    for _ in range(2):
        for server in here.servers:
            server.turn()
    here.step()


def another_optimizer(here: Training) -> None:
    here.optimizer = torch.optim.AdamW(here.model.parameters(), lr=0.1)
    here.backward()
    here.optimizer.step()


def tensor_is_new(here: Training) -> None:
    here.model.norm.register_buffer("more", torch.ones(3))
    here.step()


def two_dimensions_exchanged(here: Training) -> None:
    here.step()
    weight = here.model.last.weight
    here.optimizer.state[weight]["exp_avg"] = here.optimizer.state[weight]["exp_avg"].t().contiguous().t()


def step_that_failed(here: Training) -> None:
    here.backward()
    betas = here.optimizer.param_groups[1]["betas"]
    here.optimizer.param_groups[0]["betas"] = (0.9,)
    with pytest.raises(ValueError, match="unpack"):
        here.optimizer.step()
    here.optimizer.param_groups[0]["betas"] = betas


def step_with_a_hook(here: Training) -> None:
    """A hook that changes parameters before our hook."""

    def clamp(*_: object) -> None:
        with torch.no_grad():
            here.model.last.weight[0, 0] = 0

    hook = here.optimizer.register_step_post_hook(clamp)
    here.optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
    here.step()
    hook.remove()


ODD: list[Callable[[Training], None]] = [
    step_that_failed, step_with_a_hook,
    two_steps, no_step, gradients_gone, gradients_zeroed, gradients_of_the_next_step, weight_written_after,
    weight_written_before, moment_written, storage_exchanged, optimizer_loaded, rate_is_a_tensor, another_optimizer,
    tensor_is_new, value_of_another_length, two_dimensions_exchanged, step_with_a_closure,
    smallest_numbers_are_flushed, something_else_between,
]  # fmt: skip


@pytest.mark.fault(
    "Vaults", "anything but one optimizer step between two saves, 16 cases", "all ranks save the complete state"
)
@pytest.mark.parametrize("odd", ODD, ids=lambda one: one.__name__)
def test_changes_besides_the_step_make_a_complete_save(tmp_path, odd):
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        here.step()
        assert here.save().replays == 1
        odd(here)
        assert here.save().replays == 0
        persist(here.vault.home, tmp_path / "out")
        state = {"model": {name: torch.zeros_like(value) for name, value in here.model.state_dict().items()}}
        load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        assert same(state["model"], dict(get_model_state_dict(here.model)))
        # And the next step is replayed again.
        here.backward()
        here.optimizer.step()
        assert here.save().replays == (0 if odd is two_dimensions_exchanged else 1)


@pytest.mark.parametrize("made", [torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam])
def test_steps_of_other_optimizers_are_not_replayed(tmp_path, made):
    with training(tmp_path / "job") as here:
        here.optimizer = made(here.model.parameters(), lr=0.1)
        for _ in range(3):
            here.backward()
            here.optimizer.step()
            assert here.save().replays == 0


def test_a_parameter_that_no_step_reached_is_as_it_was(tmp_path):
    """A parameter without a gradient is saved unchanged.

    The next step is replayed from it.
    """
    with training(tmp_path / "job") as here:
        for number in range(4):
            here.backward()
            if number in (1, 2):
                here.model.last.weight.grad = None
            here.optimizer.step()
            assert here.save().replays == number
            here.demand_same()


def test_a_save_that_follows_no_committed_generation_is_complete(tmp_path):
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        here.step()
        servers, here.servers = here.servers, []
        with pytest.raises(AssertionError):  # it does not count yet
            here.save()
        here.step()
        here.servers = servers
        assert here.save().replays == 0
        here.demand_same()
        here.writer.close()
        with here.vault.writer(0, run="second", wait=0.0, strict=True) as here.writer:
            here.step()
            assert here.save().replays == 0
            here.step()
            assert here.save().replays == 1
            here.demand_same()


def test_what_was_written_past_autograd_is_found_and_the_generation_before_taken(tmp_path):
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        before = copy.deepcopy(here.model.state_dict())
        here.step()
        here.model.last.weight.data.mul_(1.5)
        assert here.save().replays == 1
        with pytest.raises(UcplError) as refused:
            here.demand_same()
        assert code_of(refused) == "E698"
        assert "model.last.weight@0,0" in refused.value.diagnostics[0].message
        found: list[nn.Module] = []

        def read(source: str) -> None:
            model = Net()
            ucpl.load_into(model, None, source)
            found.append(model)

        done = restore_newest(here.vault.home, read)
        assert done.step == 1 and [why for _, why in done.passed] and same(found[0].state_dict(), before)


def test_where_other_bits_may_come_out_nothing_is_replayed(tmp_path, monkeypatch):
    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            here.save()
        monkeypatch.setattr(
            adamw, "environment", lambda device: {"torch": "1.0", "device": device, "runs on": "a pocket"}
        )
        with pytest.raises(UcplError) as refused:
            here.demand_same()
        assert code_of(refused) == "E698" and "this is torch 1.0" in refused.value.diagnostics[0].message


def test_ranks_that_do_not_agree_how_they_save_save_nothing_that_counts(tmp_path):
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        here.step()
        here.save()
        here.step()
        here.writer.save(2, (here.model, here.optimizer))
        here.is_light = False
        for other in here.others:
            other.save(2, None)
        for _ in range(2):
            for server in here.servers:
                assert server.turn() is None
        assert here.writer.committed() == (1, 1)
        here.done = 2
        here.step()
        assert here.save().replays == 0
        here.demand_same()


def test_where_the_first_step_comes_out_otherwise_all_is_kept_from_then_on(tmp_path, caplog):
    """A compiled or wrapped step does more than the optimizer's."""
    with training(tmp_path / "job") as here:
        found = []
        for _ in range(4):
            here.step()
            for p in here.model.parameters():
                p.data.mul_(1.5)
            found.append(here.save().replays)
        assert found == [0, 1, 0, 0]
        assert [r.getMessage() for r in caplog.records if "each step is saved completely" in r.getMessage()]
        here.demand_same()


def test_the_first_step_alone_is_tried_by_one_parameter(tmp_path, monkeypatch):
    made: list[tuple[int, ...]] = []
    stepped = adamw.replay_step

    def counted(group: Any, device: str, had: Any, grad: Any) -> dict[str, memoryview]:
        made.append(grad.shape)
        return stepped(group, device, had, grad)

    monkeypatch.setattr(adamw, "replay_step", counted)
    with training(tmp_path / "job") as here:
        for _ in range(7):
            here.step()
            here.save()
        assert made == [(37,)]  # the smallest


def test_steps_without_version_counters_end_nothing_and_are_saved_completely(tmp_path):
    """torch allows steps in inference_mode.

    Their results have no version to compare.
    """
    with training(tmp_path / "job") as here:
        for _ in range(3):
            here.backward()
            with torch.inference_mode():
                here.optimizer.step()
            assert here.save().replays == 0
            here.demand_same()


def test_a_step_that_cannot_be_looked_at_ends_nothing(tmp_path, monkeypatch):
    with training(tmp_path / "job") as here:
        here.step()
        here.save()

        def none(*_: object) -> None:
            raise RuntimeError("no numbers")

        with monkeypatch.context() as patch:
            patch.setattr(gradient_saves, "_numbers", none)
            here.step()
        assert here.save().replays == 0
        here.demand_same()


@pytest.mark.parametrize("default", ["meta", "f16"])
def test_a_default_device_and_type_of_the_caller_s_change_nothing(tmp_path, default):
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        here.backward()
        model, before = Net(), torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float16 if default == "f16" else before)
            with torch.device("meta") if default == "meta" else nullcontext():
                here.optimizer.step()
                assert here.save().replays == 1
                ucpl.load_into(model, None, f"vault:{here.vault.home}")
        finally:
            torch.set_default_dtype(before)
        assert same(model.state_dict(), here.model.state_dict())
        here.demand_same()


def test_gradients_do_not_live_for_the_vault(tmp_path):
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        here.step()
        gradient = weakref.ref(here.model.last.weight.grad)
        assert gradient() is not None
        here.optimizer.zero_grad()
        gc.collect()
        assert gradient() is None
        here.writer.close()
        assert not here.optimizer._optimizer_step_pre_hooks and not here.optimizer._optimizer_step_post_hooks


def test_a_step_that_a_scaler_made_the_optimizer_skip_is_none(tmp_path):
    with training(tmp_path / "job", fused=True) as here:
        here.step()
        here.save()
        here.backward()
        setattr(here.optimizer, "found_inf", torch.tensor(1.0))  # noqa: B010 - as a scaler does
        here.optimizer.step()
        delattr(here.optimizer, "found_inf")
        assert here.save().replays == 0
        here.demand_same()


def test_numbers_of_a_group_that_change_within_a_step_are_seen(tmp_path, monkeypatch):
    with training(tmp_path / "job") as here:
        here.step()
        here.save()
        before = torch.optim.AdamW._init_group

        def changing(self: Any, group: Any, *rest: Any) -> Any:
            group["lr"] *= 1.5
            return before(self, group, *rest)

        with monkeypatch.context() as inside:
            inside.setattr(torch.optim.AdamW, "_init_group", changing)
            here.step()
        assert here.save().replays == 0
        here.demand_same()


@pytest.mark.parametrize("name", ["user@home", "a.b"])
def test_words_that_no_step_asks_for_and_names_of_any_letters_change_nothing(tmp_path, name):
    with training(tmp_path / "job") as here:
        here.model = nn.ModuleDict({name.replace(".", "_"): nn.Linear(37, 5)})  # type: ignore[assignment]
        (layer,) = here.model.values()  # type: ignore[operator]
        here.optimizer = torch.optim.AdamW(here.model.named_parameters())
        here.optimizer.param_groups[0]["name"] = "decayed"
        for number in range(3):
            here.optimizer.zero_grad()
            layer(torch.randn(4, 37)).square().mean().backward()
            here.optimizer.step()
            assert here.save().replays == number
        persist(here.vault.home, tmp_path / "out")
        state = {"model": {n: torch.zeros_like(v) for n, v in here.model.state_dict().items()}}
        load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        assert same(state["model"], dict(get_model_state_dict(here.model)))


def test_two_parameters_over_one_tensor_make_a_complete_save(tmp_path):
    with training(tmp_path / "job") as here:
        first, last = nn.Linear(5, 5), nn.Linear(5, 5)
        last.weight = nn.Parameter(first.weight.data)
        here.model = nn.Sequential(first, last)  # type: ignore[assignment]
        here.optimizer = torch.optim.AdamW(here.model.parameters())
        for _ in range(3):
            here.optimizer.zero_grad()
            here.model(torch.randn(4, 5)).square().mean().backward()
            here.optimizer.step()
            assert here.save().replays == 0
