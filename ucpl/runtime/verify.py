"""Verification: all bytes of a checkpoint against zip CRCs and the manifest.

Bytes are read in a few threads within a budget. Not here: the meaning of values (replicas and masters are a plan's
`check` moves, which `compare` runs).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import field

from ucpl.digests import crc32
from ucpl.errors import Diagnostic, Label, UcplError
from ucpl.errors import catalogue as codes
from ucpl.extents import pieces_of
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import reading
from ucpl.files.zips import read_zip_directory
from ucpl.records import define, frozen
from ucpl.runtime.buffers import Budget, Workspace, share_of
from ucpl.runtime.disk import disk, read_upto
from ucpl.runtime.integrity import INTEGRITY, Sums
from ucpl.runtime.joined_crcs import combine
from ucpl.runtime.manifest import MANIFEST, Manifest, StatedFile, read_manifest
from ucpl.runtime.worker_pool import Queue, run_through
from ucpl.storage import reading as remote

__all__ = ["Verified", "verify_files"]

PART = 64 << 20  # bytes of a range that one thread reads at a time


@frozen
class Verified:
    """Findings of `verify_files`.

    Bytes are of the checkpoint's files; each is either protected or not.
    """

    findings: tuple[Diagnostic, ...]
    files: int
    bytes_read: int
    bytes_protected: int  # under a CRC, the manifest, or a sum of integrity.json
    bytes_unprotected: int
    bytes_live_max: int
    manifest: bool
    unprotected: dict[str, int] = field(factory=dict)  # file -> bytes that nothing vouches for
    bytes_left: int = 0  # with a digest, and not read in the given time

    def __bool__(self) -> bool:
        """True if nothing is wrong; unprotected bytes are not covered."""
        return not self.findings


@frozen
class _Span:
    """Run of one file with the digest that is stated for it."""

    file: str  # relative to `root`
    start: int
    size: int
    crc: int
    name: str  # the member or storage
    code: str  # of the finding; "": nothing is stated of this run alone
    tensors: tuple[str, ...] = ()


def verify_files(
    checkpoint: Checkpoint, *, memory: int = 512 << 20, workers: int = 2, seconds: float | None = None
) -> Verified:
    """Check every file that belongs to the checkpoint.

    seconds: the time for reading. Small members of each file are read first; `bytes_left` counts the rest.

    Damage is a finding (E630-E633, E635), not an error. Raises: UcplError E400 if the disk cannot list the files.
    """
    with reading(checkpoint.top):
        return _verified(checkpoint, memory, workers, seconds)


def _verified(checkpoint: Checkpoint, memory: int, workers: int, seconds: float | None) -> Verified:
    share = share_of(memory, workers)
    budget = Budget(memory)
    findings: list[Diagnostic] = []
    manifest, base = _manifest(checkpoint, findings)
    way = Path(os.path.relpath(checkpoint.root, base))
    archives = {(way / file).as_posix(): found for file, found in checkpoint.archives.items()}
    held = _held(checkpoint, base)
    listed = _Listed(base, manifest.files if manifest is not None else {}, held, archives, findings)
    names = {Path(os.path.relpath(checkpoint.root / file, base)).as_posix() for file in checkpoint.files}
    names |= _companion_files(checkpoint, base)
    for name in sorted(names | set(listed.stated)):
        listed.add(name)
    # Spans of one file in a row are one piece of work: the bytes are read once for all digests of a span's range.
    work_items = list(_by_range(listed.spans))
    until = None if seconds is None else time.monotonic() + seconds
    if until is not None:
        work_items = _in_turns(work_items)
    parts = [(i, low) for i, same in enumerate(work_items) for low in range(0, max(same[0].size, 1), PART)]
    queue = Queue(len(parts))
    lock = threading.Lock()
    bytes_read = 0
    read: dict[int, list[_Read]] = {}  # of each range, in any order
    seen: dict[str, list[tuple[int, int, int]]] = {}  # file -> (start, size, CRC) of the bytes read

    def work(stop: threading.Event) -> None:
        nonlocal bytes_read
        with Workspace(share, budget) as space:
            while not _is_over(stop, until) and (n := queue.take()) is not None:
                i, low = parts[n]
                span = work_items[i][0]
                found = _read(base, span, low, space, lambda: _is_over(stop, until))
                with lock:
                    bytes_read += found.size
                    seen.setdefault(span.file, []).append((span.start + low, found.size, found.crc))
                    read.setdefault(i, []).append(found)

    run_through(queue, work, workers)
    findings += (finding for i, some in read.items() for finding in _compared(base, work_items[i], some))
    findings += listed.whole_files(seen)
    sums = Sums.of(checkpoint.root)
    if until is None:
        sums.check(lambda: Workspace(share, budget), workers)
    findings += sums.findings
    for name in (*sums.stated, *([INTEGRITY] if sums.stated else [])):
        listed.unprotected.pop((way / name).as_posix(), None)
    findings.sort(key=lambda d: (d.labels[0].file, d.labels[0].where, d.code))
    total, bare = sum(listed.sizes.values()), sum(listed.unprotected.values())
    return Verified(
        tuple(findings), len(listed.sizes), bytes_read + sums.read, total - bare, bare, budget.live_max, manifest is not None,
        listed.unprotected, sum(same[0].size for same in work_items) - bytes_read,
    )  # fmt: skip


def _is_over(stop: threading.Event, until: float | None) -> bool:
    """True if another thread failed, or the time for reading is over."""
    return stop.is_set() or (until is not None and time.monotonic() >= until)


def _in_turns(ranges: list[list[_Span]]) -> list[list[_Span]]:
    """Ranges of all files in turn, the smallest of each file first."""
    turn: dict[str, int] = {}
    found = []
    for same in sorted(ranges, key=lambda same: same[0].size):
        number = turn[same[0].file] = turn.get(same[0].file, -1) + 1
        found.append((number, same))
    return [same for _, same in sorted(found, key=lambda one: one[0])]


@define(eq=False)
class _Listed:
    """Files of a checkpoint, their stated digests, and their unprotected bytes."""

    base: Path  # that names start from
    stated: dict[str, StatedFile]  # by the manifest
    held: dict[tuple[str, str], list[str]]  # (file, storage) -> its tensors
    archives: Mapping[str, Sequence[tuple[int, int]]]  # of files with several archives
    findings: list[Diagnostic]
    spans: list[_Span] = field(factory=list)
    sizes: dict[str, int] = field(factory=dict)
    whole: dict[str, int] = field(factory=dict)  # file -> its CRC in the manifest
    unprotected: dict[str, int] = field(factory=dict)

    def add(self, name: str) -> None:
        path = self.base / name
        try:
            self._add(name, path)
        except UcplError as error:
            self.findings.append(_finding("E633", path, str(error)))
        except OSError as error:
            self.findings.append(_finding("E633", path, f"{name} cannot be read: {error.strerror or error}"))
        except ValueError:  # its storages overlap
            self.findings.append(_finding("E632", self.base / MANIFEST, f"the manifest's entry of {name} is damaged"))

    def _add(self, name: str, path: Path) -> None:
        size = self.sizes[name] = path.stat().st_size
        entry = self.stated.get(name)
        if entry is not None and entry.size != size:
            what = f"{name} has {size} bytes, the manifest says {entry.size}"
            self.findings.append(_finding("E631", path, what))
            entry = None
        found = list(_members(self.base, name, self.held, self.archives.get(name)))
        if entry is None:
            bare = size - sum(s.size for s in found)
            if bare:
                self.unprotected[name] = bare
        else:
            found += [_Span(name, s.start, s.size, s.crc, key, "E631", (s.holds,)) for key, s in entry.storages.items()]
            found += _gaps(name, found, size)
            self.whole[name] = entry.crc
        self.spans += found

    def whole_files(self, seen: dict[str, list[tuple[int, int, int]]]) -> list[Diagnostic]:
        """Files with another CRC in the manifest than that of their bytes.

        All of their bytes were read.
        """
        found = []
        for name, stated in self.whole.items():
            parts = sorted(seen.get(name, ()))
            crc = combine([p[2] for p in parts], [p[1] for p in parts])
            if sum(p[1] for p in parts) == self.sizes[name] and crc != stated:
                message = f"{name} does not match the manifest: CRC {stated:08x} stated, {crc:08x} of the bytes"
                found.append(_finding("E631", self.base / name, message))
        return found


def _companion_files(checkpoint: Checkpoint, base: Path) -> set[str]:
    """Files of the folder around the shards."""
    container = checkpoint.container
    if container is None:
        return set()
    way = Path(os.path.relpath(container.top.resolve(), base.resolve()))
    return {(way / file.name).as_posix() for file in container.files}


def _held(checkpoint: Checkpoint, base: Path) -> dict[tuple[str, str], list[str]]:
    """The tensors of each storage, by (file, storage)."""
    held: dict[tuple[str, str], list[str]] = {}
    carried = (pieces_of(extent) for extent in checkpoint.carried_extents.values())
    for extent in (*checkpoint.extents.values(), *(one for some in carried for _, one in some)):
        name = Path(os.path.relpath(checkpoint.root / extent.file, base)).as_posix()
        held.setdefault((name, extent.storage), []).append("/".join(map(str, extent.key)))
    return held


def _manifest(checkpoint: Checkpoint, findings: list[Diagnostic]) -> tuple[Manifest | None, Path]:
    """The manifest of the user's folder, or of one above its root.

    Returns the folder that its paths start from, too.
    """
    for top in dict.fromkeys((checkpoint.top, checkpoint.root, checkpoint.root.parent)):
        try:
            manifest = read_manifest(top)
        except (OSError, ValueError) as error:
            findings.append(_finding("E632", top / MANIFEST, f"{MANIFEST} cannot be read: {error}"))
            return None, checkpoint.root
        if manifest is not None:
            return manifest, top
    return None, checkpoint.root


def _members(
    base: Path, name: str, held: dict[tuple[str, str], list[str]], archives: Sequence[tuple[int, int]] | None
) -> Iterator[_Span]:
    """Members with CRCs of a file that is a zip archive.

    `archives`: those that a file has one behind the other.
    """
    fd = disk().open(base / name, os.O_RDONLY)
    try:
        head = bytearray(4)
        if archives is None and (read_upto(fd, memoryview(head), 0) != 4 or head != b"PK\x03\x04"):
            return
        for start, size in ((0, None),) if archives is None else archives:
            for member in read_zip_directory(fd, name, start, size).members.values():
                storage = member.name.rpartition("/data/")[2]
                if member.crc is None:
                    continue
                called = member.name if archives is None else f"{start}:{member.name}"
                tensors = tuple(held.get((name, storage if archives is None else f"{start}:{storage}"), ()))
                # Values that are computed while they are read are compared with the trained ones there.
                yield _Span(
                    name, member.start, member.size, member.crc, called, "" if member.made else "E630", tensors=tensors
                )
    finally:
        disk().close(fd)


def _gaps(name: str, spans: list[_Span], size: int) -> list[_Span]:
    """Ranges between spans, read for the CRC of the complete file.

    Raises: ValueError if spans overlap or leave it.
    """
    gaps, at = [], 0
    for start, length in sorted({(s.start, s.size) for s in spans if s.size}):
        if start < at:
            raise ValueError("overlapping spans")
        if start > at:
            gaps.append(_Span(name, at, start - at, 0, "", ""))
        at = start + length
    if at > size:
        raise ValueError("a span leaves the file")
    if at < size:
        gaps.append(_Span(name, at, size - at, 0, "", ""))
    return gaps


def _by_range(spans: list[_Span]) -> Iterator[list[_Span]]:
    """Spans of one range of one file together, in order."""
    ordered = sorted(spans, key=lambda s: (s.file, s.start, s.size))
    group: list[_Span] = []
    for span in ordered:
        if group and (group[0].file, group[0].start, group[0].size) != (span.file, span.start, span.size):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


@frozen
class _Read:
    """Bytes of a range from `low` on, and their CRC."""

    low: int
    size: int
    crc: int
    error: Diagnostic | None = None


def _read(base: Path, span: _Span, low: int, space: Workspace, is_over: Callable[[], bool]) -> _Read:
    """Read a part of a range, as far as the time allows."""
    path = base / span.file
    step, end = space.share.tile, min(low + PART, span.size)
    crc, done = 0, low
    try:
        fd = disk().open(path, os.O_RDONLY)
    except OSError as error:
        what = f"{span.file} cannot be read: {error.strerror or error}"
        return _Read(low, 0, 0, _finding("E633", path, what))
    try:
        remote.want(fd, [(0, os.fstat(fd).st_size)])  # all of it, by many
        while done < end and not is_over():
            view = space.tile_view[: min(step, end - done)]
            got = disk().read(fd, [view], span.start + done)
            if not got:
                what = f"{span.file} ends at byte {span.start + done}"
                return _Read(low, done - low, crc, _finding("E633", path, what))
            crc = crc32(view[:got], crc)
            done += got
    except OSError as error:
        what = f"{span.file} cannot be read at byte {span.start + done}: {error.strerror}"
        return _Read(low, done - low, crc, _finding("E633", path, what))
    finally:
        disk().close(fd)
    return _Read(low, done - low, crc)


def _compared(base: Path, same: list[_Span], read: list[_Read]) -> list[Diagnostic]:
    """Compare all stated digests of a range with its parts.

    A range whose time is over has no finding.
    """
    first = same[0]
    path = base / first.file
    read.sort(key=lambda part: part.low)
    if (error := next((part.error for part in read if part.error is not None), None)) is not None:
        return [error]
    done = sum(part.size for part in read)
    crc = read[0].crc if len(read) == 1 else combine([part.crc for part in read], [part.size for part in read])
    found = []
    for span in same if done == first.size else ():
        if not span.code:
            continue
        if crc != span.crc:
            what = f"storage {span.name}" if span.name and span.code == "E631" else span.name
            holds = f"; it holds {', '.join(span.tensors[:5])}" if span.tensors else ""
            who = "its CRC" if span.code == "E630" else "the manifest"
            found.append(
                Diagnostic(
                    span.code,
                    f"{span.file}: {what} does not match {who}{holds}",
                    (Label(str(path), f"CRC {span.crc:08x} stated, {crc:08x} of the bytes", where=span.name),),
                    notes=(f"bytes {span.start} to {span.start + span.size} of the file",),
                    remedy=codes()[span.code].remedy,
                )
            )
    return found


def _finding(code: str, path: Path, message: str) -> Diagnostic:
    return Diagnostic(code, message, (Label(str(path)),), remedy=codes()[code].remedy)
