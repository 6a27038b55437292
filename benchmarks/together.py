"""Compare a plan that several ranks run with one process.

    python -m benchmarks.together [--mib 1728] [--rounds 5] [--folder DISK]

Rounds in turn, medians; every run in processes of its own, over files that are in the page cache. Each rank has one thread that
moves (`--workers 1`), so that as many cores are at work as there are ranks, up to those of the machine; the one process
has two. Seconds are those of the run, from planning's end to the name of the target, as the run itself reports them:
the start of
Python and torch on each rank is not in them, and is in those of the full command. Prints the table, keeps it in
benchmarks/figures/ and writes it into docs/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.estimates import MAKE, MIB_A_LAYER, UCPL, look
from benchmarks.figures import Table, machine, save
from ucpl.records import frozen

HEAD = (
    "case", "by", "read / needed", "sent between ranks", "the run, s (least to most)", "one process / it",
    "the full command, s", "of a core",
)  # fmt: skip
PHASES = ("plan", "create", "move", "read-back", "source", "fsync", "wait", "publish")  # that follow each other
CASES = {  # name: source, target
    "ZeRO-1, dp 3 → ZeRO-3, dp 4": ("on-3", "zero3(dp=4)"),
    "plain → ZeRO-1, dp 3": ("plain.pt", "zero1(dp=3)"),
}
WAYS = {  # name: ranks (0: no job), threads of each
    "one process": (0, 1),
    "one process, 2 threads": (0, 2),
    "1 rank": (1, 1),
    "2 ranks": (2, 1),
    "4 ranks": (4, 1),
}


@frozen
class Seen:
    run: float
    whole: float
    core: float
    read: int
    needed: int
    sent: int


def run(top: Path, plan: Path, source: Path, way: tuple[int, int]) -> Seen:
    ranks, threads = way
    target = top / "made"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "ucpl",
    ]
    command = [
        *(launch if ranks else UCPL),
        "apply",
        str(plan),
        str(source),
        str(target),
        "--workers",
        str(threads),
        "--json",
    ]
    look(source)
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    whole, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))["report"]
    shutil.rmtree(target)
    os.sync()
    core = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = sum(told["seconds"].get(phase, 0.0) for phase in PHASES)
    return Seen(seconds, whole, core, told["bytes_read"], told["bytes_needed"], told["bytes_received"])


def rows(name: str, found: dict[str, list[Seen]]) -> Iterator[tuple[str, ...]]:
    base = statistics.median(s.run for s in found["one process"])
    for way, seen in found.items():
        took = [s.run for s in seen]
        middle = statistics.median(took)
        yield (
            name if way == "one process" else "the same",
            way,
            f"{max(s.read / s.needed for s in seen):.3f}",
            f"{max(s.sent for s in seen):,} bytes",
            f"{middle:.2f} ({min(took):.2f} to {max(took):.2f})",
            f"{base / middle:.2f}",
            f"{statistics.median(s.whole for s in seen):.2f}",
            f"{statistics.median(s.core for s in seen):.2f}",
        )


def bench(mib: int, rounds: int, folder: str | None) -> Iterator[tuple[str, ...]]:
    with tempfile.TemporaryDirectory(prefix="ucpl-together-", dir=folder) as made:
        top = Path(made)
        layers = max(1, mib // MIB_A_LAYER)
        subprocess.run([sys.executable, "-c", MAKE, str(top / "plain.pt"), str(layers)], check=True)
        quiet = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run([*UCPL, "convert", str(top / "plain.pt"), str(top / "on-3"), "--to", "zero1(dp=3)"], **quiet)  # type: ignore[call-overload]
        for number, (name, (source, to)) in enumerate(CASES.items()):
            plan = top / f"{number}.plan"
            subprocess.run([*UCPL, "plan", "--from", str(top / source), "--to", to, "-o", str(plan)], **quiet)  # type: ignore[call-overload]
            found: dict[str, list[Seen]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way, how in WAYS.items():
                    found[way].append(run(top, plan, top / source, how))
            yield from rows(name, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1728)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk that is to be measured")
    given = parser.parse_args()
    found = []
    for cells in bench(given.mib, given.rounds, given.folder):
        print(" | ".join(cells), flush=True)
        found.append(cells)
    command = f"python -m benchmarks.together --mib {given.mib} --rounds {given.rounds}"
    save(table := Table("apply", command, machine(), HEAD, tuple(found)))
    print(f"\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
