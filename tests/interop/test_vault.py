"""A tiny GPT on four ranks, killed, returns from memory.

UCPL_KILLS gives the number of kills, by default three; `make drill` does fifty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.interop import processes

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("vault_job.py")
KILLS = int(os.environ.get("UCPL_KILLS", "3"))
STEPS = 7 * KILLS  # at most six of them are taken by each
BACK: dict[str, dict[str, tuple[str, int]]] = {
    "zero1": {"on 3": ("zero1", 3), "on 6": ("zero1", 6)},
    "fsdp2": {"on 3": ("fsdp2", 3), "on 6": ("fsdp2", 6), "tp 2, dp 2": ("fsdp2 tp2", 4)},
}


def done(folder: Path, kind: str, kills: int, replays: int = 0) -> dict[str, Any]:
    job = {
        "kind": kind,
        "kills": kills,
        "replays": replays,
        "seed": int(os.environ.get("UCPL_SEED", "11")),
        "steps": STEPS,
    }
    listed = folder.with_suffix(".json")
    back = {} if replays else BACK[kind]  # a job without them shows that
    listed.write_text(json.dumps({**job, "folder": str(folder), "back": back}))
    unlike = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "TORCH_COMPILE_DISABLE": "1"}
    environment = {**os.environ, **unlike, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), str(listed)]
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        try:
            processes.run(command, 240 + 60 * KILLS, env=environment, stdout=out, stderr=out)
        except subprocess.TimeoutExpired:
            out.write("no end\n")
    text = folder / "result.json"
    found: dict[str, Any] = json.loads(text.read_text()) if text.exists() else {"error": log.read_text()[-3000:]}
    logs = "".join(f"\n{one.name}\n{one.read_text()[-1500:]}" for one in sorted(folder.glob("*.log")))
    assert "error" not in found, found["error"] + logs
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The job of a kind without kills, run once."""
    return cache(lambda kind: done(tmp_path_factory.mktemp(kind) / "whole", kind, 0))


@pytest.mark.fault(
    "Vaults",
    "a GPT on four ranks (DeepSpeed ZeRO-1, FSDP2) killed at random; 50 times in `make drill`",
    "losses and state of an undisturbed job, bit for bit, also on 3 and 6 ranks",
)
@pytest.mark.parametrize(("kind", "replays"), [("zero1", 0), ("fsdp2", 0), ("fsdp2", 3)])
def test_a_job_that_is_killed_ends_as_one_that_was_not(
    tmp_path: Path, kind: str, replays: int, undisturbed: Callable[[str], dict[str, Any]]
) -> None:
    """replays: saves of gradients only, between two full ones.

    The job returns by repeating steps.
    """
    whole, killed = undisturbed(kind), done(tmp_path / "killed", kind, KILLS, replays)
    assert sum(killed["struck"].values()) == KILLS and not whole["struck"]
    print(f"{kind}: {killed['struck']}, when these steps counted: {killed['kept']}")
    assert killed["kept"] == sorted(killed["kept"]) and 0 < max(killed["kept"]) < STEPS
    assert len(whole["losses"]) == STEPS and killed["losses"] == whole["losses"]
    assert killed["digest"] == whole["digest"]
    assert bool(killed["gradients"]) == bool(replays) and not whole["gradients"]
    # On other ranks, from memory alone, the state is bit-equal.
    assert killed["back"] == dict.fromkeys({} if replays else BACK[kind], whole["digest"])
