"""transformers writes, ucpl converts to another dialect and back, transformers loads.

Parameters and logits are equal. Logits are compared bit for bit in fp32; a load with a missing or an unexpected key
fails.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ucpl
from ucpl import api
from ucpl.inference.hf import import_hf
from ucpl.resources import spec_text
from ucpl.verification.evidence import transformers_class

pytestmark = pytest.mark.interop

ODD: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 36, "intermediate_size": 22, "num_hidden_layers": 4, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 4, "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EVEN = {**ODD, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}  # out is square
BIASED = {**ODD, "attention_bias": True, "mlp_bias": True}
QWEN2 = {k: v for k, v in ODD.items() if k != "head_dim"}
GPT2 = {
    "vocab_size": 61,
    "n_embd": 20,
    "n_layer": 4,
    "n_head": 5,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTRAL = {**ODD, "intermediate_size": 24, "num_local_experts": 3, "num_experts_per_tok": 2}

# name: (class, config, layout on disk, layout in between)
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "llama": ("Llama", EVEN, "llama.ucpl:hf()", "llama.ucpl:megatron(tp=2, pp=2)"),
    "llama odd heads": ("Llama", ODD, "llama.ucpl:hf()", "llama.ucpl:megatron(tp=2, pp=2)"),
    "llama tied": ("Llama", {**ODD, "tie_word_embeddings": True}, "llama.ucpl:hf()", "llama.ucpl:megatron(tp=2, pp=2)"),
    "llama biased": ("Llama", BIASED, "llama.ucpl:hf()", "llama.ucpl:megatron(tp=2)"),
    "llama pairs": ("Llama", ODD, "llama.ucpl:hf()", "llama.ucpl:pairs()"),
    "llama norms minus one": ("Llama", ODD, "llama.ucpl:hf()", "llama.ucpl:megatron_1p(tp=2, pp=2)"),
    "llama autotp": ("Llama", ODD, "llama.ucpl:hf()", "llama.ucpl:autotp(tp=2)"),
    "mistral": ("Mistral", ODD, "llama.ucpl:hf()", "llama.ucpl:megatron(tp=2, pp=2)"),
    "qwen2": ("Qwen2", QWEN2, "llama.ucpl:hf()", "llama.ucpl:megatron(tp=2, pp=2)"),
    "qwen3": ("Qwen3", ODD, "llama.ucpl:hf()", "llama.ucpl:megatron(tp=2, pp=2)"),
    "mixtral": ("Mixtral", MIXTRAL, "llama.ucpl:mixtral()", "llama.ucpl:megatron_moe(tp=2, pp=2)"),
    "gpt2": ("GPT2", GPT2, "gpt2.ucpl:hf()", "gpt2.ucpl:megatron(tp=2, pp=2)"),
}  # fmt: skip


def made(name: str, folder: Path, shard: str = "20KB") -> Any:
    """A model with random weights, norms and biases, saved by transformers."""
    kind, sizes, _, _ = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{kind}Config")(**sizes)
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
            if "one" in name and parameter.dim() == 1:
                parameter.clamp_(0.5, 2)  # where minus one is exact
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def loaded(folder: Path) -> Any:
    """The model of transformers' loader, without missing or unexpected keys."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not told.get(what), (what, told[what])
    return model.eval()


def logits(model: Any) -> Any:
    ids = torch.arange(24).reshape(2, 12) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_gives_the_same_logits_bit_for_bit(name: str, tmp_path: Path) -> None:
    _, _, here, there = MODELS[name]
    model = made(name, tmp_path / "hf")
    ucpl.convert(tmp_path / "hf", tmp_path / "there", there, layout=here)
    back = here.replace("()", '(shard="12KB")')
    ucpl.convert(tmp_path / "there", tmp_path / "back", back, layout=there)
    again = loaded(tmp_path / "back")
    assert type(again) is type(model)
    ours, theirs = model.state_dict(), again.state_dict()
    assert set(ours) == set(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert torch.equal(logits(model), logits(again))


@pytest.mark.parametrize("cuts", [1, 2])
def test_pickled_weights_in_bf16_compute_as_the_class_in_bf16(cuts: int, tmp_path: Path) -> None:
    import json

    model = made("llama", tmp_path / "hf")
    here = tmp_path / "bin"
    here.mkdir()
    shutil.copy(tmp_path / "hf" / "config.json", here)
    tensors = model.state_dict()
    files = (
        ["pytorch_model.bin"] if cuts == 1 else [f"pytorch_model-{n + 1:05d}-of-{cuts:05d}.bin" for n in range(cuts)]
    )
    for n, file in enumerate(files):
        torch.save({name: tensors[name] for name in list(tensors)[n::cuts]}, here / file)
    if cuts > 1:
        where = {name: files[i % cuts] for i, name in enumerate(tensors)}
        (here / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert torch.equal(logits(loaded(here)), logits(model)), "transformers reads the folder itself"
    ucpl.convert(here, tmp_path / "same", "safetensors()")
    assert torch.equal(logits(loaded(tmp_path / "same")), logits(model))
    ucpl.convert(here, tmp_path / "half", 'safetensors(dtype="bf16")')
    half, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", output_loading_info=True)
    assert half.dtype == torch.bfloat16 and not any(told[k] for k in ("missing_keys", "unexpected_keys"))
    cast = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    assert torch.equal(logits(half.eval()), logits(cast.eval()))


def test_one_weight_changed_on_the_way_is_seen(tmp_path: Path) -> None:
    _, _, here, there = MODELS["llama"]
    model = made("llama", tmp_path / "hf")
    ucpl.convert(tmp_path / "hf", tmp_path / "there", there, layout=here)
    path = tmp_path / "there" / "release" / "mp_rank_01_000" / "model_optim_rng.pt"
    value = torch.load(path, weights_only=True)
    value["model"]["decoder.layers.1.mlp.linear_fc2.weight"][3, 3] += 0.5
    torch.save(value, path)
    ucpl.convert(tmp_path / "there", tmp_path / "back", here, layout=there)
    assert not torch.equal(logits(model), logits(loaded(tmp_path / "back")))


def test_any_shard_size_loads_and_counts_as_transformers_does(tmp_path: Path) -> None:
    import json

    model = made("llama", tmp_path / "hf", "20KB")
    for shard in ("1KB", "20KB", "1GB"):
        folder = tmp_path / shard
        ucpl.convert(tmp_path / "hf", folder, f'safetensors(shard="{shard}")')
        assert torch.equal(logits(model), logits(loaded(folder)))
    name = "model.safetensors.index.json"
    ours, theirs = (json.loads((tmp_path / f / name).read_text()) for f in ("20KB", "hf"))
    assert ours["metadata"] == theirs["metadata"] and set(ours["weight_map"]) == set(theirs["weight_map"])
    assert not (tmp_path / "1GB" / name).exists()


@pytest.mark.parametrize("name", ["llama tied", "mixtral", "gpt2", "qwen2"])
def test_import_describes_what_the_class_saves(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "hf")
    spec = tmp_path / "made.ucpl"
    spec.write_text(import_hf(tmp_path / "hf"))
    checkpoint = api.open_checkpoint(tmp_path / "hf")
    api.source_side(checkpoint, f"{spec}:hf()")  # fits, tensor for tensor
    tied = name in ("llama tied", "gpt2")
    assert ("alias lm_head.weight" in spec.read_text()) == tied
    if name == "gpt2":
        return
    there = f"{spec}:tensor_parallel(tp=3)"
    ucpl.convert(tmp_path / "hf", tmp_path / "tp", there, layout=f"{spec}:hf()")
    ucpl.convert(tmp_path / "tp", tmp_path / "back", f"{spec}:hf()", layout=there)
    assert torch.equal(logits(loaded(tmp_path / "hf")), logits(loaded(tmp_path / "back")))
    from safetensors.torch import load_file

    whole = loaded(tmp_path / "hf").state_dict()["model.layers.2.self_attn.o_proj.weight"]
    part = load_file(tmp_path / "tp" / "tp_01.safetensors")["model.layers.2.self_attn.o_proj.weight"]
    assert torch.equal(part, whole.chunk(3, 1)[1])  # rowwise


@pytest.mark.parametrize("name", ["llama tied", "qwen3", "gpt2"])
def test_import_of_a_config_alone_has_the_shapes_of_the_class(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "hf")
    spec = tmp_path / "made.ucpl"
    spec.write_text(import_hf(tmp_path / "hf" / "config.json"))
    checkpoint = api.open_checkpoint(tmp_path / "hf")
    side, _ = api.source_side(checkpoint, f"{spec}:hf()")
    stored = {"/".join(map(str, h.key)): h.shape for p in side.placement.parts for h in p.homes}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert stored == {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}


K_V = 'attn.k, attn.v = (g d) h as "{layer}self_{name}_proj.weight"'
V = 'attn.v = (g d) h as "{attn}v_proj.weight"'
GATE_UP = 'gate, up = f h as "{mlp}{name}_proj.weight"'
MISTAKES = {
    "gate and up": ("llama", [(GATE_UP, 'gate = f h as "{mlp}up_proj.weight"\n  up = f h as "{mlp}gate_proj.weight"')]),
    "key and value": (
        "llama", [(K_V, 'attn.k = (g d) h as "{attn}v_proj.weight"\n  attn.v = (g d) h as "{attn}k_proj.weight"')],
    ),
    "rotary": (
        "llama",
        [("attn.q = (g r d) h", "attn.q = (g r k two) h"), (K_V, f'attn.k = (g k two) h as "{{attn}}k_proj.weight"\n  {V}')],
    ),
    "gpt2: a square matrix as it is not": ("gpt2", [("attn.out = (n d) h", "attn.out = h (n d)")]),
    "gpt2: k before q": ("gpt2", [("h (q: n d + k: n d", "h (k: n d + q: n d")]),
    "gpt2: head by head": ("gpt2", [("h (q: n d + k: n d + v: n d)", "h (n (q: d + k: d + v: d))")]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", [*MISTAKES, "none", "gpt2: none"])
def test_planted_mistakes_are_caught_by_the_class(mistake: str, tmp_path: Path) -> None:
    name, changes = MISTAKES.get(mistake, ("gpt2" if "gpt2" in mistake else "llama", []))
    made(name, tmp_path / "hf")
    file, base = ("gpt2", "openai") if name == "gpt2" else ("decoder", "decoder_hf")  # which has the lines
    head, mark, body = spec_text(f"{file}.ucpl").partition(f"layout {base}(")
    body = re.sub(r"(?<=\S) +", " ", body)
    for old, new in changes:
        assert old in body
        body = body.replace(old, new)
    (tmp_path / "mine.ucpl").write_text(spec_text(f"{name}.ucpl"))
    (tmp_path / ("mine.ucpl" if name == "gpt2" else "decoder.ucpl")).write_text(head + mark + body)
    layout = f"{tmp_path / 'mine.ucpl'}:hf()"
    checkpoint = api.open_checkpoint(tmp_path / "hf", layout)
    side, _ = api.source_side(checkpoint, layout)
    found = transformers_class(side, checkpoint)
    assert found.verdict == ("agrees" if "none" in mistake else "contradicts"), found


def test_a_megatron_folder_against_a_reference(tmp_path: Path) -> None:
    _, _, here, there = MODELS["llama"]
    made("llama", tmp_path / "hf")
    ucpl.convert(tmp_path / "hf", tmp_path / "m", there, layout=here)
    checkpoint = api.open_checkpoint(tmp_path / "m", there)
    side, _ = api.source_side(checkpoint, there)
    assert transformers_class(side, checkpoint, reference=tmp_path / "hf").verdict == "agrees"
