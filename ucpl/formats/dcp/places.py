"""Chunks and their places: records, or columns of many.

`.metadata` of a large job has millions of each. As columns they take a twentieth of the memory and time; `Boxes`,
`Places` and `Spans` show them as records, one at a time.

Not here: reading `.metadata`, and errors in it (metadata).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt
from attrs import field

from ucpl.files.pickle_runs import Irregular, PickleRuns, Run
from ucpl.records import define, frozen

__all__ = ["ChunkColumns", "ByteRange", "Numbers", "Places", "Shape", "Spans", "StoredChunk"]

Shape = tuple[int, ...]
T = TypeVar("T")
Numbers = npt.NDArray[np.int64]


@frozen
class ByteRange:
    """A run of bytes of a file, usually an archive of torch.save."""

    file: str  # relative to the folder
    start: int
    size: int | None  # None: to its end


@frozen
class StoredChunk:
    """A box of a tensor: its begin and its shape."""

    offset: Shape
    shape: Shape
    place: ByteRange

    @property
    def numel(self) -> int:
        return prod(self.shape)


class _Columns(Sequence[T]):
    """A sequence whose members are made when they are asked for."""

    def one(self, n: int) -> T:
        raise NotImplementedError

    @overload
    def __getitem__(self, n: int) -> T: ...
    @overload
    def __getitem__(self, n: slice) -> tuple[T, ...]: ...
    def __getitem__(self, n: int | slice) -> T | tuple[T, ...]:
        if isinstance(n, slice):
            return tuple(self.one(i) for i in range(*n.indices(len(self))))
        if not -len(self) <= n < len(self):
            raise IndexError(n)
        return self.one(n % len(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@define(eq=False)
class Spans(_Columns[tuple[int, int]]):
    """Byte ranges of a file: begins and sizes."""

    starts: Numbers
    sizes: Numbers

    def __len__(self) -> int:
        return len(self.starts)

    def one(self, n: int) -> tuple[int, int]:
        return int(self.starts[n]), int(self.sizes[n])


@define(eq=False)
class ChunkColumns(_Columns[StoredChunk]):
    """The chunks of a tensor."""

    offsets: Numbers
    shapes: Numbers
    files: Numbers  # numbers of names
    spans: Spans
    names: list[str]

    def __len__(self) -> int:
        return len(self.offsets)

    def one(self, n: int) -> StoredChunk:
        place = ByteRange(self.names[int(self.files[n])], *self.spans.one(n))
        return StoredChunk(tuple(self.offsets[n].tolist()), tuple(self.shapes[n].tolist()), place)


@define(eq=False)
class Places(Mapping[str, dict[Shape | None, ByteRange]]):
    """Places by name and begin, as columns sorted by name.

    Begin None: a value that is no tensor.
    """

    rows: dict[str, slice]
    dims: Numbers  # of each begin; -1: it has none
    offsets: Numbers
    files: Numbers
    spans: Spans
    names: list[str]
    name_of: Numbers = field(repr=False)

    @classmethod
    def of(cls, runs: PickleRuns, pairs: list[Run], single: dict[str, dict[Shape | None, ByteRange]]) -> Places:
        """Those of runs of records, and single ones. Raises: Irregular, UnicodeDecodeError."""
        texts = runs.texts(pairs, ("fqn", "relative_path"))
        ids = {text: n for n, text in enumerate(texts.values)}
        others = [(name, o, place) for name, held in single.items() for o, place in held.items()]
        extra = len(others)

        def joined(found: list[Numbers], more: list[int]) -> Numbers:
            return np.concatenate((*found, np.array(more, np.int64)))

        def number(text: str) -> int:
            return ids.setdefault(text, len(ids))

        name = joined([texts.columns["fqn"]], [number(name) for name, _, _ in others])
        file = joined([texts.columns["relative_path"]], [number(place.file) for _, _, place in others])
        start = joined([run.wholes("offset") for run in pairs], [place.start for _, _, place in others])
        size = joined([run.wholes("length") for run in pairs], [place.size or 0 for _, _, place in others])
        dims = joined([run.dims("offset") for run in pairs], [-1 if o is None else len(o) for _, o, _ in others])
        offsets = np.zeros((len(name), int(dims.max(initial=0))), np.int64)
        at = 0
        for run in pairs:
            some = run.padded("offset")
            offsets[at : at + run.size, : some.shape[1]] = some
            at += run.size
        for n, (_, offset, _) in enumerate(others, len(offsets) - extra):
            offsets[n, : len(offset or ())] = offset or ()
        order = np.argsort(name.astype(np.min_scalar_type(len(ids))), kind="stable")  # by digits, if there are few
        name = name[order]
        heads = np.flatnonzero(np.diff(name, prepend=-1))
        ends = np.append(heads[1:], len(name)).tolist()
        names = list(ids)
        rows = {names[name[a]]: slice(a, b) for a, b in zip(heads.tolist(), ends, strict=True)}
        return cls(rows, dims[order], offsets[order], file[order], Spans(start[order], size[order]), names, name)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> dict[Shape | None, ByteRange]:
        """Raises: KeyError; Irregular for two places of a begin."""
        out: dict[Shape | None, ByteRange] = {}
        rows = self.rows[name]
        for n in range(rows.start, rows.stop):
            d = int(self.dims[n])
            offset = None if d < 0 else tuple(self.offsets[n, :d].tolist())
            if offset in out:
                raise Irregular
            out[offset] = ByteRange(self.names[int(self.files[n])], *self.spans.one(n))
        return out

    def boxes(self, name: str, shape: Shape, offsets: Numbers, sizes: Numbers) -> ChunkColumns | None:
        """The chunks of a tensor by begin.

        None: they have to be read one by one.
        """
        rows = self.rows.get(name, slice(0, 0))
        d = len(shape)
        if (self.dims[rows] != d).any() or rows.stop - rows.start != len(offsets):
            return None
        begins = self.offsets[rows, :d]
        mine, theirs = np.lexsort(offsets.T[::-1]), np.lexsort(begins.T[::-1])
        offsets, sizes = offsets[mine], sizes[mine]
        if (offsets != begins[theirs]).any() or (offsets[1:] == offsets[:-1]).all(axis=1).any():
            return None
        if (sizes == 0).any() or (offsets + sizes > np.array(shape)).any():
            return None
        spans = Spans(self.spans.starts[rows][theirs], self.spans.sizes[rows][theirs])
        return ChunkColumns(offsets, sizes, self.files[rows][theirs], spans, self.names)

    def needed(self) -> dict[str, str]:
        """Every file, and a name that has a place in it."""
        files, first = np.unique(self.files, return_index=True)
        return {
            self.names[file]: self.names[self.name_of[n]]
            for file, n in zip(files.tolist(), first.tolist(), strict=True)
        }

    def archives(self) -> dict[str, Sequence[tuple[int, int]]]:
        """Byte ranges in each file. Raises: Irregular if two overlap."""
        starts, sizes = self.spans.starts, self.spans.sizes
        order = np.lexsort((sizes, starts, self.files))
        files, starts, sizes = self.files[order], starts[order], sizes[order]
        if ((files[1:] == files[:-1]) & (starts[1:] < starts[:-1] + sizes[:-1])).any():
            raise Irregular
        heads = np.flatnonzero(np.diff(files, prepend=-1))
        ends = np.append(heads[1:], len(files)).tolist()
        return {self.names[files[a]]: Spans(starts[a:b], sizes[a:b]) for a, b in zip(heads.tolist(), ends, strict=True)}
