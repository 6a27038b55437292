"""The newest state that can be had: of a generation in memory, the one before it, or what was persisted on a disk.

A try that ends with its process is counted in the vault. A generation of which so many tries came to no end is suspect: the
one before it is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ucpl.errors import Label, UcplError, fail
from ucpl.records import frozen
from ucpl.remotes.vaults.counted import committed, job_at

__all__ = ["TRIES", "Restored", "restored"]

TRIES = 3  # of one generation, that came to no end
GONE = ("E691", "E692", "E698")  # what cannot be rebuilt or replayed, or is there no more
_STEP = re.compile(r"step-(\d{1,18})")


@frozen
class Restored:
    """What was read."""

    source: str  # vault:ROOT/JOB@G, or a folder
    step: int
    passed: tuple[tuple[str, str], ...]  # newer sources that were passed over, and why


@frozen
class _Choice:
    source: str
    step: int
    tries: Path | None  # of a generation, where its tries are counted


def restored(
    home: Path, read: Callable[[str], None], *, generation: int | None = None, persisted: Path | None = None
) -> Restored:
    """Read the newest source that can be: `read` is called with one after the other until it raises no E691, E692 or E698.

    generation: this one and no other.
    persisted:  a folder of `step-N` folders, as a server writes with --into, for what memory does not suffice for.

    Raises: UcplError E692 where there is nothing, and what `read` raises of the last source that there is, or of any else.
    """
    passed: list[tuple[str, str]] = []
    last: UcplError | None = None
    for one in _choices(home, generation, persisted):
        count = _count(one.tries) if generation is None else 0
        if count >= TRIES:
            passed.append((one.source, f"{count} tries to read it came to no end"))
            continue
        _tell(one.tries, count + 1)
        try:
            read(one.source)
        except UcplError as error:
            if error.diagnostics[0].code not in GONE:
                raise
            passed.append((one.source, error.diagnostics[0].message))
            last = error
            continue
        finally:  # however it ended, this process is there
            _forget(one.tries)
        return Restored(one.source, one.step, tuple(passed))
    if last is not None:
        raise last
    if passed:
        what = f"{home}: no generation is left that was not tried {TRIES} times in vain"
        remedy = f"name one: --generation {passed[0][0].rpartition('@')[2]}"
        fail("E692", what, Label(str(home), "; ".join(f"{source}: {why}" for source, why in passed)), remedy=remedy)
    beside = f", and {persisted} has no folder step-N" if persisted is not None else ""
    fail("E692", f"{home}: nothing is committed{beside}", Label(str(home)))


def _choices(home: Path, generation: int | None, persisted: Path | None) -> Iterator[_Choice]:
    """Newest step first; of one step, memory first."""
    job = job_at(home)
    found = [
        _Choice(f"vault:{home.absolute()}@{one.generation}", one.step, home / f"tries.{one.generation}")
        for one in (committed(home, job) if job is not None else [])
        if generation in (None, one.generation)
    ]
    if persisted is not None and generation is None:
        with suppress(OSError):
            found += [
                _Choice(str(path), int(told[1]), None)
                for path in persisted.iterdir()
                if (told := _STEP.fullmatch(path.name)) and path.is_dir()
            ]
    if generation is not None and not found:
        fail("E692", f"{home}: generation {generation} is not committed", Label(str(home)))
    return iter(sorted(found, key=lambda one: (-one.step, one.tries is None)))


def _count(tries: Path | None) -> int:
    if tries is None:
        return 0
    with suppress(OSError, ValueError):
        return int(tries.read_text()[:6])
    return 0


def _tell(tries: Path | None, count: int) -> None:
    """Where memory is full, or another's, nothing is counted: what can be restored is restored all the same."""
    if tries is not None:
        with suppress(OSError):
            tries.write_text(str(count))


def _forget(tries: Path | None) -> None:
    if tries is not None:
        with suppress(OSError):
            tries.unlink(missing_ok=True)
