"""How one tensor lies on model-parallel ranks: a fact that a checkpoint states, before any layout says it in the language."""

from __future__ import annotations

from ucpl.records import frozen


@frozen
class Section:
    """A run of positions of the dim that is cut. `widths`: how many of them each tp rank holds; None: each holds all."""

    size: int
    widths: tuple[int, ...] | None


@frozen
class Sharding:
    """One tensor over tensor-parallel ranks.

    A rank holds its part of each section, end to end along `dim`, and all of every other dim. Sections stand in the order
    of the whole tensor: fused [q; k; v] is three, a plain column or row parallel weight is one.
    """

    shape: tuple[int, ...]  # whole
    dim: int | None = None  # None: every tp rank holds all of it
    sections: tuple[Section, ...] = ()
    origin: str = ""  # where it is stated: "affine_map of mp_rank_00_model_states.pt"

    @property
    def rows(self) -> int:
        """Positions of all sections: more than the dim has where the further ones are padding that training changes."""
        return sum(section.size for section in self.sections)

    def width(self, tp: int) -> int:
        """Positions of `dim` that tp rank `tp` holds."""
        return sum(s.size if s.widths is None else s.widths[tp] for s in self.sections)

    def local(self, tp: int) -> tuple[int, ...]:
        """The shape on one tp rank."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.width(tp), *self.shape[self.dim + 1 :])
