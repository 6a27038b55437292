"""Matrices that are stored transposed, unlike those of the same dims.

The line of the model and that of the layout each have an order of dims. A layout stores its matrices in one order: those of
nn.Linear as the model has them, those of Conv1D all transposed. If two dims of one size are swapped, the order of the others
is the only evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations, groupby

from ucpl.layout import Entry, Layout
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_dim, whole_name
from ucpl.records import frozen

__all__ = ["transposed"]

OTHERS_MIN = 3  # matrices in the order of the model that are evidence against one of other dims
NAMED_MAX = 3  # of a message


@frozen
class _Matrix:
    """One tensor in one entry.

    axes: the dims of each stored axis. dims: those of the model, without the ones in brackets.
    """

    path: str
    line: int
    axes: tuple[tuple[str, ...], ...]
    dims: tuple[str, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Places of the stored axes in the order of the model."""
        firsts = [min(map(self.dims.index, axis)) for axis in self.axes]
        return tuple(map(sorted(firsts).index, firsts))

    @property
    def is_in_order(self) -> bool:
        return self.order == tuple(range(len(self.axes)))

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """Pairs of dims in one stored axis, the slower one first."""
        return frozenset(pair for axis in self.axes for pair in combinations(axis, 2))

    def __str__(self) -> str:
        return f"`{self.path}` (line {self.line})"


def transposed(layout: Layout) -> Iterator[str]:
    """Remarks on tensors in another order than those of the same dims."""
    found = list(dict.fromkeys(_matrices(layout)))
    yield from dict.fromkeys((*_transposed(layout, found), *_reversed(layout, found), *_beside_biases(layout)))


def _transposed(layout: Layout, found: Sequence[_Matrix]) -> Iterator[str]:
    found = [one for one in found if len(one.axes) > 1]
    in_order = sum(one.is_in_order for one in found)
    is_usual = 2 * in_order > len(found)
    for alike in _by_dims(found):
        orders = Counter(one.order for one in alike)
        kept = max(orders, key=lambda o: (orders[o], (o == tuple(sorted(o))) is is_usual))
        others = [one for one in alike if one.order == kept]
        if (
            len(orders) == 1
            and len(alike) == 1
            and not alike[0].is_in_order
            and in_order >= max(OTHERS_MIN, len(found) - 1)
        ):
            kept, others = tuple(sorted(kept)), [one for one in found if one.is_in_order]
        for odd in (one for one in alike if one.order != kept):
            yield _remark(layout, odd, others)


def _reversed(layout: Layout, found: Sequence[_Matrix]) -> Iterator[str]:
    """Products whose dims are in another order than in the other entries."""
    for pair in dict.fromkeys(tuple(sorted(pair)) for one in found for pair in sorted(one.pairs)):
        ways = [[one for one in found if way in one.pairs] for way in (pair, pair[::-1])]
        odd, usual = sorted(ways, key=len)
        if odd and len(odd) < len(usual):
            a, b = next(way for way in (pair, pair[::-1]) if way in usual[0].pairs)
            verb = "has" if len(usual) == 1 else "have"
            yield (
                f"{layout.name}: {odd[0]} has `{b}` outside of `{a}`, and {_named(usual)} {verb} `{a}` outside of `{b}`."
                f" If the sizes agree, no check of shapes finds it. If they are alike, write `{a} {b}`"
            )


def _beside_biases(layout: Layout) -> Iterator[str]:
    """Matrices whose bias has the dims of the other axis.

    A bias belongs to a matrix if their keys differ by the word.
    """
    ways: tuple[list[Entry], list[Entry]] = [], []
    biases = {key.replace("bias", "weight"): entry for entry in layout.entries if "bias" in (key := _key(entry))}
    for entry in layout.entries:
        bias = biases.get(_key(entry))
        axes = [frozenset(ax.dims_of(axis)) for axis in entry.shape]
        if bias is not None and len(axes) == 2 and len(bias.shape) == 1 and axes[0] != axes[1]:
            of_bias = frozenset(ax.dims_of(*bias.shape))
            if of_bias in axes:
                ways[axes.index(of_bias)].append(entry)
    odd, usual = sorted(ways, key=len)
    if odd and len(odd) < len(usual):
        names = list(dict.fromkeys(whole_name(one.path) for one in usual))
        have = "has one" if len(names) == 1 else "have ones"
        yield (
            f"{layout.name}: the bias of `{whole_name(odd[0].path)}` (line {odd[0].span.line}) has the dims of its"
            f" {'first' if odd is ways[0] else 'second'} axis, and {_quoted(names)} {have} with those of the other."
            " If sizes agree, no check of shapes finds it. If they are alike, swap the axes of the line"
        )


def _key(entry: Entry) -> str:
    return entry.storing.key.text if entry.storing.key is not None else ""


def _remark(layout: Layout, odd: _Matrix, others: Sequence[_Matrix]) -> str:
    first = others[0].axes
    if len(odd.axes) != len(first):
        shown = " ".join(f"({' '.join(axis)})" if len(axis) > 1 else axis[0] for axis in first)
        return (
            f"{layout.name}: {odd} has {len(odd.axes)} stored axes, and {_named(others)} of the same dims"
            f" {'has' if len(others) == 1 else 'have'} {len(first)}. Dims of one axis are in parentheses: `{shown}`"
        )
    way, other = ("in", "transposed") if odd.is_in_order else ("not in", "in that order")
    return (
        f"{layout.name}: {odd} is {way} the order of its dims in the model, `{' '.join(odd.dims)}`, and {_named(others)}"
        f" {'is' if len(others) == 1 else 'are'} {other}. If two dims of one size are swapped, no check of shapes finds it."
        f" If they are alike, swap the axes of the line, or the dims in the model"
    )


def _named(found: Sequence[_Matrix]) -> str:
    return _quoted(list(dict.fromkeys(one.path for one in found)))


def _quoted(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(f"`{name}`" for name in names[:NAMED_MAX]) + more


def _by_dims(found: Sequence[_Matrix]) -> Iterator[list[_Matrix]]:
    def dims(one: _Matrix) -> list[str]:
        return sorted(one.dims)

    for _, alike in groupby(sorted(found, key=dims), dims):
        yield list(alike)


def _matrices(layout: Layout) -> Iterator[_Matrix]:
    for entry in layout.entries:
        in_brackets = {*ax.dims_of(*entry.indices)}
        for label, path in entry.targets.items() if entry.alias is None else ():
            leaves = [
                leaf
                for dim in layout.tensors[path].dims
                if dim not in in_brackets
                for leaf in (dim, *ax.leaves_of(dim, layout.indices))
            ]
            axes = [tuple(dict.fromkeys(_dims(axis, label, entry.targets))) for axis in entry.shape]
            axes = [tuple(map(whole_dim, axis)) for axis in axes if axis]
            dims = tuple(dict.fromkeys(map(whole_dim, leaves)))
            if axes and all(dim in dims for axis in axes for dim in axis):
                yield _Matrix(whole_name(path), entry.span.line, tuple(axes), dims)


def _dims(axis: ax.Axis, label: str | None, labels: Collection[str | None]) -> Iterator[str]:
    """Dims of one labelled tensor in an axis."""
    if isinstance(axis, ax.Dim):
        yield axis.name
    elif isinstance(axis, ax.Stack):
        for term in axis.terms:
            if term.label is None or term.label == label or term.label not in labels:
                for inner in term.axes:
                    yield from _dims(inner, label, labels)
    else:
        for inner in ax.children(axis):
            yield from _dims(inner, label, labels)
