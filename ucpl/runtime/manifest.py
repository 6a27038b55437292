"""`ucpl/manifest.json`: the bytes of a written checkpoint and its sources.

Paths are relative to the checkpoint. `crc32` of a file covers all of it; each storage has its own. Neither depends on
the division of the run into tiles: equal plans of equal sources give equal manifests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

import ucpl
from ucpl.digests import crc32
from ucpl.extents import key_text
from ucpl.planning.plan import Plan
from ucpl.records import frozen
from ucpl.runtime.disk import read_regular
from ucpl.runtime.joined_crcs import combine, combine_groups
from ucpl.runtime.targets import TargetPlan
from ucpl.runtime.tiles import Tiles

__all__ = [
    "FOLDER", "LAYOUT", "MANIFEST", "Manifest", "Stated", "StatedFile", "ManifestContents", "manifest_of", "read_manifest",
    "storage_crcs",
]  # fmt: skip

FOLDER = "ucpl"
MANIFEST = "ucpl/manifest.json"
LAYOUT = "ucpl/layout.ucpl"
FORMAT = 1
BYTES_MAX = 1 << 30
_ENCODE = json.JSONEncoder(ensure_ascii=False, default=str).encode


def storage_crcs(
    target: TargetPlan, tiles: Tiles, crc: NDArray[np.uint32], files: range | None = None
) -> NDArray[np.uint32]:
    """CRC-32 of each unit, from its tiles.

    Only units in `files` are computed, if `files` is given. All others, and empty units, have 0.
    """
    found = np.zeros(len(target.units), np.uint32)
    filled = np.flatnonzero(np.diff(tiles.first) > 0)
    if files is not None:
        where = np.array([unit.file for unit in target.units], np.int64)[filled]
        filled = filled[(where >= files.start) & (where < files.stop)]
    if len(filled):
        begin, end = int(tiles.first[filled[0]]), int(tiles.first[filled[-1] + 1])
        found[filled] = combine_groups(crc[begin:end], tiles.size[begin:end], tiles.first[filled] - begin)
    return found


@frozen(eq=False)
class ManifestContents:
    """Contents of a manifest.

    The target's files, the CRC of each unit, and for each file its bytes that are no payload.
    """

    layout: TargetPlan
    unit_crc: NDArray[np.uint32]
    beside: Sequence[Sequence[tuple[int, bytes]]]
    texts: Mapping[str, str]


def manifest_of(plan: Plan, digests: Mapping[str, str], written: ManifestContents) -> str:
    """The text of the manifest."""
    files: dict[str, object] = {}
    units: list[list[int]] = [[] for _ in written.layout.files]
    for u, unit in enumerate(written.layout.units):
        units[unit.file].append(u)
    for f, file in enumerate(written.layout.files):
        files[file.path] = _entry_of(written, f, units[f])
    for name, text in written.texts.items():
        data = text.encode()
        files[name] = {"size": len(data), "crc32": f"{crc32(data):08x}"}
    manifest = {
        "format": FORMAT,
        "product": f"ucpl {getattr(ucpl, '__version__', '')}".strip(),
        "plan": {"name": plan.name, "source": plan.source_call, "target": plan.target_call, **digests},
        "origins": [{"name": o.name, "value": o.value, "origin": o.origin} for o in plan.origins],
        "changed": list(plan.changed),
        "derived": list(plan.derived),
        "dropped": list(plan.dropped),
        "files": files,
    }
    return _lined(manifest) + "\n"


def _lined(value: object, indent: str = "") -> str:
    """JSON with one line for each value that holds no table.

    json's encoder is in C only without `indent`.
    """
    inner = indent + " "
    if isinstance(value, dict) and any(isinstance(held, dict) or _has_tables(held) for held in value.values()):
        rows = [f"{inner}{_ENCODE(str(key))}: {_lined(held, inner)}" for key, held in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if _has_tables(value):
        return "[\n" + ",\n".join(inner + _ENCODE(held) for held in value) + f"\n{indent}]"
    return _ENCODE(value)


def _has_tables(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list) and any(isinstance(held, dict) for held in value)


def _entry_of(written: ManifestContents, f: int, units: Sequence[int]) -> dict[str, object]:
    target = written.layout
    file = target.files[f]
    pieces = [(position, len(data), crc32(data)) for position, data in written.beside[f]]
    storages: dict[str, object] = {}
    for u in units:
        unit = target.units[u]
        place = target.places[unit.target]
        if unit.size:
            pieces.append((unit.start, unit.size, int(written.unit_crc[u])))
        if unit.size == file.plan.size:  # all of the file: its own CRC says it
            continue
        storages[unit.storage] = {
            "key": key_text(place.key),
            "tensor": place.label,
            "dtype": place.dtype,
            "shape": list(place.shape),
            "start": unit.start,
            "size": unit.size,
            "crc32": f"{int(written.unit_crc[u]):08x}",
        }
    pieces.sort()
    whole = combine([p[2] for p in pieces], [p[1] for p in pieces])
    return {"size": file.plan.size, "crc32": f"{whole:08x}", "storages": storages}


# ---- reading ---------------------------------------------------------------------------------------------------------


@frozen
class Stated:
    """Facts of a manifest on one file, or a storage within it."""

    start: int
    size: int
    crc: int
    holds: str  # the tensor, or its key


@frozen
class StatedFile:
    size: int
    crc: int
    storages: dict[str, Stated]


@frozen
class Manifest:
    """A manifest that was read; all its values have the right types."""

    plan: dict[str, str]  # digests by name, and all other entries of the plan as text
    files: dict[str, StatedFile]


def read_manifest(top: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None if it has none.

    Raises: OSError, ValueError if it is none of ours.
    """
    path = top / MANIFEST
    try:
        raw = read_regular(path, BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest = _table(json.loads(raw), "the manifest")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if manifest.get("format") != FORMAT:
        raise ValueError("not a manifest of this format")
    plan = {name: text for name, text in _table(manifest.get("plan", {}), "plan").items() if isinstance(text, str)}
    return Manifest(plan, {_name(n): _file(e, n) for n, e in _table(manifest.get("files"), "files").items()})


def _file(entry: object, name: str) -> StatedFile:
    table = _table(entry, name)
    size = _number(table, "size", name)
    storages = {}
    for key, one in _table(table.get("storages", {}), name).items():
        inner = _table(one, f"{name}: {key}")
        start, length = _number(inner, "start", key), _number(inner, "size", key)
        if start + length > size:
            raise ValueError(f"{name}: storage {key} leaves the file")
        holds = inner.get("tensor") or inner.get("key") or ""
        storages[key] = Stated(start, length, _crc(inner, key), holds if isinstance(holds, str) else "")
    return StatedFile(size, _crc(table, name), storages)


def _name(name: str) -> str:
    """Name of a file below the checkpoint.

    Raises: ValueError for any other.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or not name.isprintable():
        raise ValueError(f"{name!a} is no name of a file in it")
    return name


def _table(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no table")
    return value


def _number(table: Mapping[str, object], name: str, of: str) -> int:
    value = table.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"the {name} of {of} is no number of bytes")
    return value


def _crc(table: Mapping[str, object], of: str) -> int:
    value = table.get("crc32")
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{8}", value):
        raise ValueError(f"the crc32 of {of} is none")
    return int(value, 16)
