"""Vaults of small jobs with known bytes, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from ucpl.storage.vaults.snapshot_folder import SnapshotFile, SnapshotFolder, open_generation
from ucpl.vault import Vault, Writer
from ucpl.vault.files import ToSave, text_file
from ucpl.vault.server import Server


def content(step: int, rank: int, sizes: tuple[int, ...]) -> bytes:
    """The bytes of a rank's save, unique per rank and step."""
    mark = f"step {step} of rank {rank}; ".encode()
    return (mark * (sizes[rank % len(sizes)] // len(mark) + 1))[: sizes[rank % len(sizes)]]


def give(writer: Writer, files: Callable[[int], list[ToSave]]) -> None:
    """It saves these, whatever it is given."""

    def told(step: int, what: object, met: Exception | None) -> tuple[list[ToSave], None]:
        if met is not None:
            raise met
        return files(step), None

    writer._collect = told  # type: ignore[method-assign]


class Job:
    """Ranks, servers and their vault."""

    def __init__(self, home: Path, domains: int, protect: str, sizes: tuple[int, ...], each: int = 1) -> None:
        self.ends = ExitStack()
        self.sizes, self.ranks = sizes, domains * each
        self.vault = Vault.make(home, ranks=self.ranks, domains=domains, protect=protect)
        self.writers: list[Writer] = []
        self.servers: dict[int, Server] = {}
        self.start("first")
        for number in range(domains):
            self.serve(number)

    def start(self, run: str) -> None:
        """The job's processes, anew."""
        for writer in self.writers:
            writer.close()
        self.writers = [self.vault.writer(r, run=run, wait=0.0, strict=True) for r in range(self.ranks)]
        for writer in self.writers:
            give(writer, self._files(writer))

    def _files(self, writer: Writer):
        def files(step: int) -> list[ToSave]:
            return [text_file(f"rank-{writer.rank}", content(step, writer.rank, self.sizes))]

        return files

    def serve(self, number: int) -> None:
        self.stop(number)
        self.servers[number] = self.ends.enter_context(Server(self.vault.home, number))

    def stop(self, number: int) -> None:
        if number in self.servers:
            self.servers.pop(number)._ends.close()

    def save(self, step: int, ranks: range | None = None) -> None:
        for rank in ranks if ranks is not None else range(self.ranks):
            self.writers[rank].save(step, None)

    def turn(self) -> None:
        for _ in range(2):
            for server in self.servers.values():
                server.turn()

    def path(self, domain: int, name: str) -> Path:
        return self.vault.domain(domain).folder / name

    def read(self, lost: frozenset[int] = frozenset()) -> int:
        """The step that is read, complete and byte for byte.

        Raises: UcplError; AssertionError, if the bytes belong to no step.
        """
        return read(self.vault.home, self.ranks, self.sizes, lost)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.ends.close()


def weighing(home: Path, *saved: Tensor) -> Vault:
    """A vault of one rank with committed steps 10, 20, ...

    Each step saved a model with one `weight`.
    """
    vault = Vault.make(home, ranks=1, domains=1, protect="none")
    with vault.writer(0, run="first", wait=0.0, strict=True) as writer, Server(home, 0) as server:
        for number, weight in enumerate(saved, 1):
            assert writer.save(10 * number, {"model": {"weight": weight}})
            for _ in range(2):
                server.turn()
    return vault


def read(home: Path, ranks: int, sizes: tuple[int, ...], lost: frozenset[int] = frozenset()) -> int:
    memory = open_generation(home)
    memory.lost = lost
    try:
        step, parts = memory.commit.step, memory.commit.files()
        for rank in range(ranks):
            wanted = content(step, rank, sizes)
            assert parts[f"rank-{rank}"][0][1].size == len(wanted), f"rank {rank} at step {step}"
            room = bytearray(len(wanted))
            SnapshotFile(SnapshotFolder(memory, "vault:", Path()), "", parts[f"rank-{rank}"]).fill(memoryview(room), 0)
            assert bytes(room) == wanted, f"rank {rank} at step {step}"
        return step
    finally:
        memory.close()


@contextmanager
def job(
    home: Path, domains: int, protect: str, sizes: tuple[int, ...] = (5000, 70_001, 1), each: int = 1
) -> Iterator[Job]:
    made = Job(home, domains, protect, sizes, each)
    try:
        yield made
    finally:
        made.close()
