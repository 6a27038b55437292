"""A callback of Lightning's Trainer that verifies each save.

trainer = Trainer(callbacks=[UcplCallback()])
trainer.fit(model, ckpt_path=ucpl.resume("checkpoints"))
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lightning.pytorch import Callback

from ucpl.integrations import SavesVerified, fault_in, report

__all__ = ["UcplCallback"]


class Strategy(Protocol):
    """Lightning's Strategy."""

    def broadcast(self, text: str) -> str: ...


class Trainer(Protocol):
    """Lightning's Trainer."""

    save_checkpoint: Callable[..., None]
    is_global_zero: bool
    strategy: Strategy


class UcplCallback(SavesVerified, Callback):  # type: ignore[misc,unused-ignore]
    """Verify each checkpoint after it is saved."""

    def setup(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        """Wrap the trainer's function: no hook comes after a save."""
        save = trainer.save_checkpoint
        if getattr(save, "verifies", False):
            return

        def saved(filepath: str | Path, *given: object, **more: object) -> None:
            save(filepath, *given, **more)  # all ranks wait at its end
            fault = fault_in(Path(filepath), self.seconds) if trainer.is_global_zero else ""
            report(trainer.strategy.broadcast(fault), stop=self.stop)

        saved.verifies = True  # type: ignore[attr-defined]
        trainer.save_checkpoint = saved
