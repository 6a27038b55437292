"""Placement of logical tensors in storage: their boxes, as tables."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from attrs import field

from ucpl.extents import FlatBuffer, Key, key_text
from ucpl.language.nodes import NOWHERE, Span
from ucpl.layout import BlobRule, Layout
from ucpl.layout.by_index import whole_dim, whole_name
from ucpl.layout.layout import Policy
from ucpl.placement.homes import Home, Homes
from ucpl.records import frozen
from ucpl.tables import I64, Table, block, column, each, split_rows

if TYPE_CHECKING:
    from ucpl.tables.operations import Digits

__all__ = [
    "LOOSE", "Blob", "BlobPlace", "Home", "Homes", "Part", "Pieces", "Placement", "digits_of", "element_name",
]  # fmt: skip

LOOSE = (Policy.ANY, Policy.LEAD)


@frozen(eq=False)
class Pieces(Table):
    """Boxes and their places.

    Row i: elements low..high of tensor `tensor[i]`; the first one at `offset` of home `home[i]`. Along each dim the
    position steps by `stride`, row-major in a home, and the home by `home_stride`: layers that are stored alike, each
    in a tensor of its own, are one box. Dims beyond a tensor's own have low 0, high 1 and no steps.
    """

    tensor: I64 = column()  # (N,) index into Placement.tensors
    home: I64 = column()  # (N,) index into Part.homes
    low: I64 = block(fill=0)  # (N, K)
    high: I64 = block(fill=1)  # (N, K)
    stride: I64 = block(fill=0)  # (N, K)
    home_stride: I64 = block(fill=0)  # (N, K)
    offset: I64 = column()  # (N,)
    policy: I64 = column()  # (N,) a Policy
    over: I64 = column()  # (N,) of a mean or sum: the mesh axes that it is over, a bit each, as `digits_of` orders them

    @property
    def volume(self) -> I64:
        out: I64 = (self.high - self.low).prod(axis=1)
        return out

    def singly(self) -> Pieces:
        """The same, every row in one home."""
        over = self.home_stride != 0
        if not over.any():
            return self
        row, index = split_rows(self.high - self.low, over)
        p, cut = self.take(row), over[row]
        low = p.low + index
        return p.replace(
            low=low,
            high=np.where(cut, low + 1, p.high),
            home=p.home + (index * p.home_stride).sum(axis=1),
            offset=p.offset + (index * p.stride).sum(axis=1),
            home_stride=np.zeros_like(p.home_stride),
        )


@frozen(eq=False, slots=False)
class Part:
    """Everything that one entry or state line stores of one state."""

    state: str
    label: str  # the entry's tensor, or the group of a flat
    form: str  # torch, safetensors, ...
    dtype: str | None  # from the layout; None: as the tensor's or the state's own
    lossy: bool
    value: tuple[float, float]  # stored = a * x + b
    homes: Homes
    folded: Pieces  # as few rows as there are different ones: states and layers that are stored alike share them
    is_alias: bool = False
    span: Span = field(default=NOWHERE, repr=False)
    scaled: bool = False  # stored = x * the scale of its block
    exact: bool = False  # a cast that could lose is looked at value by value
    # Of tensors that it holds with another value than `value`.
    values: dict[str, tuple[float, float]] = field(factory=dict)
    live: Pieces | None = None  # boxes of rows that training changes, behind the end of a dim: alone of no tensor
    copied: bool = False  # elements have several places in one stored tensor
    # Mesh axes (or `rank`) that distinguish its stored tensors: ranks that differ only along others hold the same.
    axes: tuple[str, ...] = ()
    # Of each block's choices, where families are stored: the place of its first stored tensor among those of the layout, as
    # they would be without families.
    begins: I64 | None = None
    bucket: I64 | None = (
        None  # (ranks,) flats that each rank has before this part's, where ranks have unlike numbers of them
    )

    def __str__(self) -> str:
        a, b = self.value
        value = "" if (a, b) == (1, 0) else f", {a:g} * x + {b:g}"
        return (
            f"{self.state} of {self.label} ({self.form}{f', {self.dtype}' if self.dtype else ''}{value}): "
            f"{len(self.folded):,} boxes in {len(self.homes):,} stored tensors"
        )

    def value_of(self, path: str) -> tuple[float, float]:
        """Coefficients of a stored value, `a * x + b`."""
        return self.values.get(path, self.value)

    @cached_property
    def pieces(self) -> Pieces:
        """One row a box of one stored tensor.

        It is for uses of single tensors. Planning does without it.
        """
        return self.folded.singly()

    @cached_property
    def every_piece(self) -> Pieces:
        """`pieces`, and those of live rows."""
        return self.pieces if self.live is None else Pieces.concat([self.pieces, self.live.singly()], self.pieces.width)

    def pieces_of(self, home: int) -> Pieces:
        """Pieces of one stored tensor, with those of live rows."""
        order, begin = self._by_home
        return self.every_piece.take(order[begin[home] : begin[home + 1]])

    @cached_property
    def _by_home(self) -> tuple[I64, I64]:
        """Rows of `every_piece` by stored tensor, and each tensor's first."""
        home = self.every_piece.home
        order = np.argsort(home, kind="stable")
        return order, np.searchsorted(home[order], np.arange(len(self.homes) + 1))

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Numbers of the tensors with elements here."""
        return tuple(each(self.folded.tensor))


@frozen
class BlobPlace:
    """A value: its coordinates and its place."""

    at: tuple[int, ...]
    file: str
    key: Key

    def __str__(self) -> str:
        return f"{key_text(self.key)} of {self.file}"


@frozen
class Blob:
    """A blob of a located layout.

    Places of one coordinate hold one value; without places, none is stored.
    """

    rule: BlobRule
    degrees: tuple[int, ...]  # of its axes
    places: tuple[BlobPlace, ...]

    @property
    def name(self) -> str:
        return self.rule.name

    def __str__(self) -> str:
        return f"blob {self.name}: in {len(self.places):,} places"

    @property
    def axes_text(self) -> str:
        """`dp = 4 and tp = 2`."""
        return " and ".join(f"{a} = {n}" for a, n in zip(self.rule.mesh_axes, self.degrees, strict=True))


@frozen(eq=False)
class Placement:
    """A located layout."""

    layout: Layout
    tensors: tuple[str, ...]
    parts: tuple[Part, ...]
    flats: tuple[FlatBuffer, ...] = ()
    blobs: tuple[Blob, ...] = ()
    bare: Placement | None = None  # this placement as it was located, where live rows are tensors in it
    own: Placement | None = (
        None  # this placement over the names that its files have, where it is one over logical tensors
    )

    def __str__(self) -> str:
        head = f"{self.layout.call}: {len(self.tensors):,} tensors in {sum(len(p.homes) for p in self.parts):,} stored ones"
        return "\n".join([head, *(f"  {part}" for part in self.parts), *(f"  {blob}" for blob in self.blobs)])

    @property
    def located(self) -> Placement:
        return self if self.bare is None else self.bare

    def digits(self, over: int) -> Digits:
        """Function from a rank to coordinates along axes.

        The axes are bits of `Pieces.over`.
        """
        return tuple(d for n, d in enumerate(digits_of(self.layout).values()) if over >> n & 1)


def digits_of(layout: Layout) -> dict[str, tuple[int, int]]:
    """Of each mesh axis: a rank's coordinate along it is `rank // divisor % degree`."""
    out: dict[str, tuple[int, int]] = {}
    for mesh in layout.meshes:
        divisor = 1
        for axis, degree in zip(reversed(mesh.axes), reversed(mesh.degrees), strict=True):
            out.setdefault(axis, (divisor, degree))
            divisor *= degree
    return out


def element_name(layout: Layout, path: str, index: tuple[int, ...]) -> str:
    """Name of an element for people: `attn.q[l=3, h=7]`, in indices of complete dims.

    Live rows continue behind a dim's end.
    """
    if path in layout.families:
        path, index = layout.families[path].names[index[0]], index[1:]
    tensor = layout.tensors[path]
    named = []
    for dim, indices, position in zip(tensor.dims, tensor.indices, index, strict=False):
        at = int(position)
        whole = indices[at] if at < len(indices) else layout.sizes.get(dim, len(indices)) + at - len(indices)
        named.append(str(whole) if "#" in dim else f"{whole_dim(dim)}={whole}")
    return f"{whole_name(path)}[{', '.join(named)}]"
