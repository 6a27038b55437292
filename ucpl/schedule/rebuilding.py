"""A plan from a vault: what is made of others, or of gradients, is a node of its own before what takes from it.

The moves stay as they are: what is read is what was there, whether it lies there or is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.columns.operations import Extract, Node, Read, Recompute, Reconstruct
from ucpl.extents import Key
from ucpl.records import frozen

if TYPE_CHECKING:  # who applies a saved plan looks at no loss
    import networkx as nx

    from ucpl.schedule.plan import Plan

__all__ = ["Losses", "Replays", "with_rebuilt", "with_replayed"]

Place = tuple[str, Key]  # file, key


@frozen
class Losses:
    """What is lost of a source: of each stored tensor bytes by domain, and the domains that each is made of."""

    bytes_of: Mapping[Place, Mapping[int, int]]  # -> domain -> bytes
    others: Mapping[int, tuple[int, ...]]  # domain that is lost -> domains of its set that are there
    scheme: str
    times: int  # bytes of others that are read for each


@frozen
class Replays:
    """What a source has gradients of alone: of each stored tensor the bytes that steps make, and those of its gradients."""

    bytes_of: Mapping[Place, tuple[int, int]]
    steps: int
    optimizer: str


def with_rebuilt(plan: Plan, losses: Losses) -> Plan:
    """Each Read of stored tensors that lost bytes is followed by a Reconstruct, which its Extracts need.

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

    return _with(plan, made)


def with_replayed(plan: Plan, replays: Replays) -> Plan:
    """Each Read of stored tensors that steps make is followed by a Recompute, as those that lost bytes by a Reconstruct.

    before: Read ─► Reconstruct ─► Extract     after: Read ─► Reconstruct ─► Recompute ─► Extract
    """

    def made(read: Read, places: set[Place]) -> Recompute | None:
        some = [replays.bytes_of[place] for place in places if place in replays.bytes_of]
        if not some:
            return None
        size, gradients = (sum(one) for one in zip(*some, strict=True))
        return Recompute(read.label, read.state, size, replays.steps, gradients, replays.optimizer)

    return _with(plan, made)


def _with(plan: Plan, make: Callable[[Read, set[Place]], Node | None]) -> Plan:
    """What is made of a Read, and of the places of its stored tensors, stands before what is extracted of it."""
    import networkx as nx

    sources = plan.sources
    made: dict[Node, Node] = {}  # by what stands before it
    for node in plan.nodes:
        if isinstance(node, Read):
            one = make(node, {(t.file, t.key) for t in sources[node.first : node.last]})
            if one is not None:
                before = next((n for n in plan.net.successors(node) if isinstance(n, Reconstruct)), node)
                made[before] = one
    if not made:
        return plan
    net: nx.DiGraph[Node] = nx.DiGraph()
    for node in plan.nodes:  # in their order, which decides between nodes that might run in any
        net.add_node(node)
        if node in made:
            net.add_edge(node, made[node])
    for one, other in plan.net.edges:
        net.add_edge(made.get(one, one) if isinstance(other, Extract) else one, other)
    return evolve(plan, net=net)
