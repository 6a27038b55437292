"""Table: declared columns of one length.

The functions of all tables of boxes, pieces and moves are here, once: take, concat, widen, sort.


    @frozen(eq=False)
    class Points(Table):
        x: I64 = column()
        steps: I64 = block(fill=0)  # (N, K)

A subclass defines the meaning of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Self, TypeVar, overload

import attrs
import numpy as np
from attrs import field
from numpy.typing import NDArray

from ucpl.records import frozen

__all__ = ["I64", "Bools", "Table", "block", "column", "each", "once", "widened"]

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
Array = NDArray[Any]  # of the dtype that its column declares
S = TypeVar("S", bound=np.generic)


@overload
def column() -> I64: ...
@overload
def column(dtype: type[S]) -> NDArray[S]: ...
def column(dtype: type[np.generic] = np.int64) -> object:
    """A column of one value a row: (N,)."""
    return field(metadata={"dtype": np.dtype(dtype)})


def once(values: NDArray[S]) -> NDArray[S]:
    """The different numbers, ascending.

    (NumPy's `unique` imports its masked arrays for that.)
    """
    ordered: NDArray[S] = np.sort(values, axis=None)
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]


def each(values: NDArray[S]) -> list[int]:
    """The same as a list."""
    out: list[int] = once(values).tolist()
    return out


def block(fill: int) -> I64:
    """K values a row: (N, K).

    `fill` is the value of a dim that a row does not have.
    """
    made: I64 = field(metadata={"dtype": np.dtype(np.int64), "fill": fill})
    return made


def widened(rows: NDArray[S], width: int, fill: int) -> NDArray[S]:
    """The same (N, K) rows with `width` columns, at least K.

    Those behind hold `fill`. It is not `np.pad`, since tables are many and small: that takes ten times as long over a
    few rows.
    """
    own = rows.shape[1]
    if own == width:
        return rows
    made = np.full((len(rows), width), fill, rows.dtype)
    made[:, :own] = rows
    return made


@frozen(eq=False)
class Table:
    """Rows as columns of one length.

    Blocks of one table have one width.
    """

    def __len__(self) -> int:
        first: Array = getattr(self, self.names()[0])
        return len(first)

    @classmethod
    @cache
    def names(cls) -> tuple[str, ...]:
        return tuple(a.name for a in attrs.fields(cls))

    @classmethod
    @cache
    def blocks(cls) -> dict[str, int]:
        """Names of the (N, K) columns, each with its fill."""
        return {a.name: a.metadata["fill"] for a in attrs.fields(cls) if "fill" in a.metadata}

    @property
    def width(self) -> int:
        """K of the blocks."""
        for name in self.blocks():
            array: Array = getattr(self, name)
            return int(array.shape[1])
        return 0

    def arrays(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in self.names()}

    def take(self, rows: I64 | Bools | slice) -> Self:
        """Some rows, in the order asked for."""
        if isinstance(rows, slice):
            return type(self)(**{name: array[rows] for name, array in self.arrays().items()})
        numbers = rows.nonzero()[0] if rows.dtype == np.bool_ else rows
        return type(self)(**{name: array.take(numbers, axis=0) for name, array in self.arrays().items()})

    def sort(self, *keys: Array) -> Self:
        """Rows sorted by the first key, then the second, and so on.

        Rows that are equal keep their order.
        """
        return self.take(np.lexsort(tuple(reversed(keys))))

    def widen(self, width: int) -> Self:
        """The same rows with blocks of at least `width` columns."""
        if width <= self.width:
            return self
        return attrs.evolve(
            self,
            **{name: widened(getattr(self, name), width, fill) for name, fill in self.blocks().items()},
        )

    def replace(self, **columns: Array) -> Self:
        """The same rows with other values in some columns."""
        return attrs.evolve(self, **columns)

    @classmethod
    def empty(cls, width: int = 1) -> Self:
        blocks = cls.blocks()
        return cls(
            **{
                a.name: np.zeros((0, width) if a.name in blocks else 0, dtype=a.metadata["dtype"])
                for a in attrs.fields(cls)
            }
        )

    @classmethod
    def concat(cls, tables: Iterable[Self], width: int = 1) -> Self:
        """Rows of several tables.

        Blocks become as wide as the widest, and at least `width`.
        """
        found = [t for t in tables if len(t)]
        if not found:
            return cls.empty(width)
        if len(found) == 1:
            return found[0].widen(width)
        widest = max(width, *(t.width for t in found)) if cls.blocks() else 0
        wide = [t.widen(widest) for t in found]
        return cls(**{name: np.concatenate([getattr(t, name) for t in wide]) for name in cls.names()})

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Self:
        """A table of arrays by the columns' names.

        It is checked, since the arrays may come from a file. Raises: ValueError.
        """
        if set(arrays) != set(cls.names()):
            raise ValueError(f"columns {sorted(arrays)}, not {sorted(cls.names())}")
        blocks = cls.blocks()
        rows = {len(a) if a.ndim else -1 for a in arrays.values()}
        widths = {a.shape[1:] for n, a in arrays.items() if n in blocks}
        if len(rows) > 1 or len(widths) > 1:
            raise ValueError("columns of different length")
        made: dict[str, Array] = {}
        for a in attrs.fields(cls):
            array = arrays[a.name]
            if array.dtype.kind not in "iub" or array.ndim != (2 if a.name in blocks else 1):
                raise ValueError(f"column {a.name} is {array.dtype} of {array.ndim} dims")
            made[a.name] = array.astype(a.metadata["dtype"], copy=False)
        return cls(**made)
