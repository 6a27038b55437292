"""The fuzzer's interface for readers of files, and its loop."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Protocol

from attrs import field, frozen

from tests.fuzz.guards import Guard, Harm, TooSlow, guard_of
from ucpl.errors import UcplError, catalogue

TOLD_EVERY = 10_000  # inputs


class Ready(Protocol):
    """A reader with its valid inputs at hand."""

    def attempt(self, rng: Random) -> str:
        """Damage one input and read it. Returns the damage.

        Raises: the reader's exceptions.

        The damage is also the last item of `self.damage`, for messages where reading raises.
        """
        ...

    damage: str


@frozen
class Reader:
    """One reader: its command-line name, and its inputs below a writable folder."""

    name: str
    prepare: Callable[[Path], Ready]


@frozen
class Failure:
    """An input with another result than our own errors. `(seed, number)` repeats it."""

    number: int
    damage: str
    trace: str


@frozen
class Outcome:
    reader: str
    inputs: int
    codes: Counter[str] = field(factory=Counter)  # of refusals; "" counts the inputs that were read
    failures: tuple[Failure, ...] = ()
    slowest: tuple[float, int] = (0.0, -1)  # seconds of the processor, number

    def text(self) -> str:
        refused = sum(self.codes.values()) - self.codes[""]
        codes = ", ".join(f"{code} {n}" for code, n in self.codes.most_common() if code)
        lines = [
            f"{self.reader}: {self.inputs} inputs, {self.codes['']} read, {refused} refused ({codes})",
            f"  slowest: {self.slowest[0]:.2f} s (input {self.slowest[1]}); failures: {len(self.failures)}",
        ]
        for failure in self.failures:
            lines += [f"-- input {failure.number}: {failure.damage}", failure.trace]
        return "\n".join(lines)


def run(
    reader: Reader,
    folder: Path,
    seed: int,
    numbers: Iterator[int],
    failures_max: int = 20,
    *,
    told: Callable[[str], None] = lambda _: None,
    guard: Guard | None = None,
) -> Outcome:
    """Try inputs by number.

    One number and seed give one input, whatever ran before it. Progress is printed now and then.
    """
    ready = reader.prepare(folder)
    guard = guard or guard_of(folder)
    codes: Counter[str] = Counter()
    failures: list[Failure] = []
    slowest = (0.0, -1)
    count = 0
    for number in numbers:
        began = time.process_time()
        try:
            with guard.held():
                ready.attempt(Random(f"{reader.name}/{seed}/{number}"))
            codes[""] += 1
        except UcplError as error:
            try:
                codes[_checked(error)] += 1
            except Exception:  # a finding about the error, or a fault of the check: both are shown
                failures.append(Failure(number, ready.damage, traceback.format_exc()))
        except (Exception, TooSlow, Harm):  # anything else than UcplError is a finding
            failures.append(Failure(number, ready.damage, traceback.format_exc(limit=-8)))
        except KeyboardInterrupt:  # of a long run: print its progress
            break
        count += 1
        slowest = max(slowest, (time.process_time() - began, number))
        if count % TOLD_EVERY == 0:
            told(f"{reader.name}: {count} inputs, {codes['']} read, {len(codes)} codes, {len(failures)} failures")
        if len(failures) >= failures_max:
            break
    return Outcome(reader.name, count, codes, tuple(failures), slowest)


def _checked(error: UcplError) -> str:
    """The code of an error whose texts can be printed."""
    for diagnostic in error.diagnostics:
        assert diagnostic.code in catalogue(), diagnostic.code
        texts = [diagnostic.message, diagnostic.remedy, *diagnostic.notes]
        for label in diagnostic.labels:
            texts += [label.file, label.text, label.where]
        for text in texts:
            text.encode()
            assert len(text) < 20_000, f"a text of {len(text)} characters"
    return error.diagnostics[0].code
