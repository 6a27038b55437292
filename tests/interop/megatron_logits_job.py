"""GPTModels of Megatron-Core in this process: load strictly, return logits.

    python -m tests.interop.megatron_logits_job RUNS.json

RUNS.json is a list of {"state": FILE or "torch_dist": FOLDER, "out": FILE, "config": {...}, "model": {...}, "mla":
bool}. A state has the names of the modules without Transformer Engine, which is not there on a CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.interop.megatron_shims import MODE

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import MLATransformerConfig

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}


multi_latent_attention.TELinear = type("TELinear", (), {})  # for isinstance checks


class Attention(torch.nn.Module):
    """Causal attention with another width of values.

    Megatron's own without Transformer Engine does not support it.
    """

    def __init__(self, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # (sequence, batch, heads, width)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return found.permute(2, 0, 1, 3).flatten(2)


def logits(run: dict[str, Any]) -> tuple[torch.Tensor, list[str]]:
    """And names of parameters in order of registration."""
    told = dict(run["config"])
    told["activation_func"] = ACTIVATIONS[told["activation_func"]]
    made = (MLATransformerConfig if run["mla"] else TransformerConfig)(
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="allgather", **told,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization=told["normalization"])
    for layer in spec.layer_specs if run["mla"] else ():
        layer.submodules.self_attention.submodules.core_attention = Attention
    if told.get("qk_l2_norm"):  # of a Llama 4, in layers alone that turn heads: Megatron's own spec says all
        for layer, has_none in zip(spec.layer_specs, told["no_rope_freq"], strict=True):
            inner = layer.submodules.self_attention.submodules
            inner.q_layernorm = inner.k_layernorm = IdentityOp if has_none else L2Norm
    model = GPTModel(made, spec, **run["model"]).eval()
    if folder := run.get("torch_dist"):
        wanted = model.sharded_state_dict()
        state = dist_checkpointing.load(wanted, folder)
        state = {name: tensor for name, tensor in state.items() if torch.is_tensor(tensor)}
    else:
        state = torch.load(run["state"], weights_only=True)
    kept = model.state_dict()
    missing = {n for n, t in kept.items() if torch.is_tensor(t) and n not in state}
    assert missing <= {"output_layer.weight"} and set(state) <= set(kept), (missing, set(state) - set(kept))
    assert not missing or run["model"]["share_embeddings_and_output_weights"]
    model.load_state_dict(state, strict=False)
    vocabulary = run["model"]["vocab_size"]
    ids = torch.arange(16).reshape(2, 8) * 7 % vocabulary
    places = torch.arange(8).expand(2, 8)
    mask = torch.ones(8, 8).triu(1).bool()[None, None]
    with torch.no_grad():
        found: torch.Tensor = model(ids, places, mask)
    return found, [name for name, _ in model.named_parameters()]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        for run in json.loads(Path(sys.argv[1]).read_text()):
            found, names = logits(run)
            torch.save(found, run["out"])
            Path(run["out"]).with_suffix(".json").write_text(json.dumps(names))


if __name__ == "__main__":
    assert MODE is not None, "kept: what ends it is its end"
    main()
