"""Checks of the source: members against their CRCs, padding against zero.

CRCs of the runs that were read are combined. The rest of a member (padding, nearly always) is read for its CRC if the
rests of all members are small next to the bytes that were moved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.errors import Diagnostic, Label, UcplError
from ucpl.errors import catalogue as codes
from ucpl.extents import key_text
from ucpl.files.checkpoint import Checkpoint
from ucpl.planning.binding import Bound
from ucpl.planning.plan import Plan
from ucpl.records import frozen
from ucpl.runtime.buffers import U8, Budget, Workspace, share_of
from ucpl.runtime.counters import Counters, Unverified
from ucpl.runtime.joined_crcs import overlay
from ucpl.runtime.padding import Blank, blanks_of
from ucpl.runtime.reading import Fragments
from ucpl.runtime.rows import Place, bind_rows, fit
from ucpl.runtime.sources import SourceFiles
from ucpl.runtime.values import decode, value_text
from ucpl.tables import I64, each, within

__all__ = [
    "Inspection",
    "TouchedMember",
    "allowance",
    "check_blanks",
    "check_members",
    "check_padding",
    "damage_in",
    "damage_of",
    "members_of",
]

U32 = NDArray[np.uint32]

REST_SHARE = 50  # rests of members are read completely if they are at most 1/50 of the bytes that moves read
CELLS_BYTES = 1 << 16  # of padding that are looked at together
REST_MIN = 1 << 20  # and always up to this: below, reading costs less than saying that it was not done


@frozen
class TouchedMember:
    """Storage of the source that moves touch, with its stated CRC."""

    file: int  # index into the source files
    start: int
    size: int
    crc: int | None
    storage: str
    tensors: tuple[str, ...]

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def holds(self) -> str:
        more = f" and {len(self.tensors) - 5} more" if len(self.tensors) > 5 else ""
        return ", ".join(self.tensors[:5]) + more


@frozen(eq=False)
class Inspection:
    """Tools of a check of the source.

    Its files, one buffer, the counters, and the bytes that may be read again.
    """

    files: SourceFiles
    buffer: U8
    counters: Counters
    bytes_max: int | None = None  # None: as many as there are
    look: Callable[[], None] = lambda: None  # called now and then


def allowance(moved: int, *, everything: bool) -> int | None:
    """Bytes that may be read for checks alone, besides `moved` bytes."""
    return None if everything else max(REST_MIN, moved // REST_SHARE)


def members_of(places: Iterable[Place], files: SourceFiles) -> tuple[TouchedMember, ...]:
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
        crc = None if extent.made else extent.crc
        members.append(TouchedMember(file, start, extent.storage_bytes, crc, extent.storage, tuple(tensors)))
    return tuple(members)


# ---- members against their CRCs ------------------------------------------------------------------------------------


@frozen(eq=False)
class _Runs:
    """Disjoint fragments of one member, and the gaps between them.

    Gaps are [start, stop) in the file.
    """

    position: I64
    span: I64
    crc: U32
    start: I64
    stop: I64

    @property
    def open_bytes(self) -> int:
        return int((self.stop - self.start).sum())


def check_members(members: Sequence[TouchedMember], read: Fragments, how: Inspection) -> tuple[Unverified, ...]:
    """Compare the CRC of each member, reading its rest, smallest rests first.

    Returns the members that were left out. Raises: UcplError E612, with every member that does not match.
    """
    how.counters.source_bytes_without_crc += sum(m.size for m in members if m.crc is None)
    members = [m for m in members if m.size and m.crc is not None]
    parts = _by_member(members, read)
    covers = [p if isinstance(p, int) else _cover(m, p) for m, p in zip(members, parts, strict=True)]
    rests = [0 if isinstance(cover, int) else cover.open_bytes for cover in covers]
    order = sorted(range(len(members)), key=rests.__getitem__)
    left = how.bytes_max
    wrong: list[tuple[int, Diagnostic]] = []
    unverified: list[tuple[int, Unverified]] = []
    for i in order:
        member, cover = members[i], covers[i]
        rest = rests[i]
        if left is not None and rest > left:
            how.counters.source_bytes_unverified += member.size
            name = how.files.files[member.file]
            unverified.append((i, Unverified(name, member.storage, member.size, member.size - rest, member.tensors)))
            continue
        left = None if left is None else left - rest
        found = cover if isinstance(cover, int) else _crc_of(member, cover, how)
        how.counters.source_bytes_checked += member.size
        if found != member.crc:
            wrong.append((i, _damaged(member, found, how.files)))
    if wrong:
        raise UcplError(*(d for _, d in sorted(wrong, key=lambda item: item[0])))
    return tuple(u for _, u in sorted(unverified, key=lambda item: item[0]))


def damage_of(members: Sequence[TouchedMember], how: Inspection) -> tuple[Diagnostic, ...]:
    """Members whose bytes do not match their CRC; each is read completely."""
    none = np.zeros(0, np.int64)
    found = []
    for member in members:
        if member.size and member.crc is not None:
            whole = _Runs(none, none, none.astype(np.uint32), np.array([member.start]), np.array([member.stop]))
            crc = _crc_of(member, whole, how)
            if crc != member.crc:
                found.append(_damaged(member, crc, how.files))
    return tuple(found)


def _damaged(member: TouchedMember, found: int, files: SourceFiles) -> Diagnostic:
    name = files.files[member.file]
    return Diagnostic(
        "E612",
        f"{name}: storage {member.storage} does not match its CRC; it holds {member.holds}",
        (Label(name, f"CRC {member.crc or 0:08x} stated, {found:08x} of the bytes", where=member.storage),),
        remedy=codes()["E612"].remedy,
    )


def _by_member(members: Sequence[TouchedMember], read: Fragments) -> list[int | tuple[I64, U32]]:
    """Fragments of each member, sorted, each once, and their CRCs.

    The columns are position, size, count and step. Of a member that is one run, its CRC alone.
    """
    of = [np.array(c, np.int64) for c in (read.file, read.position, read.size, read.count, read.step)]
    order = np.lexsort(of[::-1])
    file, position, size, count, step = of = [c[order] for c in of]
    new = np.ones(len(file), np.bool_)  # the same run may be read twice
    new[1:] = np.any([c[1:] != c[:-1] for c in of], axis=0)
    new &= size > 0
    file, position, size, count, step = (c[new] for c in of)
    crc = np.array(read.crc, np.uint32)[order][new]
    stop = position + size + (count - 1) * step
    if not members:
        return []
    of_file, start, end = (
        np.array(c, np.int64) for c in zip(*((m.file, m.start, m.stop) for m in members), strict=True)
    )
    first, last, top = (np.zeros(len(members), np.int64) for _ in range(3))
    for n in each(of_file):
        mine, (a, b) = of_file == n, np.searchsorted(file, (n, n + 1))
        here = position[a:b]
        first[mine], last[mine] = a + np.searchsorted(here, start[mine]), a + np.searchsorted(here, end[mine])
        top[mine] = a + np.searchsorted(here, start[mine], "right") - 1  # of those that begin there, the longest
    whole = top >= first
    whole[whole] = (size[top[whole]] == (end - start)[whole]) & (count[top[whole]] == 1)
    known = np.zeros(len(members), np.uint32)
    known[whole] = crc[top[whole]]
    found: list[int | tuple[I64, U32]] = []
    for m, is_whole, told, a, b in zip(
        members, whole.tolist(), known.tolist(), first.tolist(), last.tolist(), strict=True
    ):
        if is_whole:
            found.append(told)
            continue
        inside = np.flatnonzero(stop[a:b] <= m.stop) + a
        found.append((np.stack([c[inside] for c in (position, size, count, step)], axis=1), crc[inside]))
    return found


def _cover(member: TouchedMember, part: tuple[I64, U32]) -> _Runs:
    table, crc = part
    start, stop = _spread(table)
    if (start[1:] < stop[:-1]).any():
        keep = _disjoint(table)
        table, crc = table[keep], crc[keep]
        start, stop = _spread(table)
    begin, end = np.append(member.start, stop), np.append(start, member.stop)
    open_ = np.flatnonzero(end > begin)
    position, size, count, step = table.T
    return _Runs(position, size + (count - 1) * step, crc, begin[open_], end[open_])


def _spread(table: I64) -> tuple[I64, I64]:
    """Every run of these fragments: (starts, stops), in order."""
    position, size, count, step = table.T
    start = np.repeat(position, count) + within(count) * np.repeat(step, count)
    stop = start + np.repeat(size, count)
    order = np.argsort(start, kind="stable")
    return start[order], stop[order]


def _disjoint(table: I64) -> list[int]:
    """Disjoint fragments of one run each, with the most bytes in total.

    This is weighted interval scheduling.
    """
    solid = np.flatnonzero(table[:, 2] == 1)
    stop = table[solid, 0] + table[solid, 1]
    solid = solid[np.argsort(stop, kind="stable")]
    starts, sizes = table[solid, 0].tolist(), table[solid, 1].tolist()
    stops = [a + n for a, n in zip(starts, sizes, strict=True)]
    best = [0]  # of the first i
    before = []
    for i, (a, n) in enumerate(zip(starts, sizes, strict=True)):
        before.append(bisect_right(stops, a, 0, i))
        best.append(max(best[i], best[before[i]] + n))
    chosen, i = [], len(starts)
    while i:
        if best[i] == best[i - 1]:
            i -= 1
        else:
            chosen.append(int(solid[i - 1]))
            i = before[i - 1]
    return chosen[::-1]


def _crc_of(member: TouchedMember, cover: _Runs, how: Inspection) -> int:
    """CRC of a member from its fragments and the gaps, read now."""
    crcs, spans, positions = [cover.crc], [cover.span], [cover.position]
    rest = []
    for begin, end in zip(cover.start.tolist(), cover.stop.tolist(), strict=True):
        rest.append(_read_crc(member.file, begin, end, how))
    crcs.append(np.array(rest, np.uint32))
    spans.append(cover.stop - cover.start)
    positions.append(cover.start)
    span = np.concatenate(spans)
    return overlay(np.concatenate(crcs), span, member.stop - np.concatenate(positions) - span, member.size)


def _read_crc(file: int, begin: int, end: int, how: Inspection) -> int:
    view, crc = how.buffer.data, 0
    for at in range(begin, end, len(view)):
        part = view[: min(len(view), end - at)]
        how.look()
        how.files.read_into(file, at, [part], len(part))
        crc = crc32(part, crc)
    how.counters.add(read_verify=end - begin)
    return crc


# ---- padding against zero ------------------------------------------------------------------------------------------


@frozen
class _Odd:
    """Padding of one tensor that is not zero.

    It has the first such element; a flag is set if all of the padding is the same.
    """

    position: int
    value: bytes
    same: bool


def check_blanks(blanks: Sequence[Blank], how: Inspection, code: str) -> tuple[tuple[Diagnostic, ...], tuple[str, ...]]:
    """Padding that must be zero and is not: (findings, remarks).

    A state of the optimizer may begin at another number than zero (Adagrad's sum, Rprop's step size), and padding keeps
    it: where the padding of every tensor of a state is one such number, that is a remark. Masters and weights have no such
    beginning.
    """
    left = how.bytes_max
    unread = 0
    seen: dict[str, list[tuple[Blank, _Odd | None]]] = {}
    for blank in blanks:
        if left is not None and blank.size > left:
            unread += blank.size
            continue
        left = None if left is None else left - blank.size
        seen.setdefault(blank.state, []).append((blank, _odd_of(blank, how)))
    findings: list[Diagnostic] = []
    remarks: list[str] = []
    for state, found in seen.items():
        odd = [(blank, one) for blank, one in found if one is not None]
        if state not in ("weight", "fp32") and len(odd) == len(found) and all(one.same for _, one in odd):
            remarks += [_begun(blank, one) for blank, one in odd]
        else:
            findings += [_not_zero(blank, one, code) for blank, one in odd]
    if unread:
        remarks.append(f"{unread:,} bytes of padding were not read (--verify-source reads them)")
    return tuple(findings), tuple(remarks)


def _begun(blank: Blank, odd: _Odd) -> str:
    place = blank.place
    value = value_text(odd.value, place.dtype)
    return (
        f"padding of {place.text} in {place.file} is {value} throughout, as the optimizer began; the target's is zero"
    )


def _not_zero(blank: Blank, odd: _Odd, code: str) -> Diagnostic:
    place = blank.place
    index = place.index_text(odd.position)
    return Diagnostic(
        code,
        f"{place.file}: padding of {place.text} is not zero, at element {index} of storage {blank.storage}",
        (Label(place.file, value_text(odd.value, place.dtype), where=f"{key_text(place.key)}{index}"),),
        remedy=codes()[code].remedy,
    )


def check_padding(plan: Plan, checkpoint: Checkpoint, *, memory: int = 512 << 20) -> tuple[Diagnostic, ...]:
    """Find nonzero bytes in zero padding: findings E634.

    The plan reads all of the checkpoint. Raises: UcplError E600, E601, E610.
    """
    places = fit(plan.sources, checkpoint.extents)
    rows = bind_rows(Bound.of(plan), places, tuple(map(Place.of, plan.targets)))
    files = SourceFiles(checkpoint.root, (p.file for p in places), checkpoint.opened)
    try:
        with Workspace(share_of(memory, 1), Budget(memory)) as space:
            how = Inspection(files, space.tile, Counters())
            return check_blanks(blanks_of(plan.sources, places, rows, files), how, "E634")[0]
    finally:
        files.close()


def damage_in(checkpoint: Checkpoint, named: Container[tuple[str, str]], *, memory: int) -> tuple[Diagnostic, ...]:
    """Storages of these tensors that do not match their CRC: E612.

    Each tensor is a file and the text of a key.
    """
    places = [
        Place(file, key, "", extent.dtype, extent.shape, extent)
        for (file, key), extent in checkpoint.extents.items()
        if (file, key_text(key)) in named
    ]
    files = SourceFiles(checkpoint.root, (p.file for p in places), checkpoint.opened)
    try:
        with Workspace(share_of(memory, 1), Budget(memory)) as space:
            return damage_of(members_of(places, files), Inspection(files, space.tile, Counters()))
    finally:
        files.close()


def _odd_of(blank: Blank, how: Inspection) -> _Odd | None:
    size = blank.place.itemsize
    room = min(len(how.buffer), CELLS_BYTES) // size * size
    lead: U8 | None = None
    bad: tuple[int, bytes] | None = None
    same = True
    for begin, end in zip(blank.start.tolist(), blank.stop.tolist(), strict=True):
        for at in range(begin, end, room):
            how.look()
            raw = how.buffer[: min(room, end - at)]
            how.files.read_into(blank.file, at, [raw.data], len(raw))
            how.counters.add(read_verify=len(raw))
            cells = raw.reshape(-1, size)
            lead = cells[0].copy() if lead is None else lead
            same = same and bool((cells == lead).all())
            if bad is None and raw.any():
                odd = np.flatnonzero(decode(raw, blank.place.dtype) != 0)  # a zero may have a sign
                bad = (blank.element(at + int(odd[0]) * size), cells[odd[0]].tobytes()) if len(odd) else None
    return None if bad is None else _Odd(*bad, same)
