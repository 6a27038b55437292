"""Parallel facts of a checkpoint: stages, experts, shards, buffers, rank values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from attrs import field

from ucpl.extents.pipeline import Pipeline
from ucpl.extents.structure import FlatBuffer, Sharding
from ucpl.records import frozen

__all__ = ["CarriedByRank", "ParallelFacts", "pack", "slice_numel"]

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


@frozen
class Expert:
    """One tensor of one expert.

    `count` experts are in its layer; each rank holds a run of them.
    """

    name: str  # in its file: the number is global there
    module: str  # prefix of the layer's experts: "blocks.1.mlp.deepspeed_moe.experts.deepspeed_experts."
    number: int  # of all experts of the layer
    count: int
    inner: str  # the name inside the expert: "h4.weight"
    layer: int = 0  # its layer's number among those with experts of its stage, which its file is called by
    tps: tuple[int, ...] = ()  # tensor-parallel ranks whose files hold it; none: whose ranks hold the expert
    is_fused: bool = False  # the module of a rank has all its experts in one tensor (AutoEP)

    @property
    def every(self) -> str:
        """A glob of the same tensor of all experts of its layer."""
        return f"{self.fused}.*" if self.is_fused else f"{self.module}*.{self.inner}"

    @property
    def fused(self) -> str:
        """The module's tensor of this and the rank's other experts: "blocks.1.mlp.experts.w1"."""
        return f"{self.module}{self.inner}"


@frozen
class Experts:
    """All tensors of experts.

    The ranks of a stage are edp x ep (the last fastest), or ep x edp if `is_data_first`. `is_within_tp`: the ranks of
    each tensor-parallel coordinate are dealt separately, and hold parts of the experts' tensors, or there is one
    coordinate. Otherwise all dp x tp ranks of a stage are dealt together, and hold their experts completely.
    """

    ep: int
    is_data_first: bool
    of: dict[str, Expert] = field(factory=dict)  # by tensor
    is_within_tp: bool = True

    def rank(self, tensor: str, ep: int) -> int:
        """The rank among `ep` that holds a tensor."""
        one = self.of[tensor]
        return one.number // (one.count // ep)

    @property
    def is_fused(self) -> bool:
        return any(one.is_fused for one in self.of.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """The layers with experts, by the prefixes of their names, in order."""
        return tuple(dict.fromkeys(one.module for one in self.of.values()))


def expert_file(layer: int, number: int, mp: int | str) -> str:
    """The name of an expert's file.

    mp: the model-parallel rank, or its placeholder in a template.
    """
    text = f"{mp:02}" if isinstance(mp, int) else mp
    return f"layer_{layer}_expert_{number}_mp_rank_{text}_model_states.pt"


# ---- sub-groups of ZeRO-3 --------------------------------------------------------------------------------------------


def slice_numel(shape: Shape, dp: int) -> int:
    """Elements of a parameter that each rank holds at stage 3."""
    return -(-prod(shape) // dp)


def pack(shapes: Sequence[Shape], dp: int, sub_group_size: int) -> list[int]:
    """The number of parameters in each sub-group of one parameter group.

    A sub-group is closed when its slices reach the size.
    """
    counts, held, total = [], 0, 0
    for shape in shapes:
        held += 1
        total += slice_numel(shape, dp)
        if total >= sub_group_size:
            counts.append(held)
            held = total = 0
    if held:
        counts.append(held)
    return counts
