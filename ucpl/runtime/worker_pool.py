"""Worker threads that run until no work is left, or an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from attrs import field

from ucpl.records import define

__all__ = ["EVERY", "Queue", "Work", "run_workers", "run_through"]

Work = Callable[[threading.Event], None]  # until the event is set, or nothing is left
EVERY = 0.05  # seconds between two looks of the thread that waits


@define
class Queue:
    """Numbers from 0 to `count`, each handed out once, in order.

    `skip` names those that are done.
    """

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


def run_through(queue: Queue, work: Work, workers: int, meanwhile: Callable[[], None] | None = None) -> None:
    """Run `work` in threads until a queue is empty.

    There are at most as many threads as items. A single one is this thread: a small checkpoint is read in less time
    than a few threads take to start. meanwhile: as in `run_workers`.
    """
    count = min(workers, queue.count)
    if count > 1 or meanwhile is not None:
        run_workers([work] * max(1, count), meanwhile or (lambda: None))
    else:
        work(threading.Event())


def run_workers(works: Sequence[Work], meanwhile: Callable[[], None], look: threading.Event | None = None) -> None:
    """Run each work in its own thread; call `meanwhile` in this one.

    It returns when all have ended. look: when it is set, `meanwhile` is called at once. The first error stops all; so
    does an error of `meanwhile` or an interrupt by the user (KeyboardInterrupt). It is raised once all have ended.
    """
    stop, wake = threading.Event(), look or threading.Event()
    errors: list[BaseException] = []

    def one(work: Work) -> None:
        try:
            work(stop)
        except BaseException as error:
            errors.append(error)
            stop.set()

    with ThreadPoolExecutor(len(works), thread_name_prefix="ucpl") as pool:
        try:
            ends = [pool.submit(one, work) for work in works]
            for end in ends:
                end.add_done_callback(lambda _: wake.set())
            while not all(end.done() for end in ends):
                wake.wait(EVERY)
                wake.clear()
                if not stop.is_set():
                    meanwhile()
        except BaseException:
            stop.set()
            raise
    if errors:
        raise errors[0]
