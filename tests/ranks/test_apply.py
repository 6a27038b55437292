"""Ranks that run a plan together, with and without failures.

They write the bytes of one process, and read each byte of the source once. Ranks are threads with torch's in-memory
store; tests/interop/test_ranks.py starts them by torchrun.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.runtime.test_bands import SMALL, numbers
from tests.runtime.test_resume import tree
from tests.runtime.world import Stored, Torch, bits_of, copies, moves, plan_of, stored, write_source
from ucpl.errors import UcplError
from ucpl.extents import StoredTensor
from ucpl.ranks import job
from ucpl.ranks.job import StoreGroup
from ucpl.runtime import buffers, execute
from ucpl.runtime.buffers import MEMORY_MIN
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.options import RunOptions
from ucpl.runtime.process_group import ALONE, shares

MEMORY = 2 * MEMORY_MIN


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many tiles with frequent journal entries, and a fast heartbeat."""
    monkeypatch.setattr(buffers, "TILE_MAX", SMALL)
    monkeypatch.setattr("ucpl.runtime.moving.SYNC_BYTES", 1)
    monkeypatch.setattr(job, "BEAT", 0.02)
    monkeypatch.setattr(job, "GONE", 0.5)
    monkeypatch.setattr(job, "POLL", 0.005)
    yield
    set_failpoints("")


def together(size: int, act, ranks=None):
    """Run `act(rank, job)` in one thread per rank.

    Returns the result or error of each.
    """
    store = HashStore()
    ends: list[Any] = [None] * size

    def one(rank):
        team = StoreGroup(store, rank, size)
        patience = job.GONE
        try:
            ends[rank] = act(rank, team)
        except UcplError as error:
            ends[rank] = error
            team.failed(error.diagnostics[0].code, error.diagnostics[0].message)
            patience = 0.1
        team.close(patience)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (range(size) if ranks is None else ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ends


def run(plan, source, out, team=None, **more):
    more.setdefault("memory", MEMORY)
    options = RunOptions(workers=1, **more)
    return execute(plan, source, Torch(), out, options, team or ALONE)


UNIQUE = 2 * 61 * 103 * 4 + 35 * 4 + 640 * 420 * 2  # bytes of the source


def spread(root: Path):
    """Files of several sizes, with several destinations.

    One tensor has three destinations, one is split by columns into three, one is transposed in its copy.
    """
    tensors = [Stored(f, (f,), "f32", bits_of("f32", (61, 103), i)) for i, f in enumerate("ab")]
    tensors.append(Stored("m", ("m",), "f16", numbers("<u2", (640, 420))))
    tensors.append(Stored("c", ("c",), "f32", bits_of("f32", (35,), 7)))
    source = write_source(root, tensors)
    a, b, m, c = (stored(e) for e in source.extents.values())
    targets = [StoredTensor(f"t{i}.pt", ("a",), "f32", a.shape, "weight", "a") for i in range(3)]
    targets.append(StoredTensor("t0.pt", ("b",), "f32", b.shape, "weight", "b"))
    targets += [StoredTensor(f"t{i}.pt", ("m",), "f16", (640, 140), "weight", "m") for i in range(3)]
    targets += [StoredTensor(f"t{i}.pt", ("c",), "f32", (35,), "weight", "c") for i in range(2)]
    rows: list[Any] = [(0, 0, i, (a.numel,), 0, (1,), 0, (1,)) for i in range(3)]
    rows.append((1, 1, 3, (b.numel,), 0, (1,), 0, (1,)))
    rows += [(2, 2, 4 + i, (640, 140), 140 * i, (420, 1), 0, (140, 1)) for i in range(3)]
    rows += [
        (3, 3, 7, (35,), 0, (1,), 0, (1,)),
        (3, 3, 8, (20,), 0, (1,), 15, (1,)),
        (3, 3, 8, (15,), 20, (1,), 0, (1,)),
    ]
    return plan_of([a, b, m, c], targets, moves("copy", rows), tensors=("a", "b", "m", "c")), source


@pytest.mark.parametrize("size", range(1, 9))
def test_ranks_write_what_one_process_writes_and_read_each_byte_once(tmp_path, size):
    plan, source = spread(tmp_path / "src")
    alone = run(plan, source, tmp_path / "one")
    ends = together(size, lambda rank, team: run(plan, source, tmp_path / "all", team, memory=2 * MEMORY))
    assert tree(tmp_path / "all") == tree(tmp_path / "one")
    assert alone.bytes_read > UNIQUE  # it reads copies again, from the page cache
    if size > 1:
        assert UNIQUE <= ends[0].bytes_read <= 1.02 * UNIQUE
    assert ends[0].bytes_read_back == alone.bytes_read_back
    assert ends[0].bytes_target == alone.bytes_target


def test_every_rank_writes_a_share(tmp_path):
    plan, source = spread(tmp_path / "src")
    written = {}

    def act(rank, team):
        report = run(plan, source, tmp_path / "all", team)
        written[rank] = report.bytes_written
        return report

    whole = together(4, act)[0].bytes_target
    assert all(n > whole / 8 for rank, n in written.items() if rank), written


@pytest.mark.fault(
    "Ranks that run a plan together",
    "a write of one rank fails with EIO",
    "the others name it; any number of ranks, or one process, resumes",
)
def test_a_rank_that_fails_ends_the_others_and_any_number_resumes(tmp_path):
    plan, source = spread(tmp_path / "src")
    run(plan, source, tmp_path / "one")
    out = tmp_path / "all"
    set_failpoints("target-write:30:eio")  # the thirtieth of all ranks
    ends = together(3, lambda rank, team: run(plan, source, out, team))
    codes = sorted(e.diagnostics[0].code for e in ends)
    assert codes == ["E503", "E621", "E621"]
    (first,) = (rank for rank, e in enumerate(ends) if e.diagnostics[0].code == "E503")
    for e in ends:
        if e.diagnostics[0].code == "E621":
            assert f"rank {first} of 3 failed" in e.diagnostics[0].message
    assert not out.exists()
    set_failpoints("target-write:8:eio")  # and once more, with other ranks
    again = together(2, lambda rank, team: run(plan, source, out, team, resume=True))
    assert any(isinstance(e, UcplError) for e in again)
    set_failpoints("")
    report = together(5, lambda rank, team: run(plan, source, out, team, resume=True))[0]
    assert report.tiles_resumed >= 20
    assert tree(out) == tree(tmp_path / "one")


def test_one_process_resumes_the_work_of_ranks(tmp_path):
    plan, source = spread(tmp_path / "src")
    count = run(plan, source, tmp_path / "one").tiles
    set_failpoints(f"target-write:{count - 3}:eio")
    together(3, lambda rank, team: run(plan, source, tmp_path / "all", team))
    set_failpoints("")
    report = run(plan, source, tmp_path / "all", resume=True)
    assert report.tiles_resumed > count // 2  # of more than one rank
    assert tree(tmp_path / "all") == tree(tmp_path / "one")


def test_a_rank_that_is_not_heard_ends_the_others(tmp_path):
    plan, source = spread(tmp_path / "src")
    silent = threading.Event()

    def act(rank, team):
        if rank == 1:  # it is there, and then nothing is heard of it
            team._end.set()
            silent.wait(10)
            return None
        try:
            return run(plan, source, tmp_path / "all", team)
        finally:
            silent.set()

    ends = together(3, act)
    for rank in (0, 2):
        assert ends[rank].diagnostics[0].code == "E621"
        assert "rank 1 of 3 is gone" in ends[rank].diagnostics[0].message
    assert not (tmp_path / "all").exists()


@pytest.mark.fault("Ranks that run a plan together", "the job's rendezvous store is gone", "E621")
def test_a_store_that_is_gone_ends_a_rank():
    class Broken(HashStore):
        broken = False

        def set(self, key, value):
            if self.broken:
                raise RuntimeError("Connection reset by peer")
            super().set(key, value)

    store = Broken()
    threading.Thread(target=StoreGroup, args=(store, 1, 2), daemon=True).start()
    team = StoreGroup(store, 0, 2)
    store.broken = True
    with pytest.raises(UcplError) as caught:
        team.all("anything")
    assert "Connection reset by peer" in str(caught.value)


@pytest.mark.fault(
    "Ranks that run a plan together", "ranks with different plans or disks", "refused before any byte moves"
)
def test_ranks_with_different_plans_are_refused(tmp_path):
    plan, source = spread(tmp_path / "src")
    other = copies(source)
    ends = together(3, lambda rank, team: run(other if rank == 2 else plan, source, tmp_path / "all", team))
    said = [e.diagnostics[0] for e in ends]
    assert {d.code for d in said} == {"E622"}
    assert "rank 2 was given another plan than rank 0" in said[0].message
    assert [p.file for p in said[0].labels] == ["rank 0", "rank 2"]
    assert not (tmp_path / "all").exists()


def test_a_rank_that_sees_another_disk_is_refused(tmp_path):
    plan, source = spread(tmp_path / "src")
    (tmp_path / "disk").mkdir()
    place = {0: tmp_path / "all", 1: tmp_path / "disk" / "all"}
    ends = together(2, lambda rank, team: run(plan, source, place[rank], team))
    assert ends[1].diagnostics[0].code == "E623"
    assert "rank 1 of 2 failed" in ends[0].diagnostics[0].message
    # and an older run's journal that is there is not taken for it
    set_failpoints("target-write:9:eio")
    with pytest.raises(UcplError):
        run(plan, source, place[1])
    set_failpoints("")
    ends = together(2, lambda rank, team: run(plan, source, place[rank], team))
    assert "is of another run" in ends[1].diagnostics[0].message


def test_a_finished_target_is_done_for_all(tmp_path):
    plan, source = spread(tmp_path / "src")
    together(2, lambda rank, team: run(plan, source, tmp_path / "all", team))
    ends = together(3, lambda rank, team: run(plan, source, tmp_path / "all", team, resume=True))
    assert all(report.done_before for report in ends)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 12))
def test_shares_are_even_and_neighbours_stay_together(cost, size):
    whose = shares(np.array(cost), size)
    assert (np.diff(whose) >= 0).all() and whose.min() >= 0 and whose.max() < size
    load = np.bincount(whose, cost, size)
    assert load.max() <= sum(cost) / size + max(cost)
