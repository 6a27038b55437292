"""`NAME.ckpt` of Lightning's Trainer with DeepSpeedStrategy.

Source: lightning 2.6, strategies/deepspeed.py. Loops, callbacks, schedules and hyper-parameters are in the shards'
client_state, under keys of Lightning's; the engine's folder is called `checkpoint`. `fit(ckpt_path=...)` has the engine
load it and reads nothing else.
"""

from __future__ import annotations

from ucpl.extents.containers import CompanionRule, Kind

__all__ = ["LIGHTNING"]

LIGHTNING = Kind(
    name="lightning",
    title="Lightning's DeepSpeedStrategy",
    resumes_by="Trainer.fit(ckpt_path=...)",
    marks=(),
    needs=(),
    tag="checkpoint",
    client="pytorch-lightning_version",
    rules=(CompanionRule("zero_to_*.py", "carry", "DeepSpeed's scripts"),),
)
