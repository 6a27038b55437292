"""Mistakes in shipped architectures that a check or torch's split ranks reveal."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.architectures.splits import split
from tests.architectures.test_examples import EXAMPLES, OTHERS, degrees_of, experts, tensors_of
from tests.cli.command import Done, ucpl

MISTAKES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "architectures.toml").read_text())["mistake"]


def edited(file: str, edit: list[str]) -> str:
    """Edit the text in its layout `ranks` and below, or above.

    Above for edits of `hf`.
    """
    text = re.sub(" +", " ", (EXAMPLES / f"{file}.ucpl").read_text())
    place = text.index("layout ranks") if "layout ranks" in text and "of " + file + " extends hf" in text else 0
    head, tail = text[:place], text[place:]
    for before, after in zip(edit[::2], edit[1::2], strict=True):
        assert before in tail, before
        tail = tail.replace(before, after)
    return head + tail


def save_genuine(file: str, folder: Path) -> Path:
    folder.mkdir()
    whole = tensors_of(EXAMPLES / "checkpoints" / file)
    for rank, tensors in split(file, whole, degrees_of(file)[0], experts(file)).items():
        ep = f"_experts_{rank.ep}" if experts(file) else ""
        name = folder / f"stage_{rank.pp}{ep}_rank_{rank.tp}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, name, {"format": "pt"})
    return folder


def caught(file: str, spec: Path) -> tuple[str, Done]:
    """The first check that finds it, and its message."""
    whole, degrees = EXAMPLES / "checkpoints" / file, degrees_of(file)[0]
    ep = f", ep = {degrees.ep}" if experts(file) else ""
    ranks = f"{spec}:ranks(tp = {degrees.tp}, pp = {degrees.pp}{ep}{OTHERS.get(file, '')})"
    hf, mine = f"{spec}:hf({OTHERS.get(file, '').strip(', ')})", spec.parent / "mine"
    for what, argv in {
        "check": ("check", ranks),
        "convert": ("convert", whole, mine, "--from", hf, "--to", ranks),
        "against": ("verify", mine, "--from", ranks, "--against", save_genuine(file, spec.parent / "genuine")),
    }.items():
        done = ucpl(*argv, "--config", next(whole.glob("*config.json")))
        if done.status:
            return what, done
    return "nothing", done


@pytest.mark.parametrize("file", ["gemma3", "llama4"])
def test_the_right_spec_gives_what_torch_gives(file: str, tmp_path: Path) -> None:
    (tmp_path / "right.ucpl").write_text(edited(file, []))
    what, done = caught(file, tmp_path / "right.ucpl")
    assert what == "nothing", done.err


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m["name"])
def test_a_planted_mistake_is_found_and_named(mistake: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "spec.ucpl").write_text(edited(mistake["file"], mistake["edit"]))
    what, done = caught(mistake["file"], tmp_path / "spec.ucpl")
    sentence = " ".join(done.err.split())
    assert (what, done.status) == (mistake["caught"], 1), sentence
    assert f"error[{mistake['code']}]" in sentence and "internal error" not in sentence
    assert [text for text in mistake["says"] if text not in sentence] == [], done.err
