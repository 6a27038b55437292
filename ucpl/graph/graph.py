"""The dependency graph: networkx carries it, nodes own their tables.

It describes the stored tensors of both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import networkx as nx
from attrs import evolve

from ucpl.extents import Shelves
from ucpl.graph.rows import StoredBoxes
from ucpl.placement import Placement
from ucpl.records import frozen
from ucpl.tables import I64, Moves, Space
from ucpl.tables.operations import Digits, Flow, Node, Read, Write, flows, net_text
from ucpl.tables.table import column

__all__ = ["Drawn", "Graph", "JoinedMoves", "Joint", "AlikeLines", "Lanes", "SourceBoxes", "TargetBoxes"]


@frozen(slots=False)
class Lanes:
    """One state of a join: target, source, and parts of both sides."""

    state: str
    origin: str
    sources: tuple[int, ...]  # parts of the source
    targets: tuple[int, ...]  # parts of the target

    @cached_property
    def of_source(self) -> dict[int, int]:
        """Place of each part of the source among them.

        Part n of the first lane is part n of the others.
        """
        return {part: n for n, part in enumerate(self.sources)}

    @cached_property
    def of_target(self) -> dict[int, int]:
        return {part: n for n, part in enumerate(self.targets)}


@frozen(eq=False)
class AlikeLines:
    """Tensors that are stored as a first one is.

    Each is alone in a part of either side: their moves are its moves, elsewhere.
    """

    first: tuple[int, int]  # the first one's parts, of source and target
    tensors: I64  # (N,)
    sources: I64  # (N,) parts
    targets: I64  # (N,) parts


@frozen(eq=False)
class SourceBoxes:
    """Boxes of one source part, as logical elements.

    They become an Extract when both sides are joined.
    """

    part: int
    label: str
    boxes: StoredBoxes

    def __str__(self) -> str:
        return f"extract {self.label}: {len(self.boxes):,} boxes, {int(self.boxes.volume.sum()):,} elements"


@frozen(eq=False)
class TargetBoxes:
    """Boxes of one target part, as logical elements.

    They become a Split when both sides are joined.
    """

    part: int
    label: str
    boxes: StoredBoxes
    firsts: StoredBoxes  # of those, each element once: declared copies of the source are checked there

    def __str__(self) -> str:
        return f"split   {self.label}: {len(self.boxes):,} boxes, {int(self.boxes.volume.sum()):,} elements"


@frozen(eq=False)
class JoinedMoves(Moves):
    """Moves that know the parts that they are from and for."""

    source_part: I64 = column()
    target_part: I64 = column()


@frozen(eq=False)
class Joint:
    """Meeting of boxes of both sides.

    It has every element once (copy), its copies (check, mean, sum), or the scales of its blocks. `moves` once joined.
    `scaled`: merged values are scaled afterwards.
    """

    kind: str
    lanes: tuple[Lanes, ...]
    derived: bool
    alike: tuple[AlikeLines, ...] = ()
    over: Digits = ()  # of a mean or sum: the axes along which its members differ
    moves: JoinedMoves | None = None
    scaled: bool = False

    def __str__(self) -> str:
        states = ", ".join(lane.state for lane in self.lanes)
        what = "" if self.moves is None else f": {len(self.moves):,} boxes, {self.moves.elements:,} elements"
        return f"{'merge' if self.kind == 'copy' else self.kind:<7} {states}{what}"


Drawn = Node | SourceBoxes | Joint | TargetBoxes


@frozen(eq=False)
class Graph:
    """A graph over two placements.

    `spaces` are those of the addresses in its tables.
    """

    source: Placement
    target: Placement
    net: nx.DiGraph[Drawn]
    sources: Shelves
    targets: Shelves
    spaces: tuple[Space, Space]
    reads: dict[int, Read]  # by part of the source
    writes: dict[int, Write]  # by part of the target
    derived: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    used: frozenset[tuple[str, str]] = frozenset()  # (tensor, state) of the source that something is made of
    filled: tuple[str, ...] = ()  # elements that `fill` lines give, since the source lacks them

    @property
    def joints(self) -> list[Joint]:
        return [n for n in self.net if isinstance(n, Joint)]

    @property
    def flows(self) -> tuple[Flow, ...]:
        """Every way of elements from source to target, after all passes."""
        return tuple(flows(self.net))

    def with_joints(self, change: Callable[[Joint], Joint]) -> Graph:
        """The graph with other joints in the same places."""
        here = {node: change(node) if isinstance(node, Joint) else node for node in self.net}
        net: nx.DiGraph[Drawn] = nx.DiGraph()
        net.add_nodes_from(here.values())
        net.add_edges_from((here[a], here[b]) for a, after in self.net.adj.items() for b in after)
        return evolve(self, net=net)

    def with_moves(self, change: Callable[[JoinedMoves], JoinedMoves]) -> Graph:
        """The graph with other moves in its joints."""
        return self.with_joints(lambda j: j if j.moves is None else evolve(j, moves=change(j.moves)))

    def __str__(self) -> str:
        return net_text(self.net)
