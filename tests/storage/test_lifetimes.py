"""Sparse files of a checkpoint are released with their call.

A job may read a vault again and again.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
import ucpl.api
from tests.storage.conftest import EXAMPLE
from tests.vault.small import weighing
from ucpl import errors
from ucpl.cli import main
from ucpl.storage import cache_dirs, reading, resolve_url, sparse_files
from ucpl.storage.cache_dirs import current_scope, scoped, separate
from ucpl.storage.vaults.snapshot_folder import SnapshotFile
from ucpl.vault.inspect import find_damage
from ucpl.vault.persisted import persist

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHT = torch.arange(600.0).reshape(100, 6)


@pytest.fixture
def vault(tmp_path: Path) -> Path:
    return weighing(tmp_path / "job", WEIGHT).home


def held() -> dict[str, int]:
    """All resources of this process for sparse files."""
    top = cache_dirs._top(os.getpid())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folders": len(list(top.iterdir())),
        "inodes": len(reading._REMOTES),
        "names": len(errors._CALLED),
        "places": len(resolve_url._PLACES),
        "bytes": sparse_files._KEPT[0],
    }


def filled(src: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 100, bias=False)
    ucpl.load_into(model, None, src)
    assert torch.equal(model.weight, WEIGHT)


CALLS: dict[str, Callable[[str, Path], object]] = {
    "plan": lambda src, tmp: ucpl.plan(src, "plain()"),
    "convert": lambda src, tmp: ucpl.convert(src, tmp / "target.pt", "plain()"),
    "apply": lambda src, tmp: ucpl.apply(ucpl.plan(src, "plain()"), src, tmp / "target.pt"),
    "compare": lambda src, tmp: ucpl.compare(src, src),
    "verify": lambda src, tmp: ucpl.verify(src),
    "infer": lambda src, tmp: ucpl.infer(src).text(),
    "cli": lambda src, tmp: main(["inspect", src]),
    "cli, refused": lambda src, tmp: main(["convert", src, str(tmp / "target.pt"), "--to", "zero9()"]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["vault", "store"])
def test_a_call_leaves_nothing_of_what_it_read(
    kind: str, call: str, vault: Path, upload: Callable[..., str], tmp_path: Path
) -> None:
    src = f"vault:{vault}" if kind == "vault" else upload()
    before = held()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        CALLS[call](src, tmp_path / str(number))
        assert held() == before, number


def test_reads_during_training_leave_nothing(vault: Path, tmp_path: Path) -> None:
    before = held()
    for number in range(2):
        filled(f"vault:{vault}", tmp_path)
        persist(vault, tmp_path / f"step-{number}")
        assert find_damage(vault)[1] == []
        assert held() == before, number


def test_a_target_in_a_store_leaves_nothing(upload: Callable[..., str], tmp_path: Path) -> None:
    upload()
    before = held()
    ucpl.convert(EXAMPLE, "memory://bucket/target", "zero3(dp=3)")
    assert held() == before
    assert ucpl.compare(EXAMPLE, "memory://bucket/target") and held() == before


def filled_by(reader: ucpl.StorageReader) -> bool:
    state = {"model.weight": torch.zeros(100, 6)}
    load(state, storage_reader=reader, no_dist=True)
    return torch.equal(state["model.weight"], WEIGHT)


def test_a_reader_reads_for_as_long_as_it_is_kept(vault: Path) -> None:
    before = held()
    reader = ucpl.StorageReader(f"vault:{vault}")
    assert filled_by(reader)
    during = held()
    assert during["folders"] == before["folders"] + 1 and during["descriptors"] > before["descriptors"]
    reader.reset(f"vault:{vault}")  # another one, instead of the first
    assert held()["folders"] == during["folders"]
    with pytest.raises(ucpl.UcplError, match="E692"):
        reader.reset(f"vault:{vault}@7")
    assert filled_by(reader) and reader.generation == 1  # the data of its first read
    other = copy.copy(reader)
    del reader
    assert filled_by(other)
    del other
    assert held() == before
    with pytest.raises(ucpl.UcplError, match="E692"):
        ucpl.StorageReader(f"vault:{vault.parent}/nothing")
    assert held() == before


@pytest.mark.parametrize("kind", ["vault", "store"])
def test_a_checkpoint_that_is_given_to_the_caller_can_be_read(
    kind: str, vault: Path, upload: Callable[..., str], tmp_path: Path
) -> None:
    src = f"vault:{vault}" if kind == "vault" else upload()
    plan = ucpl.plan(src, "plain()")
    before = held()
    found = ucpl.infer(src)
    ucpl.apply(plan, found.checkpoint, tmp_path / "target.pt")
    ucpl.apply(plan, evolve(found.checkpoint), tmp_path / "again.pt")
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "target.pt").read_bytes()
    assert held()["folders"] == before["folders"] + 1
    del found
    assert held() == before
    opened = ucpl.api.open_checkpoint(src)
    assert held()["folders"] == before["folders"] + 1 and opened.standing is not None
    del opened
    assert held() == before


def test_errors_say_the_url_after_the_call_that_raised_them(upload: Callable[..., str]) -> None:
    with pytest.raises(ucpl.UcplError) as caught:
        ucpl.verify(upload(), layout="zero9()")
    with pytest.raises(ucpl.UcplError) as raised:
        ucpl.convert(upload(EXAMPLE / "latest", "bucket/file"), "memory://bucket/target", "plain()")
    assert "ucpl-remote-" not in f"{caught.value} {caught.value.diagnostics} {raised.value.diagnostics}"
    assert "memory://bucket/file" in str(raised.value)


def test_calls_within_calls_end_apart() -> None:
    ended: list[str] = []

    with scoped():
        current_scope().callback(ended.append, "outer")
        with scoped():
            current_scope().callback(ended.append, "inner")
        assert ended == ["inner"]
        with separate() as mine:
            current_scope().callback(ended.append, "one's own")
        with separate() as other:
            current_scope().callback(ended.append, "another's")
        assert ended == ["inner"]
    assert ended == ["inner", "outer"]
    del other
    assert ended == ["inner", "outer", "another's"]
    mine.close()
    mine.close()
    assert ended == ["inner", "outer", "another's", "one's own"]
    with pytest.raises(KeyError), separate() as kept:
        current_scope().callback(ended.append, "of what failed")
        raise KeyError
    assert ended[-1] == "of what failed" and kept


def test_a_fork_ends_nothing_of_its_parent_s(tmp_path: Path) -> None:
    log = tmp_path / "ended"

    def note() -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")

    def forked() -> int:
        with scoped():
            current_scope().callback(note)
            return os.fork()  # each of the two leaves

    child = forked()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert log.read_text().split() == [str(os.getpid())]


def test_an_inode_that_another_shadow_has_by_now_stays_its_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    first, second = (SnapshotFile(None, name, ()) for name in "ab")  # type: ignore[arg-type]
    with scoped():
        with scoped():
            reading.sparse_file_registry()(file.stat(), first)
            with separate() as mine:
                reading.sparse_file_registry()(file.stat(), second)
        assert reading.remote_of(file.stat()) is second
        mine.close()
        assert reading.remote_of(file.stat()) is None


def test_room_of_what_could_not_be_fetched_is_given_back(
    upload: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    src = upload()

    def fails(*_: object) -> memoryview:
        raise ConnectionError

    before = held()
    monkeypatch.setattr(sparse_files.SparseFile, "_fetch", fails)
    with pytest.raises((ucpl.UcplError, OSError)):
        ucpl.verify(src)
    assert held() == before
