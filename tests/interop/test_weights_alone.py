"""A DeepSpeed folder of weights alone.

Weights and masters load, moments are zero. It is loaded by `convert`'s advice. A plain `load_checkpoint` requests the
groups of an optimizer, which the source lacks; of an elastic checkpoint it requests only moments, and these are filled.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import launch, result
from tests.interop.test_deepspeed import JOB, ROOT

pytestmark = pytest.mark.interop

RUN = {"model": "few", "dtype": "fp32", "optimizer": "adamw"}
SEED, DEGREE = 7, 2
SPEC = """ucpl 1
model few {
  bend       : 3     dtype f32
  mix.weight : 11 3  dtype f32
  out.weight : 11 3  dtype f32
  out.bias   : 11    dtype f32
  group "0" = mix.weight, out.weight
  group "1" = bend, out.bias
  state fp32, slow : f32
}
layout few1(dp) of few extends zero1(dp = dp, elastic = 1) {
}
layout few2(dp) of few extends zero2(dp = dp, elastic = 1) {
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    source = folder / "model.safetensors"
    saved: dict[str, Any] = {"do": "weights", "world": 1, "run": RUN, "seed": SEED, "file": str(source)}
    launch("weights", [{**saved, "result": str(folder / "weights.json")}], JOB)
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
    for stage in (1, 2):
        target = folder / f"filled{stage}"
        spec = folder / "few.ucpl"
        spec.write_text(SPEC)
        call = f"{spec}:few{stage}(dp = {DEGREE})"
        fills = ["--fill", "slow=0"]
        command = [sys.executable, "-m", "ucpl", "convert", str(source), str(target), "--to", call, *fills]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "filled        slow with 0" in done.stdout and "to load it" not in done.stdout
        run = {**RUN, "stage": stage, "optimizer": "lion"}  # AdamW of torch asks for a step that is a tensor
        jobs.append(
            {
                "do": "started",
                "state": "slow",
                "run": run,
                "seed": SEED,
                "folder": str(target),
                "result": str(folder / f"started{stage}.json"),
            }
        )
    launch("load", [{"world": DEGREE, **job} for job in jobs], JOB)
    return folder


@pytest.mark.parametrize("stage", range(4))
def test_weights_are_taken_and_moments_start_at_zero(stage: int, folder: Path) -> None:
    found = result(folder, f"warm{stage}")
    assert found["differences"] == []
    assert found["after"] == pytest.approx(found["expected"], rel=0, abs=1e-6)
    assert len(set(found["after"])) == 3


@pytest.mark.parametrize("stage", (1, 2))
def test_moments_that_are_filled_are_loaded_plainly_and_trained_on(stage: int, folder: Path) -> None:
    found = result(folder, f"started{stage}")
    assert found["differences"] == []
    assert found["after"] == pytest.approx(found["expected"], rel=0, abs=1e-6)
    assert len(set(found["after"])) == 3


FROZEN = {"model": "net", "dtype": "fp32", "optimizer": "adamw", "freeze": True}


@pytest.fixture(scope="module")
def rescued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two groups and a frozen parameter, without its optimizer."""
    folder = tmp_path_factory.mktemp("rescued")
    saved: dict[str, Any] = {"do": "train", "world": DEGREE, "run": {**FROZEN, "stage": 2}, "steps": 0}
    saved |= {"folder": str(folder / "saved"), "truth": str(folder / "truth.pt")}
    launch("rescued", [{**saved, "result": str(folder / "saved.json")}], JOB)
    jobs = []
    for stage in (1, 2, 3):
        target = folder / f"zero{stage}"
        to = ["--to", f"zero{stage}(dp={DEGREE})", "--weights-alone"]
        subprocess.run(
            [sys.executable, "-m", "ucpl", "convert", saved["folder"], str(target), *to], cwd=ROOT, check=True
        )
        job: dict[str, Any] = {"do": "warm", "run": {**FROZEN, "stage": stage}, "seed": SEED, "folder": str(target)}
        jobs.append({**job, "world": DEGREE, "result": str(folder / f"warm{stage}.json")})
    launch("rescued", jobs, JOB)
    return folder


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_run_of_two_groups_takes_its_weights(stage: int, rescued: Path) -> None:
    found = result(rescued, f"warm{stage}")
    assert found["differences"] == []
    assert found["after"] == pytest.approx(found["expected"], rel=0, abs=1e-6)
