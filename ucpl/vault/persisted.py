"""The records in the folder `ucpl` of a persisted generation.

state.json   the generation, the time of its commit, and the JSON of the ranks, readable by everyone
saved.json   the generation once more, checksummed, with the digest of state.json. A damaged state.json is detected by it, and
             the generation keeps its place in the order
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ucpl.records import frozen
from ucpl.storage.vaults.checksummed_text import JsonObject, seal, unseal
from ucpl.storage.vaults.records import Commit, Job, text_digest

__all__ = [
    "Persisted",
    "SAVED",
    "STATE",
    "found_in",
    "is_of",
    "persisted_in",
    "ranks_json",
    "ranks_json_text",
    "read_ranks_json",
    "saved_record",
]

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
