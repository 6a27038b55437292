"""Any command line gives an answer or an error of ours.

There is no internal error and no endless wait.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.command import FIXTURES, ucpl
from tests.cli.fuzz import CONFIGS, SPEC, Place, Writer, tried

LINES = int(os.environ.get("UCPL_FUZZ_LINES", "80"))
FIRST = int(os.environ.get("UCPL_FUZZ_SEED", "1"))
LONG = "a" * 300  # longer than a name of a file may be
SOURCE = FIXTURES / "z1_dp4"


def test_lines_of_odd_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for seed in range(FIRST, FIRST + LINES):
        line = Writer(place, seed).line()
        _, said = tried(line)
        place.clear()
        if said:
            wrong[seed] = (line, said)
    assert wrong == {}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a spec, a pipe, a source, and odd names."""
    (tmp_path / "own.ucpl").write_text(SPEC)
    os.mkfifo(tmp_path / "pipe")
    shutil.copytree(SOURCE, tmp_path / "source")
    (tmp_path / "odd").mkdir()
    names = ("a.²", "a.0.w", "a.1.w", "b." + "9" * 900, "ä.w", "c.01")
    save_file({name: torch.zeros(2, 3) for name in names}, tmp_path / "odd" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("E174", ["explain", "²"]),
        ("E174", ["explain", "E²00"]),
        ("E174", ["explain", "9" * 5000]),
        ("E437", ["inspect", LONG]),
        ("E437", ["convert", LONG, "new", "--to", "plain()"]),
        ("E186", ["convert", "source", LONG, "--to", "plain()"]),
        ("E110", ["show", LONG + "()"]),
        ("E435", ["inspect", "pipe"]),
        ("E435", ["verify", "/dev/full"]),
        ("E350", ["why", "pipe", "mix"]),
        ("E350", ["apply", "/dev/full", "source", "new"]),
        ("E184", ["check", "pipe"]),
        ("E184", ["check", "/dev/full"]),
        ("E184", ["fmt", "pipe"]),
        ("E184", ["check", "own.ucpl", "--config", "pipe"]),
        ("E184", ["check", "own.ucpl", "--config", "/dev/full"]),
        ("E395", ["import", "hf", "/dev/full"]),
        ("E395", ["import", "hf", LONG]),
        ("E170", ["check", LONG]),
        ("E173", ["verify", "source", "--workers", "²"]),
        ("E173", ["verify", "source", "--workers", "9" * 5000]),
        ("E173", ["verify", "source", "--memory", "9" * 400]),
        ("E173", ["verify", "source", "--memory", "0.1"]),
        ("E173", ["roundtrip", "own.ucpl", "--examples", "²"]),
        ("E177", ["check", "own.ucpl", "-D", "wide=" + "9" * 5000]),
        ("E177", ["check", "own.ucpl", "-D", "²=1"]),
        ("E185", ["check", "own.ucpl", "-D", "wide=\udcff"]),
        ("E185", ["convert", "source", "new", "--to", "zero1(dp=2)\udcff"]),
        ("E185", ["convert", "source", "new\udcff", "--to", "zero1(dp=2)"]),
        ("E185", ["convert", "source", "", "--to", "zero1(dp=2)", "--force"]),
        ("E185", ["convert", "", "new", "--to", "zero1(dp=2)"]),
        ("E185", ["inspect", ""]),
        ("E185", ["infer", "source", "-o", ""]),
        ("E179", ["infer", "source", "-o", "pipe"]),
        ("E500", ["convert", "source", "pipe", "--to", "plain()"]),
        ("E500", ["convert", "source", "pipe", "--to", "plain()", "--force"]),
    ],
)
def test_what_has_broken_or_could(code: str, line: list[str], here: Path) -> None:
    done = ucpl(*line)
    assert done.err.startswith(f"error[{code}]"), done
    assert (here / "pipe").is_fifo() and not (here / "new").exists()


def test_a_model_of_odd_names_is_imported(here: Path) -> None:
    done = ucpl("import", "hf", "odd", "-o", "made.ucpl")
    assert done.status == 0, done
    text = (here / "made.ucpl").read_text()
    assert '"a.²"' in text and "9" * 900 in text
    assert ucpl("check", "made.ucpl").status == 0


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_a_config_of_any_content(config: int, here: Path) -> None:
    (here / "config.json").write_text(CONFIGS[config])
    assert ucpl("check", "own.ucpl", "--config", "config.json").status in (0, 1, 2)
    assert (
        ucpl("plan", "--from", "own.ucpl:whole()", "--to", "own.ucpl:cut(tp=1)", "--config", "config.json").status < 4
    )
    shutil.copy(here / "config.json", here / "odd" / "config.json")
    for path in ("odd", "config.json"):
        done = ucpl("import", "hf", path)
        assert done.status in (0, 2, 3) and "internal error" not in done.err, done


def test_a_source_may_be_called_anything(here: Path) -> None:
    """Names that are no UTF-8 are the file system's.

    A file that is read may have one.
    """
    odd = os.fsdecode(b"odd\xff")
    shutil.move(here / "source", here / odd)
    assert ucpl("convert", odd, "new", "--to", "zero1(dp=2)").status == 0
    assert ucpl("verify", "new").status == 0 and ucpl("compare", odd, "new").status == 0


def test_the_longest_name_that_a_target_may_have(here: Path) -> None:
    longest = "n" * 244  # 255 with the mark of the hidden folder
    assert ucpl("convert", "source", longest, "--to", "zero1(dp=2)").status == 0
    assert (here / longest / "latest").is_file()
    assert ucpl("convert", "source", longest + "n", "--to", "zero1(dp=2)").err.startswith("error[E186]")


def test_a_link_is_written_through(here: Path) -> None:
    (here / "real.ucpl").write_text("")
    (here / "link.ucpl").symlink_to("real.ucpl")
    assert ucpl("infer", "source", "-o", "link.ucpl").status == 0
    assert (here / "link.ucpl").is_symlink() and "model" in (here / "real.ucpl").read_text()
