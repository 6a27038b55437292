"""A job of DeepSpeed on CPUs, ZeRO-2 in bf16: `torchrun --standalone --nproc-per-node 4 train.py --save runs/on-4`.

Every fourth step is saved, or every one kept in a vault (`--keep`), with the state next to it (states/at-4): a digest of
all weights, masters and moments, and of the step count. A run that is loaded (`--load`, DeepSpeed's own loader) or filled
(`--fill`, ucpl.load_into) prints its comparison with that state, and trains on. Each rank leaves its process id in pids/.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ucpl
from ucpl.vault import Vault

BATCH, WORDS = 24, 61  # sequences of a step, over all ranks


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self, width: int = 40, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), words[:, 1:].flatten())


def engine_of(world: int, seed: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(seed)
    model = Model()
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine


def batch(step: int) -> torch.Tensor:
    """The same words at the same step, for any number of ranks."""
    begin = torch.randint(0, WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (begin * 3 ** torch.arange(12)) % WORDS


def digest(engine: deepspeed.DeepSpeedEngine) -> str:
    """A digest of all weights, masters, moments and step counts.

    It is the same on any number of ranks.
    """
    optimizer, told = engine.optimizer, hashlib.sha256(str(engine.global_steps).encode())
    for part, params in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
        states = optimizer.optimizer.state[part]
        for mine in (part.detach(), states["exp_avg"], states["exp_avg_sq"]):
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            whole = torch.cat(parts)[: sum(param.numel() for param in params)]  # padding follows
            told.update(whole.numpy().tobytes())
        for param in params:
            told.update(param.detach().view(torch.int16).numpy().tobytes())
    return told.hexdigest()[:16]


def main() -> None:
    options = argparse.ArgumentParser()
    for name in ("--save", "--keep", "--load", "--fill"):
        options.add_argument(name, type=Path)
    options.add_argument("--steps", type=int, default=100_000)
    options.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    asked = options.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    Path("pids").mkdir(exist_ok=True)
    Path(f"pids/{rank}").write_text(str(os.getpid()))

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    engine = engine_of(world, seed=1 if asked.save or asked.keep else 2)  # a resumed run begins with other weights
    kept = Vault.at(asked.keep).writer(rank) if asked.keep else None
    source = asked.load or asked.fill
    if asked.load:
        engine.load_checkpoint(asked.load)
    if asked.fill:
        ucpl.load_into(engine, engine.optimizer, asked.fill)
    step = engine.global_steps
    mine = digest(engine) if source else ""
    if source:
        saved = Path(f"states/at-{step}").read_text()
        say(f"state at step {step} {'is' if mine == saved else 'IS NOT'} the one that was saved: {mine}")
    say(f"{world} ranks train")
    while step < asked.steps:
        share = BATCH // world
        loss = engine(batch(step)[rank * share : (rank + 1) * share])
        engine.backward(loss)
        engine.step()
        step = engine.global_steps
        total = loss.detach().double()
        dist.all_reduce(total)
        say(f"step {step} loss {float(total) / world:.3f}")
        if kept or (asked.save and step % 4 == 0):
            mine = digest(engine)
            if rank == 0:
                Path("states").mkdir(exist_ok=True)
                Path(f"states/at-{step}").write_text(mine)
        if asked.save and step % 4 == 0:
            engine.save_checkpoint(asked.save)
            say(f"saved step {step}")
        if kept and kept.save(step, engine):
            say(f"kept step {step}")
        time.sleep(asked.pause)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
