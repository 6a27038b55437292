"""Meta's folders: the cuts of its layers, and the names of transformers.

Expected values are made with torch here, after llama 3 (model.py) and transformers 4.46 (convert_llama_weights_to_hf.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucpl
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint

Weights = dict[str, torch.Tensor]
HEADS, GROUPS, WIDTH, INNER, WORDS, LAYERS = 4, 2, 16, 48, 22, 2
DEPTH = WIDTH // HEADS
PARAMS = {
    "dim": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": GROUPS,
    "vocab_size": -1,
    "multiple_of": 16,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
ROWS, COLUMNS = ("wq", "wk", "wv", "w1", "w3", "output"), ("wo", "w2")


def meta() -> Weights:
    """All weights under Meta's names."""
    made = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (WORDS, WIDTH)}
    for n in range(LAYERS):
        at = f"layers.{n}."
        shapes |= {
            at + "attention.wq.weight": (HEADS * DEPTH, WIDTH),
            at + "attention.wo.weight": (WIDTH, HEADS * DEPTH),
        }
        shapes |= dict.fromkeys((at + "attention.wk.weight", at + "attention.wv.weight"), (GROUPS * DEPTH, WIDTH))
        shapes |= dict.fromkeys((at + "feed_forward.w1.weight", at + "feed_forward.w3.weight"), (INNER, WIDTH))
        shapes |= {at + "feed_forward.w2.weight": (WIDTH, INNER)}
        shapes |= dict.fromkeys((at + "attention_norm.weight", at + "ffn_norm.weight"), (WIDTH,))
    shapes |= {"norm.weight": (WIDTH,), "output.weight": (WORDS, WIDTH)}
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def permuted(w: torch.Tensor, heads: int) -> torch.Tensor:
    """A projection in the order of transformers, by its converter's line."""
    return w.view(heads, w.shape[0] // heads // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)


def of_transformers(weights: Weights) -> Weights:
    ends = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    out = {}
    for name, one in weights.items():
        stem = name.removesuffix(".weight")
        if stem in ends:
            out[f"{ends[stem]}.weight"] = one
            continue
        _, layer, inner = stem.split(".", 2)
        heads = {"attention.wq": HEADS, "attention.wk": GROUPS}.get(inner)
        out[f"model.layers.{layer}.{NAMES[inner]}.weight"] = one if heads is None else permuted(one, heads)
    return out


def cut(weights: Weights, ranks: int, rows: bool) -> list[Weights]:
    """Parts as fairscale's layers of Meta's code have them."""
    parts: list[Weights] = [{} for _ in range(ranks)]
    for name, one in weights.items():
        last = name.split(".")[-2]
        dim = 0 if last in ROWS else 1 if last in COLUMNS else None
        dim = (0 if rows else 1) if last == "tok_embeddings" else dim
        for rank, part in enumerate(one.chunk(ranks, dim) if dim is not None else [one] * ranks):
            parts[rank][name] = part.clone()
    return parts


def written(folder: Path, ranks: int, *, rows: bool = True, params: dict[str, Any] | None = None) -> Weights:
    folder.mkdir()
    weights = meta()
    for rank, part in enumerate(cut(weights, ranks, rows)):
        torch.save({**part, "rope.freqs": torch.ones(2)}, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text(json.dumps(params or PARAMS))
    return weights


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(one, b[name]) for name, one in a.items())


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_is_the_model_of_transformers(ranks: int, rows: bool, tmp_path: Path) -> None:
    weights = written(tmp_path / "meta", ranks, rows=rows)
    ucpl.convert(tmp_path / "meta", tmp_path / "hf", layout="llama.ucpl:consolidated()", to="llama.ucpl:hf()")
    assert same(load_file(tmp_path / "hf/model.safetensors"), of_transformers(weights))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    expected = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": WORDS, "rope_theta": 500000.0}
    assert {key: config[key] for key in expected} == expected and "max_position_embeddings" not in config


@pytest.mark.parametrize("rows", [1, 0])
def test_a_model_of_transformers_is_a_folder_for_two_ranks(rows: int, tmp_path: Path) -> None:
    weights = written(tmp_path / "meta", 1)
    ucpl.convert(tmp_path / "meta", tmp_path / "hf", layout="llama.ucpl:consolidated()", to="llama.ucpl:hf()")
    (tmp_path / "hf/params.json").unlink()
    target = f"llama.ucpl:consolidated(mp = 2, rows = {rows})"
    ucpl.convert(tmp_path / "hf", tmp_path / "back", layout="llama.ucpl:hf()", to=target)
    for rank, part in enumerate(cut(weights, 2, bool(rows))):
        assert same(torch.load(tmp_path / f"back/consolidated.{rank:02}.pth"), part)
    made = json.loads((tmp_path / "back/params.json").read_text())
    assert {key: made[key] for key in ("dim", "n_heads", "n_kv_heads", "n_layers", "vocab_size")} == {
        "dim": WIDTH,
        "n_heads": HEADS,
        "n_kv_heads": GROUPS,
        "n_layers": LAYERS,
        "vocab_size": WORDS,
    }
    inner = int(made.get("ffn_dim_multiplier", 1) * int(8 * WIDTH / 3))
    assert made["multiple_of"] * -(-inner // made["multiple_of"]) == INNER  # as Meta's FeedForward computes it


def test_other_ranks_keep_names_and_texts(tmp_path: Path) -> None:
    weights = written(tmp_path / "meta", 2)
    ucpl.convert(tmp_path / "meta", tmp_path / "one", to="meta(mp = 1)")
    assert same(torch.load(tmp_path / "one/consolidated.00.pth"), weights)
    assert json.loads((tmp_path / "one/params.json").read_text()) == PARAMS


def test_the_form_of_mistral_has_one_file(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file(meta(), tmp_path / "source/consolidated.safetensors")
    (tmp_path / "source/params.json").write_text(json.dumps({**PARAMS, "sliding_window": 4096, "head_dim": DEPTH}))
    ucpl.convert(tmp_path / "source", tmp_path / "hf", layout="llama.ucpl:consolidated()", to="llama.ucpl:hf()")
    assert same(load_file(tmp_path / "hf/model.safetensors"), of_transformers(meta()))
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "mistral"
    ucpl.convert(tmp_path / "source", tmp_path / "copy", to="meta()")
    assert same(load_file(tmp_path / "copy/consolidated.safetensors"), meta())


def test_scaled_rotary_embedding_needs_a_config(tmp_path: Path) -> None:
    written(tmp_path / "meta", 1, params={**PARAMS, "use_scaled_rope": True})
    with pytest.raises(UcplError):  # its factors are in no file
        ucpl.convert(tmp_path / "meta", tmp_path / "hf", layout="llama.ucpl:consolidated()", to="llama.ucpl:hf()")


def test_params_of_another_program_are_no_config(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/params.json").write_text(json.dumps(PARAMS))
    save_file({"a": torch.ones(3)}, tmp_path / "model/model.safetensors")
    ucpl.convert(tmp_path / "model", tmp_path / "copy", to="safetensors()")
    assert not (tmp_path / "copy/config.json").exists()


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(UcplError) as caught:
        ucpl.convert(*args, **kwargs)
    return caught.value.diagnostics[0].code


def test_refusals(tmp_path: Path) -> None:
    written(tmp_path / "meta", 2)
    assert (
        refused(tmp_path / "meta", tmp_path / "out", to="meta(mp = 4)") == "E471"
    )  # two heads of keys over four ranks
    ucpl.convert(tmp_path / "meta", tmp_path / "hf", layout="llama.ucpl:consolidated()", to="llama.ucpl:hf()")
    assert refused(tmp_path / "hf", tmp_path / "out", to="meta(mp = 2)") == "E449"
    first = torch.load(tmp_path / "meta/consolidated.00.pth")
    torch.save({**first, "vision.weight": torch.ones(3)}, tmp_path / "meta/consolidated.00.pth")
    assert refused(tmp_path / "meta", tmp_path / "out", to="meta(mp = 1)") == "E458"
    second = torch.load(tmp_path / "meta/consolidated.01.pth")
    torch.save({**second, "vision.weight": torch.zeros(3)}, tmp_path / "meta/consolidated.01.pth")
    assert refused(tmp_path / "meta", tmp_path / "out", to="meta(mp = 1)") == "E464"
    (tmp_path / "meta/consolidated.00.pth").unlink()
    assert refused(tmp_path / "meta", tmp_path / "out", to="meta(mp = 1)") == "E458"


def test_frequencies_are_named_as_not_read(tmp_path: Path) -> None:
    written(tmp_path / "meta", 2)
    opened = open_checkpoint(tmp_path / "meta")
    assert [one.name for one in opened.not_read] == [f"consolidated.{n:02}.pth: rope.freqs" for n in (0, 1)]
