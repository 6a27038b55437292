"""Train a small GPT under DeepSpeed and save it, under torchrun.

torchrun --nproc_per_node=2 benchmarks/make_checkpoint.py STAGE FOLDER [LAYERS] [WIDTH]
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, tokens: int = 32003) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, 4 * width + 3) for _ in range(layers))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    stage, folder = int(sys.argv[1]), sys.argv[2]
    layers = int(sys.argv[3]) if len(sys.argv) > 3 else 14
    width = int(sys.argv[4]) if len(sys.argv) > 4 else 768
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Model(layers, width)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-3
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = engine(torch.randint(0, 32003, (1, 9), generator=torch.Generator().manual_seed(dist.get_rank())))
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder, client_state={"from": "benchmarks"})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
