"""A target is checked before it appears.

A target that contradicts its layout replaces nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from ucpl import errors
from ucpl.errors import UcplError
from ucpl.runtime.publish import limit_modes

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoint"
MISNAMED = """ucpl 1
layout mine() of any {
  framework plain()
  file weights = torch "model.pt"
  group * = model
  * of parameter = ...  as "params/{name}/weight"
  * of buffer    = ...  as "buffers/{name}"
  * of alias     = none
  state * of *    = like  as "params/{name}/{state}"
}
"""


@pytest.fixture
def misnamed(tmp_path: Path) -> str:
    (tmp_path / "mine.ucpl").write_text(MISNAMED)
    return f"{tmp_path}/mine.ucpl:mine()"


@pytest.mark.fault(
    "Disk and files",
    "a user's layout with file names that its framework does not read, over an existing target",
    "status 5; the old target stays, nothing remains",
)
def test_what_is_not_as_its_layout_says_replaces_nothing(tmp_path: Path, misnamed: str) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("mine")
    for force in (True, False):
        if not force:
            (target / "precious").unlink()
            target.rmdir()
        with pytest.raises(UcplError, match="the target has no") as caught:
            ucpl.convert(EXAMPLE, target, to=misnamed, force=force)
        first = caught.value.diagnostics[0]
        assert first.code == "E600" and "as it calls them" in (first.remedy or "")
        assert not target.exists() or [p.name for p in target.iterdir()] == ["precious"]
        assert target.exists() == force
        assert sorted(p.name for p in tmp_path.iterdir()) == (["mine.ucpl", "out"] if force else ["mine.ucpl"])


def test_a_run_leaves_nothing_behind_in_its_process(tmp_path: Path, misnamed: str) -> None:
    """Additions of each run to later texts would slow these down."""
    before = dict(errors._CALLED)
    ucpl.convert(EXAMPLE, tmp_path / "one", to="zero1(dp=3)")
    with pytest.raises(UcplError):
        ucpl.convert(EXAMPLE, tmp_path / "two", to=misnamed)
    assert before == errors._CALLED


@pytest.mark.fault(
    "Disk and files",
    "a private file or folder that is replaced",
    "the new one has its mode and owner when it gets its name",
)
def test_what_replaces_a_private_one_is_private(tmp_path: Path) -> None:
    file, folder, other = tmp_path / "x.pt", tmp_path / "run", tmp_path / "turned"
    file.touch(mode=0o600)
    folder.mkdir(mode=0o700)
    other.touch(mode=0o640)
    ucpl.convert(EXAMPLE, file, to="plain()", force=True)
    ucpl.convert(EXAMPLE, folder, to="zero1(dp=3)", force=True)
    ucpl.convert(EXAMPLE, other, to="zero1(dp=3)", force=True)  # a folder takes a file's place
    assert [stat.S_IMODE(p.stat().st_mode) for p in (file, folder, other)] == [0o600, 0o700, 0o750]
    umask = os.umask(0o027)
    try:
        ucpl.convert(EXAMPLE, tmp_path / "new", to="zero1(dp=3)")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_replaces_somebody_else_s_is_theirs(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    file.touch()
    os.chown(file, 1234, 2345)
    ucpl.convert(EXAMPLE, file, to="plain()", force=True)
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 2345)


def test_a_copy_is_readable_for_nobody_who_could_not_read_its_source(tmp_path: Path) -> None:
    """A private file behind a link in the source, and private shards.

    The folder of the run is private, too.
    """
    source = tmp_path / "source"
    state = {"model.embed.weight": torch.ones(4, 2), "model.norm.weight": torch.ones(2)}
    source.mkdir()
    save_file(state, source / "model.safetensors", {"format": "pt"})
    os.chmod(source / "model.safetensors", 0o644)  # some releases of safetensors write 0600
    (source / "config.json").write_text("{}")
    os.chmod(source / "config.json", 0o644)
    (tmp_path / "private").write_text("{}")
    os.chmod(tmp_path / "private", 0o600)
    os.symlink(tmp_path / "private", source / "tokenizer.json")

    def modes(name: str) -> dict[str, int]:
        ucpl.convert(source, tmp_path / name, to="safetensors()")
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / name).iterdir()}

    umask = os.umask(0o022)
    try:
        first = modes("first")
        assert (first["tokenizer.json"], first["config.json"], first["model.safetensors"]) == (0o600, 0o644, 0o644)
        os.chmod(source / "model.safetensors", 0o640)
        second = modes("second")
        assert (second["config.json"], second["model.safetensors"]) == (0o644, 0o640)
        os.chmod(source / "model.safetensors", 0o600)
        ucpl.convert(source, tmp_path / "third.pt", to="plain()")
        assert stat.S_IMODE((tmp_path / "third.pt").stat().st_mode) == 0o600
    finally:
        os.umask(umask)


def test_a_mode_that_cannot_be_read_opens_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the disk is reported with the source's file."""
    private, copy = tmp_path / "private", tmp_path / "copy"
    for path, mode in ((private, 0o600), (copy, 0o644)):
        path.write_text("{}")
        os.chmod(path, mode)
    stated = os.stat

    def failing(path: Any, *more: Any, **how: Any) -> os.stat_result:
        if path == private:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stated(path, *more, **how)

    monkeypatch.setattr("ucpl.runtime.publish.os.stat", failing)
    with pytest.raises(ucpl.UcplError) as caught:
        limit_modes(tmp_path, ["copy"], tmp_path, ["private"])
    assert caught.value.diagnostics[0].code == "E400" and str(private) in str(caught.value)
