"""Pieces of stored cells as boxes in the dims of logical tensors.

Digits of a dim come together again.
"""

from __future__ import annotations

from itertools import product
from typing import NoReturn

from ucpl.errors import fail
from ucpl.layout import Entry, Layout, LogicalTensor
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_dim, whole_name
from ucpl.layout.scope import at
from ucpl.placement.cells import DigitBox, behind
from ucpl.records import frozen

__all__ = ["LogicalRows", "Row"]

Row = tuple[str | None, list[int], list[int], list[int], int]  # label; low, high and stride along k columns; offset
Run = tuple[int, int, int, int]  # low, high, stride and offset of one dim
Digits = dict[str, tuple[int, int, int]]  # low, high and stride of a piece along each digit


@frozen
class LogicalRows:
    """Rows of one entry.

    k: columns of a row, as many as any tensor has dims.
    """

    layout: Layout
    entry: Entry
    k: int

    def rows(self, piece: DigitBox) -> list[Row]:
        """Boxes in logical dims.

        A digit that is not the last of its dim is enumerated, one box a value.
        """
        path = self.entry.targets.get(piece.label)
        if path is None:
            fail(
                "E208",
                f"part of `{self.entry.path}` has no label, and other parts have",
                at(self.entry.span),
                remedy="give every term a label, as in (q: r d + k: d)",
            )
        tensor = self.layout.placed[path]
        bracket = {d for axis in self.entry.indices for d in self._bracket_digits(axis)}
        self._check_dims(path, tensor, bracket, [d for d, *_ in piece.digits])
        if piece.live is not None:  # rows behind the dim's own
            piece = behind(piece, tensor.counts[tensor.dims.index(piece.live)])
        by_name = {d: (low, high, stride) for d, low, high, stride in piece.digits}
        per_dim = [self._runs(path, tensor, i, by_name, bracket) for i in range(len(tensor.dims))]
        more = self.k - len(per_dim)
        out = []
        for combination in product(*per_dim):
            low, high, stride = ([run[i] for run in combination] for i in range(3))
            shift = sum(run[3] for run in combination)
            out.append((piece.label, low + [0] * more, high + [1] * more, stride + [0] * more, piece.offset + shift))
        return out

    def _check_dims(self, path: str, tensor: LogicalTensor, bracket: set[str], names: list[str]) -> None:
        """Check that brackets and pattern name each dim of the tensor once.

        Raises: UcplError E205.
        """
        need = []
        for dim in tensor.dims:
            if dim in bracket or dim in names:
                need.append(dim)
            else:
                need += ax.leaves_of(dim, self.layout.indices)
        have = [*names, *(d for d in bracket if d in need)]
        if sorted(need) != sorted(have) or any(b not in need for b in bracket):
            fail(
                "E205",
                f"`{whole_name(self.entry.path)}`: `{whole_name(path)}` has the dims {_shown(tensor)},"
                f" the pattern names {' '.join(map(whole_dim, [*sorted(bracket), *names])) or '()'}",
                at(self.entry.span, "each dim must be named exactly once"),
                at(tensor.span, "defined here"),
                remedy=self._in_the_brackets(path, tensor.dims, bracket - {*need})
                or self._of_an_axis(need, have)
                or self._of_one_element(path, tensor, have)
                or self._of_one_tensor(path, tensor.dims, need, have)
                or f"{_dims_remedy(need, have)}, as in `{_every_dim(self.entry, path, tensor.dims, _turned(need, have))}`"
                f"{self._of_an_index(tensor.dims, need, have)}",
            )

    def _of_an_axis(self, need: list[str], have: list[str]) -> str:
        """Remedy for an axis of the mesh among the dims, or ""."""
        axes = {axis for mesh in self.layout.meshes for axis in mesh.axes}
        odd = next((name for name in have if name in axes and name not in need), "")
        dim = next((name for name in need if name not in have), "")
        return (
            f"`{odd}` is an axis of the mesh, and no dim: {dim}@{odd} cuts, pad({dim}, {odd}) pads"
            if odd and dim
            else ""
        )

    def _of_one_element(self, path: str, tensor: LogicalTensor, have: list[str]) -> str:
        """Remedy for an axis of one element in a pack, or ""."""
        unnamed = [d for d, n in zip(tensor.dims, tensor.counts, strict=True) if "#" in d and d not in have and n == 1]
        if not unnamed or len(self.entry.targets) == 1:
            return ""
        one = next((d for d in have if d not in tensor.dims and self.layout.sizes.get(d) == 1), "one")
        line = " ".join(one if d == unnamed[0] else d for d in tensor.dims)
        return f"in a pack, an axis of one element is a dim with a name: `dim {one} = 1`, and `{path} : {line}` in the model"

    def _of_an_index(self, dims: tuple[str, ...], need: list[str], have: list[str]) -> str:
        """Remedy for a first dim that the key should name, or ""."""
        is_missing = dims[:1] == tuple(d for d in need if d not in have) and {*have} <= {*need} and "#" not in dims[0]
        if not is_missing or self.entry.storing.key is None:
            return ""
        return f"; or write {{{dims[0]}}} in the key: one stored tensor for each {dims[0]}"

    def _of_one_tensor(self, path: str, dims: tuple[str, ...], need: list[str], have: list[str]) -> str:
        """Remedy for a dim of one tensor, probably misspelt, or ""."""
        turned = _turned(need, have)
        known = {dim for name, tensor in self.layout.placed.items() if name != path for dim in tensor.dims}
        for own, other in turned.items():
            if own not in known and other in known and "#" not in own:
                line = " ".join(turned.get(dim, dim) for dim in dims)
                return f"`{own}` is a dim of `{path}` alone: if it is `{other}`, write in the model `{path} : {line}`"
        return ""

    def _in_the_brackets(self, path: str, dims: tuple[str, ...], odd: set[str]) -> str:
        """Remedy for an unknown index of the tensor, or ""."""
        if not odd:
            return ""
        named = [name for axis in self.entry.indices for name in ax.dims_of(axis)]
        kept = [name for name in named if name not in odd]
        of_pattern = {name for axis in self.entry.shape for name in ax.dims_of(axis)}
        free = [dim for dim in dims if dim not in of_pattern and dim not in kept]
        if len(odd) == len(free) == 1:
            line = f"{self.entry.path}[{', '.join(free[0] if name in odd else name for name in named)}]"
            return f"`{path}` has the dims {' '.join(dims)}, and no {min(odd)}: write `{line} = ...`"
        line = f"{self.entry.path}[{', '.join(kept)}]" if kept else self.entry.path
        return (
            f"take {', '.join(sorted(odd))} out of the brackets, `{line} = ...`: `{path}` has the dims {' '.join(dims)}"
        )

    def _runs(self, path: str, tensor: LogicalTensor, i: int, by_name: Digits, bracket: set[str]) -> list[Run]:
        """A piece's runs of dim i: one, or one per outer digit.

        A run in brackets is open.
        """
        dim = tensor.dims[i]
        if dim in by_name:
            return [(*by_name[dim], 0)]
        if dim in bracket or all(d in bracket for d in ax.leaves_of(dim, self.layout.indices)):
            return [(-1, -1, 0, 0)]
        if tensor.counts[i] != self.layout.sizes[dim]:
            fail(
                "E209",
                f"`{path}` has only a range of `{dim}`, and the pattern writes `{dim}` by its digits",
                at(self.entry.span),
                at(tensor.span, f"{tensor.counts[i]} of {self.layout.sizes[dim]}"),
            )
        if split := [d for d in ax.leaves_of(dim, self.layout.indices) if d in bracket]:
            self._reject_split(path, tensor, dim, split)
        return self._digit_runs(dim, by_name)

    def _reject_split(self, path: str, tensor: LogicalTensor, dim: str, split: list[str]) -> NoReturn:
        """Refuse an index that is split between brackets and pattern.

        Raises: UcplError E205.
        """
        leaves = ax.leaves_of(dim, self.layout.indices)
        dims = " ".join(" ".join(leaves) if d == dim else d for d in tensor.dims)
        fail(
            "E205",
            f"`{self.entry.path}`: {', '.join(split)} of the index {dim} = ({' '.join(leaves)}) is in the brackets,"
            f" and {', '.join(d for d in leaves if d not in split)} in the pattern",
            at(self.entry.span, "an index is in one of the two"),
            at(tensor.span, "defined here"),
            remedy=f"make the digits dims of the model, `{path} : {dims}` with a `dim` line for each and no `index {dim}`:"
            " then each has its stored place",
        )

    def _bracket_digits(self, axis: ax.Axis) -> list[str]:
        return [leaf for name in ax.dims_of(axis) for leaf in ax.leaves_of(name, self.layout.indices)]

    def _digit_runs(self, dim: str, by_name: Digits) -> list[Run]:
        """The runs of a dim that is written by its digits."""
        leaves = ax.leaves_of(dim, self.layout.indices)
        weights, total = {}, 1
        for leaf in reversed(leaves):
            weights[leaf] = total
            total *= self.layout.sizes[leaf]
        # Digits with the same order in storage and in the dim are one run: (two k) is d again.
        run = [leaves[-1]]
        low, high, stride = by_name[leaves[-1]]
        for leaf in reversed(leaves[:-1]):
            full = low == 0 and high == weights[leaf]
            if not (full and by_name[leaf][2] == stride * weights[leaf]):
                break
            low, high = by_name[leaf][0] * weights[leaf], (by_name[leaf][1] - 1) * weights[leaf] + high
            run.append(leaf)
        outer = [leaf for leaf in leaves if leaf not in run]
        out = []
        for values in product(*(range(by_name[d][0], by_name[d][1]) for d in outer)):
            base = sum(v * weights[d] for v, d in zip(values, outer, strict=True))
            shift = sum((v - by_name[d][0]) * by_name[d][2] for v, d in zip(values, outer, strict=True))
            out.append((base + low, base + high, stride, shift))
        return out


def _turned(need: list[str], have: list[str]) -> dict[str, str]:
    """The dim that a pattern lacks, and the one in its place."""
    missing = [d for d in need if d not in have]
    extra = [d for d in dict.fromkeys(have) if d not in need]
    return {missing[0]: extra[0]} if len(missing) == len(extra) == 1 else {}


def _every_dim(entry: Entry, path: str, dims: tuple[str, ...], turned: dict[str, str]) -> str:
    """The plainest entry of a tensor with these brackets and cuts.

    If several are packed, its part. `turned`: dims in the place of others.
    """
    bracket = [name for axis in entry.indices for name in ax.dims_of(axis) if name in dims]
    cuts = {
        a.axis.name: _cut_text(a) for a in ax.walk(*entry.shape) if isinstance(a, ax.Cut) and isinstance(a.axis, ax.Dim)
    }
    left = " ".join(
        "_" if "#" in d else f"{whole_dim(d)}{cuts.get(turned.get(d, d), '')}" for d in dims if d not in bracket
    )
    label = next((one for one, target in entry.targets.items() if target == path), None)
    if label is not None:
        around = {a.name for a in entry.shape if isinstance(a, ax.Dim)}  # axes that all parts have behind them
        left = " ".join(d for d in left.split() if d not in around)
        return f"{label}: {left or '()'}"
    indices = f"[{', '.join(map(whole_dim, bracket))}]" if bracket else ""
    return f"{whole_name(entry.path)}{indices} = {(not turned and _as_it_is_grouped(entry, dims)) or left or '()'}"


def _as_it_is_grouped(entry: Entry, dims: tuple[str, ...]) -> str:
    """The entry's own pattern with each dim once.

    It keeps parentheses and cuts. Empty if it has other parts than dims, or if a dim without a name is absent.
    """
    named = [d for axis in (*entry.indices, *entry.shape) for d in ax.dims_of(axis)]
    absent = [d for d in dims if d not in named]
    if len({*named}) != len(named) or any("#" in d for d in absent):
        return ""
    texts = [_grouped(axis, dims) for axis in entry.shape]
    if None in texts:
        return ""
    places = [next((dims.index(d) for d in ax.dims_of(axis) if d in dims), len(dims)) for axis in entry.shape]
    for d in absent:  # an axis of its own, where the model has it
        at_least = next((i for i, place in enumerate(places) if place > dims.index(d)), len(texts))
        texts.insert(at_least, whole_dim(d))
        places.insert(at_least, dims.index(d))
    return " ".join(text for text in texts if text)


def _grouped(axis: ax.Axis, dims: tuple[str, ...]) -> str | None:
    """Text of an axis without foreign dims; None for other parts."""
    match axis:
        case ax.Dim(name=name, low=0, high=None):
            return ("_" if "#" in name else whole_dim(name)) if name in dims else ""
        case ax.Cut(axis=inner):
            text = _grouped(inner, dims)
            return text + _cut_text(axis) if text else text
        case ax.Stack(terms=(ax.Term(label=None, axes=axes),)):
            texts = [_grouped(one, dims) for one in axes]
            if None in texts:
                return None
            kept = [text for text in texts if text]
            return f"({' '.join(kept)})" if len(kept) > 1 else " ".join(kept)
    return None


def _shown(tensor: LogicalTensor) -> str:
    """Dims of a tensor as the model has them."""
    return " ".join(str(n) if "#" in d else whole_dim(d) for d, n in zip(tensor.dims, tensor.counts, strict=True))


def _cut_text(cut: ax.Cut) -> str:
    """Its plain cuts; sizes and grains are left to the axes."""
    kinds = {"equal": "@{}", "chunk": "@chunk({})", "spread": "@spread({})"}
    return "".join(kinds[s.kind].format(s.mesh_axis) for s in cut.splits if s.kind in kinds and s.grain == 1)


def _dims_remedy(need: list[str], have: list[str]) -> str:
    missing = ["`_`" if "#" in d else whole_dim(d) for d in need if d not in have]
    extra = [d for d in have if d not in need] + [d for d in dict.fromkeys(have) if have.count(d) > 1]
    out = []
    if missing:
        out.append(f"add {', '.join(missing)}")
    if extra:
        out.append(f"take out {', '.join(dict.fromkeys(extra))}")
    return " and ".join(out)
