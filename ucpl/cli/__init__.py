"""The command line: one file a verb. Only here is anything printed, and an error turned into an exit status."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ucpl ARGV` (the process's own arguments, if None). Returns the exit status."""
    from ucpl.cli.run import run

    return run(argv)
