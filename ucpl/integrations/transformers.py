"""A callback of transformers' Trainer that verifies each save.

trainer.add_callback(UcplCallback())
trainer.train(resume_from_checkpoint=ucpl.resume(args.output_dir))
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from ucpl.integrations import SavesVerified, fault_in, report

__all__ = ["UcplCallback"]


class Arguments(Protocol):
    """transformers' TrainingArguments."""

    output_dir: str


class TrainerStateLike(Protocol):
    """transformers' TrainerState."""

    global_step: int


class UcplCallback(SavesVerified, TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Verify each checkpoint after it is saved."""

    def on_save(self, args: Arguments, state: TrainerStateLike, control: object, **kwargs: object) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}")
        ranks = PartialState()
        ranks.wait_for_everyone()  # the files of all ranks are there
        found = [fault_in(path, self.seconds) if ranks.is_main_process and path.exists() else ""]
        report(broadcast_object_list(found)[0], stop=self.stop)
