"""Restarts on other ranks, by the path that `ucpl resume` prints.

The Trainer, and a script of DeepSpeed: losses are those of the undisturbed run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import good
from tests.interop.parallel import PARALLEL, STEPS, TOLERANCE, Source, launch, result, work

pytestmark = pytest.mark.interop

TRAINER = Path(__file__).with_name("trainer_job.py")
PIPELINE = {"pp": 2, "method": "uniform", "dtype": "fp32", "optimizer": "adamw"}
# name: the script, its ranks, the run, and the ranks of the restart
RUNS: dict[str, tuple[Path, int, dict[str, Any], int]] = {
    "trainer": (TRAINER, 2, {"model": "gpt2", "stage": 2, "dtype": "fp32"}, 3),
    "deepspeed": (PARALLEL, 4, PIPELINE, 2),  # two stages stay
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_after_a_restart_on_other_ranks_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    script, world, run, ranks = RUNS[name]
    work({name: Source(world, run)}, (), tmp_path, script)
    folder = tmp_path / name
    if name == "trainer":
        folder = tmp_path / "out"
        folder.mkdir()
        shutil.move(tmp_path / name, folder / "checkpoint-3")
    line = ("resume", folder, "--ranks", ranks, "--json")
    found = good(*line).json
    assert found["converted"] and good(*line).json["path"] == found["path"]
    job = {"do": "load", "world": ranks, "run": run, "steps": STEPS, "folder": found["path"]}
    launch("again", [{**job, "truth": str(tmp_path / f"{name}.truth"), "result": str(tmp_path / "again.json")}], script)
    again = result(tmp_path, "again")
    assert again["differences"] == []
    assert again["after"] == pytest.approx(result(tmp_path, name)["after"], rel=0, abs=TOLERANCE["fp32"])
    assert json.loads((tmp_path / f"{name}.json").read_text())["after"]
