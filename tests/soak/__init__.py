"""Conversions at random that are killed, go on, and meet damage.

Nothing is lost, and nothing passes in silence.
"""
