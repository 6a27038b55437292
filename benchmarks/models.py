"""Publish models of today's sizes: opening, plans, shares, the data path.

    python -m benchmarks.models [--gib 8] [--folder DISK]

The folders of Hugging Face have DeepSeek-V3's and Llama 405B's true headers, and holes in place of values
(`benchmarks/sparse.py`). No spec is given. Each verb is a process of its own: seconds of a core and peak memory. The data
path is estimated in two ways: the plan's bytes and runs by the rates that `ucpl calibrate` measures on the folder's disk;
and by the rate of a part of the model, which is converted. A part is tensors from the fourth layer on, with bytes of
their own, `--gib` in all: they are dropped from the page cache before, and the target is read back. Its time is that of
all phases but planning. The disk needs 4 times of `--gib`. Prints the table, keeps it in benchmarks/figures/ and writes
it into docs/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path

from benchmarks.children import finished
from benchmarks.figures import Table, machine, save
from benchmarks.scale import cost
from benchmarks.sparse import Shapes, deepseek_v3, huggingface, llama_405b

HEAD = (
    "model, target", "tensors", "files", "TB", "opened, s", "peak MiB", "planned, s", "peak MiB", "one rank's share, s",
    "peak MiB", "data path of one process, estimated by the disk's rates, minutes", "a part converted, GB",
    "its data path, s", "the command's core, s", "GB/s", "the full model, estimated by that rate, minutes",
)  # fmt: skip
PHASES = ("create", "move", "read-back", "source", "fsync", "publish")
MODELS: dict[str, tuple[Shapes, int]] = {"DeepSeek-V3": (deepseek_v3(), 157), "Llama 405B": (llama_405b(), 191)}
TARGETS = ("dcp(fsdp=64)", "zero3(dp=64)")
RANK = "31"


def part_of(shapes: Shapes, size: int) -> Shapes:
    """Tensors from the fourth layer on, of so many bytes."""
    found, names = {}, list(shapes)
    for name in names[next(i for i, name in enumerate(names) if name.startswith("model.layers.3.")) :]:
        if (size := size - 2 * prod(shapes[name])) < 0:
            break
        found[name] = shapes[name]
    return found


def fill(folder: Path) -> None:
    """Fill the holes with bytes, and drop them from the page cache."""
    block = random.Random(0).randbytes(32 << 20)
    for path in folder.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            start = file.seek(8 + int.from_bytes(file.read(8), "little"))
            for at in range(start, size, len(block)):
                file.write(block[: size - at])
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def converted(top: Path, shapes: Shapes, to: str) -> tuple[int, float, float]:
    """Bytes, seconds of the data path, seconds of a core."""
    source, target = top / "part", top / "target"
    huggingface(source, shapes, 1)
    try:
        fill(source)
        line = [sys.executable, "-m", "ucpl", "convert", str(source), str(target), "--to", to, "--json"]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)["report"]
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        core = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        return report["bytes_read"], sum(report["seconds"].get(phase, 0.0) for phase in PHASES), core
    finally:
        shutil.rmtree(source)
        shutil.rmtree(target, ignore_errors=True)


def rows(top: Path, size: int) -> Iterator[tuple[str, ...]]:
    rates = top / "bandwidths.json"
    ucpl = [sys.executable, "-m", "ucpl"]
    subprocess.run([*ucpl, "calibrate", str(top), "-o", str(rates)], check=True, stdout=subprocess.DEVNULL)
    for name, (shapes, files) in MODELS.items():
        source = top / name
        huggingface(source, shapes, files)
        for to in TARGETS:
            plan = ["plan", "--from", str(source), "--to", to]
            done = [cost(one) for one in (["inspect", str(source)], plan, [*plan, "--rank", RANK])]
            for one in done:
                if one.status:
                    raise SystemExit(one.said)
            found = json.loads(finished([*ucpl, *plan, "--bandwidths", str(rates), "--json"]))["cost"]
            figures = (text for one in done for text in (f"{one.core:.1f}", f"{one.peak / 1024:.0f}"))
            minutes = f"{found['estimate']['cold'] / 60:.0f}"
            read, taken, core = converted(top, part_of(shapes, size), to)
            yield (
                f"{name}, `{to}`", f"{len(shapes):,}", f"{files}", f"{found['read'] / 1e12:.2f}", *figures, minutes,
                f"{read / 1e9:.1f}", f"{taken:.0f}", f"{core:.1f}", f"{read / taken / 1e9:.2f}",
                f"{found['read'] / read * taken / 60:.0f}",
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gib", type=float, default=8, help="bytes of the part that is converted (default %(default)s)"
    )
    parser.add_argument("--folder", help="on the disk whose rates are measured")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="ucpl-models-", dir=given.folder) as top:
        for cells in rows(Path(top), int(given.gib * 2**30)):
            print(" | ".join(cells), flush=True)
            found.append(cells)
    save(Table("models", f"python -m benchmarks.models --gib {given.gib:g}", machine(), HEAD, tuple(found)))


if __name__ == "__main__":
    main()
