"""Time `ucpl.reshard`, DTensor.redistribute, and DCP in one job. Run by torchrun.

torchrun --nproc-per-node 4 benchmarks/live_job.py FROM TO FOLDER ROUNDS: layouts of live.ucpl. The first rank prints JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ucpl

LAYERS, WIDE = 48, 1024
SPEC = Path(__file__).with_name("live.ucpl")
CUT = {"rows": 0, "columns": 1}


def cut_of(call: str) -> tuple[int, int]:
    """`rows(n = 4)`: along which dim, and over how many ranks."""
    name, _, rest = call.partition("(")
    return CUT[name], int(rest.rstrip(")").partition("=")[2])


def numbers(layer: int, dim: int, count: int, rank: int) -> torch.Tensor:
    """A rank's part of a matrix of element numbers, plus the layer."""
    whole = torch.arange(WIDE * WIDE, dtype=torch.float32).view(WIDE, WIDE) + layer
    return whole.chunk(count, dim)[rank].contiguous()


def timed(act: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begin


def main() -> None:
    source, target, folder, rounds = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    (here, few), (there, many) = cut_of(source), cut_of(target)
    meshes = [DeviceMesh("cpu", list(range(n))) for n in (few, many)]
    state = {str(i): numbers(i, here, few, rank) for i in range(LAYERS)} if rank < few else {}
    shape, stride = torch.Size((WIDE, WIDE)), (WIDE, 1)
    tensors = {
        name: DTensor.from_local(local, meshes[0], [Shard(here)], run_check=False, shape=shape, stride=stride)
        for name, local in state.items()
    }
    found: dict[str, list[float]] = {"ucpl": [], "redistribute": [], "dcp": []}
    moved = {}
    for _ in range(rounds):
        made: dict[str, torch.Tensor] = {}

        def ours(made: dict[str, torch.Tensor] = made) -> None:
            got = ucpl.reshard(state, f"{SPEC}:{source}", f"{SPEC}:{target}")
            made.update(got)
            moved.update(sent=got.sent, kept=got.kept)

        found["ucpl"].append(timed(ours))
        if few == many:
            found["redistribute"].append(
                timed(lambda: [t.redistribute(meshes[1], [Shard(there)]).to_local() for t in tensors.values()])
            )
        local = (WIDE // many, WIDE) if there == 0 else (WIDE, WIDE // many)
        empty = {
            str(i): DTensor.from_local(
                torch.zeros(local), meshes[1], [Shard(there)], run_check=False, shape=shape, stride=stride
            )
            for i in range(LAYERS if rank < many else 0)
        }

        def beside(empty: dict[str, DTensor] = empty) -> None:
            dcp.save(tensors, checkpoint_id=folder / "step")
            dist.barrier()
            dcp.load(empty, checkpoint_id=folder / "step")

        found["dcp"].append(timed(beside))
        if rank == 0:
            shutil.rmtree(folder / "step")
        dist.barrier()
        for name, tensor in made.items():
            assert torch.equal(tensor, numbers(int(name), there, many, rank)), name
            assert torch.equal(tensor, empty[name].to_local()), name
    total = torch.tensor([moved["sent"], moved["kept"]])
    dist.all_reduce(total)
    if rank == 0:
        print(json.dumps({"seconds": found, "sent": int(total[0]), "kept": int(total[1])}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
