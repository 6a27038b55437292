"""Mistakes in a right spec, each found by a check.

The genuine one is split by torch, not by ucpl (genuine.py), on 2 stages, 4 expert ranks and 2 tensor ranks.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Done, good, ucpl
from tests.planted.genuine import EP, PP, TP, save_genuine, save_whole

HERE = Path(__file__).parent
RIGHT = (HERE / "right.ucpl").read_text()
MISTAKES: list[dict[str, Any]] = tomllib.loads((HERE / "mistakes.toml").read_text())["mistake"]
RANKS = f"ranks(pp = {PP}, ep = {EP}, tp = {TP})"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model as it is published, and as the framework splits it."""
    folder = tmp_path_factory.mktemp("planted")
    return save_whole(folder / "whole"), save_genuine(folder / "genuine")


def edited(edit: list[str]) -> str:
    text = re.sub(" +", " ", RIGHT)  # columns are the formatter's
    for before, after in zip(edit[::2], edit[1::2], strict=True):
        assert re.sub(" +", " ", before) in text, before
        text = text.replace(re.sub(" +", " ", before), after)
    return text


def caught(spec: Path, whole: Path, genuine: Path) -> tuple[str, Done]:
    """The first check that finds it, and its message."""
    for what, argv in {
        "check": ("check", spec),
        "convert": ("convert", whole, spec.parent / "mine", "--from", f"{spec}:whole()", "--to", f"{spec}:{RANKS}"),
        "against": ("verify", spec.parent / "mine", "--from", f"{spec}:{RANKS}", "--against", genuine),
    }.items():
        done = ucpl(*argv)
        if done.status:
            return what, done
    return "nothing", done


def test_the_right_spec_gives_what_torch_gives(stored: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "right.ucpl").write_text(RIGHT)
    what, done = caught(tmp_path / "right.ucpl", *stored)
    assert what == "nothing", done.err
    assert "not witnessed: " not in done.out
    alone = good("verify", tmp_path / "mine").out
    assert "not witnessed: parts of one size, side by side: q, key and val in qkv, gate and up in fc1" in alone
    assert "320 stored tensors, 53,120 elements\n              the same, bit by bit" in done.out


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m["name"])
def test_a_planted_mistake_is_found_and_named(
    mistake: dict[str, Any], stored: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "spec.ucpl").write_text(edited(mistake["edit"]))
    what, done = caught(tmp_path / "spec.ucpl", *stored)
    sentence = " ".join(done.err.split())
    assert (what, done.status) == (mistake["caught"], 1), sentence
    assert f"error[{mistake['code']}]" in sentence and "internal error" not in sentence
    assert [text for text in mistake["says"] if text not in sentence] == [], done.err
