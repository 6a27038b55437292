"""Cuts over tensor-parallel ranks from attributes of the tensors.

Megatron sets `tensor_model_parallel`, `partition_dim` and `partition_stride`. A state_dict keeps them if its tensors
are parameters (`keep_vars=True`); torch's own state_dict detaches its tensors and drops them. If some tensor has them,
a tensor without them is a copy, as in DeepSpeed (`is_model_parallel_parameter` of deepspeed 0.19.8, runtime/utils.py).
Parts are in the order of Megatron's tensor_parallel/layers.py: with a stride of 2, a rank has a part of each half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ucpl.extents import Section, Sharding, TensorRef
from ucpl.formats.deepspeed.order import Shape

__all__ = ["carries_cuts", "cut_by_attributes"]

IS_CUT, DIM, STRIDE = "tensor_model_parallel", "partition_dim", "partition_stride"


def _attributes(tensor: TensorRef) -> Mapping[str, object]:
    found = tensor.attributes
    return found if isinstance(found, dict) else {}


def carries_cuts(tensors: Mapping[str, TensorRef]) -> bool:
    """Test whether any tensor has an attribute that it is cut."""
    return any(_attributes(tensor).get(IS_CUT) is True for tensor in tensors.values())


def cut_by_attributes(
    tensors: Mapping[str, TensorRef], local: Mapping[str, Sequence[Shape]], file: str
) -> dict[str, Sharding]:
    """The cuts of all tensors with attributes; the others are copies.

    tensors: of the first rank. local: shapes on all ranks.
    """
    if not carries_cuts(tensors):
        return {}
    out: dict[str, Sharding] = {}
    for name, shapes in local.items():
        said = _attributes(tensors[name]) if name in tensors else {}
        if said.get(IS_CUT) is True:
            found = _cut(said, shapes, file)
        else:
            why = f"{IS_CUT} = False" if IS_CUT in said else f"no {IS_CUT}, which others have,"
            found = Sharding(shapes[0], origin=f"{why} of {file}") if len(set(shapes)) == 1 else None
        if found is not None:
            out[name] = found
    return out


def _cut(said: Mapping[str, object], shapes: Sequence[Shape], file: str) -> Sharding | None:
    """The cut of one tensor; None if its attributes contradict its shapes."""
    dim, stride = said.get(DIM), said.get(STRIDE, 1)
    if type(dim) is not int or type(stride) is not int or stride < 1:
        return None
    if not all(0 <= dim < len(shape) and shape[dim] % stride == 0 for shape in shapes):
        return None
    if len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) > 1:
        return None
    widths = tuple(shape[dim] // stride for shape in shapes)
    whole = (*shapes[0][:dim], sum(widths) * stride, *shapes[0][dim + 1 :])
    origin = f"{DIM} = {dim}" + (f" and {STRIDE} = {stride}" if stride > 1 else "") + f" of tensors of {file}"
    return Sharding(whole, dim, (Section(sum(widths), widths),) * stride, origin)
