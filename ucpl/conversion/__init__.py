"""A conversion from its first word to its last byte: open, describe both sides, plan, run. Python and the command line ask it.

Rooms are imported where they are needed: a plan from specs alone waits for no store, and running a plan for no compiler.
"""
