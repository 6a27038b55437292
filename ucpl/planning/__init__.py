"""Schedule: a graph as an ordered, saved plan.

`order` is the verb of this room.
"""

from ucpl.planning.binding import Bound, BoundFiles, CarriedBox, bound
from ucpl.planning.order import order, recipe_of, structure_digest, structure_of
from ucpl.planning.plan import ClosedText, Origin, Passed, Plan, Recipe, Tally
from ucpl.planning.runs import Runs
from ucpl.planning.text import summary

__all__ = [
    "Bound",
    "CarriedBox",
    "ClosedText",
    "BoundFiles",
    "Origin",
    "Passed",
    "Plan",
    "Recipe",
    "Runs",
    "Tally",
    "bound",
    "order",
    "recipe_of",
    "structure_digest",
    "structure_of",
    "summary",
]
