"""Reading and writing of the folder. index.json is

{"npy_folder": 1,
 "tensors": {NAME: {"kind": "parameter" | "frozen" | "buffer", "numbers": {STATE: NUMBER},
                    "files": {"weight" | STATE: [FILE, DTYPE]}}},
 "aliases": {NAME: OWNER}, "groups": [{"params": [NAME, ...], HYPER-PARAMETER: VALUE}], "global_steps": NUMBER or null}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Extent, Key, NamedTensor, ParameterGroup, Setting, StoredTensor, Structure, TrainState
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.demands import Demands
from ucpl.files.scalars import number_of

INDEX = "index.json"
MAGIC = "npy_folder"


class Store:
    name = MAGIC
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        """An index with our word in its first bytes."""
        index = path / INDEX
        return index.is_file() and f'"{MAGIC}"'.encode() in index.open("rb").read(64)

    def open(self, path: Path) -> Checkpoint:
        index: dict[str, Any] = json.loads((path / INDEX).read_text(encoding="utf-8"))
        extents: dict[tuple[str, Key], Extent] = {}
        tensors: list[NamedTensor] = []
        scalars: dict[str, dict[str, Any]] = {}
        for name, one in index["tensors"].items():
            for state, (file, dtype) in one["files"].items():
                extents[INDEX, (name, state)] = _extent(path, file, (name, state), dtype)
            weight = extents[INDEX, (name, "weight")]
            states = tuple(state for state in one["files"] if state != "weight")
            tensors.append(NamedTensor(name, weight.shape, weight.dtype, one["kind"], states))
            for state, number in one["numbers"].items():
                scalars.setdefault(state, {})[name] = number
        groups = tuple(
            ParameterGroup(str(n), tuple(group["params"]), {k: v for k, v in group.items() if k != "params"})
            for n, group in enumerate(index["groups"])
        )
        has_masters = int(any("fp32" in tensor.states for tensor in tensors))
        steps = index["global_steps"]
        return Checkpoint(
            top=path,
            root=path,
            tag=None,
            format=MAGIC,
            version=str(index[MAGIC]),
            extents=extents,
            carried_extents={},
            state=TrainState(
                MAGIC,
                tensors=tuple(tensors),
                aliases=dict(index["aliases"]),
                settings={"has_masters": Setting(has_masters, INDEX)},
                groups=groups,
                scalars=scalars,
                blobs={} if steps is None else {"global_steps": steps},
            ),
            files=(INDEX, *(extent.file for extent in extents.values())),
        )

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        run = source.state
        tensors: dict[str, dict[str, Any]] = {
            t.name: {"kind": t.kind, "numbers": {}, "files": {}} for t in structure.tensors
        }
        files = []
        for number, target in enumerate(targets):
            name, state = map(str, target.key)
            file = f"{number:05}.npy"
            tensors[name]["files"][state] = [file, target.dtype]
            head = _header(target.dtype, target.shape)
            size = target.numel * DTYPES[target.dtype].itemsize
            files.append(SkeletonFile(file, (head, size), "headed", storage_of={number: "0"}))
        for state, values in run.scalars.items():
            for name, value in values.items():
                if name in tensors:
                    tensors[name]["numbers"][state] = number_of(value)
        index = {
            MAGIC: 1,
            "tensors": tensors,
            "aliases": structure.aliases,
            "groups": [{"params": list(group.members), **_plain(group)} for group in run.groups],
            "global_steps": run.blobs.get("global_steps"),
        }
        return Skeleton("", tuple(files), {INDEX: json.dumps(index, indent=1) + "\n"})


def _extent(root: Path, file: str, key: Key, dtype: str) -> Extent:
    """The offset of a file's elements.

    Its header has the shape, the index the dtype: numpy has no bf16.
    """
    with (root / file).open("rb") as opened:
        npy.read_magic(opened)
        shape, is_fortran, _ = npy.read_array_header_1_0(opened)
        start = opened.tell()
    if is_fortran:
        fail("E471", f"{file} is in Fortran order", Label(str(root / file)))
    size = int(np.prod(shape, dtype=np.int64))
    stride = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    return Extent(file, key, dtype, tuple(shape), stride, 0, "0", start, size * DTYPES[dtype].itemsize)


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    from io import BytesIO

    known = {"f32": "<f4", "f64": "<f8", "f16": "<f2", "i64": "<i8", "i32": "<i4", "u8": "|u1", "bool": "|b1"}
    out = BytesIO()
    descr = known.get(dtype, f"|V{DTYPES[dtype].itemsize}")
    npy.write_array_header_1_0(out, {"descr": descr, "fortran_order": False, "shape": tuple(shape)})
    return out.getvalue()


def _plain(group: ParameterGroup) -> dict[str, Any]:
    """Hyper-parameters, which JSON can hold. Raises: UcplError E471."""
    for name, value in group.hyper.items():
        try:
            json.dumps(value)
        except TypeError:
            fail("E471", f"{name} of group {group.name} is no value of JSON", Label(INDEX, where=str(name)))
    return {str(name): value for name, value in group.hyper.items()}
