"""The directory of a zip archive: the place of each member's bytes.

It is read by position; nothing is unpacked, mapped or trusted. torch.save stores members uncompressed, so a tensor can
be read in place once its member is found. Everything that a directory may claim is checked against the file and against
the members' own headers before any of it is used.

Not here: writing (torch_files), and members that are compressed.
"""

from __future__ import annotations

import os
import stat
import struct
from itertools import pairwise
from pathlib import Path

from attrs import evolve, field

from ucpl.digests import crc32
from ucpl.errors import Label, fail
from ucpl.files.header_watch import saw
from ucpl.records import frozen
from ucpl.storage.reading import computed_ranges, hint, is_within, pread

__all__ = ["Member", "ZipDirectory", "crc_of_bytes", "ends_of", "open_file", "read_member", "read_zip_directory"]

DIRECTORY_BYTES_MAX = 1 << 30
MEMBER_READ_MAX = 1 << 30  # of a member that is read completely
_CHUNK = 1 << 20  # bytes that are read at a time
_HEAD = 1024  # the pickle of a tensor, with the bytes before it
_TAIL = 768  # bytes at an archive's end that are read first: the directory of one tensor's, and nothing of the tensor
_TAIL_AFAR = 1 << 12  # the same, where it is waited for: most directories

_END = struct.Struct("<4s4H2IH")  # 22 bytes
_END64 = struct.Struct("<4sQ2H2I4Q")  # 56 bytes
_LOCATOR = struct.Struct("<4sIQI")  # 20 bytes
_ENTRY = struct.Struct("<4s6H3I5H2I")  # 46 bytes, then name, extra, comment
_LOCAL = struct.Struct("<4s5H3I2H")  # 30 bytes, then name, extra
_FLAG_ENCRYPTED, _FLAG_LATER, _FLAG_PATCH, _FLAG_STRONG, _FLAG_MASKED = 1, 8, 1 << 5, 1 << 6, 1 << 13
_U32 = 0xFFFFFFFF
_U16 = 0xFFFF


@frozen
class Member:
    """One stored member: byte position, length, and the archive's CRC-32.

    crc: None in an archive that was written without CRCs (`torch.serialization.set_crc32_options(False)`).
    made: its bytes are computed when they are read; `crc` then identifies it, but is not a CRC of its bytes.
    """

    name: str
    start: int
    size: int
    crc: int | None
    made: bool = False


@frozen
class ZipDirectory:
    """The members of an archive by name, in directory order.

    `size` is the archive's length in bytes.
    """

    file: str  # the name that errors give
    size: int
    members: dict[str, Member]
    _windows: tuple[tuple[int, bytes], ...] = field(default=(), eq=False, repr=False)  # (position in the file, bytes)

    def read(self, fd: int, name: str, most: int = MEMBER_READ_MAX) -> bytes:
        """`read_member` of one of them, from the bytes already read.

        Raises: as that.
        """
        member = self.members[name]
        for begin, data in self._windows:
            at = member.start - begin
            if at >= 0 and at + member.size <= len(data) and member.size <= most:
                return _undamaged(data[at : at + member.size], member, self.file)
        return read_member(fd, member, self.file, most)


def open_file(path: Path, file: str) -> int:
    """A descriptor to read by position. Raises: UcplError E400."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us up
        try:
            status = os.fstat(fd)
        except OSError:
            os.close(fd)
            raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        fail("E400", f"{file} cannot be opened: {reason}", Label(str(path)))
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        fail("E400", f"{file} is no regular file", Label(str(path)))
    saw(path, status)
    return fd


def read_exactly(fd: int, start: int, size: int, file: str) -> bytes:
    """`size` bytes from `start`. Raises: UcplError E400 where the file gives fewer."""
    parts: list[bytes] = []
    left = size
    while left:
        try:
            part = pread(fd, min(left, 1 << 30), start + size - left)
        except OSError as error:
            fail("E400", f"{file} cannot be read at byte {start + size - left}: {error.strerror}", Label(file))
        if not part:
            fail("E400", f"{file} ends at byte {start + size - left}, before the end of the data", Label(file))
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_member(fd: int, member: Member, file: str, most: int = MEMBER_READ_MAX, *, holds: str = "") -> bytes:
    """A complete member of at most `most` bytes, with its CRC checked.

    `holds`: its content, for the error. Raises: UcplError E400, E402, E408.
    """
    if member.size > most:
        what = f"{file}: member {member.name} has {member.size} bytes, more than {most} are not read"
        fail("E402", what, Label(file, where=member.name))
    return _undamaged(read_exactly(fd, member.start, member.size, file), member, file, holds)


def _undamaged(data: bytes, member: Member, file: str, holds: str = "") -> bytes:
    """Raises: UcplError E408."""
    if member.crc is not None and not member.made and (found := crc32(data)) != member.crc:
        fail(
            "E408",
            f"{file}: the bytes of {member.name} do not match their CRC" + (f"; it holds {holds}" if holds else ""),
            Label(file, f"CRC {member.crc:08x} in the directory, {found:08x} of the bytes", where=member.name),
        )
    return data


def crc_of_bytes(fd: int, start: int, size: int, file: str) -> int:
    """The CRC-32 of any number of bytes of a file.

    Raises: UcplError E400.
    """
    found = 0
    for at in range(0, size, _CHUNK):
        found = crc32(read_exactly(fd, start + at, min(_CHUNK, size - at), file), found)
    return found


def ends_of(start: int, size: int) -> list[tuple[int, int]]:
    """Byte ranges of an archive that are read first.

    In a small archive they include its first members.
    """
    return [(start, start + min(_HEAD, size)), (start + max(0, size - _TAIL_AFAR), start + size)]


def read_zip_directory(fd: int, file: str, start: int = 0, size: int | None = None) -> ZipDirectory:
    """The checked directory of an archive at `size` bytes from `start`.

    The default is the complete file. `file` is the name that errors give. Positions of members are positions in the
    file.

    Raises: UcplError E400-E407.
    """
    try:
        file_size = os.fstat(fd).st_size
    except OSError as error:
        fail("E400", f"{file} cannot be read: {error.strerror}", Label(file))
    if size is None:
        size = file_size - start
    if start < 0 or size < 0 or start + size > file_size:
        fail("E402", f"{file}: bytes {start} to {start + size} are asked for, it has {file_size}", Label(file))
    tail = _Tail.of(fd, file, start, size)
    count, directory_start, directory_size = _find_directory(tail, size)
    raw = tail.read(directory_start, directory_size)
    made = computed_ranges(fd)
    archive = _Archive.of(tail, raw, count, directory_start)
    members: dict[str, Member] = {}
    spans: list[tuple[int, int, str]] = []  # header start, data end, name
    pos = 0
    for _ in range(count):
        if pos + 46 > directory_size:
            fail("E402", f"{file}: the zip directory ends within an entry", Label(file))
        entry = _ENTRY.unpack_from(raw, pos)
        name_size, extra_size, comment_size = entry[10], entry[11], entry[12]
        name_end = pos + 46 + name_size
        extra_end = name_end + extra_size
        if entry[0] != b"PK\x01\x02" or extra_end + comment_size > directory_size:
            fail("E402", f"{file}: the zip directory has a damaged entry", Label(file, where=f"entry {len(members)}"))
        raw_name = raw[pos + 46 : name_end]
        name = _checked_name(raw_name, file)
        if name in members:
            fail("E405", f"{file}: two members are called {name}", Label(file, where=name))
        flags, method, crc, packed, unpacked = entry[3], entry[4], entry[7], entry[8], entry[9]
        disk, header = entry[13], entry[16]
        if flags & (_FLAG_ENCRYPTED | _FLAG_PATCH | _FLAG_STRONG | _FLAG_MASKED):
            fail("E407", f"{file}: member {name} is encrypted or patched", Label(file, where=name))
        if method != 0:
            fail("E403", f"{file}: member {name} is compressed (method {method})", Label(file, where=name))
        if _U32 in (packed, unpacked, header) or disk == _U16:
            fields = _zip64(raw[name_end:extra_end], (unpacked, packed, header), file, name)
            unpacked, packed, header = fields
        if disk not in (0, _U16):
            fail("E407", f"{file}: member {name} is on another disk", Label(file, where=name))
        if packed != unpacked:
            fail("E402", f"{file}: member {name} is stored, yet has two sizes", Label(file, where=name))
        if header + 30 > directory_start:
            fail("E402", f"{file}: member {name} starts behind the members", Label(file, where=name))
        data = _check_local(archive, _Entry(raw_name, name, flags, crc, packed, header))
        if data + packed > directory_start:
            fail(
                "E402",
                f"{file}: member {name} ends behind the members",
                Label(file, f"byte {data + packed}, the members end at {directory_start}", where=name),
            )
        members[name] = Member(name, start + data, packed, crc, is_within(start + data, start + data + packed, made))
        spans.append((header, data + packed, name))
        pos = extra_end + comment_size
    if pos != directory_size:
        fail("E402", f"{file}: the zip directory has bytes after its {count} entries", Label(file))
    spans.sort()
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            fail("E404", f"{file}: members {first} and {second} overlap", Label(file, where=second))
    if not any(m.crc for m in members.values()):  # torch states 0 of every member where it computes none
        members = {name: evolve(m, crc=None) if m.size and not m.made else m for name, m in members.items()}
    return ZipDirectory(file, size, members, ((start, archive.head), (start + tail.begins, tail.data)))


@frozen
class _Tail:
    """An archive whose end was read once.

    A small one is its own end.
    """

    fd: int
    file: str
    start: int  # of the archive, in the file
    begins: int  # of the bytes read, in the archive
    data: bytes

    @classmethod
    def of(cls, fd: int, file: str, start: int, size: int, most: int = _TAIL) -> _Tail:
        begins = max(0, size - most)
        if most == _TAIL < size:
            _hint(fd, file, [(start + max(0, size - _TAIL_AFAR), start + size)])
        return cls(fd, file, start, begins, read_exactly(fd, start + begins, size - begins, file))

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the archive. Raises: UcplError E400."""
        first = at - self.begins
        if first >= 0 and first + size <= len(self.data):
            return self.data[first : first + size]
        return read_exactly(self.fd, self.start + at, size, self.file)

    def end(self) -> int:
        """The place of the end record in the bytes read; negative.

        Not found.
        """
        data = self.data
        at = data.rfind(b"PK\x05\x06")
        while at >= 0:
            if at + 22 <= len(data) and at + 22 + _END.unpack_from(data, at)[7] == len(data):
                break
            at = data.rfind(b"PK\x05\x06", 0, at + 3)
        return at


def _find_directory(archive: _Tail, size: int) -> tuple[int, int, int]:
    """(entries, start, bytes) of the directory, from the records at the end.

    Positions are within the archive.
    """
    fd, file, start = archive.fd, archive.file, archive.start
    at = archive.end()
    if at < 0 and archive.begins:  # a long comment
        archive = _Tail.of(fd, file, start, size, 22 + _U16)
        at = archive.end()
    if at < 0:
        head = archive.read(0, min(4, size))
        if not size:
            fail("E401", f"{file} is empty", Label(file))
        if head == b"PK\x03\x04":
            fail(
                "E401", f"{file} was cut short: it starts as a zip archive and has no directory at its end", Label(file)
            )
        fail("E401", f"{file} is no zip archive", Label(file))
    end_start = archive.begins + at
    _, disk, directory_disk, count_here, count, directory_size, directory_start, _ = _END.unpack_from(archive.data, at)
    before = end_start
    multi_disk = disk not in (0, _U16) or directory_disk not in (0, _U16) or count_here != count
    if end_start >= 20:
        locator = archive.read(end_start - 20, 20)
        if locator.startswith(b"PK\x06\x07"):
            _, disk64, end64_start, disks = _LOCATOR.unpack(locator)
            if end64_start + 56 > end_start - 20:
                fail("E402", f"{file}: the zip64 end record is behind its place", Label(file))
            end64 = _END64.unpack(archive.read(end64_start, 56))
            if end64[0] != b"PK\x06\x06" or end64_start + 12 + end64[1] != end_start - 20:
                fail("E402", f"{file}: the zip64 end record is damaged", Label(file))
            multi_disk = (
                multi_disk or disk64 != 0 or disks != 1 or end64[4] != 0 or end64[5] != 0 or end64[6] != end64[7]
            )
            for small, large, most in (
                (count, end64[7], _U16),
                (directory_size, end64[8], _U32),
                (directory_start, end64[9], _U32),
            ):
                if small not in (most, large):
                    fail("E402", f"{file}: its two zip end records disagree", Label(file))
            count, directory_size, directory_start = end64[7], end64[8], end64[9]
            before = end64_start
    if multi_disk:
        fail("E407", f"{file} is one disk of a zip archive of several", Label(file))
    if directory_start + directory_size != before:
        fail(
            "E402",
            f"{file}: the zip directory is not where its end record says",
            Label(file, f"{directory_start} + {directory_size} bytes, the end record is at {before}"),
        )
    if directory_size > DIRECTORY_BYTES_MAX or count * 46 > directory_size:
        fail("E402", f"{file}: a zip directory of {count} entries in {directory_size} bytes", Label(file))
    return count, directory_start, directory_size


def _checked_name(raw: bytes, file: str) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        fail("E405", f"{file}: a member's name is no text", Label(file, where=ascii(raw)[:100]))
    if (
        not name
        or name.startswith("/")
        or "\\" in name
        or not name.isprintable()
        or (".." in name and ".." in name.split("/"))
        or name[1:2] == ":"
    ):
        fail("E405", f"{file}: a member has the unsafe name {ascii(name)[:100]}", Label(file, where=ascii(name)[:100]))
    return name


def _zip64(extra: bytes, fields: tuple[int, ...], file: str, name: str) -> tuple[int, int, int]:
    """(unpacked, packed, header), with 0xFFFFFFFF replaced from the zip64 field."""
    pos = 0
    while pos + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, pos)
        pos += 4
        if kind == 1 and pos + size <= len(extra):
            values: list[int] = []
            at = pos
            for value in fields:
                if value == _U32:
                    if at + 8 > pos + size:
                        break
                    (value,) = struct.unpack_from("<Q", extra, at)
                    at += 8
                values.append(value)
            if len(values) == len(fields) == 3 and max(values) < 1 << 62:
                return values[0], values[1], values[2]
            break
        pos += size
    fail("E402", f"{file}: member {name} lacks its zip64 sizes", Label(file, where=name))


@frozen
class _Archive:
    """The range of an archive's members, which end at the directory."""

    tail: _Tail
    directory_start: int
    head: bytes  # the bytes before the first large member: its header, and small ones

    @classmethod
    def of(cls, tail: _Tail, raw: bytes, count: int, directory_start: int) -> _Archive:
        """raw: the directory, unchecked.

        Raises: UcplError E400.
        """
        ranges: list[tuple[int, int]] = []  # of the members' own headers, within the archive
        pos, first = 0, _HEAD
        for _ in range(count):
            if pos + 46 > len(raw):
                break
            entry = _ENTRY.unpack_from(raw, pos)
            if entry[16] < directory_start:
                ranges.append((entry[16], min(entry[16] + 30 + entry[10], directory_start)))
                if entry[9] > _HEAD:
                    first = min(first, ranges[-1][1])
            pos += 46 + entry[10] + entry[11] + entry[12]
        _hint(tail.fd, tail.file, [(tail.start + low, tail.start + high) for low, high in ranges])
        first = min(first, tail.begins, directory_start)
        return cls(tail, directory_start, tail.read(0, first) if first and ranges else b"")

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the archive. Raises: UcplError E400."""
        return self.head[at : at + size] if at + size <= len(self.head) else self.tail.read(at, size)


def _hint(fd: int, file: str, ranges: list[tuple[int, int]]) -> None:
    """Request these remote ranges ahead of their use.

    Raises: UcplError E400.
    """
    try:
        hint(fd, ranges)
    except OSError as error:
        fail("E400", f"{file} cannot be read: {error.strerror}", Label(file))


@frozen
class _Entry:
    """One member as the directory has it."""

    raw_name: bytes
    name: str
    flags: int
    crc: int
    size: int
    header: int  # position of its own header


def _check_local(archive: _Archive, entry: _Entry) -> int:
    """The begin of the member's data, with its header checked."""
    file, name, raw_name = archive.tail.file, entry.name, entry.raw_name
    raw = archive.read(entry.header, min(30 + len(raw_name), archive.directory_start - entry.header))
    fields = _LOCAL.unpack_from(raw)
    name_size, extra_size = fields[9], fields[10]
    agrees = (
        fields[0] == b"PK\x03\x04"
        and fields[3] == 0  # method
        and fields[2] & ~0x800 == entry.flags & ~0x800
        and name_size == len(raw_name)
        and raw[30:] == raw_name
    )
    data: int = entry.header + 30 + name_size + extra_size
    if agrees and data > archive.directory_start:
        fail("E402", f"{file}: member {name} starts behind the members", Label(file, where=name))
    if agrees and not entry.flags & _FLAG_LATER:
        packed, unpacked = fields[7], fields[8]
        if _U32 in (packed, unpacked):
            extra = archive.read(entry.header + 30 + name_size, extra_size)
            unpacked, packed, _ = _zip64(extra, (unpacked, packed, 0), file, name)
        agrees = fields[6] == entry.crc and packed == unpacked == entry.size
    elif agrees:
        sizes = (0, entry.size, _U32)
        agrees = fields[6] in (0, entry.crc) and fields[7] in sizes and fields[8] in sizes
    if not agrees:
        fail("E406", f"{file}: the header of member {name} disagrees with the directory", Label(file, where=name))
    return data
