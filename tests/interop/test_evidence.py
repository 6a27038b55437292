"""Evidence must be able to fail: logits without effect are no witness."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ucpl
from ucpl.extents import Seen
from ucpl.inference.hf import import_hf
from ucpl.resources import spec_text
from ucpl.verification.model_class import HuggingFaceClass

pytestmark = pytest.mark.interop

SHIPPED = Path(__file__).parents[2] / "examples" / "architectures" / "checkpoints"
SIZES = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYER = "model.layers.0."


def swapped(text: str, a: str, b: str) -> str:
    """The layout `hf` of a text with two file keys exchanged."""
    head, mark, body = text.partition("layout hf(")
    body, end, rest = body.partition("\nlayout ")
    assert a in body and b in body
    other = {a: b, b: a}
    either = re.compile(f"{re.escape(a)}|{re.escape(b)}")
    shared = re.compile(rf'  (\S*{re.escape(a)}\S*),\s+(\S*{re.escape(b)}\S*) = ([^"]*?)\s+as "{{layer}}{{name}}"')
    alone = shared.sub(_lines_alone, body)
    made = re.sub(r'"[^"\n]*"', lambda key: either.sub(lambda m: other[m[0]], key[0]), alone)
    assert made != alone
    return head + mark + made + end + rest


def _lines_alone(line: re.Match[str]) -> str:
    """Lines of two tensors with explicit keys."""
    names = [each.removesuffix("[l]") for each in line.groups()[:2]]
    return "\n".join(f'  {name}[l] = {line[3]} as "{{layer}}{name}"' for name in names)


def notes_of(folder: Path, text: str, place: Path) -> tuple[list[str], str]:
    """Codes of the findings of `verify`, and its notes."""
    (place / "mine.ucpl").write_text(text)
    found = ucpl.verify(folder, layout=f"{place / 'mine.ucpl'}:hf()")
    return [d.code for d in found.findings], "\n".join(found.notes)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hybrid", ("feed_forward.gate_proj.", "feed_forward.up_proj.")),
        ("qwen3_next", ("shared_expert.gate_proj.", "shared_expert.up_proj.")),
        ("llama4", ("shared_expert.gate_proj.", "shared_expert.up_proj.")),
        ("gemma3", ("mlp.gate_proj.", "mlp.up_proj.")),
    ],
)
def test_shipped_checkpoints_show_a_swap(name: str, parts: tuple[str, str], tmp_path: Path) -> None:
    codes, notes = notes_of(SHIPPED / name, swapped(import_hf(SHIPPED / name), *parts), tmp_path)
    assert codes == ["E707"], notes


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma3n", "gpt_neox", "gpt_oss", "hybrid", "llama4", "mamba2", "qwen3_next", "t5"]
)
def test_shipped_checkpoints_have_logits_that_differ(name: str) -> None:
    found = Seen.of(HuggingFaceClass()(SHIPPED / name))
    assert found.varies and not found.odd


def llama(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
        change(dict(model.named_parameters()))
    model.save_pretrained(folder)
    return folder


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a NaN": (lambda p: p["model.norm.weight"][0].fill_(float("nan")), "all 121 logits are NaN or infinite"),
    "a norm of zeros": (lambda p: p["model.norm.weight"].zero_(), "all 121 logits are 0"),
    "weights of zero": (lambda p: [t.zero_() for t in p.values()], "all 121 logits are 0"),
    "gate and up are equal": (
        lambda p: p[LAYER + "mlp.gate_proj.weight"].copy_(p[LAYER + "mlp.up_proj.weight"]),
        f"equal parameters could be swapped: {LAYER}mlp.gate_proj.weight and 1 more",
    ),
    "down begins at zero": (
        lambda p: p[LAYER + "mlp.down_proj.weight"].zero_(),
        f"no logit depends on {LAYER}mlp.gate_proj.weight and 2 more",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_logits_that_a_swap_leaves_equal_are_no_witness_of_it(change: str, tmp_path: Path) -> None:
    how, why = CHANGES[change]
    folder = llama(tmp_path / "hf", how)
    line = re.compile(r'gate, up +(= f h +as )"\{mlp\}\{name\}_proj')
    turned = r'gate \1"{mlp}up_proj.weight"\n  up \1"{mlp}gate_proj'
    (tmp_path / "decoder.ucpl").write_text(line.sub(turned, spec_text("decoder.ucpl")))
    codes, notes = notes_of(folder, spec_text("llama.ucpl"), tmp_path)
    assert codes == [] and f"not witnessed by transformers: {why}" in notes
    assert "not witnessed: the identity of each tensor" in notes


def test_sane_weights_witness_and_nothing_is_written_to_standard_error(tmp_path: Path) -> None:
    """transformers' progress bars and warnings are silent: standard error is for diagnostics."""
    folder = llama(tmp_path / "hf", lambda p: None)
    (tmp_path / "mine.ucpl").write_text(spec_text("llama.ucpl"))
    command = [sys.executable, "-m", "ucpl", "verify", str(folder), "--from", f"{tmp_path / 'mine.ucpl'}:hf()"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^ +witnessed by transformers: 121 logits are equal, bit for bit$", done.stdout, re.M)
    assert "not witnessed: the identity" not in done.stdout
