"""Targets in a store have the files of a local target.

With its manifest a target is complete, and invisible before, after any failure.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

import ucpl
import ucpl.api
from tests.forking import Command
from tests.storage.conftest import EXAMPLE
from tests.storage.test_sources import files, refused
from ucpl.errors import UcplError
from ucpl.planning.plan import Plan
from ucpl.storage import cache_dirs, objects
from ucpl.storage.objects import OfFsspec

URL = "memory://bucket/out"
TO = "zero3(dp=3)"
MANIFEST, UNFINISHED = "ucpl/manifest.json", "ucpl/unfinished.json"
CALLS = ("put", "create", "put_file", "read", "entry", "entries")


def held(store: fsspec.AbstractFileSystem, top: str = "/bucket/out") -> dict[str, bytes]:
    return {key[len(top) + 1 :]: one.getvalue() for key, one in store.store.items() if key.startswith(f"{top}/")}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return ucpl.plan(str(EXAMPLE), TO)


@pytest.fixture(scope="module")
def wanted(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("wanted") / "out"
    ucpl.apply(plan, EXAMPLE, target)
    return files(target)


@pytest.mark.parametrize("staged", [0, 1 << 20])
def test_a_target_in_a_store_has_the_bytes_of_a_local_one(
    store: fsspec.AbstractFileSystem,
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    wanted: dict[str, bytes],
    staged: int,
) -> None:
    """However few files grow here at once; and nothing stays here."""
    most: list[int] = []

    def seen(self: OfFsspec, key: str, path: Path) -> None:
        most.append(sum(f.stat().st_size for f in path.parent.iterdir()))
        put(self, key, path)

    put = OfFsspec.put_file
    monkeypatch.setattr(OfFsspec, "put_file", seen)
    monkeypatch.setattr(cache_dirs, "staging", lambda: staged)
    monkeypatch.setattr("ucpl.runtime.shipping.staging", lambda: staged)
    report = ucpl.apply(plan, EXAMPLE, URL)
    assert held(store) == wanted
    assert report.target == URL and report.bytes_read_back > report.bytes_target * 0.8
    assert max(most) <= max(len(data) for data in wanted.values()) or staged
    assert ucpl.compare(EXAMPLE, URL) and ucpl.verify(URL)


def test_a_file_in_a_store_is_one_object(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    ucpl.convert(EXAMPLE, tmp_path / "plain.pt", to="plain()")
    ucpl.convert(EXAMPLE, "memory://bucket/plain.pt", to="plain()")
    assert held(store, "/bucket") == {"plain.pt": (tmp_path / "plain.pt").read_bytes()}


def test_from_store_to_store(
    store: fsspec.AbstractFileSystem, plan: Plan, wanted: dict[str, bytes], upload: Callable[..., str]
) -> None:
    ucpl.apply(plan, upload(), URL)
    assert {k: v for k, v in held(store).items() if k != MANIFEST} == {k: v for k, v in wanted.items() if k != MANIFEST}
    for inside in ("memory://bucket/run/out", "memory://bucket"):
        error = refused(lambda inside=inside: ucpl.apply(plan, "memory://bucket/run", inside))  # type: ignore[misc]
        assert error.diagnostics[0].code in ("E507", "E500")


def test_what_is_there_is_kept_until_it_is_asked_for(
    store: fsspec.AbstractFileSystem, plan: Plan, wanted: dict[str, bytes]
) -> None:
    store.pipe_file("/bucket/out/mine.txt", b"mine")
    assert refused(lambda: ucpl.apply(plan, EXAMPLE, URL)).diagnostics[0].code == "E500"
    assert held(store) == {"mine.txt": b"mine"}
    ucpl.apply(plan, EXAMPLE, URL, force=True)
    assert held(store) == wanted
    assert ucpl.apply(plan, EXAMPLE, URL, resume=True).done_before
    other = ucpl.plan(str(EXAMPLE), "zero1(dp=2)")
    assert refused(lambda: ucpl.apply(other, EXAMPLE, URL, resume=True)).diagnostics[0].code == "E506"
    assert held(store) == wanted


@pytest.mark.fault(
    "Object stores", "a read at any moment while a target is replaced", "refused until the manifest exists"
)
def test_a_reader_sees_nothing_before_the_manifest(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, plan: Plan, wanted: dict[str, bytes]
) -> None:
    """After each uploaded object, with an old target in place.

    Reads are rejected until the last object.
    """
    ucpl.apply(ucpl.plan(str(EXAMPLE), "zero1(dp=2)"), EXAMPLE, URL)
    seen: list[str] = []

    def looked(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(self: OfFsspec, *args: object) -> object:
            out = call(self, *args)
            try:
                seen.append(ucpl.api.open_checkpoint(URL).format)
            except UcplError as error:
                seen.append(error.diagnostics[0].code)
            return out

        return wrapped

    for name in ("put", "create", "put_file", "remove"):
        monkeypatch.setattr(OfFsspec, name, looked(getattr(OfFsspec, name)))
    ucpl.apply(plan, EXAMPLE, URL, force=True)
    assert set(seen[1:-2]) == {"E681"} and seen[0] == "deepspeed" and seen[-2:] == ["deepspeed"] * 2, seen
    assert held(store) == wanted


@pytest.mark.fault(
    "Object stores",
    "the store fails for good at the k-th call of each kind, for every k",
    "no object or all objects; an error with a code; the next run succeeds",
)
@pytest.mark.parametrize("name", CALLS)
def test_a_store_that_fails_at_any_call_leaves_nothing_or_all(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, plan: Plan, wanted: dict[str, bytes], name: str
) -> None:
    """From the k-th call of a kind, all calls fail.

    The error is clear and no object is left, or the target is complete.
    """
    monkeypatch.setattr(objects, "attempts", lambda: 1)
    original = getattr(OfFsspec, name)
    for k in range(0, 300, 7 if name == "read" else 1):
        count = iter(range(1000))

        def failing(self: OfFsspec, *args: object, count: object = count, k: int = k) -> object:
            if next(count) >= k:  # type: ignore[call-overload]
                raise OSError(5, "the store is gone")
            return original(self, *args)

        with monkeypatch.context() as broken:
            broken.setattr(OfFsspec, name, failing)
            try:
                ucpl.apply(plan, EXAMPLE, URL)
            except UcplError as error:
                assert error.diagnostics[0].code in ("E503", "E505", "E685"), error
                assert "ucpl-remote-" not in str(error)
            else:
                assert k
        left = held(store)
        assert left in ({}, wanted), (k, sorted(left))
        if left:
            break
    assert left == wanted


@pytest.mark.fault(
    "Object stores", "the same, and removal fails too", "the target does not count; `--resume` begins again"
)
def test_what_cannot_be_cleared_does_not_count_and_goes_with_resume(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, plan: Plan, wanted: dict[str, bytes]
) -> None:
    def gone(*_: object) -> None:
        raise OSError(5, "the store is gone")

    with monkeypatch.context() as broken:
        broken.setattr(OfFsspec, "remove", gone)
        broken.setattr("ucpl.runtime.shipping.manifest_of", gone)
        error = refused(lambda: ucpl.apply(plan, EXAMPLE, URL))
    assert "--resume" in error.diagnostics[0].notes[-1]
    assert UNFINISHED in held(store) and MANIFEST not in held(store)
    assert refused(lambda: ucpl.infer(URL)).diagnostics[0].code == "E681"
    assert refused(lambda: ucpl.apply(plan, EXAMPLE, URL)).diagnostics[0].code == "E500"
    ucpl.apply(plan, EXAMPLE, URL, resume=True)
    assert held(store) == wanted


@pytest.mark.fault(
    "Object stores", "the store has other bytes than were sent", "found by reading back; nothing remains"
)
def test_other_bytes_than_were_sent_are_found(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    put = OfFsspec.put_file

    def spoiled(self: OfFsspec, key: str, path: Path) -> None:
        put(self, key, path)
        data = bytearray(self._system.cat_file(self._path(key)))
        data[len(data) // 2] ^= 1
        self._system.pipe_file(self._path(key), bytes(data))

    monkeypatch.setattr(OfFsspec, "put_file", spoiled)
    error = refused(lambda: ucpl.apply(plan, EXAMPLE, URL))
    assert error.diagnostics[0].code == "E505" and held(store) == {}


def test_a_second_run_into_the_same_place_is_found(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    """Each run records itself.

    The one whose record was replaced changes nothing.
    """
    from ucpl.runtime import shipping

    def other(*_: object) -> str:
        store.pipe_file(f"/bucket/out/{UNFINISHED}", json.dumps({"run": "another"}).encode())
        return "{}"

    monkeypatch.setattr(shipping, "manifest_of", other)
    assert refused(lambda: ucpl.apply(plan, EXAMPLE, URL)).diagnostics[0].code == "E502"
    assert UNFINISHED in held(store) and MANIFEST not in held(store) and len(held(store)) > 5


def test_ctrl_c_leaves_nothing(store: fsspec.AbstractFileSystem, plan: Plan) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    error = refused(lambda: ucpl.apply(plan, EXAMPLE, URL, progress=stop))
    assert error.diagnostics[0].code == "E620" and held(store) == {}


@pytest.mark.fault(
    "Object stores", "SIGKILL at each step", "the target does not count; `--resume` writes the same bytes"
)
@pytest.mark.parametrize("point", ["ship-begun", "ship-sent", "ship-manifest"])
def test_a_killed_run_leaves_nothing_that_counts(tmp_path: Path, wanted: dict[str, bytes], point: str) -> None:
    """A kill at each step; the store survives.

    --resume starts again.
    """
    url, target = f"local://{tmp_path}/out", tmp_path / "out"
    command, here = ("convert", EXAMPLE, url, "--to", TO), str(tmp_path)
    killed = Command(*command, UCPL_REMOTE_DIR=here, UCPL_FAIL_AT=f"{point}:1:kill")
    assert killed.end() == -signal.SIGKILL, killed.err
    assert not (target / MANIFEST).exists() and (target / UNFINISHED).exists()
    assert Command(*command, UCPL_REMOTE_DIR=here).end() == 4
    done = Command(*command, "--resume", UCPL_REMOTE_DIR=here)
    assert done.end() == 0, done.err
    assert files(target) == wanted
    assert sorted(os.listdir(tmp_path)) == ["out"]
