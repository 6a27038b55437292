"""Lines fit the terminal at any width.

Broken between words, and no word, name or path is cut.
"""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.command import ucpl as command
from ucpl.cli.verbs import VERBS
from ucpl.cli.wrapping import wrapped

SOURCE = Path(__file__).parents[2] / "examples" / "checkpoint"
WIDTHS = (40, 47, 60, 80, 99, 200)


def fits(text: str, width: int) -> None:
    for line in text.splitlines():
        longest = max(map(len, line.split()), default=0)
        assert len(line) <= width or longest > width or line.count("'") > 1, (width, line)


def words(text: str) -> list[str]:
    return text.replace(" \\\n", " ").split()


@pytest.mark.parametrize("width", WIDTHS)
def test_answers_have_the_same_words_at_any_width(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a.weight": torch.ones(3)}, tmp_path / "one state.pt")
    lines = (
        ("inspect", SOURCE),
        ("verify", SOURCE),
        ("convert", SOURCE, tmp_path / "out", "--to", "zero1(dp=3)", "--dry-run"),
        ("inspect", tmp_path / "one state.pt"),
        ("explain", "E467"),
    )
    for line in lines:
        free = command(*line)
        with monkeypatch.context() as patch:
            patch.setattr("ucpl.cli.console.width_of", lambda stream: width)
            told = command(*line)
        fits(told.out, width)
        assert len(words(told.out)) == len(words(free.out))
        assert words(told.err) == words(free.err)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_cuts_no_word(verb: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    line = (verb, "--help") if verb else ("--help",)
    monkeypatch.setenv("COLUMNS", "999")
    free = set(words(command(*line).out))
    monkeypatch.setenv("COLUMNS", str(width))
    printed = command(*line).out
    assert set(words(printed)) == free
    fits(printed.partition("\n\n")[2], width)


def test_a_command_that_is_broken_is_still_one(tmp_path: Path) -> None:
    code = "import json; print(json.dumps({str(k): k for k in range(9)}, sort_keys=True, indent=None))"
    line = f'  = help: write this: python -c "{code}"'
    for width in (30, 40, 60, 100):
        there = "\n".join(wrapped(line, width)).partition("python")[2]
        done = subprocess.run(["bash", "-c", f"{shlex.quote(sys.executable)}{there}"], capture_output=True, text=True)
        assert done.stdout.startswith('{"0": 0, "1": 1'), (width, there, done.stderr)


def test_names_and_quoted_texts_stay_in_one_piece() -> None:
    line = "left out      group of 'my own run' and `a b c`: zero1(dp = 4, tp = 2) of /a/very-long/path/that/fits/nowhere/x.pt"
    for width in range(20, 120):
        pieces = wrapped(line, width)
        joined = "\n".join(pieces)
        for one in (
            "dp = 4,",
            "/a/very-long/path/that/fits/nowhere/x.pt",
            *(["'my own run'", "`a b c`:"] if width > 30 else []),
        ):
            assert one in joined
        assert words(joined) == words(line)
    assert wrapped(line, None) == [line]


def test_carets_stay_below_their_line() -> None:
    lines = [
        " 3 |   attn.qkv = (q: r d | k: d) h and more of the same text",
        "   |                      ^ here, which is a long word on it",
    ]
    assert [piece for line in lines for piece in wrapped(line, 40)] == lines


def test_a_terminal_has_the_width_that_it_has(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"TERM": "dumb"}
    line = [
        sys.executable,
        "-m",
        "ucpl",
        "convert",
        str(SOURCE),
        str(tmp_path / "out"),
        "--to",
        "zero1(dp=2)",
        "--dry-run",
    ]
    with subprocess.Popen(line, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        said = b""
        while True:
            try:
                piece = os.read(leader, 1 << 16)
            except OSError:
                break
            if not piece:
                break
            said += piece
    assert process.returncode == 0
    fits(said.decode().replace("\r\n", "\n"), 60)
