"""Formats of checkpoints, one folder each: everything of a format is in its folder. `ucpl.registry` finds them."""
