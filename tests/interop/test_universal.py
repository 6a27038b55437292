"""Universal folders of ucpl, loaded by `load_universal` at other degrees.

Values that its loader never restores are excluded from the comparison by name: buffers, and at stage 3 the
hyper-parameters of every group but the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.parallel import convert, launch, result
from tests.interop.test_deepspeed import BF16, FP32, JOB, STEPS

pytestmark = pytest.mark.interop

SOURCES: dict[str, tuple[int, int, dict[str, Any]]] = {"z1": (1, 2, FP32), "z3": (3, 2, FP32), "z1_bf16": (1, 2, BF16)}
TARGETS = [  # source, call, stage and degree of the engine that loads
    ("z1", "universal()", 1, 3),
    ("z1", "universal(stage=3)", 3, 3),
    ("z3", "universal()", 3, 3),
    ("z3", "universal(stage=1)", 2, 3),
    ("z1_bf16", "universal()", 1, 3),
]
NAMES = [f"{source}-{call}-zero{stage}" for source, call, stage, _ in TARGETS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("universal")
    trained = [
        {
            "do": "train",
            "world": 2,
            "run": {**run, "stage": stage},
            "steps": STEPS,
            "folder": str(folder / name),
            "truth": str(folder / f"{name}.truth"),
            "result": str(folder / f"{name}.json"),
        }
        for name, (stage, _, run) in SOURCES.items()
    ]
    launch("train", trained, JOB)
    jobs = []
    for name, (source, call, stage, _) in zip(NAMES, TARGETS, strict=True):
        assert convert(folder / source, folder / name, call) == ""
        jobs.append(
            {
                "do": "load",
                "world": 3,
                "run": {**SOURCES[source][2], "stage": stage, "universal": True},
                "steps": STEPS,
                "folder": str(folder / name),
                "truth": str(folder / f"{source}.truth"),
                "result": str(folder / f"{name}.json"),
            }
        )
    launch("load", jobs, JOB)
    return folder


def is_loaders_own(difference: str, stage: int) -> bool:
    hyper = stage == 3 and (" is " in difference) and ("/lr is" in difference or "/weight_decay is" in difference)
    return difference.startswith("/buffers/") or hyper


@pytest.mark.parametrize("name, target", list(zip(NAMES, TARGETS, strict=True)), ids=NAMES)
def test_deepspeed_loads_a_universal_folder_of_ours(name: str, target: tuple[str, str, int, int], folder: Path) -> None:
    found = result(folder, name)
    assert [d for d in found["differences"] if not is_loaders_own(d, target[2])] == []
    assert len(found["after"]) == 2  # and trains on


@pytest.mark.parametrize("name", ["z1", "z3"])
def test_what_the_loader_leaves_is_all_that_differs(name: str, folder: Path) -> None:
    """Values that the loader does not restore do differ."""
    found = [result(folder, n)["differences"] for n, t in zip(NAMES, TARGETS, strict=True) if t[0] == name]
    assert all(any(d.startswith("/buffers/") for d in one) for one in found)
