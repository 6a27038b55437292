"""A plan from a vault: nodes for rebuilt and replayed values.

Such a node comes before its consumers. The moves stay as they are: they read the same values, stored or rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ucpl.extents import Key
from ucpl.records import frozen
from ucpl.tables.operations import Extract, Node, Read, Recompute, Reconstruct, in_order

if TYPE_CHECKING:  # who applies a saved plan looks at no loss
    import networkx as nx

    from ucpl.extents import Shelves

__all__ = ["Losses", "Replays", "with_rebuilt", "with_replayed"]

Place = tuple[str, Key]  # file, key


@frozen
class Losses:
    """Lost bytes of a source by domain, and the sources of each.

    By stored tensor.
    """

    bytes_of: Mapping[Place, Mapping[int, int]]  # -> domain -> bytes
    others: Mapping[int, tuple[int, ...]]  # domain that is lost -> domains of its set that are there
    scheme: str
    times: int  # bytes of others that are read for each


@frozen
class Replays:
    """Tensors that a source has as gradients alone.

    By stored tensor: the bytes that steps compute, and those of the gradients.
    """

    bytes_of: Mapping[Place, tuple[int, int]]
    steps: int
    optimizer: str


def with_rebuilt(net: nx.DiGraph[Node], sources: Shelves, losses: Losses) -> nx.DiGraph[Node]:
    """Add a Reconstruct after each Read of tensors with lost bytes.

    The Extracts of the Read depend on it.

    before: Read ─► Extract     after: Read ─► Reconstruct ─► Extract
    """

    def made(read: Read, places: set[Place]) -> Reconstruct | None:
        lost: dict[int, int] = {}
        for place in places:
            for domain, size in losses.bytes_of.get(place, {}).items():
                lost[domain] = lost.get(domain, 0) + size
        if not lost:
            return None
        others = sorted({d for domain in lost for d in losses.others[domain]})
        return Reconstruct(
            read.label, read.state, sum(lost.values()), tuple(sorted(lost)), tuple(others), losses.scheme, losses.times
        )

    return _with(net, sources, made)


def with_replayed(net: nx.DiGraph[Node], sources: Shelves, replays: Replays) -> nx.DiGraph[Node]:
    """Add a Recompute after each Read of tensors that steps compute.

    As `with_rebuilt` adds a Reconstruct.

    before: Read ─► Reconstruct ─► Extract     after: Read ─► Reconstruct ─► Recompute ─► Extract
    """

    def made(read: Read, places: set[Place]) -> Recompute | None:
        some = [replays.bytes_of[place] for place in places if place in replays.bytes_of]
        if not some:
            return None
        size, gradients = (sum(one) for one in zip(*some, strict=True))
        return Recompute(read.label, read.state, size, replays.steps, gradients, replays.optimizer)

    return _with(net, sources, made)


def _with(net: nx.DiGraph[Node], sources: Shelves, make: Callable[[Read, set[Place]], Node | None]) -> nx.DiGraph[Node]:
    """Add a node between a Read and its Extracts.

    make: the node, from the Read and the places of its stored tensors.
    """
    import networkx as nx

    stored = sources.each
    nodes = list(in_order(net))
    made: dict[Node, Node] = {}  # by the node before it
    for node in nodes:
        if isinstance(node, Read):
            one = make(node, {(t.file, t.key) for t in stored[node.first : node.last]})
            if one is not None:
                before = next((n for n in net.successors(node) if isinstance(n, Reconstruct)), node)
                made[before] = one
    if not made:
        return net
    out: nx.DiGraph[Node] = nx.DiGraph()
    for node in nodes:  # in their order, which decides between nodes that might run in any
        out.add_node(node)
        if node in made:
            out.add_edge(node, made[node])
    for one, other in net.edges:
        out.add_edge(made.get(one, one) if isinstance(other, Extract) else one, other)
    return out
