"""Publish models of today's sizes: open, plan, one rank's share.

    python -m benchmarks.models [--folder DISK]

The folders of Hugging Face have DeepSeek-V3's and Llama 405B's true headers, and holes in place of values
(`benchmarks/sparse.py`). No spec is given. Each verb is a process of its own: seconds of a core and peak memory. The data
path is an estimate: the plan's bytes and runs by the rates that `ucpl calibrate` measures on the folder's disk. Prints
the table, keeps it in benchmarks/figures/ and writes it into docs/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.children import finished
from benchmarks.figures import Table, machine, save
from benchmarks.scale import cost
from benchmarks.sparse import Shapes, deepseek_v3, huggingface, llama_405b

HEAD = (
    "model, target", "tensors", "files", "TB", "opened, s", "peak MiB", "planned, s", "peak MiB", "one rank's share, s",
    "peak MiB", "data path of one process, estimated, minutes",
)  # fmt: skip
MODELS: dict[str, tuple[Shapes, int]] = {"DeepSeek-V3": (deepseek_v3(), 157), "Llama 405B": (llama_405b(), 191)}
TARGETS = ("dcp(fsdp=64)", "zero3(dp=64)")
RANK = "31"


def rows(top: Path) -> Iterator[tuple[str, ...]]:
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
            yield f"{name}, `{to}`", f"{len(shapes):,}", f"{files}", f"{found['read'] / 1e12:.2f}", *figures, minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="on the disk whose rates are measured")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="ucpl-models-", dir=given.folder) as top:
        for cells in rows(Path(top)):
            print(" | ".join(cells), flush=True)
            found.append(cells)
    save(Table("models", "python -m benchmarks.models", machine(), HEAD, tuple(found)))


if __name__ == "__main__":
    main()
