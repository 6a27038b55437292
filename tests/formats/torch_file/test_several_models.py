"""Files with several models, of one optimizer, an optimizer each, and averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ucpl
from tests.cli.command import ucpl as command
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint


def two() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), nn.Linear(4, 3)


def stepped(models: tuple[nn.Module, ...], optimizers: list[torch.optim.Optimizer], steps: int = 2) -> list[float]:
    torch.manual_seed(4)
    losses = []
    for _ in range(steps):
        x = torch.randn(7, 6)
        for one in models:
            x = one(x)
        for optimizer in optimizers:
            optimizer.zero_grad()
        x.square().sum().backward()
        losses.append(float(x.detach().square().sum()))
        for optimizer in optimizers:
            optimizer.step()
    return losses


def together(models: tuple[nn.Module, ...]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([{"params": [*one.parameters()], "lr": 0.1 * (n + 1)} for n, one in enumerate(models)])]


@pytest.mark.parametrize("via", ["torch_file()", "plain()", "dcp(fsdp=3)"])
def test_an_optimizer_of_two_models_trains_on(via: str, tmp_path: Path) -> None:
    models = two()
    [optimizer] = together(models)
    stepped(models, [optimizer])
    kept = {"encoder": models[0].state_dict(), "decoder": models[1].state_dict(), "optim": optimizer.state_dict()}
    torch.save(kept | {"epoch": 3}, tmp_path / "run.pt")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "via", via)
    back = 'torch_file(model="encoder,decoder", optimizer="optim")'
    ucpl.convert(tmp_path / "via", tmp_path / "back", back)
    assert ucpl.compare(tmp_path / "run.pt", tmp_path / "back")
    losses = stepped(models, [optimizer])
    held: dict[str, Any] = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert held["epoch"] == 3
    others = two()
    [resumed] = together(others)
    for model, name in zip(others, ("encoder", "decoder"), strict=True):
        model.load_state_dict(held[name], strict=True)
    resumed.load_state_dict(held["optim"])
    assert stepped(others, [resumed]) == losses
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.2]


def test_models_with_an_optimizer_each_are_read_as_one_on_request(tmp_path: Path) -> None:
    models = two()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in models
    ]
    stepped(models, optimizers)
    kept: dict[str, Any] = {"netG": models[0].state_dict(), "netD": models[1].state_dict()}
    kept |= {"optimG": optimizers[0].state_dict(), "optimD": optimizers[1].state_dict()}
    torch.save(kept, tmp_path / "gan.pt")
    with pytest.raises(UcplError) as caught:
        open_checkpoint(tmp_path / "gan.pt")
    first = caught.value.diagnostics[0]
    assert first.code == "E447" and 'model="netG,netD" reads all as one' in first.remedy
    ucpl.convert(tmp_path / "gan.pt", tmp_path / "one", "dcp(fsdp=2)", layout='torch_file(model="netG,netD")')
    tensors = {one.name: one for one in open_checkpoint(tmp_path / "one").state.tensors}
    assert len(tensors) == 6 and all(name.startswith(("netG.", "netD.")) for name in tensors)
    assert all(one.states == ("momentum_buffer",) for one in tensors.values())


def test_a_teacher_is_not_joined_to_the_model_that_is_trained(tmp_path: Path) -> None:
    student, teacher = two()[0], two()[0]
    optimizer = torch.optim.AdamW(student.parameters())
    stepped((student,), [optimizer])
    kept = {"student": student.state_dict(), "teacher": teacher.state_dict(), "center": {"mean": torch.zeros(1, 4)}}
    torch.save(kept | {"optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(UcplError) as caught:
        open_checkpoint(tmp_path / "run.pt")
    assert caught.value.diagnostics[0].code == "E447"


def test_a_key_called_params_is_a_model(tmp_path: Path) -> None:
    """As scripts of super-resolution save it, with an average next to it."""
    held = two()[0].state_dict()
    torch.save({"params": held, "params_ema": {name: one + 1 for name, one in held.items()}}, tmp_path / "net.pth")
    ucpl.convert(tmp_path / "net.pth", tmp_path / "out", "torch_file()")
    made = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert made.keys() == {"params", "params_ema"}
    for key, more in (("params", 0), ("params_ema", 1)):
        assert all(torch.equal(made[key][name], one + more) for name, one in held.items())


@pytest.mark.parametrize("via", ["plain()", "zero1(dp=2)", "zero3(dp=2)", "universal()", "dcp(fsdp=3)"])
def test_two_names_of_a_buffer_come_back(via: str, tmp_path: Path) -> None:
    """With dims and without.

    DCP stores both: equal bytes of buffers are no sign.
    """
    rates, calls, scale = torch.arange(5.0), torch.tensor(7), torch.tensor(2.5)
    held = {"w": torch.arange(12.0).view(3, 4), "a.rates": rates, "a.calls": calls, "a.scale": scale}
    held |= {"b.rates": rates, "b.calls": calls, "b.scale": scale}
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0], "param_names": ["w"]}]}
    torch.save({"model": held, "optimizer": optimizer}, tmp_path / "run.pt")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "via", via)
    ucpl.convert(tmp_path / "via", tmp_path / "back", "torch_file()")
    made = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(made[name], one) for name, one in held.items()) and made.keys() == held.keys()
    assert (made["a.rates"].data_ptr() == made["b.rates"].data_ptr()) == (via != "dcp(fsdp=3)")


@pytest.mark.parametrize("via", ["", "zero1(dp=2)", "dcp(fsdp=2)"])
def test_a_loss_with_parameters_is_read_with_the_model_that_it_trains(via: str, tmp_path: Path) -> None:
    """The key `model` does not decide."""
    models = two()
    optimizers = together(models)
    stepped(models, optimizers)
    held = {"model": models[0].state_dict(), "criterion": models[1].state_dict()}
    torch.save({**held, "optimizer": optimizers[0].state_dict()}, tmp_path / "one.pt")
    losses = stepped(models, optimizers)
    source = tmp_path / "one.pt"
    if via:
        ucpl.convert(source, tmp_path / "via", via)
        source = tmp_path / "via"
    ucpl.convert(source, tmp_path / "back.pt", 'torch_file(model="model,criterion")')
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    fresh = two()
    again = together(fresh)
    for one, key in zip(fresh, ("model", "criterion"), strict=True):
        one.load_state_dict(back[key])
    again[0].load_state_dict(back["optimizer"])
    assert stepped(fresh, again) == losses


@pytest.mark.parametrize("form", [tuple, list])
@pytest.mark.parametrize("via", ["", "zero1(dp=2)"])
def test_state_dicts_in_a_tuple_are_a_model_and_its_optimizer(form: type, via: str, tmp_path: Path) -> None:
    """As in `torch.save((model.state_dict(), optimizer.state_dict()), path)` of Ray Tune's examples."""
    models = two()
    optimizers = together(models[:1])
    stepped(models[:1], optimizers)
    held = form([models[0].state_dict(), optimizers[0].state_dict(), {"epoch": 3}])
    torch.save(held, tmp_path / "one.pt")
    losses = stepped(models[:1], optimizers)
    source = tmp_path / "one.pt"
    if via:
        ucpl.convert(source, tmp_path / "via", via)
        source = tmp_path / "via"
    ucpl.convert(source, tmp_path / "back.pt", "torch_file()")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    fresh = two()[:1]
    again = together(fresh)
    fresh[0].load_state_dict(back["model"])
    again[0].load_state_dict(back["optimizer"])
    assert stepped(fresh, again) == losses
    assert back["2"] == {"epoch": 3}


@pytest.mark.parametrize("via", ["", "zero1(dp=2)", "dcp(fsdp=2)"])
def test_a_sparse_tensor_stays_with_the_weights(via: str, tmp_path: Path) -> None:
    held = {"a.weight": torch.randn(3, 4), "a.mask": torch.eye(4).to_sparse()}
    torch.save({"model": held, "epoch": 3}, tmp_path / "one.pt")
    source = tmp_path / "one.pt"
    if via:
        ucpl.convert(source, tmp_path / "via", via)
        source = tmp_path / "via"
    ucpl.convert(source, tmp_path / "back.pt", "torch_file()")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert torch.equal(back["model"]["a.weight"], held["a.weight"])
    assert torch.equal(back["model"]["a.mask"].to_dense(), torch.eye(4))


def test_a_tree_of_dicts_is_read_as_one_on_request(tmp_path: Path) -> None:
    """A file of ucpl's own has weights under `params`."""
    dense = {"kernel": torch.randn(3, 4), "bias": torch.randn(4)}
    torch.save({"params": {"dense": dense, "out": {"kernel": torch.randn(4, 2)}}}, tmp_path / "one.pt")
    printed = command("convert", tmp_path / "one.pt", tmp_path / "a", "--to", "zero1(dp=2)").err
    call = 'torch_file(model="params/dense,params/out")'
    assert "E447" in printed and 'model="params/dense,params/out" reads all as one' in printed
    ucpl.convert(tmp_path / "one.pt", tmp_path / "a", "safetensors()", layout=call)
    made = load_file(tmp_path / "a" / "model.safetensors")
    assert torch.equal(made["params.dense.kernel"], dense["kernel"]) and len(made) == 3
