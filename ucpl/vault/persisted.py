"""A persisted generation, and the records in its folder `ucpl`.

state.json   the generation, the time of its commit, and the JSON of the ranks, readable by everyone
saved.json   the generation once more, checksummed, with the digest of state.json. A damaged state.json is detected by it, and
             the generation keeps its place in the order
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ucpl.errors import Label, UcplError, fail
from ucpl.records import frozen
from ucpl.runtime.disk import disk, make_folders, sync_folder, sync_folders, write_all
from ucpl.runtime.failpoints import failpoint
from ucpl.storage.cache_dirs import scoped
from ucpl.storage.vaults.checksummed_text import JsonObject, seal, unseal
from ucpl.storage.vaults.memory import Memory
from ucpl.storage.vaults.records import CHUNK, Commit, Job, text_digest
from ucpl.storage.vaults.snapshot_folder import lay_out, open_generation
from ucpl.vault.path_conflicts import open_work_dir, remove_stale, why_not_made, work_dir, work_dirs_of

__all__ = [
    "Persisted", "SAVED", "STATE", "found_in", "is_of", "persisted_in", "ranks_json", "ranks_json_text",
    "read_ranks_json", "saved_record", "persist",
]  # fmt: skip

STATE = "ucpl/state.json"  # the generation, and the JSON that each rank saved with its tensors
SAVED = "ucpl/saved.json"  # older versions wrote none
_MAX = 1 << 30
_STEP = re.compile(r"step-(\d{1,18})(?:\.generation-\d{1,16}(?:\.\d{1,9})?)?")


@frozen
class Persisted:
    """The folder of a step, and its own description."""

    path: Path
    step: int  # as its name says
    vault: str = ""
    generation: int = -1  # unknown
    at: int = 0  # milliseconds since 1970, when it was committed; 0: older versions did not say
    written: int = 0  # the time of its text
    damage: str = ""  # the damage of the ranks' JSON


def ranks_json(commit: Commit, job: Job) -> JsonObject:
    """The generation, and the JSON that each rank saved with its tensors."""
    ranks = {str(shard.rank): shard.state for shard in commit.shards if shard.state}
    record: JsonObject = {"step": commit.step, "generation": commit.generation, "vault": job.ident, "ranks": ranks}
    return {**record, "committed_ms": commit.at} if commit.at else record


def ranks_json_text(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, sort_keys=True, indent=1).encode()


def saved_record(record: Mapping[str, object], text: bytes) -> bytes:
    """The text of saved.json, for a text of state.json."""
    return seal({**{name: one for name, one in record.items() if name != "ranks"}, "state": text_digest(text)})


def read_ranks_json(folder: Path) -> JsonObject:
    """The JSON of the ranks in a persisted generation.

    Empty if it is none or damaged.
    """
    return _generation_in(folder)[1]


def _generation_in(folder: Path) -> tuple[JsonObject, JsonObject, str]:
    """The generation, its complete description, and the damage of that."""
    text, sealed = _bytes(folder / STATE), _bytes(folder / SAVED)
    which = unseal(sealed) if sealed is not None else None
    if which is not None:
        if text is not None and text_digest(text) == which.get("state"):
            return which, _object(text), ""
        why = "is missing or unreadable" if text is None else "is damaged"
        return which, {}, f"{folder / STATE} {why}: the JSON of the ranks is lost"
    record = _object(text) if text is not None else {}
    if text is not None and not record:
        return {}, {}, f"{folder / STATE} is damaged: the JSON of the ranks is lost"
    if record and sealed is not None:
        return record, record, f"{folder / SAVED} is damaged: damage of the JSON of the ranks cannot be detected"
    return record, record, ""


def _bytes(path: Path) -> bytes | None:
    with suppress(OSError), open(path, "rb", opener=_without_waiting) as file:
        return file.read(_MAX) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO waits for its writer


def _object(text: bytes) -> JsonObject:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def persisted_in(folder: Path) -> list[Persisted]:
    """Folders of a step, as a server writes them."""
    try:
        some = [(path, record) for path in folder.iterdir() if (record := _STEP.fullmatch(path.name)) and path.is_dir()]
    except OSError:
        return []
    return [found_in(path, int(record[1])) for path, record in some]


def found_in(path: Path, step: int) -> Persisted:
    which, _, damage = _generation_in(path)
    vault, generation, at = which.get("vault"), which.get("generation"), which.get("committed_ms")
    if not isinstance(vault, str) or type(generation) is not int or generation < 0:
        return Persisted(path, step, damage=damage)
    written = 0
    with suppress(OSError):
        written = (path / STATE).stat().st_mtime_ns // 1_000_000
    return Persisted(path, step, vault, generation, at if type(at) is int and at > 0 else 0, written, damage)


def is_of(one: Persisted, commit: Commit, job: Job) -> bool:
    """True if it is this generation.

    Vaults of several hosts reuse an ident; the time distinguishes them.
    """
    same = (one.vault, one.generation) == (job.ident, commit.generation)
    return same and (not one.at or not commit.at or one.at == commit.at)


ANOTHER = "choose another DST: an existing one is not overwritten"
AGAIN = "remove the cause (space, permission, a blocking file), or choose another DST; this one does not exist"


@scoped()
def persist(home: Path, target: Path, generation: int | None = None) -> Memory:
    """Write a generation into a new folder, complete or not at all.

    Raises: UcplError E500, E503, E691, E692.
    """
    memory = open_generation(home, generation)
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        fail("E500", f"{target} exists", Label(str(target)), remedy=ANOTHER)
    work = work_dir(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent, work_dirs_of(target))  # of processes that were killed
        disk().make_folder(work, fresh=True)
        with open_work_dir(work):
            _write(memory, home, work)
            sync_folders(work)
            disk().rename_new(work, target)
            sync_folder(target.parent)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, FileExistsError) and os.path.lexists(target):
            what = f"{target} exists: it was made while this one was written"
            fail("E500", what, Label(str(target)), remedy=ANOTHER)
        why = why_not_made(target.parent, error)
        fail("E503", f"{target} cannot be written: {why}", Label(str(target)), remedy=AGAIN)
    except UcplError:
        with suppress(OSError):
            shutil.rmtree(work)
        raise
    finally:
        memory.close()
    return memory


def _write(memory: Memory, home: Path, work: Path) -> None:
    """Raises: OSError, UcplError E691, E698."""
    view = lay_out(memory, f"vault:{home}@{memory.commit.generation}")
    for name, stored in view.files.items():
        path = work / name
        make_folders(work, path.parent)
        fd = disk().open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            disk().allocate(fd, stored.size)
            for low in range(0, stored.size, CHUNK):
                room = bytearray(min(CHUNK, stored.size - low))
                stored.fill(memoryview(room), low)
                write_all(fd, memoryview(room), low)
            failpoint("vault-persist")
            disk().sync(fd)
        finally:
            disk().close(fd)
    for name, stored in view.files.items():  # somebody may have taken it for work that was left
        if (work / name).stat().st_size != stored.size:
            raise OSError(errno.EIO, f"{name} was changed by another while it was written")
    make_folders(work, (work / STATE).parent)
    record = ranks_json(memory.commit, memory.job)
    text = ranks_json_text(record)
    for name, data in ((STATE, text), (SAVED, saved_record(record, text))):
        fd = disk().open(work / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(fd, memoryview(data), 0)
            disk().sync(fd)
        finally:
            disk().close(fd)
