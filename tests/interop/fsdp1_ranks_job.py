"""FSDP1 on gloo ranks, saved by each rank as in verl.

The truth is torch's own sharded state dict. python -m torch.distributed.run --nproc_per_node 3
tests/interop/fsdp1_ranks_job.py units|params FOLDER

units: parameters that FSDP keeps flat, over a device mesh (DTensor). params: `use_orig_params`, without a mesh
(ShardedTensor). FOLDER.truth.pt: {name: {"weight", "exp_avg", "exp_avg_sq", "step"}}. tests/fixtures/dcp/fsdp1_units_w3
and fsdp1_params_w3 were made so.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.interop import dcp_models, models
from tests.interop.jobs import leave

STEPS = 3


def main(kind: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    wrapped = FSDP(
        dcp_models.made("cut"),
        auto_wrap_policy=ModuleWrapPolicy({dcp_models.Block}),
        device_id=torch.device("cpu"),
        use_orig_params=kind == "params",
        device_mesh=init_device_mesh("cpu", (world,)) if kind == "units" else None,
    )
    chosen = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    share = models.BATCH // world
    for step in range(STEPS):
        x, y = models.batch(step)
        wrapped(x[rank * share :][:share], y[rank * share :][:share]).backward()
        chosen.step()
        chosen.zero_grad()
    folder.mkdir(parents=True, exist_ok=True)
    kinds = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FSDP.state_dict_type(wrapped, *kinds):
        torch.save(wrapped.state_dict(), folder / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save(chosen.state_dict(), folder / f"optim_world_size_{world}_rank_{rank}.pt")
    beside = [tempfile.mkdtemp()]
    dist.broadcast_object_list(beside)
    model, optimizer = get_state_dict(wrapped, chosen)
    save({"model": model, "optim": optimizer}, checkpoint_id=beside[0])
    if rank == 0:
        dcp_to_torch_save(beside[0], f"{beside[0]}.pt")
        held: dict[str, Any] = torch.load(f"{beside[0]}.pt", weights_only=False)
        states = held["optim"]["state"]
        truth = {name: {"weight": weight, **states.get(name, {})} for name, weight in held["model"].items()}
        torch.save(truth, f"{folder}.truth.pt")
    leave()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
