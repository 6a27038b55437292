"""Demands of Megatron-Core's loaders: names that its modules have.

A job builds the model and looks for each of its tensors by name (dist_checkpointing, load_state_dict of legacy ranks). Names of
another dialect are never looked for, and the job stops.
"""

from __future__ import annotations

from ucpl.files.demands import Demands, NamePatterns

__all__ = ["DEMANDS"]

_NORMS = "input_layernorm|pre_mlp_layernorm|pre_cross_attn_layernorm"
_MODULES = f"self_attention|cross_attention|inter_attention|mlp|mixer|{_NORMS}"

DEMANDS = Demands(
    names=NamePatterns(
        patterns=(
            r"(^|\.)embedding\.(word|position)_embeddings\.weight$",
            rf"(^|\.)(decoder|encoder)\.layers\.([0-9]+\.)?({_MODULES})\.",
            r"(^|\.)mtp\.layers\.([0-9]+\.)?(transformer_layer|mtp_model_layer|eh_proj|enorm|hnorm)\.",
            r"(^|\.)(decoder|encoder)\.final_(layer)?norm\.",
            r"(^|\.)output_layer\.(weight|bias)$",
        ),
        of=("megatron_core", "megatron_legacy", "megatron_fsdp"),
        code="E549",
        says="Megatron-Core has no tensor of such a name",
    ),
)
