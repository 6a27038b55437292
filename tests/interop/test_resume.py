"""Restarts on other ranks, by the path of `ucpl resume`.

Five training scripts and a requeued job of Slurm are killed; losses are those of the undisturbed run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ROOT
from tests.interop import processes
from tests.interop.parallel import TOLERANCE, launch, result

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).with_name("resume_job.py")
# name of the loop: ranks before, ranks after the restart, the path that the restarted ranks load
LOOPS = {
    "dcp": (2, 3, r"dcp/step_2"),  # step_3 has no .metadata
    "titan": (2, 3, r"titan/checkpoint/step-2"),
    "deepspeed": (4, 2, r"deepspeed\.resume/global_step2-zero1-dp-1-\w+"),  # two stages stay
    "accelerate": (2, 3, r"accelerate\.resume/checkpoint_0-zero1-dp-3-\w+"),
    "trainer": (2, 3, r"trainer\.resume/checkpoint-3-zero2-dp-3-\w+"),
}
GROUPS = {"light": ("dcp", "titan", "deepspeed"), "transformers": ("accelerate", "trainer")}  # a script's process each


def jobs_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """A loop undisturbed, killed, and restarted on other ranks."""
    before, after, _ = LOOPS[name]
    runs = (("calm", before, False), ("killed", before, True), ("again", after, False))
    return [
        {"do": "run", "loop": name, "world": world, "dies": dies, "result": str(folder / f"{name}.{what}.json"),
         "folder": str(folder / (f"{name}.calm" if what == "calm" else name))}
        for what, world, dies in runs
    ]  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.mark.parametrize("name", LOOPS)
def test_losses_after_a_restart_on_other_ranks_are_those_of_the_run(name: str, folder: Path) -> None:
    group = next(group for group, names in GROUPS.items() if name in names)
    if not (folder / f"{group}.log").exists():
        launch(group, [job for one in GROUPS[group] for job in jobs_of(one, folder)], SCRIPT)
    calm, again = result(folder, f"{name}.calm"), result(folder, f"{name}.again")
    assert '"error"' in (folder / f"{name}.killed.json").read_text() and calm["path"] is None
    assert re.fullmatch(LOOPS[name][2], str(Path(again["path"]).relative_to(folder))), again
    losses = calm["losses"][-len(again["losses"]) :]
    assert again["losses"] == pytest.approx(losses, rel=0, abs=TOLERANCE["fp32"])
    assert len(losses) >= 2 and len(set(calm["losses"])) == len(calm["losses"])


# ---- Slurm -----------------------------------------------------------------------------------------------------------

SLURM = {  # stand-ins for the commands of Slurm
    "srun": 'for n in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$n "$@" & echo $! >> tasks; done; wait',
    "scontrol": '[ "$1" = show ] && { echo 127.0.0.1; exit; }\necho "$@" >> requeued\nkill -9 $(cat tasks)',
    "ucpl": f'exec "{sys.executable}" -m ucpl "$@"',
    "python": f'exec "{sys.executable}" "$@"',
}


SECONDS = 300  # of each part of a job, on a machine that does other things


def started(tasks: int, job: int, here: Path) -> subprocess.Popen[str]:
    """An allocation of Slurm that runs the batch script."""
    (here / "tasks").unlink(missing_ok=True)
    path = f"{here.parent / 'bin'}:{os.environ['PATH']}"
    about = {"SLURM_JOB_ID": str(job), "SLURM_NTASKS": str(tasks), "SLURM_JOB_NODELIST": "localhost"}
    environment = {**os.environ, **about, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["bash", "train.sbatch"], cwd=here, env=environment, text=True, stdout=subprocess.PIPE)


def losses_of(out: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", out, re.M)}


def test_a_requeued_job_of_slurm_resumes_on_the_tasks_that_it_gets(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("calm", "job"):
        shutil.copytree(ROOT / "examples" / "slurm", tmp_path / name)
    here = tmp_path / "job"
    calm, first = started(1, 11_000, tmp_path / "calm"), started(2, 12_000, here)
    last = time.monotonic() + SECONDS
    while not (here / "out" / "step-5" / ".metadata").exists() and first.poll() is None and time.monotonic() < last:
        time.sleep(0.02)
    first.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@120 does
    before = losses_of(first.communicate(timeout=SECONDS)[0])
    assert (here / "requeued").read_text() == "requeue 12000\n"
    again = started(3, 12_000, here)
    try:
        after = losses_of(again.communicate(timeout=SECONDS)[0])
        truth = losses_of(calm.communicate(timeout=SECONDS)[0])
    finally:
        for one in (calm, first, again):
            processes.end_all(one.pid)
    assert len(truth) == 40 and 0 in before and max(before) < 39
    assert set(after) == set(range(min(after), 40)) and 5 <= min(after) <= max(before) + 1
    assert {**before, **after} == pytest.approx(truth, rel=0, abs=1e-5)
