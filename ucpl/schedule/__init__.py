"""Schedule: a graph as an ordered, saved plan.

`order` is the verb of this room.
"""

from ucpl.schedule.binding import Bound, Files, bound
from ucpl.schedule.files import load_plan, plan_bytes, save_plan
from ucpl.schedule.order import order, structure_digest, structure_of
from ucpl.schedule.plan import Origin, Plan, Tally
from ucpl.schedule.runs import Runs
from ucpl.schedule.text import summary

__all__ = [
    "Bound",
    "Files",
    "Origin",
    "Plan",
    "Runs",
    "Tally",
    "bound",
    "load_plan",
    "order",
    "plan_bytes",
    "save_plan",
    "structure_digest",
    "structure_of",
    "summary",
]
