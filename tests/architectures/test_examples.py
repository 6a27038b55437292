"""Example architectures: what their libraries wrote goes to ranks, to ranks of other degrees, and comes back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucpl
from tests.architectures.splits import Degrees, Rank, Tensors, split

EXAMPLES = Path(__file__).parents[2] / "examples" / "architectures"
DEGREES = {"t5": (Degrees(2, 1, 2), Degrees(2, 1, 3)), "whisper": (Degrees(2, 1, 2), Degrees(2, 1, 3))}
USUAL = (Degrees(2, 1, 2), Degrees(4, 1, 3))
EXPERTS = (Degrees(2, 2, 2), Degrees(4, 4, 3))
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.ucpl"))
assert NAMES


def experts(name: str) -> int:
    config = json.loads((EXAMPLES / "checkpoints" / name / "config.json").read_text())
    return int(config.get("num_local_experts", config.get("num_experts", 0)))


def degrees_of(name: str) -> tuple[Degrees, Degrees]:
    return DEGREES.get(name, EXPERTS if experts(name) else USUAL)


def call(name: str, degrees: Degrees) -> str:
    ep = f", ep = {degrees.ep}" if experts(name) else ""
    return f"{EXAMPLES / name}.ucpl:ranks(tp = {degrees.tp}, pp = {degrees.pp}{ep})"


def tensors_of(folder: Path) -> Tensors:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def rank_of(folder: Path, name: str, rank: Rank) -> Tensors:
    ep = f"_experts_{rank.ep}" if experts(name) else ""
    return load_file(folder / f"stage_{rank.pp}{ep}_rank_{rank.tp}.safetensors")


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", NAMES)
def test_there_on_and_back(name: str, tmp_path: Path) -> None:
    whole, hf = EXAMPLES / "checkpoints" / name, f"{EXAMPLES / name}.ucpl:hf()"
    first, second = degrees_of(name)
    ucpl.convert(whole, tmp_path / "first", call(name, first), layout=hf)
    ucpl.convert(tmp_path / "first", tmp_path / "second", call(name, second), layout=call(name, first))
    ucpl.convert(tmp_path / "second", tmp_path / "back", hf, layout=call(name, second))
    assert_same(tensors_of(tmp_path / "back"), tensors_of(whole))
    for folder, degrees in (("first", first), ("second", second)):
        for rank, wanted in split(name, tensors_of(whole), degrees, experts(name)).items():
            assert_same(rank_of(tmp_path / folder, name, rank), wanted)
