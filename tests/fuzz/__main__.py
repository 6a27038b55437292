"""`python -m tests.fuzz --inputs 500000 --reader deepspeed --seed 7`: for long, one reader or all; exit 1 where one fails."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from attrs import evolve

from tests.fuzz.reader import Reader, Ready, run
from tests.fuzz.readers import READERS

# Most files of an input are removed with it: a folder in memory with room avoids waiting for a disk.
MEMORY, ROOM = Path("/dev/shm"), 1 << 30


def memory() -> Path | None:
    has_room = "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM
    return MEMORY if has_room else None


def prepared(reader: Reader, folder: Path) -> Ready:
    """Objects that exist before the first input are no garbage later on."""
    ready = reader.prepare(folder)
    gc.collect()
    gc.freeze()
    return ready


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=10_000, help="of each reader (default: %(default)s)")
    parser.add_argument("--reader", action="append", choices=[reader.name for reader in READERS], help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input, to repeat one")
    parser.add_argument("--failures", type=int, default=20, help="stop a reader after so many")
    given = parser.parse_args()
    gc.set_threshold(50_000, 20, 100)  # a fifth of the time went to looking for garbage among all that was imported
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = False
    for reader in READERS:
        if given.reader and reader.name not in given.reader:
            continue
        with tempfile.TemporaryDirectory(prefix="ucpl-fuzz-", dir=memory()) as folder:
            numbers = iter(range(given.first, given.first + given.inputs))
            ready = evolve(reader, prepare=partial(prepared, reader))
            outcome = run(ready, Path(folder), given.seed, numbers, given.failures, told=partial(print, flush=True))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(outcome.text(), f"  peak so far: {peak} MiB", sep="\n", flush=True)
        failed |= bool(outcome.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
