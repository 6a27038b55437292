"""Elements of a tile that several sources go into, on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ucpl.columns.operations import Node, Reduce
from ucpl.errors import Label, fail
from ucpl.extents import key_text, largest
from ucpl.records import frozen
from ucpl.runtime.boxes import Box
from ucpl.runtime.rows import Place
from ucpl.runtime.values import Array, Conversion, Wide

__all__ = ["Sums", "dtype_of", "members_of", "refuse_infinite", "refuse_rounded"]


@frozen(eq=False)
class Sums:
    """Elements of a target from `begin` on: what was put together, in a type of 8 bytes, and of how many values."""

    begin: int
    total: Array
    count: NDArray[np.uint32]

    @classmethod
    def over(cls, begin: int, end: int, dtype: Wide) -> Sums:
        return cls(begin, np.zeros(end - begin, dtype), np.zeros(end - begin, np.uint32))

    def of(self, box: Box) -> tuple[Array, NDArray[np.uint32]]:
        """Both, as a box of the target."""
        at = box.target - self.begin
        total = np.ndarray(box.shape, self.total.dtype, self.total, 8 * at, tuple(8 * s for s in box.target_step))
        return total, np.ndarray(box.shape, np.uint32, self.count, 4 * at, tuple(4 * s for s in box.target_step))


def dtype_of(how: str, conversions: Iterable[Conversion]) -> Wide:
    """The type in which values are put together: fp64, but for the greatest of whole numbers that it does not hold."""
    wide = {conversion.wide for conversion in conversions}
    return wide.pop() if how == "max" and len(wide) == 1 else np.dtype(np.float64)


def members_of(among: Iterable[tuple[int, Node, int]]) -> list[list[int]]:
    """Rows (each with its node and the rank of its source) by what is put together: of one member, copies of each other."""
    found: dict[tuple[str, int], list[int]] = {}
    for row, node, rank in among:
        assert isinstance(node, Reduce)
        number = node.member(rank)
        found.setdefault(("row", row) if number is None else ("member", number), []).append(row)
    return list(found.values())


def refuse_rounded(name: str, node: Reduce, there: Place, goal: int, value: float | int) -> NoReturn:
    """A mean or sum that is to be exact, and that the target's type does not hold. E605."""
    fail(
        "E605",
        f"{name}: the {node.how} {value!r} at {there.index_text(goal)} has no equal in {there.dtype}",
        Label(there.file, f"is {there.dtype}", where=f"{key_text(there.key)}{there.index_text(goal)}"),
    )


def refuse_infinite(name: str, value: float, source: Label, there: Place, goal: int) -> NoReturn:
    """A number that is beyond the greatest of the target's type. E607."""
    where = f"{key_text(there.key)}{there.index_text(goal)}"
    fail(
        "E607",
        f"{name}: {value!r} at {there.index_text(goal)} is too large for {there.dtype}, which ends at {largest(there.dtype):g}",
        source,
        Label(there.file, f"is {there.dtype}", where=where),
    )
