"""Benchmarks of planning, start-up, conversion and ranks, for `make bench`.

    python -m benchmarks [plan] [start] [lsp] [convert] [forms] [peer] [usual] [ranks] [planners] [ranges] [estimates]
        [live] [apply] [vault] [loads] [--gib 1.5 6] [--pairs 15 5] [--folder DISK]

The last eight are the tables of `make bench-ranks`; each is a module of this folder, too (scale_ranks, planners, ranges,
estimates, live, together, vault, loads), with options of its own. Each prints a table in Markdown, keeps it in
benchmarks/figures/ and writes it into docs/PERFORMANCE.md. `convert`, `forms`, `peer`, `usual` and `loads` need an
environment with DeepSpeed (UCPL_INTEROP_PYTHON names its python). `convert` makes a checkpoint with real DeepSpeed and
compares DeepSpeed's own converter with ours; `usual` compares the tools that people use with ours; timings are medians
of interleaved rounds. `peer` runs both over every checkpoint of DeepSpeed in this repository, and compares their
targets.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks import estimates, live, loads, planners, ranges, scale_ranks, together, vault
from benchmarks.children import finished
from benchmarks.convert import EXAMPLE, FORMS_HEAD, HEAD, bench_convert, bench_forms
from benchmarks.figures import Table, machine, save
from benchmarks.lsp import LSP_HEAD, bench_lsp
from benchmarks.peer import bench_peer
from benchmarks.usual import USUAL_HEAD, bench_usual

Row = tuple[str, ...]

HERE = Path(__file__).resolve().parent
PLAN = """
import json, re, resource, sys, time
begin = time.perf_counter()
from attrs import evolve
from ucpl.graph import build
from ucpl.layout import load, resolve
from ucpl.verification.proof.coverage import prove
from ucpl.verification.masters import masters_of
from ucpl.placement import locate
from ucpl.planning import order
from ucpl.planning.files import plan_bytes
from ucpl.language import parse_call
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
plan = evolve(order(graph), masters=masters_of(source, None))
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
    "405B, ZeRO-1, all states, tp 8 · pp 16 · dp 128 → tp 8 · pp 8 · dp 192": (
        "llama.ucpl", "megatron(tp = 8, pp = 16, dp = 128)", "megatron(tp = 8, pp = 8, dp = 192)", (2.5, 0.3, 4.0),
    ),
    "405B, FSDP, three states, 256 → 192 ranks": (
        "fsdp.ucpl", "fsdp(dp = 256)", "fsdp(dp = 192)", (8.0, 0.5, 20.0),
    ),
}  # fmt: skip
LAYERS = (126, 252, 630, 1260)  # the growth over four sizes: ten times the layers may cost 1.3 times the limits
PLAN_HEAD = (
    "case", "layers", "stored tensors", "seconds (least to most)", "import, parse", "resolve, locate", "build",
    "prove again", "order, serialise", "of the first", "peak GiB", "plan file", "wanted",
)  # fmt: skip


def bench_plan(rounds: int) -> Iterator[Row]:
    """Time location, building, two proofs, ordering and serialisation on one core. Medians."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for name, (file, source, target, limits) in PLANS.items():
        first = 0.0
        for layers in LAYERS:
            command = [sys.executable, "-c", PLAN, str(HERE / file), source, target, str(layers)]
            found = []
            for _ in range(rounds):
                found.append(json.loads(finished(command, alone)))
            seconds = [f["seconds"] for f in found]
            whole = statistics.median(seconds)
            first = first or whole
            room = 1.0 if layers == LAYERS[0] else 1.3
            wanted = (
                " s, ".join(f"{limit * room:.4g}" for limit in limits[:2]) if layers in (LAYERS[0], LAYERS[-1]) else ""
            )
            yield (
                name if layers == LAYERS[0] else "the same",
                f"{layers:,}",
                f"{found[0]['tensors']:,}",
                f"{whole:.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
                *(f"{statistics.median(f['phases'][k] for f in found):.2f}" for k in found[0]["phases"]),
                f"{whole / first:.2f}",
                f"{max(f['gib'] for f in found):.2f}",
                f"{found[0]['plan_mb']:.2f} MB",
                f"{wanted} GiB, {limits[2] * room:.4g} MB" if wanted else "",
            )


def cost(command: list[str], **environment: str) -> tuple[float, float]:
    """Wall seconds and core seconds of a command.

    Other work hardly changes the second.
    """
    before, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    finished(command, {**os.environ, **environment})
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - before, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def bench_start(pairs: int) -> Iterator[Row]:
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
    target = Path(tempfile.mkdtemp(prefix="ucpl-bench-")) / "target"
    convert = [*ours, "convert", str(EXAMPLE), str(target), "--to", "zero1(dp=3)", "--force"]
    cases = {
        "`ucpl check` of a shipped spec": (check, False, "2.0"),
        "`ucpl plan` over a spec of 405B": (plan, False, "2.0"),
        "the same, of texts that were never read before": (plan, True, "2.0"),
        "`ucpl convert` of a tiny checkpoint": (convert, False, "2.0"),
        "`ucpl --help`": ([*ours, "--help"], False, ""),
    }
    with tempfile.TemporaryDirectory(prefix="ucpl-bench-") as folder:
        finished(check, {**os.environ, "UCPL_CACHE": folder})
        for name, (command, new, wanted) in cases.items():
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
            yield (name, *(f"{x:.2f}" for x in (core, base_core, core / base_core, wall, base_wall)), wanted)


NAMES = (
    "plan",
    "start",
    "lsp",
    "convert",
    "forms",
    "peer",
    "usual",
    "ranks",
    "planners",
    "ranges",
    "estimates",
    "live",
    "apply",
    "vault",
    "loads",
)


def interop_python() -> str:
    python = os.environ.get("UCPL_INTEROP_PYTHON", str(HERE.parent / ".venv-interop" / "bin" / "python"))
    if not Path(python).exists():
        raise SystemExit("this needs DeepSpeed: `make interop` makes its environment, or set UCPL_INTEROP_PYTHON")
    return python


def tables(given: argparse.Namespace) -> dict[str, tuple[Row, Callable[[], Iterable[Row]]]]:
    """The head of each table, and the function that makes its rows."""
    return {
        "plan": (PLAN_HEAD, lambda: bench_plan(given.pairs[0])),
        "start": (
            ("case", "of a core", "the base's", "ratio", "by the clock", "the base's", "wanted"),
            lambda: bench_start(given.pairs[0]),
        ),
        "lsp": (LSP_HEAD, lambda: bench_lsp(given.pairs[0])),
        "convert": (HEAD, lambda: bench_convert(interop_python(), given.pairs, given.gib, given.folder)),
        "forms": (FORMS_HEAD, lambda: bench_forms(interop_python(), given.pairs, given.gib, given.folder)),
        "peer": (
            ("checkpoint", "ucpl", "ds_to_universal", "ucpl", "ds_to_universal"),
            lambda: bench_peer(interop_python()),
        ),
        "usual": (
            USUAL_HEAD,
            lambda: bench_usual(interop_python(), given.pairs[0], given.gib[0], given.folder),
        ),
        "ranks": (scale_ranks.HEAD, lambda: scale_ranks.bench(given.pairs[0])),
        "planners": (planners.HEAD, lambda: planners.bench(given.pairs[0])),
        "ranges": (ranges.HEAD, lambda: ranges.bench(1)),
        "estimates": (estimates.HEAD, lambda: estimates.bench(576, given.pairs[0], given.folder)),
        "live": (live.HEAD, lambda: live.bench(given.pairs[0] + 1, "/dev/shm")),
        "apply": (together.HEAD, lambda: together.bench(1728, given.pairs[0], given.folder)),
        "vault": (vault.HEAD, lambda: vault.bench(given.pairs[0], "/dev/shm")),
        "loads": (
            loads.HEAD,
            lambda: loads.bench(interop_python(), loads.MB, given.pairs[0], loads.RANKS, given.folder),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", choices=[*NAMES, []], default=[])
    parser.add_argument(
        "--gib", type=float, nargs="+", default=[1.5, 6.0], help="sizes of the checkpoints of `convert`"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        nargs="+",
        default=[5],
        help="rounds that count; of `convert` a number a size, the last for the rest",
    )
    parser.add_argument(
        "--folder", help="where `convert`, `estimates`, `apply` and `loads` write: on the disk that is to be measured"
    )
    given = parser.parse_args()
    for name, (head, rows) in tables(given).items():
        if given.which and name not in given.which:
            continue
        found = []
        for cells in rows():
            print(" | ".join(cells), flush=True)
            found.append(cells)
        asked = [a for a in sys.argv[1:] if a not in given.which]
        command = f"python -m benchmarks {' '.join([name, *asked])}" if asked else f"make bench {name}"
        table = Table(name, command, machine(), head, tuple(found))
        print(f"\n{table}\n", flush=True)
        save(table)


if __name__ == "__main__":
    main()
