"""torchrun starts ranks that run a plan, as one process does.

If one is killed, all end. The source is a checkpoint that DeepSpeed wrote. The jobs are real processes
over torch's own store.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ucpl
from tests.interop import processes

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/fixtures/deepspeed/tp2_dp2_z1_uneven"
CHILD = """
import os, sys
from ucpl.runtime import moving
from ucpl.cli import main
moving.SYNC_BYTES = 1
sys.exit(main(sys.argv[1:]))
"""


def launch(
    ranks: int, plan: Path, out: Path, *options: str, bad: int = -1, what: str = ""
) -> subprocess.CompletedProcess[str]:
    """`ucpl apply` on ranks; one of them fails as in `UCPL_FAIL_AT`."""
    child = f'if [ "$RANK" = "{bad}" ]; then export UCPL_FAIL_AT={what}; fi; exec "$@"'
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--no-python"]
    command += ["bash", "-c", child, "rank", sys.executable, "-c", CHILD]
    command += ["apply", str(plan), str(SOURCE), str(out), "--memory", "1M", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return processes.run(command, 240, env=environment)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plan, and the files that one process writes by it."""
    top = tmp_path_factory.mktemp("ranks")
    made = ucpl.plan(str(SOURCE), "zero1(dp=3, tp=1)")
    ucpl.save_plan(made, top / "grow.plan")
    ucpl.apply(made, SOURCE, top / "one")
    return top / "grow.plan", top / "one"


def bytes_in(top: Path) -> dict[str, bytes]:
    return {p.relative_to(top).as_posix(): p.read_bytes() for p in sorted(top.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_write_the_bytes_of_one_process(plan: tuple[Path, Path], tmp_path: Path, ranks: int) -> None:
    done = launch(ranks, plan[0], tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert bytes_in(tmp_path / "out") == bytes_in(plan[1])
    assert done.stdout.count("done ") == 1  # one rank answers
    read, needed = re.search(r"read +([\d,]+) bytes.*, ([\d,]+) needed", done.stdout).groups()  # type: ignore[union-attr]
    assert int(read.replace(",", "")) <= 1.02 * int(needed.replace(",", ""))


def test_ranks_on_hosts_that_have_some_files_each_write_the_bytes_of_one_process(
    plan: tuple[Path, Path], tmp_path: Path
) -> None:
    """Each rank has its own folder as a host, with its shards.

    One of them has the rest.
    """
    for i, path in enumerate(sorted(p for p in SOURCE.rglob("*") if p.is_file())):
        place = tmp_path / str(i % 3) / "src" / path.relative_to(SOURCE)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)
    child = f'cd {tmp_path}/$RANK; exec "$@"'
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--no-python"]
    command += ["bash", "-c", child, "rank", sys.executable, "-m", "ucpl"]
    command += ["apply", str(plan[0]), "src", str(tmp_path / "out"), "--memory", "2M"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = processes.run(command, 240, env=environment)
    assert done.returncode == 0, done.stderr
    there, alone = bytes_in(tmp_path / "out"), bytes_in(plan[1])
    there.pop("ucpl/manifest.json"), alone.pop("ucpl/manifest.json")  # the times and places of sources
    assert there == alone
    assert re.search(r"received +[\d,]+ bytes of disks of other ranks", done.stdout)
    assert "ucpl-remote" not in done.stdout + done.stderr


@pytest.mark.fault(
    "Ranks that run a plan together",
    "SIGKILL of the first or another rank, under torchrun",
    "all ranks end without a target; other ranks resume to the same bytes",
)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_killed_rank_ends_all_and_others_resume(plan: tuple[Path, Path], tmp_path: Path, bad: int) -> None:
    ended = launch(3, plan[0], tmp_path / "out", bad=bad, what="tile-written:2:kill")
    assert ended.returncode != 0
    assert not (tmp_path / "out").exists()
    assert "--resume" in ended.stderr
    again = launch(2, plan[0], tmp_path / "out", "--resume")
    assert again.returncode == 0, again.stderr
    assert bytes_in(tmp_path / "out") == bytes_in(plan[1])


@pytest.mark.fault(
    "Ranks that run a plan together", "SIGSTOP of a rank, without torchrun", "missed after six seconds and named"
)
def test_a_rank_that_hangs_is_detected(plan: tuple[Path, Path], tmp_path: Path) -> None:
    """Without torchrun, whose own timeout is half a minute."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    command = [sys.executable, "-c", CHILD, "apply", str(plan[0]), str(SOURCE), str(tmp_path / "out"), "--memory", "1M"]
    ranks = []
    for rank in range(3):
        fails = {"UCPL_FAIL_AT": "tile-written:2:stop"} if rank == 2 else {}
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **place,
            "RANK": str(rank),
            **fails,
        }
        ranks.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    try:
        said = [ranks[rank].communicate(timeout=120)[1] for rank in (0, 1)]
        assert ranks[2].poll() is None  # it hangs
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert all("error[E621]: rank 2 of 3 is gone: it was not heard for 6 seconds" in text for text in said)
    assert [ranks[rank].returncode for rank in (0, 1)] == [4, 4]
    assert not (tmp_path / "out").exists()


def test_a_rank_whose_disk_fails_says_so(plan: tuple[Path, Path], tmp_path: Path) -> None:
    ended = launch(3, plan[0], tmp_path / "out", bad=1, what="target-write:2:eio")
    assert "error[E503]" in ended.stderr
    assert "Input/output error" in ended.stderr


def test_other_verbs_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ucpl"]
    command += ["convert", str(SOURCE), str(tmp_path / "out"), "--to", "zero1(dp=3, tp=1)"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = processes.run(command, 240, env=environment)
    assert "error[E624]: ucpl convert was started as rank" in ended.stderr
    assert not (tmp_path / "out").exists()
