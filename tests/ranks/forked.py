"""Ranks of a job as processes, forked from one with all imports.

So a rank starts fast. tests/interop/test_ranks.py starts ranks by torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.forking import forking
from tests.ports import free_port
from ucpl.cli import main
from ucpl.ranks import job
from ucpl.records import frozen
from ucpl.runtime import moving
from ucpl.runtime.failpoints import set_failpoints
from ucpl.storage import wire

GONE = 3.0  # seconds; six, outside of tests, where more than a job's own processes are at work on its cores


@frozen
class Ended:
    """The end of a rank.

    It has the exit status (negative for a signal), the output, and the seconds since the fault.
    """

    status: int | None  # None: it hangs
    said: str
    seconds: float


@frozen
class Job:
    """`size` ranks that run `ucpl` with `argv`.

    bad: the fault of each faulty rank, in the syntax of `UCPL_FAIL_AT`.
    hosted: the store belongs to another process, as under torchrun.
    starts: the ranks that are started; None: all.
    """

    size: int
    argv: Sequence[str]
    bad: Mapping[int, str] = {}
    hosted: bool = True
    starts: Sequence[int] | None = None

    def run(self, logs: Path) -> list[Ended]:
        context = forking()
        port = free_port()
        store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=9), False) if self.hosted else None
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.size)}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} if self.hosted else {}
        logs.mkdir()
        ranks = []
        for number, rank in enumerate(self.starts if self.starts is not None else range(self.size)):
            fails, log = self.bad.get(rank, ""), logs / str(number)
            ranks.append(context.Process(target=_rank, args=({**place, "RANK": str(rank)}, self.argv, fails, log)))
        for process in ranks:
            process.start()
        try:
            fell = self._fall(ranks)
            ends: list[float] = [0.0] * len(ranks)
            while waited := [i for i, p in enumerate(ranks) if p.exitcode is None and not _is_stopped(p.pid)]:
                assert time.monotonic() - fell < 60, f"{waited} did not end"
                ranks[waited[0]].join(0.02)
                for i in waited:
                    ends[i] = max(0.0, time.monotonic() - fell)
            return [
                Ended(p.exitcode, (logs / str(i)).read_text(encoding="utf-8"), ends[i]) for i, p in enumerate(ranks)
            ]
        finally:
            for process in ranks:
                process.kill()
                process.join()
            del store

    def _fall(self, ranks: Sequence[multiprocessing.process.BaseProcess]) -> float:
        """The time of the faults; now, if there are none."""
        last = time.monotonic() + 60
        while self.bad and time.monotonic() < last:
            if any(ranks[rank].exitcode is not None or _is_stopped(ranks[rank].pid) for rank in self.bad):
                break
            time.sleep(0.01)
        return time.monotonic()


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _rank(environment: Mapping[str, str], argv: Sequence[str], fails: str, log: Path) -> None:
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    moving.SYNC_BYTES = 1  # each tile is journalled
    job.GONE, job.BEAT, job.SAID, wire.STALLED = GONE, GONE / 10, 1.0, GONE
    set_failpoints(fails)
    status = main(list(argv))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
