"""The schedule: a graph as an ordered, saved plan. `order` is the verb of this room."""

from ucpl.schedule.order import order, structure_digest, structure_of
from ucpl.schedule.plan import Moves, Origin, Plan

__all__ = ["Moves", "Origin", "Plan", "order", "structure_digest", "structure_of"]
