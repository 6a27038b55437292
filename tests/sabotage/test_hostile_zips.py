"""Archives made to do harm, or torn.

Each is refused by a code of ours that names the file.
"""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.files.values import FIXTURES
from tests.sabotage.cost import soon
from ucpl.errors import UcplError
from ucpl.extents import StorageRef, TensorRef
from ucpl.files.pickles import dumps
from ucpl.files.torch_files import read_torch_file


def archive_of(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytearray:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return bytearray(file.getvalue())


def members_of(value: object, **storages: bytes) -> dict[str, bytes]:
    found = {"a/data.pkl": dumps(value), "a/byteorder": b"little"}
    return {**found, **{f"a/data/{name[1:]}": data for name, data in storages.items()}}


def code_of(tmp_path: Path, data: bytes | bytearray) -> str:
    (tmp_path / "evil.pt").write_bytes(data)
    with soon(len(data)), pytest.raises(UcplError) as caught:
        read_torch_file(tmp_path, "evil.pt")
    diagnostic = caught.value.diagnostics[0]
    assert "evil.pt" in diagnostic.message and diagnostic.remedy and caught.value.exit_status == 3
    return diagnostic.code


def saved(value: object = None) -> bytearray:
    file = io.BytesIO()
    torch.save({"w": torch.arange(40.0)} if value is None else value, file)
    return bytearray(file.getvalue())


def tensor(numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, name: str = "0") -> TensorRef:
    return TensorRef(StorageRef(name, "f32", numel), offset, shape, stride)


def test_the_plain_file_is_read(tmp_path: Path) -> None:
    data = archive_of(members_of(tensor(4, (2, 2), (2, 1)), _0=bytes(16)))
    (tmp_path / "good.pt").write_bytes(data)
    (extent,) = read_torch_file(tmp_path, "good.pt").extents()
    assert extent.shape == (2, 2) and extent.storage_bytes == 16


@pytest.mark.fault("Hostile input", "zip bombs", "refused unopened")
def test_a_zip_bomb_is_refused_unopened(tmp_path: Path) -> None:
    data = archive_of({"a/data.pkl": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    assert len(data) < 100_000
    assert code_of(tmp_path, data) == "E403"


def entry_of(data: bytes | bytearray, n: int = 0) -> int:
    at = data.index(b"PK\x01\x02")
    for _ in range(n):
        at = data.index(b"PK\x01\x02", at + 4)
    return at


def patched(data: bytearray, at: int, form: str, *values: int) -> bytes:
    struct.pack_into(form, data, at, *values)
    return bytes(data)


ENTRIES: list[tuple[str, str, Callable[[bytearray], bytes]]] = [
    ("another offset", "E406", lambda d: patched(d, entry_of(d, 1) + 42, "<I", 1)),
    ("an offset behind the end", "E402", lambda d: patched(d, entry_of(d) + 42, "<I", 1 << 30)),
    ("a size behind the end", "E402", lambda d: patched(d, entry_of(d, 4) + 20, "<II", 1 << 30, 1 << 30)),
    ("a size into the next", "E404", lambda d: patched(d, entry_of(d) + 20, "<II", 500, 500)),
    ("two sizes", "E402", lambda d: patched(d, entry_of(d) + 20, "<I", 5)),
    ("zip64 sizes that are not there", "E402", lambda d: patched(d, entry_of(d) + 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF)),
    ("an encrypted member", "E407", lambda d: patched(d, entry_of(d) + 8, "<H", 1)),
    ("another disk", "E407", lambda d: patched(d, entry_of(d) + 34, "<H", 3)),
    ("a compressed member", "E403", lambda d: patched(d, entry_of(d) + 10, "<H", 8)),
    ("another signature", "E402", lambda d: patched(d, entry_of(d), "<I", 0)),
    ("a name that runs out", "E402", lambda d: patched(d, entry_of(d, 6) + 28, "<H", 0xFFFF)),
    ("another CRC", "E408", lambda d: patched(d, entry_of(d) + 16, "<I", 1)),
    ("a header compressed", "E406", lambda d: patched(d, 8, "<H", 8)),
    ("a header with another size", "E406", lambda d: patched(d, 18, "<I", 7)),
    ("a header with another name", "E406", lambda d: patched(d, 30, "<B", 66)),
    ("a header with another CRC", "E406", lambda d: patched(d, 14, "<I", 7)),
    ("a header with an extra field over the end", "E402", lambda d: patched(d, 28, "<H", 0xFFFF)),
    ("a flipped bit in the pickle", "E408", lambda d: patched(d, 90, "<B", d[90] ^ 4)),
    ("one entry more than there is", "E402", lambda d: patched(d, len(d) - 14, "<HH", 8, 8)),
    ("one entry less than there is", "E402", lambda d: patched(d, len(d) - 14, "<HH", 6, 6)),
    ("a directory elsewhere", "E402", lambda d: patched(d, len(d) - 6, "<I", 64)),
    ("a zip64 record elsewhere", "E402", lambda d: patched(d, len(d) - 22 - 12, "<Q", 1 << 62)),
    ("a zip64 record that disagrees", "E402", lambda d: patched(d, len(d) - 22 - 20 - 56 + 32, "<Q", 5)),
    ("bytes before the archive", "E402", lambda d: b"#!/bin/sh\n" + bytes(d)),
    ("bytes behind the archive", "E401", lambda d: bytes(d) + b"\0"),
    ("half of it", "E401", lambda d: bytes(d[: len(d) // 2])),
    ("all but the last byte", "E401", lambda d: bytes(d[:-1])),
    ("a hole", "E401", lambda d: bytes(len(d))),
]


@pytest.mark.fault("Hostile input", "false zip directories, overlapping members", "refused")
@pytest.mark.parametrize(("code", "attack"), [row[1:] for row in ENTRIES], ids=[row[0] for row in ENTRIES])
def test_a_false_directory_is_refused(tmp_path: Path, code: str, attack: Callable[[bytearray], bytes]) -> None:
    assert code_of(tmp_path, attack(saved())) == code


def test_a_cut_file_says_that_it_was_cut(tmp_path: Path) -> None:
    (tmp_path / "cut.pt").write_bytes(saved()[:700])
    with pytest.raises(UcplError, match=r"E401: cut\.pt was cut short"):
        read_torch_file(tmp_path, "cut.pt")


@pytest.mark.fault("Hostile input", "member names with `..`, absolute or duplicate", "refused")
@pytest.mark.parametrize("name", ["../a/x", "/a/x", "a/../../x", "a\\x", "C:x", "a/\x01"])
def test_unsafe_names_are_refused(tmp_path: Path, name: str) -> None:
    data = archive_of({**members_of([]), "a/Z" + "z" * (len(name.encode()) - 3): b""})
    raw = bytes(data).replace(("a/Z" + "z" * (len(name.encode()) - 3)).encode(), name.encode())
    assert code_of(tmp_path, raw) == "E405"


def test_doubled_names_are_refused(tmp_path: Path) -> None:
    data = archive_of({**members_of([]), "a/byteordes": b"big"})
    assert code_of(tmp_path, bytes(data).replace(b"a/byteordes", b"a/byteorder")) == "E405"


def test_two_entries_of_one_member_overlap(tmp_path: Path) -> None:
    """The quine of zip bombs: many names, the same bytes."""
    data = archive_of({"a/data.pkl": dumps([]), "a/data/0": bytes(4), "b/data/0": bytes(4)})
    at = entry_of(data, 2)
    first = struct.unpack_from("<I", data, entry_of(data, 1) + 42)[0]
    struct.pack_into("<I", data, at + 42, first)
    raw = bytes(data[:at]) + bytes(data[at:]).replace(b"b/data/0", b"a/data/0")
    assert code_of(tmp_path, raw) in ("E404", "E405")


def test_overlapping_storages_are_refused(tmp_path: Path) -> None:
    inner = archive_of({"a/data/1": bytes(8)})
    header = bytes(inner[: 30 + 8 + 8])
    data = archive_of({**members_of([]), "a/data/0": header + bytes(20), "a/data/1": bytes(8)})
    struct.pack_into("<I", data, entry_of(data, 3) + 42, data.index(header))
    assert code_of(tmp_path, data) == "E404"


TENSORS = [
    ("beyond its storage", tensor(4, (5,), (1,)), "E415"),
    ("beyond its storage by stride", tensor(4, (2, 2), (3, 1)), "E415"),
    ("beyond its storage by offset", tensor(4, (1,), (1,), 4), "E415"),
    ("before its storage", tensor(4, (1,), (1,), -1), "E415"),
    ("of a negative size", tensor(4, (-2, -2), (1, 1)), "E415"),
    ("of a negative stride", tensor(4, (2,), (-1,), 1), "E415"),
    ("of sizes whose product wraps around", tensor(4, (1 << 32, 1 << 32), (1, 1)), "E415"),
    ("that repeats one element without end", tensor(4, (1 << 40,), (0,)), "E416"),
    ("whose storage is longer in the pickle", tensor(5, (4,), (1,)), "E414"),
    ("whose storage is shorter in the pickle", tensor(3, (3,), (1,)), "E414"),
    ("whose storage is missing", tensor(4, (4,), (1,), 0, "1"), "E413"),
    ("whose storage is elsewhere", tensor(4, (4,), (1,), 0, "../data.pkl"), "E413"),
]


@pytest.mark.fault("Hostile input", "tensors that reach outside their storage", "refused")
@pytest.mark.parametrize(("ref", "code"), [row[1:] for row in TENSORS], ids=[row[0] for row in TENSORS])
def test_tensors_that_reach_out_are_refused(tmp_path: Path, ref: TensorRef, code: str) -> None:
    assert code_of(tmp_path, archive_of(members_of({"w": ref}, _0=bytes(16)))) == code


def test_other_archives_are_refused(tmp_path: Path) -> None:
    for members, code in (
        ({"a/x": b""}, "E411"),
        ({"data.pkl": dumps([])}, "E411"),
        ({"a/data.pkl": dumps([]), "b/data.pkl": dumps([])}, "E411"),
        ({"a/data.pkl": dumps([]), "b/x": b""}, "E411"),
        ({"a/data.pkl": dumps([]), "a/constants.pkl": b""}, "E411"),
        ({"a/data.pkl": dumps([]), "a/byteorder": b"big"}, "E412"),
    ):
        assert code_of(tmp_path, archive_of(members)) == code


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_and_cuts_never_surprise(tmp_path: Path, seed: int) -> None:
    """A damaged real file ends in UcplError or is read.

    Most damage outside the payload is found.
    """
    chosen = random.Random(seed)
    source = (FIXTURES / "containers" / "z1_bf16_model_states.pt").read_bytes()
    directory = source.index(b"PK\x01\x02")
    path = tmp_path / "x.pt"
    refused = 0
    for _ in range(200):
        data = bytearray(source)
        low = chosen.choice((0, directory, len(data) - 100))
        for _ in range(chosen.choice((1, 1, 3))):
            data[chosen.randrange(low, len(data))] = chosen.randrange(256)
        if chosen.random() < 0.2:
            del data[chosen.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            file = read_torch_file(tmp_path, "x.pt")
            for extent in file.extents():
                assert 0 <= extent.storage_start <= extent.storage_start + extent.storage_bytes <= len(data)
        except UcplError:
            refused += 1
    assert refused > 100


def test_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UcplError, match="E400"):
        read_torch_file(tmp_path, "pipe")
    with pytest.raises(UcplError, match="E400"):
        read_torch_file(tmp_path, "folder")
    with pytest.raises(UcplError, match=r"E40[01]"):
        read_torch_file("/", os.devnull[1:])


def message_of(tmp_path: Path, data: bytes | bytearray) -> str:
    (tmp_path / "evil.pt").write_bytes(data)
    with pytest.raises(UcplError) as caught:
        read_torch_file(tmp_path, "evil.pt")
    return caught.value.diagnostics[0].message


def test_members_that_overlap_by_a_few_bytes(tmp_path: Path) -> None:
    """Both headers of the first member add eight bytes to its length."""
    data = archive_of({"a/data.pkl": dumps({}), "a/data/0": bytes(16)})
    directory = struct.unpack_from("<I", data, len(data) - 6)[0]
    (size,) = struct.unpack_from("<I", data, 18)
    for at in (18, 22, directory + 20, directory + 24):
        struct.pack_into("<I", data, at, size + 8)
    assert "overlap" in message_of(tmp_path, data)


def test_bytes_between_the_directory_and_its_end_record(tmp_path: Path) -> None:
    data = archive_of({"a/data.pkl": dumps({})})
    end = len(data) - 22
    assert "is not where its end record says" in message_of(tmp_path, data[:end] + b"junk" + data[end:])


def test_bytes_behind_the_last_entry_of_the_directory(tmp_path: Path) -> None:
    data = archive_of({"a/data.pkl": dumps({})})
    end = len(data) - 22
    (size,) = struct.unpack_from("<I", data, end + 12)
    struct.pack_into("<I", data, end + 12, size + 4)
    assert "has bytes after its 1 entries" in message_of(tmp_path, data[:end] + b"junk" + data[end:])


def test_short_reads_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give fewer bytes than were asked for.

    The rest is read behind them.
    """
    (tmp_path / "good.pt").write_bytes(saved())
    whole = read_torch_file(tmp_path, "good.pt")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real(fd, min(size, 7), at))
    assert read_torch_file(tmp_path, "good.pt").extents() == whole.extents()
