"""Time other ways to write and read a file: O_DIRECT and io_uring.

io_uring needs `liburing`.

    python -m benchmarks.direct [--mib 512] [--rounds 5] [--where FOLDER] [--save]

Tiles of 1 MiB, one thread. Writes end with fdatasync; reads begin with nothing of the file in the page cache; small reads
(4 KiB, 32 KiB apart, as a transposed matrix asks for) are of a file that is in it. Rounds are interleaved; medians, and
with them the ratio to the runtime's way (the first of each kind) by the clock and in seconds of a core.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.figures import Table, machine, save

TILE = 1 << 20
DEPTH = 16  # requests of a ring that are on their way
RUN, STEP = 4096, 32768

Way = Callable[[Path, int, memoryview], None]


def write(path: Path, size: int, view: memoryview, flags: int = 0) -> None:
    fd = os.open(path, os.O_WRONLY | flags)
    for at in range(0, size, TILE):
        os.pwrite(fd, view, at)
    os.fdatasync(fd)
    os.close(fd)


def read(path: Path, size: int, view: memoryview, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    for at in range(0, size, TILE):
        os.preadv(fd, (view,), at)
    os.close(fd)


def small(path: Path, size: int, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    views = [view[at : at + RUN] for at in range(0, 128 * RUN, RUN)]
    at = 0
    for _ in range(size // STEP // len(views)):
        for part in views:
            os.preadv(fd, (part,), at)
            at += STEP
    os.close(fd)


def ring_write(path: Path, size: int, view: memoryview, flags: int = 0) -> None:
    fd = os.open(path, os.O_WRONLY | flags)
    ring(((fd, view, at) for at in range(0, size, TILE)), "io_uring_prep_writev")
    os.fdatasync(fd)
    os.close(fd)


def ring_read(path: Path, size: int, view: memoryview, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    ring(((fd, view, at) for at in range(0, size, TILE)), "io_uring_prep_readv")
    os.close(fd)


def ring_small(path: Path, size: int, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    parts = [memoryview(bytearray(RUN)) for _ in range(128)]
    ring(((fd, parts[i % 128], i * STEP) for i in range(size // STEP)), "io_uring_prep_readv", 128)
    os.close(fd)


def ring(requests: Iterator[tuple[int, memoryview, int]], call: str, depth: int = DEPTH) -> None:
    """Fill the ring with requests.

    Submit the next when all of them are done.
    """
    import liburing as u

    prepare, vectors = getattr(u, call), {}
    some, done = u.Ring(), u.Cqe()
    u.io_uring_queue_init(depth, some, 0)
    left = True
    while left:
        count = 0
        while count < depth and (request := next(requests, None)) is not None:
            fd, view, at = request
            if id(view) not in vectors:
                vectors[id(view)] = u.Iovec([view])
            vector = vectors[id(view)]
            prepare(u.io_uring_get_sqe(some), fd, vector, at)
            count += 1
        left = count == depth
        if count:
            u.io_uring_submit_and_wait(some, count)
        for _ in range(count):
            u.io_uring_wait_cqe(some, done)
            demand(done[0].res)
            u.io_uring_cq_advance(some, 1)
    u.io_uring_queue_exit(some)


def demand(result: int) -> None:
    if result not in (TILE, RUN):
        raise SystemExit(f"a request ended with {result}")


def direct(way: Callable[..., None]) -> Way:
    return lambda path, size, view: way(path, size, view, os.O_DIRECT)


WRITES: dict[str, Way] = {"write": write, "write, O_DIRECT": direct(write)}
READS: dict[str, Way] = {"read from the disk": read, "read, O_DIRECT": direct(read)}
SMALL: dict[str, Way] = {"4 KiB, every 32 KiB": small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--where", default=".")
    parser.add_argument("--save", action="store_true", help="keep the table, and write it into docs/PERFORMANCE.md")
    given = parser.parse_args()
    try:
        import liburing  # noqa: F401

        WRITES.update({"write, io_uring": ring_write, "write, io_uring and O_DIRECT": direct(ring_write)})
        READS.update({"read, io_uring": ring_read, "read, io_uring and O_DIRECT": direct(ring_read)})
        SMALL.update({"the same, io_uring, 128 at once": ring_small})
    except ImportError:
        print("liburing is not installed: io_uring is left out\n")
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(dir=given.where) as folder:
        path, size = Path(folder) / "file", given.mib << 20
        for ways, cold in ((WRITES, True), (READS, True), (SMALL, False)):
            rows += table(ways, (path, size), given.rounds, cold=cold)
    head = ("case", "seconds", "of a core", "to the first", "of a core")
    made = Table(
        "direct", f"python -m benchmarks.direct --mib {given.mib} --rounds {given.rounds}", machine(), head, tuple(rows)
    )
    print(made)
    if given.save:
        save(made)


def table(ways: dict[str, Way], file: tuple[Path, int], rounds: int, *, cold: bool) -> Iterator[tuple[str, ...]]:
    view = memoryview(mmap.mmap(-1, TILE))
    view[:] = os.urandom(TILE)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            prepare(*file, cold=cold, new=ways is WRITES)
            begin, core = time.perf_counter(), time.process_time()
            way(*file, view)
            found[name].append((time.perf_counter() - begin, time.process_time() - core))
    first: tuple[float, float] | None = None
    for name, costs in found.items():
        wall, core = (statistics.median(x) for x in zip(*costs, strict=True))
        first = first or (wall, core)
        yield name, f"{wall:.2f}", f"{core:.2f}", f"{wall / first[0]:.2f} x", f"{core / first[1]:.2f} x"


def prepare(path: Path, size: int, *, cold: bool, new: bool) -> None:
    """Write a file of its final size, durable, cached or not."""
    if new:
        path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    if new:
        os.posix_fallocate(fd, 0, size)
    os.fsync(fd)
    if cold:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        for at in range(0, size, TILE):
            os.pread(fd, TILE, at)
    os.close(fd)


if __name__ == "__main__":
    main()
