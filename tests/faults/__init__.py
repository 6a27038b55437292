"""Faults of the machine at every call that a verb makes of it: `python -m tests.faults` (see docs/GUARANTEES.md)."""
