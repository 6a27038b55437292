"""`load_into` for models that differ from the checkpoint's.

The differences are tied tensors, frozen ones, other optimizers, other layers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ucpl
from tests.forking import run_all
from ucpl.errors import UcplError


class Lm(nn.Module):
    """A model whose embedding may be tied to its head."""

    def __init__(self, seed: int, tied: bool = True, layers: int = 2, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(11, 6)
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        if frozen:
            self.body[0].requires_grad_(False)

    def forward(self, x):
        x = self.emb(x)
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(x)


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def adafactor(model):
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.05)


class Listing(torch.optim.Optimizer):
    """An optimizer with lists of tensors, as SOAP and Shampoo."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            self.state[p].setdefault("GG", [torch.ones(n, n) for n in p.shape])


def sgd(model, momentum=0.0):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=momentum)


def trained(model, optimizer, first):
    losses = []
    for step in range(first, first + 3):
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randint(0, 11, (8,), generator=draw) for _ in range(2))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def of_torch(top: Path, make) -> tuple[Path, list[float]]:
    """A torch file of three steps, and the next losses."""
    model = Lm(1)
    optimizer = make(model)
    trained(model, optimizer, 0)
    path = top / "ckpt.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path, trained(model, optimizer, 3)


def saved(top: Path, make=adam, **how) -> tuple[Path, list[float]]:
    """A plain file of three steps, and the next losses."""
    model = Lm(1, **how)
    optimizer = make(model)
    trained(model, optimizer, 0)
    names: dict[nn.Parameter, str] = {}
    aliases: dict[str, str] = {}
    params: dict[str, dict[str, torch.Tensor]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p in names:
            aliases[name] = names[p]
            continue
        names[p] = name
        states = {s: v.clone() for s, v in optimizer.state.get(p, {}).items() if isinstance(v, torch.Tensor)}
        params[name] = {"weight": p.detach().clone(), **states}
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    whole = {"params": params, "buffers": {}, "aliases": aliases, "groups": groups, "scalars": {}}
    torch.save(whole, top / "plain.pt")
    return top / "plain.pt", trained(model, optimizer, 3)


@pytest.mark.parametrize("to", ["plain()", "zero3(dp=2)", "dcp(fsdp=2)"])
def test_a_tied_model_continues_from_its_checkpoint(tmp_path, to):
    source, after = saved(tmp_path)
    ucpl.convert(source, tmp_path / "other", to)
    model = Lm(2)
    optimizer = adam(model)
    assert not optimizer.state  # which has done no step
    ucpl.load_into(model, optimizer, tmp_path / "other")
    assert model.head.weight is model.emb.weight
    assert all(p.grad is None for p in model.parameters())
    assert trained(model, optimizer, 3) == after


@pytest.mark.parametrize("to", [None, "dcp(fsdp=2)"])
def test_an_optimizer_with_factors_of_a_matrix_continues(tmp_path, to):
    path, then = of_torch(tmp_path, adafactor)
    if to is not None:
        ucpl.convert(path, tmp_path / "made", to=to)
        path = tmp_path / "made"
    model = Lm(3)
    optimizer = adafactor(model)
    ucpl.load_into(model, optimizer, path)
    assert trained(model, optimizer, 3) == then


@pytest.mark.parametrize(("make", "said"), [
    (Listing, "GG of emb.weight has tensors in a list"),
    (torch.optim.LBFGS, "torch makes no states of LBFGS before its first step"),
    (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), "the checkpoint has GG of emb.weight, which SGD does not"),
])  # fmt: skip
def test_states_of_lists_are_refused_with_a_way(tmp_path, make, said):
    path, _ = of_torch(tmp_path, lambda model: Listing(model.parameters()))
    model = Lm(3)
    with pytest.raises(UcplError) as caught:
        ucpl.load_into(model, make(model.parameters()), path)
    found = caught.value.diagnostics[0]
    assert found.code == "E646" and found.message.startswith(said)
    assert "SGD" in said or "--to torch_file" in found.remedy


def test_what_is_frozen_in_both_or_here_is_no_state_to_ask_for(tmp_path):
    source, after = saved(tmp_path, frozen=True)
    model = Lm(2, frozen=True)
    optimizer = adam(model)
    ucpl.load_into(model, optimizer, source)
    assert trained(model, optimizer, 3) == after
    source, _ = saved(tmp_path)
    model = Lm(2, frozen=True)
    ucpl.load_into(model, adam(model), source)
    assert torch.equal(model.get_parameter("body.0.weight"), torch.load(source)["params"]["body.0.weight"]["weight"])


REFUSED: dict[str, Any] = {
    "a layer more": ({}, {"layers": 3}, adam, "the model has body.2.weight, and the checkpoint has not; so body.2.bias"),
    "a layer less": ({}, {"layers": 1}, adam, "the checkpoint has body.1.weight, and the model has not; so body.1.bias"),
    "not tied": ({}, {"tied": False}, adam, "AdamW keeps step of head.weight, and the checkpoint has no state of head.w"),
    "frozen there": ({"frozen": True}, {}, adam, "AdamW keeps step of body.0.weight, and the checkpoint has no state of"),
    "no momentum": ({}, {}, sgd, "the checkpoint has exp_avg of emb.weight, which SGD does not keep; so exp_avg_sq of emb"),
    "of SGD": ({"make": lambda m: sgd(m, 0.9)}, {}, adam, "AdamW keeps step of emb.weight, and the checkpoint has momentum"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_filled(tmp_path, case):
    there, here, make, said = REFUSED[case]
    source, _ = saved(tmp_path, **there)
    model = Lm(2, **here)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UcplError) as caught:
        ucpl.load_into(model, make(model), source)
    (told,) = caught.value.diagnostics
    assert told.code == "E646"
    assert told.message.startswith(said)
    assert "strict=False" in str(told.remedy)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("case", REFUSED)
def test_mismatching_tensors_are_kept_on_request(tmp_path, case):
    there, here, make, _ = REFUSED[case]
    source, _ = saved(tmp_path, **there)
    model = Lm(2, **here)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make(model)
    ucpl.load_into(model, optimizer, source, strict=False)
    stored = torch.load(source)["params"]
    for name, value in model.state_dict().items():
        known = stored.get("emb.weight" if name == "head.weight" else name)
        assert torch.equal(value, known["weight"] if known else before[name]), name
    trained(model, optimizer, 3)


def test_another_shape_is_refused_also_where_that_is_not_strict(tmp_path):
    source, _ = saved(tmp_path)
    model = Lm(2)
    model.body[1] = nn.Linear(6, 7)
    with pytest.raises(UcplError, match=r"body.1.weight is \[7, 6\] in the job, and \[6, 6\] in the checkpoint"):
        ucpl.load_into(model, None, source, strict=False)


def test_a_name_that_is_nearly_right_is_offered(tmp_path):
    source, _ = saved(tmp_path)
    model = nn.Sequential()
    model.add_module("net", Lm(2))
    with pytest.raises(UcplError) as caught:
        ucpl.load_into(model, None, source)
    assert "rename= gives its name of a parameter" in str(caught.value.diagnostics[0].remedy)


def test_one_tensor_is_not_filled_from_two(tmp_path):
    source, _ = saved(tmp_path, tied=False)
    text = "head.weight and emb.weight are one tensor in the model, and differ in the checkpoint"
    with pytest.raises(UcplError, match=text) as caught:
        ucpl.load_into(Lm(2), None, source)
    assert caught.value.diagnostics[0].code == "E646"
    model = Lm(2)  # the caller states the intended one
    ucpl.load_into(
        model, None, source, rename=lambda name: "emb.weight" if name == "head.weight" else name, strict=False
    )
    assert torch.equal(model.head.weight, torch.load(source)["params"]["emb.weight"]["weight"])


def sharded(rank: int, port: int, sources: tuple[Path, Path], out: Path) -> None:
    """A rank of an FSDP2 job with a tied model.

    It records its tensors after loading, and the messages of all for a source with more tensors.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = Lm(2)
    for layer in model.body:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adam(model)
    reader = ucpl.load_into(model, optimizer, sources[0])
    whole = cast(DTensor, model.emb.weight).full_tensor()
    losses = trained(model, optimizer, 3)
    try:
        ucpl.load_into(model if rank == 0 else Lm(2, layers=3), None, sources[0])  # one rank's model has a layer more
        said = ""
    except UcplError as error:
        said = str(error)
    dist.destroy_process_group()
    tied = model.head.weight is model.emb.weight
    torch.save((whole, losses, said, tied, reader.bytes_read), out / str(rank))


def test_ranks_that_shard_a_tied_model_continue(tmp_path):
    source, after = saved(tmp_path)
    run_all(2, sharded, (source, source), tmp_path)
    stored = torch.load(source)["params"]["emb.weight"]["weight"]
    for rank in range(2):
        whole, losses, said, tied, read = torch.load(tmp_path / str(rank))
        assert tied and torch.equal(whole, stored)
        assert losses == pytest.approx(after, abs=1e-6)  # of gradients that two ranks add up
        assert "the model has body.2.weight" in said
        assert read < source.stat().st_size / 2
