"""Proof of a finished graph, from both placements, without the code that made the graph."""
