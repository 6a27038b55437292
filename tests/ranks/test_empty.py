"""Tensors without elements: no placement has them.

A model that has them is filled nevertheless.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ucpl
from ucpl.errors import UcplError
from ucpl.vault import Vault
from ucpl.vault.server import Server


class Cached(nn.Module):
    """A module with an empty parameter and an empty buffer.

    The parameter is the first of its group.
    """

    def __init__(self, seed: int, cache: tuple[int, ...] = (0, 4), void: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        if void:
            self.void = nn.Parameter(torch.empty(0, 3))
        self.up = nn.Linear(5, 7)
        if cache:
            self.register_buffer("cache", torch.empty(cache, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.up(x)
        return out + self.void.sum() if hasattr(self, "void") else out


def adam(model: nn.Module, lr: float = 0.3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    losses = []
    for step in range(first, first + 3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(top: Path, to: str = "", **how: Any) -> tuple[Path, list[float]]:
    """A DCP folder after three steps, and the next losses.

    It is converted, if `to` is given.
    """
    model = Cached(1, **how)
    optimizer = adam(model, 0.05)
    trained(model, optimizer, 0)
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optim": states}, checkpoint_id=top / "dcp", no_dist=True)
    if to:
        ucpl.convert(top / "dcp", top / "other", to)
    return top / ("other" if to else "dcp"), trained(model, optimizer, 3)


KINDS = ["", "plain()", "zero1(dp=2)", "zero3(dp=2)", "dcp(fsdp=2)"]


@pytest.mark.parametrize("to", KINDS)
def test_a_saved_model_continues(tmp_path, to):
    source, after = saved(tmp_path, to)
    model = Cached(2)
    optimizer = adam(model)
    reader = ucpl.load_into(model, optimizer, source)
    assert optimizer.param_groups[0]["lr"] == 0.05  # of the group that the first parameter with elements is in
    assert trained(model, optimizer, 3) == after
    assert reader.bytes_read == 3 * 4 * (35 + 7)


@pytest.mark.parametrize("to", [*KINDS, "safetensors_shards(fsdp=2)"])
def test_they_are_in_the_index_and_nothing_is_read_for_them(tmp_path, to):
    source, _ = saved(tmp_path, to)
    reader = ucpl.StorageReader(source)
    known = reader.read_metadata().state_dict_metadata
    for name, value in Cached(1).state_dict().items():
        entry = known[f"model.{name}"]
        assert isinstance(entry, TensorStorageMetadata)
        assert (entry.properties.dtype, entry.size) == (value.dtype, value.shape)
    state = {"model": {"cache": torch.empty(0, 4), "void": torch.empty(0, 3)}}
    load(state, storage_reader=reader, no_dist=True)
    assert reader.bytes_read == 0
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        for dim in (0, 1):
            part = torch.empty((0, 4)).chunk(2, dim)[-1]
            local = DTensor.from_local(
                part, mesh, [Shard(dim)], run_check=False, shape=torch.Size((0, 4)), stride=(4, 1)
            )
            load({"model.cache": local}, storage_reader=reader, no_dist=True)
    finally:
        dist.destroy_process_group()


def test_a_model_in_a_vault_continues(tmp_path):
    model = Cached(1)
    optimizer = adam(model, 0.05)
    trained(model, optimizer, 0)
    vault = Vault.make(tmp_path / "job", ranks=1, domains=1, protect="none")
    with Server(tmp_path / "job", 0) as server, vault.writer(0, run="first", wait=0.0, strict=True) as writer:
        writer.save(1, (model, optimizer))
        server.turn()
        server.turn()
        assert writer.committed() == (1, 1)
    after = trained(model, optimizer, 3)
    other = Cached(2)
    again = adam(other)
    ucpl.load_into(other, again, f"vault:{tmp_path / 'job'}")
    assert trained(other, again, 3) == after


@pytest.mark.parametrize("shape", [(0, 5), (2, 4), (0,)])
def test_another_shape_is_refused(tmp_path, shape):
    source, _ = saved(tmp_path)
    text = f"cache is {list(shape)} in the job, and [0, 4] in the checkpoint"
    with pytest.raises(UcplError) as caught:
        ucpl.load_into(Cached(2, cache=shape), None, source)
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].message) == ("E646", text)


def test_one_that_the_checkpoint_lacks_is_not_asked_for(tmp_path):
    source, after = saved(tmp_path, "zero1(dp=2)", cache=(), void=False)
    model = Cached(2)
    optimizer = adam(model)
    ucpl.load_into(model, optimizer, source)
    assert trained(model, optimizer, 3) == after
    with pytest.raises(UcplError, match="the model has cache, and the checkpoint has not"):
        ucpl.load_into(Cached(2, cache=(2, 4)), None, source)


def test_one_that_the_model_lacks_is_nothing_that_is_lost(tmp_path):
    source, after = saved(tmp_path)
    model = Cached(2, cache=(), void=False)
    optimizer = adam(model)
    ucpl.load_into(model, optimizer, source)
    assert trained(model, optimizer, 3) == after
