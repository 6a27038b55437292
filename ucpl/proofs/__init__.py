"""Proofs: does a layout fit a checkpoint, is a plan complete, do two checkpoints hold the same, is one sound."""
