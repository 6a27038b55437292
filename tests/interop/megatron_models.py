"""A GPTModel of Megatron-Core at any degrees, and places of its parameters.

It has the arguments that Megatron-LM keeps of it. A run is a dict; PLAIN has the defaults. Full values are a function
of a parameter's name, so that the model is the same at all degrees. Names are those of one process:
`decoder.layers.3.mlp.linear_fc1.weight`, with numbers of the full model.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

SEQUENCE = 8
BATCH = 12  # sequences of a step: all degrees divide it

PLAIN: dict[str, Any] = {
    "layers": 4,
    "hidden": 20,
    "heads": 4,
    "groups": 2,
    "kv": 6,
    "ffn": 22,
    "vocab": 46,
    "swiglu": True,
    "rms": True,
    "tie": False,
    "bias": False,
    "qkv_bias": True,
    "qk_norm": False,
    "experts": 0,
    "expert_ffn": 10,
    "shared": 0,
    "dense_first": False,
    "dtype": "fp32",
    "tp": 1,
    "pp": 1,
    "vpp": 0,
    "ep": 1,
    "first": 0,  # layers of the first stage, where stages are uneven
    "ahead": 0,  # layers of multi-token prediction
    "optimizer": "distributed",  # "adam": without DistributedOptimizer; "none"
    "fused": True,  # the AdamW of fused kernels, or torch's own
    "bucket": 0,  # elements of a gradient bucket; 0: one bucket
    "frozen": (),  # names of parameters that are not trained
}


@frozen
class Cut:
    """The place of a rank's tensor in the full one.

    It is part `rank` of `size` along `dim`; of `halves`, the same part of each.
    """

    rank: int
    size: int
    dim: int
    halves: int
    shape: tuple[int, ...]  # of the part

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(n * self.size if axis == self.dim else n for axis, n in enumerate(self.shape))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        halves = whole.chunk(self.halves, self.dim)
        return torch.cat([half.chunk(self.size, self.dim)[self.rank] for half in halves], self.dim)

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        halves = zip(whole.chunk(self.halves, self.dim), part.chunk(self.halves, self.dim), strict=True)
        for target, source in halves:
            target.chunk(self.size, self.dim)[self.rank].copy_(source)


def value(name: str, state: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A fixture's values: normal numbers, seeded by name, state and run.

    They have this shape, in fp32.
    """
    told = hashlib.sha256(f"{name}|{state}|{seed}".encode()).digest()[:4]
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(told, "little")))


def beginning(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The first weight of a run: norms near one, the rest small."""
    drawn = value(name, "begin", shape, seed)
    return 1 + 0.1 * drawn if "norm.weight" in name else 0.3 * drawn if drawn.ndim > 1 else 0.1 * drawn


def config(run: dict[str, Any]) -> TransformerConfig:
    kind = torch.bfloat16 if run["dtype"] == "bf16" else torch.float32
    more: dict[str, Any] = {}
    if run["experts"]:
        more = {
            "num_moe_experts": run["experts"],
            "moe_ffn_hidden_size": run["expert_ffn"],
            "moe_router_load_balancing_type": "none",
            "moe_router_topk": 2,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_token_dispatcher_type": "allgather",
            "moe_shared_expert_intermediate_size": run["shared"] or None,
        }
        if run["dense_first"]:
            more["moe_layer_freq"] = [0] + [1] * (run["layers"] - 1)
    return TransformerConfig(
        num_layers=run["layers"],
        hidden_size=run["hidden"],
        ffn_hidden_size=run["ffn"],
        num_attention_heads=run["heads"],
        num_query_groups=run["groups"],
        qk_layernorm=run["qk_norm"],
        kv_channels=run["kv"],
        tensor_model_parallel_size=run["tp"],
        pipeline_model_parallel_size=run["pp"],
        virtual_pipeline_model_parallel_size=run["vpp"] or None,
        expert_model_parallel_size=run["ep"],
        num_layers_in_first_pipeline_stage=run["first"] or None,
        mtp_num_layers=run["ahead"] or None,
        use_cpu_initialization=True,
        gated_linear_unit=run["swiglu"],
        activation_func=torch.nn.functional.silu if run["swiglu"] else torch.nn.functional.gelu,
        normalization="RMSNorm" if run["rms"] else "LayerNorm",
        add_bias_linear=run["bias"],
        add_qkv_bias=run["qkv_bias"],
        params_dtype=kind,
        pipeline_dtype=kind,
        bf16=run["dtype"] == "bf16",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        batch_p2p_sync=False,
        batch_p2p_comm=not run["vpp"],
        overlap_p2p_comm=bool(run["vpp"]),  # or two stages would take each other's messages in another order
        **more,
    )


def models(run: dict[str, Any], made: TransformerConfig, seed: int) -> list[GPTModel]:
    """This rank's parts of the model, with a seed's first values."""
    norm = "RMSNorm" if run["rms"] else "LayerNorm"
    if run["dense_first"]:
        spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization=norm)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=run["experts"] or None, moe_grouped_gemm=False, normalization=norm, qk_layernorm=run["qk_norm"]
        )
    parts = []
    for stage in range(run["vpp"] or 1):
        at = {"ignore_virtual": False, "vp_stage": stage} if run["vpp"] else {}
        part = GPTModel(
            config=made,
            transformer_layer_spec=spec,
            vocab_size=run["vocab"],
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=run["tie"],
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            mtp_block_spec=ahead_of(run, made, spec, stage),
            **({"vp_stage": stage} if run["vpp"] else {}),
        )
        parts.append(part)
    if run["dtype"] == "bf16":
        parts = [Float16Module(made, part).module for part in parts]
    with torch.no_grad():
        for name, tensor, cut in tensors(run, parts):
            if tensor.is_floating_point():
                begun = (
                    beginning(name, cut.whole, seed)
                    if isinstance(tensor, torch.nn.Parameter)
                    else torch.zeros(cut.whole)
                )
                tensor.copy_(cut.of(begun + seed * 0.01 * (not isinstance(tensor, torch.nn.Parameter))))
            tensor.requires_grad_(tensor.requires_grad and name not in run["frozen"])
    return parts


def ahead_of(run: dict[str, Any], made: TransformerConfig, spec: Any, stage: int) -> Any:
    """The spec of multi-token prediction, if this part has it."""
    at = {"vp_stage": stage} if run["vpp"] else {}
    if not run["ahead"] or not mtp_on_this_rank(made, ignore_virtual=False, **at):
        return None
    return get_gpt_mtp_block_spec(made, spec, use_transformer_engine=False, **at)


def tensors(run: dict[str, Any], parts: list[GPTModel]) -> Iterator[tuple[str, torch.Tensor, Cut]]:
    """Parameters and persistent buffers of this rank, under full names."""
    for part in parts:
        found = dict(part.named_parameters())
        held = {n: t for n, t in part.state_dict().items() if torch.is_tensor(t) and n not in found}
        buffers = dict(part.named_buffers())
        for name, tensor in (*found.items(), *((n, buffers[n]) for n in held)):
            yield named(run, part, name), tensor, cut_of(run, name, tensor)


def named(run: dict[str, Any], part: GPTModel, name: str) -> str:
    """The name in one process.

    Numbers of the full model, and tied heads.
    """
    if run["tie"] and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    if layer := re.match(r"decoder\.layers\.(\d+)\.", name):
        number = part.decoder.layers[int(layer[1])].layer_number - 1
        name = f"decoder.layers.{number}.{name[layer.end() :]}"
    if expert := re.search(r"local_experts\.(\d+)\.", name):
        first = parallel_state.get_expert_model_parallel_rank() * (run["experts"] // run["ep"])
        name = f"{name[: expert.start(1)]}{first + int(expert[1])}{name[expert.end(1) :]}"
    return name


def cut_of(run: dict[str, Any], name: str, tensor: torch.Tensor) -> Cut:
    shape = tuple(tensor.shape)
    if not getattr(tensor, "tensor_model_parallel", False):
        return Cut(rank=0, size=1, dim=0, halves=1, shape=shape)
    if "local_experts" in name:
        rank, size = (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    halves = 2 if run["swiglu"] and "linear_fc1" in name else 1
    return Cut(rank=rank, size=size, dim=tensor.partition_dim, halves=halves, shape=shape)  # type: ignore[attr-defined]


def arguments(run: dict[str, Any], world: int, format: str, iteration: int) -> argparse.Namespace:
    """Megatron-LM's arguments in a checkpoint, as far as its loader needs them."""
    bf16 = run["dtype"] == "bf16"
    return argparse.Namespace(
        num_layers=run["layers"],
        hidden_size=run["hidden"],
        ffn_hidden_size=run["ffn"],
        num_attention_heads=run["heads"],
        group_query_attention=run["groups"] != run["heads"],
        num_query_groups=run["groups"],
        qk_layernorm=run["qk_norm"],
        kv_channels=run["kv"],
        swiglu=run["swiglu"],
        normalization="RMSNorm" if run["rms"] else "LayerNorm",
        norm_epsilon=1e-5,
        add_bias_linear=run["bias"],
        add_qkv_bias=run["qkv_bias"],
        untie_embeddings_and_output_weights=not run["tie"],
        add_position_embedding=False,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        max_position_embeddings=SEQUENCE,
        seq_length=SEQUENCE,
        padded_vocab_size=run["vocab"],
        make_vocab_size_divisible_by=1,
        vocab_file=None,
        tokenizer_type="NullTokenizer",
        num_experts=run["experts"] or None,
        moe_ffn_hidden_size=run["expert_ffn"] if run["experts"] else None,
        moe_shared_expert_intermediate_size=run["shared"] or None,
        moe_router_topk=2,
        moe_grouped_gemm=False,
        moe_layer_freq=[0] + [1] * (run["layers"] - 1) if run["dense_first"] else 1,
        tensor_model_parallel_size=run["tp"],
        pipeline_model_parallel_size=run["pp"],
        virtual_pipeline_model_parallel_size=run["vpp"] or None,
        num_layers_per_virtual_pipeline_stage=run["layers"] // run["pp"] // run["vpp"] if run["vpp"] else None,
        decoder_first_pipeline_num_layers=run["first"] or None,
        mtp_num_layers=run["ahead"] or None,
        expert_model_parallel_size=run["ep"],
        expert_tensor_parallel_size=run["tp"],
        context_parallel_size=1,
        sequence_parallel=False,
        world_size=world,
        data_parallel_size=world // run["tp"] // run["pp"],
        use_distributed_optimizer=run["optimizer"] == "distributed",
        optimizer="adam",
        overlap_grad_reduce=bool(run["bucket"]),
        ddp_bucket_size=run["bucket"] or None,
        fp16=False,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        attention_backend=AttnBackend.auto,
        transformer_impl="local",
        micro_batch_size=1,
        global_batch_size=BATCH,
        iteration=iteration,
        consumed_train_samples=iteration * BATCH,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        ckpt_format=format,
        no_save_optim=run["optimizer"] == "none" or None,
        no_save_rng=None,
        data_parallel_random_init=False,
    )
