"""Indices of a dim in brackets: of models, entries and patterns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.errors import fail
from ucpl.language import nodes, print_expr
from ucpl.layout.arithmetic import meant_number
from ucpl.layout.scope import Scope, Value, at

__all__ = ["Indices", "before", "chosen", "compact", "places_of", "runs_in"]

Indices = range | tuple[int, ...]  # in order, each once; a range wherever it is one, so that equal sets are equal
_TRUTHS = frozenset({"==", "!=", "<=", ">=", "<", ">", "and", "or", "not"})


def chosen(among: nodes.Among, name: str, size: int, scope: Scope) -> Indices:
    """Indices of a dim of `size` that brackets list.

    Raises E134, E138.
    """
    if len(among.items) == 1 and isinstance(among.items[0], nodes.Range) and not among.others:
        return _steps(among.items[0], name, size, scope)
    found: set[int] = set()
    for item in among.items:
        found.update(
            _steps(item, name, size, scope) if isinstance(item, nodes.Range) else _indices_of(item, name, size, scope)
        )
    return compact([i for i in range(size) if i not in found] if among.others else sorted(found))


def _steps(item: nodes.Range, name: str, size: int, scope: Scope) -> range:
    start, stop, step = (None if e is None else scope.integer(e) for e in (item.start, item.stop, item.step))
    if step is not None and step <= 0:
        fail("E134", f"step {step} of dim `{name}`", at(item.span))
    return range(size)[start:stop:step]


def _indices_of(item: nodes.Expr, name: str, size: int, scope: Scope) -> Iterator[int]:
    """Indices of one number or list.

    A negative one counts from the end, as bounds of ranges do.
    """
    if isinstance(item, nodes.Unary | nodes.Binary) and item.operator in _TRUTHS:
        text = f"the indices of `{name}` are numbers and lists, not conditions"
        match item:
            case nodes.Binary("==", left, nodes.Text() as word):
                remedy = f"write {name}[where({print_expr(left)}, {print_expr(word)})]"
                fail("E138", text, at(item.span), remedy=remedy)
        fail("E138", text, at(item.span))
    value = scope.evaluate(item)
    if value is None:
        scope.integer(item)  # names the absent key of the config
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, int):
            fail("E138", f"{one!r} is no index of `{name}`", at(item.span), remedy=_of_values(item, name, value))
        if not -size <= one < size:
            fail("E138", f"{one} is no index of `{name}`, which is {size}", at(item.span))
        yield one % size


def _of_values(item: nodes.Expr, name: str, value: Value) -> str:
    """Remedy for values that are no indices."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    flat = (
        [two for one in value for two in (one if isinstance(one, list) else [one])]
        if isinstance(value, list)
        else [value]
    )
    numbers = [one if isinstance(one, int) else meant_number(one) for one in flat]
    if None not in numbers:
        return f"write whole numbers, without quotes or points, in one list: {numbers}"
    word = next((one for one in flat if isinstance(one, str)), None)
    if word is not None and isinstance(item, nodes.Name):
        return f'the positions of a word in a list: {name}[where({print_expr(item)}, "{word}")]'
    return ""


def compact(indices: Sequence[int]) -> Indices:
    """Indices that are in order, as a range where they step evenly."""
    if not indices:
        return range(0)
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    even = range(indices[0], indices[-1] + 1, step)
    return (
        even
        if len(even) == len(indices) and all(a == b for a, b in zip(even, indices, strict=True))
        else tuple(indices)
    )


def places_of(indices: Indices, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Positions of a column among these indices, and a mask."""
    if not len(indices):
        return np.zeros_like(wanted), np.zeros(len(wanted), dtype=bool)
    known = np.arange(indices.start, indices.stop, indices.step) if isinstance(indices, range) else np.array(indices)
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return places, known[places] == wanted


def before(indices: Indices, index: int) -> int:
    """Number of these indices that come before an index."""
    return bisect_left(indices, index)


def runs_in(indices: Indices) -> Iterator[tuple[int, int]]:
    """The indices as half-open runs of neighbours, in order."""
    if isinstance(indices, range) and indices.step == 1:
        if len(indices):
            yield indices.start, indices.stop
        return
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield indices[start], indices[i - 1] + 1
            start = i
