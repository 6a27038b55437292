"""Plan files: a readable head, the graph as JSON, and columns.

The columns are those of moves. No pickle.

ucpl-plan 10
sha256:...                  of all that follows
<summary, line by line>
---
<one line of JSON>
<columns, in safetensors form, compressed by zlib>
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Literal

from ucpl.errors import Label, fail
from ucpl.extents.account import FATES, Account, AccountEntry, Fate
from ucpl.extents.structure import Plain, Structure
from ucpl.planning.nets import Columns, net_from, net_json
from ucpl.planning.parsed import Json, items, plain, read_json, table, text, texts, whole
from ucpl.planning.plan import Origin, Passed, Plan
from ucpl.planning.shelving import (
    families_from,
    families_json,
    shelves_from,
    shelves_json,
    structure_from,
    structure_json,
)
from ucpl.planning.text import summary
from ucpl.planning.unread import Unread
from ucpl.tables import MoveSide
from ucpl.tables.operations import Fill

__all__ = ["load_plan", "plan_bytes", "save_plan", "sealed", "unsealed"]

MAGIC = b"ucpl-plan 10\n"
_RATIO = 100  # at most so many times the compressed size, besides a MiB: a small file takes little memory
_MASTERS = "masters_"  # before names of columns of a plan within this one
_STEP_MAX = 1 << 56  # elements from one to the next along a dim: in bytes, they are a number of an int64


def save_plan(plan: Plan, path: Path) -> None:
    """Write a .plan file; the same plan gives the same bytes."""
    path.write_bytes(plan_bytes(plan))


def plan_bytes(plan: Plan) -> bytes:
    from safetensors.numpy import save

    moved, columns = _moved_json(plan)
    masters, others = _moved_json(plan.masters) if plan.masters is not None else (None, {})
    columns |= {_MASTERS + name: column for name, column in others.items()}
    header = json.dumps({**_header(plan), **moved, "masters": masters}, separators=(",", ":")).encode()
    return sealed(summary(plan).encode() + b"---\n" + header + b"\n", save(columns))


def sealed(head: bytes, columns: bytes) -> bytes:
    """A .plan file from its head and its columns.

    The head is all before the columns, with the end of its line.
    """
    packed = zlib.compress(columns, 1)
    if len(columns) > _most(packed):
        packed = zlib.compress(columns, 0)
    made = hashlib.sha256(head)
    made.update(packed)
    return b"".join((MAGIC, b"sha256:", made.hexdigest().encode(), b"\n", head, packed))


def unsealed(body: bytes) -> tuple[bytes, bytes]:
    """The head and the columns of the text after the digest.

    Raises: ValueError if the compressed columns are incomplete.
    """
    summed, rule, rest = body.partition(b"\n---\n")
    header, end, packed = rest.partition(b"\n")
    inflating = zlib.decompressobj()
    try:
        columns = inflating.decompress(packed, _most(packed))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflating.eof or inflating.unused_data:
        raise ValueError(f"its columns do not end where the file does, or have more than {_most(packed)} bytes")
    return b"".join((summed, rule, header, end)), columns


def _most(packed: bytes) -> int:
    return _RATIO * len(packed) + (1 << 20)


def load_plan(path: Path) -> Plan:
    """Read a .plan file.

    Raises E350 (not a plan), E351 (damaged, or of another version), exit 5.
    """
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # a ValueError: a path that no file can have
        gone = isinstance(error, FileNotFoundError | IsADirectoryError | ValueError)
        remedy = "" if gone else "the plan may be complete: check the disk and permissions, then run this again"
        fail(
            "E350",
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            Label(str(path)),
            remedy=remedy,
        )
    if not data.startswith(b"ucpl-plan "):
        fail("E350", f"{path} is no plan", Label(str(path)), remedy="make one with `ucpl plan ... -o FILE.plan`")
    if not data.startswith(MAGIC):
        version = data.split(b"\n", 1)[0][:40].decode("ascii", "replace")
        fail("E351", f"{path} was written by another version: {version}", Label(str(path)), remedy="make the plan anew")
    line, _, body = data[len(MAGIC) :].partition(b"\n")
    if line != b"sha256:" + hashlib.sha256(body).hexdigest().encode():
        fail("E351", f"{path} is damaged: its digest does not match", Label(str(path)), remedy="make the plan anew")
    try:
        head, columns = unsealed(body)
        plan = _plan(read_json(head.partition(b"\n---\n")[2]), columns)
        _checked(plan)
        if plan.masters is not None:
            _checked(plan.masters)
        return plan
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        fail("E351", f"{path} cannot be understood: {error}", Label(str(path)), remedy="make the plan anew")


def _moved_json(plan: Plan) -> tuple[dict[str, Json], Columns]:
    """Sources and targets of the moves."""
    graph, columns = net_json(plan.net, plan.nodes, plan.spaces)
    said = {
        "sources": shelves_json(plan.source_shelves),
        "targets": shelves_json(plan.target_shelves),
        "tensors": list(plan.tensors),
        "graph": graph,
    }
    return said, columns


def _header(plan: Plan) -> dict[str, Json]:
    return {
        "name": plan.name,
        "source_call": plan.source_call,
        "target_call": plan.target_call,
        "source": structure_json(plan.source),
        "target": structure_json(plan.target),
        "origins": [[o.name, o.value, o.origin] for o in plan.origins],
        "derived": list(plan.derived),
        "dropped": list(plan.dropped),
        "changed": list(plan.changed),
        "gone": {kind: list(names) for kind, names in plan.gone.items()},
        "filled": list(plan.filled),
        "begun": plan.begun,
        "renamed": plan.renamed,
        "carry": plan.carry,
        "spec_digest": plan.spec_digest,
        "structure_digest": plan.structure_digest,
        "account": _account_json(plan.account),
        "unread": plan.unread,
        "layout_text": plan.layout_text,
        "passes": [[one.name, one.text] for one in plan.passes],
        **({} if plan.rank is None else {"rank": plan.rank}),
        **({} if not plan.families else {"families": families_json(plan.families, plan.target)}),
    }


def _plan(raw: Json, columns: bytes) -> Plan:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(columns)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    net, spaces = net_from(raw["graph"], {n: column for n, column in arrays.items() if not n.startswith(_MASTERS)})
    target = structure_from(raw["target"])
    return Plan(
        name=text(raw["name"]),
        source_call=text(raw["source_call"]),
        target_call=text(raw["target_call"]),
        source=structure_from(raw["source"]),
        target=target,
        source_shelves=shelves_from(raw["sources"]),
        target_shelves=shelves_from(raw["targets"]),
        tensors=texts(raw["tensors"]),
        net=net,
        spaces=spaces,
        origins=tuple(Origin(text(n), _value(v), text(o)) for n, v, o in items(raw["origins"])),
        derived=texts(raw["derived"]),
        dropped=texts(raw["dropped"]),
        changed=texts(raw["changed"]),
        gone=_gone(raw["gone"]),
        filled=texts(raw["filled"]),
        begun={state: _numbers(numbers) for state, numbers in table(raw["begun"]).items()},
        renamed={name: texts(of) for name, of in table(raw["renamed"]).items()},
        carry={name: text(fate) for name, fate in table(raw["carry"]).items()},
        spec_digest=text(raw["spec_digest"]),
        structure_digest=text(raw["structure_digest"]),
        account=_account(raw.get("account")),
        unread=_unread(raw["unread"]),
        layout_text=text(raw["layout_text"]),
        passes=tuple(Passed(text(name), text(did)) for name, did in items(raw.get("passes", []))),
        rank=whole(raw["rank"]) if "rank" in raw else None,
        masters=_masters(raw["masters"], arrays),
        families=families_from(raw.get("families", {}), target),
    )


def _account_json(account: Account | None) -> Json:
    if account is None:
        return None
    return [account.items, *([e.fate, e.kind, e.count, list(e.names), e.why] for e in account.entries)]


def _account(raw: Json) -> Account | None:
    """Raises: ValueError where its sum is wrong."""
    if raw is None:
        return None
    count, *entries = items(raw)
    found = tuple(
        AccountEntry(_fate(f), text(k), whole(n), texts(names), text(why))
        for f, k, n, names, why in map(items, entries)
    )
    account = Account(whole(count), found)
    if account.count(*FATES) != account.items:
        raise ValueError("its account has another sum than its items")
    return account


def _fate(raw: Json) -> Fate:
    for fate in FATES:
        if raw == fate:
            return fate
    raise ValueError(f"{ascii(raw)[:80]} is no fate")


def _masters(raw: Json, arrays: Columns) -> Plan | None:
    if raw is None:
        return None
    net, spaces = net_from(
        raw["graph"], {n.removeprefix(_MASTERS): column for n, column in arrays.items() if n.startswith(_MASTERS)}
    )
    return Plan(
        name="masters",
        source_call="",
        target_call="",
        source=Structure(""),
        target=Structure(""),
        source_shelves=shelves_from(raw["sources"]),
        target_shelves=shelves_from(raw["targets"]),
        tensors=texts(raw["tensors"]),
        net=net,
        spaces=spaces,
    )


def _unread(raw: Json) -> Unread | None:
    if raw is None:
        return None
    found = {file: tuple(items(marks)) for file, marks in table(raw).items()}
    if not all(type(mark) is int for marks in found.values() for mark in marks):
        raise ValueError("its unread tensors are given by numbers")
    return found


def _gone(raw: Json) -> dict[str, tuple[str, ...]]:
    found = {kind: texts(names) for kind, names in table(raw).items()}
    if not found:
        return found
    found = {"new": (), "like": (), "joins": (), **found}  # older plans lack these
    if (
        set(found) != {"names", "numbers", "trained", "joins", "groups", "new", "like"}
        or len(found["new"]) != len(found["like"])
        or len(found["joins"]) not in (0, len(found["trained"]))
    ):
        raise ValueError("its dropped names have unknown kinds")
    return found


def _numbers(raw: Json) -> dict[str, float]:
    found = table(raw)
    if not all(type(v) in (int, float) and isfinite(v) for v in found.values()):
        raise ValueError("a number of a parameter is none")
    return {name: float(v) for name, v in found.items()}


def _value(raw: Json) -> Plain | list[object]:
    """Of an origin: one value, or a list of them."""
    return [_value(v) for v in raw] if isinstance(raw, list) else plain(raw)


def _checked(plan: Plan) -> None:
    """Check that every number points at something.

    A hand-made file must not make the runtime read or write elsewhere.
    """
    for flow in plan.flows:
        m = flow.moves
        if len(m) and (m.tensor.min() < 0 or m.tensor.max() >= len(plan.tensors)):
            raise ValueError(f"a move names tensor {int(m.tensor.max())} of {len(plan.tensors)}")
        _inside(m.source_side, [lane.source for lane in flow.lanes], "source", plan)
        _inside(m.target_side, [lane.target for lane in flow.lanes], "target", plan)
    for node in plan.nodes:
        if isinstance(node, Fill):
            _inside(node.boxes, [0], "target", plan)


def _inside(boxes: MoveSide, shifts: Sequence[int], side: Literal["source", "target"], plan: Plan) -> None:
    """Boxes of stored tensors that there are, `shifts` tensors further on."""
    if not len(boxes):
        return
    shelves, space = (
        (plan.source_shelves, plan.spaces[0]) if side == "source" else (plan.target_shelves, plan.spaces[1])
    )
    if (boxes.shape < 1).any():
        raise ValueError("a move of no elements")
    if (boxes.offset < 0).any() or (boxes.stride < 0).any() or (boxes.stride > _STEP_MAX).any():
        raise ValueError("a move reaches beyond its tensor")
    # Steps that are no number of an int64 would wrap round to places that seem to be inside.
    reach = boxes.offset.astype(float) + ((boxes.shape - 1).astype(float) * boxes.stride.astype(float)).sum(axis=1)
    if (reach >= 2.0**62).any():
        raise ValueError("a move reaches beyond its tensor")
    last = space.home(boxes.offset + ((boxes.shape - 1) * boxes.stride).sum(axis=1))
    for shift in shifts:
        if shift < -int(space.home(boxes.offset).min()) or int(last.max()) + shift >= len(shelves):
            raise ValueError(f"a move names {side} {int(last.max()) + shift} of {len(shelves)}")
