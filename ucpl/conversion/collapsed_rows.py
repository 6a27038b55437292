"""Similar stored tensors, collapsed to one row.

Such tensors have one shape, the same boxes, and the same pattern of file and key. Examples are layers, experts and ranks that
differ only in their numbers: `layers.{3..61}.experts.{0..256}.up` is 14,848 stored tensors. The end of a range is exclusive, as
in the language.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod

import numpy as np
from attrs import field

from ucpl.extents import key_text
from ucpl.layout import LogicalTensor
from ucpl.placement import Part, Placement
from ucpl.records import define, frozen
from ucpl.tables import I64, Block

__all__ = ["collapsed_lines"]

_NUMBER = re.compile(r"(\d+)")
_SHOWN = 6  # numbers without a step, before the rest is left out

Box = tuple[int, tuple[int, ...], tuple[int, ...], int]  # tensor, sizes, steps inside the stored tensor, offset


@frozen
class _Same:
    """The common properties of the stored tensors of one row."""

    shape: tuple[int, ...]
    padding: int
    names: tuple[object, ...]  # file and key with holes
    boxes: tuple[Box, ...]


@define
class _Row:
    """Numbers of the stored tensors of a row.

    lows: for each box and each dim, its first indices.
    """

    count: int = 0
    ranks: set[int] = field(factory=set)
    holes: list[list[str]] = field(factory=list)  # of each part of the file's and the key's name that changes
    lows: list[list[set[int]]] = field(factory=list)


def collapsed_lines(placement: Placement, rank: int | None) -> Iterator[str]:
    """Lines for all stored tensors, or those of one rank."""
    for part in placement.parts:
        for same, row in _rows(part, rank).items():
            yield from _lines(placement, part, same, row)


def _rows(part: Part, rank: int | None) -> dict[_Same, _Row]:
    out: dict[_Same, _Row] = {}
    for start, block in zip(part.homes.starts.tolist(), part.homes.blocks, strict=False):
        inside = np.flatnonzero((part.folded.home >= start) & (part.folded.home < start + len(block)))
        place = (part.folded.home[inside] - start) // max(1, block.choices)
        inside = inside[np.argsort(place, kind="stable")]
        ends = np.cumsum(np.bincount(place, minlength=len(block.rank))).tolist()
        for c in range(len(block.rank)):
            if rank is not None and block.rank[c] != rank:
                continue
            _add(out, part, block, c, (inside[ends[c - 1] if c else 0 : ends[c]], start + c * block.choices))
    return out


def _add(out: dict[_Same, _Row], part: Part, block: Block, c: int, held: tuple[I64, int]) -> None:
    """Add the stored tensors of a block at one coordinate.

    held: rows of the part's boxes, and the number of the first tensor.
    """
    shape, padding = tuple(block.shape[c].tolist()), int(block.padding[c])
    names = tuple(tuple(p if isinstance(p, str) else None for p in name) for name in (block.file, *block.key))
    for choices, rows in _alike(part, held, block.choices):
        boxes = tuple(_box(part, r) for r in rows)
        row = out.setdefault(_Same(shape, padding, names, boxes), _Row())
        row.count += len(choices)
        row.ranks.add(int(block.rank[c]))
        for i, texts in enumerate(_holes(block, c, choices)):
            if i == len(row.holes):
                row.holes.append([])
            row.holes[i] += texts
        for b, r in enumerate(rows):
            if b == len(row.lows):
                row.lows.append([set() for _ in boxes[b][1]])
            for known, values in zip(row.lows[b], _lows(part, r), strict=True):
                known.update(values)


def _alike(part: Part, held: tuple[I64, int], choices: int) -> Iterator[tuple[list[int], list[int]]]:
    """Choices of the bracketed indices, grouped by the rows that cover them."""
    rows, first = held
    runs: dict[tuple[int, ...], list[int]] = {}
    for r in rows.tolist():
        runs.setdefault(tuple(_choices(part, r, first)), []).append(r)
    if sum(map(len, runs)) == len({c for run in runs for c in run}):
        yield from ((list(run), found) for run, found in runs.items())
    else:
        of: dict[int, list[int]] = {}
        for run, found in runs.items():
            for choice in run:
                of.setdefault(choice, []).extend(found)
        alike: dict[tuple[int, ...], list[int]] = {}
        for choice, found in of.items():
            alike.setdefault(tuple(found), []).append(choice)
        yield from ((together, list(found)) for found, together in alike.items())
    bare = sorted(set(range(choices)) - {c for run in runs for c in run})
    if bare:
        yield bare, []  # only padding, or of no size


def _choices(part: Part, r: int, first: int) -> list[int]:
    table = part.folded
    found = np.array([int(table.home[r]) - first])
    for size, step in zip((table.high[r] - table.low[r]).tolist(), table.home_stride[r].tolist(), strict=True):
        if step:
            found = (found[:, None] + np.arange(size) * step).reshape(-1)
    numbers: list[int] = found.tolist()
    return numbers


def _box(part: Part, r: int) -> Box:
    table = part.folded
    over = table.home_stride[r] != 0
    sizes = np.where(over, 1, table.high[r] - table.low[r])
    return int(table.tensor[r]), tuple(sizes.tolist()), tuple(table.stride[r].tolist()), int(table.offset[r])


def _lows(part: Part, r: int) -> Iterator[range]:
    table = part.folded
    for low, high, step in zip(
        table.low[r].tolist(), table.high[r].tolist(), table.home_stride[r].tolist(), strict=True
    ):
        yield range(low, high) if step else range(low, low + 1)


def _holes(block: Block, c: int, choices: list[int]) -> Iterator[list[str]]:
    """The texts of each part of the names that changes."""
    for name in (block.file, *block.key):
        for p in name:
            if not isinstance(p, str):
                yield [p.text(j) for j in choices] if p.axis else [p.text(c)]


# ---- text ------------------------------------------------------------------------------------------------------------


def _lines(placement: Placement, part: Part, same: _Same, row: _Row) -> Iterator[str]:
    holes = iter(row.holes)
    file, *key = (_filled(name, holes) for name in same.names)
    padding = f", {same.padding} of padding" if same.padding else ""
    ranks = f"rank{'s' if len(row.ranks) > 1 else ''} {numbers(row.ranks)}"
    times = f"  x {row.count:,}" if row.count > 1 else ""
    yield f"{part.state.ljust(10)} {file}: {key_text(tuple(key))} {list(same.shape)}, {ranks}{padding}{times}"
    for (tensor, sizes, _, offset), lows in zip(same.boxes, row.lows, strict=True):
        path = placement.tensors[tensor]
        n = len(placement.layout.placed[path].counts)
        family = placement.layout.families.get(path)
        if family is None:
            name, first = path, 0
        else:  # its first dim is over its names
            held = sorted({low + n for low in lows[0] for n in range(sizes[0])})
            name, first = _texts([family.names[n] for n in held]), 1
        size = "x".join(map(str, sizes[first if sizes[:1] == (1,) else 0 : n])) or "1"
        dims = slice(first, n)
        yield f"           at {offset}: {size} from {name}[{_first(placement.layout.placed[path], lows, dims)}]"


def _filled(name: object, holes: Iterator[list[str]]) -> str:
    assert isinstance(name, tuple)
    return "".join(p if p is not None else _texts(next(holes)) for p in name)


def _texts(found: Sequence[str]) -> str:
    """The text at one place of a name, or several in braces."""
    texts = list(dict.fromkeys(found))
    if len(texts) == 1:
        return texts[0]
    if all(t.isdecimal() for t in texts):
        return "{" + numbers(int(t) for t in texts) + "}"
    return _product(texts) or "{" + ", ".join(texts[:_SHOWN]) + (", ..." if len(texts) > _SHOWN else "") + "}"


def _product(texts: Sequence[str]) -> str:
    """Names of many tensors as `layers.{0..61}.up`, or "".

    They have all combinations of their numbers.
    """
    if len(texts) <= _SHOWN:
        return ""
    parts = [*zip(*(_NUMBER.split(text) for text in texts), strict=False)]
    alike = [{*part} for part in parts]
    if len({len(_NUMBER.split(text)) for text in texts}) > 1 or any(len(some) > 1 for some in alike[::2]):
        return ""
    if prod(map(len, alike)) != len(texts):
        return ""
    return "".join(part[0] if len(some) == 1 else _texts(part) for part, some in zip(parts, alike, strict=True))


def _first(tensor: LogicalTensor, lows: Sequence[set[int]], dims: slice) -> str:
    """The first elements of the boxes: `l=3..61, h=0`."""
    named = []
    for dim, indices, low in zip(tensor.dims[dims], tensor.indices[dims], lows[dims], strict=True):
        whole = numbers(indices[i] for i in low)
        named.append(whole if "#" in dim else f"{dim}={whole}")
    return ", ".join(named)


def numbers(found: Iterable[int]) -> str:
    """Integers as text: `0..61`, `0..8 by 2`, `1, 4, 5`.

    They are a range if they have one step.
    """
    values = sorted(set(found))
    steps = {b - a for a, b in pairwise(values)}
    if len(values) > 1 and len(steps) == 1:
        step = steps.pop()
        if step == 1:
            return f"{values[0]}..{values[-1] + 1}"
        if len(values) > 2:
            return f"{values[0]}..{values[-1] + step} by {step}"
    return ", ".join(map(str, values[:_SHOWN])) + (", ..." if len(values) > _SHOWN else "")
