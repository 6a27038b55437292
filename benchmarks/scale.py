"""Run every verb over huge checkpoints, for `make scale`.

The cases: 200,000 tiny tensors of equal sizes; as many of different sizes, planned alone; 5,000 files under
`ulimit -n 256`; one tensor of 2^33 elements; DeepSeek-V3's 45,395 tensors in 157 files, planned for two targets.

    python -m benchmarks.scale [--case tensors] [--kind zero1] [--verb infer] [--tensors N] [--files N] [--elements N]

The checkpoints are sparse (`benchmarks/sparse.py`); the target of a conversion is not, so that the target of the one
huge tensor
takes 16 GiB, and is taken away at once. Each verb is a process of its own. Prints one table in Markdown: wall seconds, seconds
of a core, peak resident memory. Ends 1 where a verb fails.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.sparse import MAKERS, Shapes, deepseek_v3, tensors_like, unlike
from ucpl.records import frozen

DESCRIPTORS = 256
SECONDS = 1800  # of one verb
TARGETS = {"huggingface": "plain()", "plain": "safetensors()", "zero1": "zero3(dp=3)", "zero3": "zero1(dp=3)"}
CASES = ("tensors", "files", "elements", "unlike", "deepseek")
VERBS = ("inspect", "infer", "show", "plan", "convert", "compare")


@frozen
class Case:
    """One checkpoint to make: a number of equal tensors in some files."""

    name: str
    kind: str
    shapes: Shapes
    files: int
    plans: tuple[str, ...] = ()  # targets of plans; no other verb runs then

    @property
    def writes(self) -> bool:
        """Return True if a target is written.

        A target of 2^33 elements with their states would take 96 GiB of a true disk.
        """
        return self.name != "elements" or self.kind == "huggingface"

    def __str__(self) -> str:
        shape = next(iter(self.shapes.values()))
        sizes = f"{list(shape)}" if len({*self.shapes.values()}) == 1 else "several sizes"
        return f"{self.kind}, {len(self.shapes):,} of {sizes}, {self.files:,} files"


def cases(tensors: int, files: int, elements: int) -> Iterator[Case]:
    for kind in MAKERS:
        yield Case("tensors", kind, tensors_like(tensors, (2, 2)), 1 if kind == "plain" else 8)
        if kind != "plain":  # which is one file
            count = files if kind == "huggingface" else 100  # a tensor for each shard; else all are cut over all ranks
            yield Case("files", kind, tensors_like(count, (files, 2)), files)
        yield Case(
            "elements", kind, tensors_like(1, (elements >> 16, 1 << 16)), 1 if kind in ("plain", "huggingface") else 2
        )
    yield Case("unlike", "huggingface", unlike(tensors), 8, ("dcp(fsdp=4)",))
    yield Case("deepseek", "huggingface", deepseek_v3(), 157, ("dcp(fsdp=64)", "zero3(dp=64)"))


def commands(case: Case, source: Path, target: Path) -> Iterator[tuple[str, list[str]]]:
    """Each verb with its arguments, in an order that can run."""
    if case.plans:
        yield from (("plan", ["plan", "--from", str(source), "--to", to]) for to in case.plans)
        return
    to = TARGETS[case.kind]
    yield "inspect", ["inspect", str(source)]
    yield "infer", ["infer", str(source)]
    yield "show", ["show", str(source)]
    yield "plan", ["plan", "--from", str(source), "--to", to]
    if case.writes:
        yield "convert", ["convert", str(source), str(target), "--to", to]
        yield "compare", ["compare", str(source), str(target)]


@frozen
class Cost:
    wall: float  # s
    core: float  # s
    peak: int  # KiB
    status: int
    said: str


def cost(arguments: list[str]) -> Cost:
    """Run one verb as a process with few descriptors.

    Its peak is its own.
    """
    with tempfile.TemporaryFile() as out:
        begin = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "ucpl", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=out,
            preexec_fn=_few_descriptors,
        )
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read().decode(errors="replace")
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss, child.returncode, said)


def _few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def one(case: Case, verbs: set[str], top: Path) -> bool:
    """Print the rows of one checkpoint. Return True if all verbs succeed."""
    source, target = top / "source", top / ("target.pt" if case.kind == "huggingface" else "target")
    MAKERS[case.kind](source, case.shapes, case.files)
    well = True
    try:
        for verb, arguments in commands(case, source, target):
            if verb not in verbs and not (verb == "convert" and "compare" in verbs):
                continue
            found = cost(arguments)
            shown = f"{verb} `{arguments[-1]}`" if case.plans else verb
            print(f"| {case} | {shown} | {found.wall:.1f} | {found.core:.1f} | {found.peak / 1024:.0f} |", flush=True)
            if found.status:
                print(f"\n{verb} ended {found.status}:\n{found.said[-2000:]}", flush=True)
                well = False
    finally:
        shutil.rmtree(top)
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--kind", action="append", choices=list(MAKERS))
    parser.add_argument("--verb", action="append", choices=VERBS)
    parser.add_argument("--tensors", type=int, default=200_000)
    parser.add_argument("--files", type=int, default=5_000)
    parser.add_argument("--elements", type=int, default=1 << 33)
    given = parser.parse_args()
    print("| checkpoint | verb | s | s of a core | peak MiB |\n|---|---|---|---|---|")
    well = True
    for case in cases(given.tensors, given.files, given.elements):
        if case.name in (given.case or CASES) and case.kind in (given.kind or MAKERS):
            top = Path(tempfile.mkdtemp(prefix="ucpl-scale-"))
            well = one(case, set(given.verb or VERBS), top) and well
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
