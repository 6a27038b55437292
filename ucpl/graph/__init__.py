"""The dependency graph: extract, merge, split.

`build` is the verb of this room.
"""

from ucpl.graph.build import build, drawn, in_step
from ucpl.graph.graph import Graph
from ucpl.graph.passes import PASSES, optimise

__all__ = ["PASSES", "Graph", "build", "drawn", "in_step", "optimise"]
