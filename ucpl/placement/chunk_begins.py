"""Begin of a rank's box along an axis of the uncut tensor.

Files of framework dcp() find a stored tensor by it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucpl.layout import FileRule, Layout
from ucpl.layout import axes as ax
from ucpl.placement.cells import build
from ucpl.registry import format_named

__all__ = ["BrokenRun", "begin_of", "is_by_begin"]


def is_by_begin(rule: FileRule, layout: Layout) -> bool:
    """True if a file's stored tensors are found by key and begin.

    The begin is its place in the uncut tensor. Without a framework, a form is any word, and files are distinguished by
    their names.
    """
    return format_named(layout.framework).stores_chunks(rule.form)


class BrokenRun(Exception):
    """Error: a rank has no single run of the axis."""


def begin_of(axis: ax.Axis, sizes: dict[str, int], degrees: Mapping[str, int], here: dict[str, int]) -> int:
    """Positions of the axis before those that a rank has. Raises: BrokenRun."""
    return _run(axis, sizes, dict(degrees), here)[0]


def _run(axis: ax.Axis, sizes: dict[str, int], degrees: dict[str, int], here: dict[str, int]) -> tuple[int, int]:
    """(begin, length) of a rank's run."""
    match axis:
        case ax.Cut(axis=inner, splits=splits):
            begin, length = _run(inner, sizes, degrees, here)
            for split in splits:
                low, high = ax.piece_of(split, length, degrees[split.mesh_axis], here[split.mesh_axis])
                begin, length = begin + low, high - low
            return begin, length
        case ax.Stack(terms=(ax.Term(axes=factors),)) if ax.mesh_axes_of(axis):
            begin, length = 0, 1
            for factor in factors:  # row-major: the cut factor has single rows above it, and uncut ones below
                whole = build(ax.uncut(factor), sizes, degrees, here).length
                low, count = _run(factor, sizes, degrees, here)
                if length > 1 and count != whole:
                    raise BrokenRun
                begin, length = begin * whole + low, length * count
            return begin, length
        case _:
            if ax.mesh_axes_of(axis):
                raise BrokenRun
            return 0, build(axis, sizes, degrees, here).length
