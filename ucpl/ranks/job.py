"""The ranks of a job that torchrun (or whoever sets the same variables) has started, over the store that torch gives them.

A rank that fails says so; one that is gone is missed: each lets its heart beat in the store, the first rank listens to all
others, and they listen to it. Nothing but small texts goes this way. Not here: what is moved.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol, TypeVar

from ucpl.errors import Diagnostic, Label, UcplError
from ucpl.errors import catalogue as codes
from ucpl.runtime.team import ALONE, Team

__all__ = ["Job", "is_asked", "member"]

BEAT = 0.5  # seconds between two beats
GONE = 6.0  # seconds without a beat after which a rank counts as gone
POLL = 0.05  # seconds between two looks for what others say, at most
T = TypeVar("T")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_asked(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several that were started as ranks of a job."""
    return all(environment.get(name) for name in _NEEDED) and environment["WORLD_SIZE"] != "1"


class Store(Protocol):
    """What is asked of a store of torch.distributed."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@contextmanager
def member() -> Iterator[Team]:
    """This process's place in its job; alone, where there is no job. A failure within is told to all."""
    if not is_asked():
        yield ALONE
        return
    job = Job(_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    try:
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


def _store() -> Store:
    """torch's own store of this job, apart for each time that torchrun starts its processes anew."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://")))
    made: Store = PrefixStore(f"ucpl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return made


class Job:
    """A `Team` over a store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.near: Mapping[str, Sequence[int]] = {}
        self.received = 0
        self._store = store
        self._lock = threading.Lock()
        self._said = 0
        self._trouble: tuple[int, str, str] | None = None  # (rank, code, what it said)
        self._beats: dict[
            int, tuple[int, float]
        ] = {}  # of those that are listened to: the last count, and when it came
        self._end = threading.Event()
        self.all("here")  # however late the last one starts: from here on, all are to be heard
        self._heart = threading.Thread(target=self._live, name="ucpl-heart", daemon=True)
        self._heart.start()

    def all(self, mine: object) -> list[object]:
        """What each rank says, by rank. Raises: UcplError E621."""
        n, self._said = self._said, self._said + 1
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
        """Raises: UcplError E621, once another rank failed or is gone."""
        if self._trouble is None:
            return
        rank, code, said = self._trouble
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
        """Tell all others that this rank ends, and why; where it ends since another one failed, that was told already."""
        if code == "E621":
            return
        with suppress(Exception):  # the store may be what failed
            self._tell(self.rank, code, f"failed: {said}")

    def _tell(self, rank: int, code: str, said: str) -> None:
        """The first trouble of a job is what all are told."""
        text = json.dumps([rank, code, said])
        self._ask(lambda store: store.compare_set("failed", "", text))

    def close(self, patience: float) -> None:
        """Who may host the store waits so many seconds for the others: they have yet to read what was said last."""
        self._end.set()
        self._heart.join()
        with suppress(Exception):
            self._ask(lambda store: store.set(f"bye/{self.rank}", ""))
            all_byes = [f"bye/{r}" for r in range(self.size)]
            last = time.monotonic() + (patience if self.rank == 0 else 0.0)
            while time.monotonic() < last and not self._ask(lambda store: store.check(all_byes)):
                time.sleep(POLL)

    # ---- the heart -------------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        others = range(1, self.size) if self.rank == 0 else range(1)
        now = time.monotonic()
        self._beats = dict.fromkeys(others, (-1, now))
        while not self._end.wait(BEAT):
            try:
                self._ask(lambda store: store.add(f"beat/{self.rank}", 1))
                if self._ask(lambda store: store.check(["failed"])):
                    rank, code, said = json.loads(self._ask(lambda store: store.get("failed")))
                    if rank != self.rank:
                        self._trouble = rank, code, said
                    return
                self._listen(others)
            except UcplError:
                return
            if self._trouble is not None:
                return

    def _heard(self, rank: int) -> int | None:
        """How often a rank's heart beat; None, where it is done, and beats no more."""
        is_done = self._ask(lambda store: store.check([f"bye/{rank}"]))
        return None if is_done else self._ask(lambda store: store.add(f"beat/{rank}", 0))

    def _listen(self, others: range) -> None:
        for rank in others:
            count, then = self._beats[rank]
            found, now = self._heard(rank), time.monotonic()
            if found is None:
                continue
            if found != count:
                self._beats[rank] = found, now
            elif now - then > GONE:
                said = f"is gone: it was not heard for {now - then:.0f} seconds"
                self._trouble = rank, "", said
                self._tell(rank, "", said)

    def _ask(self, question: Callable[[Store], T]) -> T:
        """One question to the store. Raises: UcplError E621 where it is gone."""
        with self._lock:
            try:
                return question(self._store)
            except Exception as error:
                self._trouble = self._trouble or (0, "", f"is gone, or whoever holds the job's store: {_line(error)}")
        self._gone()

    def _gone(self) -> NoReturn:
        self.look()
        raise AssertionError  # look raises what was noted


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
