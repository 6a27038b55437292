"""Hugging Face folders: config.json, and weights in model.safetensors or in shards with an index. Read and written.

A layout speaks of one file, `model.safetensors`: how it falls into shards is an option of this store (`shard = "5GB"`),
decided by sizes while the target is laid out. Tensors of all shards are found under that one name. A spec that names other
files (`adapter_model.safetensors`, `unet/diffusion_pytorch_model.safetensors`) has these read and written, each with the
index of its own name. Without a spec the weights of a folder, whatever their name, are found as `model.safetensors`.

Not here: what a tensor means, and pytorch_model.bin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from attrs import define, evolve, field, frozen

from ucpl.errors import Label, fail
from ucpl.extents import (
    DTYPES,
    Envelope,
    Extent,
    Key,
    NamedTensor,
    Setting,
    StorageRef,
    StoredTensor,
    Structure,
    TensorRef,
    in_elements,
    key_text,
)
from ucpl.stores.carrying import strides
from ucpl.stores.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.stores.huggingface_texts import TEXT_BYTES_MAX, TEXTS, carried_texts, config_of, read_texts, version_of
from ucpl.stores.safetensors_files import SafetensorsFile, read_safetensors_file
from ucpl.stores.texts import is_text, read_small
from ucpl.stores.values import Empty, Value

__all__ = ["FILE", "TEXTS", "HuggingFace", "carried_texts", "config_of", "read_texts"]

FILE = "model.safetensors"  # what layouts call the weights, however many shards they have
INDEX = ".safetensors.index.json"
EMPTY = "empty_tensors"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_NOT_OURS = ("DCP_SHARDING_INFO", "CUSTOM_METADATA")  # of torch's HuggingFaceStorageWriter: pieces, not whole tensors


class HuggingFace:
    name = "huggingface"
    known_globals: frozenset[str] = frozenset()

    def recognises(self, path: Path) -> bool:
        """A .safetensors file, or a folder with some of which each is whole by itself, a shard, or listed by an index."""
        if path.is_file():
            return path.suffix == ".safetensors"
        return path.is_dir() and any(path.glob("*.safetensors"))

    def open(self, path: Path) -> Checkpoint:
        """Read all headers. Raises: UcplError E380-E386, and what the files raise (E400, E430-E434)."""
        return _Folder.of(path).checkpoint(path)

    def open_named(self, path: Path, files: Iterable[str]) -> Checkpoint:
        """The files that a spec names, or the shards that each has fallen into. Raises: as `open`, and E380 for one that
        is not there. A path that is a file is the one that is meant, where one is named."""
        names = list(dict.fromkeys(files))
        if path.is_file() and len(names) == 1:
            made = _Folder.of(path)
            made.planned = names[0]
            return made.checkpoint(path)
        root = path if path.is_dir() else path.parent
        return joined([_Folder.named(root, name).below(root, name, path) for name in names])

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """Shards of at most `shard` bytes, an index where there are several, and the source's small files.

        Raises: UcplError E387, E397.
        """
        return _Shards(structure, targets, source).skeleton()


# ---- reading ---------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Folder:
    root: Path
    names: list[str]  # the weights' files
    weight_map: dict[str, str] | None  # what the index says: tensor -> file
    index: str = ""
    stated_size: object = None  # what the index says, in bytes
    remarks: list[str] = field(factory=list)
    planned: str = FILE  # what the layout calls the weights
    found: dict[str, Extent] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)

    @classmethod
    def of(cls, path: Path) -> _Folder:
        if path.is_file():
            return cls(path.parent, [path.name], None)
        here = sorted(p.name for p in path.glob("*.safetensors") if p.is_file())
        indexes = sorted(p.name for p in path.glob("*" + INDEX))
        if len(indexes) > 1 and "model" + INDEX in indexes:
            indexes = ["model" + INDEX]
        if len(indexes) > 1:
            fail("E384", f"{path} has {len(indexes)} indexes", Label(str(path), where=", ".join(indexes)))
        if indexes:
            return cls._indexed(path, indexes[0], here)
        if FILE in here and len(here) > 1:
            made = cls(path, [FILE], None)
            made.remarks.append(f"{', '.join(n for n in here if n != FILE)}: not part of {FILE}, not read")
            return made
        if len(here) > 1:
            cls._complete(path, here)
        return cls(path, here, None)

    @classmethod
    def named(cls, root: Path, file: str) -> _Folder:
        """What a folder has of one file that a spec names: its index and shards, its shards, or itself."""
        path = (root / file).parent
        name = PurePosixPath(file).name
        stem = name.removesuffix(".safetensors")
        here = sorted(p.name for p in path.glob("*.safetensors") if p.is_file()) if path.is_dir() else []
        mine = [n for n in here if n == name or ((m := _SHARD.fullmatch(n)) is not None and m["stem"] == stem)]
        if (path / (stem + INDEX)).is_file():
            made = cls._indexed(path, stem + INDEX, mine)
        elif name in mine:
            made = cls(path, [name], None)
        elif mine:
            cls._complete(path, mine)
            made = cls(path, mine, None)
        else:
            there = sorted({_SHARD.sub(r"\g<stem>.safetensors", n) for n in here})
            fail(
                "E380",
                f"{file} is missing: the spec has tensors in it",
                Label(str(path / name), "not there"),
                remedy=f'the folder has {", ".join(there)}: write file weights = safetensors "{there[0]}"'
                if there
                else "give the folder that has the weights",
            )
        made.planned = file
        return made

    def below(self, root: Path, file: str, top: Path) -> Checkpoint:
        """The checkpoint of a folder that may lie below the one that was asked for: paths are relative to that."""
        made = self.checkpoint(top if self.root == root else self.root)
        under = PurePosixPath(file).parent
        return evolve(
            made,
            top=top,
            root=root,
            extents={place: evolve(e, file=str(under / e.file)) for place, e in made.extents.items()},
            files=tuple(str(under / name) for name in made.files),
        )

    @classmethod
    def _indexed(cls, path: Path, index: str, here: list[str]) -> _Folder:
        where = path / index
        raw = read_small(where, TEXT_BYTES_MAX)
        if raw is None:
            fail("E385", f"{index} has more than {TEXT_BYTES_MAX} bytes", Label(str(where)))
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            fail("E385", f"{index} is no JSON: {str(error)[:200]}", Label(str(where)))
        weight_map = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) and isinstance(file, str) for name, file in weight_map.items()
        ):
            fail("E385", f"{index} has no weight_map from tensors to files", Label(str(where), where="weight_map"))
        names = sorted(set(weight_map.values()))
        for name in names:
            if PurePosixPath(name).name != name or not name.endswith(".safetensors"):
                fail(
                    "E385", f"{index} names {name[:200]!a}, which is no .safetensors file beside it", Label(str(where))
                )
            if name not in here:
                tensor = next(t for t, f in weight_map.items() if f == name)
                fail(
                    "E380",
                    f"{name} is missing: the index has {sum(f == name for f in weight_map.values())} tensors in it",
                    Label(str(path / name), "not there"),
                    Label(str(where), "is named here", where=tensor),
                )
        metadata = value.get("metadata")
        made = cls(path, names, weight_map, index, metadata.get("total_size") if isinstance(metadata, dict) else None)
        unlisted = [name for name in here if name not in names]
        if unlisted:
            made.remarks.append(f"{', '.join(unlisted)}: not listed in {index}, not read")
        return made

    @staticmethod
    def _complete(path: Path, here: list[str]) -> None:
        """Shards without an index: all of one set, none missing."""
        shards = [(name, _SHARD.fullmatch(name)) for name in here]
        odd = [name for name, match in shards if match is None]
        sets = {(match["stem"], match["count"]) for _, match in shards if match is not None}
        if odd or len(sets) != 1:
            fail(
                "E384",
                f"{path} has {len(here)} .safetensors files, and no index says how they belong together",
                Label(str(path), where=", ".join(here[:6]) + (", ..." if len(here) > 6 else "")),
            )
        ((stem, count),) = sets
        for number in range(1, int(count) + 1):
            name = f"{stem}-{number:0{len(count)}d}-of-{count}.safetensors"
            if name not in here:
                fail("E380", f"{name} is missing", Label(str(path / name), "not there"))

    def checkpoint(self, top: Path) -> Checkpoint:
        parts = [self.read(name) for name in self.names]
        total = 0
        for part in parts:
            for name, extent in part.tensors.items():
                total += extent.numel * DTYPES[extent.dtype].itemsize
                self.keep(name, extent)
        for name, file in (self.weight_map or {}).items():
            if name not in self.found:
                fail(
                    "E381",
                    f"{file} has no tensor {name}, where the index has it",
                    Label(str(self.root / file), "not in this file", where=name),
                    Label(str(self.root / self.index), "is listed here", where=name),
                )
        if isinstance(self.stated_size, int) and self.stated_size != total:
            self.remarks.append(f"{self.index} states total_size {self.stated_size}, the shards hold {total} bytes")
        for part in parts:
            for alias, owner in (part.metadata or {}).items():
                if owner in self.found and alias not in self.found and is_text(alias):
                    self.aliases[alias] = owner
        texts, more = read_texts(self.root) if top.is_dir() else ({}, [])
        self.remarks += more
        empty = {name: extent for name, extent in self.found.items() if extent.numel == 0}
        blobs: dict[str, object] = {TEXTS: texts} if texts else {}
        if empty:
            blobs[EMPTY] = {n: {"dtype": e.dtype, "shape": list(e.shape), "buffer": True} for n, e in empty.items()}
        full = {name: extent for name, extent in self.found.items() if name not in empty}
        return Checkpoint(
            top=top,
            root=self.root,
            tag=None,
            framework="huggingface",
            version=version_of(texts),
            extents={(self.planned, (name,)): extent for name, extent in full.items()},
            carried_extents={},
            envelope=Envelope(
                "huggingface",
                version_of(texts),
                {"shards": Setting(len(parts), f"files of {self.root.name}")},
                blobs=blobs,
            ),
            tensors=tuple(
                NamedTensor(name, in_elements(e.dtype, e.shape), e.dtype, "parameter") for name, e in full.items()
            ),
            aliases=self.aliases,
            files=(*self.names, *((self.index,) if self.index else ()), *texts),
            remarks=tuple(self.remarks),
        )

    def read(self, name: str) -> SafetensorsFile:
        part = read_safetensors_file(self.root, name)
        if any(word in (part.metadata or {}) for word in _NOT_OURS):
            fail(
                "E386",
                f"{name} holds pieces of tensors, as torch.distributed.checkpoint saves them",
                Label(str(part.path), where="__metadata__"),
            )
        return part

    def keep(self, name: str, extent: Extent) -> None:
        stated = self.weight_map.get(name) if self.weight_map is not None else None
        other = self.found.get(name)
        if self.weight_map is not None and stated is None:
            self.remarks.append(f"{name} of {extent.file} is not listed in {self.index}: loaders may leave it out")
        if other is None:
            self.found[name] = extent
            if stated is not None and stated != extent.file:
                self.remarks.append(f"{self.index} has {name} in {stated}, it is in {extent.file}")
            return
        if stated is None or stated not in (other.file, extent.file):
            fail(
                "E382",
                f"{name} is in two files",
                Label(str(self.root / other.file), "here", where=name),
                Label(str(self.root / extent.file), "and here", where=name),
            )
        self.remarks.append(f"{name} is in {other.file} and in {extent.file}; the index says {stated}")
        if stated == extent.file:
            self.found[name] = extent


def joined(parts: Sequence[Checkpoint]) -> Checkpoint:
    """Several files' worth of one folder."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return evolve(
        first,
        extents={place: extent for part in parts for place, extent in part.extents.items()},
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        aliases={alias: owner for part in parts for alias, owner in part.aliases.items()},
        files=tuple(dict.fromkeys(name for part in parts for name in part.files)),
        remarks=tuple(dict.fromkeys(text for part in parts for text in part.remarks)),
    )


# ---- writing ---------------------------------------------------------------------------------------------------------


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
class _Shards:
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
                metadata = {"format": "pt"}
                for alias, owner in shared.items():
                    if place[owner] == i:
                        storage_of[alias] = storage_of[owner]
                        metadata[_name(self.targets[alias].key)] = names[owner]
                inside = {t.name for t in shard}
                metadata |= {a: o for a, o in self.structure.aliases.items() if o in inside and a not in inside}
                value = {t.name: t.ref for t in shard}
                files.append(SkeletonFile(path, value, "safetensors", metadata, storage_of))
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
        if (config := texts.get("config.json")) is not None:
            texts["config.json"] = with_dtype(config, self.targets)
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
    return tuple((0, int(s), "") if s.isdigit() else (1, 0, s) for s in re.split(r"(\d+)", name) if s)


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


_CONFIG_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def with_dtype(config: str, targets: tuple[StoredTensor, ...]) -> str:
    """config.json with the dtype that most weights are written in; as it was where that is what it says."""
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
