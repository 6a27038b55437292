"""Order of the nodes of a graph, compared with networkx's own."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from ucpl.tables.net import Net


@pytest.mark.parametrize("seed", range(4))
def test_each_follows_what_it_needs_and_of_those_that_are_free_the_first_is_next(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        nodes = [object() for _ in range(rng.randrange(1, 30))]
        net: Net[object] = Net()
        net.add_nodes_from(rng.sample(nodes, len(nodes)))
        for _ in range(rng.randrange(2 * len(nodes))):
            a, b = sorted(rng.choices(range(len(nodes)), k=2))
            if a != b:
                net.add_edge(nodes[a], nodes[b])
        number = {node: i for i, node in enumerate(net)}
        assert net.in_order() == list(nx.lexicographical_topological_sort(net.digraph(), key=number.__getitem__))


def test_nodes_that_need_each_other_have_no_order() -> None:
    net = Net([("a", "b"), ("b", "c"), ("c", "b")])
    with pytest.raises(ValueError, match="need each other"):
        net.in_order()


@pytest.mark.parametrize("seed", range(4))
def test_a_net_is_what_networkx_makes_of_the_same_steps(seed: int) -> None:
    """Nodes, edges and neighbours are in the same order."""
    rng = random.Random(seed)
    net: Net[int] = Net()
    peer: nx.DiGraph[int] = nx.DiGraph()
    for _ in range(150):
        a, b, step = rng.randrange(20), rng.randrange(20), rng.random()
        if step < 0.2 and a in net:
            net.remove_node(a)
            peer.remove_node(a)
        elif step < 0.3:
            net, peer = net.changed(lambda n: n ^ 1), nx.relabel_nodes(peer, lambda n: n ^ 1)
        else:
            net.add_edge(a, b)
            peer.add_edge(a, b)
        assert list(net) == list(peer) and list(net.edges) == list(peer.edges) and len(net) == len(peer)
        assert all(net.predecessors(n) == (*peer.predecessors(n),) for n in peer)
        assert all(net.successors(n) == (*peer.successors(n),) for n in peer)
    made = net.digraph()
    assert nx.utils.graphs_equal(made, peer) and list(made) == list(peer) and list(made.edges) == list(peer.edges)
