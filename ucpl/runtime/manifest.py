"""`ucpl/manifest.json`: what a written checkpoint consists of, byte for byte, and what it was made from.

Paths are relative to the checkpoint. `crc32` of a file covers all of it; each storage has its own. Neither depends on how the
run was cut into tiles: equal plans of equal sources give equal manifests.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ucpl
from ucpl.extents import key_text
from ucpl.runtime.crc import combine, combine_groups
from ucpl.runtime.targets import TargetPlan
from ucpl.runtime.tiles import Tiles
from ucpl.schedule.plan import Plan

__all__ = ["FOLDER", "LAYOUT", "MANIFEST", "manifest_of", "read_manifest", "storage_crcs"]

FOLDER = "ucpl"
MANIFEST = "ucpl/manifest.json"
LAYOUT = "ucpl/layout.ucpl"
FORMAT = 1


def storage_crcs(target: TargetPlan, tiles: Tiles, crc: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """CRC-32 of each unit, of its tiles'. Units without bytes have 0."""
    found = np.zeros(len(target.units), np.uint32)
    filled = np.flatnonzero(np.diff(tiles.first) > 0)
    if len(filled):
        found[filled] = combine_groups(crc, tiles.size, tiles.first[filled])
    return found


def manifest_of(
    plan: Plan,
    digests: Mapping[str, str],
    target: TargetPlan,
    unit_crc: NDArray[np.uint32],
    known: Sequence[Sequence[tuple[int, bytes]]],
    texts: Mapping[str, str],
) -> str:
    """The text of the manifest. `known[f]` are the bytes of file f that are no payload."""
    files: dict[str, Any] = {}
    of_file: list[list[int]] = [[] for _ in target.files]
    for u, unit in enumerate(target.units):
        of_file[unit.file].append(u)
    for f, file in enumerate(target.files):
        pieces = [(position, len(data), zlib.crc32(data)) for position, data in known[f]]
        storages: dict[str, Any] = {}
        for u in of_file[f]:
            unit = target.units[u]
            place = target.places[unit.target]
            if unit.size:
                pieces.append((unit.start, unit.size, int(unit_crc[u])))
            storages[unit.storage] = {
                "key": key_text(place.key),
                "tensor": place.label,
                "dtype": place.dtype,
                "shape": list(place.shape),
                "start": unit.start,
                "size": unit.size,
                "crc32": f"{int(unit_crc[u]):08x}",
            }
        pieces.sort()
        whole = combine([p[2] for p in pieces], [p[1] for p in pieces])
        files[file.path] = {"size": file.plan.size, "crc32": f"{whole:08x}", "storages": storages}
    for name, text in texts.items():
        data = text.encode()
        files[name] = {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    manifest = {
        "format": FORMAT,
        "product": f"ucpl {getattr(ucpl, '__version__', '')}".strip(),
        "plan": {"name": plan.name, "source": plan.source_call, "target": plan.target_call, **digests},
        "origins": [{"name": o.name, "value": o.value, "origin": o.origin} for o in plan.origins],
        "derived": list(plan.derived),
        "dropped": list(plan.dropped),
        "files": files,
    }
    return json.dumps(manifest, indent=1, ensure_ascii=False, default=str) + "\n"


def read_manifest(top: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None where it has none. Raises: OSError, ValueError where it is none of ours."""
    try:
        raw = (top / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = json.loads(raw)
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("files"), dict)
    ):
        raise ValueError("not a manifest of this format")
    return manifest
