"""A generation as a checkpoint of its framework on a disk."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ucpl.errors import Label, UcplError, fail
from ucpl.runtime.disk import disk, make_folders, sync_folder, sync_folders, write_all
from ucpl.runtime.failpoints import failpoint
from ucpl.storage.cache_dirs import scoped
from ucpl.storage.vaults.memory import Memory
from ucpl.storage.vaults.records import CHUNK
from ucpl.storage.vaults.snapshot_folder import lay_out, open_generation
from ucpl.vault.path_conflicts import why_not_made
from ucpl.vault.persisted import SAVED, STATE, ranks_json, ranks_json_text, saved_record
from ucpl.vault.stale_dirs import open_work_dir, remove_stale, work_dir, work_dirs_of

__all__ = ["persist"]

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
