"""A run of the Trainer or of Accelerate resumes under another strategy.

Strategies are DDP, FSDP2 and DeepSpeed. Each folder is converted and loaded by the loop's own function; the losses are
those of the uninterrupted run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import ucpl
from tests.interop import processes

pytestmark = pytest.mark.interop

SCRIPT = Path(__file__).with_name("strategies_job.py")
CALLS = {"ddp": "{}(dp=2)", "full": "{}(dp=2, full=1)", "sharded": "dcp(fsdp=2)", "zero": "zero1(dp=2)"}
PAIRS = ["ddp-full", "ddp-sharded", "ddp-zero", "full-ddp", "zero-ddp", "zero-sharded", "sharded-zero"]
TOLERANCE = 1e-5


def job(loop: str, strategy: str, folder: Path, *more: str) -> list[float]:
    """The losses of the steps after the saved one."""
    result = folder.with_suffix(".json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    command += [loop, strategy, str(folder), str(result), *more]
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        processes.run(
            command, 300, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder.parent, stdout=out, stderr=out
        )
    assert result.exists(), log.read_text()[-3000:]
    found: list[float] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


def goes_on(loop: str, pair: str, folder: Path) -> None:
    here, there = pair.split("-")
    source, target = folder / f"{loop}-{here}", folder / f"{loop}-{pair}"
    losses = json.loads(source.with_suffix(".json").read_text()) if source.exists() else job(loop, here, source)
    names = folder / f"{source.name}.names.json"  # of a folder without config.json
    needs_order = loop == "accelerate" and here == "ddp"
    ucpl.convert(source, target, CALLS[there].format(loop), layout=f'{loop}(order="{names}")' if needs_order else None)
    assert job(loop, there, target, "resume") == pytest.approx(losses, abs=TOLERANCE)
    assert len({round(loss, 3) for loss in losses}) > 1


@pytest.mark.parametrize("pair", PAIRS)
def test_the_trainer_resumes_under_another_strategy(pair: str, folder: Path) -> None:
    goes_on("trainer", pair, folder)


@pytest.mark.parametrize("pair", PAIRS)
def test_accelerate_resumes_under_another_strategy(pair: str, folder: Path) -> None:
    goes_on("accelerate", pair, folder)
