"""A conversion from its first word to its last byte.

It opens, describes both sides, plans and runs, for Python and the command line. Rooms are imported where they are
needed: a plan from specs alone waits for no store, and running a plan for no compiler.
"""
