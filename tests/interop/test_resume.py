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
# name: the script, the run on two ranks, the restart's ranks, its options of resume, and changes of its run
RUNS: dict[str, tuple[Path, dict[str, Any], int, tuple[str, ...], dict[str, Any]]] = {
    "trainer": (TRAINER, {"model": "gpt2", "stage": 2, "dtype": "fp32"}, 3, (), {}),
    "deepspeed": (PARALLEL, {"stage": 1, "dtype": "fp32"}, 3, ("--to", "zero3"), {"stage": 3}),
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_after_a_restart_on_other_ranks_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    script, run, ranks, options, change = RUNS[name]
    work({name: Source(2, run)}, (), tmp_path, script)
    folder = tmp_path / "out"
    folder.mkdir()
    shutil.move(tmp_path / name, folder / "checkpoint-3")
    line = ("resume", folder, "--ranks", ranks, *options, "--json")
    found = good(*line).json
    assert found["converted"] and good(*line).json["path"] == found["path"]
    job = {"do": "load", "world": ranks, "run": {**run, **change}, "steps": STEPS, "folder": found["path"]}
    launch("again", [{**job, "truth": str(tmp_path / f"{name}.truth"), "result": str(tmp_path / "again.json")}], script)
    again = result(tmp_path, "again")
    assert again["differences"] == []
    assert again["after"] == pytest.approx(result(tmp_path, name)["after"], rel=0, abs=TOLERANCE["fp32"])
    assert json.loads((tmp_path / f"{name}.json").read_text())["after"]
