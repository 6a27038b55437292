"""Hugging Face folders as they are written: weights in shards of a size that is asked for, an index, config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Key, StorageRef, StoredTensor, Structure, TensorRef, key_text
from ucpl.records import define, frozen
from ucpl.stores.carrying import strides
from ucpl.stores.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.stores.huggingface_demands import with_vocabulary
from ucpl.stores.huggingface_precedence import INDEX
from ucpl.stores.huggingface_texts import carried_files, carried_texts
from ucpl.stores.safetensors_files import ALIASES
from ucpl.stores.values import Empty, Value

__all__ = ["EMPTY", "Shards", "shard_bytes"]

EMPTY = "empty_tensors"  # the blob that tells of tensors without elements: no layout stores them
_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def shard_bytes(text: object) -> int:
    """`5GB`, `200MiB`, or a number of bytes. Powers of ten, of two with an i, as huggingface_hub reads them.

    Raises: UcplError E387.
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
    """One tensor of a shard: index of its target, or -1 for one without elements."""

    target: int
    name: str
    ref: TensorRef
    size: int


@define(eq=False)
class Shards:
    """A target's files: shards of at most `limit` bytes for each file that the layout names."""

    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    limit: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.limit = shard_bytes(self.structure.settings.get("shard", "5GB"))

    def skeleton(self) -> Skeleton:
        files: list[SkeletonFile] = []
        texts = self.texts()
        for planned, members in self.planned().items():
            stem, shared = planned.removesuffix(".safetensors"), self.shared(planned)
            shards = cut(members, self.limit)
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
                        second[_name(self.targets[alias].key)] = names[owner]
                inside = {t.name for t in shard}
                second |= {a: o for a, o in self.structure.aliases.items() if o in inside and a not in inside}
                metadata = {"format": "pt"} | ({ALIASES: json.dumps(second, sort_keys=True)} if second else {})
                value = {t.name: t.ref for t in shard}
                files.append(SkeletonFile(path, value, "safetensors", metadata, storage_of))
        other = ((n, raw) for n, raw in carried_files(self.source).items() if isinstance(raw, bytes))
        files += [SkeletonFile(name, raw, "bytes") for name, raw in other]
        return Skeleton(folder="", files=tuple(files), texts=texts)

    def planned(self) -> dict[str, list[_Tensor]]:
        """Tensors by the file that the layout names, in natural order of their names: layer 2 before layer 10."""
        out: dict[str, list[_Tensor]] = {}
        for t, target in enumerate(self.targets):
            if not target.file.endswith(".safetensors"):
                fail("E397", f"the layout writes {target.file}: weights of a Hugging Face folder are .safetensors files",
                     Label(target.file, where=key_text(target.key)))  # fmt: skip
            if target.shares is None:
                out.setdefault(target.file, []).append(_tensor(t, _name(target.key), target.dtype, target.shape))
        noted = Value(self.source.top, self.source.top.name, (), self.source.envelope.blobs).find(EMPTY)
        for name, value in noted.named() if noted is not None else ():
            one = Empty.of(value)
            if out and all(name != t.name for t in next(iter(out.values()))):
                next(iter(out.values())).append(_tensor(-1, name, one.dtype, one.shape))
        return {file: sorted(tensors, key=lambda t: _natural(t.name)) for file, tensors in out.items()}

    def shared(self, planned: str) -> dict[int, int]:
        """Second names of tensors of a file: they are not written twice."""
        return {t: s.shares for t, s in enumerate(self.targets) if s.shares is not None and s.file == planned}

    def texts(self) -> dict[str, str]:
        texts = {n: t for n, t in carried_texts(self.source).items() if not n.endswith(".index.json")}
        if {t.file for t in self.targets} == {"adapter_model.safetensors"}:
            texts.pop("config.json", None)  # transformers would look for the base model's weights here
        if (config := texts.get("config.json")) is not None:
            names = (_name(key) for _, key in self.source.extents)
            config = without_quantisation(config, names, (_name(t.key) for t in self.targets))
            named = {_name(t.key): t.shape for t in self.targets}
            texts["config.json"], _ = with_vocabulary(with_dtype(config, self.targets), named)
        return texts


def _tensor(target: int, name: str, dtype: str, shape: tuple[int, ...]) -> _Tensor:
    numel = 1
    for n in shape:
        numel *= n
    ref = TensorRef(StorageRef(name, dtype, numel), 0, shape, strides(shape))
    return _Tensor(target, name, ref, numel * DTYPES[dtype].itemsize)


def _name(key: Key) -> str:
    return "/".join(map(str, key))


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key to sort names by, in which runs of digits count as numbers: by how many digits, then by these."""
    parts = [s for s in re.split(r"([0-9]+)", name) if s]
    return tuple((0, len(s.lstrip("0")), s.lstrip("0")) if s[0] in "0123456789" else (1, 0, s) for s in parts)


def cut(tensors: list[_Tensor], limit: int) -> list[list[_Tensor]]:
    """Shards as transformers cuts them: in order, a new one where the next tensor would not fit; a larger one stands alone."""
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


_SCALES = ("_scale_inv", "_scales")  # what transformers reads beside quantised weights: fp8, mxfp4


def without_quantisation(config: str, source: Iterable[str], target: Iterable[str]) -> str:
    """config.json of a folder whose scales were used up: it has no quantised weights that a loader could look for."""
    if not any(n.endswith(_SCALES) for n in source) or any(n.endswith(_SCALES) for n in target):
        return config
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(value, dict) or value.pop("quantization_config", None) is None:
        return config
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


_CONFIG_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def with_dtype(config: str, targets: tuple[StoredTensor, ...]) -> str:
    """config.json with the dtype that most weights are written in; as it was where that is what it says, or it is no JSON."""
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        return config
    counts: dict[str, int] = {}
    for target in targets:
        if target.dtype in _CONFIG_DTYPES:
            counts[target.dtype] = counts.get(target.dtype, 0) + target.numel
    key = next((k for k in ("dtype", "torch_dtype") if isinstance(value, dict) and k in value), None)
    if key is None or not counts:
        return config
    dtype = _CONFIG_DTYPES[max(sorted(counts), key=lambda name: counts[name])]
    if value[key] in (dtype, None):
        return config
    value[key] = dtype
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
