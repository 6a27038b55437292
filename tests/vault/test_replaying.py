"""Saves of gradients alone: what is read of them is what was trained, to the bit, or all was saved; never anything else."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from ucpl.cli import main
from ucpl.columns.operations import Extract, Read, Recompute, Reconstruct
from ucpl.conversion.opening import infer, open_checkpoint
from ucpl.errors import UcplError
from ucpl.remotes.entrance import source_at
from ucpl.remotes.reading import is_within
from ucpl.remotes.vaults import adamw, places
from ucpl.remotes.vaults.records import Job, Shard
from ucpl.remotes.vaults.sealed import Told, opened, read_sealed, seal
from ucpl.remotes.vaults.view import generation_at
from ucpl.runtime.identity import digest_of_plan
from ucpl.schedule.nets import net_from, net_json
from ucpl.vault import Saved, Vault, Writer
from ucpl.vault.files import ToSave, text_file
from ucpl.vault.looking import damage, look, scrub
from ucpl.vault.persisting import persist
from ucpl.vault.planning import plan_vault
from ucpl.vault.restoring import restored
from ucpl.vault.server import Server

REPLAYS = 3


class Net(nn.Module):
    """Layers of odd sizes, one with running statistics, one frozen, one weight that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 53)
        self.norm = nn.BatchNorm1d(53)
        self.frozen = nn.Linear(53, 53)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(53, 37)
        self.tied = nn.Linear(37, 53, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.first(x)).relu())
        found: torch.Tensor = self.last(hidden + self.tied(x))
        return found


class Training:
    """A job of one rank, its vault, and the same without one."""

    def __init__(self, home: Path, ends: ExitStack, *, domains: int = 1, protect: str = "none", **how: object) -> None:
        torch.manual_seed(3)
        self.model = Net()
        two = [
            {"params": [p for n, p in self.model.named_parameters() if "weight" in n], "weight_decay": 0.1},
            {"params": [p for n, p in self.model.named_parameters() if "weight" not in n], "lr": 0.02},
        ]
        self.optimizer = torch.optim.AdamW(two, lr=1e-2, **how)  # type: ignore[arg-type]
        self.optimizer.param_groups[0]["seen"] = [1]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.vault = Vault.make(home, ranks=domains, domains=domains, protect=protect, replays=REPLAYS)
        self.servers = [ends.enter_context(Server(home, n)) for n in range(domains)]
        self.writer, *self.others = [
            ends.enter_context(self.vault.writer(rank, run="first", wait=0.0, strict=True)) for rank in range(domains)
        ]
        for other in self.others:
            other._told = partial(self._beside, other)  # type: ignore[method-assign]
        self.done = 0

    def _beside(self, other: Writer, step: int, what: object) -> tuple[list[ToSave], Told | None]:
        """What a rank saves that trains nothing: of its own domain, and in step with the one that trains."""
        said: Told = {"optimizer": "AdamW", "by": {"device": "cpu"}, "groups": [], "units": {}}
        return [text_file(f"beside-{other.rank}", f"{step}".encode() * 5000)], said if self.is_light else None

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(6, 37)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.schedule.step()

    def save(self) -> Saved:
        self.done += 1
        saved = self.writer.save(self.done, (self.model, self.optimizer), {"at": self.done})
        self.is_light = bool(saved.replays)
        for other in self.others:
            other.save(self.done, None)
        for _ in range(2):
            for server in self.servers:
                server.turn()
        assert self.writer.committed() == (self.done, self.done)
        return saved

    def demand_same(self, source: str | Path | None = None) -> None:
        """What is read is what is here, to the bit: weights, moments, steps, the numbers of groups."""
        model = Net()
        groups = [
            {"params": [p for n, p in model.named_parameters() if ("weight" in n) is big]} for big in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, lr=1.0, amsgrad="max_exp_avg_sq" in self.names())
        ucpl.load_into(model, optimizer, source or f"vault:{self.vault.home}")
        assert same(model.state_dict(), self.model.state_dict())
        assert same(optimizer.state_dict()["state"], self.optimizer.state_dict()["state"])
        mine, theirs = self.optimizer.state_dict()["param_groups"], optimizer.state_dict()["param_groups"]
        for one, other in zip(mine, theirs, strict=True):
            assert {k: one[k] for k in ("lr", "betas", "weight_decay")} == {
                k: other[k] for k in ("lr", "betas", "weight_decay")
            }

    def names(self) -> set[str]:
        return {name for state in self.optimizer.state.values() for name in state}


def same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    return one == other


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def training(home: Path, **how: object) -> Iterator[Training]:
    with ExitStack() as ends:
        yield Training(home, ends, **how)  # type: ignore[arg-type]


def code_of(refused: pytest.ExceptionInfo[UcplError]) -> str:
    return refused.value.diagnostics[0].code


HOW: list[dict[str, object]] = [
    {}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"fused": True}, {"capturable": False, "eps": 1e-5},
]  # fmt: skip


@pytest.mark.parametrize("how", HOW, ids=str)
def test_what_is_replayed_is_what_was_trained(tmp_path, how):
    with training(tmp_path / "job", **how) as here:
        found = []
        for _ in range(REPLAYS + 3):
            here.step()
            saved = here.save()
            found.append(saved.replays)
            here.demand_same()
        assert found == [0, 1, 2, 3, 0, 1]


def test_a_bf16_model_is_replayed(tmp_path):
    with training(tmp_path / "job") as here:
        here.model.bfloat16()
        for number in range(3):
            here.optimizer.zero_grad()
            here.model(torch.randn(6, 37, dtype=torch.bfloat16)).square().mean().backward()
            here.optimizer.step()
            assert here.save().replays == number
            persist(here.vault.home, tmp_path / f"{number}")
            state = {"model": get_model_state_dict(Net().bfloat16())}
            load(state, checkpoint_id=tmp_path / f"{number}", no_dist=True)
            assert same(state["model"], dict(get_model_state_dict(here.model)))


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


def test_torch_loads_what_was_persisted_of_replayed_steps(tmp_path):
    """Each archive has the CRCs of what was made, which a reader of zip files holds it against."""
    with training(tmp_path / "job") as here:
        for _ in range(3):
            here.step()
            last = here.save()
        assert last.replays == 2
        persist(here.vault.home, tmp_path / "out")
        state = {"model": get_model_state_dict(Net())}
        load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        assert same(state["model"], dict(get_model_state_dict(here.model)))
        here.demand_same(tmp_path / "out")
        told = json.loads((tmp_path / "out" / "ucpl" / "state.json").read_text())
        assert told["ranks"]["0"] == {"at": 3}
        data = (tmp_path / "out" / "__0_0.distcp").read_bytes()
        archives = [b"PK\x03\x04" + part for part in data.split(b"PK\x03\x04")[1:]]
        assert archives  # local headers; whole archives are found by their ends
        at = count = 0
        while (end := data.find(b"PK\x05\x06", at)) >= 0:
            (tmp_path / "one.zip").write_bytes(data[at : end + 22])
            with zipfile.ZipFile(tmp_path / "one.zip") as archive:
                assert archive.testzip() is None
            at, count = end + 22, count + 1
        assert count > 15


# ---- what cannot be replayed is saved as a whole ----------------------------------------------------------------------------


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
    """Which may change what is stepped on, though gradients stay."""
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
    """One that changes what it steps on, before ours looks."""

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


@pytest.mark.parametrize("odd", ODD, ids=lambda one: one.__name__)
def test_what_a_step_alone_did_not_make_is_saved_as_a_whole(tmp_path, odd):
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
    """Of one that has no gradient this time, what there was is saved; the next step is made of that."""
    with training(tmp_path / "job") as here:
        for number in range(4):
            here.backward()
            if number in (1, 2):
                here.model.last.weight.grad = None
            here.optimizer.step()
            assert here.save().replays == number
            here.demand_same()


def test_what_does_not_follow_a_generation_that_counts_is_saved_as_a_whole(tmp_path):
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


# ---- what is refused ---------------------------------------------------------------------------------------------------------


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

        done = restored(here.vault.home, read)
        assert done.step == 1 and [why for _, why in done.passed] and same(found[0].state_dict(), before)


def test_where_other_bits_may_come_out_nothing_is_replayed(tmp_path, monkeypatch):
    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            here.save()
        monkeypatch.setattr(adamw, "made_by", lambda device: {"torch": "1.0", "device": device, "runs on": "a pocket"})
        with pytest.raises(UcplError) as refused:
            here.demand_same()
        assert code_of(refused) == "E698" and "here is torch 1.0" in refused.value.diagnostics[0].message


def edited(home: Path, edit: Callable[[Shard], Shard]) -> None:
    """The newest generation, of which rank 0 says something else."""
    vault = Vault.at(home)
    newest = vault.committed()
    assert newest is not None
    other = evolve(newest, shards=(edit(newest.shards[0]), *newest.shards[1:]))
    for number in range(len(vault.job.domains)):
        vault.domain(number).commit(newest.generation).write_bytes(other.sealed())


def demand_refused(home: Path, edit: Callable[[Shard], Shard]) -> None:
    """What is read after one step is refused, where its text says something else."""
    with training(home) as here:
        for _ in range(2):
            here.step()
            here.save()
        edited(home, edit)
        with pytest.raises(UcplError) as refused:
            here.demand_same()
        assert code_of(refused) == "E698"


WRONG: list[dict[str, object]] = [
    {}, {"groups": []}, {"groups": [{"lr": "fast"}] * 2}, {"groups": [{"betas": 3}] * 2}, {"units": {}}, {"optimizer": "SGD"},
    {"by": {}}, {"units": {"model.first.weight": {"group": 7}}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_said_of_a_step_and_does_not_hold_is_refused(tmp_path, wrong):
    def edit(shard: Shard) -> Shard:
        return evolve(shard, replay={**shard.replay, **wrong} if wrong else {})

    demand_refused(tmp_path / "job", edit)


@pytest.mark.parametrize("what", ["size", "name", "apart", "lacks"])
def test_a_value_that_stands_for_none_that_was_saved_is_refused(tmp_path, what):
    def edit(shard: Shard) -> Shard:
        (file,) = shard.files
        named = list(file.named)
        at = next(i for i, one in enumerate(named) if one.name.startswith("model.norm.running_mean"))
        changed: dict[str, dict[str, Any]] = {
            "size": {"size": named[at].size - 4},
            "name": {"name": "model.other@0"},
            "apart": {"at": file.size - 212},
        }
        if what == "lacks":
            del named[at]
        else:
            named[at] = evolve(named[at], **changed[what])
        return evolve(shard, files=(evolve(file, named=tuple(named)),))

    demand_refused(tmp_path / "job", edit)


def test_a_generation_without_those_that_it_is_made_of_is_refused(tmp_path):
    with training(tmp_path / "job") as here:
        for _ in range(3):
            here.step()
            here.save()
        here.vault.domain(0).commit(2).unlink()
        with pytest.raises(UcplError) as refused:
            generation_at(here.vault.home)
        assert code_of(refused) == "E692"


def test_a_vault_is_asked_for_as_it_was_made(tmp_path):
    Vault.make(tmp_path / "job", ranks=1, replays=2)
    with pytest.raises(UcplError) as refused:
        Vault.make(tmp_path / "job", ranks=1)
    assert code_of(refused) == "E694" and "2 steps replayed" in refused.value.diagnostics[0].message
    for wrong in (-1, 65):
        with pytest.raises(UcplError) as refused:
            Vault.make(tmp_path / "other", ranks=1, replays=wrong)
        assert code_of(refused) == "E690"
    told = Vault.at(tmp_path / "job").job
    assert told.replays == 2 and told.slots == 4 and Job.of(told.sealed()) == told
    assert b'"form": 1' in Vault.make(tmp_path / "plain", ranks=1).job.sealed().replace(b'"form":1', b'"form": 1')


# ---- what is lost, and other layouts -----------------------------------------------------------------------------------------


def test_a_lost_domain_is_rebuilt_and_replayed(tmp_path):
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        for _ in range(3):
            here.step()
            assert here.save()
        whole = ucpl.plan(f"vault:{here.vault.home}", "dcp(fsdp=3)")
        shutil.move(here.vault.home / "d0", tmp_path / "away")
        here.demand_same()
        plan = ucpl.plan(f"vault:{here.vault.home}", "dcp(fsdp=3)")
        made = [node for node in plan.nodes if isinstance(node, Recompute)]
        assert made and {node.steps for node in made} == {2}
        assert sum(node.size for node in made if node.state == "weight") == sum(
            p.numel() * 4 for _, p in here.model.named_parameters(remove_duplicate=False) if p.requires_grad
        )
        both = [n for n in made if any(isinstance(p, Reconstruct) for p in plan.net.predecessors(n))]
        assert both
        for node in made:
            (before,) = plan.net.predecessors(node)
            assert isinstance(before, Read | Reconstruct) and (before.label, before.state) == (node.label, node.state)
            after = list(plan.net.successors(node))
            assert after and all(isinstance(one, Extract) for one in after)
        assert digest_of_plan(plan) == digest_of_plan(whole)
        told, columns = net_json(plan.net, plan.nodes, plan.spaces)
        net, _ = net_from(json.loads(json.dumps(told)), columns)
        assert [str(node) for node in net] == [str(node) for node in plan.nodes]
        ucpl.convert(f"vault:{here.vault.home}", tmp_path / "out", "dcp(fsdp=3)")
        here.demand_same(tmp_path / "out")


def test_what_a_domain_lost_of_all_that_counts_is_made_anew(tmp_path):
    """Of the generation that is whole, and of each step's gradients since."""
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        for _ in range(3):
            here.step()
            here.save()
        assert [(one.number, one.replays) for one in look(here.vault.home).generations] == [(3, 2), (2, 1), (1, 0)]
        here.servers.pop(0).__exit__()
        shutil.rmtree(here.vault.home / "d0")
        with Server(here.vault.home, 0):
            assert damage(here.vault.home)[1] == []
            assert here.vault.domain(0).commits() == [3, 2, 1]
        shutil.move(here.vault.home / "d1", tmp_path / "away")
        here.demand_same()


@pytest.mark.parametrize("name", ["r0.s0", "r0.s2", "r0.s3", "p.s2", "p.s0"])
def test_a_flipped_bit_of_any_step_is_found_rebuilt_and_healed(tmp_path, name):
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        for _ in range(3):
            here.step()
            here.save()
        path = here.vault.home / "d0" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.write_bytes(data)
        here.demand_same()
        generation = {"0": 1, "2": 2, "3": 3}[name[-1]]
        (found,) = damage(here.vault.home)[1]
        assert found.what.endswith(f" in generation {generation}") and found.can_be_rebuilt
        assert scrub(here.vault.home) == (1, [])


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


def test_steps_are_made_for_what_is_read_alone_and_once(tmp_path, monkeypatch):
    """Opening a checkpoint reads the directories of all archives, which have CRCs: none of them makes a step.

    Of a tensor of few bytes the archive is read with its directory.
    """
    made: list[tuple[Any, ...]] = []
    stepped = adamw.stepped

    def counted(*words: Any) -> dict[str, memoryview]:
        made.append(words)
        return stepped(*words)

    monkeypatch.setattr(adamw, "stepped", counted)
    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            here.save()
        reader = ucpl.StorageReader(f"vault:{here.vault.home}")
        assert len(made) == 4 and all(gradient.shape in ((53,), (37,)) for *_, gradient in made)
        made.clear()
        weight = torch.zeros_like(here.model.last.weight)
        load({"model": {"last.weight": weight}}, storage_reader=reader, no_dist=True)
        assert same(weight, here.model.last.weight.detach()) and len(made) == 1
        made.clear()
        here.demand_same()
        assert len(made) == len([p for p in here.model.parameters() if p.requires_grad])
        assert main(["verify", f"vault:{here.vault.home}"]) == 0
        # The verb reads every member, and holds those that were saved against their CRCs.
        made.clear()
        report = ucpl.convert(f"vault:{here.vault.home}", tmp_path / "out", "dcp(fsdp=2)").report
        assert (
            report.source_bytes_without_crc
            == sum(3 * p.nbytes for p in here.model.parameters() if p.requires_grad)
            + 4 * here.model.tied.weight.numel()
        )


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 4, False),
        (4, 8, True),
        (4, 9, False),
        (5, 7, True),
        (3, 8, False),
        (8, 9, False),
        (20, 30, True),
        (20, 20, False),
    ],
)
def test_what_lies_within_is_told(low, high, found):
    assert is_within(low, high, [(4, 8), (20, 30)]) is found
    assert not is_within(low, high, [])


SPEC = """ucpl 1
model plain {
  dim h = 300, f = h
  weight : f h
  bias   : h
  dtype f32
  state exp_avg, exp_avg_sq : f32
}
"""


def test_what_gradients_take_is_foretold(tmp_path, capsys):
    """Tensors of a linear layer and its AdamW: a rank of two has half of all, and gradients are a third of that."""
    (tmp_path / "plain.ucpl").write_text(SPEC)
    call = ["vault", "plan", "dcp(fsdp = 2)", "--model", f"{tmp_path / 'plain.ucpl'}:plain", "--domains", "2", "--json"]
    assert main([*call]) == 0
    without = json.loads(capsys.readouterr().out)
    assert main([*call, "--replays", "4"]) == 0
    told = json.loads(capsys.readouterr().out)
    whole = 3 * 4 * (300 * 300 + 300)
    assert (without["replays"], without["gradients"], without["saved"]) == (0, 0, whole)
    assert (told["replays"], told["gradients"], told["replayed"], told["saved"]) == (4, whole // 3, whole, whole)
    for one, other in zip(told["domains"], without["domains"], strict=True):
        held = other["memory"] // 2 // 3  # of a generation of gradients, with the copy of the other domain's
        assert one["gradients"] == 4 * held or abs(one["gradients"] - 4 * held) < 4 * 4 * 4096  # blocks of whole pages
        assert one["memory"] == other["memory"] + one["gradients"]
    with training(tmp_path / "job") as here:
        here.model = nn.Linear(300, 300)  # type: ignore[assignment]
        here.optimizer = torch.optim.AdamW(here.model.parameters())
        for _ in range(2):
            here.optimizer.zero_grad()
            here.model(torch.randn(6, 300)).square().mean().backward()
            here.optimizer.step()
            here.save()
        newest = here.vault.committed()
        assert newest is not None
        tensors = [one for file in newest.shards[0].files for one in file.named if one.storage and len(one.shape)]
        assert sum(one.size for one in tensors) == told["gradients"]
    with pytest.raises(UcplError) as refused:
        plan_vault(str(Path(__file__).parents[2] / "examples/ranks/job.ucpl") + ":job(dp=2)", 2, replays=1)
    assert code_of(refused) == "E690" and "dcp()" in refused.value.diagnostics[0].message


@pytest.mark.parametrize("lacks", ["replay", "base", "depth", "slot"])
def test_a_text_of_gradients_that_lacks_something_is_none(tmp_path, lacks):
    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            here.save()
        data = (here.vault.home / "d0" / "r0.s2.json").read_bytes()
        assert Shard.of(data) is not None
        told = opened(data)
        assert told is not None
        del told[lacks]
        assert Shard.of(seal(told)) is None


def test_what_is_told_of_a_checkpoint_is_the_same_before_steps_are_made(tmp_path):
    """A weight that has two names is found by the CRCs of both, which here are not those of its bytes."""
    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            here.save()
        persist(here.vault.home, tmp_path / "out")
        told = [
            infer(open_checkpoint(path)).text() for path in (source_at(f"vault:{here.vault.home}"), tmp_path / "out")
        ]
        assert told[0] == told[1] and "tied.weight" in told[0]


def test_where_the_first_step_comes_out_otherwise_all_is_kept_from_then_on(tmp_path, caplog):
    """A step that is compiled, or wrapped: it does more than the optimizer's, each time."""
    with training(tmp_path / "job") as here:
        found = []
        for _ in range(4):
            here.step()
            for p in here.model.parameters():
                p.data.mul_(1.5)
            found.append(here.save().replays)
        assert found == [0, 1, 0, 0]
        assert [r.getMessage() for r in caplog.records if "all is kept at each step" in r.getMessage()]
        here.demand_same()


def test_the_first_step_alone_is_tried_by_one_parameter(tmp_path, monkeypatch):
    made: list[tuple[int, ...]] = []
    stepped = adamw.stepped

    def counted(group: Any, device: str, had: Any, grad: Any) -> dict[str, memoryview]:
        made.append(grad.shape)
        return stepped(group, device, had, grad)

    monkeypatch.setattr(adamw, "stepped", counted)
    with training(tmp_path / "job") as here:
        for _ in range(7):
            here.step()
            here.save()
        assert made == [(37,)]  # the smallest


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


def test_two_parameters_over_one_tensor_are_saved_as_a_whole(tmp_path):
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


def test_a_second_name_of_another_size_is_refused(tmp_path):
    def edit(shard: Shard) -> Shard:
        units = copy.deepcopy(dict(shard.replay["units"]))  # type: ignore[call-overload]
        units["model.first.weight"]["weights"][1] = "model.frozen.weight"
        return evolve(shard, replay={**shard.replay, "units": units})

    demand_refused(tmp_path / "job", edit)


def test_hooks_of_all_optimizers_of_who_reads_are_none_of_a_steps(tmp_path):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            assert here.save()
        called: list[object] = []
        hook = register_optimizer_step_post_hook(lambda *words: called.append(words))
        try:
            persist(here.vault.home, tmp_path / "out")
        finally:
            hook.remove()
        assert called == []
        here.demand_same(tmp_path / "out")


def test_a_server_reads_no_text_twice_however_many_slots_there_are(tmp_path, monkeypatch):
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        for _ in range(4):
            here.step()
            here.save()
        read: list[object] = []

        def counted(path: Path) -> bytes | None:
            read.append(path)
            return read_sealed(path)

        monkeypatch.setattr(places, "read_sealed", counted)
        for _ in range(3):
            for server in here.servers:
                server.turn()
        assert read == []
