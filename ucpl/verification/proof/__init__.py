"""Proofs of finished graphs from both placements, independent of the planner's code."""
