"""Files of more ranks than the layout has: read with too small a degree, a checkpoint would be a part of itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path

from ucpl.errors import Diagnostic, Label
from ucpl.layout import FileRule, Layout
from ucpl.layout.scope import at
from ucpl.layout.templates import Hole, render
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.watching import walked

__all__ = ["left_over"]

SPEC_ALONE = "torch"  # the framework of files that only a spec describes; the others count their ranks themselves
RANKS_MAX = 1 << 16  # names that are made; of more, nothing is said


def left_over(layout: Layout, checkpoint: Checkpoint) -> list[Diagnostic]:
    """E398: a file in the folder that is named as those of a line are, and of a coordinate that no rank has."""
    if checkpoint.framework != SPEC_ALONE or not checkpoint.root.is_dir():
        return []
    out = []
    for rule in layout.files.values():
        expected = _expected(rule, layout)
        if expected is None:
            continue
        others = sorted(name for name in _named_so(rule, checkpoint.root) if name not in expected)
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            out.append(
                Diagnostic(
                    "E398",
                    f"{others[0]}{more} would be of a rank that {layout.call} does not have",
                    (
                        Label(str(checkpoint.root / others[0]), "is in the folder"),
                        at(rule.span, f"{len(expected)} files are named so"),
                    ),
                    remedy="give the degrees that the checkpoint was written with;"
                    " a file that is no part of it belongs into another folder",
                )
            )
    return out


def _expected(rule: FileRule, layout: Layout) -> frozenset[str] | None:
    """The names for all coordinates. None where other things than coordinates are in them, or nothing is."""
    if rule.form is None or rule.path is None or not any(isinstance(p, Hole) for p in rule.path.parts):
        return None
    degrees = {axis: n for mesh in layout.meshes for axis, n in zip(mesh.axes, mesh.degrees, strict=True)}
    axes = sorted(rule.path.names)
    if not axes or not degrees.keys() >= set(axes) or prod(degrees[a] for a in axes) > RANKS_MAX:
        return None
    places = product(*(range(degrees[a]) for a in axes))
    return frozenset(render(rule.path, dict(zip(axes, place, strict=True))) for place in places)


def _named_so(rule: FileRule, root: Path) -> Iterator[str]:
    """Files of the folder that have numbers where the template has holes."""
    assert rule.path is not None
    text = "".join(re.escape(p) if isinstance(p, str) else "[0-9]+" for p in rule.path.parts)
    pattern, deep = re.compile(text), text.count("/")
    for folder, folders, names in walked(root):
        here = os.path.relpath(folder, root).replace(os.sep, "/")
        head = "" if here == "." else f"{here}/"
        if head.count("/") >= deep:
            folders.clear()
        yield from (head + name for name in names if pattern.fullmatch(head + name))
