"""Homes of tensors in legacy folders, and orders and stacks of Megatron-Core."""

from __future__ import annotations

from attrs import field

from ucpl.files.checkpoint import Checkpoint, Own
from ucpl.records import frozen

__all__ = ["Core", "LegacyHome", "Legacy", "BufferRun", "StageGroups", "core_of", "legacy_of"]


@frozen
class LegacyHome:
    """One place of a tensor.

    A key in the files of one stage.
    It has an expert-parallel rank if only that rank has the tensor.
    """

    stage: int
    key: tuple[str, ...]  # ("model", "decoder.layers.0.mlp.linear_fc1.weight"): numbers of layers and experts are local
    ep: int | None = None


@frozen
class BufferRun:
    """A bucket: parameters end to end in a tensor of `distrib_optim.pt`.

    Each begins at a multiple of 64 elements from the first.
    """

    stage: int
    keys: tuple[str, ...]  # "0/(torch.bfloat16, torch.float32)": prefix of its states' names, on each ep rank
    members: tuple[str, ...]  # in its order; of all expert-parallel ranks
    is_expert: bool = False
    bucket: int | None = None  # its number, where there are several
    apart: bool = False  # each has a view under its own name: some are transposed, as GroupedMLP's experts


@frozen
class StageGroups:
    """The numbers of a stage's optimizer that is not distributed.

    Parameters by group.
    """

    groups: tuple[tuple[str, ...], ...]
    is_expert: tuple[bool, ...]


@frozen(eq=False)
class Legacy(Own):
    """A model in legacy folders.

    `optimizer`: "distributed" (a flat file of its own), "float16" (masters with states), "fp32", or "" for none.
    """

    tp: int
    pp: int
    ep: int
    vpp: int
    optimizer: str
    homes: dict[str, tuple[LegacyHome, ...]] = field(factory=dict)  # by tensor
    runs: tuple[BufferRun, ...] = ()
    stages: tuple[StageGroups, ...] = ()
    chained: bool = False  # dense parameters and experts have optimizers of their own

    def renamed(self) -> None:
        """None: the homes are by the names in the files."""


@frozen
class Core(Own):
    """Facts about a folder of Megatron-Core."""

    registered: tuple[str, ...] = ()  # parameters in the order of the optimizer's buckets
    is_unstacked: bool = False  # stacks of layers were divided, for a target that has none


def legacy_of(checkpoint: Checkpoint | None) -> Legacy | None:
    """The homes of tensors in legacy files, or None."""
    own = checkpoint.own if checkpoint is not None else None
    return own if isinstance(own, Legacy) else None


def core_of(checkpoint: Checkpoint) -> Core:
    """The facts of a folder of Megatron-Core, or empty ones."""
    return checkpoint.own if isinstance(checkpoint.own, Core) else Core()
