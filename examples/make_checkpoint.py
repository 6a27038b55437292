r"""Write examples/checkpoint with DeepSpeed: four CPU ranks, ZeRO-2, three steps.

    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 OMP_NUM_THREADS=1 \
    torchrun --nproc_per_node=4 examples/make_checkpoint.py examples/checkpoint

The model is a small language model with the features that make real checkpoints awkward: odd sizes, a tied head, a
frozen position table, a buffer, and two
parameter groups with a learning rate and weight decay of their own. `truth.pt` next to the step is the complete state, gathered
from the running engines: {"params": {name: {state: tensor}}, "buffers": ..., "lr": [...], "weight_decay": [...]}.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH, BATCH = 53, 12, 9, 120


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.position.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3)
        self.gate_up = nn.Linear(WIDTH, 2 * 19, bias=False)
        self.down = nn.Linear(19, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.add_(torch.tensor([1, tokens.numel()]))  # type: ignore[operator]
        x = self.token(tokens[:, :-1]) + self.position.weight
        x = x + self.mix(F.pad(self.norm(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        gate, up = self.gate_up(x).chunk(2, -1)
        logits = self.head(x + self.down(F.silu(gate) * up))
        return F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


def gathered(engine: Any) -> dict[str, Any]:
    """The complete state, cut out of all ranks' flat buffers."""
    names = {p: n for n, p in engine.module.named_parameters()}
    params: dict[str, dict[str, torch.Tensor]] = {n: {"weight": p.detach().clone()} for p, n in names.items()}
    zero = engine.optimizer
    for g, flat in enumerate(zero.single_partition_of_fp32_groups):
        held = {"fp32": flat.detach(), **zero.optimizer.state[flat]}
        for state, value in held.items():
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, value.contiguous())
            whole = torch.cat(parts) if value.ndim else value
            for p, start in zip(zero.round_robin_bit16_groups[g], zero.round_robin_bit16_offsets[g], strict=True):
                cut = whole[start : start + p.numel()].view(p.shape) if value.ndim else whole
                params[names[p]][state] = cut.clone()
    groups = zero.optimizer.param_groups
    return {
        "params": params,
        "buffers": {n: b.clone() for n, b in engine.module.named_buffers()},
        "lr": [group["lr"] for group in groups],
        "weight_decay": [group["weight_decay"] for group in groups],
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = TinyLM()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "lr": 5e-3, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    share = BATCH // world
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
        engine.backward(engine(tokens[rank * share : (rank + 1) * share]))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"epoch": 1, "cursor": torch.arange(3)})
    truth = gathered(engine)
    if rank == 0:
        torch.save(truth, folder / "truth.pt")
        for script in folder.glob("zero_to_*.py"):  # DeepSpeed's own scripts, which it copies into every folder
            script.unlink()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
