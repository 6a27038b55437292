"""Addresses: one number for (stored tensor, position in it).

So a box may run over tensors that are stored alike. Layers that are cut alike are in tensors that follow each other:
along `l` a box then steps from tensor to tensor, as it steps from row to row along another dim. The algebra of boxes
treats both steps alike.
"""

from __future__ import annotations

import numpy as np

from ucpl.records import frozen
from ucpl.tables.table import I64

__all__ = ["Space"]

BITS_MAX = 62  # addresses are int64, and differences of two must be, too


@frozen
class Space:
    """Addresses `home << bits | position`.

    `bits` hold every position of every stored tensor, with room to spare.
    """

    bits: int

    @classmethod
    def over(cls, homes: int, numel_max: int) -> Space:
        """Room for `homes` tensors of up to `numel_max` elements.

        Raises: ValueError if no int64 has it.
        """
        # Twice the room: no dim within a tensor can be continued by the step to the next one, so none is merged with it.
        bits = (2 * max(1, int(numel_max))).bit_length()
        if bits + max(1, int(homes).bit_length()) > BITS_MAX:
            raise ValueError(f"{homes} stored tensors of up to {numel_max} elements")
        return cls(bits)

    @property
    def step(self) -> int:
        """From a tensor to the next one."""
        return 1 << self.bits

    def home(self, address: I64) -> I64:
        return address >> self.bits

    def position(self, address: I64) -> I64:
        return address & np.int64(self.step - 1)

    def address(self, home: I64, position: I64) -> I64:
        return (home.astype(np.int64) << self.bits) + position
