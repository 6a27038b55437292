"""Hugging Face folders as targets: shards of a given size, index, config.json."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, StorageRef, StoredTensor, Structure, TensorRef, key_text
from ucpl.files.carrying import strides
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.model_texts import carried_files
from ucpl.files.safetensors_files import ALIASES
from ucpl.files.values import Empty, Value
from ucpl.formats.huggingface.config import ADAPTER, written
from ucpl.formats.huggingface.weight_files import INDEX
from ucpl.records import define, frozen

__all__ = ["EMPTY", "Shards", "shard_bytes"]

EMPTY = "empty_tensors"  # the blob of tensors without elements, which no layout stores
_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def shard_bytes(text: object) -> int:
    """The bytes of a size such as `5GB`, `200MiB`, or a number.

    Units are powers of ten, or of two with an i, as in huggingface_hub. Raises: UcplError E387.
    """
    if isinstance(text, int) and text > 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        base = 1024 if match[3] else 1000
        size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
        if size > 0:
            return size
    fail("E387", f"`{text}` is no size of a shard", Label("<layout>", where="shard"), remedy='write shard = "5GB"')


@frozen
class _Tensor:
    """One tensor of a shard.

    target: the index of its target, or -1 for one without elements.
    """

    target: int
    name: str
    ref: TensorRef
    size: int


@define(eq=False)
class Shards:
    """A target's shards of at most `limit` bytes, per file."""

    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    limit: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.limit = shard_bytes(self.structure.settings.get("shard", "5GB"))

    def skeleton(self) -> Skeleton:
        files: list[SkeletonFile] = []
        texts = dict(written(self.source, self.targets).texts)
        for planned, members in self.planned().items():
            stem, shared = planned.removesuffix(".safetensors"), self.shared(planned)
            shards = cut(members, self.limit) if planned != ADAPTER else [members]  # PEFT reads no index
            paths = [planned]
            if len(shards) > 1:
                paths = [f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
                texts[stem + INDEX] = index_text(paths, shards)
            place = {t.target: i for i, shard in enumerate(shards) for t in shard if t.target >= 0}
            names = {t.target: t.name for shard in shards for t in shard}
            for i, (path, shard) in enumerate(zip(paths, shards, strict=True)):
                storage_of = {t.target: t.ref.storage.name for t in shard if t.target >= 0}
                second: dict[str, str] = {}
                for alias, owner in shared.items():
                    if place[owner] == i:
                        storage_of[alias] = storage_of[owner]
                        second[key_text(self.targets[alias].key)] = names[owner]
                inside = {t.name for t in shard}
                second |= {a: o for a, o in self.structure.aliases.items() if o in inside and a not in inside}
                metadata = {"format": "pt"} | ({ALIASES: json.dumps(second, sort_keys=True)} if second else {})
                value = {t.name: t.ref for t in shard}
                files.append(SkeletonFile(path, value, "safetensors", metadata, storage_of))
        other = ((n, raw) for n, raw in carried_files(self.source).items() if isinstance(raw, bytes))
        files += [SkeletonFile(name, raw, "bytes") for name, raw in other]
        return Skeleton(folder="", files=tuple(files), texts=texts)

    def planned(self) -> dict[str, list[_Tensor]]:
        """Tensors by the layout's file, in natural order.

        Layer 2 before layer 10.
        """
        out: dict[str, list[_Tensor]] = {}
        for t, target in enumerate(self.targets):
            if not target.file.endswith(".safetensors"):
                fail("E397", f"the layout writes {target.file}: weights of a Hugging Face folder are .safetensors files",
                     Label(target.file, where=key_text(target.key)))  # fmt: skip
            if target.shares is None:
                out.setdefault(target.file, []).append(_tensor(t, key_text(target.key), target.dtype, target.shape))
        noted = Value(self.source.top, self.source.top.name, (), self.source.state.blobs).find(EMPTY)
        for name, value in noted.named() if noted is not None else ():
            one = Empty.of(value)
            if out and all(name != t.name for t in next(iter(out.values()))):
                next(iter(out.values())).append(_tensor(-1, name, one.dtype, one.shape))
        return {file: sorted(tensors, key=lambda t: _natural(t.name)) for file, tensors in out.items()}

    def shared(self, planned: str) -> dict[int, int]:
        """Second names of tensors of a file: they are not written twice."""
        return {t: s.shares for t, s in enumerate(self.targets) if s.shares is not None and s.file == planned}


def _tensor(target: int, name: str, dtype: str, shape: tuple[int, ...]) -> _Tensor:
    numel = 1
    for n in shape:
        numel *= n
    ref = TensorRef(StorageRef(name, dtype, numel), 0, shape, strides(shape))
    return _Tensor(target, name, ref, numel * DTYPES[dtype].itemsize)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key of names with runs of digits as numbers.

    Numbers compare by the count of digits, then by the digits.
    """
    parts = [s for s in re.split(r"([0-9]+)", name) if s]
    return tuple((0, len(s.lstrip("0")), s.lstrip("0")) if s[0] in "0123456789" else (1, 0, s) for s in parts)


def cut(tensors: list[_Tensor], limit: int) -> list[list[_Tensor]]:
    """Shards as transformers cuts them.

    Tensors are in order. A tensor that would not fit begins a new shard; a larger one is a shard of its own.
    """
    done: list[list[_Tensor]] = []
    now: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.size > limit:
            done.append([tensor])
            continue
        if size + tensor.size > limit:
            done.append(now)
            now, size = [], 0
        now.append(tensor)
        size += tensor.size
    return done + ([now] if now or not done else [])


def index_text(paths: list[str], shards: list[list[_Tensor]]) -> str:
    """model.safetensors.index.json as transformers writes it."""
    everything = [t for shard in shards for t in shard]
    index = {
        "metadata": {
            "total_parameters": sum(t.ref.storage.numel for t in everything),
            "total_size": sum(t.size for t in everything),
        },
        "weight_map": {
            t.name: PurePosixPath(path).name for path, shard in zip(paths, shards, strict=True) for t in shard
        },
    }
    return json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
