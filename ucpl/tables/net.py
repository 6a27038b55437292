"""Nodes that depend on each other, as planning makes them.

Methods have networkx's names, and `digraph` is the same as a graph of networkx. It is made when a caller asks for it: the
import of networkx takes an eighth of a small conversion, in which no algorithm of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["N", "Net"]

N = TypeVar("N", bound=Hashable)


class Net(Generic[N]):
    """A directed graph.

    Its nodes, and the edges of each, are in the order in which they came.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, edges: Iterable[tuple[N, N]] = ()) -> None:
        self._after: dict[N, dict[N, None]] = {}
        self._before: dict[N, dict[N, None]] = {}
        self.add_edges_from(edges)

    def __iter__(self) -> Iterator[N]:
        return iter(self._after)

    def __len__(self) -> int:
        return len(self._after)

    def __contains__(self, node: object) -> bool:
        return node in self._after

    def add_node(self, node: N) -> None:
        if node not in self._after:
            self._after[node], self._before[node] = {}, {}

    def add_nodes_from(self, nodes: Iterable[N]) -> None:
        for node in nodes:
            self.add_node(node)

    def add_edge(self, one: N, other: N) -> None:
        """Let a node need another, which comes before it."""
        self.add_node(one)
        self.add_node(other)
        self._after[one][other] = self._before[other][one] = None

    def add_edges_from(self, edges: Iterable[tuple[N, N]]) -> None:
        for one, other in edges:
            self.add_edge(one, other)

    def add_path(self, *nodes: N) -> None:
        self.add_edges_from(pairwise(nodes))

    def remove_node(self, node: N) -> None:
        for other in self._after.pop(node):
            del self._before[other][node]
        for other in self._before.pop(node):
            del self._after[other][node]

    def remove_nodes_from(self, nodes: Iterable[N]) -> None:
        for node in nodes:
            self.remove_node(node)

    @property
    def edges(self) -> Iterator[tuple[N, N]]:
        return ((one, other) for one, after in self._after.items() for other in after)

    def predecessors(self, node: N) -> tuple[N, ...]:
        return tuple(self._before[node])

    def successors(self, node: N) -> tuple[N, ...]:
        return tuple(self._after[node])

    def changed(self, change: Callable[[N], N]) -> Net[N]:
        """The graph with other nodes in the same places."""
        here = {node: change(node) for node in self}
        net: Net[N] = Net()
        net.add_nodes_from(here.values())
        net.add_edges_from((here[one], here[other]) for one, other in self.edges)
        return net

    def in_order(self) -> list[N]:
        """Nodes in order: each follows those that it needs.

        Of those that are free, the one that joined the graph first comes first. Raises: ValueError if nodes need each
        other. (As networkx's `lexicographical_topological_sort`.)
        """
        nodes = list(self)
        number = {node: i for i, node in enumerate(nodes)}
        needs = [len(before) for before in self._before.values()]
        free = [n for n, count in enumerate(needs) if not count]  # ascending, and so a heap
        order = []
        while free:
            found = nodes[heappop(free)]
            order.append(found)
            for node in self._after[found]:
                n = number[node]
                needs[n] -= 1
                if not needs[n]:
                    heappush(free, n)
        if len(order) < len(nodes):
            raise ValueError("nodes of a graph need each other")
        return order

    def digraph(self) -> nx.DiGraph[N]:
        """The same as a graph of networkx."""
        import networkx as nx

        made: nx.DiGraph[N] = nx.DiGraph()
        made.add_nodes_from(self)
        made.add_edges_from(self.edges)
        return made
