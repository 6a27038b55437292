"""The places of targets.

Missing folders are made, and a dry run fails where the run would.
"""

from __future__ import annotations

import io
import os
import re
import stat
import time
from pathlib import Path

import pytest
import torch

import ucpl
from tests.cli.command import Done, good
from tests.cli.command import ucpl as command
from ucpl.cli.console import Console
from ucpl.errors import UcplError


def bad(status: int, *argv: object) -> Done:
    done = command(*argv)
    assert done.status == status, (argv, done.out, done.err)
    return done


SOURCE = Path(__file__).parents[2] / "examples" / "checkpoint"


def test_missing_parents_are_made_and_go_where_the_run_fails(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "dst"
    (tmp_path / "a").mkdir()
    assert bad(3, "convert", SOURCE / "nothing", target, "--to", "zero1(dp=2)")
    assert bad(2, "convert", SOURCE, target, "--to", "zero1(dp=0)")
    assert [*tmp_path.iterdir()] == [tmp_path / "a"] and not [*(tmp_path / "a").iterdir()]
    good("convert", SOURCE, target, "--to", "zero1(dp=2)")
    ucpl.convert(SOURCE, tmp_path / "c" / "d" / "p.pt", "plain()")
    assert ucpl.compare(target, tmp_path / "c" / "d" / "p.pt")


def test_a_file_above_a_target_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    for more in ((), ("--dry-run",)):
        assert "E507" in bad(4, "convert", SOURCE, tmp_path / "f" / "x" / "dst", "--to", "zero1(dp=2)", *more).err


@pytest.mark.parametrize("name", ["/", "..", "."])
def test_what_has_no_name_is_no_target(name: str) -> None:
    assert "E507" in bad(4, "convert", SOURCE, name, "--to", "zero1(dp=2)").err


def test_a_dry_run_says_what_the_run_writes(tmp_path: Path) -> None:
    line = ("convert", SOURCE, tmp_path / "no" / "dst", "--to", "zero1(dp=2)")
    said = good(*line, "--dry-run", "--json").json
    assert not (tmp_path / "no").exists() and said["free"] > 0
    done = good(*line, "--json").json["report"]
    assert (said["bytes"], said["files"]) == (done["bytes_target"], done["files"])
    again = good("convert", SOURCE, tmp_path / "other", "--to", "zero1(dp=2)", "--dry-run").out
    assert f"would write   {said['bytes']:,} bytes" in again and "estimate" in again


def test_a_dry_run_fails_where_the_run_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("convert", SOURCE, tmp_path / "dst", "--to", "zero1(dp=2)", "--dry-run")
    real = os.statvfs(tmp_path)

    def full(path: object) -> os.statvfs_result:
        return os.statvfs_result((*real[:4], 0, *real[5:]))

    with monkeypatch.context() as m:
        m.setattr(os, "statvfs", full)
        assert "E501" in bad(4, *line).err
    with monkeypatch.context() as m:
        m.setattr(os, "access", lambda *_, **__: False)
        assert "E503" in bad(4, *line).err
    assert "E508" in bad(4, *line, "--memory", "64K").err


def test_a_source_is_no_place_for_a_target(tmp_path: Path) -> None:
    with pytest.raises(UcplError, match="E507"):
        ucpl.convert(SOURCE, SOURCE / "new" / "dst", "plain()")
    assert not (SOURCE / "new").exists()


def test_the_demo_ends_in_a_line_of_its_own() -> None:
    printed = good("demo").out
    assert "\ufffd" not in printed and "\n\nproved: " in printed


def test_the_last_line_of_a_run_has_its_seconds_and_its_rate(tmp_path: Path) -> None:
    printed = good("convert", SOURCE, tmp_path / "dst", "--to", "zero1(dp=2)").out
    assert re.search(
        rf"^done {{10}}{re.escape(str(tmp_path / 'dst'))} in [0-9.e+-]+ s, [0-9.e+-]+ MiB/s$", printed, re.M
    )


def test_the_bar_of_a_terminal_has_the_time_that_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Console().progress("reads") as told:
        assert told is not None
        told(0, 1 << 20)
        time.sleep(0.01)
        told(1 << 19, 1 << 20)
    shown = terminal.getvalue()
    assert "reads" in shown and re.search(r"\d:\d\d:\d\d|-:--:--", shown)


@pytest.mark.parametrize(
    ("to", "file"),
    [
        ("safetensors()", "model.safetensors"),
        ("zero0(dp=1)", "mp_rank_00_model_states.pt"),
        ("dcp(fsdp=1)", ".metadata"),
        ("plain()", ""),
        ('torch_file(file="run.ckpt")', ""),
    ],
)
def test_a_name_of_a_torch_file_makes_a_torch_file_or_is_refused(to: str, file: str, tmp_path: Path) -> None:
    for verb in ([], ["--dry-run"]) if file else ():
        done = command("convert", SOURCE, tmp_path / "out.pt", "--to", to, *verb)
        assert "E510" in done.err and f"the target is a folder with {file}" in done.err and not list(tmp_path.iterdir())
    if file:
        return
    good("convert", SOURCE, tmp_path / "out.pt", "--to", to)
    assert torch.load(tmp_path / "out.pt", weights_only=True)
    assert good("verify", tmp_path / "out.pt", "-q").status == 0


@pytest.mark.parametrize("to", ["zero1(dp=2)", "dcp(fsdp=2)", "plain()"])
def test_a_target_has_the_group_of_a_shared_folder(to: str, tmp_path: Path) -> None:
    """As `mkdir` and `cp` give it: quotas of clusters go by group."""
    groups = [4242] if os.geteuid() == 0 else [one for one in os.getgroups() if one != os.getegid()]
    if not groups:
        pytest.skip("this user has one group")
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, -1, groups[0])
    shared.chmod(0o2775)
    target = shared / ("out" if to != "plain()" else "out.pt")
    good("convert", SOURCE, target, "--to", to)
    for path in (target, *target.rglob("*")):
        state = path.stat()
        assert state.st_gid == groups[0], path
        assert not path.is_dir() or state.st_mode & stat.S_ISGID, path
