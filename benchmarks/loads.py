"""Compare `load_into` and `StorageReader` with the frameworks' own loaders.

python -m benchmarks.loads [--mb 1200] [--rounds 5] [--ranks 1 2 4] [--folder DISK]: prints a table and writes it into
docs/performance/. A Llama in f32 with AdamW; `--mb` is the size of its weights and moments. It needs an environment with
DeepSpeed and transformers (UCPL_INTEROP_PYTHON names its python), into which nothing is installed: loaders that nothing
else needs come into a temporary folder, by pip.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.children import finished
from benchmarks.convert import warm
from benchmarks.figures import Table, machine, save

MB, RANKS = 1200.0, (1, 2, 4)
HERE = Path(__file__).resolve().parent
HEAD = (
    "ranks", "into", "way", "loaded, s", "/ the first way", "to the first step, s", "the first call, s", "of a core, s",
    "read / needed", "more memory, MiB",
)  # fmt: skip
LOADERS = ("fastsafetensors==0.5.0", "runai-model-streamer==0.17.1", "humanize==4.17.0")
LAYER, AROUND = 7_079_424 + 2 * 768, 2 * 8192 * 768 + 768  # elements
INTO = {
    "fsdp2": "FSDP2 and a new AdamW",
    "fsdp2, states at hand": "FSDP2 and an AdamW with states",
    "engine": "DeepSpeed's engine, ZeRO-1",
    "engine, universal": "the same, from the universal folder",
    "weights": "a model without an optimizer",
}
Found = Mapping[str, Sequence[Mapping[str, float]]]


def launch(python: str, ranks: int, *arguments: str, loaders: Path | None = None) -> str:
    """The output of a job of ranks."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = os.pathsep.join(map(str, filter(None, (HERE.parent, loaders))))
    # Compiled modules are used, as everywhere but in a shell that forbids them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    return finished([*command, str(HERE / "loads_job.py"), *arguments], environment)


def sources(python: str, top: Path, layers: int, ranks: Sequence[int]) -> None:
    """The same state as DCP of four ranks, ZeRO-1, universal and safetensors."""
    launch(python, 4, "make", str(top), str(layers))
    calls = {f"zero1-{n}": f"zero1(dp={n})" for n in sorted({*ranks, 4})} | {
        "universal": "universal()",
        "hf": "safetensors()",
    }
    for name, call in calls.items():
        made = top / f"{name}.made"
        finished([python, "-m", "ucpl", "convert", str(top / "dcp"), str(made), "--to", call], dict(os.environ))
        for path in made.iterdir() if (top / name).exists() else ():
            path.rename(top / name / path.name)
        made.rmdir() if (top / name).exists() else made.rename(top / name)


def loaders(python: str, folder: Path) -> Path:
    """Loaders that nothing else needs."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *LOADERS]
    finished(command, dict(os.environ))
    return folder


def bench(python: str, mb: float, rounds: int, ranks: Sequence[int], folder: str | None) -> Iterator[tuple[str, ...]]:
    layers = max(1, round((mb * 1e6 / 12 - AROUND) / LAYER))
    with tempfile.TemporaryDirectory(prefix="ucpl-bench-", dir=folder) as made:
        top = Path(made)
        sources(python, top, layers, ranks)
        more = loaders(python, top / "loaders")
        warm(top)
        for n in ranks:
            out = launch(python, n, "time", str(top), str(layers), str(rounds + 1), loaders=more)
            found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
            yield from rows(n, found, 4 * (AROUND + layers * LAYER))


def rows(ranks: int, found: Found, weights: int) -> Iterator[tuple[str, ...]]:
    """weights: bytes of all parameters."""
    first: dict[str, float] = {}
    for name, every in found.items():
        kind, _, way = name.partition(": ")
        median = {key: statistics.median(one[key] for one in every[1:]) for key in every[0]}
        peer = first.setdefault(kind.removesuffix(", universal"), median["loaded"])
        needed = weights * (ranks if kind == "weights" else 3)
        yield (
            str(ranks),
            INTO[kind],
            way,
            f"{median['loaded']:.2f}",
            f"{median['loaded'] / peer:.2f}",
            f"{every[-1]['step']:.2f}",
            f"{every[0]['loaded']:.2f}",
            f"{median['core']:.2f}",
            f"{median['read'] / needed:.2f}",
            f"{median['peak'] / 2**20:.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=MB, help="of weights and moments")
    parser.add_argument("--rounds", type=int, default=5, help="of each way in turn; one more comes before them")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--folder", help="where the checkpoints are made; they are read from the page cache")
    parser.add_argument("--table", default="loads", help="the name of the table that is written")
    given = parser.parse_args()
    python = os.environ.get("UCPL_INTEROP_PYTHON", str(HERE.parent / ".venv-interop" / "bin" / "python"))
    found = []
    for row in bench(python, given.mb, given.rounds, given.ranks, given.folder):
        print(" | ".join(row), flush=True)
        found.append(row)
    asked = " ".join(sys.argv[1:])
    table = Table(given.table, f"python -m benchmarks.loads {asked}".rstrip(), machine(), HEAD, tuple(found))
    print(f"\n{table}")
    save(table)


if __name__ == "__main__":
    main()
