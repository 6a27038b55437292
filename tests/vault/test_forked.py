"""Locks of a process that forks, like a trainer with data workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from ucpl.errors import UcplError
from ucpl.storage.vaults.domains import hold_lock, is_locked
from ucpl.vault import Vault, framework_writer
from ucpl.vault.path_conflicts import open_work_dir, remove_stale


def forked(act: Callable[[], int | None]) -> int:
    """A child that runs `act` and ends with its result, or 1."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = act() or 0
        finally:
            os._exit(status)
    return pid


def ends(pid: int) -> int:
    return os.waitpid(pid, 0)[1]


@contextmanager
def worker_of(said: Path, trainer: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """A forked worker of a trainer that is killed.

    The trainer has the result of `trainer`.
    """

    def dies() -> None:
        with trainer():
            said.write_text(str(forked(lambda: time.sleep(120))))
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(ends(forked(dies))) == signal.SIGKILL
    try:
        yield
    finally:
        os.kill(int(said.read_text()), signal.SIGKILL)


@pytest.mark.fault("Vaults", "a killed trainer whose forked workers live on", "its locks are free at once")
def test_a_worker_that_outlives_its_trainer_holds_none_of_its_locks(tmp_path):
    vault = Vault.make(tmp_path / "job")
    with worker_of(tmp_path / "pid", lambda: vault.writer(0)), vault.writer(0) as writer:
        assert writer.rank == 0


def test_work_of_a_dead_process_is_swept_while_what_it_forked_lives(tmp_path):
    left = tmp_path / "left"
    left.mkdir()
    with worker_of(tmp_path / "pid", lambda: open_work_dir(left)):
        assert remove_stale(tmp_path, "left") == [left]


@pytest.mark.parametrize("ended", ["with", "without"])
def test_a_child_that_ends_takes_no_lock_of_its_parent_with_it(tmp_path, ended):
    path = tmp_path / "lock"
    with ExitStack() as locks:
        assert locks.enter_context(hold_lock(path, wait=0))
        assert ends(forked(locks.close if ended == "with" else lambda: 0)) == 0
        assert is_locked(path)
    assert not is_locked(path)


@pytest.mark.parametrize("name", ["other", "lock"])  # the file of the lock, too, which a child may open anew
def test_a_child_that_exits_a_block_closes_none_of_its_own_and_may_take_locks(tmp_path, name):
    with ExitStack() as locks:
        locks.enter_context(hold_lock(tmp_path / "lock", wait=0))
        before = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        os.close(before)

        def child() -> int:
            numbers = [os.open(tmp_path / name, os.O_RDWR) for _ in range(3)]  # the first has the number of the lock
            locks.close()
            for number in numbers:
                os.fstat(number)
            with hold_lock(tmp_path / "another", wait=0) as mine, hold_lock(tmp_path / "lock", wait=0) as of_parent:
                return 0 if mine and not of_parent and min(numbers) < before else 1

        assert ends(forked(child)) == 0


def test_a_child_saves_by_no_writer_of_its_parent(tmp_path, monkeypatch):
    """The child has no lock of the rank.

    Another process might save into the same memory.
    """
    with Vault.make(tmp_path / "job").writer(0, strict=True) as writer:

        def saves() -> int:
            monkeypatch.setattr(framework_writer, "ranks", lambda: os._exit(9))  # the connections are the parent's
            with pytest.raises(UcplError, match="was made by another process"):
                writer.save(1, {"t": torch.ones(3)})
            return 0

        assert ends(forked(saves)) == 0
        assert writer.save(1, {"t": torch.ones(3)})


@pytest.mark.parametrize("is_again", [False, True])
def test_a_lock_whose_descriptor_others_closed_is_no_matter_of_a_child(tmp_path, is_again):
    """Daemons close all open descriptors.

    The same number may be another file later.
    """
    with ExitStack() as own:
        taken = hold_lock(tmp_path / "a.lock", wait=0)
        taken.__enter__()
        (fd,) = (int(p.name) for p in Path("/proc/self/fd").iterdir() if p.resolve().name == "a.lock")
        os.close(fd)
        other = os.open(tmp_path / "data", os.O_CREAT | os.O_RDWR) if is_again else None
        assert other in (None, fd)
        own.callback(os.close, fd if is_again else os.dup(0))

        def writes() -> int:
            if other is not None:
                os.write(other, b"mine")
            found: list[bool] = []

            def take() -> None:
                with hold_lock(tmp_path / "b.lock", wait=0) as mine:
                    found.append(mine)

            thread = threading.Thread(target=take, daemon=True)
            thread.start()
            thread.join(20)
            return 0 if found == [True] else 3

        assert ends(forked(writes)) == 0
        assert not is_again or (tmp_path / "data").read_bytes() == b"mine"
        taken.__exit__(None, None, None)  # neither by the one who took it
        if other is not None:
            os.write(other, b", too")
            assert (tmp_path / "data").read_bytes().endswith(b", too")
