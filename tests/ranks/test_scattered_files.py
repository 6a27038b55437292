"""A source whose files are on the disks of several hosts.

It is one folder to every rank; each file is read on its host. Duplicate files are rejected. Ranks are threads and hosts
are folders here; tests/interop/test_ranks.py starts ranks by torchrun.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from pathlib import Path
from secrets import token_hex

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks.test_apply import MEMORY, UNIQUE, run, spread, together
from tests.ranks.test_apply import small as small
from tests.runtime.test_resume import tree
from tests.vault.keys import authority, keys_of
from ucpl.errors import UcplError, fail
from ucpl.ranks import scattered_files
from ucpl.ranks.scattered_files import FileServer, Peer, one_folder, own_host
from ucpl.runtime.process_group import SLACK, near_sources
from ucpl.storage import wire
from ucpl.storage.authentication import TlsConnector, TlsListener, UnixConnector, UnixListener
from ucpl.storage.keys import Keys
from ucpl.storage.reading import pread

MANIFEST = "ucpl/manifest.json"
FILES = ("a", "b", "c", "m")


def hosts(top: Path, source: Path, deal: dict[int, str]) -> list[Path]:
    """Folders of several hosts with some files of the source each.

    The files have the same relative paths.
    """
    found = []
    for host, names in deal.items():
        folder = top / f"host{host}" / "src"
        folder.mkdir(parents=True)
        for name in names:
            shutil.copy2(source / name, folder / name)
        found.append(folder)
    return found


DEALS = {
    "one each": {0: "a", 1: "b", 2: "cm"},
    "one has all": {0: "", 1: "abcm", 2: ""},
    "copies of some": {0: "ac", 1: "abc", 2: "cm"},
}


@pytest.mark.parametrize("deal", DEALS)
def test_ranks_write_what_one_process_writes_where_each_has_some_files(tmp_path, deal):
    plan, source = spread(tmp_path / "src")
    run(plan, source, tmp_path / "one")
    folders = hosts(tmp_path, tmp_path / "src", DEALS[deal])
    received = {}

    def act(rank, team):
        with one_folder(team, team, folders[rank]) as folder:
            assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
            report = run(plan, evolve(source, root=folder), tmp_path / "all", team, memory=2 * MEMORY)
            received[rank] = team.received
            return report

    ends = together(3, act)
    assert [e for e in ends if isinstance(e, UcplError)] == []
    there, alone = tree(tmp_path / "all"), tree(tmp_path / "one")
    assert {**there, MANIFEST: b""} == {**alone, MANIFEST: b""}  # which says of the files that were read which they are
    assert UNIQUE <= ends[0].bytes_read <= 1.02 * UNIQUE
    assert ends[0].bytes_received == sum(received.values())
    assert ends[0].bytes_received > 0  # the leader checks bytes that no move reads
    assert {path.name: path.read_bytes() for folder in folders for path in folder.iterdir()} == {
        name: (tmp_path / "src" / name).read_bytes() for name in FILES
    }


def test_what_a_rank_has_it_reads_itself(tmp_path):
    plan, source = spread(tmp_path / "src")
    folders = hosts(tmp_path, tmp_path / "src", {0: "ac", 1: "b", 2: "m"})
    received = {}

    def act(rank, team):
        with one_folder(team, team, folders[rank]) as folder:
            report = run(plan, evolve(source, root=folder), tmp_path / "all", team, memory=2 * MEMORY)
            received[rank] = team.received
            return report

    together(3, act)
    # m is nearly the complete source. Its part that exceeds an even share is dealt to others, and the leader checks its
    # CRCs.
    assert received[2] == 0
    assert received[0] + received[1] < UNIQUE * 0.75


@pytest.mark.parametrize("same", [True, False])
def test_one_folder_that_all_see_stays_what_it_is(tmp_path, same):
    _, source = spread(tmp_path / "src")
    folders = [source.root] * 2 if same else hosts(tmp_path, tmp_path / "src", {0: "abcm", 1: "abcm"})
    os.utime(folders[1] / "a", ns=(1, 1))  # of copies one may be younger

    def act(rank, team):
        with one_folder(team, team, folders[rank]) as folder:
            return folder, dict(team.near)

    assert together(2, act) == [(folders[0], {}), (folders[1], {})]


@pytest.mark.parametrize("way", ["size", "bytes"])
def test_two_files_of_one_name_are_refused(tmp_path, way):
    spread(tmp_path / "src")
    folders = hosts(tmp_path, tmp_path / "src", {0: "ab", 1: "bcm", 2: "b"})
    raw = bytearray((folders[2] / "b").read_bytes())
    raw[-1] ^= 1
    (folders[2] / "b").write_bytes(raw if way == "bytes" else raw + b"x")

    def act(rank, team):
        with one_folder(team, team, folders[rank]) as folder:
            return folder

    for end in together(3, act):
        assert isinstance(end, UcplError)
        assert end.diagnostics[0].code == "E625"
        assert "is not the same file on rank 0 and on rank 2" in end.diagnostics[0].message


def test_a_file_that_changes_on_its_host_is_refused(tmp_path):
    plan, source = spread(tmp_path / "src")
    folders = hosts(tmp_path, tmp_path / "src", {0: "ab", 1: "cm"})

    def act(rank, team):
        with one_folder(team, team, folders[rank]) as folder:
            team.all("laid")
            if rank == 1:
                os.utime(folders[1] / "m", ns=(1, 1))
            team.all("changed")
            return run(plan, evolve(source, root=folder), tmp_path / "all", team, memory=2 * MEMORY)

    ends = together(2, act)
    assert isinstance(ends[0], UcplError)
    assert ends[0].diagnostics[0].code == "E611"
    assert not (tmp_path / "all").exists()


def test_ranks_of_several_hosts_give_files_to_those_with_a_certificate_alone(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    server = FileServer({"a": tmp_path / "a"}, TlsListener((own_host("127.0.0.1"), 0), Keys(keys_of(0)), None))
    try:
        came = list[int]()
        keys = [Keys(keys_of(1)), Keys(authority("second") / "d1")]
        good, bad = (Peer(0, TlsConnector(server.address, one, None), came.append) for one in keys)
        room = bytearray(4)
        assert good.read("a", [memoryview(room)], 3) == 4
        assert (bytes(room), came) == (b"3456", [4])
        assert good.read("a", [memoryview(room)], 8) == 2
        for peer, name, said in (
            (bad, "a", "has no certificate of this vault's authority"),
            (good, "b", "does not answer"),
            (good, "../a", "does not answer"),
        ):
            with pytest.raises(OSError, match=said):
                peer.read(name, [memoryview(room)], 0)
        (tmp_path / "a").unlink()
        with pytest.raises(OSError, match="which has it, says: No such file"):
            good.read("a", [memoryview(room)], 0)
        good.close()
    finally:
        server.close()
    with pytest.raises(OSError, match="does not answer"):
        good.read("a", [memoryview(room)], 0)


def test_ranks_on_several_hosts_speak_over_tls_or_not_at_all(tmp_path, monkeypatch):
    """Ranks are threads; each reports a host of its own."""
    _, source = spread(tmp_path / "src")
    folders = hosts(tmp_path, tmp_path / "src", {0: "ab", 1: "cm"})
    monkeypatch.setattr(scattered_files, "host_mark", lambda: token_hex(8))
    wanted = {name: (source.root / name).read_bytes() for name in FILES}

    def act(keys):
        def one(rank, team):
            with one_folder(team, team, folders[rank], keys[rank]) as folder:
                found = {}
                for name in FILES:
                    fd = os.open(folder / name, os.O_RDONLY)
                    found[name] = pread(fd, os.fstat(fd).st_size, 0)
                    os.close(fd)
                return found

        return together(2, one)

    assert act([keys_of(0), keys_of(1)]) == [wanted, wanted]
    for keys in ([keys_of(0), None], [None, None]):
        for end in act(keys):
            assert isinstance(end, UcplError)
            assert end.diagnostics[0].code in ("E628", "E621")


@given(
    st.integers(1, 6).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.tuples(st.integers(1, 9), st.integers(0, size - 1)), min_size=1, max_size=40),
        )
    )
)
def test_work_is_done_where_its_source_lies_as_far_as_that_is_even(drawn):
    size, work = drawn
    cost = np.array([c for c, _ in work], np.int64)
    whose = near_sources(
        cost, [{(home,): 100, ((home + 1) % size,): 1} if size > 1 else {(0,): 1} for _, home in work], size
    )
    load = np.bincount(whose, weights=cost, minlength=size)
    even = cost.sum() / size
    for i, (_, home) in enumerate(work):
        assert whose[i] == home or np.bincount([h for _, h in work], weights=cost, minlength=size)[home] > SLACK * even
    for rank in range(size):
        if load[rank] > SLACK * even:  # the rest fits no other rank
            assert all(load.min() + c > even for c, owner in zip(cost, whose, strict=True) if owner == rank)


def test_a_hanging_rank_is_waited_for_while_it_is_alive(tmp_path, monkeypatch):
    """Its disk may be slow.

    The wait ends after its death, or if it never greets.
    """
    (tmp_path / "a").write_bytes(b"some")
    wakes = threading.Event()
    monkeypatch.setattr(FileServer, "_bytes", lambda self, name, low, high: wakes.wait(20) and b"some")
    monkeypatch.setattr(wire, "EVERY", 0.01)
    monkeypatch.setattr(wire, "GREETING", 0.2)
    way = UnixConnector(token_hex(8))
    server, looks = FileServer({"a": tmp_path / "a"}, UnixListener(way.name)), iter(range(30))

    def look():
        if next(looks, None) is None:
            fail("E621", "rank 1 of 2 is gone")

    buffer = bytearray(4)
    try:
        with pytest.raises(UcplError, match="rank 1 of 2 is gone"):
            Peer(1, way, print, look).read("a", [memoryview(buffer)], 0)
        wakes.set()
        assert Peer(1, way, lambda size: None).read("a", [memoryview(buffer)], 0) == 4
    finally:
        server.close()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(OSError, match="rank 1, which has it, does not answer"),
    ):
        Peer(1, TlsConnector(silent.getsockname(), Keys(keys_of(0)), None), print).read("a", [memoryview(buffer)], 0)
