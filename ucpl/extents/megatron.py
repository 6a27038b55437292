"""How Megatron's legacy folders hold a model: facts that their files state, before any layout says them in the language."""

from __future__ import annotations

from attrs import field

from ucpl.records import frozen

__all__ = ["Home", "Legacy", "Run", "Stage"]


@frozen
class Home:
    """One place of a tensor: a key of the files of one stage, and of one expert-parallel rank where only that has it."""

    stage: int
    key: tuple[str, ...]  # ("model", "decoder.layers.0.mlp.linear_fc1.weight"): numbers of layers and experts are local
    ep: int | None = None


@frozen
class Run:
    """Parameters that lie end to end in a tensor of `distrib_optim.pt`, each at a multiple of 64 from the first: a bucket."""

    stage: int
    keys: tuple[
        str, ...
    ]  # "0/(torch.bfloat16, torch.float32)": what the names of its states stand below, on each ep rank
    members: tuple[str, ...]  # in its order; of all expert-parallel ranks
    is_expert: bool = False
    bucket: int | None = None  # its number, where there are several
    apart: bool = False  # each has a view of its own, under its name: some are not as they lie, as GroupedMLP's experts


@frozen
class Stage:
    """What one stage's optimizer numbers, where it is not distributed: by group, the parameters in its order."""

    groups: tuple[tuple[str, ...], ...]
    is_expert: tuple[bool, ...]


@frozen(eq=False)
class Legacy:
    """`optimizer`: "distributed" (a file of its own, flat), "float16" (masters beside states), "fp32", or "" for none."""

    tp: int
    pp: int
    ep: int
    vpp: int
    optimizer: str
    homes: dict[str, tuple[Home, ...]] = field(factory=dict)  # by tensor
    runs: tuple[Run, ...] = ()
    stages: tuple[Stage, ...] = ()
    chained: bool = False  # dense parameters and experts have optimizers of their own
