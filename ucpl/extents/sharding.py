"""The parts of one tensor on model-parallel ranks."""

from __future__ import annotations

from ucpl.records import frozen


@frozen
class Section:
    """A run of positions of the cut dim.

    `widths`: the number of them on each tp rank; None: each holds all.
    """

    size: int
    widths: tuple[int, ...] | None


@frozen
class Sharding:
    """One tensor over tensor-parallel ranks.

    A rank holds its part of each section, end to end along `dim`, and all of every other dim. Sections are in the order
    of the complete tensor: fused [q; k; v] is three, a plain column or row parallel weight is one.
    """

    shape: tuple[int, ...]  # complete
    dim: int | None = None  # None: every tp rank holds all of it
    sections: tuple[Section, ...] = ()
    origin: str = ""  # where it is stated: "affine_map of mp_rank_00_model_states.pt"

    @property
    def rows(self) -> int:
        """Positions of all sections, which may exceed the dim by trained padding."""
        return sum(section.size for section in self.sections)

    def width(self, tp: int) -> int:
        """Positions of `dim` that tp rank `tp` holds."""
        return sum(s.size if s.widths is None else s.widths[tp] for s in self.sections)

    def local(self, tp: int) -> tuple[int, ...]:
        """The shape on one tp rank."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.width(tp), *self.shape[self.dim + 1 :])
