"""Complete lines to write for an unknown mesh axis.

They are the layout's head, its mesh, or the line with another axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import evolve

from ucpl.errors import Diagnostic
from ucpl.language import nodes, print_item
from ucpl.language.printer import opening
from ucpl.language.walk import rewritten
from ucpl.layout.name_remedies import may_be_new, nearest
from ucpl.records import frozen

__all__ = ["UnknownAxis", "with_lines"]


@frozen
class UnknownAxis:
    """Axis of a diagnostic: of no mesh, or one without sizes."""

    name: str
    is_of_mesh: bool = False


def with_lines(
    found: Diagnostic, axis: UnknownAxis, node: nodes.Layout, items: Sequence[nodes.LayoutItem]
) -> Diagnostic:
    """The diagnostic, its remedy with the lines.

    `items`: statements of the layout and of its bases.
    """
    meshes = [i for i in items if isinstance(i, nodes.Mesh)]
    axes = tuple(dict.fromkeys(name for mesh in meshes for name in mesh.axes))
    if axis.is_of_mesh:
        lines = [_head(node, axis.name)] if nearest(axis.name, {p.name for p in node.parameters}) is None else []
    elif (close := nearest(axis.name, axes)) is not None:
        lines = [line for item in items if (line := _with_axis(item, axis.name, close))][:1]
    elif may_be_new(axis.name, axes):
        first = next((m for m in meshes if not m.name), nodes.Mesh("", ()))
        lines = [_head(node, axis.name), "  " + print_item(evolve(first, axes=(*first.axes, axis.name)))]
        lines = lines[axis.name in {p.name for p in node.parameters} :]
    else:
        lines = []
    return (
        evolve(found, remedy="\n       ".join([f"{found.remedy}\nwrite: {lines[0]}", *lines[1:]])) if lines else found
    )


def _head(node: nodes.Layout, name: str) -> str:
    """First line of a layout that has the axis as a parameter."""
    known = {p.name for p in node.parameters}
    parameters = node.parameters if name in known else (*node.parameters, nodes.Parameter(name))
    return f"{opening(evolve(node, parameters=parameters))} {{"


def _with_axis(item: nodes.LayoutItem, name: str, other: str) -> str:
    """The statement with one axis replaced by another.

    Empty if it does not name the axis.
    """
    made = rewritten(item, _to(name, other))
    return print_item(made) if made is not item and isinstance(made, nodes.Entry | nodes.States | nodes.Index) else ""


def _to(name: str, other: str) -> Callable[[nodes.Record], nodes.Record | None]:
    def change(node: nodes.Record) -> nodes.Record | None:
        match node:
            case nodes.Split(mesh_axis=axis) if axis == name:
                return evolve(node, mesh_axis=other)
            case nodes.Clause(word="at", args=(axis, place)) if axis == name:
                return evolve(node, args=(other, place))
            case nodes.Clause(word="copies", args=(how, axes)) if name in axes:
                return evolve(node, args=(how, tuple(other if a == name else a for a in axes)))
        return None

    return change
