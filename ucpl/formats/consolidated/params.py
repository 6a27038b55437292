"""params.json of Meta and Mistral, and config.json of transformers.

Sources: llama 3 (model.py, ModelArgs), transformers 4.46 (convert_llama_weights_to_hf.py), mistral-inference (args.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ucpl.extents import StoredTensor
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.model_texts import TEXT_BYTES_MAX, WrittenTexts, carried_texts
from ucpl.files.texts import read_small
from ucpl.texts import Json

__all__ = ["PARAMS", "advice", "config_made", "written"]

PARAMS = "params.json"
CONFIG = "config.json"
_OWN = (PARAMS, "tokenizer.model", "tekken.json")  # the files that Meta's and Mistral's own code reads
_MULTIPLES = (256, 1024, 4096)  # of the released models
_MODELS = ("llama", "mistral")


Shapes = Mapping[str, tuple[int, ...]]


def config_made(folder: Path, shapes_of: Callable[[], Shapes]) -> dict[str, Json] | None:
    """Make config.json from params.json.

    None if it does not state all. Shapes of the weights give the sizes that it leaves open.
    """
    path = folder / PARAMS
    raw = read_small(path, TEXT_BYTES_MAX) if os.path.isfile(path) else None
    params = _object(raw or b"")
    params = {**params, **inner} if isinstance(inner := params.get("model"), dict) else params
    dim, heads, layers = (params.get(key) for key in ("dim", "n_heads", "n_layers"))
    if not (isinstance(dim, int) and isinstance(heads, int) and heads > 0 and isinstance(layers, int)):
        return None
    if params.get("use_scaled_rope") or params.get("moe"):
        return None  # the factors are in no file, or another class is meant
    shapes = shapes_of()
    rows, inner_rows = shapes.get("tok_embeddings.weight"), shapes.get("layers.0.feed_forward.w1.weight")
    if rows is None or inner_rows is None:
        return None
    window = params.get("sliding_window")
    kind = "mistral" if window is not None else "llama"
    config: dict[str, Json] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_size": dim,
        "intermediate_size": inner_rows[0],
        "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": params.get("rope_theta", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "vocab_size": rows[0],
    }
    config |= {key: value for key, value in (("head_dim", params.get("head_dim")), ("sliding_window", window)) if value}
    return config


def written(source: Checkpoint, targets: Sequence[StoredTensor]) -> WrittenTexts:
    """Texts of a target: params.json and the tokenizer."""
    texts = carried_texts(source)
    if source.format == "consolidated":
        return WrittenTexts(texts)
    kept = {name: text for name, text in texts.items() if name in _OWN}
    held = source.state.blobs.get("huggingface_files")
    others = [name for name in held if name not in _OWN] if isinstance(held, dict) else []
    left = dict.fromkeys(map(str, others), f"Meta's code reads {PARAMS} and its own tokenizer's file")
    made = _params(_object(texts.get(CONFIG, ""))) if PARAMS not in kept else None
    if made is not None:
        kept[PARAMS] = json.dumps(made, indent=2) + "\n"
    return WrittenTexts(kept, (), left)


def advice(source: Checkpoint) -> tuple[str, ...]:
    """Advice for a target without params.json."""
    if PARAMS in written(source, ()).texts:
        return ()
    return (f"Meta's code needs {PARAMS}, which this source does not state: write it next to the weights",)


def _params(config: Mapping[str, Json]) -> dict[str, Json] | None:
    """Make params.json from config.json; None for other models."""
    dim, inner = config.get("hidden_size"), config.get("intermediate_size")
    if config.get("model_type") not in _MODELS or not (isinstance(dim, int) and isinstance(inner, int)):
        return None
    heads = config.get("num_attention_heads")
    scaling = config.get("rope_parameters", config.get("rope_scaling"))
    theta = (
        scaling.get("rope_theta", config.get("rope_theta")) if isinstance(scaling, dict) else config.get("rope_theta")
    )
    found = _inner(dim, inner)
    if found is None:
        return None
    multiple, factor = found
    params: dict[str, Json] = {
        "dim": dim,
        "n_layers": config.get("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads", heads),
        "vocab_size": config.get("vocab_size"),
        "multiple_of": multiple,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta if theta is not None else 10000.0,
    }
    if factor is not None:
        params["ffn_dim_multiplier"] = factor
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type", "default")) == "llama3":
        params["use_scaled_rope"] = True
    return params


def _inner(dim: int, inner: int) -> tuple[int, float | None] | None:
    """`multiple_of` and `ffn_dim_multiplier` for this inner size."""
    base = int(2 * (4 * dim) / 3)
    for factor in (None, 1.3, 1.5, 1.4):
        size = base if factor is None else int(factor * base)
        for multiple in (*_MULTIPLES, inner):
            if multiple * -(-size // multiple) == inner:
                return multiple, factor
    factor = inner / base
    return (inner, factor) if 0 < int(factor * base) <= inner else None


def _object(text: str | bytes) -> dict[str, Json]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
