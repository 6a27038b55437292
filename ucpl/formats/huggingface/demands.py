"""Checks of transformers on a folder: config.json and shapes of tensors.

from_pretrained builds the class of config.json and rejects a tensor of another shape. Missing layers begin with random
numbers, and layers beyond the config are left out. The sizes here have one name in all language models of transformers;
the class itself has the others (inference/hf/fitting).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from ucpl.files.demands import Demands, SizeRule, sizes_of
from ucpl.texts import Json

__all__ = ["DEMANDS", "renamed_at_load", "with_vocabulary"]

_LEAD = r"(?:model\.|transformer\.|gpt_neox\.|language_model\.)*"
_VOCABULARY = SizeRule(
    ("vocab_size",),
    rf"{_LEAD}(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|lm_head|embed_out)\.weight",
    0,
)

DEMANDS = Demands(
    sizes=(
        _VOCABULARY,
        SizeRule(
            ("hidden_size", "n_embd", "d_model"),
            rf"{_LEAD}(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight",
            1,
        ),
        SizeRule(("num_hidden_layers", "n_layer"), rf"{_LEAD}(?:layers|h)\.(?P<number>[0-9]{{1,9}})\..+", None,
             more="num_nextn_predict_layers"),
        SizeRule(("intermediate_size",), rf"{_LEAD}layers\.[0-9]+\.mlp\.(?:gate_proj|up_proj)\.weight", 0, every=False),
    ),
)  # fmt: skip

# Names of files that from_pretrained of transformers 5 renames, so that the module has others.
_EXPERTS = r"\.(?:mlp\.experts\.\d+\.(?:gate|up|down)_proj|block_sparse_moe\.experts\.\d+\.w[123])\.weight\Z"
_RENAMED = re.compile(
    rf"{_EXPERTS}|\.block_sparse_moe\.|\Aembed_out\.|\Alanguage_model\.(?:model|lm_head)\.|\Avisual\."
    r"|\A(?:vision_tower|multi_modal_projector|audio_tower)\.|\Aimage_newline\Z"
)
# Shipped layouts of both names: those of the files, and those of the module.
_DIALECTS = {
    "mixtral": ("llama.ucpl:mixtral()", "llama.ucpl:mixtral_stacked()"),
    "qwen2_moe": ("llama.ucpl:qwen_moe()", "llama.ucpl:qwen_moe_stacked()"),
    "qwen3_moe": ("llama.ucpl:qwen_moe()", "llama.ucpl:qwen_moe_stacked()"),
    "deepseek_v3": ("deepseek_v3.ucpl:hf()", "deepseek_v3.ucpl:stacked()"),
}


def renamed_at_load(config: Mapping[str, Json], names: Iterable[str]) -> str:
    """A note on names that a job's module lacks, or "".

    The folder's files have them.
    """
    if "auto_map" in config or "model_type" not in config:
        return ""
    renamed = [name for name in names if _RENAMED.search(name)]
    if not renamed:
        return ""
    more = f" and {len(renamed) - 1} more" if len(renamed) > 1 else ""
    note = f"the target keeps {renamed[0]}{more}: transformers 5 renames these, and its modules look for other names"
    dialects = _DIALECTS.get(str(config["model_type"]))
    if dialects is None:
        return note
    return f"{note}: --from 'of {dialects[0]}', and 'of {dialects[1]}' behind the target"


def with_vocabulary(config: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    """config.json with the embeddings' rows, and a note on it.

    It is not changed if they agree, or if the embeddings have several sizes.
    """
    try:
        value: Json = json.loads(config)
    except (ValueError, RecursionError):
        return config, ""
    sizes = set(_VOCABULARY.found(stored).values())
    if not isinstance(value, dict) or len(sizes) != 1 or type(was := sizes_of(value).get("vocab_size")) is not int:
        return config, ""
    (now,) = sizes
    inner = value.get("text_config")
    if was == now or "quantization_config" in value:
        return config, ""
    for owner in (inner, value):  # a key next to text_config with the same number is of the same model
        if isinstance(owner, dict) and owner.get("vocab_size") == was:
            owner["vocab_size"] = now
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n", f"config.json: vocab_size = {was} becomes {now}"
