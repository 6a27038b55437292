"""GPTModels under Megatron-FSDP, in Megatron-LM's form (--ckpt-format fsdp_dtensor)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.interop import megatron_models, megatron_run, megatron_shims

# isort: split
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.fsdp_dtensor_checkpoint import (
    handle_experts_in_state_dict,
    handle_fp8_extra_state_case,
    handle_swiglu_in_state_dict,
)
from megatron.core.transformer.module import Float16Module
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.interop.megatron_models import Cut

METADATA = {"distrib_optim_sharding_type": "fsdp_dtensor"}
megatron_shims.for_fsdp()


class FsdpRun(megatron_run.Run):
    """The part of a model that this rank has of it."""

    def prepare(self, run: dict[str, Any]) -> None:
        (part,) = self.parts
        self.cuts = {id(t): (name, cut) for name, t, cut in megatron_models.tensors(run, self.parts)}
        self.places = {n: self.cuts[id(p)] for n, p in part.named_parameters()}
        grads = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy=run.get("strategy", "optim_grads_params"),
            grad_reduce_in_fp32=True,
            gradient_reduce_div_fusion=False,  # gloo scales nothing
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        )
        inner = Float16Module(self.config, part)
        self.wrapped = [
            adapter.FullyShardedDataParallel(
                config=self.config, ddp_config=grads, module=inner, device=torch.device("cpu")
            )
        ]
        chosen = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            bf16=True,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        )
        megatron_shims.adam_of(fused=True)
        with megatron_shims.types_of_cuda():
            self.optimizer = get_megatron_optimizer(chosen, self.wrapped)
        self.schedule = megatron_run.schedule_of(self.optimizer)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    @property
    def model(self) -> Any:
        """The module at which Megatron-LM's unwrap_model stops."""
        return self.wrapped[0].module

    # ---- the full state
    # ----------------------------------------------------------------------------------------------------

    def named(self) -> Iterator[tuple[str, Cut, Any]]:
        """(name, where the tensor-parallel rank's part lies, the sharded parameter)."""
        self.model._replace_param_with_distributed_if_needed()  # as its own state_dict does
        for name, parameter in self.model.module.module.named_parameters():
            whole, cut = self.places[name]
            yield whole, cut, parameter

    def pieces(self) -> Iterator[tuple[str, str, torch.Tensor, Cut, int]]:
        """A parameter is its master here: a run of the flattened part."""
        inner = [each.optimizer for each in megatron_run.chained(self.optimizer)]
        for name, cut, parameter in self.named():
            begin = parameter.megatron_fsdp_slice.start
            yield name, "fp32", parameter._local_tensor.data.reshape(-1), cut, begin
            for optimizer in inner:
                for state, tensor in optimizer.state.get(parameter, {}).items():
                    held = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
                    yield name, state, held.data.reshape(-1), cut, begin
        if dist.get_rank() == 0:
            known = {n for n, _ in self.model.module.module.named_parameters()}
            for name, tensor in self.model.module.module.state_dict().items():
                if name not in known and torch.is_tensor(tensor):
                    whole = megatron_models.named(self.run, self.model.module.module, name)
                    yield whole, "weight", tensor, megatron_models.cut_of(self.run, name, tensor), 0

    def rates(self) -> Iterator[tuple[str, dict[str, float]]]:
        owners = {id(parameter): name for name, _, parameter in self.named()}
        for each in megatron_run.chained(self.optimizer):
            for group in each.optimizer.param_groups:
                for parameter in group["params"]:
                    yield owners[id(parameter)], {k: group[k] for k in megatron_run.RATES if k in group}

    # ---- saving and loading, as megatron/training/checkpointing.py of Megatron-LM core_v0.16.1 ---------------------------

    def state(self, is_loading: bool) -> dict[str, Any]:
        state = {**self.common("fsdp_dtensor"), "model": self.model.state_dict_for_save_checkpoint()}
        with megatron_shims.types_of_cuda():
            state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=METADATA)
        return state

    def preprocessed(self, state: dict[str, Any]) -> dict[str, Any]:
        state = state.copy()
        handle_fp8_extra_state_case(state["model"])
        if self.run["swiglu"]:
            state["model"], state["optimizer"] = handle_swiglu_in_state_dict(
                self.model, state["model"], state["optimizer"]
            )
        if self.run["experts"]:
            state["model"] = handle_experts_in_state_dict(state["model"], self.run["experts"])
        preprocess_state_dict_for_uneven_dtensor(state)
        return state

    def save(self, folder: str, format: str = "fsdp_dtensor", **_: Any) -> None:  # type: ignore[override]
        assert format == "fsdp_dtensor"
        step = Path(folder) / f"iter_{self.done:07d}"
        made = self.preprocessed(self.state(is_loading=False))
        save(state_dict=made, storage_writer=FileSystemWriter(str(step)))
        if dist.get_rank() == 0:
            (Path(folder) / megatron_run.TRACKER).write_text(str(self.done))

    def load(self, folder: str) -> list[str]:
        top = Path(folder)
        step = top / f"iter_{int((top / megatron_run.TRACKER).read_text()):07d}"
        state = self.state(is_loading=True)
        raw = {key: state[key].copy() for key in ("optimizer", "model")}
        made = self.preprocessed(state)
        reader = FileSystemReader(str(step))
        told = []
        if dist.get_rank() == 0:
            there = set(reader.read_metadata().state_dict_metadata)
            told = [
                f"{k} is not asked for"
                for k in sorted(there)
                if k.startswith(("model.", "optimizer.state.")) and not asked(made, k)
            ]
        # strict: Megatron-LM's --strict-fsdp-dtensor-load
        load(made, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=False))
        made |= raw
        self.wrapped[0].load_state_dict(made["model"], strict=True)
        with megatron_shims.types_of_cuda(), torch.no_grad():
            self.optimizer.load_state_dict(made["optimizer"])
        self.schedule.load_state_dict(made["opt_param_scheduler"])
        told += megatron_run.differing(made["args"], self.run, "num_layers", "hidden_size", "num_attention_heads")
        self.done = made["iteration"]
        return told


def asked(state: dict[str, Any], name: str) -> bool:
    """Test whether a rank's state dict has a name of `.metadata`.

    Names of experts are on other ranks.
    """
    if ".experts." in name:
        return True
    if name.startswith("model."):
        return name.removeprefix("model.") in state["model"]
    owner, _, key = name.removeprefix("optimizer.state.").rpartition(".")
    # a rank has no state of tensors without elements on it; its module is enough
    return key in ("exp_avg", "exp_avg_sq") and owner.removeprefix("module.module.") in state["model"]
