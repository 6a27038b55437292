"""Tensor x pipeline x data parallelism and experts, for ranks: `python grid_job.py JOBS`.

As parallel_job. Ranks have the numbers of DeepSpeed's topologies: (stage, data, tensor), the last one fastest. A job
forgets the groups of the one before it, so that one set of processes has one topology after another.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import deepspeed.moe.mappings
import deepspeed.utils.groups
import torch
import torch.distributed as dist
from attrs import evolve
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_parallel

from tests.interop import deepspeed_job, grid_models, models, parallel_job

MICRO = 2  # sequences that go through a pipeline at a time
CLIENT, INFO = deepspeed_job.CLIENT, "universal_checkpoint_info"
VOCABULARY = "tied_modules.embed.word.weight"


class Units:
    """An mpu without a pipeline.

    Ranks of one cut, and ranks with equal data.
    """

    def __init__(self, tp: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp, self.dp, self.here, self.copy = tp, world // tp, rank % tp, rank // tp
        rows = [list(range(first, first + tp)) for first in range(0, world, tp)]
        columns = [list(range(first, world, tp)) for first in range(tp)]
        made = [dist.new_group(ranks) for ranks in (*rows, *columns)]
        self.cut, self.same = made[self.copy], made[len(rows) + self.here]

    def get_model_parallel_rank(self) -> int:
        return self.here

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_model_parallel_group(self) -> Any:
        return self.cut

    def get_data_parallel_rank(self) -> int:
        return self.copy

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_data_parallel_group(self) -> Any:
        return self.same

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def module_of(run: dict[str, Any], ways: grid_models.Ways) -> Any:
    if not run.get("stages"):
        return grid_models.Whole(ways, run.get("ep", 0))
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

    pp, world = len(run["stages"]), dist.get_world_size()
    dp = world // pp // run["tp"]
    if run["tp"] > 1:
        topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=run["tp"], num_dp=dp)
    else:
        topology = PipeDataParallelTopology(num_pp=pp, num_dp=dp)
    return grid_models.pipeline(topology, run["stages"], ways, run.get("ep", 0))


def engine_of(run: dict[str, Any], spoil: float) -> Any:
    """An engine of a run; `spoil` scrambles all that a load restores."""
    deepspeed.utils.groups._release_process_group_references()
    units: Any = Units(run["tp"])
    ways = grid_models.Ways(units.here, units.tp, units.cut, rows=run.get("rows", grid_models.WORDS))
    if run.get("sp", 1) > 1:  # these ranks share sequences, and the optimizer with all others
        units = sequence_parallel
        units.initialize_sequence_parallel(run["sp"])
        ways = evolve(ways, line=units.get_sequence_parallel_group())
    # DeepSpeed gathers into one flat buffer, which gloo does not take.
    deepspeed.moe.mappings._gather_tokens = lambda tokens, dim=0: torch.cat(ways.listed(tokens), dim)
    module = module_of(run, ways)
    if "ep" in run:
        setattr(module, INFO, grid_models.LISTS)
    grid_models.fill(module, ways, dist.get_rank() % run.get("ep", 1))
    grid_models.lessen(module, run.get("lean", ()), run.get("frozen", ()))
    groups = parallel_job.groups_of(module, run, spoil)
    if "ep" in run:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    chosen = models.optimizer("adamw", groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 1.0 / (1 + 0.1 * step))
    mpu = {} if run.get("stages") else {"mpu": units}
    made, *_ = deepspeed.initialize(model=module, optimizer=chosen, lr_scheduler=schedule, config=config(run), **mpu)
    made.ways = ways
    if spoil:
        scramble(made, run)
    return made


def copies(run: dict[str, Any]) -> int:
    """Ranks that have data of their own."""
    return dist.get_world_size() // run["tp"] // run.get("sp", 1) // len(run.get("stages") or [0])


def config(run: dict[str, Any]) -> dict[str, Any]:
    out = deepspeed_job.config(run)
    dp = copies(run)
    micro = MICRO if run.get("stages") else grid_models.BATCH // dp
    out |= {"train_micro_batch_size_per_gpu": micro, "train_batch_size": grid_models.BATCH}
    if run.get("sp", 1) > 1:  # DeepSpeed counts its ranks among those that have other data
        del out["train_batch_size"]
    if "ep" in run:  # DeepSpeed's norm of experts' gradients is another at other degrees
        out["gradient_clipping"] = 0.0
    return out


def scramble(engine: Any, run: dict[str, Any]) -> None:
    """Scramble all values that a load must restore.

    DeepSpeed's loader of universal folders leaves buffers as the model made them.
    """
    torch.manual_seed(11 + dist.get_rank())
    o = engine.optimizer
    kept = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    masters = next(getattr(o, name) for name in kept if hasattr(o, name))
    moments = [v for state in o.optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim]
    parameters = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    buffers = () if run.get("universal") or run.get("keeps_buffers") else engine.module.buffers()
    with torch.no_grad():
        for tensor in (*parameters, *buffers, *masters, *moments):
            tensor.copy_(torch.randn_like(tensor))


def parts_added_up(run: dict[str, Any]) -> int:
    """The factor of gradients over parts of a sequence.

    DeepSpeed adds them up; if ZeRO-3 scatters them, it takes their mean.
    """
    scatters = run["stage"] == 3 and run.get("zero", {}).get("reduce_scatter", True)
    return 1 if scatters else int(run.get("sp", 1))


def losses(engine: Any, run: dict[str, Any], first: int, steps: int) -> list[float]:
    dp, sp = copies(run), run.get("sp", 1)
    share, here = grid_models.BATCH // dp, dist.get_rank() // run["tp"] // sp % dp
    out = []
    for step in range(first, first + steps):
        x, y = (t[here * share : (here + 1) * share] for t in grid_models.batch(step))
        if run.get("stages"):
            out.append(
                float(engine.train_batch(data_iter=iter(list(zip(x.split(MICRO), y.split(MICRO), strict=True)))))
            )
            continue
        x, y = (t.chunk(sp, 1)[dist.get_rank() % sp] for t in (x, y))
        loss = engine(x, y)
        engine.backward(loss / parts_added_up(run))
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        out.append(float(total) / dist.get_world_size())
    return out


# ---- the full state --------------------------------------------------------------------------------------------------


def held(engine: Any, run: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """This rank's parts of tensors, with its data-parallel ranks', by full names."""
    if engine.zero_optimization_stage() < 3:
        yield from parallel_job.held(engine, {"ep": 1, **run})
        return
    o, inner = engine.optimizer, engine.optimizer.optimizer
    names = {p: n for n, p in engine.module.named_parameters()}
    ranks = dist.get_world_size(o.dp_process_group)
    for sub, (params, flat) in enumerate(zip(o.fp16_groups, o.fp32_partitioned_groups_flat, strict=True)):
        hyper = inner.param_groups[o.sub_group_to_group_id[sub]]
        states = sorted({"fp32": flat.detach(), **inner.state.get(flat, {})}.items())
        every = {k: parallel_job.together(v, o.dp_process_group).view(ranks, -1) for k, v in states if v.ndim}
        start = 0
        for p in params:
            each = -(-p.ds_numel // ranks)
            with deepspeed.zero.GatheredParameters([p]):
                here: dict[str, Any] = {"weight": p.detach().clone()}
            for k, v in every.items():
                here[k] = v[:, start : start + each].reshape(-1)[: p.ds_numel].reshape(p.ds_shape).clone()
            here |= {k: float(v) for k, v in states if not v.ndim}
            yield names[p], {**here, "lr": hyper["lr"], "weight_decay": hyper["weight_decay"], "moe": False}
            start += each
    for name, buffer in engine.module.named_buffers():
        yield name, {"buffer": buffer.clone()}


def joined(parts: list[dict[str, Any]], cut: tuple[int, int]) -> dict[str, Any]:
    """The parts of one tensor and its states, section by section.

    Values that are no tensors are the first rank's.
    """
    dim, sections = cut
    out = dict(parts[0])
    for state, value in parts[0].items():
        if torch.is_tensor(value):
            pieces = [part[state].chunk(sections, dim) for part in parts]
            out[state] = torch.cat([mine[s] for s in range(sections) for mine in pieces], dim)
    return out


def facts(engine: Any, run: dict[str, Any], client: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The full state on every rank, and differences between copies."""
    cuts = {n: p.cut for n, p in engine.module.named_parameters() if hasattr(p, "cut")}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (cuts, dict(held(engine, run))))
    found: dict[str, Any] = {}
    apart = []
    for rank, (cut, mine) in enumerate(every):
        for name, state in mine.items():
            if name in cut and engine.ways.size > 1:
                if rank % engine.ways.size:
                    continue
                state = joined([other[name] for _, other in every[rank : rank + engine.ways.size]], cut[name])
            if name == VOCABULARY:
                state = {k: v[: grid_models.WORDS] if torch.is_tensor(v) else v for k, v in state.items()}
            if name in found:
                apart += [f"rank {rank}: {d}" for d in deepspeed_job.differences(state, found[name], name)]
            else:
                found[name] = state
    schedule = engine.lr_scheduler.state_dict()["last_epoch"]
    out = {"params": found, "global_steps": engine.global_steps, "schedule": schedule}
    return {**out, "client": {key: client.get(key) for key in CLIENT}}, apart


# ---- jobs --------------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    run = job["run"]
    engine = engine_of(run, spoil=0.0)
    before = losses(engine, run, 0, job["steps"])
    truth, apart = facts(engine, run, CLIENT)
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])
    # DeepSpeed takes the lists from the module where there are experts, and from training scripts where there are none.
    lists = {} if "ep" in run else {INFO: grid_models.LISTS}
    engine.save_checkpoint(job["folder"], client_state={**CLIENT, **lists})
    return {"before": before, "apart": apart, "after": losses(engine, run, job["steps"], 2)}


def load(job: dict[str, Any]) -> dict[str, Any]:
    run = job["run"]
    engine = engine_of(run, spoil=0.25)
    # DeepSpeed's converter saves no buffers of a pipeline
    path, client = engine.load_checkpoint(job["folder"], load_module_strict=not run.get("keeps_buffers"))
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth = torch.load(job["truth"], weights_only=False)
    for kept in truth["params"].values():  # in another dtype than the source's: masters, rounded by torch
        if "fp32" in kept:
            kept["weight"] = kept["fp32"].to(deepspeed_job.DTYPES[run["dtype"]])
    mine, apart = facts(engine, run, client)
    found = deepspeed_job.differences(mine, truth) + apart
    return {"differences": found, "after": losses(engine, run, job["steps"], 2)}


def changed(job: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint with other parameters, compare the common ones, and train."""
    run = job["run"]
    engine = engine_of(run, spoil=0.25)
    path, client = engine.load_checkpoint(job["folder"])
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth = torch.load(job["truth"], weights_only=False)["params"]
    mine, found = facts(engine, run, client)
    for name, states in mine["params"].items():
        is_buffer = "buffer" in states
        found += (
            deepspeed_job.differences(states, truth[name], name)
            if is_buffer
            else deepspeed_job.as_changed(states, truth[name], job, name)
        )
    gone = sorted(truth.keys() - mine["params"].keys())
    trained = sorted(name for name, states in mine["params"].items() if "exp_avg" in states)
    after = losses(engine, run, job["steps"], 3)
    rates = {name: states["lr"] for name, states in mine["params"].items() if "lr" in states}
    alone = "" if "ep" in run else alone_loss(truth, run, job["steps"])
    return {"differences": found, "gone": gone, "trained": trained, "rates": rates, "alone": alone, "after": after}


def alone_loss(truth: dict[str, Any], run: dict[str, Any], step: int) -> float:
    """The loss of a step by torch alone, with these weights."""
    module = grid_models.Whole(grid_models.Ways(), 0)
    grid_models.lessen(module, run.get("lean", ()), ())
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(truth[name]["weight"])
        return float(module(*grid_models.batch(step)))


if __name__ == "__main__":
    deepspeed_job.main({"train": train, "load": load, "changed": changed})
