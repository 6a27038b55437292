"""Guards of a run: unchanged source, complete read-back, distinct runs."""

import errno
import json
import os
import random
import struct
import sys
import zlib

import pytest
from attrs import evolve

from tests.runtime.test_execute import code_of, run, tree
from tests.runtime.world import Stored, Torch, bits_of, copies, open_target, remade, write_source
from ucpl.errors import UcplError
from ucpl.planning.files import load_plan
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.journal import FORMAT, DoneTile, Journal, read_journal
from ucpl.runtime.linux import exchange, rename_new
from ucpl.runtime.manifest import MANIFEST, read_manifest
from ucpl.runtime.reading import Fragments
from ucpl.runtime.resume import digest_of_plan
from ucpl.runtime.verify import verify_files


@pytest.fixture(autouse=True)
def no_failpoints():
    yield
    set_failpoints("")


@pytest.fixture
def small(tmp_path):
    tensors = [Stored(f, (f,), "f32", bits_of("f32", (2000,), i)) for i, f in enumerate("ab")]
    source = write_source(tmp_path / "src", tensors)
    return source, copies(source), tmp_path / "out"


# ---- reading back ----------------------------------------------------------------------------------------------------


def every_byte_class(data: bytes) -> dict[str, int]:
    """One byte of each kind of a torch file."""
    directory = data.index(b"PK\x01\x02")
    return {
        "the first": 0,
        "a local header": 10,
        "the pickle": data.index(b"data.pkl") + 60,
        "payload": data.index(b"data/0") + 500,
        "a descriptor": data.index(b"PK\x07\x08", data.index(b"data/0")) + 5,
        "a CRC in the directory": directory + 16,
        "a name in the directory": directory + 48,
        "the end of the directory": len(data) - 5,
        "the last": len(data) - 1,
    }


KINDS = list(every_byte_class(b"PK\x01\x02 data.pkl data/0 PK\x07\x08"))


@pytest.mark.fault(
    "Disk and files",
    "the same in a header, pickle, payload, descriptor or directory",
    "found by reading back, no target",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_byte_of_any_kind_that_the_disk_changed_is_found(small, monkeypatch, kind, which):
    source, plan, out = small
    from ucpl.runtime import targets

    real = targets.TargetFiles.sync

    def sync(self, indexes, *, drop=False, **how):
        real(self, indexes, drop=drop, **how)
        if drop:
            path = self.path(which)
            data = bytearray(path.read_bytes())
            data[every_byte_class(bytes(data))[kind]] ^= 16
            path.write_bytes(data)

    monkeypatch.setattr(targets.TargetFiles, "sync", sync)
    with pytest.raises(UcplError) as caught:
        run(plan, source, out)
    assert caught.value.diagnostics[0].code == "E505" and f"to_{'ab'[which]}.pt" in caught.value.diagnostics[0].message
    assert not out.exists() and sorted(os.listdir(out.parent)) == ["src"]


def test_a_file_that_lost_its_end_is_found_by_reading_back(small, monkeypatch):
    source, plan, out = small
    from ucpl.runtime import targets

    real = targets.TargetFiles.sync

    def sync(self, indexes, *, drop=False, **how):
        real(self, indexes, drop=drop, **how)
        if drop:
            os.truncate(self.path(1), self.path(1).stat().st_size - 3)

    monkeypatch.setattr(targets.TargetFiles, "sync", sync)
    assert code_of(lambda: run(plan, source, out)) == "E505"


def test_everything_but_the_texts_is_read_back(small):
    source, plan, out = small
    report = run(plan, source, out)
    assert report.bytes_read_back == sum((out / f"to_{f}.pt").stat().st_size for f in "ab")


# ---- the source stays as it was --------------------------------------------------------------------------------------


@pytest.mark.fault("Disk and files", "a source that changes while data moves, or after its check", "refused, no target")
@pytest.mark.parametrize(("place", "passed"), [("tile-written", False), ("synced", True)])
def test_a_source_that_changes_at_any_time_is_refused(small, monkeypatch, place, passed):
    """A change during the move is found before the read-back starts.

    A change after the check of the source is found before publication.
    """
    source, plan, out = small
    seen: list[str] = []

    def now(name):
        if name == place and place not in seen:
            os.utime(source.root / "a", ns=(7, 7))
        seen.append(name)

    for room in ("moving", "execute"):
        monkeypatch.setattr(sys.modules[f"ucpl.runtime.{room}"], "failpoint", now)
    assert code_of(lambda: run(plan, source, out)) == "E611"
    assert ("synced" in seen) == passed
    assert not out.exists() and sorted(os.listdir(out.parent)) == ["src"]


def test_a_source_that_was_written_anew_has_changed_and_is_not_called_damaged(small, monkeypatch):
    """Other bytes and another modification time: two checkpoints are mixed.

    No CRC is needed to find this.
    """
    source, plan, out = small
    path = source.root / "b"
    seen: list[str] = []

    def now(name):
        if name == "source-read" and not seen:
            seen.append(name)
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(7, 7))

    monkeypatch.setattr(sys.modules["ucpl.runtime.sources"], "failpoint", now)
    assert code_of(lambda: run(plan, source, out, workers=1)) == "E611"


# ---- identity of runs ------------------------------------------------------------------------------------------------


def test_a_resume_into_other_metadata_is_refused(small):
    source, plan, out = small
    set_failpoints("source-read:2:eio")
    assert code_of(lambda: run(plan, source, out)) == "E610"
    set_failpoints("")
    with pytest.raises(UcplError) as caught:
        run(plan, source, out, resume=True, framework=Torch(texts={"latest": "step2"}))
    assert caught.value.diagnostics[0].code == "E602" and "metadata" in caught.value.diagnostics[0].message
    assert run(plan, source, out, resume=True).tiles_resumed >= 0


@pytest.mark.fault("Disk and files", "`--resume` on a finished target of another source, plan or metadata", "refused")
@pytest.mark.parametrize("what", ["source", "metadata", "plan", "size", "gone"])
def test_a_finished_target_of_another_run_is_not_called_finished(small, what):
    source, plan, out = small
    run(plan, source, out)
    assert run(plan, source, out, resume=True).done_before
    before, more = tree(out), {}
    if what == "source":
        os.utime(source.root / "a", ns=(9, 9))
    elif what == "metadata":
        more["framework"] = Torch(texts={"latest": "step2"})
    elif what == "plan":
        plan = evolve(plan, spec_digest="another")
    elif what == "size":
        os.truncate(out / "to_b.pt", 100)
    else:
        (out / "to_b.pt").unlink()
    assert code_of(lambda: run(plan, source, out, resume=True, **more)) == "E506"
    if what in ("source", "metadata", "plan"):
        assert tree(out) == before


@pytest.mark.parametrize(
    "change",
    [{"source_value": (2.0, 0.0)}, {"source_value": (1.0, 1.0)}, {"target_value": (2.0, 0.0)}, {"lossy": True},
     {"kind": "check"}, {"state": "fp32"}, "source", "target", "shape", "source_offset", "source_stride",
     "target_offset", "target_stride"],
    ids=str,
)  # fmt: skip
def test_plans_that_write_other_bytes_have_other_digests(small, change):
    _, plan, _ = small
    (m,) = plan.moves
    other = evolve(m, **({change: getattr(m, change) + 1} if isinstance(change, str) else change))
    assert digest_of_plan(remade(plan, moves=(other,))) != digest_of_plan(plan)
    assert digest_of_plan(remade(plan, moves=(evolve(m),))) == digest_of_plan(plan)


@pytest.mark.parametrize(
    "change",
    [{"file": "x"}, {"key": ("x",)}, {"dtype": "i32"}, {"shape": (1000, 2)}, {"shares": 0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("side", ["sources", "targets"])
def test_plans_of_other_tensors_have_other_digests(small, side, change):
    _, plan, _ = small
    first, second = getattr(plan, side)
    assert digest_of_plan(remade(plan, **{side: (first, evolve(second, **change))})) != digest_of_plan(plan)


def test_plans_of_other_texts_have_other_digests(small):
    _, plan, _ = small
    for change in ({"layout_text": "x"}, {"spec_digest": "x"}, {"source_call": "x()"}, {"target_call": "x()"}):
        assert digest_of_plan(evolve(plan, **change)) != digest_of_plan(plan)


def test_sides_of_a_plan_are_distinguished(small):
    """The last source moved to the front of the targets.

    The same lines follow in the same order.
    """
    _, plan, _ = small
    a, b = plan.sources
    one = remade(plan, sources=(a, b), targets=(), moves=())
    other = remade(plan, sources=(a,), targets=(b,), moves=())
    assert digest_of_plan(one) != digest_of_plan(other)


def test_a_plan_that_the_disk_does_not_give_is_not_to_be_made_anew(tmp_path, monkeypatch):
    """A missing file and a folder are no plans.

    An error of the disk leaves the plan as it is.
    """

    def broken(self):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def remedy(path):
        with pytest.raises(UcplError) as caught:
            load_plan(path)
        return caught.value.diagnostics[0].remedy

    assert all("ucpl plan" in remedy(path) for path in (tmp_path / "no.plan", tmp_path))
    monkeypatch.setattr("pathlib.Path.read_bytes", broken)
    assert "ucpl plan" not in remedy(tmp_path) and "disk" in remedy(tmp_path)


# ---- names that must be free -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", [False, True])
def test_a_rename_never_replaces(tmp_path, monkeypatch, lacking):
    if lacking:
        monkeypatch.setattr("ucpl.runtime.linux._libc", lambda: None)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "b"
    rename_new(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "a" and not (tmp_path / "a").exists()
    with pytest.raises(FileNotFoundError):
        rename_new(tmp_path / "no", tmp_path / "d")
    assert exchange(tmp_path / "b", tmp_path / "c") == (not lacking)
    assert (tmp_path / "b").read_text() == ("b" if lacking else "a")


class Libc:
    """A C library whose calls end with these errors, one after another."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def __getattr__(self, name):
        if name == "fallocate64":
            raise AttributeError(name)

        def call(*args):
            import ctypes

            error = self.errors.pop(0)
            ctypes.set_errno(error)
            return -1 if error else 0

        return call


@pytest.mark.parametrize(("errors", "ends"), [((4, 0), None), ((95,), None), ((4, 38), None), ((28,), 28), ((5,), 5)])
def test_room_is_reserved_where_the_file_system_can(tmp_path, monkeypatch, errors, ends):
    from ucpl.runtime import linux

    monkeypatch.setattr(linux, "_libc", lambda: Libc(*errors))
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    try:
        if ends is None:
            linux.allocate(fd, 5000)
            assert os.fstat(fd).st_size == 5000
        else:
            with pytest.raises(OSError) as caught:
                linux.allocate(fd, 5000)
            assert caught.value.errno == ends
    finally:
        os.close(fd)


@pytest.mark.parametrize(("error", "call"), [(28, "exchange"), (17, "rename_new"), (5, "rename_new")])
def test_other_errors_of_the_kernel_are_raised(tmp_path, monkeypatch, error, call):
    from ucpl.runtime import linux

    monkeypatch.setattr(linux, "_libc", lambda: Libc(error))
    with pytest.raises(OSError) as caught:
        getattr(linux, call)(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == error and str(tmp_path / "a") in str(caught.value)


@pytest.mark.fault("Every system call", "a kernel without fallocate and renameat2", "done without them")
@pytest.mark.parametrize("error", [22, 38, 95])
def test_a_kernel_that_lacks_the_call_is_done_without(tmp_path, monkeypatch, error):
    from ucpl.runtime import linux

    monkeypatch.setattr(linux, "_libc", lambda: Libc(error))
    (tmp_path / "a").write_text("a")
    linux.rename_new(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "a" and not (tmp_path / "a").exists()
    assert not linux.exchange(tmp_path / "a", tmp_path / "b")


def test_without_a_c_library_there_is_still_a_way(tmp_path, monkeypatch):
    from ucpl.runtime import linux

    def none(*_, **__):
        raise OSError("no library")

    linux._libc.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", none)
    try:
        assert linux._libc() is None
        (tmp_path / "a").write_text("a")
        assert not exchange(tmp_path / "a", tmp_path / "a")
        rename_new(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").read_text() == "a"
    finally:
        linux._libc.cache_clear()


@pytest.mark.fault("Disk and files", "another process creates the target before the rename", "kept")
def test_a_target_that_comes_into_being_meanwhile_is_not_replaced(small, monkeypatch):
    source, plan, out = small

    def now(name):
        if name == "publish-before":
            out.mkdir()
            (out / "theirs").write_text("precious")

    monkeypatch.setattr(sys.modules["ucpl.runtime.publish"], "failpoint", now)
    assert code_of(lambda: run(plan, source, out)) == "E500"
    assert tree(out) == {"theirs": b"precious"}


# ---- reads from a disk that other processes write to -----------------------------------------------------------------


def broken(value, rng):
    """Something of another type, a number made huge, a list shortened."""
    huge = 10 ** rng.choice((20, 400, 5000))
    return rng.choice(
        (None, True, -1, 1.5, huge, "x", "/etc/passwd", "../x", [], {}, [value], {"a": value}, "\0", "\ud800")
    )


def anywhere(tree_, rng):
    """The value with one thing in it exchanged."""
    if isinstance(tree_, dict) and tree_ and rng.random() < 0.9:
        key = rng.choice(sorted(tree_))
        if rng.random() < 0.1:
            return {("/etc/passwd" if k == key else k): v for k, v in tree_.items()}
        return {**tree_, key: anywhere(tree_[key], rng)}
    return broken(tree_, rng)


def dumped(value) -> bytes:
    """JSON, also of integers that have more digits than Python would print."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value).encode()
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.fault(
    "Hostile input",
    "manifests with wrong types, huge numbers, names that lead outside",
    "read, or a finding; nothing outside is read",
)
@pytest.mark.parametrize("seed", range(4))
def test_any_manifest_is_read_or_is_a_finding(small, seed):
    source, plan, out = small
    run(plan, source, out)
    path = out / MANIFEST
    good, rng = json.loads(path.read_bytes()), random.Random(seed)
    there = open_target(out, ["to_a.pt", "to_b.pt"])
    for _ in range(120):
        path.write_bytes(dumped(anywhere(good, rng)))
        found = verify_files(there)
        assert {d.code for d in found.findings} <= {"E631", "E632", "E633"}
        assert not any("/etc/passwd" in d.labels[0].file for d in found.findings)
        try:
            report = run(plan, source, out, resume=True)
            assert report.done_before
        except UcplError as error:
            assert error.diagnostics[0].code == "E506"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", "null", '{"format": 1}', '{"format": 1, "files": []}', "[" * 100_000, "1" * 5000, "\xff"],
)
def test_what_is_no_manifest_is_reported_as_none(small, text):
    source, plan, out = small
    run(plan, source, out)
    (out / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):
        read_manifest(out)
    (found,) = verify_files(open_target(out, ["to_a.pt", "to_b.pt"])).findings
    assert found.code == "E632"
    assert code_of(lambda: run(plan, source, out, resume=True)) == "E506"


@pytest.mark.parametrize("value", [-1, True, 1.5, "7", None, 1 << 62])
@pytest.mark.parametrize("of", ["a file", "a storage"])
def test_a_size_that_no_file_has_is_no_manifest(small, value, of):
    source, plan, out = small
    run(plan, source, out)
    manifest = json.loads((out / MANIFEST).read_bytes())
    file = manifest["files"]["latest" if of == "a file" else "to_a.pt"]
    entry = file if of == "a file" else next(iter(file["storages"].values()))
    entry["size"] = value
    (out / MANIFEST).write_bytes(json.dumps(manifest).encode())
    with pytest.raises(ValueError, match="is no number of bytes"):
        read_manifest(out)


def test_storages_of_a_manifest_that_overlap_are_a_finding(small):
    source, plan, out = small
    run(plan, source, out)
    manifest = json.loads((out / MANIFEST).read_bytes())
    (storage,) = manifest["files"]["to_a.pt"]["storages"].values()
    storage["start"] += 8
    (out / MANIFEST).write_bytes(json.dumps(manifest).encode())
    found = verify_files(open_target(out, ["to_a.pt", "to_b.pt"])).findings
    assert {d.code for d in found} == {"E632"} and "to_a.pt" in found[0].message


def record(*body, check=None) -> bytes:
    packed = struct.pack("<IIQQQI", *body)
    return packed + struct.pack("<IQ", zlib.crc32(packed) if check is None else check, 0)


@pytest.mark.fault("Hostile input", "a journal record with another CRC of a tile", "refused at read-back")
def test_a_tile_is_read_back_against_both_digests_of_a_journal(small):
    """An archive takes its CRC from the journal.

    This run never had the bytes of that CRC.
    """
    source, plan, out = small
    set_failpoints("synced:1:eio")
    with pytest.raises((UcplError, OSError)):
        run(plan, source, out)
    set_failpoints("")
    journal = out.with_name(".out.ucpl-work") / "journal"
    header, _, body = journal.read_bytes().partition(b"\n")
    rows = [bytearray(body[i : i + 48]) for i in range(0, len(body), 48)]
    told = next(row for row in rows if struct.unpack_from("<I", row) == (1,))
    told[32] ^= 1  # the CRC of a tile; its record's own is made anew
    struct.pack_into("<I", told, 36, zlib.crc32(told[:36]))
    journal.write_bytes(header + b"\n" + b"".join(rows))
    assert code_of(lambda: run(plan, source, out, resume=True)) == "E505"
    assert not out.exists()


@pytest.mark.fault(
    "Hostile input",
    "a FIFO or a link in place of the journal, a text or the manifest",
    "not followed, no hang: status 4 or a finding",
)
def test_what_an_earlier_run_left_is_a_regular_file(small):
    """A FIFO is not waited for, and a link is not followed.

    A journal is appended to, and cut.
    """
    source, plan, out = small
    work = out.with_name(".out.ucpl-work")
    work.mkdir()
    os.mkfifo(work / "journal")
    assert code_of(lambda: run(plan, source, out, resume=True)) == "E503"
    (work / "journal").unlink()
    Journal.begin(work / "elsewhere", {"tile": 16}).close()
    (work / "journal").symlink_to("elsewhere")
    assert code_of(lambda: run(plan, source, out, resume=True)) == "E503"
    (work / "journal").unlink()
    set_failpoints("synced:1:eio")
    with pytest.raises((UcplError, OSError)):
        run(plan, source, out)
    set_failpoints("")
    (work / "tree" / "ucpl").mkdir()
    os.mkfifo(work / "tree" / "ucpl" / "layout.ucpl")
    assert code_of(lambda: run(plan, source, out, resume=True)) == "E503"
    run(plan, source, out)
    (out / MANIFEST).unlink()
    os.mkfifo(out / MANIFEST)
    assert code_of(lambda: run(plan, source, out, resume=True)) == "E506"
    found = verify_files(open_target(out, ["to_a.pt", "to_b.pt"])).findings
    assert {d.code for d in found} == {"E632"} and "no regular file" in found[0].message


@pytest.mark.fault(
    "Hostile input", "journals with other headers or forged records", "the same bytes in the end, or refused"
)
@pytest.mark.parametrize("seed", range(4))
def test_any_journal_is_resumed_or_refused(small, seed, monkeypatch):
    """Headers with types exchanged, and records of noise with a matching CRC.

    The run ends in the same bytes or in an error of ucpl.
    """
    source, plan, out = small
    run(plan, source, out.with_name("wanted"))
    wanted, rng = tree(out.with_name("wanted")), random.Random(seed)
    set_failpoints("synced:1:eio")
    with pytest.raises((UcplError, OSError)):
        run(plan, source, out)
    set_failpoints("")
    work = out.with_name(".out.ucpl-work")
    kept = {p.relative_to(work): p.read_bytes() for p in work.rglob("*") if p.is_file()}
    header, _, body = kept[next(p for p in kept if p.name == "journal")].partition(b"\n")
    for _ in range(25):
        for path, data in kept.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes(data)
        noise = b"".join(
            record(rng.choice((2, 2, 3, 9)), *(rng.choice((0, 1, rng.randrange(1 << bits), (1 << bits) - 1))
                   for bits in (32, 64, 64, 64, 32)))
            for _ in range(rng.randrange(4))
        )  # fmt: skip
        head = dumped(anywhere(json.loads(header), rng)) if rng.random() < 0.5 else header
        (work / "journal").write_bytes(head + b"\n" + body + noise + bytes(rng.randrange(50)))
        try:
            run(plan, source, out, resume=True, force=True)
            assert tree(out) == wanted
        except UcplError as error:
            assert error.diagnostics[0].code in ("E602", "E508", "E612"), error


def test_a_journal_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "journal"
    journal = Journal.begin(path, {"tile": 16})
    runs = Fragments()
    runs.add(1, 2, 3, 4)
    runs.add(5, 6, 7, 8, (9, 10))
    runs.add(1, 2, 3, 4, (2, 1 << 40))  # too far apart to be recorded: it will be read again
    journal.append([DoneTile(7, 48, 0xDEAD, 0xBEEF)], runs)
    journal.publishing(1 << 63, 5)
    journal.close()
    past = read_journal(path)
    assert past is not None and past.header == {"ucpl journal": FORMAT, "tile": 16}
    assert (past.tile.tolist(), past.tile_crc.tolist(), past.tile_xxh3.tolist()) == ([7], [0xDEAD], [0xBEEF])
    f = past.fragments
    assert list(zip(f.file, f.position, f.size, f.crc, f.count, f.step, strict=True)) == [
        (1, 2, 3, 4, 1, 0), (5, 6, 7, 8, 9, 10),
    ]  # fmt: skip
    assert past.publishing == (1 << 63, 5) and past.size == path.stat().st_size


@pytest.mark.parametrize("body", [(1, 0, 1 << 62, 1, 0, 0), (1, 0, 0, 1 << 62, 0, 0), (2, 0, 1 << 63, 1, 0, 0),
                                  (2, 0, 0, 1, 5, 0), (2, 0, 0, 1, 1 << 40, 0),
                                  # runs that overlap, and runs beyond the range of a number
                                  (2, 0, 0, 1, 0xFFFFFF << 40, 0), (2, 0, 0, 9, (2 << 40) + 8, 0),
                                  (2, 0, 0, 1, (1 << 64) - 1, 0)])  # fmt: skip
def test_a_record_of_places_that_no_file_has_ends_the_journal(tmp_path, body):
    path = tmp_path / "journal"
    Journal.begin(path, {"tile": 16}).close()
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + record(1, 0, 3, 4, 5, 6) + record(*body) + record(1, 0, 4, 4, 5, 6))
    past = read_journal(path)
    assert past is not None and past.tile.tolist() == [3] and past.size == size + 48
