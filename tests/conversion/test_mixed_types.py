"""A bf16 model with an fp32 router under AdamW.

Moments have the dtype of each parameter, and training continues.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.cli.command import ucpl as command


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.decay = nn.Parameter(torch.randn(5))
        self.router = nn.Linear(5, 3)
        self.out = nn.Linear(5, 2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.proj(x)
        scale = self.router(h.float()).sum().bfloat16()
        return cast(torch.Tensor, self.out(h * scale).float() * self.decay.sum())


class Run:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def steps(self, number: int) -> list[float]:
        losses = []
        for i in range(number):
            x = torch.linspace(-1, 1, 12).reshape(2, 6).bfloat16() * (i + 1)
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path) -> None:
        model, optim = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optim": optim}, checkpoint_id=folder, no_dist=True)

    def load(self, folder: Path) -> None:
        model, optim = get_state_dict(self.model, self.optimizer)
        load({"model": model, "optim": optim}, checkpoint_id=folder, no_dist=True)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder, and the losses of the steps after it."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    run = Run(0)
    run.steps(3)
    run.save(folder)
    return folder, run.steps(3)


@pytest.mark.parametrize("way", [("dcp(fsdp = 3)",), ("plain()", "dcp(fsdp = 2)")], ids=len)
def test_training_continues(saved: tuple[Path, list[float]], way: tuple[str, ...], tmp_path: Path) -> None:
    folder, losses = saved
    for number, to in enumerate(way):
        ucpl.convert(folder, tmp_path / str(number), to=to)
        folder = tmp_path / str(number)
    again = Run(1)
    again.steps(1)  # so that it has states to load into
    again.load(folder)
    assert again.steps(3) == losses


def test_it_can_be_described(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    text = ucpl.infer(saved[0]).text()
    assert "state exp_avg, exp_avg_sq : bf16  dtype f32 for decay, router.weight, router.bias\n" in text
    (tmp_path / "it.ucpl").write_text(text)
    ucpl.convert(saved[0], tmp_path / "made", to="dcp(fsdp = 2)", layout=f"{tmp_path}/it.ucpl:stored")
    assert ucpl.compare(saved[0], tmp_path / "made")


def test_weights_alone(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    ucpl.convert(saved[0], tmp_path / "hf", to="safetensors()")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    run = Run(0)
    run.load(saved[0])
    held = run.model.state_dict()
    assert found.keys() == held.keys()
    assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in held.items())


def test_an_engine_of_one_type_is_reported(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    """DeepSpeed's engine without bf16 and fp16 rejects parameters other than f32."""
    done = command("convert", saved[0], tmp_path / "zero", "--to", "zero1(dp=2)")
    assert done.status == 0, done.err
    assert "parameters are of bf16 and f32" in done.out and "bf16 = 1" in done.out
    done = command("convert", saved[0], tmp_path / "wide", "--to", "zero1(dp=2, bf16=1)")
    assert done.status == 0 and "parameters are of" not in done.out
    ucpl.convert(tmp_path / "wide", tmp_path / "plain", "plain()")
    found = torch.load(tmp_path / "plain" / "plain.pt", weights_only=True)["params"]
    run = Run(0)
    run.load(saved[0])
    assert all(torch.equal(found[n]["fp32"], t.float()) for n, t in run.model.state_dict().items())


@pytest.mark.parametrize("call", ["zero1(dp=2)", "zero2(dp=2)", "zero3(dp=2)"])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_masters_of_weights_of_two_types_hold_both(
    tmp_path: Path, call: str, narrow: torch.dtype, other: torch.dtype
) -> None:
    """A flat buffer of masters has a type that holds each weight."""
    drawn = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
    weights = {"a.weight": drawn.to(narrow), "b.weight": (drawn + 1).to(other)}
    torch.save({"model": weights}, tmp_path / "run.pt")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "made", to=call)
    ucpl.convert(tmp_path / "made", tmp_path / "plain.pt", to="plain()")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)["params"]
    for name, weight in weights.items():
        assert torch.equal(found[name]["fp32"].double(), weight.double()), name
        assert torch.equal(found[name]["weight"], weight), name


def test_integers_are_not_trained(tmp_path: Path) -> None:
    """Torch has no gradients of integers, and flat buffers have none."""
    held = {"embeddings.position_ids": torch.arange(5)[None], "w.weight": torch.randn(3, 4)}
    (tmp_path / "hf").mkdir()
    save_file(held, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    save(held, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source in ("hf", "dcp"):
        ucpl.convert(tmp_path / source, tmp_path / f"{source}-zero", to="zero1(dp=2)")
        ucpl.convert(tmp_path / f"{source}-zero", tmp_path / f"{source}.pt", to="plain()")
        found = torch.load(tmp_path / f"{source}.pt", weights_only=True)
        assert found["params"].keys() == {"w.weight"}, source
        assert torch.equal(found["buffers"]["embeddings.position_ids"], held["embeddings.position_ids"]), source


def several(folder: Path, *dtypes: torch.dtype) -> Path:
    """A plain file with a parameter of each type in one group."""
    held = {}
    for n, dtype in enumerate(dtypes):
        numbers = (torch.arange(24).reshape(6, 4) + n).to(dtype)
        states = {name: (numbers + k).to(dtype) for k, name in enumerate(("weight", "exp_avg", "exp_avg_sq"))}
        held[f"p{n}"] = {**states, "step": torch.tensor(3.0)}
    torch.save({"params": held, "groups": [{"lr": 0.1, "params": list(held)}]}, folder / "several.pt")
    return folder / "several.pt"


TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtypes", [*pairwise(TYPES), *pairwise(TYPES[::-1]), TYPES], ids=str)
def test_ranks_that_share_a_tensor_store_one_dtype(dtypes: tuple[torch.dtype, ...], tmp_path: Path) -> None:
    """A rank with one narrow parameter has the wider type."""
    made = several(tmp_path, *dtypes)
    ucpl.convert(made, tmp_path / "zero", "zero1(dp = 3)")
    assert ucpl.verify(tmp_path / "zero")
    ucpl.convert(tmp_path / "zero", tmp_path / "back.pt", "plain()")
    before, after = (torch.load(path, weights_only=True)["params"] for path in (made, tmp_path / "back.pt"))
    for name, states in before.items():
        for state, value in states.items():
            assert torch.equal(value.double(), after[name][state].double()), (name, state)


@pytest.mark.parametrize("other", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["zero1(dp = 2)", "zero2(dp = 2)", "zero3(dp = 2)"])
def test_a_buffer_of_types_that_none_holds_is_refused_in_the_plan(
    target: str, other: torch.dtype, tmp_path: Path
) -> None:
    """Complex numbers and others: no cast is between them."""
    with pytest.raises(ucpl.UcplError) as caught:
        ucpl.plan(str(several(tmp_path, torch.complex64, other)), target)
    (error,) = caught.value.diagnostics
    assert error.code == "E306" and "one buffer of" in error.message and "freeze or drop" in error.remedy
    assert ucpl.convert(tmp_path / "several.pt", tmp_path / "made", "universal()")
