"""A few threads that do one thing until there is no more of it, an error, or Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable

from attrs import define, field

__all__ = ["Crew", "Queue"]


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


class Crew:
    """Runs `work(stop)` in each of `workers` threads. The first error stops all, and is raised where they are awaited."""

    def __init__(self, workers: int, work: Callable[[threading.Event], None]) -> None:
        self.stop = threading.Event()
        self._errors: list[BaseException] = []
        self._left = workers
        self._ended = threading.Condition()
        self._work = work
        self._threads = [threading.Thread(target=self._run, name=f"ucpl-{i}", daemon=True) for i in range(workers)]

    def _run(self) -> None:
        try:
            self._work(self.stop)
        except BaseException as error:
            self._errors.append(error)
            self.stop.set()
        finally:
            with self._ended:
                self._left -= 1
                self._ended.notify_all()

    def run(self, meanwhile: Callable[[], None] | None = None, every: float = 0.05) -> None:
        """Start all and wait for all, calling `meanwhile` now and then in this thread.

        Raises: the first error of a worker, or what `meanwhile` or the user (KeyboardInterrupt) raised, once all have ended.
        """
        started: list[threading.Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
            while True:
                with self._ended:
                    if self._left == 0 or self._ended.wait_for(lambda: self._left == 0, every):
                        break
                if meanwhile is not None and not self.stop.is_set():
                    meanwhile()
        except BaseException:
            self.stop.set()
            raise
        finally:
            for thread in started:
                thread.join()
        if self._errors:
            raise self._errors[0]
