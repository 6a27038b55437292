"""Treat SIGTERM and SIGHUP as Ctrl-C: keep finished parts, and report it.

A scheduler or a closed terminal sends them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["end_if_asked", "end_like_ctrl_c"]

_ENDS = (signal.SIGTERM, signal.SIGHUP)
_asked: list[int] = []  # signals since the outermost `end_like_ctrl_c` began


@contextmanager
def end_like_ctrl_c() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise KeyboardInterrupt.

    A handler that somebody set otherwise (nohup, a program's own) stays.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    mine = [number for number in _ENDS if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)
        if mine:
            _asked.clear()


def end_if_asked() -> None:
    """Raise KeyboardInterrupt again if a signal came in a finalizer.

    Python ignores exceptions there.
    """
    if _asked:
        raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _asked.append(number)
    raise KeyboardInterrupt
