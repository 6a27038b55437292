"""`stepN` of OLMo-core's Checkpointer: `model_and_optim`, and the trainer's state in `train`.

Source: ai2-olmo-core 3.0, train/checkpoint.py. `load` reads `train/rankN.pt` of its own rank, or else that of rank 0, so
that all are carried to any number of ranks.
"""

from __future__ import annotations

from ucpl.extents.containers import CompanionRule, Kind

__all__ = ["OLMO"]

OLMO = Kind(
    name="olmo_core",
    title="OLMo-core's Checkpointer",
    resumes_by="Checkpointer.load(...)",
    marks=(),
    needs=(),
    tag="model_and_optim",
    chunks=True,
    rules=(
        CompanionRule("train/rank*.pt", "carry", "the trainer's state"),
        CompanionRule(".metadata.json", "carry", "the version of OLMo-core"),
        CompanionRule("config.json", "carry", "the run's configuration"),
    ),
)
