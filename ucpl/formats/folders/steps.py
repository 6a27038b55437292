"""Files next to shards that are of another step.

Such a folder is a copy of two saves, or an interrupted save.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attrs import field

from ucpl.errors import UcplError
from ucpl.extents.containers import CompanionFile
from ucpl.files.texts import read_small
from ucpl.files.torch_files import read_torch_file
from ucpl.records import frozen

__all__ = ["RunFacts", "of_another_step"]

_JSON_MAX = 64 << 20
_ACCELERATE = "scheduler.bin"
_SCHEDULES = ("scheduler.pt", _ACCELERATE)
_STATES = ("trainer_state.json",)
_SCALER = "scaler.pt"


@frozen
class RunFacts:
    """Facts of a run in its shards.

    `step`: steps of the optimizer; None: unknown.
    """

    step: int | None = None
    skipped: int = 0  # steps among these that an overflow has skipped
    ranks: int = 0  # 0: they do not say it
    client: dict[object, object] = field(factory=dict)  # client_state


def of_another_step(top: Path, files: list[CompanionFile], run: RunFacts) -> Iterator[str]:
    """A line for each file with another step than the shards'."""
    if run.step is None:
        return
    for name, said in _stated(top, {file.name for file in files}, run):
        if said is not None and not run.step - run.skipped <= said <= run.step:
            yield f"{name} is of step {said}, the shards are of step {run.step}"


def _stated(top: Path, there: set[str], run: RunFacts) -> Iterator[tuple[str, int | None]]:
    for name in _STATES:
        if name in there and _SCALER not in there:  # the Trainer counts steps that an overflow has skipped, too
            yield name, _whole(_json(top / name).get("global_step"))
    for name in _SCHEDULES:
        if name in there:
            yield name, _steps_of(_torch(top, name), run, by_ranks=name == _ACCELERATE)
    yield "client_state global_step", _whole(run.client.get("global_step"))


def _steps_of(value: object, run: RunFacts, *, by_ranks: bool) -> int | None:
    """Optimizer steps that a schedule of torch has counted, or None.

    None: it counts something else. by_ranks: Accelerate steps a schedule once for each rank, in every step.
    """
    if not isinstance(value, dict) or "num_bad_epochs" in value:
        return None
    counted = _whole(value.get("last_epoch"))
    is_of_ranks = run.step is not None and by_ranks and counted == run.step * run.ranks
    return run.step if is_of_ranks else counted


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(read_small(path, _JSON_MAX) or b"")
    except (UcplError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _torch(top: Path, name: str) -> object:
    try:
        return read_torch_file(top, name).value
    except UcplError:
        return None
