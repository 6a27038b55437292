"""Messages for a spec that does not fit, one a line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from math import prod

from attrs import evolve

from ucpl.errors import Diagnostic
from ucpl.layout import Layout
from ucpl.layout.axes import dims_of
from ucpl.placement import Part
from ucpl.records import frozen

__all__ = ["Mismatch", "pattern_of", "without_repetitions"]

_ALIKE = 0.7  # of a key without its numbers, and one that no entry covers
_COMPARED_MAX = 2000  # keys without their numbers that are compared by spelling

_OF_SOME = (
    "the checkpoint has it of other indices: write in the model which ones, as in `w : l[1, 2] h`, or correct the list"
    " of the config"
)
_OF_OTHERS = "an entry covers others of this name: write these indices in the model, too, as in `w : l[0, 3] h`"


@frozen
class Mismatch:
    """A stored tensor without an entry, or a wrong place of one."""

    key: str
    file: str
    part: Part | None = None  # of an entry
    stated: tuple[int, ...] = ()  # the shape in the layout
    stored: tuple[int, ...] = ()  # the shape in the checkpoint
    of_some: bool = False  # the same entry, or another key with other numbers, fits


def without_repetitions(found: Sequence[Diagnostic], layout: Layout) -> list[Diagnostic]:
    """The findings, one for each line and each run of layers.

    A key that a wrong entry may mean is named by the message of that entry alone.
    """
    groups: dict[object, list[Diagnostic]] = {}
    for i, one in enumerate(found):
        groups.setdefault(_group(one) or i, []).append(one)
    free: dict[str, Mismatch] = {}
    for one in found:
        if isinstance(one.about, Mismatch) and one.about.part is None:
            free.setdefault(pattern_of(one.about.key), one.about)
    told = {name: group for name, group in groups.items() if group[0].code != "E320"}
    meant: set[str] = set()
    out: dict[object, Diagnostic] = {}
    for name, group in told.items():
        about = group[0].about
        remedy = group[0].remedy
        if isinstance(about, Mismatch) and about.part is not None:
            if group[0].code == "E321":
                other = _meant(about, free)
                remedy = _at_other(about, other) if other is not None else _OF_SOME if about.of_some else remedy
                meant |= {pattern_of(other.key)} if other is not None else set()
            else:
                remedy = _of_shapes(about, layout) or remedy
        out[name] = _with_others(group, remedy)
    for name, group in groups.items():
        about = group[0].about
        if name not in told and not (isinstance(about, Mismatch) and pattern_of(about.key) in meant):
            is_some = isinstance(about, Mismatch) and about.of_some
            out[name] = _with_others(group, _OF_OTHERS if is_some else group[0].remedy)
    return [out[name] for name in groups if name in out]


def _group(found: Diagnostic) -> object:
    """Key that findings of one mistake share. None for others."""
    about = found.about
    if not isinstance(about, Mismatch):
        return None
    place = found.labels[1] if about.part is not None and found.labels[1].line else None
    return found.code, place or pattern_of(about.key)


def pattern_of(key: str) -> str:
    """The key with one number in place of each."""
    return re.sub(r"[0-9]+", "0", key)


def _with_others(group: Sequence[Diagnostic], remedy: str) -> Diagnostic:
    first, *others = group
    if not others:
        return evolve(first, remedy=remedy)
    also = others[0].about
    key = also.key if isinstance(also, Mismatch) else ""
    note = f"the same of {len(others):,} more, the next {key}"
    return evolve(first, remedy=remedy, notes=(*first.notes, note))


def _meant(about: Mismatch, free: dict[str, Mismatch]) -> Mismatch | None:
    """The stored tensor that an entry may mean.

    It is in another file, or has nearly this key.
    """
    mine = pattern_of(about.key)
    if mine in free:
        return free[mine]
    size = prod(about.stated)
    known = [key for key, one in free.items() if prod(one.stored) == size][:_COMPARED_MAX]
    close = difflib.get_close_matches(mine, known, 1, _ALIKE)
    return free[close[0]] if close else None


def _at_other(about: Mismatch, other: Mismatch) -> str:
    """Remedy for a place that is not there, where another one is."""
    if other.file != about.file and pattern_of(other.key) == pattern_of(about.key):
        return f"the checkpoint has it in {other.file}: correct the name of the entry's `file`"
    return f"did you mean {other.key}? The checkpoint has it, and no entry covers it"


def _of_shapes(about: Mismatch, layout: Layout) -> str:
    """Remedy for another shape: the first axis that differs."""
    mine, theirs = about.stated, about.stored
    if len(mine) != len(theirs):
        axes = f"{len(theirs)} {'axis' if len(theirs) == 1 else 'axes'}"
        return f"the file has {axes}, and the line {len(mine)}: dims in parentheses are one axis, as in `w = (n d) h`"
    if sorted(mine) == sorted(theirs):
        return "the axes are in another order there: write them as they are stored, as in `w = c r`"
    entry = next((e for e in layout.entries if about.part is not None and e.span == about.part.span), None)
    if entry is None or len(entry.shape) != len(mine):
        return ""
    i = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    dims = list(dict.fromkeys(dims_of(entry.shape[i])))
    sizes = ", ".join(
        f"{one} = {layout.sizes[one]}" for one in dims if one in layout.sizes and ("#" not in one or len(dims) == 1)
    )
    if not sizes:
        return ""
    if len(dims) == 1 and layout.sizes[dims[0]] == mine[i]:
        dim = f"axis {i}" if "#" in dims[0] else f"`{dims[0]}`"  # a size without a name
        return f"{dim} is {mine[i]} here, and {theirs[i]} in the file: correct the size, or name the dim of that size"
    return f"axis {i} is of {sizes}: correct a size or the pattern, so that {theirs[i]} elements lie along it"
