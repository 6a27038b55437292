"""The ranks of a job that torchrun started, over torch's store.

Other launchers may set the same variables. A rank that fails writes it to the store; a dead rank is detected by its
missing heartbeat: the first rank listens to all others, and they listen to it. A rank that does not start is waited
for as long as the caller asked. The store has small texts only. Not here: data.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol, TypeVar

from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.errors import catalogue as codes
from ucpl.records import frozen
from ucpl.runtime.failpoints import failpoint
from ucpl.runtime.process_group import ALONE, ProcessGroup

__all__ = ["WAIT", "StoreGroup", "Patience", "is_asked", "member"]

BEAT = 0.5  # seconds between two beats
GONE = 6.0  # seconds without a beat after which a rank counts as dead
POLL = 0.05  # seconds between two reads of the others' messages, at most
WAIT = 300  # seconds that started ranks wait for the others
SAID = 10.0  # seconds after which the missing ranks are printed
_LATE = "E626"
T = TypeVar("T")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_asked(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process is one of several ranks of a job."""
    return all(environment.get(name) for name in _NEEDED) and environment["WORLD_SIZE"] != "1"


class Store(Protocol):
    """The functions of a store of torch.distributed that are used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@frozen
class Patience:
    """Patience with ranks that have not started.

    Seconds, and a function that gets the ranks for which the first rank waits.
    """

    seconds: float = WAIT
    say: Callable[[str], None] = lambda _: None


@contextmanager
def member(patience: Patience | None = None) -> Iterator[ProcessGroup]:
    """This process's place in its job; alone without a job.

    A failure within is sent to all ranks.

    Raises: UcplError E621, E626, E627.
    """
    if not is_asked():
        _check_unset()
        yield ALONE
        return
    rank, size = _place()
    patience = patience or Patience()
    job = StoreGroup(_store(rank, size, patience.seconds), rank, size, patience)
    try:
        failpoint("joined")
        yield job
    except UcplError as error:
        first = error.diagnostics[0]
        job.failed(first.code, first.message)
        job.close(2 * BEAT)  # others look as often
        raise
    except BaseException as error:
        job.failed("", type(error).__name__ if isinstance(error, Exception) else "it was interrupted")
        job.close(0.0)
        raise
    else:
        job.close(GONE)


def _check_unset() -> None:
    """Refuse several processes that would each do all of the work.

    Raises: UcplError E627.
    """
    told = {name: os.environ.get(name, "") for name in _NEEDED}
    if told["RANK"] and told["WORLD_SIZE"] not in ("", "1"):
        lacking = ", ".join(name for name, text in told.items() if not text)
        what = f"RANK is {told['RANK'][:40]} of {told['WORLD_SIZE'][:40]}, and {lacking} is not set"
        fail("E627", what, Label("<environment>", where=lacking))


def _place() -> tuple[int, int]:
    """(rank, size), as the environment says. Raises: UcplError E627."""
    told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    for name, text in told.items():
        if not (text.isascii() and text.isdigit() and len(text) < 7):
            fail("E627", f"{name} is {text[:40]!r}, which is no number", Label("<environment>", where=name))
    rank, size, port = map(int, told.values())
    if rank >= size:
        what = f"RANK is {rank}, and WORLD_SIZE {size}: ranks are numbered from 0"
        fail("E627", what, Label("<environment>", where="RANK, WORLD_SIZE"))
    if port >= 1 << 16:
        fail("E627", f"MASTER_PORT is {port}: ports end at 65535", Label("<environment>", where="MASTER_PORT"))
    return rank, size


def _store(rank: int, size: int, seconds: float) -> Store:
    """torch's own store of this job, one per start by torchrun.

    torchrun hosts it; else the first rank does. Raises: UcplError E626.
    """
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, size, hosts, timedelta(seconds=seconds), wait_for_workers=False)
    except (RuntimeError, ValueError, OSError) as error:
        who = "rank 0 cannot listen" if hosts else f"rank 0 of {size} was not reached within {_time(seconds)}"
        label = Label("<environment>", _line(error), where="MASTER_ADDR, MASTER_PORT")
        fail("E626", f"{who} at {host}:{port}", label)
    made: Store = PrefixStore(f"ucpl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return made


class _Line:
    """Questions to a store, in order, in a thread.

    A host that hangs answers none of them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_stuck = False
        self._asked: queue.SimpleQueue[Callable[[Store], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._answer, name="ucpl-store", daemon=True).start()

    def _answer(self) -> None:
        while (question := self._asked.get()) is not None:
            question(self._store)

    def ask(self, question: Callable[[Store], T], seconds: float) -> T:
        """Ask in the thread.

        Raises: TimeoutError, and the errors of the store.
        """
        told: queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]] = queue.SimpleQueue()

        def answered(store: Store) -> None:
            try:
                told.put((question(store), None))
            except Exception as error:
                told.put((None, error))

        self._asked.put(answered)
        try:
            found = told.get(timeout=0 if self._is_stuck else seconds)
        except queue.Empty:
            self._is_stuck = True  # the next question does not wait as long
            raise TimeoutError(f"it did not answer for {seconds:g} seconds") from None
        if found[1] is not None:
            raise found[1]
        return found[0]

    def close(self) -> None:
        """No more is asked."""
        self._asked.put(None)


class StoreGroup:
    """A `ProcessGroup` over a store."""

    def __init__(self, store: Store, rank: int, size: int, patience: Patience | None = None) -> None:
        """Wait until all ranks have started. Raises: UcplError E621, E626, E627."""
        self.rank, self.size = rank, size
        self.near: Mapping[str, Sequence[int]] = {}
        self.received = 0
        self._line = _Line(store)
        self._patience = patience or Patience()
        self._begun = time.monotonic()
        self._exchanges = 0
        self._trouble: tuple[int, str, str] | None = None  # (rank, code, its message)
        self._beats: dict[
            int, tuple[int, float]
        ] = {}  # of those that are listened to: the last count, and when it came
        self._end = threading.Event()
        self._heart = threading.Thread(target=self._live, name="ucpl-heart", daemon=True)
        self._heart.start()
        try:
            if self._ask(lambda store: store.add(f"start/{rank}", 1)) > 1:
                what = f"two processes of the job are rank {rank} of {size}"
                fail("E627", what, Label("<environment>", where="RANK"))
            self._beat()  # before it reports its start: a rank without beats counts as dead after that
            failpoint("started")
            self.all("here")
        except UcplError as error:
            self.failed(error.diagnostics[0].code, error.diagnostics[0].message)
            self.close(2 * BEAT)
            raise

    def all(self, mine: object) -> list[object]:
        """The text of each rank, by rank.

        Raises: UcplError E621.
        """
        n, self._exchanges = self._exchanges, self._exchanges + 1
        mine_said = json.dumps(mine)
        self._ask(lambda store: store.set(f"{n}/{self.rank}", mine_said))
        keys = [f"{n}/{rank}" for rank in range(self.size)]
        wait = 0.001
        while not self._ask(lambda store: store.check(keys)):
            self.look()
            time.sleep(wait)
            wait = min(2 * wait, POLL)
        return [json.loads(told) for told in self._ask(lambda store: [store.get(key) for key in keys])]

    def look(self) -> None:
        """Check the other ranks.

        Raises: UcplError E621, if another rank failed or is dead; E626 if one did not start.
        """
        if self._trouble is None:
            return
        rank, code, said = self._trouble
        if code == _LATE:
            fail("E626", said, Label("<environment>", where="WORLD_SIZE"))
        raise UcplError(
            Diagnostic(
                "E621",
                f"rank {rank} of {self.size} {said}",
                (Label(f"rank {rank}", f"it ended with {code}" if code else ""),),
                remedy=codes()["E621"].remedy,
                about=rank,
            )
        )

    def failed(self, code: str, said: str) -> None:
        """Report to all others that this rank ends, and the reason.

        If it ends because another one failed, that is known already.
        """
        if code in ("E621", _LATE):
            return
        with suppress(Exception):  # the store may have failed
            self._report_failure(self.rank, code, f"failed: {said}")

    def _report_failure(self, rank: int, code: str, said: str) -> None:
        """Record the first trouble of a job, which all ranks get."""
        text = json.dumps([rank, code, said])
        self._ask(lambda store: store.compare_set("failed", "", text))

    def close(self, patience: float) -> None:
        """Wait for the others, if this rank hosts the store.

        They have yet to read the last messages.
        """
        self._end.set()
        self._heart.join()
        with suppress(Exception):
            self._ask(lambda store: store.set(f"bye/{self.rank}", ""))
            all_byes = [f"bye/{r}" for r in range(self.size)]
            patience = patience if self._trouble is None else min(patience, 2 * BEAT)  # one of them says no more
            last = time.monotonic() + (patience if self.rank == 0 else 0.0)
            while time.monotonic() < last and not self._ask(lambda store: store.check(all_byes)):
                time.sleep(POLL)
        self._line.close()

    # ---- the heart -------------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        others = range(1, self.size) if self.rank == 0 else range(1)
        self._beats = dict.fromkeys(others, (0, self._begun))
        said = False
        while not self._end.wait(BEAT):
            try:
                self._beat()
                if self._ask(lambda store: store.check(["failed"])):
                    rank, code, what = json.loads(self._ask(lambda store: store.get("failed")))
                    here = "hung: the others took it for dead, and ended"
                    self._trouble = rank, code, what if rank != self.rank else here
                    return
                self._listen(others)
                if self.rank == 0 and not said and time.monotonic() - self._begun > SAID:
                    said = True
                    if late := self._not_started():
                        most = f"at most {_time(self._patience.seconds)}"
                        self._patience.say(f"waiting for {_ranks(late)} of {self.size} to start, {most} (--wait)")
            except UcplError:
                return
            if self._trouble is not None:
                return

    def _beat(self) -> None:
        self._ask(lambda store: store.add(f"beat/{self.rank}", 1))

    def _not_started(self) -> list[int]:
        """Ranks that have not started."""
        return [rank for rank, (count, _) in self._beats.items() if count == 0]

    def _beats_of(self, rank: int) -> int | None:
        """The heartbeat count of a rank; None after its end."""
        is_done = self._ask(lambda store: store.check([f"bye/{rank}"]))
        return None if is_done else self._ask(lambda store: store.add(f"beat/{rank}", 0))

    def _listen(self, others: range) -> None:
        for rank in others:
            count, then = self._beats[rank]
            found, now = self._beats_of(rank), time.monotonic()
            if found is None:
                continue
            if found != count:
                self._beats[rank] = found, now
            elif count == 0:
                if now - self._begun > self._patience.seconds:
                    late = _ranks(self._not_started())
                    what = f"{late} of {self.size} did not start within {_time(self._patience.seconds)}"
                    self._trouble = rank, _LATE, what
                    self._report_failure(rank, _LATE, what)
                    return
            elif now - then > GONE:
                text = f"is gone: it was not heard for {now - then:.0f} seconds"
                self._trouble = rank, "", text
                self._report_failure(rank, "", text)

    def _ask(self, question: Callable[[Store], T]) -> T:
        """One question to the store. Raises: UcplError E621, if it is dead."""
        try:
            return self._line.ask(question, GONE)
        except Exception as error:
            self._trouble = self._trouble or (0, "", f"is gone, or the host of the job's store: {_line(error)}")
        self._gone()

    def _gone(self) -> NoReturn:
        self.look()
        raise AssertionError  # look raises the noted error


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _ranks(some: Sequence[int]) -> str:
    """`rank 3`, `ranks 1 and 2`, `ranks 1, 2, 3 and 61 more`."""
    texts = [str(rank) for rank in some[:8]]
    texts += [f"{len(some) - 8} more"] if len(some) > 8 else []
    return f"rank {texts[0]}" if len(texts) == 1 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def _time(seconds: float) -> str:
    return f"{seconds:g} second{'s' * (seconds != 1)}"
