"""Random conversions that are killed, resume, and meet damage.

Nothing is lost, and nothing passes in silence.
"""
