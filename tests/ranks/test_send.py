"""Ranks that write a target in a store, with one that fails.

It is killed or hangs. Then no target exists, and any number of ranks starts again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ucpl
from tests.ranks.forked import GONE, Job
from tests.ranks.test_dead_ranks import MORE, SOURCE, tree

UNFINISHED, MANIFEST = "ucpl/unfinished.json", "ucpl/manifest.json"
THEN = {2: 3, 3: 1}  # ranks: those that begin again


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plan, and the objects that one process writes by it.

    The store is a folder here.
    """
    top = tmp_path_factory.mktemp("sent")
    made = ucpl.plan(str(SOURCE), "zero1(dp=3, tp=1)")
    ucpl.save_plan(made, top / "grow.plan")
    ucpl.apply(made, SOURCE, f"local://{top}/one")
    return top / "grow.plan", top / "one"


@pytest.mark.fault(
    "Object stores", "the same with SIGKILL and SIGSTOP of real processes at four failpoints", "the same"
)
@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize(
    ("size", "bad", "phase"),
    [
        (2, 0, "ship-begun:1"),
        (3, 2, "tile-written:1"),
        (2, 1, "ship-sent:1"),
        (3, 0, "ship-sent:1"),
        (2, 0, "ship-manifest:1"),
    ],
)
def test_whoever_is_gone_while_ranks_send_ends_the_others(plan, tmp_path, size, bad, phase, action):
    out = tmp_path / "out"
    command = ["apply", str(plan[0]), str(SOURCE), f"local://{out}", "--memory", "1M"]
    ends = Job(size, command, {bad: f"{phase}:{action}"}).run(tmp_path / "first")
    assert ends[bad].status == (None if action == "stop" else -9)
    for rank, end in enumerate(ends):
        if rank != bad:
            assert end.status == 4 and f"rank {bad} of {size} is gone" in end.said, end
            assert end.seconds < GONE + MORE, end
    left = tree(out) if out.exists() else {}
    assert MANIFEST not in left and UNFINISHED in left, "it does not count, and whoever reads is told so"
    again = Job(THEN[size], [*command, "--resume"]).run(tmp_path / "second")
    assert [end.status for end in again] == [0] * THEN[size], again
    assert tree(out) == tree(plan[1])
