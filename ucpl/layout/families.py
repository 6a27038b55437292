"""Families: tensors that a layout of any model stores alike.

They are one tensor with an axis of names. A plan of 45,000 tensors has a few dozen families, and costs as much as a spec that
folds its layers and experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ucpl.extents import AS_U8, PAIRED
from ucpl.language import nodes
from ucpl.layout.by_index import whole_name
from ucpl.layout.layout import Family, LogicalTensor
from ucpl.layout.scope import Scope

__all__ = ["MEMBER", "families_of", "with_sizes"]

MEMBER = "#name"  # ends the name of the dim over the members
_NUMBER = re.compile(r"\d+")

Lines = Callable[[str, LogicalTensor], Sequence[nodes.Entry]]


def families_of(
    tensors: Mapping[str, LogicalTensor], apart: Iterable[str], groups: Iterable[tuple[str, ...]], lines: Lines
) -> dict[str, Family]:
    """Families of tensors that model and layout treat alike.

    Their dims have no names. Names that differ in numbers alone are one family. Other names with the same sizes are one, too.

    apart: tensors that something speaks of by name. groups: the members of each parameter group. lines: the entries of a
    tensor.
    """
    alone = {*apart}
    group_of = {path: n for n, members in enumerate(groups) for path in members}
    found: dict[tuple[str, object], list[str]] = {}
    entries: dict[int, tuple[int, ...]] = {}  # of each list of entries: none if one of them stores nothing
    for path, tensor in tensors.items():
        if path in alone or not _is_plain(tensor):
            continue
        said = lines(path, tensor)
        if id(said) not in entries:
            entries[id(said)] = tuple(map(id, said)) if all(item.shape is not None for item in said) else ()
        if stored := entries[id(said)]:
            kin = tensor.counts, tensor.dtype, tensor.kind, tensor.state_dtypes, group_of.get(path), stored
            found.setdefault((_NUMBER.sub("*", path), kin), []).append(path)
    by_size: dict[object, tuple[list[str], str | None]] = {}  # in the model's order, with the form of them all
    for key, paths in found.items():
        if len(paths) > 1:
            by_size[key] = paths, key[0]
        else:
            by_size.setdefault(key[1], ([], None))[0].extend(paths)
    out: dict[str, Family] = {}
    for paths, form in by_size.values():
        if len(paths) > 1:
            path = name = form or f"{paths[0]} and {len(paths) - 1} more"
            number = 2
            while path in tensors or path in out:
                path, number = f"{name} ({number})", number + 1
            out[path] = _family(path, paths, tensors[paths[0]])
    return out


def _is_plain(tensor: LogicalTensor) -> bool:
    is_own = tensor.scaling is None and tensor.scale is None and not tensor.lacks
    if not is_own or tensor.is_void or 0 in tensor.counts or whole_name(tensor.path) != tensor.path:
        return False
    if tensor.dtype in AS_U8 or tensor.dtype in PAIRED:  # whose elements share bytes
        return False
    return all("#" in dim for dim in tensor.dims)


def _family(path: str, paths: list[str], first: LogicalTensor) -> Family:
    tensor = LogicalTensor(
        path,
        (f"{path}{MEMBER}", *(f"{path}#{n}" for n in range(len(first.dims)))),
        (len(paths), *first.counts),
        (range(len(paths)), *first.indices),
        first.dtype,
        first.kind,
        span=first.span,
        state_dtypes=first.state_dtypes,
    )
    return Family(tensor, tuple(paths))


def with_sizes(scope: Scope, tensors: Mapping[str, LogicalTensor], families: Sequence[Family]) -> None:
    """Sizes of dims without names, for the scope.

    They are of families, and of tensors in none.
    """
    members = {name for family in families for name in family.names}
    given = scope.given
    for tensor in (*(t for path, t in tensors.items() if path not in members), *(f.tensor for f in families)):
        for dim, count in zip(tensor.dims, tensor.counts, strict=True):
            if dim.startswith(f"{tensor.path}#"):
                given.setdefault(dim, count)
