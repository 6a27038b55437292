"""Coverage: every element of every tensor is there once.

The chosen boxes of a side show it; they share nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ucpl.errors import Label, fail
from ucpl.graph.copies import Chosen
from ucpl.graph.missing_elements import line_to_write
from ucpl.graph.rows import StoredBoxes
from ucpl.graph.side import GraphSide
from ucpl.layout.fills import PARAMETER
from ucpl.placement import element_name
from ucpl.placement.boxes import overlaps, subtract
from ucpl.tables import I64

__all__ = ["covered", "supplied"]


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
