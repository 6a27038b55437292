"""Read stored tensors of any strides in boxes of constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.extents import DTYPES, Extent, pieces_of
from ucpl.records import frozen
from ucpl.runtime.reading import RUN_MIN, Reader
from ucpl.runtime.sources import SourceFiles

__all__ = ["TILE", "JoinedBoxes", "TensorBox", "TensorBoxes", "tiles_of"]

TILE = 1 << 20  # bytes of one box
Ints = tuple[int, ...]


@frozen
class TensorBox:
    """A box of a tensor: first element, and size of each dim.

    A tensor without dims has one element.
    """

    low: Ints
    shape: Ints

    def positions(self, inside: NDArray[np.int64], of: Ints) -> NDArray[np.int64]:
        """Convert row-major positions in this box to those in `of`."""
        index = np.unravel_index(inside, self.shape)
        full = tuple(i + low for i, low in zip(index, self.low, strict=True))
        return np.ravel_multi_index(full, of).astype(np.int64) if of else inside


def tiles_of(shape: Ints, itemsize: int, *, is_row_major: bool) -> Iterator[TensorBox]:
    """Boxes that cover a tensor, of at most TILE bytes.

    Boxes of the narrowest types have up to 4 TILE. Row-major ones are runs of it, in order. The others have runs along
    two dims, so that a tensor that is stored column
    by column is
    read in runs that are worth a call, and gaps are skipped.
    """
    side = 1 if is_row_major else RUN_MIN // itemsize
    yield from _cut(TensorBox((0,) * len(shape), shape), max(TILE // itemsize, side * side), side)


def _cut(tile: TensorBox, most: int, side: int) -> Iterator[TensorBox]:
    """Cut a tile.

    `side`: elements of a dim that stay together while a wider dim is left; 1: the first dims are cut first.
    """
    count = prod(tile.shape)
    if count <= most:
        if count:
            yield tile
        return
    wide = [i for i, n in enumerate(tile.shape) if n > 1]
    axis = wide[0] if side == 1 else max(wide, key=lambda i: tile.shape[i])
    n = tile.shape[axis]
    each = max(side if n > side else 1, most * n // count)
    for start in range(0, n, each):
        low = (*tile.low[:axis], tile.low[axis] + start, *tile.low[axis + 1 :])
        shape = (*tile.shape[:axis], min(each, n - start), *tile.shape[axis + 1 :])
        yield from _cut(TensorBox(low, shape), most, side)


@frozen(eq=False)
class TensorBoxes:
    """The boxes of one stored tensor of a folder.

    A context manager: leaving it closes the file.
    """

    extent: Extent
    files: SourceFiles
    reader: Reader
    staging: NDArray[np.uint8] = field(factory=lambda: np.empty(TILE, np.uint8))

    @classmethod
    def of(cls, root: Path, extent: Extent) -> TensorBoxes:
        files = SourceFiles(root, [extent.file])
        return cls(extent, files, Reader(files))

    def __enter__(self) -> TensorBoxes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.files.close()

    def read(self, tile: TensorBox) -> NDArray[np.uint8]:
        """The bytes of a box, row-major. Raises: UcplError E610, E611."""
        one, size = self.extent, DTYPES[self.extent.dtype].itemsize
        start = one.offset + sum(i * s for i, s in zip(tile.low, one.stride, strict=True))
        # In the order of the file, and turned in memory: neighbouring bytes are read together.
        order = sorted(range(len(tile.shape)), key=lambda i: -one.stride[i])
        shape, step = (tuple(of[i] for i in order) for of in (tile.shape, one.stride))
        out = np.empty((*shape, size), np.uint8)
        self.reader.gather(
            0, one.storage_start + start * size, shape, tuple(s * size for s in step), out.reshape(-1), 0,
            out.strides[:-1], size, self.staging,
        )  # fmt: skip
        self.reader.fragments.clear()
        turned = [order.index(i) for i in range(len(order))]
        return np.ascontiguousarray(out.transpose(*turned, len(order))).reshape(-1)


@frozen(eq=False)
class JoinedBoxes:
    """The boxes of a tensor that several stored pieces make up."""

    extent: Extent
    pieces: tuple[tuple[Ints, TensorBoxes], ...]

    @classmethod
    def of(cls, root: Path, extent: Extent) -> JoinedBoxes:
        return cls(extent, tuple((begin, TensorBoxes.of(root, one)) for begin, one in pieces_of(extent)))

    def __enter__(self) -> JoinedBoxes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _, boxes in self.pieces:
            boxes.files.close()

    def read(self, tile: TensorBox) -> NDArray[np.uint8]:
        """The bytes of a box, row-major. Raises: UcplError E610, E611."""
        size = DTYPES[self.extent.dtype].itemsize
        out = np.empty((*tile.shape, size), np.uint8)
        for begin, boxes in self.pieces:
            ends = zip(begin, boxes.extent.shape, tile.low, tile.shape, strict=True)
            runs = [(max(low, first), min(low + n, first + m)) for first, m, low, n in ends]
            if all(low < high for low, high in runs):
                shape = tuple(high - low for low, high in runs)
                mine = TensorBox(tuple(low - first for (low, _), first in zip(runs, begin, strict=True)), shape)
                where = tuple(slice(low - at, high - at) for (low, high), at in zip(runs, tile.low, strict=True))
                out[where] = boxes.read(mine).reshape(*shape, size)
        return out.reshape(-1)
