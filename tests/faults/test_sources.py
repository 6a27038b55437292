"""A source that its trainer still writes while it is read.

Gone, shorter, or written anew between its headers and its data.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.command import FIXTURES, digest, good, ucpl
from ucpl.conversion import engine


def gone(path: Path) -> None:
    path.unlink()


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def anew(path: Path) -> None:
    """As trainers save.

    Another file of the same size, put into the place of the first.
    """
    fresh = path.with_name("fresh")
    shutil.copy2(path, fresh)
    with fresh.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    os.utime(fresh, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(fresh, path)


def in_place(path: Path) -> None:
    """The same inode and size, other bytes."""
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")


@pytest.fixture(params=["deepspeed", "huggingface"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, str]:
    """A checkpoint, its rewritten file, and the call of its conversion."""
    top = tmp_path / "src"
    if request.param == "deepspeed":
        shutil.copytree(FIXTURES / "z1_dp2_sgdm", top)
        return top, next(top.rglob("*rank_1_*optim_states.pt")), "zero1(dp=3)"
    top.mkdir()
    save_file({"w": torch.arange(400.0), "b": torch.ones(7)}, top / "model.safetensors")
    return top, top / "model.safetensors", "plain()"


@pytest.mark.fault(
    "Every system call",
    "a source that is removed, shortened or replaced between headers and data",
    "status 3 with the file, no target",
)
@pytest.mark.parametrize("change", [gone, shorter, anew, in_place])
def test_a_source_that_is_another_than_its_headers_reported_is_refused(
    source: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """Only the old header gives the places in the new file.

    Safetensors files state no CRC.
    """
    top, path, call = source
    shutil.copytree(top, tmp_path / "kept")
    command = ("convert", top, tmp_path / "out", "--to", call)
    run = engine.run

    def then(*args: object, **more: object) -> object:
        os.utime(path, ns=(7, 7))
        change(path)
        return run(*args, **more)  # type: ignore[arg-type]

    os.utime(path, ns=(7, 7))
    monkeypatch.setattr(engine, "run", then)
    done = ucpl(*command)
    assert done.status == 3 and path.name in done.err and "= help:" in done.err, done
    assert ("E610" if change is gone else "E611") in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "src"]
    monkeypatch.undo()
    shutil.copy2(tmp_path / "kept" / path.relative_to(top), path)
    good(*command, "--resume")
    good("convert", top, tmp_path / "wanted", "--to", call)
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")
