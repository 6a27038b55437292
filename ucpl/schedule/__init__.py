"""The schedule: a graph as an ordered, saved plan. `order` is the verb of this room."""

from ucpl.schedule.files import load_plan, plan_bytes, plan_digest, save_plan
from ucpl.schedule.order import order, structure_digest, structure_of
from ucpl.schedule.plan import Origin, Plan, Runs, Tally
from ucpl.schedule.text import summary

__all__ = [
    "Origin",
    "Plan",
    "Runs",
    "Tally",
    "load_plan",
    "order",
    "plan_bytes",
    "plan_digest",
    "save_plan",
    "structure_digest",
    "structure_of",
    "summary",
]
