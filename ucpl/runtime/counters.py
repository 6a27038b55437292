"""Costs of a run: bytes and seconds, frozen into a report."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import field

from ucpl.extents.account import Account
from ucpl.records import define, frozen

__all__ = ["Counters", "Report", "Unverified"]


@frozen
class Unverified:
    """Member of the source that was read in part, its CRC unchecked."""

    file: str
    storage: str
    size: int
    bytes_read: int  # of its bytes, for the moves
    tensors: tuple[str, ...]

    @property
    def share(self) -> float:
        """Of its bytes that were read."""
        return self.bytes_read / self.size

    def __str__(self) -> str:
        return f"storage {self.storage} of {self.file}: {self.share:.1%} of it was read"


@frozen
class Report:
    """Result of `execute`.

    All sizes are in bytes; `seconds` is wall time by phase, in the order of the phases.
    """

    target: str
    done_before: bool = False  # the target was finished by an earlier run: nothing was moved
    bytes_needed: int = 0  # that the moves ask for, checks of replicas included
    bytes_read: int = 0  # of the source, for the moves
    bytes_received: int = 0  # of the source, headers too, that ranks read for others, whose disks do not have them
    bytes_read_verify: int = 0  # of the source, for its CRCs and padding alone
    bytes_rebuilt: int = 0  # lost or damaged bytes of a vault that were computed from those of others
    bytes_written: int = 0
    bytes_cloned: int = 0  # of the target that are the source's own blocks, and were not written
    bytes_target: int = 0  # sum of the sizes of the target's files
    bytes_read_back: int = 0  # of the target, from the disk
    bytes_live_max: int = 0  # peak of all buffers together
    source_bytes_checked: int = 0  # of members of the source whose CRC was compared
    source_bytes_unverified: int = 0  # of members that were touched and whose CRC was not compared
    tiles: int = 0
    tiles_resumed: int = 0  # done by an earlier run, and not done again
    files: int = 0
    seconds: dict[str, float] = field(factory=dict)
    source_bytes_without_crc: int = 0  # of storages that were touched, in a format that states no CRC
    unverified: tuple[Unverified, ...] = ()  # the members that `source_bytes_unverified` counts
    remarks: tuple[str, ...] = ()  # oddities of the source that stop nothing
    account: Account | None = None  # of all that the source has, where its headers were read as it was planned

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.bytes_target} bytes in {self.files} files, {self.tiles} tiles"]
        if self.tiles_resumed:
            lines.append(f"  resumed    {self.tiles_resumed} tiles were done before")
        lines += [
            f"  read       {self.bytes_read} bytes, {self.bytes_needed} needed",
            f"  written    {self.bytes_written} bytes",
            f"  cloned     {self.bytes_cloned} bytes",
            f"  read back  {self.bytes_read_back} bytes",
            f"  source     {self.source_bytes_checked} bytes match their CRC, {self.source_bytes_unverified} unverified, "
            f"{self.source_bytes_without_crc} have none",
            f"  buffers    {self.bytes_live_max} bytes at most",
        ]
        lines += [f"  unverified {member}" for member in self.unverified]
        lines += [f"  remark     {text}" for text in self.remarks]
        if self.account is not None:
            lines += [f"  left       {entry}" for entry in self.account.of("dropped", "not read")]
            lines += [f"  account    {self.account}"]
        lines += [f"  {name:<10} {took:.3f} s" for name, took in self.seconds.items()]
        return "\n".join(lines)


@define
class Counters:
    """Running totals. Workers add under the lock, once a tile."""

    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_read_verify: int = 0
    bytes_rebuilt: int = 0
    bytes_written: int = 0
    bytes_cloned: int = 0
    bytes_read_back: int = 0
    source_bytes_checked: int = 0
    source_bytes_unverified: int = 0
    source_bytes_without_crc: int = 0
    tiles: int = 0
    tiles_resumed: int = 0
    seconds: dict[str, float] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def add(
        self,
        *,
        read: int = 0,
        written: int = 0,
        cloned: int = 0,
        read_back: int = 0,
        read_verify: int = 0,
        tiles: int = 0,
        digest: float = 0.0,
        beside: float = 0.0,
    ) -> None:
        """Add counts of one worker.

        digest, `beside`: its seconds in digests, and in reading back while others move.
        """
        with self._lock:
            self.bytes_read += read
            self.bytes_written += written
            self.bytes_cloned += cloned
            self.bytes_read_back += read_back
            self.bytes_read_verify += read_verify
            self.tiles += tiles
            for phase, took in (("digest", digest), ("read-back beside", beside)):
                if took:
                    self.seconds[phase] = self.seconds.get(phase, 0.0) + took

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Wall time of a phase.

        `digest` and `read-back beside` are separate: they are time of workers, which overlaps with `move`.
        """
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
