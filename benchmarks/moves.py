"""Moves that are no runs, beside `cp` of the same bytes: transposes, cuts by column, small rows, shards of another number.

    python -m benchmarks.moves [WORD ...] [--pairs 5] [--where /dev/shm] [--check]

WORD: those cases whose name has it. Sources are made here, element i with the bits of number i. Rounds of `cp -r` and of
conversions are interleaved; ratios are of medians: of cp's time, and of the phase `move`, in which digests are made and
what was written is synced. Nothing is read back. In memory (/dev/shm) this shows what moves cost; on a disk, what they ask
of it. With --check, each target is converted back and must be the source, byte for byte.
"""

from __future__ import annotations

import argparse
import filecmp
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
from ucpl.digests import crc32
from ucpl.extents import StorageRef, TensorRef
from ucpl.runtime.counters import Report
from ucpl.stores.torch_files import layout_torch_file

SPEC = Path(__file__).with_name("moves.ucpl")


@frozen
class Case:
    """One conversion between layouts of moves.ucpl. What the source is made of: `first_NAME()`, of this dtype and shape."""

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
)
HEAD = (
    "case", "read / needed, at 64M", "cp / move", "wanted", "64M / default", "1 worker / 2", "buffers, at 64M",
    "move", "its CPU", "cp",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    chosen = [c for c in CASES if not given.words or any(word in c.name for word in given.words)]
    for row in bench_moves(chosen, given.pairs, given.where, check=given.check):
        print("| " + " | ".join(row) + " |", flush=True)


def bench_moves(cases: tuple[Case, ...] | list[Case], pairs: int, where: str, *, check: bool) -> Iterator[list[str]]:
    yield list(HEAD)
    yield ["---"] * len(HEAD)
    with tempfile.TemporaryDirectory(prefix="ucpl-moves-", dir=where) as folder:
        for case in cases:
            yield list(measured(case, Path(folder), pairs, check))


def measured(case: Case, top: Path, pairs: int, check: bool) -> Iterator[str]:
    """The cells of a row. The source is made for it, and removed."""
    source, out = top / "source", top / "out"
    make(case, top / "first", source)
    how: dict[str, dict[str, int]] = {"default": {}, "64M": {"memory": 64 << 20}, "alone": {"workers": 1}}
    copies: list[float] = []
    took: dict[str, list[tuple[float, float]]] = {key: [] for key in how}
    reports: dict[str, Report] = {}
    for _ in range(pairs):
        begin = time.perf_counter()
        subprocess.run(["cp", "-r", "--reflink=never", source, out], check=True)
        copies.append(time.perf_counter() - begin)
        shutil.rmtree(out)
        for key, more in how.items():
            before = time.process_time()
            reports[key] = converted(source, out, (case.source, case.target), more)
            took[key].append((reports[key].seconds["move"], time.process_time() - before))
            if check:
                converted(out, top / "back", (case.target, case.source), {})
                demand_same(source, top / "back")
                shutil.rmtree(top / "back")
            shutil.rmtree(out)
    shutil.rmtree(source)
    copy = statistics.median(copies)
    (move, core), (small, _), (alone, _) = (map(statistics.median, zip(*took[key], strict=True)) for key in how)
    default, little = reports["default"], reports["64M"]
    yield case.name
    yield ", ".join(f"{r.bytes_read / r.bytes_needed:.2f}" for r in (default, little))
    yield f"{copy / move:.2f}"
    yield f"{case.wanted}"
    yield f"{small / move:.2f}"
    yield f"{alone / move:.2f}"
    yield ", ".join(f"{r.bytes_live_max / 2**20:.0f} MiB" for r in (default, little))
    yield f"{move:.2f} s"
    yield f"{core:.2f} s"
    yield f"{copy:.2f} s"


def converted(source: Path, target: Path, layouts: tuple[str, str], how: dict[str, int]) -> Report:
    here, there = (f"{SPEC}:{call}" for call in layouts)
    return ucpl.convert(source, target, there, layout=here, read_back=False, **how).report  # type: ignore[arg-type]


def make(case: Case, first: Path, source: Path) -> None:
    """One file in which element i has the bits of number i, converted to the layout of the source."""
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
