"""Child processes of the benchmarks, whose failure shows their last lines."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["finished"]

LINES = 40


def finished(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The output of a command.

    Raises: SystemExit with its last lines, if it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = [line for told in (done.stdout, done.stderr) for line in told.splitlines()[-LINES:]]
        raise SystemExit("\n".join([f"{' '.join(command)[:300]} failed with {done.returncode}:", *last]))
    return done.stdout
