"""Measure a folder's disk and this machine, as a run uses them.

The measurement uses tiles of one MiB and as many threads as a run. Files are synced. Their pages are
dropped before they are read again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from ucpl.conversion.bandwidths import TILE, Bandwidths
from ucpl.errors import Label, fail

__all__ = ["measure"]

FILES = 4  # that are written and read at the same time
CALLS = 4096  # small reads, for the cost of one
SMALL = 16  # small files, for the cost of one
ROUNDS = 3


def measure(folder: Path, *, size: int, workers: int, say: Callable[[str], None]) -> Bandwidths:
    """Measure with `size` bytes in a temporary folder below `folder`.

    Raises: UcplError E179, E501.
    """
    size = max(FILES * TILE, size // (FILES * TILE) * FILES * TILE)
    try:
        room = os.statvfs(folder)
        if (free := room.f_bavail * room.f_frsize) < size:
            less = f"--size {max(1, free // 4 >> 20)}M would do"
            fail("E501", f"{size} bytes are to be written, {free} are free", Label(str(folder)), remedy=less)
        with tempfile.TemporaryDirectory(prefix=".ucpl-calibrate-", dir=folder) as name:
            return _measured(folder, Path(name), (size, workers), say)
    except OSError as error:
        fail("E179", f"{folder} cannot be measured: {error.strerror or error}", Label(str(folder)))


def _measured(folder: Path, top: Path, how: tuple[int, int], say: Callable[[str], None]) -> Bandwidths:
    """top: a folder of its own. how: bytes, threads. Raises: OSError."""
    size, workers = how
    paths = [top / str(n) for n in range(FILES)]
    # This is first: after a process has become large, the kernel reports that peak for its children, too.
    say("a run that moves next to nothing")
    runs = [_run(top / f"run{n}") for n in range(ROUNDS)]
    start, memory = median(seconds for seconds, _ in runs), max(peak for _, peak in runs)
    say(f"{size >> 20} MiB in {FILES} files, {workers} threads")
    rounds = [_disk(paths, size // FILES, workers) for _ in range(ROUNDS)]
    write, sync, read, reread = (size / median(column) for column in zip(*rounds, strict=True))
    call = _usual(lambda: _calls(paths[0], size // FILES)) / CALLS
    file = _usual(lambda: _small(top)) / SMALL
    copy, digest = _copied(), _digested(workers)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Bandwidths(
        str(folder.resolve()), when, workers, read, reread, write, sync, copy, digest, call, file, start, memory
    )


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _usual(work: Callable[[], object]) -> float:
    """Seconds of the median round.

    The median is the usual state of the machine, not its best one.
    """
    return max(median(_timed(work) for _ in range(ROUNDS)), 1e-9)


def _disk(paths: list[Path], size: int, workers: int) -> tuple[float, float, float, float]:
    """Seconds to write files of `size`, sync them and read them.

    The results are: written into memory, written until durable, read from the disk, read from memory.
    """
    data = memoryview(np.random.default_rng(0).integers(0, 256, TILE, dtype=np.uint8).tobytes())

    def write(path: Path) -> None:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
            for position in range(0, size, TILE):
                os.pwrite(handle, data, position)

    def sync(path: Path) -> None:
        with _opened(path, os.O_WRONLY) as handle:
            os.fsync(handle)

    def forget(path: Path) -> None:
        with _opened(path, os.O_RDONLY) as handle:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(path: Path) -> None:
        buffer = memoryview(bytearray(TILE))
        with _opened(path, os.O_RDONLY) as handle:
            for position in range(0, size, TILE):
                os.preadv(handle, [buffer], position)

    with ThreadPoolExecutor(workers) as pool:
        took = []
        for work in (write, sync, forget, read, read):
            took.append(_timed(lambda work=work: list(pool.map(work, paths))))  # type: ignore[misc]
    written, synced, _, cold, warm = took
    return written, written + synced, cold, warm


def _calls(path: Path, size: int) -> None:
    """Small reads all over a file that is in memory."""
    buffer = memoryview(bytearray(64))
    with _opened(path, os.O_RDONLY) as handle:
        for n in range(CALLS):
            os.preadv(handle, [buffer], n * 4099 * 64 % (size - 64))


def _small(top: Path) -> None:
    for n in range(SMALL):
        path = top / f"small{n}"
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
            os.pwrite(handle, b"\0" * 4096, 0)
            os.fsync(handle)
        os.unlink(path)


def _copied() -> float:
    here, there = np.ones(64 * TILE, dtype=np.uint8), np.empty(64 * TILE, dtype=np.uint8)
    return 64 * TILE / _usual(lambda: np.copyto(there, here))


def _digested(workers: int) -> float:
    import xxhash

    from ucpl.digests import crc32

    tile = bytes(TILE)

    def one(_: int) -> None:
        for _ in range(64):
            xxhash.xxh3_128_digest(tile)
            crc32(tile)

    with ThreadPoolExecutor(workers) as pool:
        return workers * 64 * TILE / _usual(lambda: list(pool.map(one, range(workers))))


def _run(target: Path) -> tuple[float, int]:
    """Seconds and peak memory of a small conversion in its own process.

    Its source is the checkpoint that ships.
    """
    import subprocess
    import sys

    from ucpl.resources import example_folder

    source = str(example_folder() / "checkpoint")
    command = [sys.executable, "-m", "ucpl", "convert", source, str(target), "--to", "zero1(dp=2)"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        fail("E183", f"{source} could not be converted: `ucpl demo` shows the reason")
    return time.perf_counter() - begin, used.ru_maxrss << 10
