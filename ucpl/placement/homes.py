"""Single stored tensors of one part.

They are made one by one on request; planning never uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate

import numpy as np

from ucpl.extents import Key
from ucpl.extents.structure import PadKind
from ucpl.records import frozen
from ucpl.tables import I64, Block

__all__ = ["Home", "Homes", "home_of"]


@frozen
class Home:
    """One stored tensor: its place and its size.

    `padding` counts its cells that belong to no tensor.
    """

    file: str
    key: Key
    shape: tuple[int, ...]
    rank: int  # the first rank that holds it
    padding: int
    undefined: bool = False  # whether its padding may hold anything
    live: bool = False  # whether its padding is trained, too
    # Coordinates on mesh axes that do not cut it: two homes of one part may hold the same element only if these differ.
    replica: tuple[int, ...] = ()

    @property
    def padding_kind(self) -> PadKind:
        return "undefined" if self.undefined else "live" if self.live else "zero"


def home_of(block: Block, coordinate: int, choice: int) -> Home:
    return next(_homes_at(block, coordinate, [block.place(coordinate, choice)]))


def _homes_at(block: Block, coordinate: int, places: Iterable[tuple[str, Key]]) -> Iterator[Home]:
    """Tensors at one coordinate, which have one size."""
    shape, replica = tuple(block.shape[coordinate].tolist()), tuple(block.replica[coordinate].tolist())
    rank, padding = int(block.rank[coordinate]), int(block.padding[coordinate])
    undefined, live = bool(block.undefined[coordinate]), bool(block.live[coordinate])
    for file, key in places:
        yield Home(file, key, shape, rank, padding, undefined, live, replica)


@frozen(eq=False, slots=False)
class Homes:
    """All stored tensors of a part, numbered block by block."""

    blocks: tuple[Block, ...]

    @cached_property
    def starts(self) -> I64:
        """(blocks + 1,): the number of each block's first tensor."""
        return np.array([0, *accumulate(map(len, self.blocks))], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __iter__(self) -> Iterator[Home]:
        return iter(self.each)

    def __getitem__(self, home: int) -> Home:
        return self.each[home]

    @cached_property
    def each(self) -> tuple[Home, ...]:
        places = ((b, c, found) for b in self.blocks for c, found in enumerate(b.each_places()))
        return tuple(home for b, c, found in places for home in _homes_at(b, c, found))

    def places(self) -> Iterator[tuple[tuple[int, ...], list[tuple[str, tuple[str, ...]]]]]:
        """Shape and places of tensors, by block and coordinate.

        A place is the file and the texts of the key. No single tensors are made.
        """
        for block in self.blocks:
            for shape, found in zip(block.shape.tolist(), block.each_texts(), strict=True):
                yield tuple(shape), found

    def find(self, home: int) -> tuple[Block, int, int]:
        """Block, coordinate and choice of a tensor."""
        b = int(np.searchsorted(self.starts, home, side="right")) - 1
        return self.blocks[b], *divmod(home - int(self.starts[b]), self.blocks[b].choices)

    def home(self, home: int) -> Home:
        block, coordinate, choice = self.find(home)
        return home_of(block, coordinate, choice)

    @property
    def numel_max(self) -> int:
        return max((int(b.shape.prod(axis=1).max(initial=0)) for b in self.blocks if len(b)), default=0)

    @property
    def padding(self) -> int:
        return sum(int(b.padding.sum()) * b.choices for b in self.blocks)

    @cached_property
    def replicas(self) -> tuple[I64, I64]:
        """Numbers that distinguish declared copies, and the begin of each block's.

        A number is by (block, coordinate).
        """
        seen: dict[tuple[int, ...], int] = {}
        numbers = [[seen.setdefault(tuple(r), len(seen)) for r in b.replica.tolist()] for b in self.blocks]
        starts = np.cumsum([0, *(len(n) for n in numbers)])
        return np.array([n for each in numbers for n in each], dtype=np.int64), starts.astype(np.int64)

    def rank(self, home: I64) -> I64:
        """The first rank that holds each of these tensors."""
        b = np.searchsorted(self.starts, home, side="right") - 1
        first = np.cumsum([0, *(len(block.rank) for block in self.blocks)])
        choices = np.array([block.choices for block in self.blocks], dtype=np.int64)
        ranks = np.concatenate([block.rank for block in self.blocks])
        out: I64 = ranks[first[b] + (home - self.starts[b]) // choices[b]]
        return out

    def replica(self, home: I64) -> I64:
        """Replica number of each of these tensors.

        It is equal for equal coordinates on the axes that do not cut.
        """
        numbers, starts = self.replicas
        b = np.searchsorted(self.starts, home, side="right") - 1
        choices = np.array([b.choices for b in self.blocks], dtype=np.int64)
        out: I64 = numbers[starts[b] + (home - self.starts[b]) // choices[b]]
        return out
