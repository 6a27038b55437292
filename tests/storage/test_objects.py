"""`Objects` by obstore, with its in-memory store.

tests/interop/test_remote.py has an S3 server.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import MemoryStore

from ucpl.storage.objects import PART_MIN, ObjectEntry, OfObstore, TagDiffers, objects_at, part_size, read_whole


@pytest.fixture
def objects() -> OfObstore:
    store = MemoryStore()
    return OfObstore("s3://bucket", store, store)


def test_objects_are_listed_and_looked_up(objects: OfObstore) -> None:
    for key in ("run/a", "run/b/c", "runs/d"):
        objects.put(key, key.encode())
    assert sorted(one.key for one in objects.entries("run")) == ["run/a", "run/b/c"]
    assert len(objects.entries("")) == 3
    found = objects.entry("run/a")
    assert found is not None and (found.key, found.size) == ("run/a", 5) and found.tag
    assert found == next(one for one in objects.entries("run") if one.key == "run/a")
    assert objects.entry("run") is None and objects.entry("none") is None


def test_bytes_are_those_that_were_listed(objects: OfObstore) -> None:
    """A range of them; of an object that was replaced none."""
    objects.put("a", bytes(range(100)))
    entry = objects.entry("a")
    assert entry is not None
    assert bytes(objects.read("a", 10, 20, entry.tag)) == bytes(range(10, 20))
    assert objects.counted.read == 10
    with (
        pytest.raises(
            OSError, match=r"s3://bucket/a: bytes 90 to 110 not read, after 1 attempt in . s: 10 bytes came of"
        ),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("ucpl.storage.objects.attempts", lambda: 1)
        objects.read("a", 90, 110, entry.tag)
    objects.put("a", bytes(100))
    with pytest.raises(TagDiffers):
        objects.read("a", 10, 20, entry.tag)
    objects.remove(["a", "none"])
    with pytest.raises(FileNotFoundError, match="s3://bucket/a: bytes 0 to 1 not read: there is no such object"):
        objects.read("a", 0, 1, "")


def test_what_is_there_is_not_created(objects: OfObstore) -> None:
    assert objects.create("mark", b"mine")
    assert objects.create("mark", b"mine")  # an attempt whose answer was lost
    assert not objects.create("mark", b"another's")
    assert bytes(objects.read("mark", 0, 4, "")) == b"mine"


@pytest.mark.parametrize("size", [0, 10, 5 << 20])
def test_files_and_texts_go_up_by_part(
    objects: OfObstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setenv("UCPL_REMOTE_PART", str(1 << 20))
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    (tmp_path / "file").write_bytes(data)
    objects.put_file("file", tmp_path / "file")
    objects.put("text", data)
    for key in ("file", "text"):
        assert read_whole(objects, ObjectEntry(key, size, "", 0)) == data
    assert objects.counted.written == 2 * size


def test_parts_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert part_size(0) == part_size(60 << 30) == PART_MIN
    for size in ((80 << 30) + 1, 5 << 40):
        part = part_size(size)
        assert -(-size // part) <= 9000 and part % (1 << 20) == 0
    monkeypatch.setenv("UCPL_REMOTE_PART", "4096")
    assert part_size(9000 * 4096) == 4096


def test_without_obstore_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from tests.storage.test_sources import refused

    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    error = refused(lambda: objects_at("s3://bucket/run"))
    assert error.diagnostics[0].code == "E680" and "ucpl[remote]" in error.diagnostics[0].remedy
