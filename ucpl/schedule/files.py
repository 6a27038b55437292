"""Plans in files: a head that people read, a table of stored tensors, and columns of moves. No pickle.

ucpl-plan 1
sha256:...                  of all that follows
<summary, line by line>
---
<one line of JSON>
<columns, in safetensors form>
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ucpl.errors import Label, fail
from ucpl.extents import Flat, NamedTensor, Section, Sharding, StoredTensor, Structure
from ucpl.schedule.plan import Moves, Origin, Plan
from ucpl.schedule.text import summary

MAGIC = b"ucpl-plan 1\n"
COLUMNS = ("tensor", "source", "target", "shape", "source_offset", "source_stride", "target_offset", "target_stride")


def save_plan(plan: Plan, path: Path) -> None:
    """Write a .plan file; the same plan gives the same bytes."""
    path.write_bytes(plan_bytes(plan))


def plan_bytes(plan: Plan) -> bytes:
    from safetensors.numpy import save

    columns = {
        f"{i}.{name}": np.ascontiguousarray(getattr(m, name)) for i, m in enumerate(plan.moves) for name in COLUMNS
    }
    body = (
        summary(plan).encode()
        + b"---\n"
        + json.dumps(_header(plan), separators=(",", ":")).encode()
        + b"\n"
        + save(columns)
    )
    return MAGIC + b"sha256:" + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def plan_digest(plan: Plan) -> str:
    """SHA-256 of the plan's bytes: its identity for journals."""
    return hashlib.sha256(plan_bytes(plan)).hexdigest()


def load_plan(path: Path) -> Plan:
    """Read a .plan file. Raises E350 (not a plan), E351 (damaged, or of another version), exit 5."""
    try:
        data = path.read_bytes()
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        remedy = "" if gone else "the plan may be whole: see to the disk and to permissions, then run this again"
        fail("E350", f"{path} cannot be read: {error.strerror}", Label(str(path)), remedy=remedy)
    if not data.startswith(b"ucpl-plan "):
        fail("E350", f"{path} is no plan", Label(str(path)), remedy="make one with `ucpl plan ... -o FILE.plan`")
    if not data.startswith(MAGIC):
        version = data.split(b"\n", 1)[0][:40].decode("ascii", "replace")
        fail("E351", f"{path} was written by another version: {version}", Label(str(path)), remedy="make the plan anew")
    line, _, body = data[len(MAGIC) :].partition(b"\n")
    if line != b"sha256:" + hashlib.sha256(body).hexdigest().encode():
        fail("E351", f"{path} is damaged: its digest does not match", Label(str(path)), remedy="make the plan anew")
    try:
        _, _, rest = body.partition(b"\n---\n")
        header, _, columns = rest.partition(b"\n")
        return _plan(json.loads(header), columns)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        fail("E351", f"{path} cannot be understood: {error}", Label(str(path)), remedy="make the plan anew")


def _stored(rows: tuple[StoredTensor, ...]) -> dict[str, Any]:
    files = {f: i for i, f in enumerate(dict.fromkeys(s.file for s in rows))}
    return {
        "files": list(files),
        "rows": [
            [
                files[s.file],
                list(s.key),
                s.dtype,
                list(s.shape),
                s.state,
                s.label,
                s.rank,
                s.shares,
                s.padding,
                s.padding_kind,
            ]
            for s in rows
        ],
    }


def _header(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "source_call": plan.source_call,
        "target_call": plan.target_call,
        "source": attrs.asdict(plan.source),
        "target": attrs.asdict(plan.target),
        "sources": _stored(plan.sources),
        "targets": _stored(plan.targets),
        "tensors": list(plan.tensors),
        "moves": [
            {
                "kind": m.kind,
                "state": m.state,
                "source_value": m.source_value,
                "target_value": m.target_value,
                "lossy": m.lossy,
            }
            for m in plan.moves
        ],
        "origins": [[o.name, o.value, o.origin] for o in plan.origins],
        "derived": list(plan.derived),
        "dropped": list(plan.dropped),
        "carry": plan.carry,
        "spec_digest": plan.spec_digest,
        "structure_digest": plan.structure_digest,
        "layout_text": plan.layout_text,
    }


def _rows(table: dict[str, Any]) -> tuple[StoredTensor, ...]:
    files = table["files"]
    return tuple(
        StoredTensor(files[f], tuple(key), dtype, tuple(shape), *rest) for f, key, dtype, shape, *rest in table["rows"]
    )


def _structure(raw: dict[str, Any]) -> Structure:
    return Structure(
        framework=raw["framework"],
        settings=raw["settings"],
        tensors=tuple(
            NamedTensor(t["name"], tuple(t["shape"]), t["dtype"], t["kind"], tuple(t["states"])) for t in raw["tensors"]
        ),
        aliases=raw["aliases"],
        groups=tuple((name, tuple(members)) for name, members in raw["groups"]),
        flats=tuple(
            Flat(
                f["bucket"],
                f["group"],
                f["coordinates"],
                tuple((name, tuple(shape)) for name, shape in f["members"]),
                tuple(f["starts"]),
                f["numel"],
                f["cut"],
            )
            for f in raw["flats"]
        ),
        derived=raw["derived"],
        shardings={name: _sharding(s) for name, s in raw.get("shardings", {}).items()},
    )


def _sharding(raw: dict[str, Any]) -> Sharding:
    sections = tuple(Section(s["size"], None if s["widths"] is None else tuple(s["widths"])) for s in raw["sections"])
    stages = None if raw["stages"] is None else tuple(raw["stages"])
    return Sharding(tuple(raw["shape"]), raw["dim"], sections, raw["origin"], stages, raw["expert"])


def _plan(raw: dict[str, Any], columns: bytes) -> Plan:
    from safetensors.numpy import load

    table = load(columns)
    moves = tuple(
        Moves(
            kind=m["kind"],
            state=m["state"],
            source_value=tuple(m["source_value"]),
            target_value=tuple(m["target_value"]),
            lossy=m["lossy"],
            **{name: table[f"{i}.{name}"] for name in COLUMNS},
        )
        for i, m in enumerate(raw["moves"])
    )
    plan = Plan(
        name=raw["name"],
        source_call=raw["source_call"],
        target_call=raw["target_call"],
        source=_structure(raw["source"]),
        target=_structure(raw["target"]),
        sources=_rows(raw["sources"]),
        targets=_rows(raw["targets"]),
        tensors=tuple(raw["tensors"]),
        moves=moves,
        origins=tuple(Origin(*o) for o in raw["origins"]),
        derived=tuple(raw["derived"]),
        dropped=tuple(raw["dropped"]),
        carry=raw["carry"],
        spec_digest=raw["spec_digest"],
        structure_digest=raw["structure_digest"],
        layout_text=raw["layout_text"],
    )
    _checked(plan)
    return plan


def _checked(plan: Plan) -> None:
    """Every number points at something: a hand-made file must not make the runtime read or write elsewhere."""
    for m in plan.moves:
        n = len(m.source)
        if any(len(getattr(m, c)) != n for c in COLUMNS) or m.shape.ndim != 2:
            raise ValueError("columns of different length")
        if not n:
            continue
        for index, limit, what in (
            (m.source, len(plan.sources), "source"),
            (m.target, len(plan.targets), "target"),
            (m.tensor, len(plan.tensors), "tensor"),
        ):
            if index.min() < 0 or index.max() >= limit:
                raise ValueError(f"a move names {what} {int(index.max())} of {limit}")
        if (m.shape < 1).any():
            raise ValueError("a move of no elements")
        for offset, stride, side, rows in (
            (m.source_offset, m.source_stride, m.source, plan.sources),
            (m.target_offset, m.target_stride, m.target, plan.targets),
        ):
            numel = np.array([s.numel for s in rows], dtype=np.int64)
            last = offset + ((m.shape - 1) * stride).sum(axis=1)
            if (offset < 0).any() or (stride < 0).any() or (last >= numel[side]).any():
                raise ValueError("a move reaches beyond its tensor")
