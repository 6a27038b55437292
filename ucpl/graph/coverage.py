"""Is every element of every tensor on a side, once? Told from the boxes that were chosen, which share nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ucpl.columns import I64
from ucpl.errors import Label, fail
from ucpl.graph.copies import Chosen
from ucpl.graph.lacking import line_to_write
from ucpl.graph.rows import Rows
from ucpl.graph.side import Side
from ucpl.layout.fills import PARAMETER
from ucpl.regions import element_name
from ucpl.regions.boxes import subtract

__all__ = ["covered"]


def covered(
    state: str,
    wanted: frozenset[str],
    found: tuple[Rows, Chosen],
    side: Side,
    code: str,
    where: str,
    gaps: Mapping[str, Iterable[tuple[I64, I64]]] | None = None,
) -> None:
    """Every element of every wanted tensor is in the primary boxes (or is reduced, or is filled), which are disjoint.

    `gaps`: boxes of tensors that are filled. Raises E308, E309.
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
        tensor = side.named.tensors[path]
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
            else f"what the source never had is filled: {line_to_write(state, path, frozenset(PARAMETER))}",
        )
