"""Soak: conversions at random, killed and damaged, for so many minutes.

    python -m tests.soak [--minutes 60] [--seed N] [--case K ...]

The seed is printed. A case that breaks the law is printed with all that was done and the command that repeats it (a kill after
a time falls elsewhere each time; all else is the same). Ends 1 where there was one.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

from tests.soak.soaking import Broken, Case, one_case


def soak(seed: int, numbers: list[int] | None, minutes: float, most: int = 3) -> tuple[Counter[str], list[str]]:
    """The counted actions, and the cases that broke the law."""
    done: Counter[str] = Counter()
    broken: list[str] = []
    until = time.monotonic() + 60 * minutes
    for number in numbers or count():
        if numbers is None and time.monotonic() > until:
            break
        with tempfile.TemporaryDirectory(prefix="ucpl-soak-") as top:
            case: Case | None = None
            try:
                for given in one_case(seed, number, Path(top), most):
                    case = given
            except Broken as error:
                assert case is not None
                text = "\n".join([f"case {number}: {case.start.name}", *case.lines, str(error)])
                broken.append(f"{text}\nagain: python -m tests.soak --seed {seed} --case {number}")
                print(broken[-1], flush=True)
            if case is not None:
                done.update(case.counts)
        done["cases"] += 1
        if number % 50 == 49:
            print(summary(done, broken), flush=True)
    return done, broken


def summary(done: Counter[str], broken: list[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(done.items())) + f"; broken: {len(broken)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--case", type=int, action="append", help="only the cases of these numbers")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    done, broken = soak(given.seed, given.case, given.minutes)
    print(summary(done, broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
