"""One release of torch.

Its FSDP2 folders are read, and it loads targets. `RELEASE/bin/python tests/interop/dcp_release.py FOLDER PYTHON`, where
PYTHON has ucpl, and FOLDER is empty. Two ranks save a small model and its AdamW, nested and flattened; ucpl makes
plain() and dcp(fsdp=3) of that; both are compared with the run. If they differ, it prints the differences and ends with
1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

KINDS = {"nested": StateDictOptions(), "flat": StateDictOptions(flatten_optimizer_state_dict=True)}


def model() -> tuple[nn.Sequential, list[dict[str, Any]]]:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(7, 13), nn.SiLU(), nn.Linear(13, 7, bias=False))
    made = nn.Sequential(nn.Embedding(11, 7), inner, nn.LayerNorm(7), nn.Linear(7, 11))
    return made, [{"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 2e-3}]


def optimizer(made: nn.Module, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    wide, flat = [p for p in made.parameters() if p.ndim > 1], [p for p in made.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": wide, **groups[0]}, {"params": flat, **groups[1]}], lr=lr)


def save_all(folder: Path) -> None:
    """The work of each of two ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    made, groups = model()
    fully_shard(made[1], mesh=mesh)
    fully_shard(made, mesh=mesh)
    chosen = optimizer(made, groups, 1e-2)
    for _ in range(3):
        made(torch.arange(12).reshape(2, 6) % 11).pow(2).mean().backward()
        chosen.step()
        chosen.zero_grad()
    for kind, options in KINDS.items():
        model_s, optimizer_s = get_state_dict(made, chosen, options=options)
        save({"model": model_s, "optim": optimizer_s, "step": 3}, checkpoint_id=folder / kind)
    weights: Any
    states: Any
    weights, states = get_state_dict(made, chosen, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save({n: {"weight": w, **states["state"][n]} for n, w in weights.items()}, folder / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def compare(folder: Path, kind: str) -> list[str]:
    truth = torch.load(folder / "truth.pt")
    plain = torch.load(folder / f"{kind}.plain.pt", weights_only=True)["params"]
    found = [f"plain: {n}.{k}" for n, s in truth.items() for k, v in s.items() if not same(plain[n][k], v)]
    made, _ = model()
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(9.0)
    chosen = optimizer(made, [{}, {}], 7.0)
    weights, states = get_state_dict(made, chosen, options=KINDS[kind])
    held: dict[str, Any] = {"model": weights, "optim": states, "step": 0}
    load(held, checkpoint_id=folder / f"{kind}.dcp", no_dist=True)
    set_state_dict(
        made,
        chosen,
        model_state_dict=held["model"],
        optim_state_dict=held["optim"],
        options=KINDS[kind],
    )
    mine = {n: {"weight": p, **chosen.state[p]} for n, p in made.named_parameters()}
    found += [f"loaded: {n}.{k}" for n, s in truth.items() for k, v in s.items() if not same(mine[n][k], v)]
    hyper = [(g["lr"], g["weight_decay"]) for g in chosen.param_groups]
    wanted = [(1e-2, 0.1), (2e-3, 0.0)]
    return found + [f"groups: {hyper}"] * (hyper != wanted) + ["step"] * (held["step"] != 3)


def same(mine: Any, theirs: torch.Tensor) -> bool:
    return torch.equal(torch.as_tensor(mine).to(theirs.dtype), theirs)


def main(folder: Path, python: str) -> int:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        __file__,
        str(folder),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(launch, check=True, env=environment)
    found = []
    for kind in KINDS:
        for target, call in ((f"{kind}.plain.pt", "plain()"), (f"{kind}.dcp", "dcp(fsdp=3)")):
            convert = [python, "-m", "ucpl", "convert", str(folder / kind), str(folder / target), "--to", call]
            subprocess.run(convert, check=True, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
        found += [f"{kind}: {line}" for line in compare(folder, kind)]
    print(f"torch {torch.__version__}: {', '.join(found) or 'equal, nested and flat, read and loaded'}")
    return int(bool(found))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        save_all(Path(sys.argv[1]))
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
