"""Compare a gigabyte in a vault and back with PyTorch's ways.

The ways are torch.save into memory, and DCP's async_save and load.
python -m benchmarks.vault [--rounds 7] [--folder /dev/shm]: prints a table and writes it into docs/PERFORMANCE.md. All of it
is in memory, so that no disk is timed, and is done in one job.
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
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import Table, machine, save

HERE = Path(__file__).resolve().parent
RANKS = 4
REPLAYS = 9
HEAD = ("1 GiB in f32, 4 ranks of gloo", "the vault", "torch.save, torch.load of each rank's", "DCP", "wanted")
SAYS = "serving"


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}


@contextmanager
def served(home: Path, *more: str) -> Iterator[None]:
    """A server for each domain, a rank in each."""
    command = [
        sys.executable,
        "-m",
        "ucpl",
        "vault",
        "serve",
        str(home),
        "--ranks",
        str(RANKS),
        "--domains",
        str(RANKS),
        *more,
    ]
    servers = [
        subprocess.Popen([*command, "--domain", str(d)], env=_environment(), stdout=subprocess.PIPE, text=True)
        for d in range(RANKS)
    ]
    try:
        for one in servers:
            assert one.stdout is not None
            if not one.stdout.readline().startswith(SAYS):
                sys.exit("a server did not start")
        yield
    finally:
        for one in servers:
            one.terminate()
        for one in servers:
            one.communicate()


def job(what: str, home: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Medians of all rounds but the first two, which use new slots."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(RANKS),
        str(HERE / "vault_job.py"),
    ]
    done = subprocess.run(
        [*command, what, str(home), str(folder), str(rounds + 2)],
        env=_environment(), capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    skipped = 0 if what == "replay" else 2  # which leaves them out
    return {way: statistics.median(taken[skipped:]) for way, taken in answer.items()}


def bench(rounds: int, folder: str) -> Iterator[tuple[str, ...]]:
    with tempfile.TemporaryDirectory(dir=folder) as top:
        home, files = Path(top, "job"), Path(top, "files")
        files.mkdir()
        with served(home):
            saved = job("save", home, files, rounds)
            time.sleep(1.0)
        with served(Path(top, "small")):
            trained = job("train", Path(top, "small"), files, 3 * rounds)
        with served(Path(top, "replayed"), "--replays", str(REPLAYS)):
            replayed = job("replay", Path(top, "replayed"), files, 4 * (REPLAYS + 1))
        loaded = job("load", home, files, rounds)
        shutil.rmtree(home / "d2")
        lost = job("load", home, files, rounds)

    def beside(found: float, ours: float) -> str:
        return f"{found:.2f} s, {found / ours:.1f} ×"

    ours = saved["vault"]
    yield (
        "saved: the job pauses", f"{ours:.3f} s", beside(saved["torch.save"], ours),
        beside(saved["async_save"], ours) + " (async_save)", "0.2 s; 8 × and 3 ×",
    )  # fmt: skip
    yield (
        "saved: until it counts", f"{saved['counts']:.2f} s", "", beside(saved["async"], saved["counts"]) + " (async_save)", "",
    )  # fmt: skip
    yield "the same: copying alone", f"{saved['copy']:.3f} s", "", "", ""
    step, ours = trained["step"], trained["vault"]

    def share(taken: float) -> str:
        return f"{taken / step:.1%} at each, {taken / step / 10:.2%} at each tenth"

    yield (
        f"of a step of a small GPT and AdamW, {trained['bytes'] / 1e6:.0f} MB, {step:.2f} s: the job pauses", share(ours),
        share(trained["torch.save"]), share(trained["async_save"]) + " (async_save)", "",
    )  # fmt: skip
    step = replayed["step"]
    yield (
        "the same of one that keeps gradients at nine saves of ten: complete, gradients alone",
        f"{replayed['whole'] / step:.1%}, {replayed['gradients'] / step:.1%}", "does not apply", "does not apply", "",
    )  # fmt: skip
    yield (
        f"and read back: complete, after 1 and {REPLAYS} steps of AdamW",
        f"{replayed['read 0']:.2f} s, {replayed['read 1']:.2f} and {replayed[f'read {REPLAYS}']:.2f} s", "does not apply",
        "does not apply", "",
    )  # fmt: skip
    for name, found, wanted in (("read back", loaded, "0.3 s"), ("the same, one domain of four lost", lost, "0.7 s")):
        ours = found["vault"]
        yield name, f"{ours:.2f} s", beside(found["torch.load"], ours), beside(found["dcp"], ours) + " (load)", wanted
    for name, found in (
        ("into another layout: by row → by column", loaded),
        ("the same, one domain of four lost", lost),
    ):
        ours = found["vault, another"]
        yield name, f"{ours:.2f} s", "does not apply", beside(found["dcp, another"], ours) + " (load)", "1.0 s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="that count; two more come before them")
    parser.add_argument("--folder", default="/dev/shm", help="in memory")
    given = parser.parse_args()
    rows = tuple(bench(given.rounds, given.folder))
    table = Table("vault", f"python -m benchmarks.vault --rounds {given.rounds}", machine(), HEAD, rows)
    print(table)
    save(table)


if __name__ == "__main__":
    main()
