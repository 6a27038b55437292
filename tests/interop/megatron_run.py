"""GPTModels of Megatron-Core, trained, saved and loaded as by Megatron-LM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.interop import megatron_shims  # before Megatron

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from tests.interop import megatron_models
from tests.interop.megatron_models import BATCH, PLAIN, SEQUENCE, Cut

TRACKER = "latest_checkpointed_iteration.txt"
RATES = "lr", "weight_decay", "betas", "eps", "step"  # the step is a group's where the optimizer is fused
RESHARDABLE = DistributedOptimizer.checkpoint_fully_reshardable_formats


class Run:
    """This rank's parts of a model, their optimizer and its schedule."""

    def __init__(self, run: dict[str, Any], seed: int) -> None:
        self.run = run = {**PLAIN, **run}
        self.done = 0  # steps
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            run["tp"],
            run["pp"],
            virtual_pipeline_model_parallel_size=run["vpp"] or None,
            expert_model_parallel_size=run["ep"],
            create_gloo_process_groups=True,
        )
        torch.manual_seed(seed)
        self.config = megatron_models.config(run)
        self.parts = megatron_models.models(run, self.config, seed)
        self.dp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.optimizer: Any = None
        if run["optimizer"] != "none":
            self.prepare(run)

    def prepare(self, run: dict[str, Any]) -> None:
        distributed = run["optimizer"] == "distributed"
        grads = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=bool(run["bucket"]),
            bucket_size=run["bucket"] or None,
        )
        outer = (Float16Module(self.config, p) if run["dtype"] == "bf16" else p for p in self.parts)
        # Megatron-LM divides the buffer of the first virtual stage alone
        self.wrapped = [DistributedDataParallel(self.config, grads, p, i > 0) for i, p in enumerate(outer)]
        chosen = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            bf16=run["dtype"] == "bf16",
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=distributed,
            clip_grad=0.0,
        )
        megatron_shims.adam_of(fused=run["fused"])
        with megatron_shims.types_of_cuda():
            self.optimizer = get_megatron_optimizer(chosen, self.wrapped)
        self.schedule = schedule_of(self.optimizer)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    # ---- training ----------------------------------------------------------------------------------------------------------

    def losses(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def step(self) -> float:
        """One step over the same sequences at all degrees; the mean loss."""
        told = torch.Generator().manual_seed(1000 + self.done)
        tokens = torch.randint(self.run["vocab"], (BATCH, SEQUENCE + 1), generator=told)
        share = BATCH // dist.get_world_size(self.dp)
        first = dist.get_rank(self.dp) * share
        mine = [tokens[i : i + 1] for i in range(first, first + share)]
        for part in self.wrapped:
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        many = len(self.wrapped) > 1
        told_losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(mine) for _ in self.wrapped] if many else iter(mine),
            model=self.wrapped if many else self.wrapped[0],
            num_microbatches=share,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        with megatron_shims.types_of_cuda():
            self.optimizer.step()
        self.schedule.step(increment=BATCH)
        self.done += 1
        is_teller = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        total = torch.tensor(sum(float(t["loss"]) for t in told_losses) if is_teller else 0.0, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / BATCH

    # ---- the full state
    # ----------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[str, str, torch.Tensor, Cut, int]]:
        """(name, state, live tensor, its place, begin in its part)."""
        listed = list(megatron_models.tensors(self.run, self.parts))
        places = {id(tensor): (name, cut) for name, tensor, cut in listed}
        for name, tensor, cut in listed:
            yield name, "weight", tensor.data, cut, 0
        for each in chained(self.optimizer):
            if isinstance(each, DistributedOptimizer):
                for p in each.model_param_gbuf_map:
                    name, cut = places[id(p)]
                    begin = each._get_model_param_range_map(p)["param"].start
                    for state, tensor in each._get_main_param_and_optimizer_states(p).items():
                        yield name, "fp32" if state == "param" else state, tensor.data, cut, begin
                continue
            for p, main in pairs(each):
                name, cut = places[id(p)]
                if main is not p:
                    yield name, "fp32", main.data, cut, 0
                for state, tensor in each.optimizer.state[main].items():
                    yield name, state, tensor, cut, 0

    def rates(self) -> Iterator[tuple[str, dict[str, float]]]:
        places = {id(t): name for name, t, _ in megatron_models.tensors(self.run, self.parts)}
        for each in chained(self.optimizer):
            owners = {}
            if isinstance(each, DistributedOptimizer):
                for p, (group, order) in each.model_param_group_index_map.items():
                    owners[id(each.optimizer.param_groups[group]["params"][order])] = id(p)
            else:
                owners = {id(main): id(p) for p, main in pairs(each)}
            for group in each.optimizer.param_groups:
                for main in group["params"]:
                    yield places[owners[id(main)]], {k: group[k] for k in RATES if k in group}

    def facts(self) -> dict[str, dict[str, Any]]:
        """{name: {"weight", "fp32", each state, "step", rates}} on every rank.

        Copies that differ end the job.
        """
        mine = [(n, s, t.detach().clone(), cut, begin) for n, s, t, cut, begin in self.pieces()]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (mine, list(self.rates())))
        out: dict[str, dict[str, Any]] = {}
        parts: dict[tuple[str, str, Cut], tuple[torch.Tensor, torch.Tensor]] = {}
        for name, state, tensor, cut, begin in (piece for pieces, _ in every for piece in pieces):
            if state == "step":
                assert out.setdefault(name, {}).setdefault(state, float(tensor)) == float(tensor), name
                continue
            size = int(np.prod(cut.shape))
            flat, known = parts.setdefault(
                (name, state, cut), (torch.zeros(size, dtype=tensor.dtype), torch.zeros(size, dtype=torch.bool))
            )
            at = slice(begin, begin + tensor.numel())
            assert torch.equal(flat[at][known[at]], tensor.reshape(-1)[known[at]]), (
                f"copies of {state} of {name} differ"
            )
            flat[at], known[at] = tensor.reshape(-1), True
        for (name, state, cut), (flat, known) in parts.items():
            assert bool(known.all()), f"{state} of {name} is not whole"
            whole = out.setdefault(name, {}).setdefault(state, torch.zeros(cut.whole, dtype=flat.dtype))
            cut.put(whole, flat.view(cut.shape))
        for name, told in (rate for _, rates in every for rate in rates):
            assert all(out[name].setdefault(k, v) == v for k, v in told.items()), name
        return out

    def fill(self, seed: int = 0) -> None:
        """Set weights, masters and moments by formula; weights are rounded masters."""
        for name, state, tensor, cut, begin in self.pieces():
            if state == "step" or not tensor.is_floating_point():
                continue
            drawn = megatron_models.value(name, "fp32" if state == "weight" else state, cut.whole, seed)
            part = cut.of(drawn).reshape(-1)[begin : begin + tensor.numel()]
            tensor.copy_(part.view(tensor.shape))

    # ---- saving and loading, as megatron/training/checkpointing.py of Megatron-LM ----------------------------------------

    def metadata(self, kind: str, unstacked: bool) -> dict[str, Any]:
        told: dict[str, Any] = {"singleton_local_shards": unstacked, "chained_optim_avoid_prefix": True}
        if self.run["optimizer"] == "distributed":
            told["distrib_optim_sharding_type"] = kind
            if kind == "fully_reshardable":
                told["distrib_optim_fully_reshardable_mem_efficient"] = False
        return told

    def model_keys(self) -> list[str]:
        return ["model"] if len(self.parts) == 1 else [f"model{i}" for i in range(len(self.parts))]

    def sharded(self, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        metadata = {**metadata, "dp_cp_group": self.dp}
        keyed = zip(self.model_keys(), self.parts, strict=True)
        state: dict[str, Any] = {key: part.sharded_state_dict(metadata=metadata) for key, part in keyed}
        if self.optimizer is not None:
            with megatron_shims.types_of_cuda():
                state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return state

    def common(self, format: str) -> dict[str, Any]:
        out = {
            "args": megatron_models.arguments(self.run, dist.get_world_size(), format, self.done),
            "checkpoint_version": 3.0,
            "iteration": self.done,
            "num_floating_point_operations_so_far": 1.5e9 * self.done,
        }
        return out if self.optimizer is None else {**out, "opt_param_scheduler": self.schedule.state_dict()}

    def save(
        self,
        folder: str,
        format: str,
        kind: str = "fully_reshardable",
        unstacked: bool = False,
        with_random: bool = True,
    ) -> None:
        step = Path(folder) / f"iter_{self.done:07d}"
        step.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if format == "legacy":
            self.save_legacy(step)
        else:
            metadata = self.metadata(kind, unstacked)
            state = {**self.common("torch_dist"), **self.sharded(metadata, is_loading=False)}
            if with_random:
                state["rng_state"] = self.random_sharded()
            strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), self.dp)
            dist_checkpointing.save(state, str(step), strategy, content_metadata=metadata)
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(folder) / TRACKER).write_text(str(self.done))

    def random_state(self) -> list[dict[str, Any]]:
        told = {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": megatron_shims.Tracker().get_states(),
        }
        return [told]

    def random_sharded(self) -> ShardedObject:
        at = [parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()]
        grid, copy = [self.run["pp"], self.run["tp"]], dist.get_rank(self.dp)
        if self.run["ep"] > 1:
            at, grid, copy = [*at, copy], [*grid, dist.get_world_size(self.dp)], 0
        return ShardedObject("rng_state", self.random_state(), tuple(grid), tuple(at), replica_id=copy)

    def legacy_folder(self, step: Path) -> Path:
        name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        if self.run["pp"] > 1:
            name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
        if self.run["ep"] > 1:
            name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
        return step / name

    def save_legacy(self, step: Path) -> None:
        here = self.legacy_folder(step)
        here.mkdir(parents=True, exist_ok=True)
        if self.run["optimizer"] == "distributed":
            self.optimizer.save_parameter_state(str(here / "distrib_optim.pt"))
        if parallel_state.get_expert_data_parallel_rank() == 0:
            state = self.common("torch")
            for key, part in zip(self.model_keys(), self.parts, strict=True):
                state[key] = part.state_dict_for_save_checkpoint()
            if self.optimizer is not None:
                state["optimizer"] = self.optimizer.state_dict()
            torch.save({**state, "rng_state": self.random_state()}, here / "model_optim_rng.pt")

    def load(self, folder: str) -> list[str]:
        """Megatron-LM's complaints about a folder, or []."""
        top, here = Path(folder), None
        step = top / f"iter_{int((top / TRACKER).read_text()):07d}"
        if dist_checkpointing.check_is_distributed_checkpoint(str(step)):
            state, told = self.load_distributed(step)
        else:
            here = self.legacy_folder(step)
            state, told = torch.load(here / "model_optim_rng.pt"), []
            told += differing(state["args"], self.run, "tensor_model_parallel_size", "pipeline_model_parallel_size")
        if "args" in state:
            told += differing(state["args"], self.run, "num_layers", "hidden_size", "num_attention_heads")
        for key, part in zip(self.model_keys(), self.parts, strict=True):
            part.load_state_dict(state[key], strict=True)
        if self.optimizer is not None:
            with megatron_shims.types_of_cuda(), torch.no_grad():
                self.optimizer.load_state_dict(state["optimizer"])
                if here is not None and self.run["optimizer"] == "distributed":
                    self.optimizer.load_parameter_state(str(here / "distrib_optim.pt"))
            if (
                "opt_param_scheduler" in state or getattr(state.get("args"), "lr", None) is not None
            ):  # else no Megatron's run
                self.schedule.load_state_dict(state["opt_param_scheduler"])
        self.done = state["iteration"]
        return told

    def load_distributed(self, step: Path) -> tuple[dict[str, Any], list[str]]:
        common = dist_checkpointing.load_common_state_dict(str(step))
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        said = common.get("args")  # another framework's run has none
        degrees = getattr(said, "tensor_model_parallel_size", 1), getattr(said, "pipeline_model_parallel_size", 1)
        is_same = degrees == (self.run["tp"], self.run["pp"])
        kind = metadata.get("distrib_optim_sharding_type")
        if self.run["optimizer"] == "distributed" and not is_same and kind not in RESHARDABLE:
            raise RuntimeError(f"{degrees} of the checkpoint are not the job's: {kind} cannot be loaded")
        state = self.sharded(metadata, is_loading=True)
        if is_same and not getattr(said, "no_save_rng", False):
            state["rng_state"] = self.random_sharded()
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(step)), self.dp)
        loaded, left, absent = dist_checkpointing.load(state, str(step), strategy, strict=StrictHandling.RETURN_ALL)
        texts = [f"{key} is not asked for" for key in sorted(left) if not key.startswith("rng_state")]
        texts += [f"{key} is not there" for key in sorted(absent)]
        return loaded, texts


def schedule_of(optimizer: Any) -> OptimizerParamScheduler:
    """The schedule that all runs have, so that losses can be compared."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=2 * BATCH,
        lr_decay_steps=20 * BATCH,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=20 * BATCH,
        wd_incr_style="constant",
    )


def forward(data: Iterator[torch.Tensor], part: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    out = part(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())

    def mean(each: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = each.float().mean()
        return loss, {"loss": loss.detach().clone()}  # Megatron divides the loss itself in place

    return out, mean


def chained(optimizer: Any) -> list[Any]:
    """The optimizers inside: of dense parameters and of experts.

    Each has its own data-parallel ranks.
    """
    return [] if optimizer is None else list(getattr(optimizer, "chained_optimizers", [optimizer]))


def pairs(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, inner optimizer's tensor), without DistributedOptimizer."""
    if hasattr(optimizer, "float16_groups"):
        for halves, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            yield from zip(halves, mains, strict=True)
        for group in optimizer.fp32_from_fp32_groups:
            yield from ((p, p) for p in group)
        return
    for group in optimizer.optimizer.param_groups:
        yield from ((p, p) for p in group["params"])


def differing(args: Any, run: dict[str, Any], *names: str) -> list[str]:
    """As check_checkpoint_args of Megatron-LM: arguments must equal the job's."""
    mine = megatron_models.arguments(run, dist.get_world_size(), "", 0)
    pairs = ((name, getattr(args, name), getattr(mine, name)) for name in names)
    return [f"{name} of the checkpoint is {theirs}, not {own}" for name, theirs, own in pairs if theirs != own]
