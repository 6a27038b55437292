"""Facts of a checkpoint for `inspect`, from headers alone, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, TypedDict

from ucpl.extents import DTYPES

if TYPE_CHECKING:
    from ucpl.extents import NamedTensor, ParameterGroup
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["Facts", "facts"]

_DEGREES = ("dp", "tp", "pp", "ep")


class Count(TypedDict):
    tensors: int
    elements: int


class SettingFacts(TypedDict):
    value: object
    origin: str


class GroupFacts(TypedDict):
    members: int
    elements: int
    hyper: dict[str, object]


class TensorFacts(TypedDict):
    name: str
    shape: list[int]
    dtype: str
    kind: str
    states: list[str]


class ContainerFacts(TypedDict):
    kind: str
    title: str
    files: dict[str, str]  # name -> its use: carry, weights, rank, or unknown
    skipped: dict[str, str]  # name -> reason for which it is not used


class Facts(TypedDict):
    """All output of `inspect`, with the keys of `--json` in order."""

    checkpoint: str
    framework: str
    version: str
    tag: str | None
    files: int
    bytes: int
    mesh: dict[str, object]  # axis -> degree
    settings: dict[str, SettingFacts]
    kinds: dict[str, Count]  # parameter, frozen, buffer
    stored_tensors: int
    bytes_by_dtype: dict[str, int]
    states: dict[str, int]  # how many tensors have each
    scalars: dict[str, list[object]]
    groups: list[GroupFacts]
    aliases: dict[str, str]
    frozen: list[str]
    buffers: list[str]
    cuts: dict[str, int]  # origin of tensors' cuts over tp -> number of tensors
    carried: list[str]
    client_state: dict[str, str]
    unknown_globals: list[str]
    container: ContainerFacts | None
    not_stored: list[str]
    not_read: dict[str, str]  # files and values that the reader passes by, each with the reason
    remarks: list[str]
    tensors: list[TensorFacts]


def facts(c: Checkpoint) -> Facts:
    """The facts of an opened checkpoint. No tensor is read."""
    from ucpl.files.pickles import unsafe_globals
    from ucpl.files.scalars import number_of
    from ucpl.formats.opening import known_globals
    from ucpl.formats.overlooked import not_read_of
    from ucpl.verification.values import value_text

    train_state = c.state
    elements = {t.name: prod(t.shape) for t in c.state.tensors}
    held = [train_state.carried, train_state.blobs, [g.hyper for g in train_state.groups]]
    settings = train_state.settings
    unsafe = set(unsafe_globals(held))
    return {
        "checkpoint": str(c.top),
        "framework": c.format,
        "version": train_state.version or c.version,
        "tag": c.tag,
        "files": len(c.files),
        "bytes": _bytes_of_files(c),
        "mesh": {n: s.value for n in _DEGREES if (s := settings.get(n)) is not None},
        "settings": {n: {"value": s.value, "origin": s.origin} for n, s in settings.items() if n not in _DEGREES},
        "kinds": _kinds(c.state.tensors),
        "stored_tensors": len(c.extents),
        "bytes_by_dtype": _bytes_by_dtype(c),
        "states": _states(c.state.tensors),
        "scalars": _scalars(train_state.scalars),
        "groups": [_group(g, elements) for g in train_state.groups],
        "aliases": dict(c.state.aliases),
        "frozen": [t.name for t in c.state.tensors if t.kind == "frozen"],
        "buffers": [t.name for t in c.state.tensors if t.kind == "buffer"],
        "cuts": dict(Counter(s.origin for s in c.state.parallel.shardings.values() if s.dim is not None)),
        "carried": sorted(train_state.blobs),
        "client_state": {str(k): value_text(number_of(v)) for k, v in train_state.carried.items()},
        "unknown_globals": sorted(unsafe - known_globals()) if unsafe else [],  # which imports every reader
        "container": _container(c),
        "not_stored": list(c.missing_tensors),
        "not_read": {one.name: one.why for one in not_read_of(c)},
        "remarks": [*dict.fromkeys((*c.remarks, *(c.container.remarks if c.container is not None else ())))],
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "kind": t.kind, "states": list(t.states)}
            for t in c.state.tensors
        ],
    }


def _container(c: Checkpoint) -> ContainerFacts | None:
    """The folder around the shards, if a training framework has files there."""
    if c.container is None:
        return None
    files = {f.name: f.rule.fate if f.rule is not None else "unknown" for f in c.container.files}
    kind = c.container.kind
    return {"kind": kind.name, "title": kind.title, "files": files, "skipped": dict(c.container.skipped)}


def _kinds(tensors: Iterable[NamedTensor]) -> dict[str, Count]:
    out: dict[str, Count] = {}
    for t in tensors:
        entry = out.setdefault(t.kind, {"tensors": 0, "elements": 0})
        entry["tensors"] += 1
        entry["elements"] += prod(t.shape)
    return out


def _bytes_of_files(c: Checkpoint) -> int:
    from ucpl.files.header_watch import reading

    with reading(c.root):
        return sum((c.root / f).stat().st_size for f in c.files if (c.root / f).is_file())


def _bytes_by_dtype(c: Checkpoint) -> dict[str, int]:
    out: dict[str, int] = {}
    for e in c.extents.values():
        out[e.dtype] = out.get(e.dtype, 0) + e.numel * DTYPES[e.dtype].itemsize
    return out


def _states(tensors: tuple[NamedTensor, ...]) -> dict[str, int]:
    """Each parameter has a weight; an optimizer state is of some."""
    out = {"weight": sum(t.kind == "parameter" for t in tensors)}
    for t in tensors:
        for state in t.states:
            out[state] = out.get(state, 0) + 1
    return out


def _scalars(scalars: Mapping[str, Mapping[str, object]]) -> dict[str, list[object]]:
    """The different values of each, in the order in which they come."""
    from ucpl.files.scalars import number_of

    out: dict[str, list[object]] = {}
    for state, values in scalars.items():
        for value in values.values():
            number = number_of(value)
            if number not in out.setdefault(state, []):
                out[state].append(number)
    return out


def _group(group: ParameterGroup, elements: dict[str, int]) -> GroupFacts:
    from ucpl.files.scalars import number_of

    return {
        "members": len(group.members),
        "elements": sum(elements[m] for m in group.members if m in elements),
        "hyper": {k: _plain(number_of(v)) for k, v in group.hyper.items()},
    }


def _plain(value: object) -> object:
    from ucpl.verification.values import value_text

    return value if value is None or isinstance(value, (int, float, str, list, tuple)) else value_text(value)
