"""Formats of checkpoints, one folder each, found by `ucpl.registry`."""
