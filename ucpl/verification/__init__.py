"""Proofs of graphs, and checks of layouts and checkpoints."""
