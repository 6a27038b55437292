"""AutoTP engines of DeepSpeed, for ranks: `python deepspeed_tp_job.py JOBS`.

DeepSpeed's own code joins full tensors, from the maps that its own layers publish (checkpoint/affine.py): ucpl neither
cuts nor joins the compared tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop.deepspeed_job import (  # sets DeepSpeed's environment variables first
    CLIENT,
    differences,
    main,
)

import deepspeed  # isort: skip
import torch
import torch.distributed as dist
from deepspeed.checkpoint.affine import ParamAffineMap
from torch import nn
from torch.nn import functional as F

BATCH, WORDS = 120, 23
HEADS, KV, WIDTH, FFN = 8, 4, 3, 37  # an ffn that no degree divides
HIDDEN = HEADS * WIDTH


class Attention(nn.Module):
    """Fused [q; k; v] with fewer key-value heads; rows give its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV) * WIDTH)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.qkv(x)
        groups = z.shape[-1] // WIDTH * KV // (HEADS + 2 * KV)
        heads = groups * (HEADS // KV)
        q, k, v = z.split([heads * WIDTH, groups * WIDTH, groups * WIDTH], -1)
        q = q.unflatten(-1, (heads, WIDTH)).transpose(1, 2)
        k, v = (t.unflatten(-1, (groups, WIDTH)).transpose(1, 2).repeat_interleave(HEADS // KV, 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """One block between tied embeddings, a persistent buffer."""

    class config:
        num_attention_heads, num_key_value_heads, hidden_size, model_type = HEADS, KV, HIDDEN, "small"

    def __init__(self, freeze: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, HIDDEN)
        self.ln = nn.LayerNorm(HIDDEN)
        self.attn = Attention()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = Mlp()
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("calls", torch.zeros(3))
        if freeze:  # one that is cut, and one that is not
            self.mlp.gate_up.weight.requires_grad_(False)
            self.norm.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        h = self.wte(x)
        h = h + self.attn(self.ln(h))
        h = h + self.mlp(self.norm(h))
        return F.cross_entropy(self.lm_head(h).float().flatten(0, 1), y.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, WORDS, (BATCH, 7), generator=torch.Generator().manual_seed(1000 + step))
    return x, (x * 3 + 1) % WORDS


def common(run: dict[str, Any], rows: int, spoil: float) -> dict[str, Any]:
    """Options of all AutoTP engines.

    rows: of a rank's batch. spoil: scrambles all values that a load must restore.
    """
    bf16 = {"bf16": {"enabled": True}} if run["dtype"] == "bf16" else {}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": run["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # AutoTP replaces parameters, so that DeepSpeed has to make the optimizer.
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2 + spoil, "betas": [0.9, 0.95], "weight_decay": 0.1 + spoil, "torch_adam": True},
        },
        **bf16,
    }


def config(run: dict[str, Any], spoil: float) -> dict[str, Any]:
    dp = dist.get_world_size() // run["tp"]
    rows = (HEADS * WIDTH, KV * WIDTH, KV * WIDTH)
    layers = [
        {"patterns": [r".*\.qkv\.(weight|bias)$"], "partition_type": "column", "shape": [rows, -1], "partition_dim": 0},
        {"patterns": [r".*\.gate_up\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down\.(weight|bias)$"], "partition_type": "row"},
        {"patterns": [r".*wte.*", r".*lm_head.*"], "partition_type": "skip"},
    ]
    out = common(run, BATCH // dp, spoil)
    if run["tp"] > 1:
        parts = {"use_default_specs": False, "layer_specs": layers}
        out["tensor_parallel"] = {"autotp_size": run["tp"], "partition_config": parts}
    if run.get("universal"):
        out["checkpoint"] = {"load_universal": True}
    return out


def engine_of(run: dict[str, Any], seed: int, spoil: float) -> Any:
    torch.manual_seed(seed)
    made, *_ = deepspeed.initialize(model=Decoder(run.get("freeze", False)), config=config(run, spoil))
    return made


def scramble(engine: Any, run: dict[str, Any]) -> None:
    """Scramble uncut parameters, masters, moments, and buffers that loaders restore."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (
            *engine.module.parameters(),
            *(() if run.get("universal") else kept_buffers(engine).values()),
            *masters(engine),
        ):
            if tensor.numel():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))


def kept_buffers(engine: Any) -> dict[str, torch.Tensor]:
    """Those that a checkpoint has."""
    kept = engine.module.state_dict()
    return {name: buffer for name, buffer in engine.module.named_buffers() if name in kept}


def losses(engine: Any, run: dict[str, Any], first: int, steps: int) -> list[float]:
    out = []
    tp, world = run["tp"], dist.get_world_size()
    share, mine = BATCH * tp // world, dist.get_rank() // tp
    for step in range(first, first + steps):
        x, y = batch(step)
        loss = engine(x[mine * share : (mine + 1) * share], y[mine * share : (mine + 1) * share])
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        out.append(float(total) / world)
    return out


# ---- the full state
# -----------------------------------------------------------------------------------------------------


def masters(engine: Any) -> list[torch.Tensor]:
    o = engine.optimizer
    name = "fp32_partitioned_groups_flat"  # stage 3
    return list(getattr(o, name) if hasattr(o, name) else o.single_partition_of_fp32_groups)


def together(part: torch.Tensor, tp: int) -> list[torch.Tensor]:
    """Equal parts of the ranks of this tensor-parallel coordinate, in order."""
    every = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    # parts of other coordinates have other lengths: gathered as objects
    objects: list[Any] = [None] * len(every)
    dist.all_gather_object(objects, part)
    return [objects[r] for r in range(dist.get_rank() % tp, len(objects), tp)]


def local_state(engine: Any, tp: int) -> dict[str, dict[str, Any]]:
    """{parameter: {state: this tensor-parallel rank's part}}, all of it."""
    names = {p: n for n, p in engine.module.named_parameters()}
    o, found = engine.optimizer, {}
    inner = o.optimizer
    for group, flat in enumerate(masters(engine)):
        states = {"fp32": flat.detach(), **inner.state.get(flat, {})}
        hyper = inner.param_groups[o.sub_group_to_group_id[group] if engine.zero_optimization_stage() == 3 else group]
        gathered = {k: together(v, tp) if torch.is_tensor(v) and v.ndim else v for k, v in states.items()}
        start = 0
        for p in o.fp16_groups[group] if engine.zero_optimization_stage() == 3 else o.round_robin_bit16_groups[group]:
            shape = getattr(p, "ds_shape", p.shape)
            numel = shape.numel()
            here: dict[str, Any] = {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"]}
            if engine.zero_optimization_stage() == 3:
                each = -(-numel // (dist.get_world_size() // tp))
                cut = lambda parts, a=start, n=each: torch.cat([x[a : a + n] for x in parts])  # noqa: E731
                start += each
                with deepspeed.zero.GatheredParameters([p]):
                    here["weight"] = p.detach().clone()
            else:
                cut = lambda parts, a=start, n=numel: torch.cat(parts)[a : a + n]  # noqa: E731
                start += numel
                here["weight"] = p.detach().clone()
            for k, v in gathered.items():
                here[k] = cut(v)[:numel].reshape(shape).clone() if isinstance(v, list) else float(v)
            found[names[p]] = here
    for p, name in names.items():
        if not p.requires_grad:
            with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
                found[name] = {"weight": p.detach().clone()}
    return found


def whole_state(engine: Any, tp: int) -> dict[str, dict[str, Any]]:
    """Local states of all tensor-parallel ranks, put together by DeepSpeed's own maps."""
    local = local_state(engine, tp)
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, local)
    if tp == 1:
        return local
    maps = engine.module.universal_checkpoint_info["affine_map"]["params"]
    out: dict[str, dict[str, Any]] = {}
    for name, states in local.items():
        (entry,) = [m for pattern, m in maps.items() if pattern.replace("\\", "") == f"^{name}$"]
        how = ParamAffineMap.from_dict(entry)
        out[name] = {
            k: how.rebuild({rank: objects[rank][name][k].contiguous() for rank in range(tp)})
            if torch.is_tensor(v)
            else v
            for k, v in states.items()
        }
    return out


def facts(engine: Any, run: dict[str, Any], client: dict[str, Any]) -> dict[str, Any]:
    return {
        "params": whole_state(engine, run["tp"]),
        "buffers": {n: b.clone() for n, b in kept_buffers(engine).items()},
        "global_steps": engine.global_steps,
        "client": {key: client.get(key) for key in CLIENT},
    }


# ---- jobs ----------------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(job["run"], seed=7, spoil=0.0)
    before = losses(engine, job["run"], 0, job["steps"])
    engine.save_checkpoint(job["folder"], client_state=CLIENT)
    truth = facts(engine, job["run"], CLIENT)
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])
    return {"before": before, "after": losses(engine, job["run"], job["steps"], 2)}


def load(job: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(job["run"], seed=99, spoil=0.25)
    scramble(engine, job["run"])
    path, client = engine.load_checkpoint(job["folder"])
    if path is None:
        return {"error": "load_checkpoint found nothing"}
    truth = torch.load(job["truth"], weights_only=False)
    found = differences(facts(engine, job["run"], client), truth)
    return {"differences": found, "after": losses(engine, job["run"], job["steps"], 2)}


JOBS = {"train": train, "load": load}


if __name__ == "__main__":
    main(JOBS)
