"""Mistakes that every shape allows: `ucpl verify` finds each by the class.

They are planted in a spec. A round trip through one wrong spec is the identity, so no conversion shows them. If no
witness can decide, the verb reports this.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

import ucpl
from tests.interop.families import FAMILIES, SQUARE, Case
from ucpl.cli import main
from ucpl.inference.hf import import_hf
from ucpl.resources import spec_text

pytestmark = pytest.mark.interop

# Shipped specs, and texts of `import hf`: (class, config, spec, the layout whose lines are changed).
MODELS: dict[str, tuple[Case, str, str]] = {
    "llama": (Case("LlamaForCausalLM", SQUARE | {"num_key_value_heads": 4}, (2, 4)), "llama.ucpl", "hf"),
    "mixtral": (FAMILIES["mixtral"]["square"], "llama.ucpl", "mixtral"),
    "gpt2": (FAMILIES["gpt2"]["square"], "gpt2.ucpl", "hf"),
    **{
        f"imported {name}": (FAMILIES[name]["square"], "", "hf")
        for name in ("qwen3_moe", "gpt_neox", "phi3", "deepseek_v3", "mamba2", "t5")
    },
}


def swapped(a: str, b: str) -> list[str]:
    return [a, "\0", b, a, "\0", b]


K_V = 'attn.k, attn.v = (g d) h as "{layer}self_{name}_proj.weight"'
GATE_UP = 'gate, up = f h as "{mlp}{name}_proj.weight"'


def apart(first: str, second: str) -> str:
    """Two lines, each for one of two tensors."""
    return f'{first}_proj.weight"\n  {second}_proj.weight"'


# model, mistake: the text of a line, and its replacement, in turns
MISTAKES: dict[tuple[str, str], list[str]] = {
    ("llama", "a square matrix on its side"): ["attn.out = h (g r d)", "attn.out = (g r d) h"],
    ("llama", "gate and up"): [GATE_UP, apart('gate = f h as "{mlp}up', 'up = f h as "{mlp}gate')],
    ("llama", "key and value"): [K_V, apart('attn.k = (g d) h as "{attn}v', 'attn.v = (g d) h as "{attn}k')],
    ("llama", "rotary pairs for halves"): [
        "attn.q = (g r d) h", "attn.q = (g r k two) h",
        K_V, apart('attn.k = (g k two) h as "{attn}k', 'attn.v = (g d) h as "{attn}v'),
    ],
    ("mixtral", "expert ids off by one"): ["experts.{e}.", "experts.{(e + 1) % config.num_local_experts}."],
    ("mixtral", "gate and up"): swapped(".w1.", ".w3."),
    ("gpt2", "a square matrix on its side"): ["attn.out = (n d) h", "attn.out = h (n d)"],
    ("gpt2", "key before query"): ["(q: n d + k: n d + v: n d)", "(k: n d + q: n d + v: n d)"],
    ("imported qwen3_moe", "expert ids off by one"): ["experts.{e}.", "experts.{(e + 1) % config.num_local_experts}."],
    ("imported qwen3_moe", "a square matrix on its side"): [
        "self_attn.o_proj.weight = hidden_size (n@tp d)", "self_attn.o_proj.weight = (n@tp d) hidden_size",
    ],
    ("imported gpt_neox", "query, key, value part by part"): [
        "(n@tp (q: d + k: d + v: d)) hidden", "(q: n d + k: n d + v: n d) hidden",
    ],
    ("imported phi3", "up before gate"): [
        "(gate: intermediate_size@chunk(tp) + up:", "(up: intermediate_size@chunk(tp) + gate:",
    ],
    ("imported phi3", "value before key"): ["+ k: g@tp d + v: g@tp d)", "+ v: g@tp d + k: g@tp d)"],
    ("imported deepseek_v3", "expert ids off by one"): ["experts.{e}.", "experts.{(e + 1) % config.n_routed_experts}."],
    ("imported mamba2", "gate and x"): ["(z: n@tp d + x: n@tp d", "(x: n@tp d + z: n@tp d"],
    ("imported t5", "a square matrix on its side"): [
        "wi.weight = d_ff@chunk(tp) d_model", "wi.weight = d_model d_ff@chunk(tp)",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each class, with random weights."""
    out = {}
    for name, (case, _, _) in MODELS.items():
        torch.manual_seed(11)
        kind = getattr(transformers, case.kind)
        model = kind(kind.config_class(**case.config))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) / 8)
        out[name] = tmp_path_factory.mktemp("planted") / "hf"
        model.save_pretrained(out[name])
    return out


def written(name: str, folder: Path, place: Path, changes: list[str]) -> str:
    """The author's spec with changes in its layout, and its name."""
    _, file, layout = MODELS[name]
    text = spec_text("decoder.ucpl") if name == "llama" else spec_text(file) if file else import_hf(folder)
    base = {"gpt2": "openai", "llama": "decoder_hf"}.get(name, layout)  # which has the lines
    head, mark, body = text.partition(f"layout {base}(")
    body, end, rest = body.partition("\nlayout ")
    body = re.sub(r"(?<=\S)\s+(?=as )", " ", re.sub(r"(?<=\S) +", " ", body))
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        assert before in body, body
        body = body.replace(before, after)
    (place / ("decoder.ucpl" if name == "llama" else "mine.ucpl")).write_text(head + mark + body + end + rest)
    if name == "llama":
        (place / "mine.ucpl").write_text(spec_text(file))
    return f"{place / 'mine.ucpl'}:{layout}()"


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_verify_finds_a_planted_mistake_by_the_class(
    name: str, mistake: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = written(name, folders[name], tmp_path, MISTAKES[name, mistake])
    ucpl.convert(folders[name], tmp_path / "same", layout, layout=layout)
    assert ucpl.compare(folders[name], tmp_path / "same", a_layout=layout, b_layout=layout), (
        "a round trip through one wrong spec is the identity"
    )
    assert main(["verify", str(folders[name]), "--from", layout]) == 1
    said = "".join(capsys.readouterr())
    assert "error[E707]: transformers contradicts the spec: the logits differ, by up to" in said


@pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith("imported")])
def test_the_right_spec_is_witnessed(
    name: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folders[name]), "--from", written(name, folders[name], tmp_path, [])]) == 0
    assert re.search(r"  witnessed by transformers: [\d,]+ logits are equal, bit for bit", capsys.readouterr().out)


def test_what_is_imported_is_no_witness_for_itself_and_ranks_have_a_reference(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text of `import hf` is no evidence for its own folder.

    Files of ranks that were cut by it are compared with the class by a reference; without one, the verb reports that
    they are not witnessed.
    """
    name = "imported phi3"
    layout = written(name, folders[name], tmp_path, [])
    assert main(["verify", str(folders[name]), "--from", layout]) == 0
    assert "not witnessed by transformers: `import hf` writes the same layout" in capsys.readouterr().out
    ranks = layout.replace("hf()", "tensor_parallel(tp=2)")
    ucpl.convert(folders[name], tmp_path / "ranks", ranks, layout=layout)
    text = (tmp_path / "mine.ucpl").read_text()
    (tmp_path / "wrong.ucpl").write_text(
        text.replace("v: g@tp d", "w: g@tp d").replace("k: g@tp d", "v: g@tp d").replace("w: g@tp d", "k: g@tp d")
    )
    wrong = ranks.replace("mine.ucpl", "wrong.ucpl")
    for spec, reference, status, text in (
        (wrong, [], 0, "not witnessed by transformers: there is no Hugging Face folder of the same weights"),
        (wrong, ["--reference", str(folders[name])], 1, "error[E707]: transformers contradicts the spec"),
        (ranks, ["--reference", str(folders[name])], 0, "  witnessed by transformers: "),
    ):
        assert main(["verify", str(tmp_path / "ranks"), "--from", spec, *reference]) == status
        assert text in "".join(capsys.readouterr())
