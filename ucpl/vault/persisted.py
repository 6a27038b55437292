"""What stands beside a persisted generation: which one it is, when it was committed, and what ranks gave as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ucpl.records import frozen
from ucpl.remotes.vaults.records import Commit, Job

__all__ = ["STATE", "Persisted", "found_in", "is_of", "persisted_in", "state_text", "state_told", "told_in"]

STATE = "ucpl/state.json"  # which generation it is, and what each rank gave beside its tensors
STATE_MAX = 1 << 30
_STEP = re.compile(r"step-(\d{1,18})(?:\.generation-\d{1,16}(?:\.\d{1,9})?)?")


@frozen
class Persisted:
    """A folder of a step, and what it says of itself."""

    path: Path
    step: int  # as its name says
    vault: str = ""
    generation: int = -1  # nobody knows
    at: int = 0  # milliseconds since 1970, when it was committed; 0: older versions did not say
    written: int = 0  # the same of its text


def state_told(commit: Commit, job: Job) -> dict[str, object]:
    """Which generation it is, and what each rank gave beside its tensors."""
    ranks = {str(shard.rank): shard.state for shard in commit.shards if shard.state}
    told: dict[str, object] = {"step": commit.step, "generation": commit.generation, "vault": job.ident, "ranks": ranks}
    return {**told, "committed_ms": commit.at} if commit.at else told


def state_text(told: Mapping[str, object]) -> bytes:
    return json.dumps(told, sort_keys=True, indent=1).encode()


def told_in(folder: Path) -> dict[str, object]:
    """What stands beside a persisted generation; empty where it is none, or damaged."""
    try:
        with open(folder / STATE, "rb") as file:
            told = json.loads(file.read(STATE_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def persisted_in(folder: Path) -> list[Persisted]:
    """Folders of a step, as a server writes them."""
    try:
        some = [(path, told) for path in folder.iterdir() if (told := _STEP.fullmatch(path.name)) and path.is_dir()]
    except OSError:
        return []
    return [found_in(path, int(told[1])) for path, told in some]


def found_in(path: Path, step: int) -> Persisted:
    told = told_in(path)
    vault, generation, at = told.get("vault"), told.get("generation"), told.get("committed_ms")
    if not isinstance(vault, str) or type(generation) is not int or generation < 0:
        return Persisted(path, step)
    written = 0
    with suppress(OSError):
        written = (path / STATE).stat().st_mtime_ns // 1_000_000
    return Persisted(path, step, vault, generation, at if type(at) is int and at > 0 else 0, written)


def is_of(one: Persisted, commit: Commit, job: Job) -> bool:
    """Whether it is this generation. A vault of several hosts has one ident whenever it is made: the time tells them apart."""
    same = (one.vault, one.generation) == (job.ident, commit.generation)
    return same and (not one.at or not commit.at or one.at == commit.at)
