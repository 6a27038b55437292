"""Names for the dims of AutoEP's experts, for stacks.

Most checkpoints have none of these.
"""

from __future__ import annotations

from ucpl.extents.experts import Experts
from ucpl.language import nodes

Shape = tuple[int, ...]


def named_dims(name: str, shape: Shape, experts: Experts | None) -> tuple[nodes.Dimension, ...]:
    """The dims of a tensor; those of AutoEP's experts have names."""
    if experts is None or name not in experts.of or not experts.of[name].is_fused:
        return tuple(nodes.Dimension(None, n) for n in shape)
    return tuple(nodes.Dimension(one) for one in _names(shape))


def bindings(shapes: dict[str, Shape], experts: Experts | None) -> tuple[nodes.Dims, ...]:
    """The sizes of these names."""
    found = {
        one: n
        for name, shape in shapes.items()
        if experts is not None and name in experts.of and experts.of[name].is_fused
        for one, n in zip(_names(shape), shape, strict=True)
    }
    return (nodes.Dims(tuple(nodes.Binding(name, nodes.Number(n)) for name, n in found.items())),) if found else ()


def _names(shape: Shape) -> list[str]:
    return [f"expert_{'rows' if i == 0 else f'columns_{i}' if i > 1 else 'columns'}_{n}" for i, n in enumerate(shape)]
