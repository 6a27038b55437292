"""bf16 with a norm and a router in f32, AdamW and FSDP2.

Moments keep dtypes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import ucpl

pytestmark = pytest.mark.interop

WAYS = (
    ("dcp(fsdp = 3)",),
    ("plain()", "dcp(fsdp = 1)"),
    ("zero3(dp = 2)", "dcp(fsdp = 1)"),
    ("zero1(dp = 3)", "dcp(fsdp = 2)"),
)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10, bias=False, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(10, 6, bias=False, dtype=torch.bfloat16)
        self.norm, self.router = torch.nn.LayerNorm(6), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate: torch.Tensor = self.router(self.norm(x)).softmax(-1).amax(-1, keepdim=True)
        hidden: torch.Tensor = self.down(self.up(x.bfloat16()).relu())
        return hidden.float() * gate


def job() -> tuple[Model, torch.optim.AdamW]:
    model = Model()
    for part in (model.up, model.down, model.norm, model.router):
        if dist.is_initialized():
            fully_shard(part)
    groups = [
        {"params": [*model.up.parameters(), *model.down.parameters()], "lr": 0.1, "weight_decay": 0.3},
        {"params": [*model.norm.parameters()], "lr": 0.02, "weight_decay": 0.0},
        {"params": [*model.router.parameters()], "lr": 0.003, "weight_decay": 0.1},
    ]
    return model, torch.optim.AdamW(groups)


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def state_of(model: Model, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    out: dict[str, Any] = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        out |= {
            f"{name}.{key}": torch.as_tensor(whole(value)).clone() for key, value in optimizer.state[parameter].items()
        }
    for number, group in enumerate(optimizer.param_groups):
        out |= {f"{number}.{key}": torch.tensor(group[key]) for key in ("lr", "weight_decay", "betas", "eps")}
    return out


def rank(number: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    torch.manual_seed(0)
    model, optimizer = job()
    for _ in range(3):
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optim": states}, checkpoint_id=f"{folder}/source")
    found = state_of(model, optimizer)
    if number == 0:
        torch.save(found, f"{folder}/truth.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixed")
    spawn(rank, (str(made),), nprocs=2)
    return made


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0].partition("(")[0])
def test_torch_loads_each_moment_in_its_own_type(folder: Path, way: tuple[str, ...], tmp_path: Path) -> None:
    path = folder / "source"
    for n, target in enumerate(way):
        ucpl.convert(path, tmp_path / str(n), target)
        path = tmp_path / str(n)
    stored: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    truth = torch.load(folder / "truth.pt")
    for name in (n for n in truth if "exp_avg" in n):
        assert stored[f"optim.state.{name}"].properties.dtype == truth[name].dtype, name
    torch.manual_seed(1)
    model, optimizer = job()
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    held: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    load(held, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"])
    found = state_of(model, optimizer)
    assert {truth[name].dtype for name in truth if name.endswith("exp_avg")} == {torch.bfloat16, torch.float32}
    assert truth.keys() == found.keys()
    for name, value in truth.items():
        assert value.dtype == found[name].dtype and torch.equal(value, found[name]), name
