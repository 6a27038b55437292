"""Odd folders of torch.distributed.checkpoint.

Every folder that torch loads is converted bit for bit, or refused with a code.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.files.values import same_bits
from ucpl.errors import UcplError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where a chunk begins, and its size
W = torch.arange(48.0).reshape(6, 8)


def outcome(folder: Path, wanted: dict[str, torch.Tensor], out: Path, lead: str = "") -> str:
    """ "equal", or the code of the refusal.

    Torch loads each of these folders.

    wanted: shapes and dtypes that torch is asked for, by name. lead: the part of these names that ours lack.
    """
    theirs = {name: torch.zeros_like(t) for name, t in wanted.items()}
    load(theirs, checkpoint_id=folder, no_dist=True)
    try:
        ucpl.convert(folder, out, to="plain()")
    except UcplError as error:
        return error.diagnostics[0].code
    held = torch.load(out, weights_only=True)
    ours = {name: states["weight"] for name, states in held["params"].items()} | held["buffers"]
    theirs = {name.removeprefix(lead): tensor for name, tensor in theirs.items()}
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape and ours[name].dtype == tensor.dtype, name
        assert same_bits(ours[name], tensor), name
    return "equal"


def folder_of(
    folder: Path, tensors: dict[str, torch.Tensor], boxes: dict[str, Sequence[Box]], *, files: int = 1, spoil: str = ""
) -> Path:
    """A folder whose chunks are these boxes, dealt to files in turn.

    Spoil: a name whose later chunks are other numbers.
    """
    datas = [io.BytesIO() for _ in range(files)]
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    count = 0
    for name, tensor in tensors.items():
        chunks = []
        for n, (begin, size) in enumerate(boxes[name]):
            part = tensor[tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))].clone()
            if name == spoil and n:
                part += 100
            data, number = datas[count % files], count % files
            start = data.tell()
            torch.save(part, data)
            places[MetadataIndex(name, torch.Size(begin), n)] = _StorageInfo(
                f"__{number}_0.distcp", start, data.tell() - start
            )
            chunks.append(ChunkStorageMetadata(torch.Size(begin), torch.Size(size)))
            count += 1
        described[name] = TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.size(), chunks)
    folder.mkdir()
    for number, data in enumerate(datas):
        (folder / f"__{number}_0.distcp").write_bytes(data.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=places)))
    return folder


ROWS: list[Box] = [((0, 0), (1, 8)), ((1, 0), (4, 8)), ((5, 0), (1, 8))]
CHUNKS: dict[str, list[Box]] = {
    "one": [((0, 0), (6, 8))],
    "uneven rows": ROWS,
    "rows in another order": ROWS[::-1],
    "columns": [((0, 0), (6, 3)), ((0, 3), (6, 5))],
    "a grid": [((r, c), (3, 4)) for r in (0, 3) for c in (0, 4)],
    "no grid": [((0, 0), (6, 2)), ((0, 2), (2, 6)), ((2, 2), (4, 6))],
    "bricks": [((0, 0), (3, 5)), ((0, 5), (3, 3)), ((3, 0), (3, 2)), ((3, 2), (3, 6))],
    "an empty chunk": [((0, 0), (6, 8)), ((6, 0), (0, 8))],
    "an empty chunk first": [((0, 0), (0, 8)), ((0, 0), (6, 8))],
    "a hole": ROWS[:2],
    "overlapping": [((0, 0), (4, 8)), ((2, 0), (4, 8))],
    "twice": [((0, 0), (6, 8)), ((0, 0), (6, 8))],
    "beyond its end": [((0, 0), (6, 8)), ((6, 0), (2, 8))],
}  # fmt: skip
REFUSED = {"a hole": "E521", "overlapping": "E521", "twice": "E455", "beyond its end": "E455"}
UNSURE = {"overlapping", "twice"}  # two numbers of one element


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_are_joined_as_torch_joins_them(name: str, files: int, tmp_path: Path) -> None:
    spoil = "w" if name in UNSURE else ""
    tensors = {"w": W, "b": torch.arange(3)}
    source = folder_of(tmp_path / "s", tensors, {"w": CHUNKS[name], "b": [((0,), (3,))]}, files=files, spoil=spoil)
    found = outcome(source, tensors, tmp_path / "p.pt")
    assert found == REFUSED.get(name, "equal")


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"a": W, "b": torch.arange(3)},
    "nested": lambda: {"model": {"a.b": W, "c": {"d": W[0].clone()}}},
    "views": lambda: {"t": W.t(), "column": W[:, 1], "every": W[::2], "expanded": W[:1].expand(3, 8)},
    "shared": lambda: {"a": W, "b": W, "row": W[1]},
    "no dims": lambda: {"s": torch.tensor(2.5), "w": W},
    "empty": lambda: {"e": torch.zeros(0, 3), "w": W},
    "names": lambda: {"ä é 漢字": W, "a/b": W + 1, "x y": W + 2, "..": W + 3, "a" * 300: W + 4},
    "names that end alike": lambda: {"a": W, "a.a": W + 1, "a.a.a": W + 2},
    "booleans": lambda: {"m": torch.tensor([True, False, True]), "w": W},
    "numbers": lambda: {"i8": torch.arange(5, dtype=torch.int8), "i64": torch.tensor([1 << 62]), "u8": torch.arange(3).byte()},
    "narrow": lambda: {"h": W.half(), "bf": W.bfloat16(), "f8": W.to(torch.float8_e4m3fn), "f8b": W.to(torch.float8_e5m2)},
    "wide": lambda: {"d": W.double(), "w": W},
    "complex": lambda: {"c": torch.complex(W, W)},
    "conjugate": lambda: {"c": torch.complex(W, W).conj(), "w": W},
    "parameters": lambda: {"p": torch.nn.Parameter(W.clone()), "b": torch.nn.Buffer(W + 1)},
    "many": lambda: {f"layers.{n}.w": torch.full((2, 2), float(n)) for n in range(150)},
    "a list": lambda: {"l": [W, W + 1], "w": W},
    "numbers beside": lambda: {"w": W, "epoch": 3, "note": "x", "nothing": None},
}  # fmt: skip
# Names without the dict of the model, as a job's model has them.
LEADS = {"nested": "model."}
REFUSED_STATES = {"conjugate": "E455"}


def flat(state: Any, lead: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {".".join(lead): state.detach()}
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {k: t for name, value in pairs for k, t in flat(value, (*lead, str(name))).items()}


@pytest.mark.parametrize("name", STATES)
def test_what_torch_saves_is_read_as_it_loads_it(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    save(state, checkpoint_id=tmp_path / "s", no_dist=True)
    found = outcome(tmp_path / "s", flat(state), tmp_path / "p.pt", LEADS.get(name, ""))
    assert found == REFUSED_STATES.get(name, "equal")
