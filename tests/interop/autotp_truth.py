"""DeepSpeed's AutoTP on a class, in one process.

It gets the degree, and the role of the first rank. `python -m tests.interop.autotp_truth` writes
tests/fixtures/autotp.json: classes as records, and DeepSpeed's cuts of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed  # noqa: F401  (before its parts)
from deepspeed.module_inject import set_autotp_mode
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

from tests.inference.autotp_records import cuts_in, recorded
from ucpl.inference.hf.networks import network_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "autotp.json"
DEGREES = (2, 3, 4)
_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 133}
_ONE = {"num_hidden_layers": 1, "vocab_size": 131, "pad_token_id": 0}
_OLD = {"n_layer": 1, "n_head": 12, "vocab_size": 131}
# One layer of each, at sizes that the degrees do not divide. tests/inference/test_autotp.py has the results.
CLASSES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_HEADS, **_ONE},
    "llama_two_heads": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_HEADS, **_ONE}
    | {"num_key_value_heads": 2},
    "qwen2_tied": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **_HEADS, **_ONE}
    | {"tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **_HEADS, **_ONE, "head_dim": 8},
    "gemma_tied": {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], **_HEADS, **_ONE, "head_dim": 8},
    "gpt_neox": {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **_HEADS, **_ONE},
    "phi": {"model_type": "phi", "architectures": ["PhiForCausalLM"], **_HEADS, **_ONE},
    "opt": {"model_type": "opt", "architectures": ["OPTForCausalLM"], **_HEADS, **_ONE}
    | {"ffn_dim": 133, "word_embed_proj_dim": 96, "max_position_embeddings": 8},
    "bloom": {"model_type": "bloom", "architectures": ["BloomForCausalLM"], **_OLD, "hidden_size": 96},
    "falcon": {"model_type": "falcon", "architectures": ["FalconForCausalLM"], **_HEADS, **_ONE},
    "gpt_bigcode": {"model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], **_OLD, "n_embd": 96}
    | {"n_positions": 8},
    "mpt": {"model_type": "mpt", "architectures": ["MptForCausalLM"], "d_model": 96, "n_heads": 12, "n_layers": 1}
    | {"vocab_size": 131},
    "gptj": {"model_type": "gptj", "architectures": ["GPTJForCausalLM"], **_OLD, "n_embd": 96, "rotary_dim": 4}
    | {"n_positions": 8},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **_HEADS, **_ONE, "max_position_embeddings": 8},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **_OLD, "n_embd": 96, "n_positions": 8},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **_HEADS, **_ONE, "num_local_experts": 2},
    "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **_HEADS, **_ONE},
    "codegen": {"model_type": "codegen", "architectures": ["CodeGenForCausalLM"], **_OLD, "n_embd": 96, "rotary_dim": 4}
    | {"n_positions": 8},
}  # fmt: skip


def model_of(said: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, said["architectures"][0])(
        transformers.CONFIG_MAPPING[said["model_type"]].from_dict(dict(said))
    )


@contextmanager
def alone(degree: int, group: object) -> Iterator[None]:
    """Groups of that many ranks; this is the first rank."""
    set_autotp_mode(training=True)
    told: dict[str, Any] = {
        "deepspeed.utils.groups.get_tensor_model_parallel_group": lambda: group,
        "deepspeed.utils.groups.get_tensor_model_parallel_world_size": lambda: degree,
        "deepspeed.comm.get_world_size": lambda group=None: degree,
        "deepspeed.comm.get_rank": lambda group=None: 0,
        "deepspeed.comm.is_initialized": lambda: False,
    }
    patches = [mock.patch(name, answer) for name, answer in told.items()]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
        set_autotp_mode(training=False)


def maps_of(said: dict[str, Any], degree: int, **tensor_parallel: Any) -> dict[str, Any]:
    """affine_map of each parameter, as DeepSpeed publishes it.

    Raises DeepSpeed's errors of the class.
    """
    group = object()
    config = TPTrainingConfig(autotp_size=degree, **tensor_parallel)
    config.tensor_parallel.tp_group = group
    engine = SimpleNamespace(local_rank=-1, autotp_size=lambda: degree)
    engine.is_deepcompile_enabled = engine.compile_autotp = lambda: False
    model = model_of(said)
    with alone(degree, group):
        DeepSpeedEngine._apply_autotp_partitioning(engine, model, config)
    params = model.universal_checkpoint_info["affine_map"]["params"]
    return {pattern.replace("\\", "")[1:-1]: value for pattern, value in params.items()}


def main() -> None:
    out = {}
    for name, said in CLASSES.items():
        cuts: dict[str, Any] = {}
        for degree in DEGREES:
            try:
                cuts[str(degree)] = cuts_in(maps_of(said, degree))
            except (AssertionError, ValueError) as error:
                cuts[str(degree)] = f"{type(error).__name__}: {error}"[:80]
        out[name] = {"network": recorded(network_of(said)), "cuts": cuts}
    FIXTURE.write_text(json.dumps(out, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
