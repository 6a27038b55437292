"""Stored tensors of a plan as JSON, shelf by shelf.

Columns of integers are run-length coded if that is shorter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from ucpl.extents import (
    STORED,
    BlobWay,
    CarriedBlob,
    FlatBuffer,
    Key,
    NamedTensor,
    Section,
    Sharding,
    Shelf,
    Shelves,
    Structure,
)
from ucpl.planning.parsed import NUMBER_MAX, Json, items, plain, table, text, texts, whole, wholes
from ucpl.tables import I64, Block, Listed, Name, Slot

__all__ = ["families_from", "families_json", "shelves_from", "shelves_json", "structure_from", "structure_json"]

TENSORS_MAX = 20_000_000
_FORMAT = re.compile(r"0?[0-9]{0,3}d?")  # of a number in a name, as templates have them


def shelves_json(shelves: Shelves) -> Json:
    """Columns that several shelves have (states of one line) are written once."""
    columns: dict[bytes, int] = {}
    kept: list[Json] = []

    def column(values: I64) -> int:
        table = np.ascontiguousarray(values, dtype="<i8")
        known = table.tobytes() + str(table.shape).encode()
        if known not in columns:
            columns[known] = len(kept)
            kept.append(_packed(table))
        return columns[known]

    def name(parts: Name) -> Json:
        return [p if isinstance(p, str) else [p.axis, *values(p)] for p in parts]

    def values(slot: Slot) -> list[Json]:
        match slot.values:
            case tuple() as texts:
                return [list(texts), slot.format]
            case Listed() as listed:
                return [list(listed.texts), slot.format, column(listed.at)]
            case numbers:
                return [column(numbers), slot.format]

    rows = []
    for shelf in shelves.shelves:
        b = shelf.block
        flags = np.stack([b.undefined, b.live], axis=1).astype(np.int64)
        rows.append(
            {
                "state": shelf.state,
                "label": shelf.label,
                "dtypes": list(shelf.dtypes),
                "file": name(b.file),
                "key": [[name(step), counted] for step, counted in zip(b.key, b.counted, strict=True)],
                "choices": b.choices,
                "shape": [column(b.shape[:, d]) for d in range(b.shape.shape[1])],
                "rank": column(b.rank),
                "padding": column(b.padding),
                "flags": column(flags.reshape(-1)) if flags.any() else None,
                "shares": None if shelf.shares is None else column(shelf.shares),
                **({} if b.named is None else {"named": _named_by(b)}),
                **({} if b.owned is None else {"owned": _owned_by(b, column)}),
                **({} if shelf.begins is None else {"begins": column(shelf.begins)}),
            }
        )
    return {"columns": kept, "shelves": rows}


def _named_by(block: Block) -> Json:
    """The slot that has a family's names, by number, or these names."""
    found = (n for n, s in enumerate(block.slots) if isinstance(s.values, tuple) and s.values == block.named)
    return next(found, block.named)


def _owned_by(block: Block, column: Callable[[I64], int]) -> Json:
    """The slot that has a bundle's names, by number, or these names."""
    owned = block.owned
    assert owned is not None
    found = next((n for n, s in enumerate(block.slots) if s.values is owned), None)
    return [list(owned.texts), column(owned.at)] if found is None else found


def shelves_from(raw: Json) -> Shelves:
    """Read the result of `shelves_json`.

    Raises: ValueError, KeyError, TypeError, IndexError for another form.
    """
    columns = [_unpacked(c) for c in items(raw["columns"])]

    def column(number: Json) -> I64:
        return columns[whole(number)]

    out = []
    total = 0
    for row in items(raw["shelves"]):
        shelf = Shelf(
            _block(row, column),
            text(row["state"]),
            text(row["label"]),
            texts(row["dtypes"]),
            None if row["shares"] is None else column(row["shares"]),
            column(row["begins"]) if "begins" in row else None,
        )
        _check(shelf)
        out.append(shelf)
        total += len(shelf)
        if total > TENSORS_MAX:
            raise ValueError(f"more than {TENSORS_MAX} stored tensors")
    made = Shelves(tuple(out))
    _check_order(made)
    if any(not shelf.block.key for shelf in out):  # such a tensor is all that its file holds
        files = Counter(tensor.file for tensor in made)
        if any(not tensor.key and files[tensor.file] > 1 for tensor in made):
            raise ValueError("a stored tensor without a key in a file of several")
    return made


def _block(row: Json, column: Callable[[Json], I64]) -> Block:
    def name(parts: Json) -> Name:
        return tuple(p if isinstance(p, str) else _slot(p, column) for p in items(parts))

    rank = column(row["rank"])
    count = len(rank)
    flags = np.zeros(2 * count, dtype=np.int64) if row["flags"] is None else column(row["flags"])
    shape = np.stack([column(c) for c in row["shape"]], axis=1) if row["shape"] else np.zeros((count, 0), np.int64)
    made = Block(
        name(row["file"]),
        tuple(name(step) for step, _ in items(row["key"])),
        tuple(bool(counted) for _, counted in row["key"]),
        whole(row["choices"]),
        shape,
        rank,
        column(row["padding"]),
        flags.reshape(count, 2)[:, 0].astype(np.bool_),
        flags.reshape(count, 2)[:, 1].astype(np.bool_),
        np.zeros((count, 0), dtype=np.int64),
    )
    if "owned" in row:
        return attrs.evolve(made, owned=_owned_of(made, row["owned"], column))
    return attrs.evolve(made, named=_names_of(made, row["named"])) if "named" in row else made


def _owned_of(block: Block, raw: Json, column: Callable[[Json], I64]) -> Listed:
    if isinstance(raw, list):
        names, at = raw
        return _listed(texts(names), column(at))
    found = block.slots[whole(raw)].values
    if not isinstance(found, Listed):
        raise ValueError("a bundle of another slot than its names")
    return found


def _listed(names: tuple[str, ...], at: I64) -> Listed:
    if len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(names):
        raise ValueError("a name that is not in its list")
    return Listed(names, at)


def _names_of(block: Block, raw: Json) -> tuple[str, ...]:
    names = texts(raw) if isinstance(raw, list) else block.slots[whole(raw)].values
    if not isinstance(names, tuple) or len(names) != block.choices:
        raise ValueError("a family of other tensors than its shelf")
    return names


def _slot(raw: Json, column: Callable[[Json], I64]) -> Slot:
    axis, values, form, *at = raw
    if axis not in (0, 1) or not _FORMAT.fullmatch(text(form)):
        raise ValueError("a slot of no axis, or of no number format")
    if at:
        return Slot(axis, _listed(texts(values), column(*at)), form)
    return Slot(axis, texts(values) if isinstance(values, list) else column(values), form)


def _check(shelf: Shelf) -> None:
    """Columns of one length, sizes that are sizes."""
    b = shelf.block
    count = len(b.rank)
    if b.choices < 1 or len(b.padding) != count or b.shape.shape[0] != count:
        raise ValueError("a shelf whose columns are of different length")
    if (b.shape < 0).any():
        raise ValueError("a size below zero")
    if (b.shape.astype(float).prod(axis=1) >= NUMBER_MAX / 16).any():  # of an element of 16 bytes
        raise ValueError("a tensor of more bytes than there are")
    if (b.rank < 0).any() or (b.padding < 0).any():
        raise ValueError("a rank or padding below zero")
    slots = b.slots
    if any(len(s.values) != (b.choices if s.axis else count) for s in slots):
        raise ValueError("a slot of another length than its shelf")
    if b.owned is not None and (b.choices != 1 or len(b.owned) != count):
        raise ValueError("a bundle of another length than its shelf")
    if b.choices > 1 and not any(s.axis for s in slots):
        raise ValueError("choices that no name distinguishes")
    if not {*shelf.dtypes} <= {*STORED, ""}:
        raise ValueError("a dtype of no name")
    if len(shelf.dtypes) not in (1, len(shelf)) or (shelf.shares is not None and len(shelf.shares) != len(shelf)):
        raise ValueError("a shelf of another length than its dtypes")


def _check_order(shelves: Shelves) -> None:
    """Check that an order of files has different places."""
    if all(s.begins is None for s in shelves.shelves):
        return
    counts = (len(s.block.rank) if s.block.owned is not None else s.block.choices for s in shelves.shelves)
    places = [
        s.filed
        for s, count in zip(shelves.shelves, counts, strict=True)
        if s.begins is not None and len(s.begins) == count and s.filed is not None
    ]
    if len(np.unique(np.concatenate([np.zeros(0, np.int64), *places]))) != len(shelves):
        raise ValueError("an order of files without some of its tensors")


def _packed(values: I64) -> Json:
    """[n, first, step] for an even count; runs; else the values.

    Runs are [value, times, ...], if most values repeat.
    """
    table = values.reshape(-1)
    n = len(table)
    if n > 2:
        step = np.diff(table)
        if (step == step[0]).all():
            return {"count": [n, int(table[0]), int(step[0])]}
        heads = np.concatenate([[0], np.flatnonzero(step) + 1])
        if 2 * len(heads) < n:
            times = np.diff(np.concatenate([heads, [n]]))
            return {"runs": np.stack([table[heads], times], axis=1).reshape(-1).tolist()}
    return table.tolist()


def _unpacked(raw: Json) -> I64:
    if isinstance(raw, list):
        return _numbers(raw)
    if "count" in raw:
        n, first, step = (whole(n, -NUMBER_MAX) for n in items(raw["count"]))
        if not 0 <= n <= TENSORS_MAX:
            raise ValueError("a column without end")
        return np.asarray(first + step * np.arange(n), dtype=np.int64)
    runs = _numbers(raw["runs"]).reshape(-1, 2)
    if ((runs[:, 1] < 0) | (runs[:, 1] > TENSORS_MAX)).any() or int(runs[:, 1].sum()) > TENSORS_MAX:
        raise ValueError("a column without end")
    return np.repeat(runs[:, 0], runs[:, 1])


def _numbers(raw: Json) -> I64:
    """Whole numbers of a list, all of int64."""
    made = np.array(items(raw) or [0])
    if made.dtype != np.int64 or made.ndim != 1:
        raise ValueError("a column of something else than numbers")
    return made[: len(raw)]


# --- Structures: flats of ranks that hold the same tensors name their members once ----------------------------------


def structure_json(structure: Structure) -> Json:
    out = attrs.asdict(attrs.evolve(structure, flats=(), tensors=()))
    out["tensors"] = [
        {"name": t.name, "shape": t.shape, "dtype": t.dtype, "kind": t.kind, "states": t.states}
        for t in structure.tensors
    ]
    members: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    known: dict[int, int] = {}  # most flats share the very object: hashed once
    starts: dict[tuple[int, ...], int] = {}
    flats = []
    for f in structure.flats:
        if id(f.members) not in known:
            known[id(f.members)] = members.setdefault(f.members, len(members))
        begins = starts.setdefault(f.starts, len(starts))
        flats.append([f.bucket, f.group, f.coordinates, known[id(f.members)], begins, f.numel, f.cut])
    out["flats"] = flats
    out["members"] = [[[name for name, _ in m], _shapes([shape for _, shape in m])] for m in members]
    out["starts"] = [list(s) for s in starts]
    return out


def families_json(families: Mapping[str, Sequence[str]], structure: Structure) -> Json:
    """The members of each family, by their places among a structure's tensors."""
    at = {tensor.name: n for n, tensor in enumerate(structure.tensors)}
    there = {path: of for path, of in families.items() if at.keys() >= {*of}}
    return {path: _packed(np.array([at[name] for name in of], dtype=np.int64)) for path, of in there.items()}


def families_from(raw: Json, structure: Structure) -> dict[str, tuple[str, ...]]:
    """Raises: ValueError, TypeError where it is no such table."""
    found = {path: _unpacked(column) for path, column in table(raw).items()}
    if any((at < 0).any() or (at >= len(structure.tensors)).any() for at in found.values()):
        raise ValueError("a family of a tensor that there is not")
    return {path: tuple(structure.tensors[n].name for n in at.tolist()) for path, at in found.items()}


def _shapes(shapes: list[tuple[int, ...]]) -> Json:
    """Shapes that are met, and which of them each member has."""
    kinds = {s: i for i, s in enumerate(dict.fromkeys(shapes))}
    return [[list(s) for s in kinds], [kinds[s] for s in shapes]]


def structure_from(raw: Json) -> Structure:
    """Raises: ValueError, KeyError, TypeError, IndexError where it is no structure."""
    members = []
    for names, (kinds, which) in items(raw["members"]):
        shapes = [wholes(kinds[whole(i)]) for i in items(which)]
        members.append(tuple(zip(texts(names), shapes, strict=True)))
    starts = [wholes(s) for s in items(raw["starts"])]
    if any(len(members[whole(flat[3])]) != len(starts[whole(flat[4])]) for flat in items(raw["flats"])):
        raise ValueError("a flat buffer with another number of members than of places")
    return Structure(
        framework=text(raw["framework"]),
        settings={name: plain(value) for name, value in table(raw["settings"]).items()},
        tensors=tuple(_tensor(t) for t in items(raw["tensors"])),
        aliases=_named(raw["aliases"]),
        groups=tuple((text(name), texts(of)) for name, of in items(raw["groups"])),
        flats=tuple(
            FlatBuffer(
                whole(bucket),
                text(group),
                {axis: whole(at) for axis, at in table(coordinates).items()},
                members[whole(m)],
                starts[whole(s)],
                whole(numel),
                None if cut is None else text(cut),
            )
            for bucket, group, coordinates, m, s, numel, cut in items(raw["flats"])
        ),
        derived=_named(raw["derived"]),
        shardings={name: _sharding(s) for name, s in table(raw["shardings"]).items()},
        blobs=tuple(_blob(b) for b in items(raw["blobs"])),
    )


def _blob(raw: Json) -> CarriedBlob:
    ways, alike = (tuple(_way(w) for w in items(raw[name])) for name in ("ways", "alike"))
    return CarriedBlob(text(raw["name"]), text(raw["fate"]), text(raw["said"]), ways, alike)


def _way(raw: Json) -> BlobWay:
    source, target = (_key(raw[name]) for name in ("source_key", "key"))
    return BlobWay(text(raw["source_file"]), source, text(raw["file"]), target)


def _key(raw: Json) -> Key:
    return tuple(whole(step) if isinstance(step, int) else text(step) for step in items(raw))


def _named(raw: Json) -> dict[str, str]:
    return {name: text(value) for name, value in table(raw).items()}


def _tensor(raw: Json) -> NamedTensor:
    return NamedTensor(
        text(raw["name"]), wholes(raw["shape"]), text(raw["dtype"]), text(raw["kind"]), texts(raw["states"])
    )


def _sharding(raw: Json) -> Sharding:
    sections = tuple(
        Section(whole(s["size"]), None if s["widths"] is None else wholes(s["widths"])) for s in items(raw["sections"])
    )
    shape, dim = wholes(raw["shape"]), raw["dim"]
    dim = None if dim is None else whole(dim, high=len(shape))
    return Sharding(shape, dim, sections, text(raw["origin"]))
