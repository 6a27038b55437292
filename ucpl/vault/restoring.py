"""The newest state that can be had: of a generation in memory, the one before it, or what was persisted on a disk.

A try that ends with its process is counted in the vault. A generation of which so many tries came to no end is suspect: the
one before it is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from attrs import evolve

from ucpl.errors import Exit, Label, UcplError, fail
from ucpl.records import frozen
from ucpl.remotes.vaults.counted import committed, job_at, no_vault
from ucpl.remotes.vaults.sealed import write_whole
from ucpl.remotes.vaults.view import generation_at
from ucpl.vault.persisting import STATE, state_text, state_told, told_in

__all__ = ["TRIES", "Restored", "keep_state", "restored", "state_of"]

TRIES = 3  # of one generation, that came to no end
GONE = ("E691", "E692", "E698")  # what cannot be rebuilt or replayed, or is there no more
_STEP = re.compile(r"step-(\d{1,18})(?:\.generation-\d{1,16})?")


@frozen
class Restored:
    """What was read."""

    source: str  # vault:ROOT/JOB@G, or a folder
    step: int
    passed: tuple[tuple[str, str], ...]  # newer sources that were passed over, and why
    silent: tuple[str, ...] = ()  # persisted folders of which nobody knows when they were saved: they come last


@frozen
class _Choice:
    source: str
    step: int
    tries: Path | None  # of a generation, where its tries are counted
    is_silent: bool = False  # nothing says when it was saved


def restored(
    home: Path, read: Callable[[str], None], *, generation: int | None = None, persisted: Path | None = None
) -> Restored:
    """Read the newest source that can be: `read` is called with one after the other until it raises no E691, E692 or E698,
    nor what says that a persisted one is damaged.

    generation: this one and no other.
    persisted:  a folder of `step-N` folders, as a server writes with --into, for what memory does not suffice for.

    Raises: UcplError E692 where there is nothing, and what `read` raises of the last source that there is, or of any else.
    """
    passed: list[tuple[str, str]] = []
    last: UcplError | None = None
    choices = _choices(home, generation, persisted)
    silent = tuple(one.source for one in choices if one.is_silent)
    for one in choices:
        count = _count(one.tries) if generation is None else 0
        if count >= TRIES:
            passed.append((one.source, f"{count} tries to read it came to no end"))
            continue
        _tell(one.tries, count + 1)
        try:
            read(one.source)
        except UcplError as error:
            is_damaged = one.tries is None and error.exit_status == Exit.SOURCE_DAMAGED  # on a disk
            if error.diagnostics[0].code not in GONE and not is_damaged:
                raise
            passed.append((one.source, error.diagnostics[0].message))
            last = error
            continue
        finally:  # however it ended, this process is there
            _forget(one.tries)
        return Restored(one.source, one.step, tuple(passed), silent)
    if last is not None:
        raise _told(last, passed)
    if passed:
        what = f"{home}: no generation is left that was not tried {TRIES} times in vain"
        remedy = f"name one: --generation {passed[0][0].rpartition('@')[2]}"
        fail("E692", what, Label(str(home), "; ".join(f"{source}: {why}" for source, why in passed)), remedy=remedy)
    beside = f", and {persisted} has no folder step-N" if persisted is not None else ""
    nothing = "nothing is committed" if job_at(home) is not None else "there is no vault"
    fail("E692", f"{home}: {nothing}{beside}", Label(str(home)))


def _told(last: UcplError, passed: Sequence[tuple[str, str]]) -> UcplError:
    """With what was passed over before."""
    notes = (f"{source} was passed over: {why}" for source, why in passed[:-1])
    first, *rest = last.diagnostics
    return UcplError(evolve(first, notes=(*first.notes, *notes)), *rest)


def _choices(home: Path, generation: int | None, persisted: Path | None) -> list[_Choice]:
    """What was saved last first, whatever step it was: a run may have gone back to an older one."""
    job = job_at(home)
    if job is None and (persisted is None or generation is not None):
        no_vault(home)
    commits = committed(home, job) if job is not None else []
    found = [
        _Choice(f"vault:{home.absolute()}@{one.generation}", one.step, home / f"tries.{one.generation}")
        for one in commits
        if generation in (None, one.generation)
    ]
    if generation is not None:
        if not found:
            fail("E692", f"{home}: generation {generation} is not committed", Label(str(home)))
        return found
    places = [(0, -one.generation, 0, 0, 0) for one in commits]
    folders = _persisted(persisted) if persisted is not None else []
    told = [told_in(path) for path, _ in folders]
    numbers = [number if type(number := one.get("generation")) is int else -1 for one in told]
    # Generations of each vault begin at one: between several they say nothing.
    of_one = len({one.get("vault") for one, number in zip(told, numbers, strict=True) if number >= 0}) == 1
    for (path, step), one, number in zip(folders, told, numbers, strict=True):
        is_ours = job is not None and one.get("vault") == job.ident and bool(commits)
        # Of another vault, or of this one before it was made anew: behind what was saved of that step or later.
        behind = [c.generation for c in commits if c.step >= step]
        of = min(behind) if behind else commits[0].generation if commits else 0
        if is_ours and 0 <= number <= commits[0].generation:
            of = number
        found.append(_Choice(str(path), step, None, number < 0))
        # One that says nothing takes no part in the order of the others.
        places.append((0, -of, 1, -number if of_one else 0, -step) if number >= 0 else (1, 0, 0, 0, -step))
    return [choice for _, choice in sorted(zip(places, found, strict=True), key=itemgetter(0))]


def _persisted(folder: Path) -> list[tuple[Path, int]]:
    """Folders of a step, as a server writes them, and which step."""
    try:
        some = [(path, told) for path in folder.iterdir() if (told := _STEP.fullmatch(path.name)) and path.is_dir()]
    except OSError:
        return []
    return [(path, int(told[1])) for path, told in some]


def state_of(source: str) -> dict[str, object]:
    """What ranks gave beside a source that `restored` reads: before it is read, since it may be gone thereafter.

    Raises: UcplError E692.
    """
    if not source.startswith("vault:"):
        return told_in(Path(source))
    home, _, number = source.removeprefix("vault:").rpartition("@")
    memory = generation_at(Path(home), int(number))
    memory.close()
    return state_told(memory)


def keep_state(told: Mapping[str, object], target: Path) -> Path | None:
    """Put that, as JSON, into the folder that was made of the source, or beside a file.

    Returns where; None: ranks gave nothing, or the target is nowhere here. Raises: UcplError E503.
    """
    if not told.get("ranks") or not target.exists():
        return None
    where = target / STATE if target.is_dir() else target.with_name(f"{target.name}.{Path(STATE).name}")
    try:
        where.parent.mkdir(exist_ok=True)
        write_whole(where, state_text(told))
    except OSError as error:
        what = f"{where} cannot be written: {error.strerror or error}"
        remedy = "the tensors are restored: `ucpl vault persist` gives the JSON, too"
        fail("E503", what, Label(str(where)), remedy=remedy)
    return where


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
