"""Shards of safetensors as a target: one file per rank.

HuggingFaceStorageWriter(save_distributed=True) writes them. Every chunk is in the file of the first rank that holds it,
and the header has its begin. Only weights are written. A rank without a chunk has a file without tensors, so that a
missing shard is detected. Small texts of a Hugging Face folder are copied.
"""

from __future__ import annotations

import json
from math import prod

from ucpl.errors import Label, fail
from ucpl.extents import StorageRef, StoredTensor, Structure, TensorRef
from ucpl.files.carrying import strides
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.model_texts import carried_texts
from ucpl.formats.dcp.shards import INFO
from ucpl.formats.dcp.writing import Shape, address
from ucpl.formats.huggingface.config import rewritten
from ucpl.formats.leaving import empty_tensors
from ucpl.records import define

__all__ = ["skeleton"]

_VERSION = {"format": "pt", "DCP_VERSION": "1.0"}


@define(eq=False)
class _Shard:
    """One rank's file: tensors, their begins, and each target's storage."""

    path: str
    value: dict[str, TensorRef]
    begins: dict[str, Shape]
    storage_of: dict[int, str]

    def add(self, name: str, dtype: str, begin: Shape, shape: Shape) -> None:
        """Raises: UcplError E392."""
        if name in self.value:
            fail(
                "E392",
                f"{self.path} would have two chunks of {name}, at {list(self.begins[name])} and at {list(begin)}",
                Label(self.path, where=name),
                remedy="a shard of safetensors has one chunk of a tensor: write dcp(...), which has room for several",
            )
        self.value[name] = TensorRef(StorageRef(name, dtype, prod(shape)), 0, shape, strides(shape))
        self.begins[name] = begin

    def file(self) -> SkeletonFile:
        info = {name: {"saved_offsets": list(begin)} for name, begin in self.begins.items()}
        return SkeletonFile(self.path, self.value, "safetensors", {**_VERSION, INFO: json.dumps(info)}, self.storage_of)


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint) -> Skeleton:
    """Raises: UcplError E392, E471."""
    degrees = (structure.settings.get(axis) for axis in ("fsdp", "tp"))
    ranks = max(prod(d for d in degrees if isinstance(d, int)), *(1 + t.rank for t in targets))
    shards = [_Shard(f"shard-{rank:05d}-model-00001-of-00001.safetensors", {}, {}, {}) for rank in range(1, ranks + 1)]
    for t in sorted(range(len(targets)), key=lambda t: targets[t].rank):
        target = targets[t]
        name, begin = address(target)
        shard = shards[target.rank]
        shard.add(name, target.dtype, begin, target.shape)
        shard.storage_of[t] = name
    for name, one in empty_tensors(source.state, source.root).items():
        shards[0].add(name, one.dtype, (0,) * len(one.shape), one.shape)
    texts = {name: text for name, text in carried_texts(source).items() if not name.endswith(".index.json")}
    if (config := texts.get("config.json")) is not None:
        stored = {tensor.name: tensor.shape for tensor in structure.tensors}
        texts["config.json"], _ = rewritten(config, source, targets, stored)
    return Skeleton(folder="", files=tuple(shard.file() for shard in shards), texts=texts)
