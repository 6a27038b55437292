"""Possible causes of a difference: cheap searches for the same numbers elsewhere.

A guess is only a sentence: it is printed next to the element that differs, which is a fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.extents import DTYPES, Extent, key_text
from ucpl.files.checkpoint import Checkpoint
from ucpl.records import define, frozen
from ucpl.runtime.values import decode
from ucpl.tables import I64
from ucpl.verification.values import ValueTensors

__all__ = ["Diagnosis", "StoredTensors"]

BYTES_MAX = 64 << 20  # of a stored tensor that is looked at
CANDIDATES_MAX = 512  # stored tensors of one shape that are looked at for one guess
ROWS_MAX = 1 << 18
GUESSES_MAX = 32  # of one comparison: a spec that is wrong throughout is wrong in few ways

Place = tuple[str, tuple[str, ...]]
Words = NDArray[np.unsignedinteger | np.complexfloating]  # elements as bits


@define
class StoredTensors:
    """Stored tensors of a checkpoint, read completely: the last few are cached."""

    checkpoint: Checkpoint
    kept: dict[Place, Words] = field(factory=dict)

    def read(self, place: Place, extent: Extent) -> Words:
        if place not in self.kept:
            if sum(a.nbytes for a in self.kept.values()) > BYTES_MAX:
                self.kept.clear()
            raw = b"".join(ValueTensors.of(self.checkpoint).chunks(extent))
            size = DTYPES[extent.dtype].itemsize
            self.kept[place] = np.frombuffer(raw, f"<u{size}" if size < 16 else "<c16").reshape(extent.shape)
        return self.kept[place]


@frozen
class Diagnosis:
    mine: StoredTensors
    reference: StoredTensors
    here: Mapping[Place, Extent]
    there: Mapping[Place, Extent]
    made: list[Place] = field(factory=list)

    def of(self, place: Place) -> str:
        """The likely cause of a difference in a stored tensor, or ""."""
        extent = self.here[place]
        if extent.numel * DTYPES[extent.dtype].itemsize > BYTES_MAX or len(self.made) >= GUESSES_MAX:
            return ""
        self.made.append(place)
        a, b = self.mine.read(place, extent), self.reference.read(place, self.there[place])
        for look in (self.elsewhere, self.shifted, self.reordered, self.scattered):
            if said := look(place, a, b):
                return said
        return ""

    def twin(self, place: Place, *, mine: bool) -> str:
        """The other side's tensor that has the same numbers under another name."""
        ours, theirs = (self.here, self.there) if mine else (self.there, self.here)
        extent = ours[place]
        if extent.numel * DTYPES[extent.dtype].itemsize > BYTES_MAX or len(self.made) >= GUESSES_MAX:
            return ""
        self.made.append(place)
        one, other = (self.mine, self.reference) if mine else (self.reference, self.mine)
        wanted = one.read(place, extent)
        alike = sorted((p for p, e in theirs.items() if _is_like(e, extent)), key=lambda p: p in ours)
        for p in alike[:CANDIDATES_MAX]:  # those that have no place on this side first
            if np.array_equal(other.read(p, theirs[p]), wanted):
                return _named(p)
        return ""

    def elsewhere(self, place: Place, a: Words, b: Words) -> str:
        """Find another tensor: parts swapped, wrong layer, expert or rank."""
        if a.size < 2:
            return ""
        for p in self.alike(place):
            if np.array_equal(self.reference.read(p, self.there[p]), a):
                return f"these numbers are {_named(p)} there: {_difference(place, p)}"
        return ""

    def alike(self, place: Place) -> Iterator[Place]:
        """Other stored tensors of the same shape and type, nearest first."""
        extent = self.here[place]
        found = [p for p, e in self.there.items() if p != place and _is_like(e, extent)]
        found.sort(key=lambda p: (p[0] != place[0], p[1] != place[1]))
        yield from found[:CANDIDATES_MAX]

    def shifted(self, place: Place, a: Words, b: Words) -> str:
        """A constant difference: a `value` clause is missing or wrong."""
        dtype = self.here[place].dtype
        if not dtype.startswith(("f", "bf")):
            return ""
        x, y = (np.asarray(decode(np.frombuffer(w.tobytes(), np.uint8), dtype), np.float64) for w in (a, b))
        with np.errstate(invalid="ignore"):
            step = np.unique(np.round(x - y, 2))
        if len(step) == 1 and np.isfinite(step[0]) and step[0]:
            more, sign = ("more", "-") if step[0] > 0 else ("less", "+")
            return (
                f"every element is {abs(step[0]):g} {more} here: `value x {sign} {abs(step[0]):g}` is missing or wrong"
            )
        return ""

    def reordered(self, place: Place, a: Words, b: Words) -> str:
        """The same numbers in another order."""
        if a.ndim == 2 and a.shape[0] == a.shape[1] and np.array_equal(a.T, b):
            return "it is transposed: write its dims the other way round"
        for axis in range(a.ndim):
            order = _order(np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0))
            if order is not None:
                return f"the same numbers in another order along axis {axis}: {_order_text(order)}"
        if np.array_equal(np.sort(a.ravel()), np.sort(b.ravel())):
            return "the same numbers in another order"
        return ""

    def scattered(self, place: Place, a: Words, b: Words) -> str:
        """Rows that are in files of other ranks on the other side.

        Cut, then packed, or packed, then cut.
        """
        peers = [p for p in self.alike(place) if p[1] == place[1]]
        for axis in range(min(a.ndim, 2)):
            rows = _rows(np.moveaxis(a, axis, 0))
            if len(rows) * (len(peers) + 1) > ROWS_MAX:
                return ""
            known: dict[bytes, tuple[Place, int]] = {}
            for p in [place, *peers]:
                for n, row in enumerate(_rows(np.moveaxis(self.reference.read(p, self.there[p]), axis, 0))):
                    known.setdefault(row, (p, n))
            if len(known) > 1 and all(row in known for row in rows):
                n = next(i for i, row in enumerate(rows) if known[row] != (place, i))
                p, m = known[rows[n]]
                return (
                    f"the parts are on other ranks: position {n} along axis {axis} is position {m} of {p[0]} there."
                    " A part that is cut and then packed, (a@tp + b@tp), is not one that is packed and then cut, (a + b)@tp"
                )
        return ""


def _is_like(a: Extent, b: Extent) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def _named(place: Place) -> str:
    return f"{key_text(place[1])} of {place[0]}"


def _difference(here: Place, there: Place) -> str:
    if here[0] == there[0]:
        return "another tensor, layer or expert"
    return "another rank or stage" if here[1] == there[1] else "another tensor of another rank or stage"


def _rows(array: Words) -> list[bytes]:
    return [row.tobytes() for row in array]


def _order(a: Words, b: Words) -> I64 | None:
    """order[i]: the place of row i of a in b.

    None if the rows differ or are ambiguous.
    """
    if not 1 < len(a) <= ROWS_MAX:
        return None
    theirs = {row: n for n, row in enumerate(_rows(b))}
    ours = _rows(a)
    if len(theirs) != len(ours) or set(ours) != set(theirs):
        return None
    return np.array([theirs[row] for row in ours], dtype=np.int64)


def _order_text(order: I64) -> str:
    """Describe an order: swapped parts, transposed digits, or the first move."""
    n = len(order)
    starts = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), n]
    runs = [(int(order[a]), b - a) for a, b in pairwise(starts)]
    moved = [(a, run) for a, run in zip(starts, runs, strict=False) if run[0] != a]
    if len(moved) == 2 and moved[0][1][1] == moved[1][1][1]:
        (a, (_, size)), (b, _) = moved
        return f"two parts of {size} are swapped, from {a} and from {b} on"
    for k in range(2, n):
        if n % k == 0 and np.array_equal(order, np.arange(n).reshape(k, n // k).T.ravel()):
            return f"({n // k} {k}) here is ({k} {n // k}) there: two dims of a product are the other way round"
    position = next(i for i, m in enumerate(order.tolist()) if m != i)
    return f"position {position} here is position {int(order[position])} there"
