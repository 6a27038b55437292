"""Parallel facts of a checkpoint: stages, experts, shards, buffers, rank values."""

from __future__ import annotations

from itertools import product

from attrs import field

from ucpl.extents.experts import Experts
from ucpl.extents.pipeline import Pipeline
from ucpl.extents.sharding import Sharding
from ucpl.extents.structure import FlatBuffer
from ucpl.records import frozen

__all__ = ["CarriedByRank", "ParallelFacts"]

Shape = tuple[int, ...]


@frozen(eq=False)
class CarriedByRank:
    """Values of the caller (client_state) in each rank's file; ranks can differ.

    `of`: by pp, tp and dp coordinates, the last fastest; one entry for all dp ranks if they share a file.
    """

    of: tuple[dict[object, object], ...] = ()
    pp: int = 1
    tp: int = 1

    @property
    def files(self) -> int:
        """Number of files of one model-parallel rank."""
        return len(self.of) // (self.pp * self.tp)

    def number(self, at: tuple[int, int, int], degrees: tuple[int, int, int]) -> int:
        """The source rank whose values a target rank takes.

        A rank takes its own for each degree that both sides have, else those of the first. at, degrees: over pp, tp and the
        files of one model-parallel rank.
        """
        mine = (self.pp, self.tp, self.files)
        pp, tp, file = (place if here == there else 0 for place, here, there in zip(at, mine, degrees, strict=True))
        return (pp * self.tp + tp) * self.files + file

    def taken(self, pp: int, tp: int, files: int) -> frozenset[int]:
        """Source ranks whose values a target of these degrees takes."""
        return frozenset(self.number(at, (pp, tp, files)) for at in product(range(pp), range(tp), range(files)))


@frozen(eq=False)
class ParallelFacts:
    """Placement of tensors and values on ranks, as the files state it."""

    pipeline: Pipeline | None = None
    experts: Experts | None = None  # if experts have files of their own
    shardings: dict[str, Sharding] = field(factory=dict)  # by tensor, if ranks hold different parts
    local_shapes: dict[str, tuple[Shape, ...]] = field(factory=dict)  # tensor -> its shape on each tp rank, if several
    vocabulary: dict[str, int] = field(factory=dict)  # tensor -> words; rows after them can be padding
    flats: tuple[FlatBuffer, ...] = ()  # flat buffers in the order of the files
    carried_by_rank: CarriedByRank = field(factory=CarriedByRank)
