"""Compare the estimates of `ucpl plan` with runs, warm and cold.

    python -m benchmarks.estimates [--mib 576] [--rounds 5] [--folder DISK]

Every round calibrates the disk, and then runs every case once, each in a process of its own: the machine's other load is in
both. Medians of the rounds, and their range. Cold: the pages of the source are dropped before. Prints the table, keeps it in
benchmarks/figures/ and writes it into docs/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.children import finished
from benchmarks.figures import Table, machine, save
from ucpl.records import frozen

HEAD = (
    "case", "source", "estimate, s", "it took, s (least to most)", "estimate / run", "peak, estimate", "peak",
    "estimated / read, estimated / written",
)  # fmt: skip
MAKE = """
import sys, torch
params, torch_ = {}, torch.manual_seed(0)
for i in range(int(sys.argv[2])):
    for name, shape in (("q", (1024, 1024)), ("up", (4096, 1024)), ("down", (1024, 4096)), ("norm", (1024,))):
        w = torch.randn(shape)
        moments = {"exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        params[f"layers.{i}.{name}.weight"] = {"weight": w, "fp32": w, **moments}
params = {k: {s: t.clone() for s, t in v.items()} for k, v in params.items()}
groups = [{"lr": 1e-3, "params": list(params)}]
scalars = {"step": dict.fromkeys(params, 3.0)}
torch.save({"params": params, "buffers": {}, "aliases": {}, "groups": groups, "scalars": scalars}, sys.argv[1])
"""
MIB_A_LAYER = 144
UCPL = [sys.executable, "-m", "ucpl"]


def cases(top: Path) -> Iterator[tuple[str, Path, str]]:
    yield "plain → ZeRO-1, dp 3", top / "plain.pt", "zero1(dp=3)"
    yield "ZeRO-1, dp 3 → ZeRO-3, dp 4", top / "on-3", "zero3(dp=4)"
    yield "ZeRO-1, dp 3 → universal", top / "on-3", "universal()"
    yield "ZeRO-1, dp 3 → plain", top / "on-3", "plain()"


def forget(path: Path) -> None:
    for one in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        handle = os.open(one, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def look(path: Path) -> None:
    for one in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with one.open("rb", buffering=0) as file:
            while file.read(1 << 20):  # a small process: the kernel reports its size for its children, too
                pass


def run(source: Path, target: Path, to: str) -> tuple[float, int, dict[str, int]]:
    """Seconds, peak bytes, and the run's own counters."""
    with tempfile.TemporaryFile() as out:
        begin = time.perf_counter()
        child = subprocess.Popen([*UCPL, "convert", str(source), str(target), "--to", to, "--json"], stdout=out)
        _, status, used = os.wait4(child.pid, 0)
        took = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        told = json.load(out)["report"]
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    os.sync()
    return took, used.ru_maxrss << 10, told


@frozen
class Seen:
    """One run and its estimate."""

    said: float
    took: float
    memory: int
    peak: int
    counted: tuple[float, float]  # estimated bytes divided by read bytes, and by written bytes


def one_round(top: Path, found: dict[tuple[str, str], list[Seen]]) -> None:
    known = top / "bandwidths.json"
    subprocess.run([*UCPL, "calibrate", str(top), "-o", str(known)], check=True, stdout=subprocess.DEVNULL)
    for name, source, to in cases(top):
        command = [*UCPL, "plan", "--from", str(source), "--to", to, "--bandwidths", str(known), "--json"]
        cost = json.loads(finished(command))["cost"]
        for state in ("warm", "cold"):
            (look if state == "warm" else forget)(source)
            took, peak, told = run(source, top / ("made.pt" if to == "plain()" else "made"), to)
            counted = cost["read"] / told["bytes_read"], cost["written"] / told["bytes_written"]
            seen = Seen(cost["estimate"][state], took, cost["estimate"]["memory"], peak, counted)
            found.setdefault((name, state), []).append(seen)


def rows(found: dict[tuple[str, str], list[Seen]]) -> Iterator[tuple[str, ...]]:
    for (name, state), runs in found.items():
        said, took = ([getattr(r, what) for r in runs] for what in ("said", "took"))
        ratios = [r.said / r.took for r in runs]
        yield (
            name,
            state,
            f"{statistics.median(said):.2f}",
            f"{statistics.median(took):.2f} ({min(took):.2f} to {max(took):.2f})",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{max(r.memory for r in runs) >> 20} MiB",
            f"{max(r.peak for r in runs) >> 20} MiB",
            "{:.3f}, {:.3f}".format(*runs[0].counted),
        )


def bench(mib: int, rounds: int, folder: str | None) -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, str], list[Seen]] = {}
    with tempfile.TemporaryDirectory(prefix="ucpl-estimates-", dir=folder) as name:
        top = Path(name)
        subprocess.run([sys.executable, "-c", MAKE, str(top / "plain.pt"), str(max(1, mib // MIB_A_LAYER))], check=True)
        subprocess.run([*UCPL, "convert", str(top / "plain.pt"), str(top / "on-3"), "--to", "zero1(dp=3)"], check=True)
        for _ in range(rounds):
            one_round(top, found)
    yield from rows(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk that is to be measured")
    given = parser.parse_args()
    command = f"python -m benchmarks.estimates --mib {given.mib} --rounds {given.rounds}"
    save(table := Table("estimates", command, machine(), HEAD, tuple(bench(given.mib, given.rounds, given.folder))))
    print(f"\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
