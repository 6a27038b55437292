"""Conversions at random that are killed, go on, and meet damage: nothing is lost, and nothing passes in silence."""
