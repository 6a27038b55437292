"""Tensors that ranks cut outside model and optimizer.

An average of the weights is one. A target has each as one tensor. Folders are made by torch.distributed.checkpoint;
further chunks are appended, as each rank saves its part.
"""

from __future__ import annotations

import io
import pickle
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl

Cuts = tuple[tuple[int, ...], ...]
# Name -> shape and the edges of its chunks in each dim: rows as FSDP cuts, a grid, uneven ends, three dims, nothing at all.
CUT: dict[str, tuple[tuple[int, ...], Cuts]] = {
    "rows": ((5, 4), ((0, 3, 5), (0, 4))),
    "columns": ((5, 4), ((0, 5), (0, 1, 4))),
    "grid": ((5, 7), ((0, 2, 5), (0, 3, 6, 7))),
    "middle": ((2, 5, 3), ((0, 2), (0, 4, 5), (0, 3))),
    "line": ((9,), ((0, 1, 2, 9),)),
    "empty": ((0, 3), ((0,), (0, 3))),
}


def append(folder: Path, name: str, value: torch.Tensor, cuts: Cuts) -> None:
    """Add a tensor in chunks to a folder, as several ranks do."""
    path, file = folder / ".metadata", "__0_0.distcp"
    said = pickle.loads(path.read_bytes())
    chunks = []
    for number, box in enumerate(product(*(pairwise(edge) for edge in cuts))):
        begin, sizes = torch.Size(low for low, _ in box), torch.Size(high - low for low, high in box)
        part = value[tuple(slice(low, high) for low, high in box)].clone()
        held = io.BytesIO()
        torch.save(part, held)
        with (folder / file).open("ab") as out:
            place = _StorageInfo(file, out.tell(), len(held.getvalue()))
            out.write(held.getvalue())
        said.storage_data[MetadataIndex(name, begin, number)] = place
        chunks.append(ChunkStorageMetadata(begin, sizes))
    said.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, chunks)
    said.planner_data[name] = tuple(name.split(".", 1))
    path.write_bytes(pickle.dumps(said))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "source")
    for name, value in averages().items():
        append(tmp_path / "source", f"ema.{name}", value, CUT[name][1])
    return tmp_path / "source"


def averages() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in CUT.items()}


def assert_averages(held: dict[str, torch.Tensor]) -> None:
    wanted = averages()
    assert held.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(held[name], value)] == []


def test_cut_average_is_one_tensor_of_a_target(folder: Path, tmp_path: Path) -> None:
    ucpl.convert(folder, tmp_path / "target", to="dcp(fsdp=3)")
    held = {f"ema.{name}": torch.zeros(shape) for name, (shape, _) in CUT.items()}
    load(held, storage_reader=FileSystemReader(tmp_path / "target"))
    assert_averages({name.removeprefix("ema."): value for name, value in held.items()})
    ucpl.convert(tmp_path / "target", tmp_path / "all.pt", to="plain()")
    assert_averages(torch.load(tmp_path / "all.pt", weights_only=True)["envelope"]["carried"]["ema"])
    ucpl.convert(tmp_path / "target", tmp_path / "zero", to="zero1(dp=2)")
    files = sorted((tmp_path / "zero").glob("*/mp_rank_00_model_states.pt"))
    assert_averages(torch.load(files[0], weights_only=False)["ema"])


@pytest.mark.parametrize("name", ["grid", "middle"])
def test_compare_reads_each_chunk_of_an_average(name: str, folder: Path, tmp_path: Path) -> None:
    ucpl.convert(folder, tmp_path / "all.pt", to="plain()")
    assert ucpl.compare(folder, tmp_path / "all.pt")
    plain = torch.load(tmp_path / "all.pt", weights_only=True)
    plain["envelope"]["carried"]["ema"][name].view(-1)[-2] += 1
    torch.save(plain, tmp_path / "changed.pt")
    assert not ucpl.compare(folder, tmp_path / "changed.pt")
    assert ucpl.verify(folder)
