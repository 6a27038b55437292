"""Transposed tensors: tiles assembled together read their source once, in runs."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.test_execute import MEMORY, merged, run, strides_of
from tests.runtime.world import Stored, moves, open_target, plan_of, read_target, stored, write_source
from ucpl.errors import UcplError
from ucpl.extents import StoredTensor
from ucpl.runtime import batches, buffers, compare, reading
from ucpl.runtime.batches import cut_bands
from ucpl.runtime.disk import Disk, use_disk
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.joined_crcs import crc_of_comb
from ucpl.runtime.tiles import Unit, cut_tiles

SMALL = 4096  # bytes of a tile: the least


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(buffers, "TILE_MAX", SMALL)
    monkeypatch.setattr(batches, "RUN_WANTED", 1024)
    yield
    set_failpoints("")


class Counting(Disk):
    """Reads of sources, which are the files without an ending."""

    def __init__(self):
        self.sizes, self.names, self.lock = [], {}, threading.Lock()

    def open(self, path, flags, mode=0o666):
        fd = super().open(path, flags, mode)
        self.names[fd] = path.name
        return fd

    def read(self, fd, views, position):
        got = super().read(fd, views, position)
        if "." not in self.names[fd]:
            with self.lock:
                self.sizes.append(got)
        return got


@pytest.fixture
def counted():
    disk = Counting()
    before = use_disk(disk)
    yield disk
    use_disk(before)


def pieces(shape, axis, degree):
    """As torch.chunk cuts them: (low, size)."""
    each = -(-shape[axis] // degree)
    return [(low, min(each, shape[axis] - low)) for low in range(0, shape[axis], each)]


def numbers(dtype, shape):
    """Element i has number i."""
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def world(root, model, ways):
    """A cut tensor to another layout: (plan, source, targets).

    ways: of each side, the order of its dims, the axis that is cut, and into how many.
    """
    (order, axis, degree), (to, to_axis, to_degree) = ways
    dtype = {1: "u8", 2: "u16", 4: "i32", 8: "i64"}[model.itemsize]
    here = pieces(model.shape, axis, degree)
    there = pieces(model.shape, to_axis, to_degree)

    def slab(at, low, n):
        return tuple(slice(low, low + n) if d == at else slice(None) for d in range(model.ndim))

    tensors = [
        Stored(f"s{i}", ("w",), dtype, np.ascontiguousarray(model[slab(axis, *p)].transpose(order)))
        for i, p in enumerate(here)
    ]
    source = write_source(root, tensors)
    wanted = [np.ascontiguousarray(model[slab(to_axis, *p)].transpose(to)) for p in there]
    rows = []
    for i, (low, n) in enumerate(here):
        for j, (to_low, m) in enumerate(there):
            box = [[0, size] for size in model.shape]
            for at, (begin, count) in ((axis, (low, n)), (to_axis, (to_low, m))):
                end = min(box[at][0] + box[at][1], begin + count)
                box[at][0] = max(box[at][0], begin)
                box[at][1] = end - box[at][0]
            if min(size for _, size in box) <= 0:
                continue
            steps = []
            for perm, at, begin, array in ((order, axis, low, tensors[i].bits), (to, to_axis, to_low, wanted[j])):
                by_dim = dict(zip(perm, strides_of(array.shape), strict=True))
                offset = sum((box[d][0] - (begin if d == at else 0)) * by_dim[d] for d in range(model.ndim))
                steps.append((offset, [by_dim[d] for d in to]))
            shape = tuple(box[d][1] for d in to)
            flat, s, t = merged(shape, steps[0][1], steps[1][1])
            rows.append((0, i, j, flat, steps[0][0], s, steps[1][0], t))
    targets = [StoredTensor(f"d{j}.pt", ("w",), dtype, w.shape, "weight", "w") for j, w in enumerate(wanted)]
    plan = plan_of([stored(e) for e in source.extents.values()], targets, moves("copy", rows))
    return plan, source, wanted


@st.composite
def turned(draw):
    rank = draw(st.integers(2, 3))
    shape = tuple(draw(st.integers(1, 160 if rank == 2 else 31)) for _ in range(rank))
    ways = [
        (tuple(draw(st.permutations(range(rank)))), draw(st.integers(0, rank - 1)), draw(st.integers(1, 4)))
        for _ in range(2)
    ]
    return shape, ways


@settings(max_examples=60)
@given(turned(), st.sampled_from(["u1", "<u2", "<u4", "<u8"]), st.integers(1, 2), st.sampled_from([MEMORY, 4 * MEMORY]))
def test_dims_in_any_order_over_any_number_of_ranks(tmp_path_factory, turned, dtype, workers, memory):
    shape, ways = turned
    top = tmp_path_factory.mktemp("world")
    plan, source, wanted = world(top / "src", numbers(dtype, shape), ways)
    report = run(plan, source, top / "out", workers=workers, memory=memory)
    for j, array in enumerate(wanted):
        assert read_target(top / "out", f"d{j}.pt")["w"].tobytes() == array.tobytes()
    assert report.bytes_live_max <= memory
    assert report.source_bytes_unverified == 0
    assert compare(plan, source, open_target(top / "out", [f"d{j}.pt" for j in range(len(wanted))]), memory=memory)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shape", [(512, 512), (256, 1024), (1024, 256), (307, 1001)], ids=str)
def test_a_transposed_matrix_is_read_once(tmp_path, counted, shape, workers):
    """Runs are long: at least RUN_WANTED bytes.

    Memory must have room for such wide bands.
    """
    model = numbers("<u4", shape)
    plan, source, wanted = world(tmp_path / "src", model, [((0, 1), 0, 1), ((1, 0), 0, 1)])
    memory = 4 << 20
    report = run(plan, source, tmp_path / "out", workers=workers, memory=memory)
    assert read_target(tmp_path / "out", "d0.pt")["w"].tobytes() == model.T.tobytes() == wanted[0].tobytes()
    assert report.bytes_read <= 1.02 * report.bytes_needed
    assert report.source_bytes_checked == model.nbytes and report.bytes_read_verify <= 0.02 * model.nbytes
    assert len(counted.sizes) <= 1.3 * shape[0] * -(-shape[1] * 4 // 1024)
    assert report.bytes_live_max <= memory


def test_small_rows_that_are_dealt_anew_are_read_in_longer_runs_than_a_tile_has(tmp_path, monkeypatch, counted):
    """A tile has 16 rows, a band 64."""
    monkeypatch.setattr(batches, "RUN_WANTED", 512)
    model = numbers("<u4", (8, 256, 8))
    plan, source, wanted = world(tmp_path / "src", model, [((0, 1, 2), 0, 1), ((1, 0, 2), 0, 1)])
    report = run(plan, source, tmp_path / "out", workers=1, memory=4 << 20)
    assert read_target(tmp_path / "out", "d0.pt")["w"].tobytes() == wanted[0].tobytes()
    assert counted.sizes == [64 * 32] * (8 * 256 // 64)
    assert report.bytes_read == report.bytes_needed == report.source_bytes_checked


@pytest.mark.parametrize("to", ["bf16", "f64"])
def test_a_transposed_matrix_that_is_cast_is_read_once(tmp_path, to):
    model = np.arange(307 * 600, dtype="<f4").reshape(307, 600) % 251  # each has an equal in bf16
    source = write_source(tmp_path / "src", [Stored("s0", ("w",), "f32", model.view("<u4"))])
    target = [StoredTensor("d0.pt", ("w",), to, (600, 307), "weight", "w")]
    rows = [(0, 0, 0, (600, 307), 0, (1, 600), 0, (307, 1))]
    plan = plan_of([stored(e) for e in source.extents.values()], target, moves("copy", rows))
    report = run(plan, source, tmp_path / "out", memory=8 << 20)
    found = read_target(tmp_path / "out", "d0.pt")["w"]
    values = found.view("<f8") if to == "f64" else (found.astype("<u4") << 16).view("<f4")
    assert np.array_equal(values, model.T)
    assert report.bytes_read <= 1.02 * report.bytes_needed


def test_the_runs_of_a_band_are_one_record_of_the_journal(tmp_path, monkeypatch):
    """Joining a few CRCs takes as long as joining thousands."""
    joined: list[int] = []

    def counted(crcs, size, step):
        joined.append(len(crcs))
        return crc_of_comb(crcs, size, step)

    monkeypatch.setattr(reading, "crc_of_comb", counted)
    monkeypatch.setattr(reading, "SPREAD_BYTES", 8192)
    plan, source, _ = world(tmp_path / "src", numbers("<u4", (512, 512)), [((0, 1), 0, 1), ((1, 0), 0, 1)])
    run(plan, source, tmp_path / "out", workers=1, memory=4 << 20)
    assert joined == [512] * 2  # a band has half of the rows of the target


def test_a_run_that_was_stopped_in_a_band_resumes_with_the_rest_of_it(tmp_path):
    model = numbers("<u4", (307, 1001))
    plan, source, wanted = world(tmp_path / "src", model, [((0, 1), 0, 2), ((1, 0), 0, 3)])
    set_failpoints("tile-written:150:eio")
    with pytest.raises(UcplError):
        run(plan, source, tmp_path / "out", memory=4 << 20)
    set_failpoints("")
    report = run(plan, source, tmp_path / "out", memory=4 << 20, resume=True)
    assert 0 < report.tiles_resumed < report.tiles
    # The journal also records the source bytes of each tile: none of them is read again for its CRC.
    assert report.source_bytes_unverified == report.bytes_read_verify == 0
    for j, array in enumerate(wanted):
        assert read_target(tmp_path / "out", f"d{j}.pt")["w"].tobytes() == array.tobytes()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 70)), min_size=1, max_size=5), st.integers(1, 5), st.data())
def test_bands_are_all_that_is_left(sizes, most, data):
    """Bands cover all open tiles.

    Each byte is in one tile. Each open tile is in one band, in order. No tile crosses the end of a band.
    """
    units = [Unit(u, 0, 1000 * u, 16 * n, str(u)) for u, (n, _) in enumerate(sizes)]
    tiles = cut_tiles(units, 16, np.array([band for _, band in sizes], np.int64))
    for u, (n, band) in enumerate(sizes):
        mine = slice(tiles.first[u], tiles.first[u + 1])
        ends = tiles.low[mine] + tiles.size[mine]
        assert [0, *ends.tolist()] == [*tiles.low[mine].tolist(), 16 * n]
        assert (tiles.position[mine] == 1000 * u + tiles.low[mine]).all()
        assert (tiles.low[mine] // band == (ends - 1) // band).all() and (tiles.size[mine] <= 16).all()
    done = np.array(data.draw(st.lists(st.booleans(), min_size=len(tiles), max_size=len(tiles))), np.bool_)
    found = cut_bands(tiles, most, done)
    assert [i for first, end in found for i in range(first, end)] == np.flatnonzero(~done).tolist()
    for first, end in found:
        assert len(set(tiles.unit[first:end].tolist())) == 1 and end - first <= most
        band = sizes[tiles.unit[first]][1]
        assert tiles.low[first] // band == tiles.low[end - 1] // band
    if not done.any():
        per = [-(-band // 16) for _, band in sizes]
        assert len(found) <= sum(-(-16 * n // band) * -(-p // most) for (n, band), p in zip(sizes, per, strict=True))
