"""Ranks and commands of tests, forked off one loaded process.

A test process forks of one such server alone, whose list of modules holds from its first rank on: so there is one list.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.fsdp  # noqa: F401

import ucpl.cli
import ucpl.ranks.load_checks
import ucpl.ranks.reshard
import ucpl.vault.persisted
import ucpl.vault.server  # noqa: F401
from tests.ports import free_port
from ucpl.cli import main
from ucpl.runtime.failpoints import set_failpoints


def forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def run_all(size: int, act: Callable[..., None], *args: object, meanwhile: Callable[[], None] = lambda: None) -> None:
    """A job of ranks that call `act(rank, port, *args)` and end well.

    The ranks meet at that port.
    """
    port = free_port()
    ranks = [forking().Process(target=act, args=(rank, port, *args)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    meanwhile()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * size, "a rank stands still, or died"


class Command:
    """A forked process of the command `ucpl`.

    environment: variables besides those of the test; UCPL_FAIL_AT sets failpoints.
    """

    def __init__(self, *argv: object, cwd: Path | None = None, **environment: str) -> None:
        self._top = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._top.name, name) for name in ("out", "err"))
        self._read = 0
        outside = {**os.environ, **environment}
        words = [str(word) for word in argv]
        self._process = forking().Process(target=_command, args=(words, outside, cwd, self._out, self._err))
        self._process.start()

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    @property
    def out(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def line(self, seconds: float = 60) -> str:
        """Wait for the next line of its output."""
        end = time.monotonic() + seconds
        while (at := self.out.find("\n", self._read)) < 0:
            assert time.monotonic() < end and self.status is None, self.err
            time.sleep(0.01)
        found, self._read = self.out[self._read : at + 1], at + 1
        return found

    def end(self, seconds: float = 120) -> int:
        """Wait for the exit status."""
        self._process.join(seconds)
        assert self.status is not None, f"it still runs: {self.out} {self.err}"
        return self.status

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _command(argv: list[str], environment: Mapping[str, str], cwd: Path | None, out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    tempfile.tempdir = None  # as this environment has it
    set_failpoints(environment.get("UCPL_FAIL_AT", ""))
    status = main(argv)
    atexit._run_exitfuncs()  # a forked process ends without them
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
