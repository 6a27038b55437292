"""FSDP2's model and optimizer folders of Accelerate resume at other ranks.

`save_state` wrote them. Three torchruns, half a minute on two quiet cores.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop import processes
from tests.interop.parallel import ROOT

pytestmark = pytest.mark.interop

JOB = Path(__file__).with_name("fsdp_folders_job.py")


def run(world: int, *argv: str | Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", str(JOB)]
    done = processes.run([*command, *map(str, argv)], 300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def convert(source: Path, target: Path, call: str) -> None:
    command = [sys.executable, "-m", "ucpl", "convert", str(source), str(target), "--to", call]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp_folders")
    run(2, "save", folder / "state", folder / "truth.pt")
    return folder


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Places of two trees that are not the same, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        apart = [f"{where}/{key}" for key in one.keys() ^ other.keys()]
        return apart + [
            x for key in one.keys() & other.keys() for x in differences(one[key], other[key], f"{where}/{key}")
        ]
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [where]
    return [] if one == other else [where]


@pytest.mark.parametrize("world", [1, 3])
def test_accelerates_functions_resume_at_other_ranks(world: int, folder: Path) -> None:
    convert(folder / "state", folder / f"on{world}", f"dcp(fsdp={world})")
    run(world, "load", folder / f"on{world}", folder / f"on{world}.pt")
    truth, found = (torch.load(folder / name) for name in ("truth.pt", f"on{world}.pt"))
    assert differences(truth["model"], found["model"]) == []
    assert differences(truth["optimizer"], found["optimizer"]) == []
    assert found["after"] == pytest.approx(truth["after"], rel=0, abs=1e-5)
    assert len(set(found["after"])) == 3, "it trains"
    assert (folder / f"on{world}" / f"random_states_{world - 1}.pkl").is_file()


def test_a_moment_that_was_changed_is_found(folder: Path) -> None:
    truth = torch.load(folder / "truth.pt")
    changed = torch.load(folder / "truth.pt")
    changed["optimizer"]["state"]["up.weight"]["exp_avg"][0, 0] += 1e-7
    assert differences(truth, truth) == []
    assert differences(truth["optimizer"], changed["optimizer"]) == ["/state/up.weight/exp_avg"]
