"""DeepSpeed as one of the frameworks that the other rooms speak to."""

from __future__ import annotations

from pathlib import Path

from ucpl.errors import UcplError
from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Checkpoint, Order, Skeleton
from ucpl.files.demands import Demands
from ucpl.formats.deepspeed.folder import step_folder
from ucpl.formats.deepspeed.gathered import StepPlace
from ucpl.formats.deepspeed.names import LATEST, list_files
from ucpl.formats.deepspeed.step import open_step
from ucpl.formats.deepspeed.writing import skeleton


class DeepSpeed:
    name = "deepspeed"
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        """Test for DeepSpeed's files, or for `latest` next to folders."""
        if not path.is_dir():
            return False
        try:
            if not list_files(path).is_empty:
                return True
        except UcplError:
            return True  # its files, though something is wrong with them
        if (path / LATEST).is_file():
            return True
        return any(child.is_dir() and _looks(child) for child in path.iterdir())

    def open(self, path: Path, order: Order | None = None) -> Checkpoint:
        """Read all headers of a step's folder or a save folder.

        order: the parameters of the optimizer's numbers, if no file has them (ZeRO-0). Raises: UcplError E450-E469.
        """
        root, tag = step_folder(path)
        return open_step(StepPlace(path, root, tag), order)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """All files of a target, for `engine.load_checkpoint` at its degree and stage.

        Raises: UcplError E470-E479.
        """
        return skeleton(structure, targets, source, tag)


def _looks(folder: Path) -> bool:
    try:
        return not list_files(folder).is_empty
    except UcplError:
        return True
