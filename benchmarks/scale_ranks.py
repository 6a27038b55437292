"""Measure planning as ranks grow: complete plans and one rank's share.

Each has five sizes, and the power that fits them.

    python -m benchmarks.scale_ranks [--rounds 3] [--case 405B]

From specs alone, no checkpoint. Each plan is made by a process of its own on one core, and so is each share; seconds are the
least of the rounds, after the modules are imported and the spec's tree is read from the cache. A share is that of the first,
the middle or the last rank, whichever takes longest. Prints the table, keeps it in benchmarks/figures/ and writes it into
docs/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from attrs import field

from benchmarks.children import finished
from benchmarks.figures import Table, machine, save
from ucpl.records import frozen

HERE = Path(__file__).resolve().parent
MEASURE = """
import json, resource, sys, time
from ucpl.conversion.requests import Given, called
from ucpl.conversion.engine import planned
from ucpl.conversion.planning import Asked
from ucpl.conversion.share import share_of
import ucpl.graph, ucpl.layout, ucpl.placement, ucpl.planning.order, ucpl.inference.layered, ucpl.inference.parallel
from ucpl.planning.files import plan_bytes
source, target, sizes, rank = sys.argv[1:]
asked, given = Asked(source, target), Given(sizes=json.loads(sizes))
called(source)
begin, core = time.perf_counter(), time.process_time()
if rank == "all":
    plan = planned(asked, given).plan
    size = len(plan_bytes(plan))
else:
    plan, size = share_of(asked, given, int(rank)).plan, 0
print(json.dumps({"wall": time.perf_counter() - begin, "core": time.process_time() - core, "size": size,
                  "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                  "tensors": len(plan.source_shelves) + len(plan.target_shelves)}))
"""
HEAD = (
    "case", "ranks", "stored tensors", "all ranks, s of a core", "by the clock", "peak GiB", "plan file",
    "one rank, s of a core", "by the clock", "peak GiB", "wanted",
)  # fmt: skip


@frozen
class Case:
    """A change of layouts, and the size that grows.

    The sizes are arguments of both calls.
    """

    name: str
    file: str
    source: str
    target: str
    ranks: tuple[int, int]  # of each side, at a size of one
    sizes: tuple[tuple[int, int], ...]
    wanted: dict[int, str]
    model: dict[str, int] = field(factory=dict)
    is_whole: bool = True


CASES = (
    Case(
        "405B, ZeRO-1, tp 8 · pp 16 → tp 8 · pp 8, all states",
        "llama.ucpl",
        "megatron(tp = 8, pp = 16, dp = {})",
        "megatron(tp = 8, pp = 8, dp = {})",
        (128, 64),
        ((8, 12), (16, 24), (32, 48), (64, 96), (128, 192)),
        {4: "3 s, 0.5 GiB, 5 MB; 0.3 s"},
    ),
    Case(
        "405B, FSDP, three states",
        "fsdp.ucpl",
        "fsdp(dp = {})",
        "fsdp(dp = {})",
        (1, 1),
        ((1024, 768), (2048, 1536), (4096, 3072), (8192, 6144), (16384, 12288)),
        {4: "30 s, 1 GiB; 0.5 s"},
    ),
    Case(
        "671B, 58 layers of 256 experts, ep 64 · pp 16 → ep 32 · pp 8, all states",
        "moe.ucpl",
        "megatron(tp = 1, pp = 16, dp = {}, ep = 64)",
        "megatron(tp = 1, pp = 8, dp = {}, ep = 32)",
        (16, 8),
        ((64, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048)),
        {1: "10 s; 1 s"},
    ),
    Case(
        "10T, 117 layers of 1,024 experts, tp 8 · pp 25 · ep 32 → tp 8 · pp 20 · ep 64, all states",
        "moe.ucpl",
        "megatron(tp = 8, pp = 25, dp = {}, ep = 32)",
        "megatron(tp = 8, pp = 20, dp = {}, ep = 64)",
        (200, 160),
        ((32, 40), (64, 80), (128, 152), (256, 304), (500, 600)),
        {4: "seconds, of one rank"},
        {"l": 120, "e": 1024, "h": 8192, "x": 3328, "s": 3328},
        is_whole=False,
    ),
)


@frozen
class Cost:
    core: float
    wall: float
    gib: float
    size: int
    tensors: int


def cost(case: Case, degrees: tuple[int, int], ranks: tuple[str, ...], rounds: int) -> Cost:
    """The least of the rounds. For several ranks, that of the slowest."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    calls = (
        f"{HERE / case.file}:{text.format(n)}" for text, n in zip((case.source, case.target), degrees, strict=True)
    )
    command = [sys.executable, "-c", MEASURE, *calls, json.dumps(case.model)]
    dearest: Cost | None = None
    for rank in ranks:
        found = []
        for _ in range(rounds):
            found.append(json.loads(finished([*command, rank], alone)))
        core, wall, gib = (min(f[name] for f in found) for name in ("core", "wall", "gib"))
        one = Cost(core, wall, gib, found[0]["size"], found[0]["tensors"])
        dearest = one if dearest is None or one.core > dearest.core else dearest
    assert dearest is not None
    return dearest


def exponent(points: list[tuple[int, float]]) -> str:
    """The power of the ranks that fits best, over all sizes.

    Least squares of logarithms.
    """
    xs, ys = [math.log(n) for n, _ in points], [math.log(s) for _, s in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    fitted = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
    last = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return f"ranks^{fitted:.2f} (last two ^{last:.2f})"


def rows(case: Case, rounds: int) -> Iterator[tuple[str, ...]]:
    whole: list[tuple[int, float]] = []
    shares: list[tuple[int, float]] = []
    for n, degrees in enumerate(case.sizes):
        ours, theirs = (each * d for each, d in zip(case.ranks, degrees, strict=True))
        cells = ["", "", "", "", ""]
        if case.is_whole:
            made = cost(case, degrees, ("all",), rounds)
            whole.append((ours, made.core))
            cells = [
                f"{made.tensors:,}",
                f"{made.core:.2f}",
                f"{made.wall:.2f}",
                f"{made.gib:.2f}",
                f"{made.size / 1e6:.2f} MB",
            ]
        mine = cost(case, degrees, ("0", str(theirs // 2), str(theirs - 1)), rounds)
        shares.append((ours, mine.core))
        name = case.name if n == 0 else "the same"
        texts = (f"{mine.core:.2f}", f"{mine.wall:.2f}", f"{mine.gib:.2f}")
        yield (name, f"{ours:,} → {theirs:,}", *cells, *texts, case.wanted.get(n, ""))
    yield ("cost", "", "", exponent(whole) if whole else "", "", "", "", exponent(shares), "", "", "")


def bench(rounds: int, wanted: str | None = None) -> Iterator[tuple[str, ...]]:
    """Cases whose name has `wanted` in it, or all."""
    for case in CASES:
        if wanted is None or wanted in case.name:
            yield from rows(case, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", help="only cases whose name has this in it; nothing is kept then")
    given = parser.parse_args()
    found = []
    for cells in bench(given.rounds, given.case):
        print(" | ".join(cells), flush=True)
        found.append(cells)
    table = Table("ranks", f"python -m benchmarks.scale_ranks --rounds {given.rounds}", machine(), HEAD, tuple(found))
    print(f"\n{table}\n", flush=True)
    if given.case is None:
        save(table)


if __name__ == "__main__":
    main()
