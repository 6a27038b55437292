"""Commands that start others, and their end after a timeout."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def run(command: Sequence[str], seconds: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with output; after `seconds` all processes end.

    It raises TimeoutExpired then. torchrun starts its ranks in sessions of their own: to kill it, or its group, leaves
    them, and ranks of gloo that wait for each other take all of a core until the machine is switched off.
    """
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    with subprocess.Popen(command, text=True, **more) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            end_all(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end_all(pid: int) -> None:
    """Kill a process and all that it started, however deep."""
    import psutil  # where no job runs, names of tests are collected without it

    try:
        first = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    first.suspend()  # so that it neither starts more nor cleans up after the others
    doomed = [*first.children(recursive=True), first]
    for one in doomed:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(doomed, timeout=10)
