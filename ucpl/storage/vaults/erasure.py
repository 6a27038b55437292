"""Reed-Solomon codes over the blocks of a group, by pyeclib.

pyeclib uses ISA-L if the processor supports it. Codes relate bytes at equal positions, so any range of a block can be
computed from the same ranges of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ucpl.errors import Label, fail

__all__ = ["Codes", "codes_of"]

Bytes = NDArray[np.uint8]
KIND = "isa_l_rs_cauchy"
UNIT = 64  # coded sizes are multiples of this many bytes


class _Driver(Protocol):
    """The interface of pyeclib that is used here."""

    def encode(self, data: bytes) -> list[bytes]: ...
    def reconstruct(self, fragments: list[bytes], missing: list[int]) -> list[bytes]: ...


class Codes:
    """`data` blocks and `codes` codes; any `data` of them give the rest."""

    def __init__(self, data: int, codes: int) -> None:
        """Raises: UcplError E690, if pyeclib is not installed."""
        try:
            from pyeclib.ec_iface import ECDriver
        except ImportError:
            what = "Reed-Solomon codes need the package pyeclib, which is not installed"
            fail("E690", what, Label("--protect", where=f"rs({data}, {codes})"), remedy="pip install 'ucpl[vault]'")
        self.data, self.codes = data, codes
        self._driver = cast(_Driver, ECDriver(k=data, m=codes, ec_type=KIND))
        self._heads: dict[int, tuple[bytes, ...]] = {}

    def code(self, blocks: Sequence[Bytes], which: int, out: Bytes) -> None:
        """One code of all data blocks, or of one range of each."""
        whole = _rounded(len(out))
        room = np.zeros((self.data, whole), np.uint8)
        for i, block in enumerate(blocks):
            room[i, : len(out)] = block
        made = self._driver.encode(room.tobytes())[self.data + which]
        out[:] = np.frombuffer(made, np.uint8)[len(made) - whole :][: len(out)]

    def rebuild(self, have: Mapping[int, Bytes], wanted: int, out: Bytes) -> None:
        """A lost block, from `data` others.

        `have`: their numbers; data blocks are first, codes follow.
        """
        whole = _rounded(len(out))
        heads = self._heads_of(whole)
        fill = bytes(whole - len(out))
        made = self._driver.reconstruct(
            [heads[i] + block.tobytes() + fill for i, block in sorted(have.items())], [wanted]
        )[0]
        out[:] = np.frombuffer(made, np.uint8)[len(made) - whole :][: len(out)]

    def _heads_of(self, whole: int) -> tuple[bytes, ...]:
        """The header that pyeclib writes before each fragment.

        It states the size and the number. A vault does not store it.
        """
        if whole not in self._heads:
            made = self._driver.encode(bytes(self.data * whole))
            self._heads[whole] = tuple(one[: len(one) - whole] for one in made)
        return self._heads[whole]


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT


@lru_cache
def codes_of(data: int, codes: int) -> Codes:
    """Raises: UcplError E690."""
    return Codes(data, codes)
