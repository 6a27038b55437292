"""Example architectures go to ranks, other degrees, and back, bit for bit.

The sources are files of their libraries.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ucpl
from tests.architectures.splits import Degrees, Rank, Tensors, split

EXAMPLES = Path(__file__).parents[2] / "examples" / "architectures"
DEGREES = {
    "t5": (Degrees(2, 1, 2), Degrees(2, 1, 3)),
    "whisper": (Degrees(2, 1, 2), Degrees(2, 1, 3)),
    "unet": (Degrees(1, 1, 2), Degrees(1, 1, 3)),
}
USUAL = (Degrees(2, 1, 2), Degrees(4, 1, 3))
EXPERTS = (Degrees(2, 2, 2), Degrees(4, 4, 3))
OTHERS = {"deepseek_v3": ", block = 4"}  # arguments besides the degrees
OF_ANY = {"unet"}  # the target describes itself
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.ucpl"))
assert NAMES


def experts(name: str) -> int:
    config = json.loads(next((EXAMPLES / "checkpoints" / name).glob("*config.json")).read_text())
    return int(next((config[n] for n in ("num_local_experts", "num_experts", "n_routed_experts") if n in config), 0))


def degrees_of(name: str) -> tuple[Degrees, Degrees]:
    return DEGREES.get(name, EXPERTS if experts(name) else USUAL)


def call(name: str, degrees: Degrees) -> str:
    ep = f", ep = {degrees.ep}" if experts(name) else ""
    return f"{EXAMPLES / name}.ucpl:ranks(tp = {degrees.tp}, pp = {degrees.pp}{ep}{OTHERS.get(name, '')})"


def hf(name: str) -> str:
    return f"{EXAMPLES / name}.ucpl:hf({OTHERS.get(name, '').strip(', ')})"


def tensors_of(folder: Path) -> Tensors:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def rank_of(folder: Path, name: str, rank: Rank) -> Tensors:
    ep = f"_experts_{rank.ep}" if experts(name) else ""
    return load_file(folder / f"stage_{rank.pp}{ep}_rank_{rank.tp}.safetensors")


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("name", NAMES)
def test_there_on_and_back(name: str, tmp_path: Path) -> None:
    whole = EXAMPLES / "checkpoints" / name
    first, second = degrees_of(name)
    ucpl.convert(whole, tmp_path / "first", call(name, first), layout=hf(name))
    said = [None if name in OF_ANY else call(name, degrees) for degrees in (first, second)]
    ucpl.convert(tmp_path / "first", tmp_path / "second", call(name, second), layout=said[0])
    ucpl.convert(tmp_path / "second", tmp_path / "back", hf(name), layout=said[1])
    assert_same(tensors_of(tmp_path / "back"), tensors_of(whole))
    for folder, degrees in (("first", first), ("second", second)):
        for rank, wanted in split(name, tensors_of(whole), degrees, experts(name)).items():
            assert_same(rank_of(tmp_path / folder, name, rank), wanted)


def test_bytes_of_two_elements_become_bf16(tmp_path: Path) -> None:
    """gpt-oss's experts as numbers, inputs first, made by torch from the file.

    Of ranks of four stages the same.
    """
    spec, source = EXAMPLES / "gpt_oss.ucpl", EXAMPLES / "checkpoints" / "gpt_oss"
    ranks = call("gpt_oss", Degrees(4, 2, 3))
    ucpl.convert(source, tmp_path / "ranks", ranks, layout=hf("gpt_oss"))
    ucpl.convert(tmp_path / "ranks", tmp_path / "bf16", f"{spec}:bf16()", layout=ranks)
    ucpl.convert(source, tmp_path / "direct", f"{spec}:bf16()", layout=hf("gpt_oss"))
    assert "quantization_config" not in json.loads((tmp_path / "direct" / "config.json").read_text())
    assert_same(tensors_of(tmp_path / "direct"), tensors_of(tmp_path / "bf16"))
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([positive, -positive])
    whole, wanted = tensors_of(source), {}
    for name, tensor in whole.items():
        if name.endswith("_blocks"):
            exponents = whole[name.replace("_blocks", "_scales")].to(torch.int32) - 127
            numbers = values[torch.stack([tensor & 15, tensor >> 4], -1).flatten(-2).long()]
            product = torch.ldexp(numbers, exponents[..., None]).flatten(-2).to(torch.bfloat16)
            wanted[name.removesuffix("_blocks")] = product.transpose(1, 2)
        elif not name.endswith("_scales"):
            wanted[name] = tensor
    assert_same(tensors_of(tmp_path / "bf16"), wanted)


def test_blocks_with_scales_become_bf16(tmp_path: Path) -> None:
    """DeepSeek's matrices times their scales, made by torch from the file.

    Ranks of two stages of tp = 3 give the same.
    """
    spec, source = EXAMPLES / "deepseek_v3.ucpl", EXAMPLES / "checkpoints" / "deepseek_v3"
    ranks = call("deepseek_v3", Degrees(2, 2, 3))
    ucpl.convert(source, tmp_path / "ranks", ranks, layout=hf("deepseek_v3"))
    ucpl.convert(tmp_path / "ranks", tmp_path / "bf16", f"{spec}:bf16(block = 4)", layout=ranks)
    whole, wanted = tensors_of(source), {}
    for name, tensor in whole.items():
        scale = whole.get(name + "_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            each = scale.repeat_interleave(4, 0)[:rows].repeat_interleave(4, 1)[:, :columns]
            wanted[name] = (tensor.to(torch.float32) * each).to(torch.bfloat16)
        elif not name.endswith("_scale_inv"):
            wanted[name] = tensor
    assert_same(tensors_of(tmp_path / "bf16"), wanted)
