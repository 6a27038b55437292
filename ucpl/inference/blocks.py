"""Weights with a scale per block, as in transformers: `..weight` and `..weight_scale_inv`."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from ucpl.files.checkpoint import Checkpoint
from ucpl.files.model_texts import config_of
from ucpl.language import nodes
from ucpl.texts import Json

__all__ = ["SCALE", "blocks_along", "scalings_of", "sides_of"]

SCALE = "_scale_inv"
_SIDE_MAX = 1 << 31


def sides_of(config: Mapping[str, Json]) -> tuple[int, ...]:
    """The sides of a block, one per axis, or ()."""
    said = config.get("quantization_config")
    found = said.get("weight_block_size") if isinstance(said, dict) else None
    sides = tuple(b for b in found if isinstance(b, int) and 0 < b < _SIDE_MAX) if isinstance(found, list) else ()
    return sides if isinstance(found, list) and len(sides) == len(found) else ()


def blocks_along(
    sides: tuple[int, ...], dtype: str, shape: tuple[int, ...], scale: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The elements per scale along each axis of a weight.

    None: a scale of that shape is not of it.
    """
    if len(sides) != 2 or len(shape) < 2 or not dtype.startswith("f8_"):
        return None
    by = (*(1 for _ in shape[2:]), *sides)
    return by if scale == tuple(ceil(n / b) for n, b in zip(shape, by, strict=True)) else None


def scalings_of(checkpoint: Checkpoint) -> dict[str, nodes.Scaling]:
    """The scales of a checkpoint, each with its weight.

    The config must have the sizes of blocks, and shapes must agree.
    """
    config = config_of(checkpoint)
    sides = sides_of(config) if config is not None else ()
    if not sides:
        return {}
    tensors = {t.name: t for t in checkpoint.state.tensors}
    out = {}
    for name, scale in tensors.items():
        weight = tensors.get(name.removesuffix(SCALE)) if name.endswith(SCALE) else None
        if weight is None or scale.states or scale.kind == "buffer":
            continue
        by = blocks_along(sides, weight.dtype, weight.shape, scale.shape)
        if by is not None:
            out[name] = nodes.Scaling(weight.name, tuple(map(nodes.Number, by)))
    return out
