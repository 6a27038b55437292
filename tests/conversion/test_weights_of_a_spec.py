"""A Hugging Face folder that its architecture's spec describes, as a source.

The target's layouts have masters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from tests.cli.command import ucpl as command
from tests.formats.huggingface.folders import llama_config, llama_shapes, random_of, save

HF = "llama.ucpl:hf()"
CONFIG = llama_config()


def folder(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = random_of(llama_shapes(CONFIG), dtype)
    save(path, tensors, CONFIG)
    return tensors


def plain(path: Path, out: Path) -> dict[str, dict[str, torch.Tensor]]:
    ucpl.convert(path, out, to="plain()")
    return torch.load(next(out.glob("*.pt")), weights_only=True)["params"]


def stacked(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensors of all layers under one name of the spec."""
    layers = CONFIG["num_hidden_layers"]
    assert isinstance(layers, int)
    return torch.stack([tensors[f"model.layers.{n}.{name}.weight"] for n in range(layers)])


@pytest.mark.parametrize("to", ["zero1(dp=2)", "zero3(dp=3)", "universal()", "zero2(dp=2)"])
def test_masters_are_the_weights(to, tmp_path):
    tensors = folder(tmp_path / "hf", torch.float32)
    ucpl.convert(tmp_path / "hf", tmp_path / "out", to, layout=HF)
    found = plain(tmp_path / "out", tmp_path / "plain")
    for state in ("weight", "fp32"):
        assert torch.equal(found["embed"][state], tensors["model.embed_tokens.weight"])
        down, q = stacked(tensors, "mlp.down_proj"), stacked(tensors, "self_attn.q_proj")
        assert torch.equal(found["down"][state], down)
        assert torch.equal(found["attn.q"][state].reshape(q.shape), q)


@pytest.mark.parametrize("to", ["zero1(dp=2, bf16=1)", "zero3(dp=2, bf16=1)", "universal(bf16=1)"])
def test_weights_are_rounded_where_the_target_trains_in_bf16(to, tmp_path):
    """The files describe the weights, and the spec does not.

    Fp32 masters are complete, weights rounded once.
    """
    tensors = folder(tmp_path / "hf", torch.float32)
    ucpl.convert(tmp_path / "hf", tmp_path / "out", to, layout=HF)
    found = plain(tmp_path / "out", tmp_path / "plain")
    embed = tensors["model.embed_tokens.weight"]
    assert torch.equal(found["embed"]["weight"], embed.bfloat16())
    assert torch.equal(found["embed"]["fp32"], embed)


def test_a_target_of_weights_of_16_bits_has_wide_masters(tmp_path):
    tensors = folder(tmp_path / "hf", torch.bfloat16)
    ucpl.convert(tmp_path / "hf", tmp_path / "out", "zero3(dp=2, bf16=1)", layout=HF)
    found = plain(tmp_path / "out", tmp_path / "plain")
    assert torch.equal(found["embed"]["fp32"], tensors["model.embed_tokens.weight"].float())
    assert found["embed"]["weight"].dtype is torch.bfloat16


def test_whose_names_a_target_has_is_remarked(tmp_path):
    """A job of transformers' class looks for the folder's names.

    Plain() is for people.
    """
    folder(tmp_path / "hf", torch.float32)
    said = [
        command("plan", "--checkpoint", tmp_path / "hf", "--from", HF, "--to", to).out
        for to in ("zero1(dp=2)", "plain()")
    ]
    assert "the target's tensors have the names of the model `llama` (`embed`)" in said[0]
    assert "--to 'zero1(...) of llama.ucpl:hf()'" in said[0]
    assert "remark" not in said[1]
