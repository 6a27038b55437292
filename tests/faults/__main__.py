"""`python -m tests.faults --job convert --action eio`: fails at every call of every job.

Exit 1 where one breaks the law.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.jobs import JOBS
from tests.faults.law import KILLED, Bench
from tests.faults.layer import ACTIONS, KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--job", action="append", choices=[job.name for job in JOBS], help="default: all")
    parser.add_argument("--action", action="append", choices=ACTIONS, help="default: all")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of call; default: all")
    parser.add_argument("--every", type=int, default=1, help="the k-th faults alone (default: all)")
    given = parser.parse_args()
    failed = 0
    for job in JOBS:
        if given.job and job.name not in given.job:
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ucpl-faults-") as folder:
            bench = Bench(job, Path(folder))
            ends: Counter[str] = Counter()
            faults = list(bench.faults(tuple(given.action or ACTIONS), tuple(given.kind or KINDS)))[:: given.every]
            for fault in faults:
                outcome = bench.under(fault)
                ends["killed" if outcome.status == KILLED else f"status {outcome.status}"] += 1
                if outcome.broken:
                    failed += 1
                    print(f"{job.name}: {outcome}", flush=True)
        text = ", ".join(f"{n} {what}" for what, n in sorted(ends.items()))
        print(f"{job.name}: {len(faults)} faults: {text} ({time.monotonic() - begin:.0f} s)", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
