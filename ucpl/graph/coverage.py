"""Coverage: both sides' model, and every element of it once.

The chosen boxes of a side show it; they share nothing: `graph.copies` makes them disjoint, and here volumes are added.
`verification.proof.coverage` proves the same again from the finished moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath

import numpy as np

from ucpl.errors import Label, fail
from ucpl.graph.copies import Chosen
from ucpl.graph.missing_elements import line_to_write
from ucpl.graph.rows import StoredBoxes
from ucpl.graph.side import GraphSide
from ucpl.layout import LogicalTensor
from ucpl.layout.brackets import Indices
from ucpl.layout.by_index import whole_name
from ucpl.layout.fills import PARAMETER
from ucpl.layout.name_remedies import for_dropped
from ucpl.layout.scope import at
from ucpl.placement import Placement, element_name
from ucpl.placement.boxes import overlaps, subtract
from ucpl.tables import I64

__all__ = ["covered", "supplied", "check_drops", "check_models"]

SHOWN = 6  # indices that a message lists


def check_drops(source: Placement, drop: tuple[str, ...]) -> None:
    """Every name to be dropped is one of the source's. E300."""
    held = {p.state for p in source.parts}
    for name in drop:
        known = held | set(source.tensors) | set(map(whole_name, source.tensors)) | set(source.layout.aliases)
        if name not in known and not any(s.name == name for s in source.layout.states):
            fail(
                "E300",
                f"--drop {name}: no tensor or state of that name",
                Label("<command line>", where=f"--drop {name}"),
                remedy=for_dropped(name, sorted(held), list(source.tensors)),
            )


def check_models(source: Placement, target: Placement, drop: set[str]) -> None:
    """Check that both sides have one model and the same tensors.

    E301, E302, E319.
    """
    here, there = source.layout, target.layout
    if here.model_name == there.model_name and here.model_arguments and there.model_arguments:
        if here.model_call != there.model_call and not there.fillings:  # else a tensor says if it has grown
            fail(
                "E319",
                f"the source is of {here.model_call}, the target of {there.model_call}",
                Label(here.call, where="source"),
                Label(there.call, where="target"),
            )
    _check_tensors(source, target, drop)


def _for_absent(path: str, source: Placement, target: Placement) -> str:
    """Remedy for a tensor of the target that the source's model lacks."""
    if {*source.layout.tensors}.isdisjoint(target.layout.tensors):  # names of two dialects
        file = PurePath(target.layout.tensors[path].span.file).name or "FILE.ucpl"
        return f"the names of source and target differ: give the source's, as in --from {file}:hf"
    fill = line_to_write("weight", path, frozenset({"weight"}))
    return f"source and target must be layouts of one model; fill new tensors: {fill}"


def _check_tensors(source: Placement, target: Placement, drop: set[str]) -> None:
    ours = source.layout.tensors
    filled = {path for line in target.layout.fillings if line.states is None for path in line.names}
    for path, tensor in target.layout.tensors.items():
        other = ours.get(path)
        if other is not None and (other.counts, other.dims, other.indices) == (
            tensor.counts,
            tensor.dims,
            tensor.indices,
        ):
            continue
        there = at(tensor.span, "target") if tensor.span.line else Label(target.layout.call, where=path)
        if other is None:
            if path in drop or path in filled:
                continue
            fail(
                "E301",
                f"the target stores `{path}`, which the source's model lacks",
                at(tensor.span) if tensor.span.line else there,
                remedy=_for_absent(path, source, target),
            )
        if path in filled and _grows(other, tensor):
            continue
        named = all("#" not in d for d in (*tensor.dims, *other.dims))
        if other.counts != tensor.counts or (named and (other.dims, other.indices) != (tensor.dims, tensor.indices)):
            fail(
                "E302",
                f"`{path}` is {_shape(other)} in the source and {_shape(tensor)} in the target",
                at(other.span, "source") if other.span.line else Label(source.layout.call, where=path),
                there,
                remedy=f"fill the elements by which it has grown: {line_to_write('weight', path, frozenset({'weight'}))}"
                if _grows(other, tensor)
                else "",
            )


def _grows(old: LogicalTensor, new: LogicalTensor) -> bool:
    """True if a tensor is the other one, extended along some dims."""
    if len(old.counts) != len(new.counts):
        return False
    named = all("#" not in d for d in (*old.dims, *new.dims))
    begins = all(len(a) <= len(b) and b[: len(a)] == a for a, b in zip(old.indices, new.indices, strict=True))
    return begins and (not named or old.dims == new.dims)


def _shape(tensor: LogicalTensor) -> str:
    """`[l=2 (3, 5), h=8]`: dims, with the indices if only some are there."""
    return "[" + ", ".join(map(_side, tensor.dims, tensor.counts, tensor.indices)) + "]"


def _side(dim: str, count: int, indices: Indices) -> str:
    shown = str(count) if "#" in dim else f"{dim}={count}"
    if indices == range(count):
        return shown
    first = ", ".join(map(str, indices[:SHOWN]))
    return f"{shown} ({first}{', ...' if count > SHOWN else ''})"


def covered(
    state: str,
    wanted: frozenset[str],
    found: tuple[StoredBoxes, Chosen],
    side: GraphSide,
    code: str,
    where: str,
    gaps: Mapping[str, Iterable[tuple[I64, I64]]] | None = None,
) -> None:
    """Check that primary boxes have every element of every wanted tensor.

    Elements may be reduced or filled, too; boxes are disjoint. `gaps`: boxes of tensors that are filled. Raises E308,
    E309.
    """
    rows, chosen = found
    common = {path: i for i, path in enumerate(side.names)}
    k = rows.width
    held = np.zeros(len(common), dtype=np.int64)
    np.add.at(held, chosen.primary.tensor, chosen.primary.volume)
    if len(chosen.reduced):
        reduced = np.concatenate([chosen.reduced.tensor[:, None], chosen.reduced.low, chosen.reduced.high], axis=1)
        boxes = np.unique(reduced, axis=0)
        np.add.at(held, boxes[:, 0], (boxes[:, k + 1 :] - boxes[:, 1 : k + 1]).prod(axis=1))
    for path, filled in (gaps or {}).items():
        held[common[path]] += sum(int((high - low).prod()) for low, high in filled)
    for path in sorted(wanted, key=lambda p: common[p]):
        tensor = side.named.placed[path].of(state)
        if held[common[path]] == tensor.numel:
            continue
        mine = rows.take(rows.tensor == common[path])
        whole_low, whole_high = np.zeros(k, dtype=np.int64), np.ones(k, dtype=np.int64)
        whole_high[: len(tensor.counts)] = tensor.counts
        left = subtract(whole_low, whole_high, mine.low, mine.high)
        missing = int(sum((b - a).prod() for a, b in left))
        first = element_name(side.named, path, tuple(left[0][0].tolist())) if left else "beyond its shape"
        fail(
            code,
            f"{missing} element{'' if missing == 1 else 's'} of {state} of `{path}` {'is' if missing == 1 else 'are'}"
            f" nowhere in the {where},"
            f" the first {first}",
            Label(side.placement.layout.call, where, where=f"{path}/{state}"),
            remedy=""
            if gaps is None
            else f"fill elements that the source never had: {line_to_write(state, path, frozenset(PARAMETER))}",
        )


def supplied(
    state: str,
    found: tuple[StoredBoxes, Chosen],
    asked: StoredBoxes,
    side: GraphSide,
    gaps: Mapping[str, Iterable[tuple[I64, I64]]] | None = None,
) -> None:
    """Check that every element of `asked` has a source.

    `asked` is disjoint boxes of one rank. An element is in the primary boxes, reduced, or filled. Raises E308.
    """
    rows, chosen = found
    k = rows.width
    common = {path: i for i, path in enumerate(side.names)}
    held = np.concatenate([_numbered(chosen.primary), np.unique(_numbered(chosen.reduced), axis=0)])
    filled = [[common[path], *low, *high] for path, boxes in (gaps or {}).items() for low, high in boxes]
    held = np.concatenate([held, np.array(filled, dtype=np.int64).reshape(len(filled), 2 * k + 1)])
    j, i = overlaps(asked.tensor, asked.low, asked.high, held[:, 0], held[:, 1 : k + 1], held[:, k + 1 :])
    both = np.minimum(asked.high[j], held[i, k + 1 :]) - np.maximum(asked.low[j], held[i, 1 : k + 1])
    volume = np.zeros(len(asked), dtype=np.int64)
    np.add.at(volume, j, both.prod(axis=1))
    short = np.flatnonzero(volume != asked.volume)
    if not len(short):
        return
    row = int(short[0])
    mine = rows.take(rows.tensor == asked.tensor[row])
    left = subtract(asked.low[row], asked.high[row], mine.low, mine.high)
    path = side.names[int(asked.tensor[row])]
    missing = int((asked.volume[short] - volume[short]).sum())
    first = element_name(side.named, path, tuple((left[0][0] if left else asked.low[row]).tolist()))
    fail(
        "E308",
        f"{missing} element{'' if missing == 1 else 's'} of {state} that this rank holds"
        f" {'is' if missing == 1 else 'are'} nowhere in the source, the first {first}",
        Label(side.placement.layout.call, "source", where=f"{path}/{state}"),
        remedy=f"fill elements that the source never had: {line_to_write(state, path, frozenset(PARAMETER))}",
    )


def _numbered(rows: StoredBoxes) -> I64:
    """(N, 2 K + 1): tensor, low and high of each box."""
    out: I64 = np.concatenate([rows.tensor[:, None], rows.low, rows.high], axis=1)
    return out
