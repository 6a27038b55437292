"""make bench: planning, start-up, and conversion beside its peers, in one run on this machine. Prints one table in Markdown.

    python -m benchmarks [plan] [start] [lsp] [convert] [peer] [--gib 1.5] [--pairs 5]

`convert` and `peer` need an environment with DeepSpeed (UCPL_INTEROP_PYTHON names its python). `convert` makes a checkpoint
with real DeepSpeed and runs DeepSpeed's own converter beside ours; timings are medians of interleaved pairs. `peer` runs both
over every checkpoint of DeepSpeed in this repository, and tells what each makes of it.
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
from pathlib import Path

from benchmarks.lsp import bench_lsp
from benchmarks.peer import bench_peer

HERE = Path(__file__).resolve().parent
PLAN = """
import json, re, resource, sys, time
begin = time.perf_counter()
from ucpl.graph import build
from ucpl.layout import load, resolve
from ucpl.proofs.coverage import prove
from ucpl.regions import locate
from ucpl.schedule import order, plan_bytes
from ucpl.syntax import parse_call
path, source, target, layers = sys.argv[1:]
text = re.sub(r"dim l = 126", f"dim l = {layers}", open(path).read())
library = load((path, text))
marks = {"import, parse": time.perf_counter()}
source = locate(resolve(library, parse_call(source)))
target = locate(resolve(library, parse_call(target)))
marks["resolve, locate"] = time.perf_counter()
graph = build(source, target)
marks["build"] = time.perf_counter()
prove(graph)
marks["prove"] = time.perf_counter()
plan = order(graph)
size = len(plan_bytes(plan))
marks["order, serialise"] = time.perf_counter()
last, phases = begin, {}
for name, when in marks.items():
    phases[name], last = when - last, when
print(json.dumps({"seconds": last - begin, "cpu": time.process_time(), "phases": phases,
                  "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "plan_mb": size / 1e6,
                  "tensors": len(plan.source_shelves) + len(plan.target_shelves)}))
"""
PLANS = {
    "ZeRO-1 under tp and pp, 16,384 -> 12,288 ranks": (
        "llama.ucpl", "megatron(tp = 8, pp = 16, dp = 128)", "megatron(tp = 8, pp = 8, dp = 192)",
        "limits 2.5 s, 0.3 GiB, 4 MB",
    ),
    "FSDP, three states, 256 -> 192 ranks": (
        "fsdp.ucpl", "fsdp(dp = 256)", "fsdp(dp = 192)", "limits 8 s, 0.5 GiB, 20 MB",
    ),
}  # fmt: skip
LAYERS = (126, 252, 630, 1260)  # the growth over four sizes: ten times the layers may cost 1.3 times the limits


def run(command: list[str], **environment: str) -> tuple[float, str, float]:
    """Wall seconds, standard output, and peak resident MiB of a command (its children included)."""
    before = time.perf_counter()
    probe = (
        f"import resource, subprocess, sys; r = subprocess.run({command!r}, capture_output=True, text=True);"
        " sys.stdout.write(r.stdout); sys.stderr.write(r.stderr);"
        " sys.stderr.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)); sys.exit(r.returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env={**os.environ, **environment}
    )
    wall = time.perf_counter() - before
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:6])} failed:\n{done.stderr[-2000:]}")
    return (
        wall,
        done.stdout,
        int(done.stderr.split()[-1].rsplit("}", 1)[-1] or 0) / 1024 if done.stderr.split() else 0.0,
    )


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def bench_plan() -> None:
    """Located, built, proved twice, ordered and serialised; nothing is opened."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for name, (file, source, target, limits) in PLANS.items():
        first = 0.0
        for layers in LAYERS:
            command = [sys.executable, "-c", PLAN, str(HERE / file), source, target, str(layers)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
            found = json.loads(done.stdout)
            first = first or found["seconds"]
            phases = ", ".join(f"{k} {v:.2f}" for k, v in found["phases"].items())
            row(
                f"plan 405B, {name}, {layers} layers",
                f"{found['seconds']:.2f} s ({found['cpu']:.2f} s of a core), {found['gib']:.2f} GiB, {found['plan_mb']:.2f} MB",
                f"{limits}; {found['seconds'] / first:.2f} x the time of {LAYERS[0]} layers",
                f"{found['tensors']:,} stored tensors; {phases}",
            )


def cost(command: list[str], **environment: str) -> tuple[float, float]:
    """Wall seconds and seconds of a core of a command: other work on the machine hardly moves the second."""
    before, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True, env={**os.environ, **environment})
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - before, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def bench_start(pairs: int) -> None:
    base = [sys.executable, "-c", "import lark, attrs, numpy, networkx"]
    llama = HERE / "llama.ucpl"
    ours = [sys.executable, "-m", "ucpl"]
    plan = [
        *ours,
        "plan",
        "--from",
        f"{llama}:megatron(tp=2, pp=2, dp=2)",
        "--to",
        f"{llama}:megatron(tp=4, pp=1, dp=2)",
    ]
    check = [*ours, "check", str(HERE.parent / "specs" / "deepspeed.ucpl")]
    cases = {
        "ucpl check specs/deepspeed.ucpl": (check, False),
        "ucpl plan (benchmarks/llama.ucpl, tp2 -> tp4)": (plan, False),
        "the same, of texts that were never read": (plan, True),
        "ucpl --help": ([*ours, "--help"], False),
    }
    with tempfile.TemporaryDirectory(prefix="ucpl-bench-") as folder:
        subprocess.run(check, capture_output=True, check=True, env={**os.environ, "UCPL_CACHE": folder})
        for name, (command, new) in cases.items():
            mine, theirs = [], []
            for i in range(pairs + 1):
                for path in Path(folder).glob("tree-*") if new else ():
                    path.unlink()
                one, other = cost(base), cost(command, UCPL_CACHE=folder)
                if i:  # the first round fills the caches
                    theirs.append(one)
                    mine.append(other)
            wall, core = (statistics.median(x) for x in zip(*mine, strict=True))
            base_wall, base_core = (statistics.median(x) for x in zip(*theirs, strict=True))
            row(
                f"start: {name}",
                f"{core:.2f} s of a core ({wall:.2f} s)",
                f"{core / base_core:.2f} x the imports alone ({base_core:.2f} s of a core, {base_wall:.2f} s)",
                "limit 2 x for check and plan",
            )


def interop_python() -> str:
    python = os.environ.get("UCPL_INTEROP_PYTHON", str(HERE.parent / ".venv-interop" / "bin" / "python"))
    if not Path(python).exists():
        raise SystemExit("this needs DeepSpeed: `make interop` makes its environment, or set UCPL_INTEROP_PYTHON")
    return python


def bench_convert(pairs: int, gib: float) -> None:
    python = interop_python()
    with tempfile.TemporaryDirectory(prefix="ucpl-bench-") as folder:
        top = Path(folder)
        layers = max(1, round((gib * 2**30 / 16 - 24.6e6) / 4.73e6))  # 12 bytes of state and 4 of weight a parameter
        launch = [python, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29655"]
        subprocess.run(
            [*launch, str(HERE / "make_checkpoint.py"), "1", str(top / "source"), str(layers)],
            check=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        )
        source = top / "source"
        size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
        step = next(p for p in source.iterdir() if p.is_dir())
        times: dict[str, list[float]] = {}
        peaks: dict[str, float] = {}
        out = str(top / "out")
        ours = [sys.executable, "-m", "ucpl", "convert", str(source), out, "--to"]
        theirs = [python, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        commands = {
            "cp -r, fsync": ["sh", "-c", f"cp -r {source} {out} && sync -f {out}"],
            "ucpl convert zero1 dp2 -> dp3": [*ours, "zero1(dp=3)"],
            "ucpl convert, --memory 64M": [*ours, "zero1(dp=3)", "--memory", "64M"],
            "ucpl convert zero1 dp2 -> zero3 dp3": [*ours, "zero3(dp=3)"],
            "ds_to_universal": [*theirs, "--input_folder", str(step), "--output_folder", out],
        }
        for _ in range(pairs):
            for name, command in commands.items():
                wall, _, peak = run(command, DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
                times.setdefault(name, []).append(wall)
                peaks[name] = max(peaks.get(name, 0.0), peak)
                shutil.rmtree(top / "out")
        peer = statistics.median(times["ds_to_universal"])
        copy = statistics.median(times["cp -r, fsync"])
        for name, walls in times.items():
            here = statistics.median(walls)
            low, high = min(walls), max(walls)
            row(
                f"{name}, {size / 1e9:.2f} GB",
                f"{here:.2f} s ({low:.2f}-{high:.2f}), {peaks[name]:.0f} MiB",
                f"{peer / here:.1f} x as fast as ds_to_universal",
                f"{here / copy:.2f} x the time of cp",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", choices=["plan", "start", "lsp", "convert", "peer", []], default=[])
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    which = given.which or ["plan", "start", "lsp", "convert", "peer"]
    if which != ["peer"]:
        bench_times(which, given)
    if "peer" in which:
        print()
        row("checkpoint", "ucpl", "ds_to_universal", "ucpl", "ds_to_universal")
        row("---", "---", "---", "---", "---")
        for cells in bench_peer(interop_python()):
            row(*cells)


def bench_times(which: list[str], given: argparse.Namespace) -> None:
    row("what", "figure", "beside", "note")
    row("---", "---", "---", "---")
    if "plan" in which:
        bench_plan()
    if "start" in which:
        bench_start(given.pairs)
    if "lsp" in which:
        for name, figure, note in bench_lsp(given.pairs):
            row(name, figure, "limits 1 s to start, 100 ms an answer", note)
    if "convert" in which:
        bench_convert(given.pairs, given.gib)


if __name__ == "__main__":
    main()
