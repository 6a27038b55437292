"""Whoever ends a job, a scheduler or a closed terminal, is obeyed as Ctrl-C is: what is finished is kept, and it is said."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["end_like_ctrl_c"]

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def end_like_ctrl_c() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise KeyboardInterrupt. What somebody set otherwise (nohup, a program's own) stays."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    mine = [number for number in _ENDS if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
