"""The store of folders of the Trainer and of Accelerate."""

from __future__ import annotations

from pathlib import Path

from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Checkpoint, Order, Skeleton
from ucpl.files.demands import Demands
from ucpl.formats.trainer.reading import opened, recognised
from ucpl.formats.trainer.writing import skeleton_of

__all__ = ["Folders"]


class Folders:
    """The store of one kind of folder."""

    demands = Demands()

    def __init__(self, name: str) -> None:
        self.name = name

    def recognises(self, path: Path) -> bool:
        return recognised(self.name, path)

    def open(self, path: Path, order: Order | None = None) -> Checkpoint:
        """Read all headers."""
        return opened(self.name, path, order)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """The files of a target: weights, and the optimizer's state dict."""
        return skeleton_of(self.name, structure, targets, source)
