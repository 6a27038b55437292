"""A judgement on comparisons: could they have failed?

Equal values prove nothing if a mistake would leave them equal, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ucpl.records import define

__all__ = ["Seen", "doubt", "together"]


@define
class Seen:
    """The values of a comparison: their number and finite range."""

    count: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    odd: int = 0  # values that are NaN or infinite

    @classmethod
    def of(cls, values: NDArray[np.generic]) -> Seen:
        seen = cls()
        seen.add(values)
        return seen

    def add(self, values: NDArray[np.generic]) -> None:
        """Values are looked at until two finite ones differ, then only counted."""
        self.count += values.size
        if self.varies or not values.size:
            return
        flat = np.ascontiguousarray(values).reshape(-1)
        numbers = flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat
        is_number = np.isfinite(numbers) if numbers.dtype.kind == "f" else np.ones(numbers.shape, dtype=bool)
        self.odd += int(numbers.size - is_number.sum())
        numbers = numbers[is_number]
        if numbers.size:
            self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))

    @property
    def varies(self) -> bool:
        """True if two finite values differ."""
        return self.low < self.high


def together(some: Iterable[Seen]) -> Seen:
    """The values of several comparisons; a swap could exchange any two."""
    out = Seen()
    for seen in some:
        out.count, out.odd = out.count + seen.count, out.odd + seen.odd
        out.low, out.high = min(out.low, seen.low), max(out.high, seen.high)
    return out


def doubt(seen: Seen, what: str) -> str:
    """The reason why equal values are no evidence, or "".

    `what`: their name in the plural, as in "logits".
    """
    if seen.varies:
        return ""
    if not seen.count:
        return f"there are no {what}"
    if seen.low > seen.high:
        return f"all {seen.count:,} {what} are NaN or infinite"
    if seen.count == 1:
        return f"there is one of the {what}"
    return f"all {seen.count:,} {what} are {seen.low:g}{' or not finite' if seen.odd else ''}"
