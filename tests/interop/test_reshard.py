"""`ucpl.reshard` in jobs of gloo gives each rank the tensors of convert.

Jobs grow, shrink and change their parallelism.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.interop import processes

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples/ranks/job.ucpl"
SCRIPT = Path(__file__).with_name("reshard_job.py")
WIDE, LAYERS = 24, 5


def whole(top: Path) -> Path:
    """The full state on one rank: random weights, masters, moments."""
    numbers = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"embed": (61, WIDE)}
    inner = {
        "norm1": (WIDE,),
        "qkv": (3 * WIDE, WIDE),
        "out": (WIDE, WIDE),
        "norm2": (WIDE,),
        "up": (42, WIDE),
        "down": (WIDE, 42),
    }
    shapes |= {f"layer {i}/{name}": shape for i in range(LAYERS) for name, shape in inner.items()} | {"norm": (WIDE,)}
    values = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    weights: dict[str, object] = {}
    for name, value in values.items():
        *steps, last = name.split("/")
        there = weights
        for step in steps:
            there = there.setdefault(step, {})  # type: ignore[assignment]
        there[last] = value.bfloat16()
    flat = torch.cat([v.reshape(-1) for v in values.values()])
    flat = torch.cat([flat, torch.zeros(len(flat) % 2)])
    top.mkdir()
    torch.save(weights, top / "weights_0_0.pt")
    torch.save({"fp32": flat, "exp_avg": flat * 2, "exp_avg_sq": flat * flat}, top / "optimizer_0_0_0.pt")
    return top


def whole_experts(top: Path) -> Path:
    """The same of a model with experts."""
    numbers = torch.Generator().manual_seed(2)
    layers, experts = range(3), range(6)
    dense: dict[tuple[object, ...], tuple[int, ...]] = {("embed",): (37, 20)}
    for i in layers:
        dense[f"layer {i}", "gate"] = 6, 20
    dense["norm",] = (20,)
    inner = {"up": (28, 20), "down": (20, 28)}
    mlps: dict[tuple[object, ...], tuple[int, ...]] = {
        (f"layer {i}", e, name): shape for i in layers for e in experts for name, shape in inner.items()
    }
    top.mkdir()
    states: dict[str, dict[str, torch.Tensor]] = {}
    for file, group, shapes in (("shared_0_0.pt", "dense", dense), ("experts_0_0_0.pt", "exp", mlps)):
        values = {key: torch.randn(shape, generator=numbers) for key, shape in shapes.items()}
        weights: dict[object, Any] = {}
        for key, value in values.items():
            there = weights
            for step in key[:-1]:
                there = there.setdefault(step, {})
            there[key[-1]] = value.bfloat16()
        torch.save(weights, top / file)
        flat = torch.cat([v.reshape(-1) for v in values.values()])
        states[group] = {"fp32": flat, "exp_avg": flat * 3}
    torch.save(states, top / "opt_0_0_0_0.pt")
    return top


EXPERTS = ROOT / "examples/ranks/experts.ucpl"
CASES: dict[str, dict[str, Any]] = {
    "6 to 6: experts dealt anew": {
        "spec": EXPERTS,
        "source": "job(dp=3, ep=2)",
        "target": "job(dp=2, ep=3)",
        "ranks": 6,
    },
    "6 to 4: ep becomes tp": {"spec": EXPERTS, "source": "job(ep=6)", "target": "job(tp=2, ep=2)", "ranks": 6},
    "2 to 3: ZeRO-1 grows": {"source": "job(dp=2)", "target": "job(dp=3)", "ranks": 3},
    "4 to 2: tp and dp shrink, stages come": {"source": "job(dp=2, tp=2)", "target": "job(pp=2)", "ranks": 4},
    "4 to 4: dp becomes tp": {"source": "job(dp=4)", "target": "job(tp=4)", "ranks": 4},
    "4 to 4: tp becomes dp": {"source": "job(tp=4)", "target": "job(dp=4)", "ranks": 4},
    "6 to 4": {"source": "job(tp=3, pp=2)", "target": "job(dp=2, pp=2)", "ranks": 6},
    "one that cannot": {"source": "job(dp=2)", "target": "job(dp=3)", "ranks": 3, "way": "bad"},
    "DTensors": {"source": "job(tp=2)", "target": "job(tp=6)", "ranks": 6, "way": "dtensors"},
}
MEMORY = 65536


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases by one job of six ranks, one after the other."""
    top = tmp_path_factory.mktemp("reshard")
    ones = {JOB: whole(top / "one"), EXPERTS: whole_experts(top / "experts")}
    cases = {}
    for name, case in CASES.items():
        (top / name).mkdir()
        spec = case.get("spec", JOB)
        calls = {side: f"{spec}:{case[side]}" for side in ("source", "target")}
        for there, side in (("from", "source"), ("to", "target")):
            ucpl.convert(ones[spec], top / name / there, calls[side], layout=f"{spec}:job()")
        said = {key: value for key, value in case.items() if key != "spec"}
        cases[name] = {"way": "plain", "memory": MEMORY, **said, **calls}
    (top / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "6", str(SCRIPT), str(top)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = processes.run(command, 240, env=environment)
    assert done.returncode == 0, [p.read_text() for p in top.glob("*/failed.*")] or done.stderr[-4000:]
    return top


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if "way" not in case])
def test_each_rank_has_the_bits_that_convert_writes(folder: Path, case: str) -> None:
    counted = [json.loads(path.read_text()) for path in sorted((folder / case).glob("counted.*.json"))]
    assert len(counted) == CASES[case]["ranks"]
    assert sum(c["sent"] for c in counted) == sum(c["received"] for c in counted) > 0
    for c in counted:
        assert c["received"] + c["kept"] >= c["whole"] - 16 * 4  # all but padding
        assert c["staging"] <= MEMORY


def test_dtensors_are_given_and_taken(folder: Path) -> None:
    assert len([*(folder / "DTensors").glob("counted.*.json")]) == 6


def test_one_rank_that_cannot_ends_all(folder: Path) -> None:
    texts = [(folder / "one that cannot" / f"error.{rank}").read_text() for rank in range(3)]
    assert "E640: norm is [7], the layout says [24]" in texts[1]
    assert all("E644: rank 1 failed: norm is [7]" in texts[rank] for rank in (0, 2))
