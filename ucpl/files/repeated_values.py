"""Values that several files repeat.

One copy is read, different ones are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ucpl.extents import PickledCall
from ucpl.extents.account import NotRead
from ucpl.files.carrying import lifted
from ucpl.files.torch_files import TorchFile

__all__ = ["Copy", "Mark", "hypers_of", "unlike"]

Mark = Callable[[object], object]  # equal for equal values, tensors by their bytes (carrying.marks_of)
Copy = tuple[TorchFile, str, object]  # a file, the key of a value in it with "/" at its end, or "", and the value
_DEPTH = 24


def unlike(copies: Iterable[Copy], mark: Mark) -> Iterator[NotRead]:
    """Places of each further copy whose values the first copy has not."""
    first: tuple[TorchFile, object] | None = None
    for part, lead, value in copies:
        mine = lifted(value, part.file)
        if first is None:
            first = part, mine
            continue
        for key in _differing(mine, first[1], mark, ()):
            why = f"the values of {first[0].file} are taken for all ranks"
            yield NotRead(f"{part.file}: {lead}{'/'.join(map(str, key))}", why, kind="value")


def hypers_of(optimizer: object) -> list[object]:
    """Hyper-parameters of the groups of torch's optimizer, without their members."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    return [
        {key: value for key, value in group.items() if key != "params"} if isinstance(group, dict) else group
        for group in (groups if isinstance(groups, list) else ())
    ]


def _differing(mine: object, first: object, mark: Mark, at: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    one, other = mine, first
    if isinstance(mine, PickledCall) and isinstance(first, PickledCall) and mine.function == first.function:
        one, other = mine.state, first.state
    if len(at) < _DEPTH and isinstance(one, dict) and isinstance(other, dict):
        for key, value in one.items():
            if key in other:
                yield from _differing(value, other[key], mark, (*at, key))
            else:
                yield (*at, key)
    elif len(at) < _DEPTH and isinstance(one, list | tuple) and isinstance(other, list | tuple):
        for n, value in enumerate(one):
            if n < len(other):
                yield from _differing(value, other[n], mark, (*at, n))
            else:
                yield (*at, n)
    elif mark(mine) != mark(first):
        yield at
