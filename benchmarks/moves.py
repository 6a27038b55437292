"""Compare moves that are no runs with `cp` of the same bytes.

The moves are transposes, cuts by column, small rows, and shards of another number.

    python -m benchmarks.moves [WORD ...] [--pairs 5] [--where /dev/shm] [--check] [--reflink] [--save NAME]

WORD: those cases whose name has it. Sources are made here, element i with the bits of number i. Rounds of `cp -r` and of
conversions are interleaved; ratios are of medians: of cp's time, and of the phase `move`, in which digests are made and
written files are synced; in brackets, of seconds of a core, which other work hardly changes. Nothing is read back. In
memory (/dev/shm) this shows the cost of moves; on a disk, their load on it. --reflink lets a file system share blocks,
which no other row does. With --check, each target is converted back and must be the source, byte for byte.
"""

from __future__ import annotations

import argparse
import filecmp
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
from attrs import frozen

import ucpl
from benchmarks.figures import Table, machine, save
from ucpl.digests import crc32
from ucpl.extents import StorageRef, TensorRef
from ucpl.files.torch_files import layout_torch_file
from ucpl.runtime.counters import Report
from ucpl.runtime.moving import Mover

SPEC = Path(__file__).with_name("moves.ucpl")


@frozen
class Case:
    """One conversion between layouts of moves.ucpl.

    The source is made of `first_NAME()`, of this dtype and shape.
    """

    name: str
    source: str
    target: str
    first: str
    dtype: str
    shape: tuple[int, ...]
    wanted: float  # cp's time over the move's, at least


SQUARE, WIDE, ODD = (8192, 8192), (4096, 16384), (6151, 10007)
DOWN, EXPERTS, LAYERS = (8192, 14336), (64, 8192, 128), (8, 2047, 4099)
CASES = (
    Case("transpose, 8192 x 8192 f32", "first_square()", "turned_square()", "square", "f32", SQUARE, 0.5),
    Case("transpose, 8192 x 8192 bf16", "first_square()", "turned_square()", "square", "bf16", SQUARE, 0.5),
    Case("transpose, 4096 x 16384 f32", "first_wide()", "turned_wide()", "wide", "f32", WIDE, 0.5),
    Case("transpose, 16384 x 4096 f32", "turned_wide()", "first_wide()", "wide", "f32", WIDE, 0.5),
    Case("transpose, 6151 x 10007 f32", "first_odd()", "turned_odd()", "odd", "f32", ODD, 0.5),
    Case("columns, tp 2 -> 4, runs of 7 KiB", "columns(tp = 2)", "columns(tp = 4)", "down", "bf16", DOWN, 0.8),
    Case("columns, tp 4 -> 2", "columns(tp = 4)", "columns(tp = 2)", "down", "bf16", DOWN, 0.8),
    Case("columns, tp 32 -> 64, runs of 448 bytes", "columns(tp = 32)", "columns(tp = 64)", "down", "bf16", DOWN, 0.8),
    Case("columns, tp 64 -> 32", "columns(tp = 64)", "columns(tp = 32)", "down", "bf16", DOWN, 0.8),
    Case("rows of 256 bytes, dealt anew", "first_experts()", "by_row()", "experts", "bf16", EXPERTS, 0.8),
    Case("rows of 256 bytes, back", "by_row()", "first_experts()", "experts", "bf16", EXPERTS, 0.8),
    Case("dim 0 cut over 4 -> 6", "fsdp(dp = 4)", "fsdp(dp = 6)", "layers", "f32", LAYERS, 0.8),
    Case("dim 0 cut over 6 -> 4", "fsdp(dp = 6)", "fsdp(dp = 4)", "layers", "f32", LAYERS, 0.8),
    Case("as they are", "fsdp(dp = 4)", "fsdp(dp = 4)", "layers", "f32", LAYERS, 0.8),
)
HEAD = (
    "case", "read / needed, at 64M", "cp / move", "wanted", "64M / default", "1 worker / 2", "buffers, at 64M",
    "move", "its core", "cp", "its core", "shared",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--reflink", action="store_true")
    parser.add_argument("--save", help="keep the table under this name, and write it into docs/PERFORMANCE.md")
    given = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    with tempfile.TemporaryDirectory(prefix="ucpl-moves-", dir=given.where) as folder:
        for case in CASES:
            if not given.words or any(word in case.name for word in given.words):
                rows.append(tuple(measured(case, Path(folder), given)))
                print("| " + " | ".join(rows[-1]) + " |", flush=True)
    if given.save:
        command = f"python -m benchmarks.moves --pairs {given.pairs} --where {given.where}"
        save(Table(given.save, command + " --reflink" * given.reflink, machine(), HEAD, tuple(rows)))


@frozen
class Cost:
    """Seconds by the clock, and of cores."""

    wall: float
    core: float

    @staticmethod
    def median(costs: list[Cost]) -> Cost:
        return Cost(statistics.median(c.wall for c in costs), statistics.median(c.core for c in costs))


def measured(case: Case, top: Path, given: argparse.Namespace) -> Iterator[str]:
    """The cells of a row.

    Makes the source for it, and removes it.
    """
    source, out = top / "source", top / "out"
    make(case, top / "first", source)
    how: dict[str, dict[str, int]] = {"default": {}, "64M": {"memory": 64 << 20}, "alone": {"workers": 1}}
    costs: dict[str, list[Cost]] = {key: [] for key in ("cp", *how)}
    reports: dict[str, Report] = {}
    for _ in range(given.pairs):
        costs["cp"].append(copied(source, out))
        shutil.rmtree(out)
        for key, more in how.items():
            reports[key], cost = moved(source, out, case, {**more, "reflink": given.reflink})
            costs[key].append(cost)
            if given.check:
                converted(out, top / "back", (case.target, case.source), {})
                demand_same(source, top / "back")
                shutil.rmtree(top / "back")
            shutil.rmtree(out)
    shutil.rmtree(source)
    copy, move, small, alone = (Cost.median(found) for found in costs.values())
    default, little = reports["default"], reports["64M"]
    yield case.name
    yield ", ".join(f"{r.bytes_read / r.bytes_needed:.2f}" for r in (default, little))
    yield f"{copy.wall / move.wall:.2f}"
    yield f"{case.wanted}"
    yield f"{small.wall / move.wall:.2f} ({small.core / move.core:.2f})"
    yield f"{alone.wall / move.wall:.2f}"
    yield ", ".join(f"{r.bytes_live_max / 2**20:.0f} MiB" for r in (default, little))
    yield from (f"{x:.2f} s" for x in (move.wall, move.core, copy.wall, copy.core))
    yield f"{default.bytes_cloned / default.bytes_target:.0%}"


def copied(source: Path, out: Path) -> Cost:
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", "--reflink=never", source, out], check=True)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(time.perf_counter() - begin, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)


def moved(source: Path, out: Path, case: Case, how: dict[str, int]) -> tuple[Report, Cost]:
    """A conversion, and core seconds and wall seconds of its phase `move`."""
    core: list[float] = []
    genuine = Mover.move

    def move(mover: Mover) -> None:
        begin = time.process_time()
        genuine(mover)
        core.append(time.process_time() - begin)

    Mover.move = move  # type: ignore[method-assign]
    try:
        report = converted(source, out, (case.source, case.target), how)
    finally:
        Mover.move = genuine  # type: ignore[method-assign]
    return report, Cost(report.seconds["move"], core[0])


def converted(source: Path, target: Path, layouts: tuple[str, str], how: dict[str, int]) -> Report:
    here, there = (f"{SPEC}:{call}" for call in layouts)
    return ucpl.convert(source, target, there, layout=here, read_back=False, **how).report  # type: ignore[arg-type]


def make(case: Case, first: Path, source: Path) -> None:
    """Make a file of numbered elements and convert it to the source."""
    first.mkdir()
    numel, cell = prod(case.shape), np.dtype("<u4" if case.dtype == "f32" else "<u2")
    steps = tuple(prod(case.shape[i + 1 :]) for i in range(len(case.shape)))
    plan = layout_torch_file({"w": TensorRef(StorageRef("0", case.dtype, numel), 0, case.shape, steps)}, "w")
    raw = np.arange(numel, dtype="<u4").astype(cell).data.cast("B")
    with (first / "w.pt").open("wb") as file:
        for position, data in (*plan.fixed, (plan.storages["0"][0], raw), *plan.finish({"0": crc32(raw)})):
            file.seek(position)
            file.write(data)
    converted(first, source, (f"first_{case.first}()", case.source), {})
    shutil.rmtree(first)


def demand_same(one: Path, other: Path) -> None:
    for path in one.rglob("*.pt"):
        if not filecmp.cmp(path, other / path.relative_to(one), shallow=False):
            raise SystemExit(f"{path.name} did not come back as it was")


if __name__ == "__main__":
    main()
