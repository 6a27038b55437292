"""Processes of one job that run a plan together: how they find each other, and how they know that all are there still."""

from ucpl.ranks.job import member

__all__ = ["member"]
