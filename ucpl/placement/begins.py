"""Where the box of a rank begins along a stored axis of the whole: files of framework dcp() find a stored tensor by that."""

from __future__ import annotations

from collections.abc import Mapping

from ucpl.layout import FileRule, Layout
from ucpl.layout import axes as ax
from ucpl.placement.cells import build
from ucpl.registry import format_named

__all__ = ["BrokenRun", "begin_of", "is_by_begin"]


def is_by_begin(rule: FileRule, layout: Layout) -> bool:
    """Whether a stored tensor of a file is found by its key and by where it begins in the whole. Without a framework, a form
    is any word, and files are told apart by their names."""
    return rule.form == "dcp" and format_named(layout.framework).has_chunks


class BrokenRun(Exception):
    """What a rank has of the axis is no one run of it."""


def begin_of(axis: ax.Axis, sizes: dict[str, int], degrees: Mapping[str, int], here: dict[str, int]) -> int:
    """Positions of the axis before those that a rank has. Raises: BrokenRun."""
    return _run(axis, sizes, dict(degrees), here)[0]


def _run(axis: ax.Axis, sizes: dict[str, int], degrees: dict[str, int], here: dict[str, int]) -> tuple[int, int]:
    """(begin, length) of what a rank has."""
    match axis:
        case ax.Cut(axis=inner, splits=splits):
            begin, length = _run(inner, sizes, degrees, here)
            for split in splits:
                low, high = ax.piece_of(split, length, degrees[split.mesh_axis], here[split.mesh_axis])
                begin, length = begin + low, high - low
            return begin, length
        case ax.Stack(terms=(ax.Term(axes=factors),)) if ax.mesh_axes_of(axis):
            begin, length = 0, 1
            for factor in factors:  # row-major: what is cut has single rows above it, and whole ones below
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
