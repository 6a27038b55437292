"""A generation as a checkpoint on a disk: the files that the framework would have written, which it loads by itself."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ucpl.errors import Label, UcplError, fail
from ucpl.remotes.vaults.memory import Memory
from ucpl.remotes.vaults.records import CHUNK
from ucpl.remotes.vaults.view import generation_at, lay
from ucpl.runtime.disk import disk, make_folders, sync_folder, sync_folders, write_all
from ucpl.runtime.failpoints import failpoint

__all__ = ["STATE", "persist"]

STATE = "ucpl/state.json"  # what a rank gave beside its tensors


def persist(home: Path, target: Path, generation: int | None = None) -> Memory:
    """Write a generation into a new folder, which is there whole or not at all. Raises: UcplError E500, E503, E691, E692."""
    memory = generation_at(home, generation)
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        fail("E500", f"{target} exists", Label(str(target)))
    work = target.with_name(f".{target.name}.ucpl-vault")
    try:
        shutil.rmtree(work, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        disk().make_folder(work, fresh=True)
        view = lay(memory, f"vault:{home}@{memory.commit.generation}")
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
        _write_states(memory, work)
        sync_folders(work)
        disk().rename_new(work, target)
        sync_folder(target.parent)
    except FileExistsError:
        shutil.rmtree(work, ignore_errors=True)
        fail("E500", f"{target} exists: it was made while this one was written", Label(str(target)))
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        fail("E503", f"{target} cannot be written: {error.strerror or error}", Label(str(target)))
    except UcplError:
        with suppress(OSError):
            shutil.rmtree(work)
        raise
    finally:
        memory.close()
    return memory


def _write_states(memory: Memory, work: Path) -> None:
    told = {str(shard.rank): shard.state for shard in memory.commit.shards if shard.state}
    if told:
        path = work / STATE
        make_folders(work, path.parent)
        text = json.dumps({"step": memory.commit.step, "ranks": told}, sort_keys=True, indent=1)
        fd = disk().open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(fd, memoryview(text.encode()), 0)
            disk().sync(fd)
        finally:
            disk().close(fd)
