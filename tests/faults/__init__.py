"""Machine faults at every call of a verb: `python -m tests.faults`. See docs/GUARANTEES.md."""
