"""Experts of GroupedMLP (`weight1`, `weight2`): one matrix per rank.

Here each expert is a tensor as in SequentialMLP. Megatron-Core's kernel uses `weight1` as experts x hidden x width of
linear_fc1, and `weight2` as experts x width x hidden: one expert behind the other, each as the transpose of a linear
layer's weight. So an expert is a view of the matrix with its own strides, and its moments are views of the matrix's
place in `distrib_optim.pt`.

Read in megatron-core 0.16.1, transformer/moe/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import TensorRef
from ucpl.records import frozen

__all__ = ["Grouped", "experts_in", "is_grouped", "views"]

_MATRIX = re.compile(r"(?P<lead>.*\.experts\.)weight(?P<number>[12])", re.ASCII)


@frozen(eq=False)
class Grouped:
    """The matrix of an expert.

    It has the matrix's name on a rank, the number of the expert in it, and the number of experts.
    """

    matrix: str
    number: int
    count: int
    tensor: TensorRef


def is_grouped(name: str) -> bool:
    """Test whether a tensor of a rank has all of its experts."""
    return _MATRIX.fullmatch(name) is not None


def experts_in(
    tensors: Mapping[str, TensorRef], ep: int, numbers: Mapping[str, int], place: str
) -> dict[str, tuple[TensorRef, Grouped]]:
    """(view, matrix) of each expert, under a rank's names.

    The router of the layer has the number of experts. Raises: UcplError E543 if shapes do not fit that number, E548 if
    the number is unknown.
    """
    out: dict[str, tuple[TensorRef, Grouped]] = {}
    for name, tensor in tensors.items():
        match = _MATRIX.fullmatch(name)
        if match is None:
            continue
        router = tensors.get(match["lead"].removesuffix("experts.") + "router.weight")
        total = router.shape[0] if router is not None and router.shape else numbers.get("num_experts")
        if total is None:
            fail(
                "E548",
                f"`{name}` has all experts of a rank in one tensor, and neither a router nor num_experts says how many",
                Label(place, where=name),
                remedy="save it as torch_dist (--ckpt-format torch_dist), which has each expert separately",
            )
        count, first = total // ep, match["number"] == "1"
        dim = 1 if first else 0
        if total % ep or len(tensor.shape) != 2 or not count or tensor.shape[dim] % count:
            fail(
                "E543",
                f"`{name}` is {list(tensor.shape)}, which is not of {total} experts on {ep} ranks",
                Label(place, where=name),
            )
        layer = f"linear_fc{match['number']}"
        for n, view in enumerate(views(tensor, count, is_first=first)):
            own = f"{match['lead']}local_experts.{n}.{layer}.weight"
            if own in tensors:
                fail(
                    "E543",
                    f"`{name}` and `{own}` are both of that expert",
                    Label(place, where=name),
                    Label(place, where=own),
                )
            out[own] = view, Grouped(name, n, count, tensor)
    return out


def views(tensor: TensorRef, count: int, *, is_first: bool) -> list[TensorRef]:
    """Each expert of a matrix in the form of a linear layer.

    Transposed.
    tensor: hidden x (experts x width) of linear_fc1 (is_first), (experts x width) x hidden of linear_fc2; contiguous.
    """
    rows, columns = (
        (tensor.shape[0], tensor.shape[1] // count) if is_first else (tensor.shape[0] // count, tensor.shape[1])
    )
    return [
        evolve(tensor, offset=tensor.offset + n * rows * columns, shape=(columns, rows), stride=(1, columns))
        for n in range(count)
    ]
