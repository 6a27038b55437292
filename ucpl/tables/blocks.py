"""Blocks: stored tensors that are named and cut alike.

A block is a product of coordinates and of choices of indices. 126 layers on 256 ranks are one block: names with slots,
a column of coordinates for some slots, a column of choices for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Literal

import numpy as np

from ucpl.records import frozen
from ucpl.tables.table import I64, Bools

__all__ = ["CHOICE", "COORDINATE", "Block", "Listed", "Name", "Slot", "is_whole", "name_text", "name_texts"]

COORDINATE, CHOICE = 0, 1


@frozen(eq=False)
class Listed:
    """A column of texts with many repetitions.

    It has the different texts, and the number of each row's.
    """

    texts: tuple[str, ...]
    at: I64

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, row: int) -> str:
        return self.texts[int(self.at[row])]

    def take(self, rows: I64) -> Listed:
        return Listed(self.texts, self.at[rows])


@frozen(eq=False)
class Slot:
    """A part of a name that changes.

    It changes with the coordinates of the ranks, or with the choice of the bracketed indices.
    """

    axis: int  # COORDINATE or CHOICE
    values: I64 | tuple[str, ...] | Listed
    format: str = ""

    def text(self, i: int) -> str:
        if isinstance(self.values, tuple | Listed):
            return self.values[i]
        value = int(self.values[i])
        return format(value, self.format) if self.format else str(value)

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """`text` of each number."""
        if isinstance(self.values, tuple):
            return [*map(self.values.__getitem__, numbers)]
        if isinstance(self.values, Listed):
            return [*map(self.values.texts.__getitem__, self.values.at[np.asarray(numbers, dtype=np.int64)].tolist())]
        values = self.values[np.asarray(numbers, dtype=np.int64)].tolist()
        return [format(value, self.format) for value in values] if self.format else [*map(str, values)]


Name = tuple[str | Slot, ...]


def name_text(name: Name, coordinate: int, choice: int) -> str:
    if len(name) == 1 and isinstance(name[0], str):
        return name[0]
    return "".join(p if isinstance(p, str) else p.text(choice if p.axis else coordinate) for p in name)


def name_texts(name: Name, coordinates: Iterable[int], choices: Iterable[int]) -> list[str]:
    """The name at each pair of a coordinate and a choice.

    It is built a part at a time.
    """
    axes = [*coordinates], [*choices]
    count = len(axes[COORDINATE])
    texts = [repeat(p, count) if isinstance(p, str) else p.texts(axes[p.axis]) for p in name]
    return [*map("".join, zip(*texts, strict=True))] if name else [""] * count


def is_whole(text: str) -> bool:
    """True if a text is an integer in its usual form.

    `0` and `12` are; `00` and `012` are not: they would lose their zeros.
    """
    return text.isascii() and text.isdigit() and (text == "0" or not text.startswith("0"))


@frozen(eq=False)
class Block:
    """Tensors that are named and cut alike.

    Tensor number `c * choices + j` of the block is choice j at coordinate c. In a block of a bundle, tensors of different
    sizes, a coordinate is of one of them.
    """

    file: Name
    key: tuple[Name, ...]  # steps
    counted: tuple[bool, ...]  # of each step: whether a whole number in it is a position (a tensor's own name never is)
    choices: int
    shape: I64  # (C, D)
    rank: I64  # (C,)
    padding: I64  # (C,)
    undefined: Bools  # (C,)
    live: Bools  # (C,)
    replica: I64  # (C, R)
    named: tuple[str, ...] | None = None  # of each choice: the tensor that it stores; None: one for all
    owned: Listed | None = None  # of each coordinate: the tensor of a bundle that it stores

    def __len__(self) -> int:
        return len(self.rank) * self.choices

    @property
    def slots(self) -> list[Slot]:
        return [part for name in (self.file, *self.key) for part in name if isinstance(part, Slot)]

    def place(self, coordinate: int, choice: int) -> tuple[str, tuple[str | int, ...]]:
        """File and key of a tensor."""
        steps: list[str | int] = []
        for name, counted in zip(self.key, self.counted, strict=True):
            text = name_text(name, coordinate, choice)
            steps.append(int(text) if counted and is_whole(text) else text)
        return name_text(self.file, coordinate, choice), tuple(steps)

    def texts(self, coordinate: int) -> list[tuple[str, tuple[str, ...]]]:
        """File and texts of the key of each choice at a coordinate."""
        choices = range(self.choices)
        file = name_texts(self.file, repeat(coordinate, self.choices), choices)
        keys = [name_texts(name, repeat(coordinate, self.choices), choices) for name in self.key]
        return list(zip(file, zip(*keys, strict=True) if keys else repeat(()), strict=bool(keys)))

    def owner(self, coordinate: int, choice: int, label: str) -> str:
        """The tensor that a stored one is of. label: of all."""
        if self.owned is not None:
            return self.owned[coordinate]
        return label if self.named is None else self.named[choice]

    @property
    def owners(self) -> tuple[str, ...] | None:
        """The tensors that it stores, if they are several."""
        return self.named if self.owned is None else self.owned.texts

    def each_texts(self) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
        """`texts` of each coordinate."""
        count = len(self.rank)
        if self.choices != 1:
            yield from map(self.texts, range(count))
            return
        file, *keys = (name_texts(name, range(count), repeat(0, count)) for name in (self.file, *self.key))
        for place in zip(file, zip(*keys, strict=True) if keys else repeat(()), strict=bool(keys)):
            yield [place]

    def each_places(self) -> Iterator[list[tuple[str, tuple[str | int, ...]]]]:
        """`places` of each coordinate."""
        return map(self._counted, self.each_texts())

    def places(self, coordinate: int) -> list[tuple[str, tuple[str | int, ...]]]:
        """`place` of each choice at a coordinate."""
        return self._counted(self.texts(coordinate))

    def _counted(self, found: list[tuple[str, tuple[str, ...]]]) -> list[tuple[str, tuple[str | int, ...]]]:
        if not any(self.counted):
            return found  # type: ignore[return-value]
        return [
            (file, tuple([int(s) if c and is_whole(s) else s for s, c in zip(key, self.counted, strict=True)]))
            for file, key in found
        ]

    @property
    def files(self) -> Iterable[str]:
        """The names of its files, some of them twice."""
        axes = {p.axis for p in self.file if not isinstance(p, str)}
        coordinates = range(len(self.rank)) if COORDINATE in axes else range(min(1, len(self.rank)))
        choices = range(self.choices) if CHOICE in axes else range(min(1, self.choices))
        return (name_text(self.file, c, j) for c in coordinates for j in choices)

    def padding_kind(self, coordinate: int) -> Literal["zero", "live", "undefined"]:
        """Padding kind of the tensors at a coordinate: zeros, trained, or anything."""
        if self.undefined[coordinate]:
            return "undefined"
        return "live" if self.live[coordinate] else "zero"

    def take(self, coordinates: I64) -> Block:
        """The block at some of its coordinates."""

        def slots(name: Name) -> Name:
            return tuple(p if isinstance(p, str) or p.axis else _taken(p, coordinates) for p in name)

        return Block(
            slots(self.file),
            tuple(slots(step) for step in self.key),
            self.counted,
            self.choices,
            self.shape[coordinates],
            self.rank[coordinates],
            self.padding[coordinates],
            self.undefined[coordinates],
            self.live[coordinates],
            self.replica[coordinates],
            self.named,
            None if self.owned is None else self.owned.take(coordinates),
        )


def _taken(slot: Slot, rows: I64) -> Slot:
    match slot.values:
        case tuple() as texts:
            return Slot(slot.axis, tuple(texts[i] for i in rows.tolist()), slot.format)
        case Listed() as listed:
            return Slot(slot.axis, listed.take(rows), slot.format)
        case numbers:
            return Slot(slot.axis, numbers[rows], slot.format)
