"""Laws of the source's integrity.

By default a flip in a touched member is found. Unchecked members are named.
"""

import shutil
import struct
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.command import good, ucpl
from tests.runtime import flips
from tests.runtime.test_execute import code_of, run, two, whole, worlds
from tests.runtime.world import Stored, bits_of, copies, moves, plan_of, read_target, remade, stored, write_source
from ucpl import api
from ucpl.errors import UcplError
from ucpl.extents import StoredTensor
from ucpl.runtime import source_checks
from ucpl.runtime.buffers import MEMORY_MIN
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.joined_crcs import crc_of_comb, overlay
from ucpl.tables import uncovered

MEMORY = 2 * MEMORY_MIN
FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
CHECKPOINTS = sorted(p.name for p in FIXTURES.iterdir() if p.is_dir())


@pytest.fixture(autouse=True)
def no_failpoints():
    yield
    set_failpoints("")


def flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


# ---- CRCs ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=3, max_size=3), min_size=1, max_size=9), st.integers(3, 50))
def test_a_comb_is_its_span_with_zeros_between(runs, step):
    span = bytearray((len(runs) - 1) * step + 3)
    for i, run_ in enumerate(runs):
        span[i * step : i * step + 3] = run_
    assert crc_of_comb([zlib.crc32(r) for r in runs], 3, step) == zlib.crc32(span)


@given(st.binary(min_size=1, max_size=200), st.data())
def test_pieces_that_interleave_are_the_total(data, draw):
    owner = draw.draw(st.lists(st.integers(0, 3), min_size=len(data), max_size=len(data)))
    pieces = [bytes(b if o == k else 0 for b, o in zip(data, owner, strict=True)) for k in range(4)]
    at = draw.draw(st.integers(0, 9))
    total = at + len(data)
    crcs = [zlib.crc32(p) for p in pieces]
    assert overlay(crcs, [len(data)] * 4, [0] * 4, total) == zlib.crc32(bytes(at) + data)


# ---- every member that was touched -----------------------------------------------------------------------------------


@pytest.mark.fault(
    "Disk and files",
    "any flipped bit of a member that is read, in any pieces",
    "status 3 with file, storage and tensor",
)
@settings(max_examples=80)
@given(worlds(), st.integers(0, 1 << 40), st.integers(1, 2))
def test_a_flip_in_any_touched_member_is_found_by_default(tmp_path_factory, world, at, workers):
    """Members are read in any pieces.

    Pieces are columns, views of a transposed storage, or elements around a box.
    """
    tensors, rows, targets, _ = world
    if not rows:
        return
    top = tmp_path_factory.mktemp("world")
    source = write_source(top / "src", tensors)
    plan = plan_of([stored(source.extents[t.file, t.key]) for t in tensors], targets, moves("copy", rows))
    report = run(plan, source, top / "good", memory=MEMORY, workers=workers)
    assert report.source_bytes_unverified == 0 and not report.unverified
    touched = sorted({r[1] for r in rows})
    extent = source.extents[tensors[touched[at % len(touched)]].file, tensors[touched[at % len(touched)]].key]
    flipped(source.root / extent.file, 8 * extent.storage_start + at % (8 * extent.storage_bytes))
    with pytest.raises(UcplError) as caught:
        run(plan, source, top / "bad", memory=MEMORY, workers=workers)
    (found,) = caught.value.diagnostics
    assert found.code == "E612" and caught.value.exit_status == 3
    assert extent.file in found.message and f"storage {extent.storage} " in found.message
    assert str(extent.key[0]) in found.message
    assert not (top / "bad").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_columns_that_are_read_run_by_run_are_verified_without_reading_again(tmp_path, workers):
    """A tensor that is cut by columns.

    The reads of two targets interleave and together cover the entire member.
    """
    full = bits_of("f32", (300, 4096), 1)
    source = write_source(tmp_path / "src", [Stored("s", ("w",), "f32", full)])
    targets = [StoredTensor(f"d{i}.pt", ("w",), "f32", (300, 2048), "weight", "w") for i in (0, 1)]
    rows = [(0, 0, i, (300, 2048), 2048 * i, (4096, 1), 0, (2048, 1)) for i in (0, 1)]
    plan = plan_of([stored(e) for e in source.extents.values()], targets, moves("copy", rows))
    report = run(plan, source, tmp_path / "out", workers=workers)
    assert report.bytes_read == report.source_bytes_checked == full.nbytes
    assert report.bytes_read_verify == 0
    assert read_target(tmp_path / "out", "d1.pt")["w"].tobytes() == full[:, 2048:].tobytes()
    flipped(source.root / "s", 8 * (source.extents["s", ("w",)].storage_start + 4096 * 4 * 200 + 9000))
    assert code_of(lambda: run(plan, source, tmp_path / "bad", workers=workers)) == "E612"


def test_runs_apart_are_remembered_by_the_journal(tmp_path, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["ucpl.runtime.moving"], "SYNC_BYTES", 1)
    full = bits_of("f32", (300, 4096), 1)
    source = write_source(tmp_path / "src", [Stored("s", ("w",), "f32", full)])
    targets = [StoredTensor(f"d{i}.pt", ("w",), "f32", (300, 2048), "weight", "w") for i in (0, 1)]
    rows = [(0, 0, i, (300, 2048), 2048 * i, (4096, 1), 0, (2048, 1)) for i in (0, 1)]
    plan = plan_of([stored(e) for e in source.extents.values()], targets, moves("copy", rows))
    set_failpoints("source-read:400:eio")
    assert code_of(lambda: run(plan, source, tmp_path / "out")) == "E610"
    set_failpoints("")
    report = run(plan, source, tmp_path / "out", resume=True)
    assert 0 < report.bytes_read < full.nbytes
    assert report.source_bytes_checked == full.nbytes and report.bytes_read_verify == 0


def part_of(tmp_path, of=1000, taken=100, **more):
    """A plan that takes the first elements of each of two tensors."""
    tensors = [Stored("a", (f"x{i}",), "f32", bits_of("f32", (of,), i), **more) for i in (0, 1)]
    source = write_source(tmp_path / "src", tensors)
    plan = copies(source)
    targets = tuple(evolve(t, shape=(taken,)) for t in plan.targets)
    return source, plan.of(targets=targets, moves=(moves("copy", [whole(taken), whole(taken, 1, 1)]),))


def test_what_is_left_of_a_member_is_read_for_its_crc(tmp_path):
    source, plan = part_of(tmp_path)
    report = run(plan, source, tmp_path / "out")
    assert (report.source_bytes_checked, report.source_bytes_unverified) == (8000, 0)
    assert report.bytes_read == 800 and report.bytes_read_verify == 7200
    end = source.extents["a", ("x1",)]
    flipped(source.root / "a", 8 * (end.storage_start + end.storage_bytes) - 1)
    assert code_of(lambda: run(plan, source, tmp_path / "bad")) == "E612"


@pytest.mark.fault(
    "Disk and files",
    "more than 2 % of the bytes would be read for CRCs alone",
    "the unverified members are named with their share; `--verify-source` reads them",
)
def test_beyond_two_percent_what_was_not_verified_is_named_with_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr(source_checks, "REST_MIN", 0)
    source, plan = part_of(tmp_path)
    report = run(plan, source, tmp_path / "out")
    assert report.source_bytes_unverified == 8000 and report.bytes_read_verify == 0
    assert [(u.file, u.storage, u.size, u.bytes_read) for u in report.unverified] == [
        ("a", "0", 4000, 400), ("a", "1", 4000, 400),
    ]  # fmt: skip
    assert "storage 0 of a: 10.0% of it was read" in str(report)
    last = source.extents["a", ("x1",)]
    flipped(source.root / "a", 8 * (last.storage_start + last.storage_bytes) - 1)
    run(plan, source, tmp_path / "out2")
    assert code_of(lambda: run(plan, source, tmp_path / "out3", verify_source=True)) == "E612"
    shutil.rmtree(source.root)


@pytest.mark.parametrize(("taken", "verified"), [(990, 2), (980, 1), (960, 0)])
def test_two_percent_are_of_all_members_together_and_the_smallest_rests_come_first(
    tmp_path, monkeypatch, taken, verified
):
    """Bytes moved: `2 * 4 * taken`; rests: `4 * (1000 - taken)` each."""
    monkeypatch.setattr(source_checks, "REST_MIN", 0)
    source, plan = part_of(tmp_path, taken=taken)
    allowed = 2 * 4 * taken // 50
    report = run(plan, source, tmp_path / "out")
    assert report.bytes_read_verify == verified * 4 * (1000 - taken) <= allowed
    assert report.source_bytes_checked == 4000 * verified


def test_what_states_no_crc_is_counted_apart(tmp_path):
    tensors = [Stored("a", ("x",), "f32", bits_of("f32", (50,), 1))]
    source = write_source(tmp_path / "src", tensors, crc=False)
    report = run(copies(source), source, tmp_path / "out", verify_source=True)
    assert (report.source_bytes_without_crc, report.source_bytes_unverified, report.source_bytes_checked) == (200, 0, 0)


def test_overlapping_reads_of_a_member_are_counted_once(tmp_path):
    """One tensor goes to two targets with cuts at different places.

    The tiles of one target overlap those of the other.
    """
    full = bits_of("f32", (50_000,), 1)
    source = write_source(tmp_path / "src", [Stored("s", ("w",), "f32", full)])
    targets = [StoredTensor(f"d{i}.pt", ("w",), "f32", (n,), "weight", "w") for i, n in enumerate((50_000, 49_000))]
    rows = [(0, 0, 0, (50_000,), 0, (1,), 0, (1,)), (0, 0, 1, (49_000,), 777, (1,), 0, (1,))]
    plan = plan_of([stored(e) for e in source.extents.values()], targets, moves("copy", rows))
    report = run(plan, source, tmp_path / "out")
    assert report.source_bytes_checked == full.nbytes and report.bytes_read_verify == 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 25)), min_size=1, max_size=8))
def test_pieces_that_are_chosen_are_disjoint_and_cover_the_most(pieces):
    table = np.array([(a, n, 1, 0) for a, n in sorted(set(pieces))], np.int64)
    chosen = table[source_checks._disjoint(table)]
    assert (chosen[1:, 0] >= chosen[:-1, 0] + chosen[:-1, 1]).all()
    best = 0
    for mask in range(1 << len(table)):
        some = [tuple(row[:2]) for i, row in enumerate(table.tolist()) if mask >> i & 1]
        if all(b[0] >= a[0] + a[1] for a, b in pairwise(some)):
            best = max(best, sum(n for _, n in some))
    assert int(chosen[:, 1].sum()) == best


@pytest.mark.fault("Disk and files", "copies that differ because one is damaged", "the damaged storage is named")
def test_copies_that_differ_by_damage_name_the_damaged_one(tmp_path):
    a = np.arange(9000, dtype=np.float32)
    source, sources, target, n = two(tmp_path, a.view("<u4"), a.copy().view("<u4"))
    extent = source.extents["b", ("x",)]
    flipped(source.root / "b", 8 * (extent.storage_start + 4 * 777))
    plan = plan_of(sources, target, moves("copy", [whole(n)]), moves("check", [whole(n, 1)]))
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    (found,) = caught.value.diagnostics
    assert found.code == "E612" and found.message.startswith("b: storage 1 ")


def test_a_value_that_no_longer_fits_by_damage_is_damage(tmp_path):
    a = np.full((40, 50), 0.5, np.float32)
    source, sources, target, n = two(tmp_path, a.view("<u4"), a.view("<u4"), to="bf16")
    extent = source.extents["a", ("x",)]
    flipped(source.root / "a", 8 * (extent.storage_start + 4 * 77))  # the last bit of a mantissa
    with pytest.raises(UcplError) as caught:
        run(plan_of(sources, target, moves("copy", [whole(n)])), source, tmp_path / "out")
    assert caught.value.diagnostics[0].code == "E612" and caught.value.exit_status == 3


@pytest.mark.fault(
    "Disk and files",
    "a flipped bit in any storage of real checkpoints, for every kind of target",
    "status 3 with file, storage and tensor",
)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_flip_in_any_storage_of_a_real_checkpoint_is_found(name):
    """Some storages, each with another kind of target.

    `python -m tests.runtime.flips` tries all storages with all targets.
    """
    turn = CHECKPOINTS.index(name)
    targets = [flips.TARGETS[(turn + i) % len(flips.TARGETS)] for i in (0, 3)]
    seen = list(flips.flips(FIXTURES / name, tuple(targets), seed=turn, most=4))
    assert [f for f in seen if f.verdict not in ("found", "unread")] == []
    assert sum(f.verdict == "found" for f in seen) > len(seen) / 3 or not seen


# ---- padding ---------------------------------------------------------------------------------------------------------


boxes = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=2, max_size=2)),
    min_size=1, max_size=6,
)  # fmt: skip


@given(boxes)
def test_what_no_box_covers_is_found(rows):
    shape = np.array([[n for n, _ in dims] for _, dims in rows], np.int64)
    step = np.array([[s for _, s in dims] for _, dims in rows], np.int64)
    start = np.array([a for a, _ in rows], np.int64)
    numel = 150
    held = np.zeros(numel, bool)
    for a, dims in rows:
        for i in range(dims[0][0]):
            for j in range(dims[1][0]):
                held[a + i * dims[0][1] + j * dims[1][1]] = True
    low, high = uncovered(numel, start, shape, step)
    found = np.zeros(numel, bool)
    for a, b in zip(low.tolist(), high.tolist(), strict=True):
        assert a < b and not found[a:b].any()
        found[a:b] = True
    boxes_overlap_themselves = any(
        len({i * d[0][1] + j * d[1][1] for i in range(d[0][0]) for j in range(d[1][0])}) < d[0][0] * d[1][0]
        for _, d in rows
    )
    assert boxes_overlap_themselves or (found == ~held).all()


def padded(tmp_path, values, kind="zero", state="exp_avg", dtype="f32", crc=True):
    """Three rows of 100 elements in a flat tensor with padding.

    Five elements of padding (of `values`) follow each row.
    """
    bits = bits_of(dtype, (315,), 1)
    for i in range(3):
        bits[105 * i + 100 : 105 * i + 105] = values[5 * i : 5 * i + 5]
    source = write_source(tmp_path / "src", [Stored("s", ("flat",), dtype, bits)], crc=crc)
    (extent,) = source.extents.values()
    tensor = evolve(stored(extent, "group 0"), state=state, padding=15, padding_kind=kind)
    target = [StoredTensor("d.pt", ("flat",), dtype, (300,), state, "group 0")]
    plan = plan_of([tensor], target, moves("copy", [(0, 0, 0, (3, 100), 0, (105, 1), 0, (100, 1))]))
    return source, plan


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("at", range(15))
def test_padding_that_must_be_zero_is_held_against_zero(tmp_path, at, crc):
    values = [0] * 15
    values[at] = 0x3F000000
    source, plan = padded(tmp_path, values, crc=crc)
    with pytest.raises(UcplError) as caught:
        run(plan, source, tmp_path / "out")
    (found,) = caught.value.diagnostics
    assert found.code == "E614" and caught.value.exit_status == 3
    where = f"[{105 * (at // 5) + 100 + at % 5}]"
    assert (
        where in found.message and "s:" in found.message and "group 0" in found.message and "storage 0" in found.message
    )
    assert found.labels[0].text.startswith("0.5 ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["live", "undefined"])
def test_other_padding_may_hold_anything(tmp_path, kind):
    source, plan = padded(tmp_path, list(range(1, 16)), kind=kind)
    assert run(plan, source, tmp_path / "out").remarks == ()


def test_zeros_may_have_a_sign(tmp_path):
    source, plan = padded(tmp_path, [0, 0x80000000] * 7 + [0])
    assert run(plan, source, tmp_path / "out").remarks == ()


@pytest.mark.parametrize(
    ("state", "value", "code"), [("sum", 0x3DCCCCCD, None), ("fp32", 1, "E614"), ("weight", 1, "E614")]
)
def test_one_number_throughout_is_how_an_optimizer_began(tmp_path, state, value, code):
    source, plan = padded(tmp_path, [value] * 15, state=state)
    if code is not None:
        assert code_of(lambda: run(plan, source, tmp_path / "out")) == code
        return
    (remark,) = run(plan, source, tmp_path / "out").remarks
    assert "group 0" in remark and "0.1" in remark and "s" in remark


def test_a_zero_in_another_tensor_of_the_state_is_no_beginning(tmp_path):
    """Two groups: one has padding 0.5, the other has zero."""
    plans = []
    for name, value in (("a", 0x3F000000), ("b", 0)):
        bits = np.full(10, value, np.uint32)
        plans.append(Stored(name, ("flat",), "f32", bits))
    source = write_source(tmp_path / "src", plans)
    tensors = [evolve(stored(e), state="sum", padding=1, padding_kind="zero") for e in source.extents.values()]
    target = [StoredTensor("d.pt", ("flat",), "f32", (18,), "sum", "x")]
    rows = [(0, i, 0, (9,), 0, (1,), 9 * i, (1,)) for i in (0, 1)]
    assert code_of(lambda: run(plan_of(tensors, target, moves("copy", rows)), source, tmp_path / "out")) == "E614"
    one = plan_of(tensors[:1], target, moves("copy", rows[:1]))
    assert len(run(one, source, tmp_path / "out").remarks) == 1


@pytest.mark.parametrize("odd", [(0,), (7,), (14,), range(5, 10)], ids=str)
def test_another_number_somewhere_is_no_beginning(tmp_path, odd):
    """One element, or one of the three runs of padding."""
    values = [0 if i in odd else 0x3DCCCCCD for i in range(15)]
    source, plan = padded(tmp_path, values, state="sum")
    assert code_of(lambda: run(plan, source, tmp_path / "out")) == "E614"


def test_where_more_than_the_padding_is_left_out_nobody_says_which_it_is(tmp_path):
    """A tensor between the others was dropped.

    The unread bytes are then more than padding.
    """
    source, plan = padded(tmp_path, [1] * 15)
    less = remade(plan, moves=[moves("copy", [(0, 0, 0, (2, 100), 0, (105, 1), 0, (100, 1))])])
    run(less, source, tmp_path / "out")


def test_much_padding_is_reported_as_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(source_checks, "REST_MIN", 0)
    source, plan = padded(tmp_path, [0] * 14 + [1])
    (remark,) = run(plan, source, tmp_path / "out").remarks
    assert "60 bytes of padding were not read" in remark
    assert code_of(lambda: run(plan, source, tmp_path / "out2", verify_source=True)) == "E614"


def saved_anew(path: Path, member: str, change) -> None:
    """The archive with another content of one member, and a matching CRC."""
    with zipfile.ZipFile(path) as old:
        content = {info.filename: bytearray(old.read(info)) for info in old.infolist()}
    (name,) = (n for n in content if n.endswith(f"/data/{member}"))
    change(content[name])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in content.items():
            new.writestr(name, bytes(data))


@pytest.mark.fault(
    "Disk and files", "padding of kind zero with other values", "status 3 with element and value; a finding of `verify`"
)
def test_padding_of_a_real_checkpoint_is_an_error_to_convert_and_a_finding_to_verify(tmp_path):
    """The last rank's moment ends in padding.

    Its file is saved anew, so that no CRC detects the change.
    """
    there = tmp_path / "source"
    shutil.copytree(FIXTURES / "z1_dp4", there)
    file = "zero_pp_rank_3_mp_rank_00_optim_states.pt"
    held = api.open_checkpoint(there).extents
    (moment,) = (e for (f, k), e in held.items() if f == file and k[-2:] == (0, "exp_avg"))

    def change(data: bytearray) -> None:
        assert data[-4:] == bytes(4)
        data[-4:] = struct.pack("<f", 0.5)

    saved_anew(there / "global_step3" / file, moment.storage, change)
    last = f"[{moment.numel - 1}]"
    done = ucpl("convert", there, tmp_path / "out", "--to", "zero1(dp=2)")
    assert done.status == 3 and all(text in done.err for text in ("E614", file, "exp_avg", last, "0.5 "))
    done = ucpl("verify", there)
    assert done.status == 1 and all(text in done.err for text in ("E634", file, "exp_avg", last, "0.5 "))
    assert "E630" not in done.err


def test_a_format_without_crcs_says_so(tmp_path):
    good("convert", FIXTURES / "z1_dp4", tmp_path / "hf", "--to", "safetensors()")
    done = good("convert", tmp_path / "hf", tmp_path / "plain.pt", "--to", "plain()")
    assert "no CRC in this format" in done.out and "match their CRC" not in done.out and "in part" not in done.out
    report = good("convert", tmp_path / "hf", tmp_path / "again.pt", "--to", "plain()", "--json").json
    found = report["report"]
    assert found["source_bytes_without_crc"] > 0 == found["source_bytes_unverified"]


def test_the_report_names_what_was_left(tmp_path, monkeypatch):
    monkeypatch.setattr(source_checks, "REST_MIN", 0)
    monkeypatch.setattr(source_checks, "REST_SHARE", 1 << 40)
    done = good("convert", FIXTURES / "z1_dp4", tmp_path / "out", "--to", "zero1(dp=2)")
    assert "unverified" in done.out and "--verify-source" in done.out and "optim_states.pt: 9" in done.out
    done = good("convert", FIXTURES / "z1_dp4", tmp_path / "out2", "--to", "zero1(dp=2)", "--verify-source")
    assert "unverified" not in done.out
