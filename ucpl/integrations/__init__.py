"""Callbacks for training frameworks, in a module each that imports its framework."""

from __future__ import annotations

import warnings
from pathlib import Path

from ucpl.api import verify
from ucpl.errors import Diagnostic, UcplError

__all__ = ["SavesVerified", "fault_in", "report"]

SECONDS = 60.0  # for reading a save


class SavesVerified:
    """The parameters of a callback.

    The first rank reads a save while the others wait. seconds: for reading. stop: a damaged save ends the job on all ranks;
    otherwise each rank warns. Raises: RuntimeError.
    """

    def __init__(self, seconds: float = SECONDS, *, stop: bool = True) -> None:
        self.seconds, self.stop = seconds, stop


def fault_in(path: Path, seconds: float = SECONDS) -> str:
    """The first fault of a save, or an empty text.

    seconds: for reading its bytes. Headers and all files are looked at in any time.
    """
    try:
        verdict = verify(path, quick=seconds)
    except UcplError as error:
        return _text(path, error.diagnostics[0])
    return _text(path, verdict.findings[0]) if verdict.findings else ""


def _text(path: Path, found: Diagnostic) -> str:
    return f"{path} is damaged: {found.code}: {found.message}; `ucpl verify {path}` lists all findings"


def report(fault: str, *, stop: bool) -> None:
    """Warn about a fault, or stop the job.

    All ranks of a job call this with one text. Raises: RuntimeError.
    """
    if not fault:
        return
    if stop:
        raise RuntimeError(fault)
    warnings.warn(fault, stacklevel=2)
