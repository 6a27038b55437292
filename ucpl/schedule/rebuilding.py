"""A plan from a vault of which a part is lost: what is made of others is a node of its own, before what takes from it.

The moves stay as they are: what is read is what was saved, whether it lies there or is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.columns.operations import Extract, Node, Read, Reconstruct
from ucpl.extents import Key
from ucpl.records import frozen

if TYPE_CHECKING:  # who applies a saved plan looks at no loss
    import networkx as nx

    from ucpl.schedule.plan import Plan

__all__ = ["Losses", "with_rebuilt"]


@frozen
class Losses:
    """What is lost of a source: of each stored tensor bytes by domain, and the domains that each is made of."""

    bytes_of: Mapping[tuple[str, Key], Mapping[int, int]]  # (file, key) -> domain -> bytes
    others: Mapping[int, tuple[int, ...]]  # domain that is lost -> domains of its set that are there
    scheme: str
    times: int  # bytes of others that are read for each


def with_rebuilt(plan: Plan, losses: Losses) -> Plan:
    """Each Read of stored tensors that lost bytes is followed by a Reconstruct, which its Extracts need.

    before: Read ─► Extract     after: Read ─► Reconstruct ─► Extract
    """
    import networkx as nx

    sources = plan.sources
    made: dict[Node, Reconstruct] = {}
    for node in plan.nodes:
        if isinstance(node, Read):
            places = {(t.file, t.key) for t in sources[node.first : node.last]}
            lost: dict[int, int] = {}
            for place in places:
                for domain, size in losses.bytes_of.get(place, {}).items():
                    lost[domain] = lost.get(domain, 0) + size
            if lost:
                others = sorted({d for domain in lost for d in losses.others[domain]})
                made[node] = Reconstruct(
                    node.label, node.state, sum(lost.values()), tuple(sorted(lost)), tuple(others), losses.scheme,
                    losses.times,
                )  # fmt: skip
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
