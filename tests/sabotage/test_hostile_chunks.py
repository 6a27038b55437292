"""`.metadata` of chunks that was made to harm.

Each class is refused by its name, and nothing is run or written.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from tests.files.refusals import refusal
from tests.formats.dcp.test_dcp_odd import numbered, place, save, trained
from ucpl.formats.opening import open_checkpoint


class Runs:
    """Writes a file where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.witness}",)


def leads(path: str) -> Callable[[Metadata, Path], object]:
    def change(said: Metadata, witness: Path) -> None:
        held = said.storage_data[place(said, "model.w")]
        said.storage_data[place(said, "model.w")] = _StorageInfo(path, held.offset, held.length)

    return change


def nested(said: Metadata, witness: Path) -> None:
    bomb: object = []
    for _ in range(300):
        bomb = [bomb]
    said.planner_data["model.w"] = bomb


def unfolding(said: Metadata, witness: Path) -> None:
    """Lists of lists that are one and the same.

    2 to the 60th, were they written out.
    """
    bomb: list[object] = [1]
    for _ in range(60):
        bomb = [bomb, bomb]
    said.planner_data["model.w"] = bomb


def runs(said: Metadata, witness: Path) -> None:
    said.planner_data["model.w"] = Runs(witness)


def endless(said: Metadata, witness: Path) -> None:
    """All chunks in one place, which would be read as often."""
    index = place(said, "model.w")
    for other in [one for one in said.storage_data if one != index]:
        said.storage_data[other] = said.storage_data[index]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (leads("../secret.distcp"), "E393"),
        (leads("/etc/hostname"), "E393"),
        (leads("a/../../secret.distcp"), "E393"),
        (leads("a\0b"), "E393"),
        (leads("."), "E393"),
        (nested, "E424"),
        (unfolding, "E455"),
        (runs, "E455"),
        (endless, "E520"),
    ],
    ids=["out", "absolute", "out again", "zero byte", "folder", "nested", "unfolding", "global", "one place"],
)
def test_metadata_that_was_made_to_harm(tmp_path: Path, change: Callable[[Metadata, Path], object], code: str) -> None:
    folder, witness = save(tmp_path / "folder", trained({"w": numbered(4, 2)})), tmp_path / "witness"
    (tmp_path / "secret.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    said = pickle.loads((folder / ".metadata").read_bytes())
    change(said, witness)
    (folder / ".metadata").write_bytes(pickle.dumps(said))
    refusal(lambda: open_checkpoint(folder), code)
    assert not witness.exists()
