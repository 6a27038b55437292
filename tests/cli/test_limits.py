"""Memory and processors of a run by cgroup v1, v2 and `ulimit`.

Also memory that runs out.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import good
from tests.cli.command import ucpl as command
from ucpl.cli import limits
from ucpl.cli.options import data_plane

SOURCE = Path(__file__).parents[2] / "examples" / "checkpoint"
ROOT = Path(__file__).parents[2]
V1 = {"memory": ("/", "cgroup", "rw,memory"), "both": ("/", "cgroup", "rw,cpuacct,cpu")}
V2 = {"": ("/", "cgroup2", "rw,nsdelegate")}
LIMIT = "268435456"
NO_LIMIT = "9223372036854771712"  # as v1 writes it
# Of each: /proc/self/cgroup; place, top, type and options of each mount; files below the places.
GROUPS = {
    "v2": ("0::/job/step\n", V2, {
        "job/step/memory.max": "max", "job/memory.max": LIMIT, "job/step/cpu.max": "150000 100000",
        "job/cpu.max": "max 100000",
    }),
    "v2 of a namespace": ("0::/\n", V2, {"memory.max": LIMIT, "cpu.max": "100000 100000"}),
    "v2, half a processor": ("0::/job\n", V2, {"job/memory.max": LIMIT, "job/cpu.max": "50000 100000"}),
    "v2, slowed from here on": ("0::/job\n", V2, {
        "job/memory.max": "max", "job/memory.high": LIMIT, "job/cpu.max": "100000 100000"}),
    "v2 with the paths of the host": ("0::/docker/a/job\n", {"": ("/docker/a", "cgroup2", "rw")}, {
        "memory.max": "max", "job/memory.max": LIMIT, "job/cpu.max": "100000 100000"}),
    "v2 of a group outside the namespace": ("0::/../b\n", {"here": ("/", "cgroup2", "rw")}, {
        "here/memory.max": LIMIT, "here/cpu.max": "100000 100000", "b/memory.max": "1048576"}),
    "v2 at another place beside v1": ("4:memory:/job\n1:cpu,cpuacct:/job\n0::/job\n", {
        **V1, "unified": ("/", "cgroup2", "rw")}, {
        "unified/job/cpu.max": "100000 100000", "unified/job/memory.max": "max", "memory/job/memory.limit_in_bytes": LIMIT,
    }),
    "v1": ("4:memory:/job\n1:cpu,cpuacct:/job\n", V1, {
        "memory/job/memory.limit_in_bytes": LIMIT, "memory/memory.limit_in_bytes": NO_LIMIT,
        "both/job/cpu.cfs_quota_us": "100000", "both/job/cpu.cfs_period_us": "100000",
        "both/cpu.cfs_quota_us": "-1", "both/cpu.cfs_period_us": "100000",
    }),
    "v1 of a namespace": ("4:memory:/elsewhere\n1:cpu:/elsewhere\n", V1, {
        "memory/memory.limit_in_bytes": LIMIT, "both/cpu.cfs_quota_us": "150000", "both/cpu.cfs_period_us": "100000",
    }),
    "v1 with the paths of the host": ("4:memory:/docker/a/job\n1:cpuacct,cpu:/docker/a/job\n", {
        "memory": ("/docker/a", "cgroup", "rw,memory"), "both": ("/docker/a", "cgroup", "rw,cpuacct,cpu")}, {
        "memory/job/memory.limit_in_bytes": LIMIT, "memory/memory.limit_in_bytes": NO_LIMIT,
        "both/job/cpu.cfs_quota_us": "50000", "both/job/cpu.cfs_period_us": "100000",
    }),
    "v1, a limit of a group that is not seen": ("4:memory:/pod/a\n1:cpu:/\n", {
        **V1, "memory": ("/pod/a", "cgroup", "rw,memory")}, {
        "memory/memory.limit_in_bytes": NO_LIMIT, "memory/memory.stat": f"cache 0\nhierarchical_memory_limit {LIMIT}",
        "both/cpu.cfs_quota_us": "100000", "both/cpu.cfs_period_us": "100000",
    }),
}  # fmt: skip


def grouped(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, mounts, files = GROUPS[kind]
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    (folder / "own").write_text(own)
    lines = [f"22 1 0:21 / {folder} rw - tmpfs tmpfs rw"]
    lines += [f"{n} 22 0:{n} {top} {folder / at} rw shared:9 - {kind} {kind} {options}"
              for n, (at, (top, kind, options)) in enumerate(mounts.items(), 23)]  # fmt: skip
    (folder / "mounts").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(limits, "MOUNTS", folder / "mounts")
    monkeypatch.setattr(limits, "OWN", folder / "own")
    monkeypatch.setattr(limits, "_address_space", lambda: None)


@pytest.mark.parametrize("kind", GROUPS)
def test_memory_and_workers_are_what_the_container_allows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from argparse import Namespace

    grouped(kind, tmp_path, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert (limits.memory_limit(), limits.processors()) == (256 << 20, 1)
    assert data_plane(Namespace(memory=None, workers=None)) == {"memory": 64 << 20, "workers": 1}
    assert data_plane(Namespace(memory="200M", workers="3")) == {"memory": 200 << 20, "workers": 3}
    done = command("convert", SOURCE, tmp_path / "dst", "--to", "zero1(dp=2)", "--memory", "1G")
    assert done.status == 4 and "E508" in done.err and "256 MiB" in done.err and not (tmp_path / "dst").exists()


def test_without_a_limit_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from argparse import Namespace

    monkeypatch.setattr(limits, "MOUNTS", tmp_path / "none")
    monkeypatch.setattr(limits, "OWN", tmp_path / "none")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert limits.memory_limit() is None and limits.processors() == 4
    assert data_plane(Namespace(memory=None, workers=None)) == {"memory": 512 << 20, "workers": 2}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("can't start new thread"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
)  # fmt: skip
def test_memory_that_runs_out_is_no_internal_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("ucpl.cli.inspect.run", fails)
    done = command("inspect", SOURCE)
    assert done.status == 4 and "E509" in done.err and "internal error" not in done.err
    done = command("inspect", SOURCE, "--json")
    assert done.json["diagnostics"][0]["code"] == "E509"


def test_a_small_address_space_ends_in_words_or_in_a_target(tmp_path: Path) -> None:
    good("convert", SOURCE, tmp_path / "whole", "--to", "zero1(dp=2)")
    for size in (120, 400):
        code = f"import resource as r, sys; r.setrlimit(r.RLIMIT_AS, ({size} << 20,) * 2); import ucpl.cli as c; "
        code += "sys.exit(c.main())"
        line = [sys.executable, "-c", code, "convert", str(SOURCE), str(tmp_path / str(size)), "--to", "zero1(dp=2)"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert "internal error" not in done.stderr and "Traceback" not in done.stderr
        assert done.returncode == 0 or (done.returncode == 4 and "E509" in done.stderr)
