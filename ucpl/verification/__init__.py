"""Verification: proofs of graphs, and checks of layouts and checkpoints against each other."""
