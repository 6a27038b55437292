"""A plan's stored tensors, grouped by names, state and label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from ucpl.extents.records import Key
from ucpl.extents.structure import StoredTensor
from ucpl.records import frozen
from ucpl.tables import I64, Block

__all__ = ["Shelf", "Shelves"]


@frozen(eq=False)
class Shelf:
    """Stored tensors of one block and one state.

    `dtypes`: one for all, or one per tensor ("" if unknown).
    """

    block: Block
    state: str
    label: str
    dtypes: tuple[str, ...]
    shares: I64 | None = None  # of each tensor: the number of the one whose storage it is a second name of, or -1
    # The place in the order of files, if that is another: of each choice's first tensor; of a bundle, of each coordinate's.
    begins: I64 | None = None

    def __len__(self) -> int:
        return len(self.block)

    @property
    def filed(self) -> I64 | None:
        """The place of each tensor in the order of files."""
        if self.begins is None or self.block.owned is not None:
            return self.begins
        return (np.arange(len(self.block.rank))[:, None] + self.begins).reshape(-1)

    @property
    def each(self) -> Iterator[StoredTensor]:
        block, number = self.block, 0
        columns = zip(block.shape.tolist(), block.rank.tolist(), block.padding.tolist(), strict=True)
        for coordinate, ((sizes, rank, padding), places) in enumerate(zip(columns, block.each_places(), strict=True)):
            shape, kind = tuple(sizes), block.padding_kind(coordinate)
            for choice, (file, key) in enumerate(places):
                label = block.owner(coordinate, choice, self.label)
                shared = -1 if self.shares is None else int(self.shares[number])
                dtype = self.dtypes[number if len(self.dtypes) > 1 else 0]
                shares = None if shared < 0 else shared
                yield StoredTensor(file, key, dtype, shape, self.state, label, rank, shares, padding, kind)
                number += 1

    def tensor(self, number: int) -> StoredTensor:
        coordinate, choice = divmod(number, self.block.choices)
        file, key = self.block.place(coordinate, choice)
        shared = -1 if self.shares is None else int(self.shares[number])
        return StoredTensor(
            file,
            key,
            self.dtypes[number if len(self.dtypes) > 1 else 0],
            tuple(self.block.shape[coordinate].tolist()),
            self.state,
            self.block.owner(coordinate, choice, self.label),
            int(self.block.rank[coordinate]),
            None if shared < 0 else shared,
            int(self.block.padding[coordinate]),
            self.block.padding_kind(coordinate),
        )


@frozen(eq=False, slots=False)
class Shelves(Sequence[StoredTensor]):
    """All stored tensors of one side of a plan, by shelf.

    Single ones are made on access.
    """

    shelves: tuple[Shelf, ...]

    @cached_property
    def starts(self) -> I64:
        """(shelves + 1,): the number of each shelf's first tensor."""
        return np.cumsum([0, *(len(s) for s in self.shelves)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, number: int) -> StoredTensor:  # type: ignore[override]
        if number < 0 or number >= len(self):
            raise IndexError(number)
        shelf = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.shelves[shelf].tensor(number - int(self.starts[shelf]))

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self.each)

    @cached_property
    def each(self) -> tuple[StoredTensor, ...]:
        return tuple(tensor for s in self.shelves for tensor in s.each)

    @property
    def places(self) -> Iterator[tuple[str, Key]]:
        """File and key of each stored tensor."""
        return (place for s in self.shelves for places in s.block.each_places() for place in places)

    @cached_property
    def files(self) -> frozenset[str]:
        """The files of all stored tensors."""
        return frozenset(name for s in self.shelves for name in s.block.files)

    @cached_property
    def filed(self) -> I64 | None:
        """The tensors' numbers in the order of files.

        None if this is their own order.
        """
        places = [place for s in self.shelves if (place := s.filed) is not None]
        if not places or len(places) < len(self.shelves):
            return None
        return np.argsort(np.concatenate(places), kind="stable")

    @classmethod
    def of(cls, tensors: Sequence[StoredTensor]) -> Shelves:
        """Tensors one by one, each on a shelf of its own."""
        if isinstance(tensors, Shelves):
            return tensors
        return cls(tuple(_shelf(t) for t in tensors))

    def with_dtypes(self, dtypes: Sequence[tuple[str, ...]]) -> Shelves:
        """The same tensors of other dtypes, by shelf."""
        held = zip(self.shelves, dtypes, strict=True)
        return Shelves(tuple(Shelf(s.block, s.state, s.label, d, s.shares, s.begins) for s, d in held))


def _shelf(t: StoredTensor) -> Shelf:
    block = Block(
        (t.file,) if t.file else (),
        tuple((str(step),) if str(step) else () for step in t.key),
        tuple(isinstance(step, int) for step in t.key),
        1,
        np.array([t.shape], dtype=np.int64).reshape(1, len(t.shape)),
        np.array([t.rank], dtype=np.int64),
        np.array([t.padding], dtype=np.int64),
        np.array([t.padding_kind == "undefined"], dtype=np.bool_),
        np.array([t.padding_kind == "live"], dtype=np.bool_),
        np.zeros((1, 0), dtype=np.int64),
    )
    shares = None if t.shares is None else np.array([t.shares], dtype=np.int64)
    return Shelf(block, t.state, t.label, (t.dtype,), shares)
