"""Order of the nodes of a graph, compared with networkx's own."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from ucpl.tables.operations import in_order


@pytest.mark.parametrize("seed", range(4))
def test_each_follows_what_it_needs_and_of_those_that_are_free_the_first_is_next(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        nodes = [object() for _ in range(rng.randrange(1, 30))]
        net: nx.DiGraph[object] = nx.DiGraph()
        net.add_nodes_from(rng.sample(nodes, len(nodes)))
        for _ in range(rng.randrange(2 * len(nodes))):
            a, b = sorted(rng.choices(range(len(nodes)), k=2))
            if a != b:
                net.add_edge(nodes[a], nodes[b])
        number = {node: i for i, node in enumerate(net)}
        assert in_order(net) == list(nx.lexicographical_topological_sort(net, key=number.__getitem__))


def test_nodes_that_need_each_other_have_no_order() -> None:
    net: nx.DiGraph[str] = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "b")])
    with pytest.raises(ValueError, match="need each other"):
        in_order(net)
