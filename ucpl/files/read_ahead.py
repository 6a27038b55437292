"""Headers in an object store, read several at a time.

Each read of a store waits. Data that was read is kept (remotes), so that a second read does not wait; errors of later
reads are raised there, as with local files. Local files are not read ahead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path

from ucpl.errors import UcplError
from ucpl.storage.reading import has_latency

__all__ = ["ahead"]

AT_ONCE = 16


def ahead(path: Path, reads: Sequence[Callable[[], object]]) -> None:
    """Do all of these reads at once, in an object store.

    `path` is one of the files. Raises: UcplError E685 if the store does not deliver the data.
    """
    if len(reads) < 2 or not _is_elsewhere(path):
        return
    from concurrent.futures import ThreadPoolExecutor  # most checkpoints are local files

    stop = threading.Event()

    def work(read: Callable[[], object]) -> None:
        if stop.is_set():
            return
        try:
            read()
        except UcplError as error:
            if error.is_of_the_disk:  # every other error is raised when the file is read in turn
                stop.set()
                raise

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ucpl-ahead") as pool:
        for done in [pool.submit(copy_context().run, work, read) for read in reads]:
            done.result()


def _is_elsewhere(path: Path) -> bool:
    try:
        return has_latency(os.stat(path))
    except OSError:  # who reads it says so
        return False
