"""The parts that all scripts of ranks share.

Jobs, processes, results, and differences.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240  # of one job, on a machine that does other things
LATE = 256  # the status of a job that does not end
CRASHED = (
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
)  # "malloc(): unaligned tcache chunk detected", once in a hundred jobs


def differences(mine: Any, truth: Any, where: str = "") -> list[str]:
    """Everything that is not bit-equal, by name."""
    if isinstance(truth, dict):
        out = [f"{where}/{k} is missing" for k in truth if k not in mine]
        out += [f"{where}/{k} is new" for k in mine if k not in truth]
        return out + [d for k in truth if k in mine for d in differences(mine[k], truth[k], f"{where}/{k}")]
    if torch.is_tensor(truth):
        same = torch.is_tensor(mine) and mine.dtype == truth.dtype and torch.equal(mine, truth)
        return [] if same else [f"{where} differs"]
    return [] if mine == truth else [f"{where} is {mine!r}, not {truth!r}"]


def do_all(do: dict[str, Any], begin: Callable[[], Any] | None = None) -> None:
    """Do the jobs of the command line's file, on their ranks.

    Ranks are forked from this process, which has imported everything: to start Python for each rank of each job takes
    longer than the jobs. So each job has its own processes, with torchrun's environment, and no state survives them:
    threads of gloo for old groups, or a framework's global state. If one rank fails, the others end, and the next job
    begins. begin: makes the process group.
    """
    importlib.import_module("torch._dynamo")  # which the first optimizer of a process asks for
    for job in json.loads(Path(sys.argv[1]).read_text()):
        act, join = do[job["do"]], begin or partial(dist.init_process_group, "gloo")
        ended = _done(_forked(job, act, join))
        if -ended in CRASHED:
            print(f"{job['result']}: a rank crashed ({signal.Signals(-ended).name}): it is done once more", flush=True)
            ended = _done(_forked(job, act, join))
        if ended:  # unless the failed rank has written the reason
            what = f"no end after {SECONDS} seconds" if ended == LATE else f"a rank ended with status {ended}"
            _write_once(job, {"error": what})


def _done(ranks: set[int]) -> int:
    """Wait for the ranks of a job, or for a failure.

    Returns its status.
    """
    every, ended, last = {*ranks}, LATE, time.monotonic() + SECONDS
    while ranks and time.monotonic() < last:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            ranks.discard(pid)
            ended = os.waitstatus_to_exitcode(status)
            if ended:
                break
        elif not pid:
            time.sleep(0.005)
    for pid in every:  # and their child processes, which would remain
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    rest = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    crashed = next((one for one in rest if -one in CRASHED), ended)  # other ranks may have reported it earlier
    return crashed if not ranks or ended else LATE


def _forked(job: dict[str, Any], act: Callable[[dict[str, Any]], dict[str, Any]], begin: Callable[[], Any]) -> set[int]:
    """The processes of all ranks of a job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world, ranks = str(job["world"]), set()
    for rank in map(str, range(job["world"])):
        pid = os.fork()
        if pid:
            ranks.add(pid)
            continue
        os.setpgid(0, 0)
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update(told, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            begin()
            _tell(job, act(job))
            leave()
        except BaseException:
            _write_once(job, {"error": traceback.format_exc()[-3000:]})
        os._exit(1)
    return ranks


def _write_once(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Write a failed job's first error."""
    with contextlib.suppress(FileExistsError), open(job["result"], "x") as file:
        json.dump(result, file)


def _tell(job: dict[str, Any], result: dict[str, Any]) -> None:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, result)
    if dist.get_rank() == 0:
        worst = next((r for r in every if "error" in r), None) or next(
            (r for r in every if r.get("differences")), every[0]
        )
        with open(job["result"], "w") as file:
            json.dump(worst, file)


def leave() -> None:
    """End a rank when all have done their work.

    Not through the interpreter's own shutdown: threads of torch's that are still there may abort it ("terminate called
    without an active exception"), and a job is then called failed whose results are all there.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
