"""Headers of many files, or of many archives of a file, that lie in a store: read several at a time, since each is waited for.

What was read is kept here (remotes), so who reads it again, one after the other, waits no more; and errors of what is
read are theirs, as of local files. Of local files nothing is read ahead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path

from ucpl.errors import UcplError
from ucpl.storage.reading import is_waited_for

__all__ = ["ahead"]

AT_ONCE = 16


def ahead(path: Path, reads: Sequence[Callable[[], object]]) -> None:
    """Do all of these at once, where `path`, which is one of the files, lies in a store.

    Raises: UcplError E685, where the store does not give what is asked for.
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
            if error.is_of_the_disk:  # every other one is said when it is read in its turn
                stop.set()
                raise

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ucpl-ahead") as pool:
        for done in [pool.submit(copy_context().run, work, read) for read in reads]:
            done.result()


def _is_elsewhere(path: Path) -> bool:
    try:
        return is_waited_for(os.stat(path))
    except OSError:  # who reads it says so
        return False
