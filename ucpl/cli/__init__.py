"""The command line: one file per verb.

Only this package prints, and turns an error into an exit status.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["command", "main"]

_INTERRUPTED = 130  # as errors.Exit has it, which may not be imported yet


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ucpl ARGV` (the process's own arguments, if None). Returns the exit status."""
    try:
        from ucpl.cli.run import run

        return run(argv)
    except KeyboardInterrupt:  # while modules are imported
        if argv is not None:
            raise
        from sys import stderr

        print("interrupted", file=stderr)
        return _INTERRUPTED


def command() -> NoReturn:
    """Run this process's arguments, and end the process.

    Python would first take down each module and value, which is a twentieth of a short command.
    """
    status = main()
    if not _ends_at_once():
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:
                sys.exit(status)
    os._exit(status)


def _ends_at_once() -> bool:
    """True if no profile, thread or device needs Python's own end."""
    threads = sys.modules.get("threading")
    is_watched = sys.getprofile() is not None or sys.gettrace() is not None
    return not is_watched and "torch" not in sys.modules and (threads is None or threads.active_count() == 1)
