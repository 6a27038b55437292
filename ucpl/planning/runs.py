"""Moves between single stored tensors, as the runtime binds them to bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from attrs import evolve, field
from numpy.typing import NDArray

from ucpl.extents import Shelves
from ucpl.records import frozen
from ucpl.tables import I64, Bools, Moves, Space, widened
from ucpl.tables.operations import Check, Digits, Extract, Kind, Lane, Merge, Node, Read, Reduce, Scale, Split, Write

if TYPE_CHECKING:  # a reader of headers alone does not wait for it
    import networkx as nx

__all__ = ["Runs", "sole"]

I32 = NDArray[np.int32]
_NARROW = ("tensor", "source", "target", "source_offset", "target_offset", "node")
_WIDE = {"shape": 1, "source_stride": 1, "target_stride": 1}


@frozen(eq=False)
class Runs:
    """Strided moves of one kind; row i moves `shape[i]` elements.

    Element (j0, j1, ...) of the box is at `source_offset[i] + sum(j * source_stride[i])` of the source tensor and at
    `target_offset[i] + sum(j * target_stride[i])` of the target tensor; positions count elements of a stored tensor
    in row-major order of its own shape. Dims are ordered by falling target stride and are merged as far as both sides
    allow, so that most rows are one contiguous run (D = 1, strides 1). Unused trailing dims have size 1.

    kind `copy`: the value is written there. `check`: a declared copy of the value that a `copy` row writes to the
    same target place: it must be equal and is not written. `mean`, `sum`: all rows of a target place are accumulated
    in fp64 (fp32 for 16-bit sources is widened, too), in order of `source` index, and rounded once; of rows whose
    ranks have the same coordinates along the axes of `over` the first is taken, and the others must equal it.
    `scale`: a factor of the value that is there already, in fp32, rounded once; dims along which one factor holds
    have source stride 0.
    """

    kind: Kind
    state: str
    tensor: I32  # (N,) index into Plan.tensors: for messages
    source: I32  # (N,) index into Plan.sources
    target: I32  # (N,) index into Plan.targets
    shape: I64 = field()  # (N, D)
    source_offset: I64 = field()  # (N,)
    source_stride: I64 = field()  # (N, D)
    target_offset: I64 = field()  # (N,)
    target_stride: I64 = field()  # (N, D)
    source_value: tuple[float, float] = (1.0, 0.0)  # stored = a * x + b on the source's side
    target_value: tuple[float, float] = (1.0, 0.0)  # and on the target's
    lossy: bool = False  # a rounding cast was asked for (or is a derivation)
    over: Digits = ()
    # (N,) index into Plan.nodes: the Merge, Derive, Reduce or Check that each move is of; -1: of none yet
    node: I32 = field()
    half: Literal["", "low", "high"] = ""  # of the source's bytes, if each has two elements and offsets count bytes

    @node.default
    def _of_none(self) -> I32:
        return np.full(len(self.source), -1, np.int32)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def elements(self) -> int:
        return int(self.shape.prod(axis=1).sum()) if len(self) else 0

    @staticmethod
    def joined(runs: Sequence[Runs]) -> Runs:
        """Several of one kind as one, in the order of the target."""
        width = max(r.shape.shape[1] for r in runs)

        def wide(name: str) -> I64:
            arrays = [getattr(r, name) for r in runs]
            return np.concatenate([widened(a, width, _WIDE[name]) for a in arrays])

        columns = {n: np.concatenate([getattr(r, n) for r in runs]) for n in _NARROW} | {n: wide(n) for n in _WIDE}
        order = np.lexsort((columns["source"], columns["target_offset"], columns["target"]))
        return runs[0].replace(**{n: a[order] for n, a in columns.items()})

    def take(self, rows: I64 | Bools) -> Runs:
        """Some of the moves."""
        return self.replace(**{n: getattr(self, n)[rows] for n in (*_NARROW, *_WIDE)})

    def of_kind(self, kind: Kind) -> Runs:
        return evolve(self, kind=kind)

    def replace(self, **columns: NDArray[np.integer]) -> Runs:
        """The same moves with other values in some columns."""
        return evolve(self, **columns)  # type: ignore[arg-type]

    def table(self, spaces: tuple[Space, Space]) -> Moves:
        """The same boxes as a node owns them, in a space."""
        return Moves(
            self.tensor.astype(np.int64),
            spaces[0].address(self.source.astype(np.int64), self.source_offset),
            spaces[1].address(self.target.astype(np.int64), self.target_offset),
            self.shape,
            self.source_stride,
            self.target_stride,
        )


def sole(moves: Sequence[Runs], sources: Shelves, targets: Shelves, spaces: tuple[Space, Space]) -> nx.DiGraph[Node]:
    """A graph of moves by tensor: one node per operation and move."""
    import networkx as nx

    net: nx.DiGraph[Node] = nx.DiGraph()
    read, write = Read("all", "", 0, len(sources)), Write("all", "", 0, len(targets))
    net.add_nodes_from((read, write))
    for m in moves:
        lanes = (Lane(m.state, m.state),)
        table = m.table(spaces)
        extract = Extract("all", lanes, table.source_side, m.source_value)
        nx.add_path(net, (read, extract))
        if m.kind == "check":
            nx.add_path(net, (extract, Check("all", lanes, table.target_side, m.target_value, m.lossy), write))
            continue
        way: Merge | Reduce | Scale
        match m.kind:
            case "mean" | "sum" | "max":
                way = Reduce("all", lanes, m.kind, m.over)
            case "scale":
                way = Scale("all", lanes)
            case _:
                way = Merge("all", lanes)
        nx.add_path(net, (extract, way, Split("all", lanes, table.target_side, m.target_value, m.lossy), write))
    return net
