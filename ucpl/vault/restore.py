"""The newest state that can be read from memory or disk.

The order is: a generation in memory, the one before it, a persisted one. An attempt that ends with its process is
counted in the vault. A generation with too many unfinished attempts is suspect, and the previous one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from attrs import evolve

from ucpl.errors import Exit, Label, UcplError, fail
from ucpl.owned import is_owned, stranger
from ucpl.records import frozen
from ucpl.storage.vaults.checksummed_text import write_whole
from ucpl.storage.vaults.committed import domains_of, get_commits, get_unreadable_newer, read_job, reject_no_vault
from ucpl.storage.vaults.domains import LocalDomain
from ucpl.storage.vaults.records import Commit
from ucpl.storage.vaults.snapshot_folder import open_generation
from ucpl.vault.persisted import STATE, Persisted, persisted_in, ranks_json, ranks_json_text, read_ranks_json

__all__ = ["TRIES", "Restored", "write_ranks_json", "restore_newest", "read_state"]

TRIES = 3  # of one generation, that came to no end
GONE = ("E691", "E692", "E698")  # cannot be rebuilt, cannot be replayed, or was removed


@frozen
class Restored:
    """The result of a restore."""

    source: str  # vault:ROOT/JOB@G, or a folder
    step: int
    passed: tuple[tuple[str, str], ...]  # newer sources that were passed over, and why
    silent: tuple[str, ...] = ()  # persisted folders without a time; they are tried last
    damage: str = ""  # of the JSON of the ranks; the tensors are intact


@frozen
class _Choice:
    source: str
    step: int
    tries: Path | None  # the file that counts attempts, for a generation
    is_silent: bool = False  # nothing says when it was saved
    damage: str = ""  # of the JSON of the ranks


def restore_newest(
    home: Path, read: Callable[[str], None], *, generation: int | None = None, persisted: Path | None = None
) -> Restored:
    """Read the newest source that can be read.

    `read` is called with one source after the other, until it raises neither E691, E692, E698 nor the damage of a
    persisted one.

    generation: only this one.
    persisted: a folder of `step-N` folders, as a server writes with --into; used if memory does not suffice.

    Raises: UcplError E692, if there is no source, and the errors of `read` for the last source; all its other errors.
    """
    unknown = _unreadable_newer(home) if generation is None else []
    strangers: list[tuple[str, str]] = []
    last: UcplError | None = None
    choices: list[_Choice] = []
    for one in _choices(home, generation, persisted):
        if one.tries is None and (who := stranger(Path(one.source))):
            strangers.append((one.source, who))
        else:
            choices.append(one)
    passed = [*unknown, *strangers]
    first = len(passed)
    silent = tuple(one.source for one in choices if one.is_silent)
    for one in choices:
        count = _count(one.tries) if generation is None else 0
        if count >= TRIES:
            passed.append((one.source, f"{count} attempts to read it did not end"))
            continue
        _write_count(one.tries, count + 1)
        try:
            read(one.source)
        except UcplError as error:
            is_damaged = one.tries is None and error.exit_status == Exit.SOURCE_DAMAGED  # on a disk
            if error.diagnostics[0].code not in GONE and not is_damaged:
                raise
            passed.append((one.source, error.diagnostics[0].message))
            last = error
            continue
        finally:  # the attempt ended, with or without an error
            _forget(one.tries)
        return Restored(one.source, one.step, tuple(passed), silent, one.damage)
    if last is not None:
        raise _with_skipped(last, passed)
    if len(passed) > first:
        what = f"{home}: {TRIES} attempts to read each generation did not end"
        remedy = f"name one: --generation {passed[first][0].rpartition('@')[2]}"
        fail("E692", what, Label(str(home), "; ".join(f"{source}: {why}" for source, why in passed)), remedy=remedy)
    beside = (
        f", and {persisted} has no folder step-N{' of yours' if strangers else ''}" if persisted is not None else ""
    )
    if unknown:
        remedy = "`ucpl vault scrub ROOT/JOB` or a restart of the servers may commit it again"
        fail(
            "E692",
            f"{home}: the commit records are damaged{beside}",
            Label(str(home), unknown[0][1]),
            remedy=remedy,
        )
    nothing = "nothing is committed" if read_job(home) is not None else "there is no vault"
    fail(
        "E692",
        f"{home}: {nothing}{beside}",
        Label(str(home), "; ".join(f"{source}: {why}" for source, why in strangers)),
    )


def _unreadable_newer(home: Path) -> list[tuple[str, str]]:
    """Generations that may be newer than all sources, with the reason.

    These cannot be read.
    """
    return [(f"vault:{home.absolute()}@{number}", why) for number, why in get_unreadable_newer(home).items()]


def _with_skipped(last: UcplError, passed: Sequence[tuple[str, str]]) -> UcplError:
    """The last error, with the sources that were skipped before."""
    notes = (f"{source} was skipped: {why}" for source, why in passed[:-1])
    first, *rest = last.diagnostics
    return UcplError(evolve(first, notes=(*first.notes, *notes)), *rest)


def _choices(home: Path, generation: int | None, persisted: Path | None) -> list[_Choice]:
    """The sources, latest save first.

    The step is no order: a run may have returned to an older step.
    """
    job = read_job(home)
    if job is None and (persisted is None or generation is not None):
        reject_no_vault(home)
    commits = get_commits(home, job) if job is not None else []
    found = [
        _Choice(f"vault:{home.absolute()}@{one.generation}", one.step, home / f"tries.{one.generation}")
        for one in commits
        if generation in (None, one.generation)
    ]
    if generation is not None:
        if not found:
            fail("E692", f"{home}: generation {generation} is not committed", Label(str(home)))
        return found
    times = _times(home, commits)
    ours = {one.generation: at for one, at in zip(commits, times, strict=True)}
    places = [(0, -at, 0, -one.generation, 0) for one, at in zip(commits, times, strict=True)]
    folders = persisted_in(persisted) if persisted is not None else []
    for folder in folders:
        at = folder.at
        if not at and job is not None and folder.vault == job.ident:
            at = ours.get(folder.generation, 0)
        if folder.generation < 0:  # it takes no part in the order of the others
            place = (2, 0, 1, 0, -folder.step)
        elif at:
            place = (0, -at, 1, -folder.generation, -folder.step)
        else:
            place = (1, -_latest_time(folder, folders), 1, -folder.generation, -folder.step)
        found.append(_Choice(str(folder.path), folder.step, None, folder.generation < 0, folder.damage))
        places.append(place)
    return [choice for _, choice in sorted(zip(places, found, strict=True), key=itemgetter(0))]


def _times(home: Path, commits: Sequence[Commit]) -> list[int]:
    """The commit time of each generation, newest first.

    Records of older versions have no time; for them it is the time of the file.
    """
    times: list[int] = []
    for one in commits:
        at, written = one.at, list[int]()
        for number in domains_of(home) if not at else ():
            with suppress(OSError):
                written.append(LocalDomain(home, number).commit(one.generation).stat().st_mtime_ns // 1_000_000)
        at = at or min(written, default=0)
        times.append(min([at, *times[-1:]]))  # a repaired text is younger than its content
    return times


def _latest_time(one: Persisted, some: Sequence[Persisted]) -> int:
    """The latest possible time of a persisted generation without a time.

    It is earlier than the later commits of its vault.
    """
    return min(other.written for other in some if other.vault == one.vault and other.generation >= one.generation)


def read_state(source: str) -> dict[str, object]:
    """The JSON of the ranks for a source that `restore_newest` reads.

    Call it before the read: later the source may be gone. Raises: UcplError E692.
    """
    if not source.startswith("vault:"):
        return read_ranks_json(Path(source))
    home, _, number = source.removeprefix("vault:").rpartition("@")
    memory = open_generation(Path(home), int(number))
    memory.close()
    return ranks_json(memory.commit, memory.job)


def write_ranks_json(record: Mapping[str, object], target: Path) -> Path | None:
    """Write the JSON of the ranks into the target folder.

    If the target is a file, the JSON is written next to it.

    Returns its path. None: there is no JSON, or the target is not on this machine. Raises: UcplError E503.
    """
    if not record.get("ranks") or not target.exists():
        return None
    where = target / STATE if target.is_dir() else target.with_name(f"{target.name}.{Path(STATE).name}")
    try:
        where.parent.mkdir(exist_ok=True)
        write_whole(where, ranks_json_text(record))
    except OSError as error:
        what = f"{where} cannot be written: {error.strerror or error}"
        remedy = "the tensors are restored: `ucpl vault persist` also writes the JSON"
        fail("E503", what, Label(str(where)), remedy=remedy)
    return where


def _count(tries: Path | None) -> int:
    if tries is None or not is_owned(tries.parent):  # another user may have put a link or a pipe there
        return 0
    with suppress(OSError, ValueError):
        return int(tries.read_text()[:6])
    return 0


def _write_count(tries: Path | None, count: int) -> None:
    """Count an attempt; if the memory cannot be written, count nothing.

    The restore continues in any case.
    """
    if tries is not None and is_owned(tries.parent):
        with suppress(OSError):
            write_whole(tries, str(count).encode())


def _forget(tries: Path | None) -> None:
    if tries is not None and is_owned(tries.parent):
        with suppress(OSError):
            tries.unlink(missing_ok=True)
