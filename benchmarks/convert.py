"""Time conversions, `cp` and DeepSpeed's own converter on one checkpoint.

Every round runs every command once, so that a slow minute of the machine affects all. A row shows the time of each phase of
the process, as the process itself counted it. It compares the total with the time of a copy, and the move
and the disk with the speeds of memory and disk that were measured in the same rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import field

from benchmarks.children import finished
from ucpl.records import define, frozen

__all__ = [
    "CASES",
    "FORMS",
    "FORMS_HEAD",
    "HEAD",
    "Rounds",
    "Run",
    "bench_convert",
    "bench_forms",
    "checkpoint",
    "remove",
    "rows_of",
    "run",
    "warm",
]

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "checkpoint"
BESIDE = ("digest", "read-back beside")  # seconds of threads that run while others move

HEAD = (
    "case", "start", "plan", "move", "of it digests", "sync", "read-back", "during the move", "publish", "total (quartiles)",
    "peak", "read / needed", "/ copy", "/ copy and read again", "ds_to_universal /", "of memory's speed", "of the disk's speed",
)  # fmt: skip
FORMS_HEAD = tuple(name for name in HEAD if name != "ds_to_universal /")


@frozen
class Case:
    """A conversion of the checkpoint that the benchmark makes."""

    name: str
    to: str
    more: tuple[str, ...] = ()
    cold: bool = False  # the source is dropped from the cache before each run
    of: str = ""  # the form of the source; none: as DeepSpeed wrote it


CASES = (
    Case("ZeRO-1 dp 2 → dp 3", "zero1(dp=3)"),
    Case("the same, `--read-back none`", "zero1(dp=3)", ("--read-back", "none")),
    Case("the same, source cold", "zero1(dp=3)", cold=True),
    Case("the same, `--memory 64M`", "zero1(dp=3)", ("--memory", "64M")),
    Case("ZeRO-1 dp 2 → ZeRO-3 dp 3", "zero3(dp=3)"),
    Case("ZeRO-1 dp 2 → universal", "universal()"),
    Case("ZeRO-1 dp 2 → one plain file", "plain()"),
)

# Each form, from ZeRO-1 and back to other degrees. Ratios are to a copy of as many bytes as the target has.
DCP, CORE = "dcp(fsdp=4)", "megatron_core(tp=2)"
FORMS = (
    Case("ZeRO-1 dp 2 → DCP, FSDP2 over 4", DCP),
    Case("DCP, FSDP2 over 4 → over 6", "dcp(fsdp=6)", of=DCP),
    Case("DCP, FSDP2 over 4 → ZeRO-1 dp 3", "zero1(dp=3)", of=DCP),
    Case("ZeRO-1 dp 2 → Megatron-Core, tp 2", CORE),
    Case("Megatron-Core, tp 2 → tp 4", "megatron_core(tp=4)", of=CORE),
    Case("Megatron-Core, tp 2 → ZeRO-1 dp 3", "zero1(dp=3)", of=CORE),
    Case("universal → ZeRO-1 dp 3", "zero1(dp=3)", of="universal()"),
    Case("one plain file → ZeRO-1 dp 3", "zero1(dp=3)", of="plain()"),
    Case("ZeRO-1 dp 2 → ZeRO-0", "zero0(dp=2)"),
    Case("ZeRO-1 dp 2 → Hugging Face, weights alone", "safetensors()"),
    Case("Hugging Face → shards over 4", "safetensors_shards(fsdp=4)", of="safetensors()"),
)

# fsync of every file, then no page of them in the cache, then all of them from the disk.
AGAIN = """
import os, sys
buffer = bytearray(1 << 20)
for folder, _, files in os.walk(sys.argv[1]):
    for name in files:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        while os.readv(fd, [buffer]):
            pass
        os.close(fd)
"""


# Bytes a second that one core copies, from memory that no cache holds.
MEMORY = """
import time
import numpy as np
source, target = np.ones(1 << 28, np.uint8), np.ones(1 << 28, np.uint8)
begin = time.perf_counter()
target[:] = source
print(len(source) / (time.perf_counter() - begin))
"""

# Bytes a second that the disk takes until they are durable, and that it gives, in one stream.
DISK = """
import os, sys, time
data, count = os.urandom(1 << 20), 512
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
begin = time.perf_counter()
for _ in range(count):
    os.write(fd, data)
os.fsync(fd)
print((count << 20) / (time.perf_counter() - begin))
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
begin = time.perf_counter()
for i in range(count):
    os.pread(fd, 1 << 20, i << 20)
print((count << 20) / (time.perf_counter() - begin))
os.unlink(sys.argv[1])
"""


@frozen
class Run:
    """One process, from its start to its end."""

    wall: float
    mib: float  # at most resident
    report: Mapping[str, object]  # of ours; empty: another's

    @property
    def phases(self) -> dict[str, float]:
        found = self.report.get("seconds", {})
        return {name: float(took) for name, took in found.items()} if isinstance(found, dict) else {}

    @property
    def before(self) -> float:
        """Seconds outside the counted phases: start, planning, end of the process."""
        return self.wall - sum(took for name, took in self.phases.items() if name not in BESIDE)

    def bytes(self, name: str) -> int:
        found = self.report.get(name, 0)
        return found if isinstance(found, int) else 0


@define
class Rounds:
    """The measured runs, by command."""

    runs: dict[str, list[Run]] = field(factory=dict)
    memory: list[float] = field(factory=list)  # bytes a second
    disk: list[tuple[float, float]] = field(factory=list)  # bytes a second written and synced; read

    def median(self, name: str) -> float:
        return statistics.median(run.wall for run in self.runs[name])


def bench_convert(
    python: str, pairs: Sequence[int], sizes: Sequence[float], folder: str | None
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each case and size.

    python: one with DeepSpeed; sizes in GiB; folder: on the disk that is measured.
    """
    for i, gib in enumerate(sizes):
        with tempfile.TemporaryDirectory(prefix="ucpl-bench-", dir=folder) as made:
            top = Path(made)
            source = checkpoint(python, top, gib)
            found = _rounds(_theirs(python, source, top), {"": source}, top, pairs[min(i, len(pairs) - 1)], CASES)
            yield from rows_of(found, _size(source), CASES)


def bench_forms(
    python: str, pairs: Sequence[int], sizes: Sequence[float], folder: str | None
) -> Iterator[tuple[str, ...]]:
    """A row for each case of other forms, at the first size."""
    with tempfile.TemporaryDirectory(prefix="ucpl-bench-", dir=folder) as made:
        top = Path(made)
        sources = {"": checkpoint(python, top, sizes[0])}
        for form in dict.fromkeys(case.of for case in FORMS if case.of):
            sources[form] = top / f"source-{len(sources)}"
            run(_ours(sources[""], sources[form], Case(form, form)), json_told=True)
        found = _rounds(_copies(sources[""], top), sources, top, pairs[0], FORMS)
        peer = HEAD.index("ds_to_universal /")
        for row in rows_of(found, _size(sources[""]), FORMS):
            yield (*row[:peer], *row[peer + 1 :])


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def checkpoint(python: str, top: Path, gib: float) -> Path:
    layers = max(1, round((gib * 2**30 / 16 - 24.6e6) / 4.73e6))  # 12 bytes of state and 4 of weight a parameter
    launch = [python, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29655"]
    finished(
        [*launch, str(HERE / "make_checkpoint.py"), "1", str(top / "source"), str(layers)],
        {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    return top / "source"


def _copies(source: Path, top: Path) -> dict[str, list[str]]:
    out = top / "out"
    copy = f"cp -r --reflink=never {source} {out} && sync -f {out}"
    return {
        "copy": ["sh", "-c", copy],
        "again": ["sh", "-c", f"{copy} && {sys.executable} -c '{AGAIN}' {out}"],
        "start": _ours(EXAMPLE, out, CASES[0]),
    }


def _theirs(python: str, source: Path, top: Path) -> dict[str, list[str]]:
    """Copies, and DeepSpeed's own converter."""
    step = next(p for p in source.iterdir() if p.is_dir())
    theirs = [python, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    ask = [*theirs, "--input_folder", str(step), "--output_folder", str(top / "out")]
    return {**_copies(source, top), "ds_to_universal": ask}


def _rounds(
    others: Mapping[str, list[str]], sources: Mapping[str, Path], top: Path, pairs: int, cases: Sequence[Case]
) -> Rounds:
    """sources: by the form that they have."""
    out = top / "out"
    ours = {case.name: _ours(sources[case.of], out, case) for case in cases}
    named = {case.name: case for case in cases}
    found = Rounds()
    for i in range(pairs + 1):
        for name, command in {**others, **ours}.items():
            source = sources[named[name].of if name in named else ""]
            _forget(source) if name in named and named[name].cold else warm(source)
            done = run(command, json_told=name in ours or name == "start")
            if i:  # the first round fills the caches
                found.runs.setdefault(name, []).append(done)
            remove(out)
        found.memory += _speed(MEMORY)
        wrote, read = _speed(DISK, str(top / "speed"))
        found.disk.append((wrote, read))
    return found


def _ours(source: Path, out: Path, case: Case) -> list[str]:
    return [sys.executable, "-m", "ucpl", "convert", str(source), str(out), "--to", case.to, "--json", *case.more]


def run(command: Sequence[str], *, json_told: bool) -> Run:
    # Compiled modules are used, as everywhere but in a shell that forbids them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=error, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        for told in (out, error):
            told.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command[:6])} failed:\n{error.read()[-2000:]}")
        report = json.loads(out.read())["report"] if json_told else {}
    return Run(wall, used.ru_maxrss / 1024, report)


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def _forget(source: Path) -> None:
    for path in _files(source):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(source: Path) -> None:
    for path in _files(source):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def remove(out: Path) -> None:
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    os.sync()  # the next run does not pay for this one's unwritten pages


def _speed(program: str, *arguments: str) -> list[float]:
    """Measure in a new process, since children inherit this one's peak memory."""
    return [float(found) for found in finished([sys.executable, "-c", program, *arguments]).split()]


def rows_of(found: Rounds, size: int, cases: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """size: bytes of the checkpoint that is copied for comparison."""
    start = statistics.median(run.before for run in found.runs["start"])
    copy, again = (found.median(name) for name in ("copy", "again"))
    peer = found.median("ds_to_universal") if "ds_to_universal" in found.runs else 0.0
    memory = statistics.median(found.memory)
    wrote, read = (statistics.median(speeds) for speeds in zip(*found.disk, strict=True))
    for case in cases:
        runs = found.runs[case.name]
        phases = {name: statistics.median(run.phases.get(name, 0.0) for run in runs) for name in _names(runs)}
        walls = [run.wall for run in runs]
        whole, target = statistics.median(walls), runs[0].bytes("bytes_target")
        low, _, high = statistics.quantiles(walls, n=4, method="inclusive") if len(walls) > 1 else (whole, whole, whole)
        before = statistics.median(run.before for run in runs)
        least = target / wrote + runs[0].bytes("bytes_read_back") / read  # seconds that the disk needs
        moved = phases.get("move", 0.0)
        yield (
            f"{target / 1e9:.1f} GB, {case.name}",
            f"{start:.2f}",
            f"{max(0.0, before - start) + phases.get('plan', 0.0) + phases.get('create', 0.0):.2f}",
            f"{moved:.2f}",
            f"{phases.get('digest', 0.0):.2f}",
            f"{phases.get('fsync', 0.0) + phases.get('source', 0.0):.2f}",
            f"{phases.get('read-back', 0.0):.2f}",
            f"{phases.get('read-back beside', 0.0):.2f}",
            f"{phases.get('publish', 0.0):.2f}",
            f"{whole:.2f} ({low:.2f} to {high:.2f})",
            f"{max(run.mib for run in runs):.0f} MiB",
            f"{runs[0].bytes('bytes_read') / max(1, runs[0].bytes('bytes_needed')):.3f}",
            f"{whole / copy * size / target:.2f}",
            f"{whole / again * size / target:.2f}",
            f"{peer / whole:.1f}",
            f"{target / moved / memory:.2f}" if moved else "",
            f"{least / whole:.2f}",
        )
    for name, what in (("copy", "`cp -r`, `sync`"), ("again", "`cp -r`, `sync`, forgotten, read again")):
        yield _other(f"{size / 1e9:.1f} GB, {what}", found.runs[name], (copy, again, peer))
    if peer:
        yield _other(f"{size / 1e9:.1f} GB, `ds_to_universal`", found.runs["ds_to_universal"], (copy, again, peer))
    yield (
        f"a copy in memory {memory / 1e9:.1f} GB/s; disk {wrote / 1e9:.2f} GB/s written, {read / 1e9:.2f} GB/s read",
    ) + ("",) * (len(HEAD) - 1)


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.phases))


def _other(what: str, runs: Sequence[Run], beside: tuple[float, float, float]) -> tuple[str, ...]:
    walls = [run.wall for run in runs]
    whole = statistics.median(walls)
    low, _, high = statistics.quantiles(walls, n=4, method="inclusive") if len(walls) > 1 else (whole, whole, whole)
    copy, again, peer = beside
    return (
        what, *("",) * 8, f"{whole:.2f} ({low:.2f} to {high:.2f})", f"{max(run.mib for run in runs):.0f} MiB", "",
        f"{whole / copy:.2f}", f"{whole / again:.2f}", f"{peer / whole:.1f}", "", "",
    )  # fmt: skip
