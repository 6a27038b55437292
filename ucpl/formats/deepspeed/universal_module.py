"""The model in a universal folder's model states, or its stages' parts.

DeepSpeed's converter copies the files of model-parallel ranks as they are, and no files of layers. A pipeline has the
shapes of its parameters on each rank, but neither weights nor buffers.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucpl.extents import Sharding
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.across_tp import Shapes, cuts_over_tp
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.module import RankModule, groups_of, module_of
from ucpl.formats.deepspeed.order import Shape


def whole_module(metas: tuple[TorchFile, ...], stage: int) -> RankModule:
    """The module of all stages.

    metas: the files of model states, by model-parallel rank.
    """
    first = metas[0]
    meta = Value.of(first)
    if meta.find("module") is not None:
        return module_of(first, groups_of(first), 3 if stage == 3 else _stage_of(meta), meta.find("shared_params"))
    groups: list[dict[str, Shape]] = []
    for part in _one_of_each_stage(metas):
        for g, mine in enumerate(groups_of(part)):
            if g == len(groups):
                groups.append({})
            groups[g] |= {name: shape for name, shape in mine.items() if name not in groups[g]}
    return RankModule(first, tuple(groups), shapes={name: shape for mine in groups for name, shape in mine.items()})


def _stage_of(meta: Value) -> int:
    """1 or 2.

    Only stage 2 has a field of excluded frozen parameters.
    """
    config = meta.find("ds_config")
    zero = config.find("zero_optimization") if config is not None else None
    stated = zero.find("stage") if zero is not None else None
    return 2 if stated is not None and stated.held == 2 else 1


def _one_of_each_stage(metas: tuple[TorchFile, ...]) -> tuple[TorchFile, ...]:
    """The first tensor-parallel rank of each stage.

    The last coordinate of a rank's number is that of tp.
    """
    dims = Value.of(metas[0]).find("checkpoint_parallel_dimensions")
    tp = dims.find("tp_degree") if dims is not None else None
    return metas[:: tp.whole(1) if tp is not None else 1]


def lost_buffers(metas: tuple[TorchFile, ...]) -> list[str]:
    """Buffers of a pipeline's layers, whose files are not there."""
    out: dict[str, None] = {}
    for part in metas:
        value = Value.of(part)
        stated = value.find("buffer_names")
        if stated is not None and value.find("module") is None:
            out |= dict.fromkeys(stated.texts())
    return [*out]


def cuts(gathered: Gathered, module: RankModule, shapes: Mapping[str, Shape]) -> dict[str, Sharding]:
    """The cuts of its tensors, from lists of patterns.

    shapes: of complete tensors.
    """
    named: Shapes = {name: (shape,) for name, shape in shapes.items() if shape}
    return cuts_over_tp(gathered, module.file, module, named)
