"""Whether the source is what was saved: CRCs of the runs that were read, joined to those of whole members."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from attrs import frozen

from ucpl.errors import Diagnostic, Label, UcplError
from ucpl.errors import catalogue as codes
from ucpl.runtime.buffers import U8
from ucpl.runtime.counters import Counters
from ucpl.runtime.reading import Fragments
from ucpl.runtime.rows import Place
from ucpl.runtime.sources import SourceFiles
from ucpl.stores.crc import combine_groups

__all__ = ["Member", "check_members", "members_of"]


@frozen
class Member:
    """A storage of the source that moves touch: a member of an archive, with the CRC that it states."""

    file: int  # index into the source files
    start: int
    size: int
    crc: int | None
    storage: str
    tensors: tuple[str, ...]


def members_of(places: Iterable[Place], files: SourceFiles) -> tuple[Member, ...]:
    """The storages of these tensors, by file and position."""
    found: dict[tuple[int, int], tuple[Place, list[str]]] = {}
    for place in places:
        extent = place.extent
        assert extent is not None
        entry = found.setdefault((files.index[extent.file], extent.storage_start), (place, []))
        if place.text not in entry[1]:
            entry[1].append(place.text)
    members = []
    for (file, start), (place, tensors) in sorted(found.items(), key=lambda item: item[0]):
        extent = place.extent
        assert extent is not None
        members.append(Member(file, start, extent.storage_bytes, extent.crc, extent.storage, tuple(tensors)))
    return tuple(members)


def check_members(
    members: Sequence[Member], read: Fragments, files: SourceFiles, counters: Counters, *, rest: bool, buffer: U8
) -> None:
    """Compare the CRC of each member that was read as a whole; with `rest`, read the others for it.

    Raises: UcplError E612, with every member that does not match.
    """
    starts = np.array([m.start for m in members], np.int64)
    file_of = np.array([m.file for m in members], np.int64)
    size_of = np.array([m.size for m in members], np.int64)
    file = np.frombuffer(read.file, np.uint32).astype(np.int64) if len(read) else np.zeros(0, np.int64)
    position = np.frombuffer(read.position, np.uint64).astype(np.int64) if len(read) else np.zeros(0, np.int64)
    size = np.frombuffer(read.size, np.uint64).astype(np.int64) if len(read) else np.zeros(0, np.int64)
    crc = np.frombuffer(read.crc, np.uint32).copy() if len(read) else np.zeros(0, np.uint32)
    order = np.lexsort((size, position, file))
    file, position, size, crc = file[order], position[order], size[order], crc[order]
    again = np.zeros(len(file), np.bool_)  # the same run, read twice
    again[1:] = (file[1:] == file[:-1]) & (position[1:] == position[:-1]) & (size[1:] == size[:-1])
    keep = ~again & (size > 0)
    file, position, size, crc = file[keep], position[keep], size[keep], crc[keep]
    # Runs that follow each other without a gap, from the start of a member to its end.
    whole: dict[int, int] = {}
    if len(file):
        base = int((position + size).max()) + 1 + (int(starts.max()) if len(starts) else 0)
        where = np.searchsorted(file_of * base + starts, file * base + position, "right") - 1
        follows = np.zeros(len(file), np.bool_)
        follows[1:] = (where[1:] == where[:-1]) & (position[1:] == position[:-1] + size[:-1])
        heads = np.flatnonzero(~follows)
        totals = np.add.reduceat(size, heads)
        joined = combine_groups(crc, size, heads)
        runs_in = np.bincount(np.maximum(where[heads], 0), minlength=len(members))
        for head, total, value in zip(heads.tolist(), totals.tolist(), joined.tolist(), strict=True):
            m = int(where[head])
            if m >= 0 and runs_in[m] == 1 and position[head] == starts[m] and total == size_of[m]:
                whole[m] = value
    wrong: list[Diagnostic] = []
    for i, member in enumerate(members):
        if member.size == 0:
            continue
        found = whole.get(i)
        if found is None and rest and member.crc is not None:
            found = _read_crc(member, files, counters, buffer)
        if found is None or member.crc is None:
            counters.source_bytes_unverified += member.size
            continue
        counters.source_bytes_checked += member.size
        if found != member.crc:
            name = files.files[member.file]
            shown = ", ".join(member.tensors[:5]) + (
                f" and {len(member.tensors) - 5} more" if len(member.tensors) > 5 else ""
            )
            wrong.append(
                Diagnostic(
                    "E612",
                    f"{name}: storage {member.storage} does not match its CRC; it holds {shown}",
                    (Label(name, f"CRC {member.crc:08x} stated, {found:08x} of the bytes", where=member.storage),),
                    remedy=codes()["E612"].remedy,
                )
            )
    if wrong:
        raise UcplError(*wrong)


def _read_crc(member: Member, files: SourceFiles, counters: Counters, buffer: U8) -> int:
    view, done, crc = buffer.data, 0, 0
    while done < member.size:
        part = view[: min(len(view), member.size - done)]
        files.read_into(member.file, member.start + done, [part], len(part))
        crc = zlib.crc32(part, crc)
        done += len(part)
    counters.add(read_verify=member.size)
    return crc
