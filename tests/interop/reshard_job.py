"""Ranks hold tensors in one layout and reshard them to another.

Run by torchrun: FOLDER. FOLDER/cases.json has the cases, each in a group of its first ranks. FOLDER/CASE/from and
FOLDER/CASE/to hold the same state as files of both layouts, written by `ucpl convert`: each rank loads its own files of
one, reshards, and compares the result with its own files of the other. Counters go to counted.RANK.json there.

Ways: `plain`; `bad`: rank 1 gives a tensor of another shape; `dtensors`: tensors that tp cuts are given and taken as
DTensors.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ucpl
from tests.interop.jobs import leave
from ucpl.conversion.planning import Asked, described
from ucpl.conversion.requests import Given
from ucpl.extents import key_text
from ucpl.placement import locate

CUT = {
    "embed": (0, (61, 24)),
    "up": (0, (42, 24)),
    "out": (1, (24, 24)),
    "down": (1, (24, 42)),
}  # over tp: dim, full shape


def holds(folder: Path, call: str, other: str, rank: int, *, source: bool) -> dict[str, torch.Tensor]:
    """A rank's tensors of a layout, from its files."""
    here, there, _ = described(Asked(call, other) if source else Asked(other, call), Given())
    layout = (here if source else there).layout
    if rank >= layout.ranks:
        return {}
    found = {}
    for home in (h for part in locate(layout, rank=rank).parts for h in part.homes):
        value = torch.load(folder / home.file, weights_only=True)
        for step in home.key:
            value = value[step]
        apart = torch.cat([value.reshape(-1)[:1], value.reshape(-1)])[1:].view(value.shape)  # a part of a larger one
        found[key_text(home.key)] = apart
    return found


def with_dtensors(tensors: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Local tensors that are cut over tp, as DTensors of the mesh."""
    found = dict(tensors)
    for name, local in tensors.items():
        if (cut := CUT.get(name.rpartition("/")[2])) is not None:
            dim, shape = cut
            stride = (shape[1], 1)
            found[name] = DTensor.from_local(
                local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
            )
    return found


def one(top: Path, case: dict[str, Any], group: dist.ProcessGroup) -> None:
    """A case, by the ranks of its group."""
    source, target, way, rank = case["source"], case["target"], case["way"], dist.get_rank()
    state = holds(top / "from", source, target, rank, source=True)
    wanted = holds(top / "to", target, source, rank, source=False)
    before = {name: t.clone() for name, t in state.items()}
    if way == "bad":
        if rank == 1:
            state["norm"] = torch.zeros(7, dtype=torch.bfloat16)
        try:
            ucpl.reshard(state, source, target, group)
        except ucpl.UcplError as error:
            (top / f"error.{rank}").write_text(str(error))
        return
    if way == "dtensors":  # all ranks make all meshes
        meshes = [DeviceMesh("cpu", list(range(int(call.partition("tp=")[2][0])))) for call in (source, target)]
        state = with_dtensors(state, meshes[0]) if state else {}
        empty = {name: torch.full_like(t, -1) for name, t in wanted.items()}
        out = with_dtensors(empty, meshes[1]) if wanted else {}
        found = ucpl.reshard(state, source, target, group, memory=case["memory"], out=out)
        assert all(found[name] is out[name] for name in out)
        assert isinstance(found["embed"], DTensor) or not wanted
        found_local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in found.items()}
    else:
        found = ucpl.reshard(state, source, target, group, memory=case["memory"])
        found_local = dict(found)
        for name, tensor in before.items():
            assert torch.equal(state[name], tensor), name  # the source is only read
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    for name, tensor in wanted.items():
        assert found_local[name].dtype == tensor.dtype, name
        assert torch.equal(found_local[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name
    told = {"sent": found.sent, "received": found.received, "kept": found.kept, "staging": found.staging}
    told["whole"] = sum(t.numel() * t.element_size() for t in wanted.values())
    (top / f"counted.{rank}.json").write_text(json.dumps(told))


def main() -> None:
    top = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name, case in json.loads((top / "cases.json").read_text()).items():
        group = dist.new_group(range(case["ranks"]))
        meshes = case["way"] == "dtensors"
        if dist.get_rank() < case["ranks"] or meshes:
            try:
                one(top / name, case, group)
            except Exception:  # for any error: the test reads it with the rank's results
                (top / name / f"failed.{dist.get_rank()}").write_text(traceback.format_exc())
                raise
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
