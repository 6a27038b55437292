"""Short runs of the source that several tiles share.

The bytes between these runs are read once, for all of the tiles.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.test_bands import SMALL, Counting, numbers, pieces, world
from tests.runtime.test_execute import MEMORY, merged, run
from tests.runtime.world import Stored, moves, open_target, plan_of, read_target, stored, write_source
from ucpl.errors import UcplError
from ucpl.extents import StoredTensor
from ucpl.runtime import buffers, compare
from ucpl.runtime.boxes import Box, clip
from ucpl.runtime.disk import use_disk
from ucpl.runtime.failpoints import set_failpoints


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(buffers, "TILE_MAX", SMALL)
    yield
    set_failpoints("")


def columns(root, shape, here, there):
    """A matrix that is cut by column, to another number of ranks."""
    return world(root, numbers("<u2", shape), [((0, 1), 1, here), ((0, 1), 1, there)])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("here", "there"), [(1, 2), (2, 4), (2, 3), (3, 4), (1, 16), (4, 1), (5, 7)], ids=lambda n: str(n)
)
def test_columns_are_read_once(tmp_path, here, there, workers):
    shape, memory = (800, 421), 2 * MEMORY
    plan, source, wanted = columns(tmp_path / "src", shape, here, there)
    report = run(plan, source, tmp_path / "out", workers=workers, memory=memory)
    for j, array in enumerate(wanted):
        assert read_target(tmp_path / "out", f"d{j}.pt")["w"].tobytes() == array.tobytes()
    assert report.bytes_read <= 1.02 * report.bytes_needed
    # Bytes read for all tiles count as checked source bytes, too.
    assert report.source_bytes_checked == report.bytes_needed and report.bytes_read_verify == 0
    assert report.bytes_live_max <= memory


def test_columns_in_runs_of_kilobytes_are_read_in_few_calls(tmp_path, monkeypatch):
    """Not one call for each run: one more copy is faster."""
    monkeypatch.setattr(buffers, "TILE_MAX", 1 << 17)
    plan, source, wanted = columns(tmp_path / "src", (128, 7168), 1, 2)
    disk = Counting()
    before = use_disk(disk)
    try:
        report = run(plan, source, tmp_path / "out", memory=4 << 20)
    finally:
        use_disk(before)
    for j, array in enumerate(wanted):
        assert read_target(tmp_path / "out", f"d{j}.pt")["w"].tobytes() == array.tobytes()
    assert len(disk.sizes) <= 8 and sum(disk.sizes) == report.bytes_read == report.bytes_needed


def test_halves_of_a_row_that_go_to_two_places_of_one_tensor_are_read_once(tmp_path):
    """Adjacent queries and keys in a row go to separate places."""
    model = numbers("<u2", (800, 200))
    source = write_source(tmp_path / "src", [Stored("s0", ("w",), "u16", model)])
    rows = [(0, 0, 0, (800, 100), 100 * half, (200, 1), 80000 * half, (100, 1)) for half in range(2)]
    plan = plan_of(
        [stored(e) for e in source.extents.values()],
        [StoredTensor("d0.pt", ("w",), "u16", (1600, 100), "weight", "w")],
        moves("copy", rows),
    )
    report = run(plan, source, tmp_path / "out", memory=4 << 20)
    assert np.array_equal(read_target(tmp_path / "out", "d0.pt")["w"], np.concatenate(np.hsplit(model, 2)))
    assert report.bytes_read <= 1.02 * report.bytes_needed


def test_a_band_and_the_windows_of_its_columns_have_room_together(tmp_path):
    """A half-transposed tensor with shared columns in its other half.

    The bands of the transposed half take most of memory.
    """
    square, wide = numbers("<u4", (512, 512)), numbers("<u4", (1024, 1024))
    source = write_source(tmp_path / "src", [Stored("s0", ("w",), "i32", square), Stored("s1", ("w",), "i32", wide)])
    rows = [
        (0, 0, 0, (512, 512), 0, (1, 512), 0, (512, 1)),
        (0, 1, 0, (1024, 512), 0, (1024, 1), 512 * 512, (512, 1)),
        (0, 1, 1, (1024, 512), 512, (1024, 1), 0, (512, 1)),
    ]
    targets = [StoredTensor(f"d{t}.pt", ("w",), "i32", (n, 512), "weight", "w") for t, n in enumerate((1536, 1024))]
    plan = plan_of([stored(e) for e in source.extents.values()], targets, moves("copy", rows))
    # No more is taken than may be: that is asserted where it is taken.
    assert run(plan, source, tmp_path / "out", workers=1, memory=3 << 20).bytes_live_max <= 3 << 20
    found = read_target(tmp_path / "out", "d0.pt")["w"]
    assert np.array_equal(found, np.concatenate([square.T, wide[:, :512]]).view(found.dtype))


def flat_world(root, model, degrees, lead, parts):
    """Columns of a matrix to ranks of another number: (plan, source, targets).

    Each rank has its own columns in a flat buffer behind `lead` elements, cut into parts.
    """
    here, there = (pieces(model.shape, 1, n) for n in degrees)
    tensors = [Stored(f"s{i}", ("w",), "u16", model[:, low : low + n]) for i, (low, n) in enumerate(here)]
    tensors.append(Stored("lead", ("w",), "u16", numbers("<u2", (max(lead, 1),))))
    source = write_source(root, tensors)
    rows, wanted = [], []
    targets: list[StoredTensor] = []
    for to, m in there:
        flat = np.concatenate([tensors[-1].bits[:lead], model[:, to : to + m].reshape(-1)])
        size = -(-len(flat) // parts)
        for low in range(0, len(flat), size):
            high, t = min(low + size, len(flat)), len(targets)
            wanted.append(flat[low:high])
            targets.append(StoredTensor(f"d{t}.pt", ("w",), "u16", (high - low,), "weight", "w"))
            whole = [(len(here), Box((lead,), 0, (1,), 0, (1,)))] if lead else []
            for i, (begin, n) in enumerate(here):
                first, end = max(begin, to), min(begin + n, to + m)
                if first < end:
                    sides = (model.shape[0], end - first)
                    whole.append((i, Box(sides, first - begin, (n, 1), lead + first - to, (m, 1))))
            for i, box in whole:
                for b in clip(box, low, high):
                    rows.append((0, i, t, *merged(b.shape, b.source_step, b.target_step), b.source, b.target - low))
    rows = [(*row[:4], row[6], row[4], row[7], row[5]) for row in rows]
    return plan_of([stored(e) for e in source.extents.values()], targets, moves("copy", rows)), source, wanted


@pytest.mark.parametrize("memory", [MEMORY, 16 * MEMORY])
@pytest.mark.parametrize("lead", [0, 1000])
def test_columns_in_flat_buffers_are_read_once(tmp_path, lead, memory):
    """Tiles of two ranks end at different rows.

    With little memory some rows are read for two groups.
    """
    plan, source, wanted = flat_world(tmp_path / "src", numbers("<u2", (900, 401)), (1, 4), lead, 3)
    report = run(plan, source, tmp_path / "out", workers=1, memory=memory)
    for t, flat in enumerate(wanted):
        assert read_target(tmp_path / "out", f"d{t}.pt")["w"].tobytes() == flat.tobytes()
    assert report.bytes_read <= 1.02 * report.bytes_needed
    # Runs that two groups read are counted separately: none is read a third time for its CRC.
    assert report.bytes_read_verify == 0 and report.source_bytes_unverified == 0


@settings(max_examples=40)
@given(st.tuples(st.integers(2, 300), st.integers(1, 80)), st.integers(1, 4), st.integers(1, 9), st.data())
def test_any_columns_to_any_others(tmp_path_factory, shape, here, there, data):
    top = tmp_path_factory.mktemp("world")
    lead, parts = data.draw(st.sampled_from([0, 1, 700])), data.draw(st.integers(1, 3))
    plan, source, wanted = flat_world(top / "src", numbers("<u2", shape), (here, there), lead, parts)
    memory, workers = data.draw(st.sampled_from([MEMORY, 2 * MEMORY])), data.draw(st.integers(1, 2))
    report = run(plan, source, top / "out", workers=workers, memory=memory)
    for t, flat in enumerate(wanted):
        assert read_target(top / "out", f"d{t}.pt")["w"].tobytes() == flat.tobytes()
    assert report.bytes_live_max <= memory
    assert report.source_bytes_unverified == 0
    assert compare(plan, source, open_target(top / "out", [f"d{t}.pt" for t in range(len(wanted))]), memory=memory)


def test_a_run_that_was_stopped_in_a_group_resumes_with_the_rest_of_it(tmp_path):
    plan, source, wanted = columns(tmp_path / "src", (800, 420), 2, 4)
    set_failpoints("tile-written:90:eio")
    with pytest.raises(UcplError):
        run(plan, source, tmp_path / "out", workers=1, memory=2 << 20)
    set_failpoints("")
    report = run(plan, source, tmp_path / "out", workers=1, memory=2 << 20, resume=True)
    assert 0 < report.tiles_resumed < report.tiles
    # The journal also records the source bytes of each tile: none of them is read again for its CRC.
    assert report.source_bytes_unverified == report.bytes_read_verify == 0
    for j, array in enumerate(wanted):
        assert read_target(tmp_path / "out", f"d{j}.pt")["w"].tobytes() == array.tobytes()
