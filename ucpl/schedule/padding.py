"""Padding of the target: which elements of which stored tensors a Fill fills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ucpl.columns import I64, Side, Space, gaps
from ucpl.columns.operations import Fill, Node, Split, Write
from ucpl.extents import Shelves

if TYPE_CHECKING:  # what reads headers alone does not wait for it
    import networkx as nx

__all__ = ["padded", "told"]


def told(net: nx.DiGraph[Node], targets: Shelves, space: Space) -> nx.DiGraph[Node]:
    """The graph whose Fills have their boxes: of each tensor that ends in padding, what no Split into it reaches."""
    import networkx as nx

    filled: dict[Node, Node] = {}
    homes, numel = padded(targets)
    for fill in net:
        if isinstance(fill, Fill) and not fill.lacking:
            (write,) = net.successors(fill)
            assert isinstance(write, Write)
            mine = slice(*np.searchsorted(homes, [write.first, write.last]).tolist())
            boxes = gaps(_reached(net, write, space), homes[mine], numel[mine], space)
            assert boxes.elements == fill.elements, f"{fill}: {boxes.elements} are open"
            filled[fill] = evolve(fill, boxes=boxes)
    return nx.relabel_nodes(net, filled) if filled else net


def padded(targets: Shelves) -> tuple[I64, I64]:
    """Numbers of the stored tensors that have padding, in order, and how many elements each has."""
    homes, numel = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for shelf, start in zip(targets.shelves, targets.starts.tolist(), strict=False):
        block = shelf.block
        at = np.flatnonzero(block.padding)
        homes.append((start + at[:, None] * block.choices + np.arange(block.choices)).reshape(-1))
        numel.append(np.repeat(block.shape[at].prod(axis=1), block.choices))
    return np.concatenate(homes), np.concatenate(numel)


def _reached(net: nx.DiGraph[Node], write: Write, space: Space) -> Side:
    """The boxes of all Splits into what is written there, and of the states that are stored like it; what is lacking."""
    lacking = [fill.boxes for fill in net.predecessors(write) if isinstance(fill, Fill) and fill.lacking]
    return Side.concat(
        lacking
        + [
            split.boxes.replace(offset=split.boxes.offset + lane.target * space.step)
            for split in net.predecessors(write)
            if isinstance(split, Split)
            for lane in split.lanes
        ]
    )
