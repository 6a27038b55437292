"""A callback of Lightning's Trainer that verifies each save.

trainer = Trainer(callbacks=[UcplCallback()])
trainer.fit(model, ckpt_path=ucpl.resume("checkpoints"))
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from ucpl.integrations import SECONDS, fault_in, report

__all__ = ["UcplCallback"]


class UcplCallback(Callback):  # type: ignore[misc,unused-ignore]
    """Verify each checkpoint after it is saved.

    The first rank reads it while the others wait. seconds: for reading. stop: a damaged save ends the job on all ranks;
    otherwise each rank warns. Raises: RuntimeError.
    """

    def __init__(self, seconds: float = SECONDS, *, stop: bool = True) -> None:
        self.seconds, self.stop = seconds, stop

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the trainer's own function verify the file it saved: no hook of Lightning comes after a save."""
        save = trainer.save_checkpoint
        if getattr(save, "verifies", False):
            return

        def saved(filepath: Any, *given: Any, **more: Any) -> None:
            save(filepath, *given, **more)  # all ranks wait at its end
            fault = fault_in(Path(filepath), self.seconds) if trainer.is_global_zero else ""
            report(trainer.strategy.broadcast(fault), stop=self.stop)

        saved.verifies = True  # type: ignore[attr-defined]
        trainer.save_checkpoint = saved
