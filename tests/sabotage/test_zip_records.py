"""False records of a zip archive, and the words that name them.

Both ends are false at once if one would reveal the other.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sabotage.test_hostile_zips import archive_of, entry_of, members_of, message_of, patched, saved
from ucpl.errors import UcplError
from ucpl.files import zips
from ucpl.files.pickles import dumps
from ucpl.files.zips import Member, read_exactly, read_member, read_zip_directory

END, LOCATOR, END64 = 22, 20, 56  # bytes of the records at the end, from the last one backwards


def plain() -> bytearray:
    """An archive of two members without zip64 records."""
    return archive_of({"a/data.pkl": dumps([]), "a/byteorder": b"little"})


def flagged(data: bytearray, bits: int) -> bytes:
    """Flags of the first member, in the directory and its header."""
    patched(data, 6, "<H", bits)
    return patched(data, entry_of(data) + 8, "<H", bits)


def end64(data: bytearray, at: int, form: str, *values: int) -> bytes:
    """Fields of the zip64 end record of an archive by torch."""
    start = len(data) - END - LOCATOR - END64
    assert data[start : start + 4] == b"PK\x06\x06"
    return patched(data, start + at, form, *values)


def named(data: bytearray, name: bytes) -> bytes:
    return bytes(data).replace(b"a/byteorder", name)


def nameless(data: bytearray) -> bytes:
    """The first member's name becomes an extra field, in both places."""
    for at in (26, entry_of(data) + 28):
        patched(data, at, "<HH", 0, len(b"a/data.pkl"))
    return bytes(data)


def extended(data: bytearray, extra: bytes, *, size: int, packed: int = 0xFFFFFFFF) -> bytes:
    """The first member with sizes in zip64, in the directory alone.

    Its own header stays.
    """
    at = entry_of(data)
    patched(data, at + 20, "<II", packed, 0xFFFFFFFF)
    patched(data, at + 30, "<H", len(extra))
    end = at + 46 + len(b"a/data.pkl")
    made = data[:end] + extra + data[end:]
    (directory,) = struct.unpack_from("<I", data, len(data) - 10)
    struct.pack_into("<I", made, len(made) - 10, directory + len(extra))
    assert size == len(dumps([]))
    return bytes(made)


SIZE = len(dumps([]))
LIES: list[tuple[str, Callable[[], bytes], str]] = [
    ("masked", lambda: flagged(plain(), 1 << 13), "E407: member a/data.pkl is encrypted or patched"),
    ("patched", lambda: flagged(plain(), 1 << 5), "E407: member a/data.pkl is encrypted or patched"),
    ("strongly encrypted", lambda: flagged(plain(), 1 << 6), "E407: member a/data.pkl is encrypted or patched"),
    ("flags in the directory alone", lambda: patched(d := plain(), entry_of(d) + 8, "<H", 2), "E406: the header of"),
    ("a name that is no text", lambda: named(plain(), b"a/byte\xff\xfeder"), "E405: a member's name is no text"),
    ("a name of nothing", lambda: nameless(plain()), "E405: a member has the unsafe name ''"),
    ("this is disk 1", lambda: patched(d := plain(), len(d) - 18, "<H", 1), "E407"),
    ("the directory is on disk 1", lambda: patched(d := plain(), len(d) - 16, "<H", 1), "E407"),
    ("entries on this disk", lambda: patched(d := plain(), len(d) - 14, "<H", 1), "E407"),
    ("more entries than bytes", lambda: patched(d := plain(), len(d) - 14, "<HH", 60, 60), "E402: a zip directory of 60"),
    ("an entry more", lambda: bytes(_entry_more()), "E402: the zip directory ends within an entry"),
    ("a header where the directory is", lambda: _header_at(plain(), 0), "E402: member a/data.pkl starts behind"),
    ("zip64: this is disk 1", lambda: end64(saved(), 16, "<I", 1), "E407"),
    ("zip64: the directory is on disk 1", lambda: end64(saved(), 20, "<I", 1), "E407"),
    ("zip64: entries on this disk", lambda: end64(saved(), 24, "<Q", 1), "E407"),
    ("zip64: another signature", lambda: end64(saved(), 0, "<I", 7), "E402: the zip64 end record is damaged"),
    ("zip64: another length", lambda: end64(saved(), 4, "<Q", 45), "E402: the zip64 end record is damaged"),
    ("zip64: another size", lambda: end64(saved(), 40, "<Q", 5), "E402: its two zip end records disagree"),
    ("zip64: another start", lambda: end64(saved(), 48, "<Q", 5), "E402: its two zip end records disagree"),
    ("zip64: disk of the record", lambda: patched(d := saved(), len(d) - END - 16, "<I", 1), "E407"),
    ("zip64: two disks", lambda: patched(d := saved(), len(d) - END - 4, "<I", 2), "E407"),
    ("a zip64 field of one size", lambda: extended(plain(), struct.pack("<HHQ", 1, 8, SIZE), size=SIZE), "E402"),
    (
        "a zip64 field that runs out",
        lambda: extended(plain(), struct.pack("<HHQ", 1, 16, SIZE), size=SIZE),
        "E402: member a/data.pkl lacks its zip64 sizes",
    ),
    (
        "a zip64 field of one size, and more behind it",
        lambda: extended(plain(), struct.pack("<HHQQ", 1, 8, SIZE, SIZE), size=SIZE),
        "E402: member a/data.pkl lacks its zip64 sizes",
    ),
    (
        "a zip64 field of an impossible size",
        lambda: extended(plain(), struct.pack("<HHQQ", 1, 16, 1 << 62, 1 << 62), size=SIZE),
        "E402: member a/data.pkl lacks its zip64 sizes",
    ),
    (
        "a zip64 field of two sizes",
        lambda: extended(plain(), struct.pack("<HHQQ", 1, 16, SIZE, SIZE + 1), size=SIZE),
        "E402: member a/data.pkl is stored, yet has two sizes",
    ),
]  # fmt: skip


def _entry_more() -> bytearray:
    """Two entries are announced; the first's comment covers the second."""
    data = plain()
    first, second = entry_of(data), entry_of(data, 1)
    struct.pack_into("<H", data, first + 32, second - first)
    return data


def _header_at(data: bytearray, back: int) -> bytes:
    (start,) = struct.unpack_from("<I", data, len(data) - 6)
    return patched(data, entry_of(data) + 42, "<I", start - 29 - back)


@pytest.mark.parametrize(("made", "said"), [row[1:] for row in LIES], ids=[row[0] for row in LIES])
def test_a_lie_is_named(made: Callable[[], bytes], said: str, tmp_path: Path) -> None:
    (tmp_path / "evil.pt").write_bytes(made())
    fd = os.open(tmp_path / "evil.pt", os.O_RDONLY)
    try:
        with pytest.raises(UcplError) as caught:
            read_zip_directory(fd, "evil.pt")
    finally:
        os.close(fd)
    (found,) = caught.value.diagnostics
    assert f"{found.code}: {found.message}".replace("evil.pt: ", "").startswith(said)


def test_sizes_in_a_zip64_field_are_taken_from_there(tmp_path: Path) -> None:
    """Behind another field, and only those that the entry leaves out."""
    other = struct.pack("<HH3s", 0x5455, 3, b"abc")
    for extra, packed in (
        (other + struct.pack("<HHQQ", 1, 16, SIZE, SIZE), 0xFFFFFFFF),
        (other + struct.pack("<HHQ", 1, 8, SIZE), SIZE),
    ):
        (tmp_path / "wide.pt").write_bytes(extended(plain(), extra, size=SIZE, packed=packed))
        fd = os.open(tmp_path / "wide.pt", os.O_RDONLY)
        assert read_zip_directory(fd, "wide.pt").members["a/data.pkl"].size == SIZE
        os.close(fd)


def test_an_archive_within_a_file_and_bytes_that_are_not_there(tmp_path: Path) -> None:
    data = bytes(plain())
    (tmp_path / "two").write_bytes(b"before" + data + b"behind")
    fd = os.open(tmp_path / "two", os.O_RDONLY)
    try:
        found = read_zip_directory(fd, "two", 6, len(data))
        assert found.size == len(data) and read_member(fd, found.members["a/byteorder"], "two") == b"little"
        for start, size in ((-1, 5), (0, -1), (7, len(data) + 6)):
            with pytest.raises(UcplError, match=r"E402: two: bytes .* are asked for, it has"):
                read_zip_directory(fd, "two", start, size)
        with pytest.raises(UcplError, match=f"E400: two ends at byte {len(data) + 12}, before the end of the data"):
            read_exactly(fd, len(data), 13, "two")
        member = found.members["a/byteorder"]
        assert read_member(fd, member, "two", most=6) == b"little"
        with pytest.raises(UcplError, match="E402: two: member a/byteorder has 6 bytes, more than 5 are not read"):
            read_member(fd, member, "two", most=5)
        with pytest.raises(UcplError, match="E408: two: the bytes of it do not match"):
            read_member(fd, Member("it", member.start, 5, member.crc), "two")
    finally:
        os.close(fd)


def test_a_directory_of_more_bytes_than_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive_of(members_of([]))
    (tmp_path / "good.pt").write_bytes(data)
    (size,) = struct.unpack_from("<I", data, len(data) - 10)
    monkeypatch.setattr(zips, "DIRECTORY_BYTES_MAX", size - 1)
    assert f"a zip directory of 2 entries in {size} bytes" in message_of(tmp_path, data)
    monkeypatch.setattr(zips, "DIRECTORY_BYTES_MAX", size)
    fd = os.open(tmp_path / "good.pt", os.O_RDONLY)
    assert set(read_zip_directory(fd, "good.pt").members) == {"a/data.pkl", "a/byteorder"}
    os.close(fd)


@pytest.mark.parametrize(("at", "value"), [(14, 7), (18, 7), (22, 7)])
def test_a_header_that_leaves_its_sizes_for_later_may_state_nothing_else(tmp_path: Path, at: int, value: int) -> None:
    """Flag 8: CRC and sizes follow the data.

    The header has zeros, or the directory's values.
    """
    data = plain()
    later = flagged(data, 8)
    for offset in (14, 18, 22):
        later = patched(bytearray(later), offset, "<I", 0)
    (tmp_path / "later.pt").write_bytes(later)
    fd = os.open(tmp_path / "later.pt", os.O_RDONLY)
    assert read_zip_directory(fd, "later.pt").members["a/data.pkl"].size == SIZE
    os.close(fd)
    assert "the header of member a/data.pkl disagrees" in message_of(
        tmp_path, patched(bytearray(later), at, "<I", value)
    )
