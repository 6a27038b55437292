"""Write the folders of tests/fixtures/megatron/dist_*.

A formula gives every element. `python -m tests.interop.megatron_fixtures TARGET [NAME...]`, in the environment of `make
interop`. It runs itself under torchrun for each. A job of one step gives the optimizer its states; then `Run.fill` puts
the formula's values everywhere, and Megatron-Core saves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

DISTRIBUTED: dict[str, Any] = {"format": "torch_dist", "with_random": False}
SIZES = {"hidden": 10, "heads": 4, "groups": 2, "kv": 2, "ffn": 14, "vocab": 22}
SMALL = {**SIZES, "layers": 2, "qkv_bias": False, "dtype": "bf16"}
ALIGNED = {"layers": 4, "hidden": 64, "heads": 1, "groups": 1, "kv": 2, "ffn": 2, "vocab": 10}
MIXTURE = {**SMALL, "experts": 4, "expert_ffn": 5, "ffn": 7, "shared": 3}
# name: (ranks, the run, how it is saved)
FIXTURES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dist_stacked_tp2_pp2_fully": (4, {**SMALL, "tp": 2, "pp": 2}, DISTRIBUTED),
    "dist_unstacked_moe_ep2": (
        2,
        {**MIXTURE, "shared": 0, "dense_first": True, "ep": 2},
        {**DISTRIBUTED, "unstacked": True},
    ),
    "dist_stacked_moe_tp2_ep2": (
        4,
        {**MIXTURE, "expert_ffn": 6, "ffn": 14, "shared": 6, "tp": 2, "ep": 2, "optimizer": "none"},
        DISTRIBUTED,
    ),
    # sizes without a padded end of a bucket: 0.16.1 saves others wrong if embedding and head are one
    "dist_tied_vpp2": (2, {**SMALL, **ALIGNED, "swiglu": False, "tie": True, "pp": 2, "vpp": 2}, DISTRIBUTED),
    "dist_dp_reshardable_tp2": (4, {**SMALL, "layers": 1, "tp": 2}, {**DISTRIBUTED, "kind": "dp_reshardable"}),
    "dist_adam_tp2": (2, {**SMALL, "tp": 2, "optimizer": "adam"}, {**DISTRIBUTED, "with_random": True}),
    "dist_adam_of_torch": (
        1,
        {**SIZES, "layers": 1, "rms": False, "bias": True, "swiglu": False, "optimizer": "adam", "fused": False},
        DISTRIBUTED,
    ),
}


def write(target: Path, name: str) -> None:
    """Write the folder in each rank, and the truth next to it."""
    import torch.distributed as dist

    from tests.interop import megatron_run

    world, run, form = FIXTURES[name]
    dist.init_process_group("gloo")
    made = megatron_run.Run(run, seed=7)
    if made.optimizer is not None:
        made.step()
    made.fill()
    facts = made.facts()
    made.save(str(target / name), **form)
    if dist.get_rank() == 0:
        told = {
            "made_with": {p: version(p) for p in ("megatron-core", "torch")},
            "ranks": world,
            "run": made.run,
            "saved": form,
            "tensors": {n: described(states) for n, states in sorted(facts.items())},
        }
        (target / f"{name}.truth.json").write_text(json.dumps(told, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def described(states: dict[str, Any]) -> dict[str, Any]:
    """{"shape", "states": {state: its type}, "step", ...}: single numbers are unchanged."""
    import torch

    drawn = {k: str(v.dtype).removeprefix("torch.") for k, v in states.items() if torch.is_tensor(v)}
    told = {k: v for k, v in states.items() if not torch.is_tensor(v)}
    return {"shape": list(states["weight"].shape), "states": drawn, **told}


def main(target: Path, names: list[str]) -> None:
    for name in names or FIXTURES:
        launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        launch += [f"--nproc_per_node={FIXTURES[name][0]}", __file__, str(target), name]
        subprocess.run(launch, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        write(Path(sys.argv[1]), sys.argv[2])
    else:
        main(Path(sys.argv[1]).resolve(), sys.argv[2:])
