"""Processes of one job that run a plan together.

They find each other, and detect failed and dead ranks.
"""

from ucpl.ranks.job import member

__all__ = ["member"]
