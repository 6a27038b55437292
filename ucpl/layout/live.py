"""Live rows: further rows of a dim, which training changes.

This module checks their places.
"""

from __future__ import annotations

from collections.abc import Iterable

from ucpl.errors import fail
from ucpl.language import nodes, print_axis
from ucpl.language.walk import walk
from ucpl.layout import axes as ax
from ucpl.layout.layout import Entry, LogicalTensor
from ucpl.layout.scope import at

__all__ = ["check_live", "reject_live"]


def check_live(entry: Entry, tensors: dict[str, LogicalTensor]) -> None:
    """Check that live rows are rows of one complete dim.

    It is a dim of the entry's tensor, and the pattern names all of it. Raises E196.
    """
    owned = {dim for path in entry.targets.values() for dim in tensors[path].dims}
    for pad in _live(*entry.shape):
        inner = pad.axis
        if not isinstance(inner, ax.Dim) or (inner.low, inner.high) != (0, None) or inner.name not in owned:
            fail(
                "E196",
                f"`{entry.path}` pads with live rows, but not a complete dim of its tensor",
                at(entry.span),
                remedy="pad the dim itself, and cut and multiply behind it, as in pad(v, 128, live)@tp h;"
                " or say that nothing is there, pad(..., 128)",
            )
    several = _together(entry.shape)
    if len(several) > 1:
        fail(
            "E196",
            f"`{entry.path}` has live rows of several dims: {' and '.join(several)}",
            at(entry.span),
            remedy="say `live` of the dim whose further rows training changes, and pad the other one with zeros",
        )


def reject_live(axes: Iterable[nodes.Axis], span: nodes.Span, what: str) -> None:
    """Refuse live rows in a place without a padded tensor.

    Training changes nothing there. Raises E196.
    """
    for node in walk(*axes):
        if isinstance(node, nodes.Pad) and node.kind == "live":
            fail(
                "E196",
                f"`{print_axis(node)}`: {what} has no rows that training changes",
                at(node.span if node.span.line else span),
                remedy="say `live` in the tensor's own entry, as in w = pad(v, 128, live) h; here take the word out",
            )


def _live(*axes: ax.Axis) -> list[ax.Pad]:
    return [node for node in ax.walk(*axes) if isinstance(node, ax.Pad) and node.kind == "live"]


def _together(axes: Iterable[ax.Axis]) -> list[str]:
    """Adjacent dims with live rows, in axes or in a product.

    Of a sum, those of the term with the most.
    """
    found: list[str] = []
    for axis in axes:
        match axis:
            case ax.Stack(terms=terms):
                each = sorted((_together(term.axes) for term in terms), key=len)
                found += each[-1] if each else []
            case ax.Pad(axis=ax.Dim(name=name), kind="live"):
                found.append(name)
            case _:
                found += _together(ax.children(axis))
    return found
