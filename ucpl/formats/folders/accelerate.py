"""Folders of `Accelerator.save_state` with DeepSpeed.

Source: accelerate 1.15, accelerator.py and checkpointing.py. `load_state` has each engine load the folder
`pytorch_model` (`pytorch_model_1` for a second one) by that name, whatever `latest` says. Then it reads scheduler.bin
if the schedule is not DeepSpeed's own, dl_state_dict.bin, sampler.bin, random_states_{rank}.pkl of its own rank, and
custom_checkpoint_{n}.pkl for each registered object. It unpickles these last ones without restriction. A loop may add
the model, by `save_model` or `save_pretrained`.
"""

from __future__ import annotations

from ucpl.extents.containers import CompanionRule, Kind
from ucpl.formats.folders.trainer import MODEL, NUMPY

__all__ = ["ACCELERATE"]

_SCHEDULE = "Accelerate steps it once for each rank in every training step, unless the loop has split_batches"
_LOADER = (
    "it counts batches, and is at the same place where those of all ranks together are as large as before: where"
    " one rank's are, samples are left out or come again"
)

ACCELERATE = Kind(
    name="accelerate",
    title="Accelerate's save_state",
    resumes_by="Accelerator.load_state",
    marks=("random_states_{rank}.pkl",),
    needs=(),
    tag="pytorch_model",
    strategies=True,
    engines="pytorch_model_{rank}",
    rules=(
        CompanionRule("random_states_{rank}.pkl", "rank", "random numbers", named=NUMPY),
        CompanionRule("scheduler.bin", "carry", "the learning rate's schedule", by_ranks=_SCHEDULE),
        CompanionRule("scheduler_*.bin", "carry", "the learning rate's schedule", by_ranks=_SCHEDULE),
        CompanionRule("dl_state_dict.bin", "carry", "a data loader's place", by_ranks=_LOADER),
        CompanionRule("dl_state_dict_*.bin", "carry", "a data loader's place", by_ranks=_LOADER),
        CompanionRule("sampler.bin", "carry", "a sampler of the data"),
        CompanionRule("sampler_*.bin", "carry", "a sampler of the data"),
        CompanionRule("scaler.pt", "carry", "the gradient scaler"),
        CompanionRule("custom_checkpoint_*.pkl", "carry", "objects that the loop has registered"),
        CompanionRule("zero_to_*.py", "carry", "DeepSpeed's scripts"),
        *MODEL,
    ),
)
