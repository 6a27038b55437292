"""A start without networkx's algorithms: an import of them is as before."""

from __future__ import annotations

import pytest

from tests.cli.command import FIXTURES, alone

SHORT = "from ucpl.cli.short_networkx import put_off_algorithms\nput_off_algorithms()\n"
COUNT = """
import sys
import networkx as nx
def count(): return sum(name.startswith("networkx.algorithms.") for name in sys.modules)
net = nx.DiGraph()
nx.add_path(net, (1, 2))
assert [*nx.relabel_nodes(net, {1: 3})] == [3, 2] and count() == 0
"""
NAMES = "\nimport networkx\nprint(*sorted(name for name in vars(networkx) if not name.startswith('__')))"


@pytest.mark.parametrize(
    "use",
    [
        "assert list(nx.topological_sort(nx.DiGraph([(2, 3), (1, 2)]))) == [1, 2, 3]",
        "from networkx.algorithms import bipartite",
        "assert nx.algorithms.dag.topological_sort is nx.topological_sort",
        "import networkx.algorithms.dag as dag; assert dag.topological_sort is nx.topological_sort",
        "import networkx.algorithms as every; assert every.dag.topological_sort is nx.topological_sort",
        "from networkx.generators import *; assert path_graph(3).size() == 2",
        "from networkx.convert_matrix import to_numpy_array as made; assert made is nx.to_numpy_array",
    ],
)
def test_each_use_of_an_algorithm_finds_the_names_of_a_complete_import(use: str) -> None:
    short, complete = alone(code=f"{SHORT}{COUNT}{use}\nassert count()\nnx.draw{NAMES}"), alone(code=NAMES)
    assert (short.status, short.err) == (complete.status, "") and short.out == complete.out


def test_an_unknown_name_is_an_attribute_error() -> None:
    done = alone(code=f"{SHORT}{COUNT}nx.no_such_name")
    assert "AttributeError: module 'networkx' has no attribute 'no_such_name'" in done.err


def test_a_plan_is_made_without_algorithms() -> None:
    code = "import sys\nfrom ucpl.cli import main\nstatus = main()\nassert 'networkx' in sys.modules\n"
    code += "sys.exit(status or int(any(name.startswith('networkx.algorithms.') for name in sys.modules)))"
    done = alone("plan", "--from", FIXTURES / "z1_dp4", "--to", "zero3(dp=3)", code=code)
    assert done.status == 0, done.err
