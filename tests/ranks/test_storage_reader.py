"""Any checkpoint through torch.distributed.checkpoint's own loader.

The values are those of `plain()`; only the requested bytes are read. This is one process; tests/interop/test_dcp.py
fills the ranks of real jobs, which continue their training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ucpl
from ucpl.errors import UcplError
from ucpl.extents import Extent
from ucpl.ranks.box_index import chunk_at

FIXTURES = Path(__file__).parents[1] / "fixtures"
KINDS = {
    "ZeRO-1 x TP, uneven": "deepspeed/tp2_dp2_z1_uneven",
    "pipeline": "deepspeed/pp2_dp2_z1",
    "ZeRO-3, weights from masters": "deepspeed/z3_dp2_subgroup",
}


def whole(source: Path, top: Path) -> dict[str, Any]:
    """The values of `plain()`, compared with the engines' states by tests."""
    ucpl.convert(source, top / "plain.pt", to="plain()")
    found: dict[str, Any] = torch.load(top / "plain.pt", weights_only=False)
    return found


def asked(source: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same names and shapes, with other values."""
    out = {f"model.{name}": states["weight"] for name, states in source["params"].items() if "weight" in states}
    out |= {f"model.{name}": buffer for name, buffer in source["buffers"].items()}
    for name, states in source["params"].items():
        for state, value in states.items():
            if state != "weight":
                out[f"optim.state.{name}.{state}"] = value
    return {name: value for name, value in out.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("kind", KINDS)
def test_dcp_loads_the_values_that_plain_has(tmp_path, kind):
    source = FIXTURES / KINDS[kind]
    wanted = asked(whole(source, tmp_path))
    assert len(wanted) > 20
    state = {
        name: torch.zeros_like(value) - 7 if value.is_floating_point() else torch.zeros_like(value)
        for name, value in wanted.items()
    }
    load(state, storage_reader=ucpl.StorageReader(source), no_dist=True)
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


def test_only_what_is_asked_for_is_read(tmp_path):
    source = FIXTURES / KINDS["ZeRO-1 x TP, uneven"]
    wanted = asked(whole(source, tmp_path))
    name = "model.blocks.0.mlp.down.weight"
    reader = ucpl.StorageReader(source)
    load({name: torch.zeros_like(wanted[name])}, storage_reader=reader, no_dist=True)
    assert reader.bytes_read == wanted[name].numel() * wanted[name].element_size()


class Small(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        self.register_buffer("calls", torch.full((), float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(top: Path, how: str) -> tuple[Path, list[float]]:
    """A model after three steps as another format, and its next losses."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model = Small(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2)
    trained(model, optimizer, 3)
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optim": states}, checkpoint_id=top / "dcp", no_dist=True)
    ucpl.convert(top / "dcp", top / "other", to=how)
    return top / "other", trained(model, optimizer, 3, 3)


def test_it_is_what_the_stock_reader_reads(tmp_path):
    source, _ = saved(tmp_path, "dcp(fsdp=3)")
    known = FileSystemReader(source).read_metadata().state_dict_metadata
    sizes: dict[str, Any] = {n: m for n, m in known.items() if n.startswith(("model.", "optim.state."))}
    assert {n.rpartition(".")[2] for n in sizes} == {"weight", "bias", "calls", "step", "exp_avg", "exp_avg_sq"}
    theirs, ours = ({n: torch.zeros(m.size, dtype=m.properties.dtype) for n, m in sizes.items()} for _ in range(2))
    load(theirs, checkpoint_id=source, no_dist=True)
    load(ours, storage_reader=ucpl.StorageReader(source), no_dist=True)
    assert all(torch.equal(ours[n], theirs[n]) for n in sizes)


def test_a_rank_reads_its_part_alone(tmp_path):
    """The second of two ranks: torch's fake group sends nothing."""
    source = FIXTURES / KINDS["ZeRO-1 x TP, uneven"]
    name, wanted = "model.blocks.0.mlp.down.weight", asked(whole(source, tmp_path))
    tensor = wanted[name]
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        for dim in (0, 1):
            part = tensor.chunk(2, dim)[1]
            mesh = DeviceMesh("cpu", [0, 1])
            local = DTensor.from_local(
                torch.zeros_like(part), mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
            reader = ucpl.StorageReader(source)
            load({name: local}, storage_reader=reader, no_dist=True)
            assert torch.equal(local.to_local(), part)
            assert reader.bytes_read == part.numel() * part.element_size() or dim == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["zero3(dp=3)", "zero1(dp=2)", "dcp(fsdp=3)"])
def test_training_continues_from_another_framework_with_the_same_losses(tmp_path, how):
    source, after = saved(tmp_path, how)
    model = Small(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    reader = ucpl.load_into(model, optimizer, source)
    assert reader.bytes_read > 0
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.05, 0.2)
    assert trained(model, optimizer, 3, 3) == after


def test_parameters_of_other_names_are_found(tmp_path):
    source, after = saved(tmp_path, "zero1(dp=2)")
    model = nn.Sequential()
    model.add_module("net", Small(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.2)
    ucpl.load_into(model, optimizer, source, rename=lambda name: name.removeprefix("net."))
    assert trained(model, optimizer, 3, 3) == after


def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path):
    source, _ = saved(tmp_path, "zero1(dp=2)")
    reader = ucpl.StorageReader(source)
    file = next(source.rglob("mp_rank_00_model_states.pt"))
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CheckpointException, match=r"E611: mp_rank_00_model_states\.pt changed"):
        load({"model.up.weight": torch.zeros(7, 5)}, storage_reader=reader, no_dist=True)


def test_what_is_stored_by_a_value_of_its_own_is_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    spec = tmp_path / "m.ucpl"
    spec.write_text(
        "ucpl 1\nmodel m {\n  dim r = 3\n  w : r dtype f32\n}\n"
        'layout own() of m {\n  framework torch()\n  file weights = torch "a.pt"\n  w = r  value x - 1  as "w"\n}\n'
    )
    with pytest.raises(UcplError, match="stored by a value of its own") as caught:
        ucpl.StorageReader(tmp_path, f"{spec}:own()")
    assert caught.value.diagnostics[0].code == "E642"


COPIES = """ucpl 1
model m {
  dim r = 4
  b : r dtype f32
}
layout own(dp=2) of m {
  framework torch()
  mesh dp
  file weights = torch "{dp}.pt"
  b = r  HOW @dp  as "b"
}
"""


@pytest.mark.parametrize("how", ["mean", "sum", "max"])
def test_what_is_made_of_copies_is_refused(tmp_path, how):
    (tmp_path / "src").mkdir()
    for rank in range(2):
        torch.save({"b": torch.arange(4.0) + rank}, tmp_path / f"src/{rank}.pt")
    spec = tmp_path / "m.ucpl"
    spec.write_text(COPIES.replace("HOW", how))
    with pytest.raises(UcplError, match=f"b of 1.pt is a {how} of copies") as caught:
        ucpl.StorageReader(tmp_path / "src", f"{spec}:own(dp=2)")
    assert caught.value.diagnostics[0].code == "E642"
    (tmp_path / "src/1.pt").unlink()
    state = {"model.b": torch.zeros(4)}
    load(state, storage_reader=ucpl.StorageReader(tmp_path / "src", f"{spec}:own(dp=1)"), no_dist=True)
    assert state["model.b"].tolist() == [0, 1, 2, 3]  # of one copy it is that one


def test_of_copies_that_may_differ_the_first_is_read(tmp_path):
    (tmp_path / "src").mkdir()
    for rank in range(2):
        torch.save({"b": torch.arange(4.0) + 10 * rank}, tmp_path / f"src/{rank}.pt")
    spec = tmp_path / "m.ucpl"
    spec.write_text(COPIES.replace("HOW", "any"))
    reader, state = ucpl.StorageReader(tmp_path / "src", f"{spec}:own(dp=2)"), {"model.b": torch.zeros(4)}
    load(state, storage_reader=reader, no_dist=True)
    assert state["model.b"].tolist() == [0, 1, 2, 3]
    assert reader.bytes_read == 16


def views() -> dict[str, torch.Tensor]:
    """Tensors that are not row-major, each under a descriptive name."""
    draw = torch.Generator().manual_seed(1)
    big = torch.randn(7, 6, 5, 4, generator=draw)
    return {
        "turned": torch.randn(3, 5, generator=draw).t(),
        "permuted": big.permute(2, 0, 3, 1),
        "a slice": big[1:5, ::2, :, 1],
        "rows of one": torch.randn(1, 6, generator=draw).expand(5, 6),
        "channels last": torch.randn(2, 3, 4, 4, generator=draw).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", views())
def test_tensors_that_were_saved_with_strides_are_read(tmp_path, name):
    """Completely, and the second of two parts by each dim."""
    tensor = views()[name]
    assert not tensor.is_contiguous()
    save({"model": {"w": tensor}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    params = {"params": {"w": {"weight": tensor}}, "buffers": {}, "aliases": {}, "groups": [], "scalars": {}}
    torch.save(params, tmp_path / "plain.pt")
    for source in (tmp_path / "dcp", tmp_path / "plain.pt"):
        state = {"model.w": torch.zeros(tensor.shape)}
        load(state, storage_reader=ucpl.StorageReader(source), no_dist=True)
        assert torch.equal(state["model.w"], tensor)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        for dim in range(tensor.dim()):
            part = tensor.chunk(2, dim)[1]
            mesh = DeviceMesh("cpu", [0, 1])
            local = DTensor.from_local(
                torch.zeros(part.shape), mesh, [Shard(dim)], run_check=False, shape=tensor.shape,
                stride=tensor.contiguous().stride(),
            )  # fmt: skip
            load({"model.w": local}, storage_reader=ucpl.StorageReader(tmp_path / "dcp"), no_dist=True)
            assert torch.equal(local.to_local(), part)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", views())
def test_a_part_of_a_tensor_that_was_saved_with_strides_is_found(name):
    tensor = views()[name]
    extent = Extent("f", ("k",), "f32", tuple(tensor.shape), tensor.stride(), 0, "0", 0, 0)
    rows = tensor.contiguous().stride()
    low = [n // 2 for n in tensor.shape]
    shape = tuple(n - a for n, a in zip(tensor.shape, low, strict=True))
    chunk = chunk_at(extent, (*shape, 1), sum(a * r for a, r in zip(low, rows, strict=True)), (*rows, 0))
    assert chunk is not None
    there = tensor.as_strided(shape, chunk.stride[:-1], tensor.storage_offset() + chunk.offset)
    assert torch.equal(there, tensor[tuple(slice(a, None) for a in low)])
    assert chunk_at(extent, (tensor.numel(),), 0, (1,)) is None  # one dim of all elements
    assert chunk_at(extent, shape, 0, tuple(2 * r for r in rows)) is None


def module_of(shapes: dict[str, torch.Size], dtype: torch.dtype) -> nn.Module:
    """A module with parameters of these names."""
    top = nn.Module()
    for name, shape in shapes.items():
        *steps, last = name.split(".")
        there = top
        for step in steps:
            if not hasattr(there, step):
                there.add_module(step, nn.Module())
            there = getattr(there, step)
        there.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return top


@pytest.mark.parametrize("name", ["z1_dp2_bf16", "z3_dp2_subgroup", "z0_dp2_bf16", "tp2_pp2_dp2_z1_bf16"])
def test_weights_of_a_wider_type_are_the_masters(tmp_path, name):
    """A mixed-precision job has masters as its parameters.

    A bf16 job gets the weights as stored.
    """
    source = FIXTURES / "deepspeed" / name
    wanted = asked(whole(source, tmp_path))
    weights = {n.removeprefix("model."): value for n, value in wanted.items() if n.startswith("model.")}
    masters = {n: wanted[m] for n in weights if (m := f"optim.state.{n}.fp32") in wanted}
    assert masters and any(not torch.equal(masters[n], weights[n].float()) for n in masters) == ("bf16" in name)
    for dtype in (torch.float32, torch.bfloat16):
        module = module_of({n: value.shape for n, value in weights.items()}, dtype)
        ucpl.load_into(module, None, source, strict=False)  # second names of tied ones are not asked for
        for n, value in module.named_parameters(remove_duplicate=False):
            truth = masters[n] if dtype == torch.float32 and n in masters else weights[n]
            assert torch.equal(value.detach(), truth.to(dtype)), n
