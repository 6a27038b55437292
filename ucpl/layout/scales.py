"""Tensors in blocks with a scale each, and their cuts.

Both a tensor and its scale are cut at the edges of blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import NoReturn

from attrs import evolve

from ucpl.errors import fail
from ucpl.extents import AS_U8
from ucpl.language import nodes, print_expr, print_item, worded
from ucpl.language.walk import walk
from ucpl.layout import axes as ax
from ucpl.layout.layout import Entry, LogicalTensor, Scaling, Storing
from ucpl.layout.scope import Scope, at

__all__ = ["check_block_edges", "scaled", "scales_of", "with_scalings"]

BLOCK_MAX = 1 << 40


def scales_of(tensors: Mapping[str, LogicalTensor]) -> dict[str, str]:
    """Tensors that have a scale, each with that."""
    return {path: t.scale for path, t in tensors.items() if t.scale is not None}


# ---- in the model ----------------------------------------------------------------------------------------------------


def with_scalings(
    items: Iterable[nodes.ModelItem], tensors: dict[str, LogicalTensor], scope: Scope
) -> dict[str, LogicalTensor]:
    """The tensors, each scale with its tensor. Raises E137, E129."""
    said = {i.path: i for i in items if isinstance(i, nodes.Tensor) and i.scaling is not None and scope.holds(i.when)}
    seen: dict[str, nodes.Tensor] = {}
    for path, item in said.items():
        assert item.scaling is not None
        owner = item.scaling.of
        if owner not in tensors or owner in said:
            _unfit(
                item,
                f"`{owner}`, the tensor of the scale, is no tensor other than the scales",
                f"`{owner}` is a scale: name the tensor that it is of, as in"
                f" `is {worded(item.span, 'scale of w by 128, 128', 'scale(w, 128, 128)')}`"
                if owner in said
                else f"name the tensor: a line `{owner} : ...` of this model, whose dims the blocks are of",
            )
        if owner in seen:
            _unfit(item, f"`{owner}` has a scale, `{seen[owner].path}`")
        seen[owner] = item
        tensors[owner] = evolve(tensors[owner], scale=path)
        tensors[path] = evolve(tensors[path], scaling=_scaling(item, tensors[path], tensors[owner], scope))
    return tensors


def _scaling(item: nodes.Tensor, scale: LogicalTensor, owner: LogicalTensor, scope: Scope) -> Scaling:
    """Blocks of a scale.

    Dims of one name are the same; the others are, in order, blocks of the dims that the scale lacks.
    """
    assert item.scaling is not None
    for e in item.scaling.by:
        if isinstance(e, nodes.List):
            numbers = ", ".join(map(print_expr, e.items))
            _unfit(item, "a list is no size of a block", f"the numbers stand side by side: by {numbers}")
    sizes = [scope.integer(e) for e in item.scaling.by]
    blocked = [i for i, d in enumerate(owner.dims) if d not in scale.dims]
    own = [d for d in scale.dims if d not in owner.dims]
    if not len(blocked) == len(own) == len(sizes):
        _unfit(
            item,
            f"`{owner.path}` has {len(blocked)} dims that `{scale.path}` lacks ({_names(owner, blocked)}), which has"
            f" {len(own)} of its own, and {len(sizes)} sizes of blocks are given",
            f"give a number for each dim: by {', '.join([str(sizes[0])] * len(own))}"
            if sizes and len(blocked) == len(own) != len(sizes)
            else _written(item, owner, sizes),
        )
    _check_order(item, own, [owner.dims[i] for i in blocked], scope)
    blocks = dict(zip(own, zip(blocked, sizes, strict=True), strict=True))
    pairs = [blocks.get(d) or (owner.dims.index(d), 1) for d in scale.dims]
    for i, (dim, size) in enumerate(pairs):
        if not 1 <= size <= BLOCK_MAX:
            _unfit(item, f"a block of {size} elements")
        if scale.dims[i] not in blocks and scale.indices[i] != owner.indices[dim]:
            _unfit(item, f"`{scale.path}` and `{owner.path}` have other indices of `{scale.dims[i]}`")
        wanted = -(-owner.counts[dim] // size)
        if scale.dims[i] in blocks and (scale.counts[i] != wanted or owner.indices[dim] != range(owner.counts[dim])):
            _unfit(
                item,
                f"{_names(owner, [dim])} = {owner.counts[dim]} in blocks of {size} are {wanted} scales, and"
                f" {_names(scale, [i])} is {scale.counts[i]}",
                f"write dim {_names(scale, [i])} = ceil({_names(owner, [dim])}, {size})",
            )
    return Scaling(owner.path, tuple(d for d, _ in pairs), tuple(n for _, n in pairs))


def _written(item: nodes.Tensor, owner: LogicalTensor, sizes: list[int]) -> str:
    """Line of a scale, with own dims for blocked dims."""
    mine = [d.name for d in item.dims if d.name is not None]
    blocked = [d for d in owner.dims if d not in mine]
    if item.scaling is None or not blocked or any("#" in d for d in owner.dims):
        return ""
    by = [sizes[i] if i < len(sizes) else (sizes or [128])[-1] for i in range(len(blocked))]
    made = {d: f"{d}_blocks" for d in blocked}
    numbers = "dim " + ", ".join(f"{made[d]} = ceil({d}, {n})" for d, n in zip(blocked, by, strict=True))
    dims = tuple(next((one for one in item.dims if one.name == d), nodes.Dimension(made.get(d, d))) for d in owner.dims)
    line = evolve(item, dims=dims, scaling=evolve(item.scaling, by=tuple(map(nodes.Number, by))))
    return f"write: {numbers}\n       {print_item(line)}"


def _check_order(item: nodes.Tensor, own: Sequence[str], blocked: Sequence[str], scope: Scope) -> None:
    """Check that dims made of others, `rb = ceil(r, 128)`, are in order.

    Raises E129.
    """
    made = [
        {n.path for n in walk(scope.bindings[d]) if isinstance(n, nodes.Name)} if d in scope.bindings else set()
        for d in own
    ]
    wanted = [next((d for d, of in zip(own, made, strict=True) if b in of), "") for b in blocked]
    if sorted(wanted) == sorted(own) and wanted != list(own):
        turned = iter(wanted)
        dims = tuple(evolve(d, name=next(turned)) if d.name in own else d for d in item.dims)
        better = print_item(evolve(item, dims=dims))
        _unfit(
            item,
            f"{own[0]} is made of {blocked[wanted.index(own[0])]}, and counts blocks of {blocked[0]} here",
            f"write: {better}",
        )


def _names(tensor: LogicalTensor, dims: Sequence[int]) -> str:
    return ", ".join(f"its dim {d}" if "#" in tensor.dims[d] else tensor.dims[d] for d in dims) or "none"


def _unfit(item: nodes.Tensor, why: str, remedy: str = "") -> NoReturn:
    fail("E129", f"`{item.path}`: {why}", at(item.span), remedy=remedy)


# ---- in a layout -----------------------------------------------------------------------------------------------------


def scaled(
    storing: Storing, item: nodes.Entry, targets: Collection[str], tensors: Mapping[str, LogicalTensor]
) -> Storing:
    """Storing clauses for these tensors.

    `dtype u8` of a type of scaled blocks is its bits. `value x * scale` of a line for many has no effect on a tensor
    without a scale. Raises E189 for a tensor without one that has a line of its own, and for a line without a dtype.
    """
    if not storing.scaled:
        kinds = {tensors[path].dtype for path in targets}
        kept = AS_U8.get(next(iter(kinds)) or "") if len(kinds) == 1 and storing.dtype == "u8" else None
        return evolve(storing, dtype=kept) if kept else storing
    bare = [path for path in targets if tensors[path].scale is None]
    if bare and (item.path == "*" or item.glob):
        return evolve(storing, scaled=False)
    clause = next(c for c in item.clauses if c.word == "value")
    span = clause.span if clause.span.line else item.span
    if bare:
        fail("E189", f"`{bare[0]}` has no scale", at(span), remedy="name its scale in the model")
    if storing.dtype is None:
        fail("E189", f"`{item.path}` times its scale is stored, without a dtype", at(span))
    return storing


Coordinates = tuple[tuple[str, int], ...]
Windows = dict[Coordinates, tuple[int, int]]  # range of each coordinate of the cuts around a dim


def check_block_edges(
    entries: Sequence[Entry],
    tensors: Mapping[str, LogicalTensor],
    sizes: Mapping[str, int],
    indices: Mapping[str, ax.Axis],
) -> None:
    """Check that blocked tensors and their scales are cut alike.

    Both are cut at block ends, or uncut. Raises E216.
    """
    scales = scales_of(tensors)
    joined = {*scales, *scales.values()}
    of: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.storing.scaled:  # of a product, any part is complete
            continue
        for path in joined.intersection(entry.targets.values()):
            of.setdefault(path, []).append(entry)
    for owner, path in scales.items():
        scaling = tensors[path].scaling
        assert scaling is not None
        for i, (dim, size) in enumerate(zip(scaling.along, scaling.sizes, strict=True)):
            theirs = [(e, windows_of(e, tensors[owner], dim, sizes, indices)) for e in of.get(owner, ())]
            for entry, found in theirs:
                _check_edges(entry, tensors[owner], dim, size, found)
            for entry in of.get(path, ()):
                mine = windows_of(entry, tensors[path], i, sizes, indices)
                blocks = [_in_blocks(found, size) for _, found in theirs if found]
                if mine and len(mine) > 1 and blocks and mine not in blocks:
                    _reject_scale(entry, theirs[0][0], tensors[path], size)


def windows_of(
    entry: Entry, tensor: LogicalTensor, dim: int, sizes: Mapping[str, int], indices: Mapping[str, ax.Axis]
) -> Windows | None:
    """Range of each coordinate of a dim.

    None if the dim is cut together with others, nothing if the cut leaves a remainder. If a dim is stored as its
    digits, the first may be cut: one value of it has all values of the others.
    """
    count = tensor.counts[dim]
    axis = next((a for a in entry.shape if tensor.dims[dim] in ax.dims_of(a)), None)
    each = 1
    if axis is None:
        first, *others = ax.leaves_of(tensor.dims[dim], indices)
        cuts = [
            a for a in ax.walk(*entry.shape) if isinstance(a, ax.Cut) and {first, *others}.intersection(ax.dims_of(a))
        ]
        if any(ax.dims_of(a) != (first,) for a in cuts):
            return None
        axis, each = next(iter(cuts), None), prod(sizes[name] for name in others)
    if axis is None or not any(isinstance(a, ax.Cut) for a in ax.walk(axis)):
        return {(): (0, count)}
    try:
        found = _windows(axis, count // each, sizes)
    except ValueError:  # reported where pieces are made: E204
        return {}
    if found is None:
        return None
    found = {c: (low * each, high * each) for c, (low, high) in found.items()}
    return {
        c: (min(low, count), min(high, count)) if low < min(high, count) else (0, 0) for c, (low, high) in found.items()
    }


def _windows(axis: ax.Axis, count: int, sizes: Mapping[str, int]) -> Windows | None:
    match axis:
        case ax.Dim(low=0, high=None):
            return {(): (0, count)}
        case ax.Trim(axis=inner):
            return _windows(inner, count, sizes)
        case ax.Stack(terms=(ax.Term(axes=(inner,)),)):
            return _windows(inner, count, sizes)
        case ax.Pad(axis=inner, multiple=multiple):
            found = _windows(inner, count, sizes)
            if found is None or len(found) > 1:
                return None
            return {(): (0, count + -count % multiple)}
        case ax.Cut(axis=inner, splits=splits):
            found = _windows(inner, count, sizes)
            for split in splits if found is not None else ():
                found = _cut(found or {}, split, sizes[split.mesh_axis])
            return found
        case _:
            return None


def _cut(found: Windows, split: ax.Split, ways: int) -> Windows:
    out: Windows = {}
    for coordinates, (low, high) in found.items():
        for here in range(ways):
            a, b = ax.piece_of(split, high - low, ways, here)
            out[*coordinates, (split.mesh_axis, here)] = (low + a, low + b)
    return out


def _in_blocks(found: Windows, size: int) -> Windows:
    return {c: (low // size, -(-high // size)) for c, (low, high) in found.items()}


def _check_edges(entry: Entry, tensor: LogicalTensor, dim: int, size: int, found: Windows | None) -> None:
    name = _names(tensor, [dim])
    if found is None:
        if size > 1:
            fail(
                "E216",
                f"`{entry.path}`: {name}, which has a scale for each {size}, is cut together with other dims, or in parts",
                at(entry.span),
                remedy=f"cut {name} alone: @spread(tp, {size})",
            )
        return
    count = tensor.counts[dim]
    for coordinates, (low, high) in found.items():
        edge = next((e for e in (low, high) if e % size and e != count), None)
        if edge is not None:
            axis, here = coordinates[-1]
            word = "spread" if count % size == 0 else "chunk"
            fail(
                "E216",
                f"`{tensor.path}` is cut at {name} = {edge}, inside the block of {size} that begins at"
                f" {edge // size * size} and has one scale: {axis} = {here} has {low} to {high}",
                at(entry.span, "cut here"),
                remedy=f"cut where a block ends: {name}@{word}({axis}, {size})",
            )


def _reject_scale(entry: Entry, owner: Entry, scale: LogicalTensor, size: int) -> NoReturn:
    assert scale.scaling is not None
    fail(
        "E216",
        f"`{scale.path}`, the scale of `{scale.scaling.of}`, is cut otherwise than the blocks of that",
        at(entry.span, "the scale"),
        at(owner.span, f"in blocks of {size}"),
        remedy="cut both alike, a block of the one as an element of the other, or leave the scale complete on every rank",
    )
