"""Walk over topologies, and compare each conversion with the first state.

    python -m tests.walk [--steps 200] [--seed N] [--walk K ...]

The seed is printed, with a line a step. A step that is wrong ends the run with the command that walks there again. Ends 1 where
a state is not the first one, if a refusal is none of the named limits, or if more than a tenth of all steps are refused.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.walk.starts import STARTS
from tests.walk.walking import STEPS, Step, one_walk

REFUSED_MAX = 0.1


def walked(seed: int, numbers: list[int], steps: int) -> list[Step]:
    """All steps up to the first wrong one, printed one by one."""
    done: list[Step] = []
    each = STEPS if steps >= 100 else 2
    for number in numbers:
        with tempfile.TemporaryDirectory() as scratch:
            for step in one_walk(seed, number, Path(scratch), min(each, steps - len(done))):
                print(step, flush=True)
                done.append(step)
                if step.wrong:
                    return done
        if len(done) >= steps:
            break
    return done


def verdict(done: list[Step], seed: int) -> int:
    """The report at the end; the exit status."""
    refused = [step for step in done if step.refused]
    print(f"{len(done)} conversions, {len(refused)} refused, {len({s.start for s in done})} checkpoints, seed {seed}")
    if done and done[-1].wrong:
        print("\n".join(done[-1].wrong[:40]))
        print(f"again: python -m tests.walk --seed {seed} --walk {done[-1].walk}")
        return 1
    if len(refused) > REFUSED_MAX * max(len(done), 40):  # of a short run, four: its steps are too few for a share
        print(f"more than {REFUSED_MAX:.0%} of the steps were refused: this walk proves little")
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.walk", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--walk", type=int, action="append", help="only the walks of these numbers")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    first = [*range(len(STARTS))]
    random.Random(given.seed).shuffle(first)  # each checkpoint once, if there are so many steps; which of them is drawn
    numbers = given.walk or [*first, *range(len(STARTS), given.steps + len(STARTS))]
    return verdict(walked(given.seed, numbers, given.steps), given.seed)


if __name__ == "__main__":
    sys.exit(main())
