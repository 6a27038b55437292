"""Compare `ucpl.reshard` with DTensor.redistribute and DCP in one job.

python -m benchmarks.live [--rounds 5] [--folder /dev/shm]: prints a table and writes it into docs/PERFORMANCE.md. DCP saves
into the folder; in memory by default, so that no disk is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Table, machine, save

HERE = Path(__file__).resolve().parent
HEAD = (
    "4 ranks of gloo, 201 MB in f32", "`ucpl.reshard`", "DTensor.redistribute", "DCP save + load, in memory",
    "sent between ranks", "in place",
)  # fmt: skip
CASES = {
    "by row over 4 → by column over 4": ("rows(n=4)", "columns(n=4)"),
    "by row over 4 → by row over 2": ("rows(n=4)", "rows(n=2)"),
    "by row over 2 → by column over 4": ("rows(n=2)", "columns(n=4)"),
}


def row(name: str, calls: tuple[str, str], rounds: int, folder: str) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory(dir=folder) as top:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(HERE / "live_job.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        done = subprocess.run(
            [*command, *calls, top, str(rounds)], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    median = {way: statistics.median(taken[1:]) if taken else None for way, taken in answer["seconds"].items()}
    ours = median["ucpl"]
    assert ours is not None

    def beside(way: str) -> str:
        other = median[way]
        return "does not apply" if other is None else f"{other:.2f} s, {other / ours:.1f} ×"

    sent, kept = (f"{answer[what] / 1e6:.0f} MB" for what in ("sent", "kept"))
    return (name, f"{ours:.2f} s", beside("redistribute"), beside("dcp"), sent, kept)


def bench(rounds: int, folder: str) -> Iterator[tuple[str, ...]]:
    for name, calls in CASES.items():
        yield row(name, calls, rounds, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="of each way in turn; the first is not counted")
    parser.add_argument("--folder", default="/dev/shm")
    given = parser.parse_args()
    rows = tuple(bench(given.rounds, given.folder))
    table = Table("live", f"python -m benchmarks.live --rounds {given.rounds}", machine(), HEAD, rows)
    print(table)
    save(table)


if __name__ == "__main__":
    main()
