"""A target's metadata for a store: names, shapes, groups, flat buffers.

It is made by the compiler from a layout, travels in the plan, and holds plain values only. The store that writes a
framework's files regenerates every structural field (param_shapes, paddings, world sizes) from it, and takes all other
values from the source's TrainState.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from attrs import evolve, field

from ucpl.extents.dtypes import in_file
from ucpl.extents.records import Key
from ucpl.records import frozen

Plain = int | str | bool | float | None
PadKind = Literal["zero", "live", "undefined"]


@frozen
class StoredTensor:
    """One tensor of one file in a plan, without byte offsets.

    Stores bind offsets when the plan is applied.
    """

    file: str  # relative to the step's folder
    key: Key
    dtype: str
    shape: tuple[int, ...]
    state: str  # "weight", "fp32", "exp_avg", ...
    label: str  # the tensor, or the flat buffer's group: for messages
    rank: int = 0  # the first rank that holds it
    shares: int | None = None  # index of the tensor whose storage it is a second name of (tied aliases)
    padding: int = 0  # elements of it that belong to no tensor
    padding_kind: PadKind = "undefined"  # their values: zeros, trained values, or anything

    @property
    def numel(self) -> int:
        return prod(self.shape)


@frozen
class NamedTensor:
    """One tensor of the model.

    Complete shape, dtype, kind, and states besides `weight`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str  # "parameter" (trained), "frozen", "buffer"
    states: tuple[str, ...] = ()


@frozen
class FlatBuffer:
    """One flat buffer before it is cut: its tensors in order.

    `coordinates` are those of the ranks that share it. `members`: (stored name, shape on these ranks). `numel` counts
    elements without padding at the end, `starts` where each member begins (alignment gaps make them differ from the
    running sum).
    """

    bucket: int
    group: str  # the parameter group's name
    coordinates: dict[str, int]
    members: tuple[tuple[str, tuple[int, ...]], ...]
    starts: tuple[int, ...]
    numel: int
    cut: str | None = None  # the mesh axis that cuts it (its degree is the partition count)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.members)


@frozen
class BlobWay:
    """From one place of a value to another."""

    source_file: str
    source_key: Key
    file: str
    key: Key


@frozen
class CarriedBlob:
    """A value that is no model tensor, with its layout's fate.

    `ways` go to the target's places. alike: places of the source that must hold one value.
    """

    name: str
    fate: str  # keep, first, remap
    said: str  # which value goes where, in words
    ways: tuple[BlobWay, ...]
    alike: tuple[BlobWay, ...] = ()


@frozen
class Structure:
    """A complete target (or source) in a framework's terms."""

    framework: str
    settings: dict[str, Plain] = field(factory=dict)  # stage, dp, tp, pp, bf16, round_robin, sub_group_size, ...
    tensors: tuple[NamedTensor, ...] = ()  # in the model's order
    aliases: dict[str, str] = field(factory=dict)
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()  # the optimizer's groups: (name, members in its order)
    flats: tuple[FlatBuffer, ...] = ()
    derived: dict[str, str] = field(factory=dict)  # state -> the state that it is derived from: not stored here
    shardings: dict[str, Sharding] = field(
        factory=dict
    )  # by tensor, where it is cut over tp in sections; empty at tp 1
    blobs: tuple[CarriedBlob, ...] = ()  # of a target: values that a layout of torch files carries besides its tensors


def as_filed(targets: Sequence[StoredTensor]) -> tuple[StoredTensor, ...]:
    """Targets with the dtypes and shapes that files state."""
    stated = [in_file(t.dtype, t.shape) for t in targets]
    return tuple(
        t if (t.dtype, t.shape) == (dtype, shape) else evolve(t, dtype=dtype, shape=shape)
        for t, (dtype, shape) in zip(targets, stated, strict=True)
    )


# ---- parts of one tensor ---------------------------------------------------------------------------------------------


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
