"""The dependency graph: extract, merge, split. `build` is the verb of this room."""

from ucpl.graph.build import Batch, Graph, build
from ucpl.graph.fragments import PASSES

__all__ = ["PASSES", "Batch", "Graph", "build"]
