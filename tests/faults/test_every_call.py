"""A sample of `make faults`.

Each verb, a few of its calls of the machine failing or being its last.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.jobs import JOBS, Job
from tests.faults.law import Bench
from tests.faults.layer import ACTIONS, KINDS, Fault, Layer

SAMPLE = 3


@pytest.mark.fault(
    "Every system call",
    "EIO, ENOSPC, SIGKILL or a torn write at the k-th call of each kind, for every k (`make faults`)",
    "an error with a code and the file; source unchanged; target old or new and complete; the same command then completes",
)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_fault_at_any_call_is_reported_and_harms_nothing(job: Job, tmp_path: Path) -> None:
    bench = Bench(job, tmp_path)
    faults = list(bench.faults(ACTIONS))
    drawn = random.Random(job.name).sample(faults, SAMPLE)
    assert not [str(found) for fault in drawn if (found := bench.under(fault)).broken]


def test_what_is_read_to_make_a_file_anew_is_not_done_without(tmp_path: Path) -> None:
    """Weights next to the shards, and the config with their dtype.

    Without them, other files would be written.
    """
    bench = Bench(next(job for job in JOBS if job.name == "anew"), tmp_path)
    reads = [(call.split()[0], Path(call.split()[1]).name) for call in bench.counted["read"]]
    decided = reads.index(("read", "config.json"))  # later calls move data
    for what in (("pread", "model.safetensors"), ("pread", "config.json"), ("read", "config.json")):
        hit = max(at for at, one in enumerate(reads[: decided + 1], 1) if one == what)
        found = bench.under(Fault("read", hit, "eio"))
        assert (found.status, found.broken) == (3, ()), (what, str(found))
    listed = [hit for hit, call in enumerate(bench.counted["list"], 1) if call == f"scandir {bench.top / 'src'}"]
    found = bench.under(Fault("list", listed[-1], "eio"))
    assert (found.status, found.broken) == (3, ()), str(found)
    looks = [Path(call.split()[1]) for call in bench.counted["stat"]]
    for path in (bench.top / "src" / "training_args.bin", bench.place / ".out.ucpl-made" / "0" / "model.safetensors"):
        assert bench.under(Fault("stat", looks.index(path) + 1, "eio")).broken == ()


def test_every_kind_of_call_is_seen(tmp_path: Path) -> None:
    """Of a run that replaces a target.

    A kind that nobody counts would never fail. An unreadable place is reported:
    before any work, and once it is there.
    """
    bench = Bench(next(job for job in JOBS if job.name == "force"), tmp_path)
    looks = [
        hit for hit, call in enumerate(bench.counted["stat"], 1) if call == f"stat {bench.place / bench.job.writes}"
    ]
    above = bench.counted["stat"].index(f"stat {bench.place}") + 1
    for hit in (looks[0], above, looks[-1]):
        assert bench.under(Fault("stat", hit, "eio")).broken == ()
    assert {kind for kind in KINDS if bench.counted[kind]} >= set(KINDS) - {"mode"}
    assert len(bench.counted["read"]) > 100 and len(bench.counted["write"]) > 20


def test_the_law_finds_what_breaks_it(tmp_path: Path) -> None:
    """A job that ignores failing syncs, and one that writes in place."""
    bench = Bench(next(job for job in JOBS if job.name == "fmt"), tmp_path)
    assert bench.under(Fault("sync", 1, "eio")).broken == ()
    bench.wanted = {"x.ucpl": "another"}
    assert (
        "what stands there is neither the old one nor the new"
        in bench.under(Fault("close", len(bench.counted["close"]), "eio")).broken
    )


def test_a_layer_leaves_no_trace(tmp_path: Path) -> None:
    import os

    before = os.open, os.stat, open
    layer = Layer((tmp_path,))
    with layer.put_in():
        (tmp_path / "x").write_text("text")
        (tmp_path / "x").read_text()
    assert (os.open, os.stat, open) == before
    assert [len(layer.calls[kind]) > 0 for kind in ("open", "write", "read")] == [True] * 3
