"""Places for one more item in a copy of a checkpoint."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401
from ucpl.records import frozen

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
SUFFIXES = ("", ".pt", ".bin", ".json", ".safetensors", ".txt", ".distcp", ".pth", ".npz", ".py", ".md", ".pkl")
FRAMEWORKS = ("megatron", "transformers", "accelerate", "lightning", "peft", "trl")
DEPTH = 8
Path_ = tuple[tuple[str, Any], ...]


@frozen
class Place:
    """A place for one item: its kind, its file and its path."""

    kind: str  # "key", "tensor", "attribute", "group", "file", "json", "stored", "header", "entry", "bytes"
    file: str
    way: Path_ = ()

    def __str__(self) -> str:
        return f"{self.kind} in {self.file}: {'/'.join(str(step) for _, step in self.way)}"


# ---- places -----------------------------------------------------------------------------------------------------------


def places(top: Path) -> list[Place]:
    """All places of a checkpoint, in a fixed order."""
    found: list[Place] = []
    for path in [top] if top.is_file() else sorted(top.rglob("*")):
        name = path.relative_to(top).as_posix()
        if path.is_dir():
            found += [Place("file", f"{name}/{{}}{suffix}") for suffix in SUFFIXES]
        else:
            found += _in_file(path, name)
    if top.is_dir():
        found += [Place("file", f"{{}}{suffix}") for suffix in SUFFIXES]
    return found


def _in_file(path: Path, name: str) -> Iterator[Place]:
    if path.name == ".metadata":
        held = load_metadata(path)
        for lead in sorted({key.rpartition(".")[0] for key in held.state_dict_metadata} | {""}):
            yield Place("entry", name, (("p", lead),))
            yield Place("blob", name, (("p", lead),))
        for key, entry in sorted(held.state_dict_metadata.items()):
            if isinstance(entry, BytesStorageMetadata):
                value = load_bytes(path.parent, held, key)
                yield from (Place(kind, name, (("e", key), *way)) for kind, way in ways(value))
    elif path.suffix == ".safetensors":
        yield Place("stored", name)
        yield Place("header", name)
    elif path.suffix == ".json":
        for kind, way in ways(json.loads(path.read_text())):
            if kind == "key":
                yield Place("json", name, way)
    elif path.suffix in PICKLED:
        try:
            value = load(path)
        except RuntimeError:  # sharded tensors of a process group that is not there
            return
        yield from (Place(kind, name, way) for kind, way in ways(value))


def ways(value: Any, way: Path_ = ()) -> Iterator[tuple[str, Path_]]:
    """Dicts, objects and lists of groups below a value."""
    if len(way) > DEPTH:
        return
    if isinstance(value, dict):
        yield "key", way
        yield "tensor", way
        for key, held in value.items():
            yield from ways(held, (*way, ("k", key)))
    elif isinstance(value, list | tuple):
        if isinstance(value, list) and value and isinstance(value[0], dict) and "params" in value[0]:
            yield "group", way
        for n, held in enumerate(value):
            yield from ways(held, (*way, ("k", n)))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, torch.Tensor | type | int | str):
        if type(value).__module__ != "builtins" and not callable(value):
            yield "attribute", way
            for key, held in vars(value).items():
                yield from ways(held, (*way, ("a", key)))


# ---- files ------------------------------------------------------------------------------------------------------------


_MODULES: dict[str, types.ModuleType] = {}


class StandIn:
    """An object of a missing framework; it keeps its pickled form."""

    def __new__(cls, *args: object) -> StandIn:
        made = super().__new__(cls)
        made.__dict__["_args"] = args
        return made

    def __init__(self, *args: object) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._args, {k: v for k, v in vars(self).items() if k != "_args"}  # type: ignore[attr-defined]


class Harm:
    """A system call: unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in FRAMEWORKS else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def made(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            cls = type(name, (StandIn,), {"__module__": spec.name})
            setattr(module, name, cls)
            return cls

        module.__getattr__ = made  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


@contextmanager
def stand_ins() -> Iterator[None]:
    """Give pickle stand-ins for the classes of missing frameworks."""
    barred = {name for name in FRAMEWORKS if sys.modules.get(name, sys) is None}  # by a test of a missing framework
    for name in barred:
        del sys.modules[name]
    known, finder = set(sys.modules), _Finder()
    sys.meta_path.append(finder)
    sys.modules.update({name: module for name, module in _MODULES.items() if name not in known})
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in {*sys.modules} - known:
            if name.split(".")[0] in FRAMEWORKS:
                _MODULES[name] = sys.modules.pop(name)
        sys.modules.update(dict.fromkeys(barred))  # type: ignore[arg-type]


def load(path: Path) -> Any:
    with stand_ins():
        if path.suffix == ".pkl" and not zipfile.is_zipfile(path):
            return pickle.loads(path.read_bytes())
        return torch.load(path, weights_only=False)


def store(path: Path, value: Any) -> None:
    with stand_ins():
        if path.suffix == ".pkl" and not zipfile.is_zipfile(path):
            path.write_bytes(pickle.dumps(value))
        else:
            torch.save(value, path)


def load_metadata(path: Path) -> Any:
    """The `.metadata` of a DCP folder of any release of torch."""

    def take(self: TensorProperties, state: Any) -> None:
        dtype, layout, requires_grad, memory, *_, pinned = state
        self.dtype, self.layout, self.requires_grad, self.pin_memory = dtype, layout, requires_grad, pinned
        self.memory_format = torch.preserve_format if "preserve" in str(memory) else torch.contiguous_format

    known = TensorProperties.__setstate__
    TensorProperties.__setstate__ = take  # type: ignore[method-assign]
    try:
        with stand_ins():
            return pickle.loads(path.read_bytes())
    finally:
        TensorProperties.__setstate__ = known  # type: ignore[method-assign]


def _write(path: Path, held: Metadata) -> None:
    with stand_ins():
        path.write_bytes(pickle.dumps(held))


def load_bytes(folder: Path, held: Metadata, key: str) -> Any:
    info = held.storage_data[MetadataIndex(key)]
    raw = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    with stand_ins():
        return torch.load(io.BytesIO(raw), weights_only=False)


def append(folder: Path, held: Metadata, index: MetadataIndex, value: Any) -> None:
    """Write an entry's bytes behind those of the first entry's file."""
    first = next(iter(held.storage_data.values()))
    file, out = folder / first.relative_path, io.BytesIO()
    with stand_ins():
        torch.save(value, out)
    offset = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(out.getvalue())
    held.storage_data[index] = type(first)(first.relative_path, offset, len(out.getvalue()))


# ---- planting ---------------------------------------------------------------------------------------------------------


def at(value: Any, way: Path_) -> Any:
    for how, step in way:
        value = getattr(value, step) if how == "a" else value[step]
    return value


def put(kind: str, value: Any, way: Path_, mark: str) -> None:
    held = at(value, way)
    match kind:
        case "key":
            held[mark] = 1
        case "tensor":
            held[mark] = torch.arange(5.0)
        case "call":
            held[mark] = Harm(mark)
        case "attribute":
            setattr(held, mark, 1)
        case "group":
            held.append({**copy.deepcopy(held[0]), "params": [], mark: 1})


def plant(top: Path, place: Place, mark: str) -> None:
    """Plant one item; its name is, or has, the mark."""
    path = top / place.file if top.is_dir() else top
    change: Callable[[Path, Place, str], None] = {
        "file": _file, "json": _json, "stored": _stored, "header": _stored, "entry": _entry, "blob": _entry,
    }.get(place.kind, _pickled)  # fmt: skip
    change(path, place, mark)


def _file(path: Path, place: Place, mark: str) -> None:
    new = path.with_name(path.name.format(mark))
    if new.suffix == ".safetensors":
        save_file({"w": torch.ones(2)}, new)
    elif new.suffix in PICKLED:
        store(new, {"a": 1})
    else:
        new.write_text("{}")


def _json(path: Path, place: Place, mark: str) -> None:
    value = json.loads(path.read_text())
    at(value, place.way)[mark] = "1"
    path.write_text(json.dumps(value))


def _stored(path: Path, place: Place, mark: str) -> None:
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        header = dict(file.metadata() or {})
    if place.kind == "stored":
        tensors[mark] = torch.ones(3)
    else:
        header[mark] = "1"
    save_file(tensors, path, header)


def _entry(path: Path, place: Place, mark: str) -> None:
    held, lead = load_metadata(path), place.way[0][1]
    name = f"{lead}.{mark}" if lead else mark
    if place.kind == "blob":
        held.state_dict_metadata[name] = BytesStorageMetadata()
        append(path.parent, held, MetadataIndex(name), [1])
    else:
        size, start = torch.Size([5]), torch.Size([0])
        held.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(torch.float32), size, [ChunkStorageMetadata(start, size)]
        )
        append(path.parent, held, MetadataIndex(name, start), torch.arange(5.0))
    if held.planner_data is not None:
        near = next((way for key, way in held.planner_data.items() if lead and key.startswith(f"{lead}.")), None)
        held.planner_data = {**held.planner_data, name: (*near[:-1], mark) if near else (name,)}
    _write(path, held)


def _pickled(path: Path, place: Place, mark: str) -> None:
    if place.way and place.way[0][0] == "e":
        held, key = load_metadata(path), place.way[0][1]
        value = load_bytes(path.parent, held, key)
        put(place.kind, value, place.way[1:], mark)
        append(path.parent, held, MetadataIndex(key), value)
        _write(path, held)
        return
    value = load(path)
    put(place.kind, value, place.way, mark)
    store(path, value)
