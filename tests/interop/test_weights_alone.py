"""A DeepSpeed folder made of weights alone: DeepSpeed takes weights and masters, and starts moments at zero.

Loaded as `convert` says. A plain `load_checkpoint` asks for the groups of an optimizer, which the source has not.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interop.test_deepspeed import ROOT, result, torchrun

pytestmark = pytest.mark.interop

RUN = {"model": "few", "dtype": "fp32", "optimizer": "adamw"}
SEED, DEGREE = 7, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    source = folder / "model.safetensors"
    saved: dict[str, Any] = {"do": "weights", "run": RUN, "seed": SEED, "file": str(source)}
    torchrun(1, "", [{**saved, "result": str(folder / "weights.json")}], folder)
    jobs = []
    for stage in range(4):
        target = folder / f"zero{stage}"
        command = [
            sys.executable,
            "-m",
            "ucpl",
            "convert",
            str(source),
            str(target),
            "--to",
            f"zero{stage}(dp={DEGREE})",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "load_optimizer_states=False" in done.stdout
        job: dict[str, Any] = {"do": "warm", "run": {**RUN, "stage": stage}, "seed": SEED, "folder": str(target)}
        jobs.append({**job, "result": str(folder / f"warm{stage}.json")})
    torchrun(DEGREE, "", jobs, folder)
    return folder


@pytest.mark.parametrize("stage", range(4))
def test_weights_are_taken_and_moments_start_at_zero(stage: int, folder: Path) -> None:
    found = result(folder, f"warm{stage}")
    assert found["differences"] == []
    assert found["after"] == pytest.approx(found["expected"], rel=0, abs=1e-6)
    assert len(set(found["after"])) == 3
