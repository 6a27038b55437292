"""Laws of comparing and verifying: exactly the planted flips are found.

Every planted flip under a digest is named, and nothing else.
"""

import shutil
import threading
from importlib import import_module

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.world import Stored, Torch, bits_of, copies, moves, open_target, plan_of, stored, write_source
from ucpl.errors import UcplError
from ucpl.extents import StoredTensor
from ucpl.runtime import compare, execute
from ucpl.runtime.buffers import MEMORY_MIN
from ucpl.runtime.disk import Disk, use_disk
from ucpl.runtime.options import RunOptions
from ucpl.runtime.verify import verify_files
from ucpl.runtime.worker_pool import Queue

MEMORY = 2 * MEMORY_MIN


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    top = tmp_path_factory.mktemp("made")
    tensors = [Stored(f, (f,), "f32", bits_of("f32", (50, 1000), i), order=(1, 0)) for i, f in enumerate("ab")]
    source = write_source(top / "src", tensors)
    plan = copies(source)
    execute(plan, source, Torch(), top / "out", RunOptions(memory=MEMORY))
    return source, plan, top / "out", {f.name: f.read_bytes() for f in (top / "out").glob("*.pt")}


def planted(made, name, at, bit):
    _, _, out, content = made
    data = bytearray(content[name])
    data[at] ^= 1 << bit
    (out / name).write_bytes(data)


def mend(made):
    for name, data in made[3].items():
        (made[2] / name).write_bytes(data)


def test_a_bounded_time_reads_a_part_and_finds_no_fault_in_the_rest(made, monkeypatch):
    """A look at the clock takes a second here.

    Small members of both files are read before the tensors.
    """
    _, _, out, content = made
    clean = open_target(out, content)
    all_of_it = verify_files(clean, memory=MEMORY)
    try:
        planted(made, "to_a.pt", clean.extents["to_a.pt", ("a",)].storage_start + 12_345, 3)
        found = {}
        for seconds in (1, 8, 1000):
            now = iter(range(10**6))
            monkeypatch.setattr("time.monotonic", lambda now=now: next(now))
            found[seconds] = verify_files(clean, memory=MEMORY, workers=1, seconds=seconds)
    finally:
        monkeypatch.undo()
        mend(made)
    assert found[1].bytes_read == 0 and found[1].bytes_left == all_of_it.bytes_read and all_of_it.bytes_left == 0
    assert 0 < found[8].bytes_read < 2000 and not found[8].findings
    assert found[1000].bytes_left == 0 and {d.code for d in found[1000].findings} == {"E630", "E631"}


def test_a_range_that_is_read_in_part_has_no_finding(made, monkeypatch):
    _, _, out, content = made
    clean = open_target(out, content)
    over = iter([False] * 3 + [True] * 10**4)
    monkeypatch.setattr("ucpl.runtime.verify._is_over", lambda *_: next(over))
    monkeypatch.setattr("ucpl.runtime.verify._in_turns", lambda ranges: sorted(ranges, key=lambda same: -same[0].size))
    found = verify_files(clean, memory=MEMORY, workers=1, seconds=9)
    assert not found.findings and found.bytes_read and found.bytes_left


class Meeting(Disk):
    """A disk at which two threads meet in a range."""

    def __init__(self, name, low, high):
        self.name, self.low, self.high, self.fds, self.met = name, low, high, {}, set()
        self.barrier = threading.Barrier(2, timeout=30)

    def open(self, path, flags, mode=0o666):
        fd = super().open(path, flags, mode)
        self.fds[fd] = path.name
        return fd

    def read(self, fd, views, position):
        if self.fds[fd] == self.name and self.low <= position < self.high and len(self.met) < 2:
            self.met.add(threading.get_ident())
            self.barrier.wait()
        return super().read(fd, views, position)


@pytest.mark.parametrize("at", [None, 0, 99_999, 131_072, 199_999])
def test_a_large_tensor_is_verified_by_all_threads(made, monkeypatch, at):
    _, _, out, content = made
    monkeypatch.setattr("ucpl.runtime.verify.PART", 65_536)
    clean = open_target(out, content)
    start = clean.extents["to_a.pt", ("a",)].storage_start
    before = use_disk(Meeting("to_a.pt", start, start + 200_000))
    try:
        if at is not None:
            planted(made, "to_a.pt", start + at, 3)
        found = verify_files(clean, memory=MEMORY, workers=2)
    finally:
        use_disk(before)
        mend(made)
    assert sorted(d.code for d in found.findings) == ([] if at is None else ["E630", "E631", "E631"])
    assert found.bytes_read == found.bytes_protected and not found.bytes_left


def test_a_flip_in_a_tensor_is_reported_with_its_member_and_its_storage(made):
    """The archive and the manifest name the damaged tensor and its file."""
    _, _, out, content = made
    clean = open_target(out, content)
    try:
        planted(made, "to_a.pt", clean.extents["to_a.pt", ("a",)].storage_start + 12_345, 3)
        said = [(d.code, d.message) for d in verify_files(clean, memory=MEMORY).findings]
    finally:
        mend(made)
    assert sorted(code for code, _ in said) == ["E630", "E631", "E631"]
    assert sum("; it holds a" in message for _, message in said) == 2


@pytest.mark.fault("Disk and files", "any flipped bit of a written target", "found by `verify`")
@settings(max_examples=60)
@given(st.sampled_from(["to_a.pt", "to_b.pt"]), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_flip_anywhere_is_found_under_the_manifest(made, name, place, bit):
    _, _, out, content = made
    clean = open_target(out, content)
    try:
        planted(made, name, int(place * len(content[name])), bit)
        found = verify_files(clean, memory=MEMORY)
        assert not found and found.bytes_live_max <= MEMORY
        assert all(name in d.message for d in found.findings)
        assert {d.code for d in found.findings} <= {"E630", "E631", "E633"}
    finally:
        mend(made)


def test_a_complete_checkpoint_verifies_and_counts_what_nothing_protects(made, tmp_path):
    source, _, out, content = made
    found = verify_files(open_target(out, content), memory=MEMORY)
    assert found and found.manifest and found.bytes_unprotected == 0
    assert (
        found.bytes_read
        == found.bytes_protected
        == sum(f.stat().st_size for f in out.rglob("*") if f.is_file() and f.name != "manifest.json")
    )
    bare = tmp_path / "bare"
    shutil.copytree(out, bare)
    shutil.rmtree(bare / "ucpl")
    found = verify_files(open_target(bare, content), memory=MEMORY)
    assert found and not found.manifest
    assert 0 < found.bytes_unprotected < 0.05 * sum(map(len, content.values()))  # headers and the directory
    data = bytearray(content["to_b.pt"])
    data[len(data) // 2] ^= 8
    (bare / "to_b.pt").write_bytes(data)
    (finding,) = verify_files(
        evolve(open_target(bare, ["to_a.pt"]), files=("to_a.pt", "to_b.pt")), memory=MEMORY
    ).findings
    assert finding.code == "E630" and "data/0" in finding.message
    found = verify_files(source, memory=MEMORY)
    assert found and found.bytes_protected == 0 and found.bytes_unprotected > 0


def test_a_missing_and_a_cut_file_and_a_damaged_manifest_are_findings(made, tmp_path):
    _, _, out, content = made
    for how in ("missing", "cut", "manifest"):
        bad = tmp_path / how
        shutil.copytree(out, bad)
        clean = open_target(bad, content)
        if how == "missing":
            (bad / "to_a.pt").unlink()
        elif how == "cut":
            (bad / "to_a.pt").write_bytes(content["to_a.pt"][:-100])
        else:
            (bad / "ucpl/manifest.json").write_text("{}")
        codes = {d.code for d in verify_files(clean, memory=MEMORY).findings}
        assert codes == {"missing": {"E633"}, "cut": {"E631", "E633"}, "manifest": {"E632"}}[how]


@settings(max_examples=40)
@given(st.integers(0, 49), st.integers(0, 999), st.integers(0, 31))
def test_compare_names_the_first_element_that_differs(made, row, column, bit):
    source, plan, out, content = made
    target = open_target(out, content)
    assert compare(plan, source, target, memory=MEMORY)
    extent = target.extents["to_a.pt", ("a",)]
    try:
        planted(made, "to_a.pt", extent.storage_start + 4 * (row * 1000 + column) + bit // 8, bit % 8)
        (found,) = compare(plan, source, target, memory=MEMORY)
        assert (found.element, found.source_element, found.file, found.source_file) == (
            (row, column),
            (row, column),
            "to_a.pt",
            "a",
        )
        assert found.value != found.wanted and found.label == "a"
    finally:
        mend(made)


class Backwards(Queue):
    """The last tile first."""

    def __init__(self, count, *skipped):
        super().__init__(count, *skipped)
        self.last = count - 1

    def take(self):
        i = super().take()
        return None if i is None else self.last - i


@pytest.mark.parametrize("queue", [Queue, Backwards])
def test_compare_names_the_first_of_many(made, monkeypatch, queue):
    monkeypatch.setattr(import_module("ucpl.runtime.compare"), "Queue", queue)  # the package gives the function
    source, plan, out, content = made
    target = open_target(out, content)
    start = target.extents["to_b.pt", ("b",)].storage_start
    data = bytearray(content["to_b.pt"])
    for element in (49_999, 31_007, 12_345, 20_000):
        data[start + 4 * element] ^= 1
    try:
        (out / "to_b.pt").write_bytes(data)
        (found,) = compare(plan, source, target, memory=MEMORY)
        assert found.element == (12, 345)
    finally:
        mend(made)


def test_compare_ignores_padding_and_sees_a_mean_once(tmp_path):
    a, b = (np.full((10, 10), v, np.float32) for v in (1, 3))
    source = write_source(
        tmp_path / "src", [Stored("a", ("x",), "f32", a.view("<u4")), Stored("b", ("x",), "f32", b.view("<u4"))]
    )
    target = [StoredTensor("d.pt", ("x",), "f32", (12, 10), "weight", "x", padding=20)]
    rows = [(0, s, 0, (100,), 0, (1,), 0, (1,)) for s in (0, 1)]
    plan = plan_of([stored(e) for e in source.extents.values()], target, moves("mean", rows))
    execute(plan, source, Torch(), tmp_path / "out", RunOptions(memory=MEMORY))
    there = open_target(tmp_path / "out", ["d.pt"])
    extent = there.extents["d.pt", ("x",)]
    data = bytearray((tmp_path / "out/d.pt").read_bytes())
    data[extent.storage_start + 4 * 119] ^= 1
    (tmp_path / "out/d.pt").write_bytes(data)
    result = compare(plan, source, there, memory=MEMORY)
    assert result and result.elements == 100 and result.report.bytes_needed == 3 * 400
    data[extent.storage_start + 4 * 37] ^= 1
    (tmp_path / "out/d.pt").write_bytes(data)
    (found,) = compare(plan, source, there, memory=MEMORY)
    assert found.element == (3, 7) and found.wanted.startswith("2.0 ")


def test_compare_refuses_a_target_that_the_plan_is_not_for(made):
    source, plan, out, _ = made
    with pytest.raises(UcplError) as caught:
        compare(plan, source, open_target(out, ["to_a.pt"]), memory=MEMORY)
    assert caught.value.diagnostics[0].code == "E600" and "the target has no" in caught.value.diagnostics[0].message
