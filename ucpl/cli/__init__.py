"""The command line: one file per verb.

Only this package prints, and turns an error into an exit status.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]

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
