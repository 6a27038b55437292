"""Check before a run that weights and masters are of one step.

A sample of every stored weight is compared with its stored master.
The plan lists them (`Plan.masters`), so `apply` needs no code that makes plans.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ucpl.errors import Diagnostic, Label, UcplError, catalogue
from ucpl.files.checkpoint import Checkpoint
from ucpl.planning.plan import Plan, Runs
from ucpl.runtime.compare import Unequal
from ucpl.runtime.source_checks import damage_in
from ucpl.tables import I64, once
from ucpl.verification.known_bugs import shifted_masters_report
from ucpl.verification.target_check import compare_target

__all__ = ["check_same_step"]

SAMPLE = 1024  # elements of a run that are looked at


def check_same_step(
    masters: Plan | None,
    checkpoint: Checkpoint,
    memory: int,
    workers: int,
    element: Callable[[Unequal], str] | None = None,
) -> int:
    """Compare a sample of every weight with its master in another file.

    All are of one step.

    masters: from stored masters to stored weights. element: the name of the element that differs, if it is known here.
    Returns how many elements were looked at. Raises: UcplError E615 where a weight is not its master, rounded; E612 where
    one of the two is damaged.
    """
    if masters is None or len(checkpoint.files) < 2:  # one file is of one step
        return 0
    some = tuple(_sample(m) for m in masters.moves if m.kind == "copy")
    sampled = masters.of(sources=masters.sources, targets=masters.targets, moves=some)
    compared = compare_target(sampled, checkpoint, checkpoint, memory=memory, workers=workers)
    for unequal in compared:
        _refuse(unequal, checkpoint, element or (lambda u: f"weight of {u.label}"), memory)
    return compared.elements


def _sample(m: Runs) -> Runs:
    """The start of every stored tensor's first and last run."""
    rows = once(np.concatenate([_ends(m.source), _ends(m.target)]))
    some = m.take(rows)
    shape = some.shape.copy()
    left = np.full(len(rows), SAMPLE, dtype=np.int64)
    for d in reversed(range(shape.shape[1])):  # the last dim is the densest
        shape[:, d] = np.minimum(shape[:, d], left)
        left //= shape[:, d]
        left = np.maximum(left, 1)
    return some.replace(shape=shape)


def _ends(numbers: np.ndarray) -> I64:
    """The first and last place of each number."""
    first = np.unique(numbers, return_index=True)[1]
    last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
    return np.concatenate([first, last]).astype(np.int64)


def _refuse(unequal: Unequal, checkpoint: Checkpoint, element: Callable[[Unequal], str], memory: int) -> None:
    named = {(unequal.file, unequal.key), (unequal.source_file, unequal.source_key)}
    if damaged := damage_in(checkpoint, named, memory=memory):
        raise UcplError(*damaged)
    text = f"{element(unequal)}: the weight is not its master, rounded, {unequal.value} is not {unequal.wanted}"
    labels = (
        Label(unequal.file, unequal.value, where=f"{unequal.key}{list(unequal.element)}"),
        Label(unequal.source_file, unequal.wanted, where=f"{unequal.source_key}{list(unequal.source_element)}"),
    )
    notes, remedy = shifted_masters_report(unequal, checkpoint)
    raise UcplError(Diagnostic("E615", text, labels, notes, remedy or catalogue()["E615"].remedy))
