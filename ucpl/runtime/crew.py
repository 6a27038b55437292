"""A few threads that do one thing until there is no more of it, an error, or Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from attrs import define, field

__all__ = ["Queue", "run_crew"]

EVERY = 0.05  # seconds between two looks of the thread that waits


@define
class Queue:
    """Numbers from 0 to `count`, each handed out once, in order. `skip` names those that are done."""

    count: int
    skip: Callable[[int], bool] = lambda _: False
    _next: int = 0
    _lock: threading.Lock = field(factory=threading.Lock)

    def take(self) -> int | None:
        with self._lock:
            while self._next < self.count and self.skip(self._next):
                self._next += 1
            if self._next >= self.count:
                return None
            self._next += 1
            return self._next - 1


def run_crew(
    workers: int, work: Callable[[threading.Event], None], meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Run `work(stop)` in each of `workers` threads, calling `meanwhile` now and then in this one, until all have ended.

    The first error stops all, as does one of `meanwhile` or the user's (KeyboardInterrupt). It is raised once all have ended.
    """
    stop = threading.Event()
    errors: list[BaseException] = []

    def one() -> None:
        try:
            work(stop)
        except BaseException as error:
            errors.append(error)
            stop.set()

    with ThreadPoolExecutor(workers, thread_name_prefix="ucpl") as pool:
        try:
            ends = [pool.submit(one) for _ in range(workers)]
            while wait(ends, EVERY).not_done:
                if not stop.is_set():
                    meanwhile()
        except BaseException:
            stop.set()
            raise
    if errors:
        raise errors[0]
