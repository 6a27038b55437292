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
GROUPS = {
    "v2": ("0::/job/step\n", {
        "job/step/memory.max": "max", "job/memory.max": "268435456", "job/step/cpu.max": "150000 100000"}),
    "v2 of a namespace": ("0::/\n", {"memory.max": "268435456", "cpu.max": "100000 100000"}),
    "v1": (
        "4:memory:/job\n1:cpu,cpuacct:/job\n",
        {
            "memory/job/memory.limit_in_bytes": "268435456", "memory/memory.limit_in_bytes": "9223372036854771712",
            "cpu,cpuacct/job/cpu.cfs_quota_us": "100000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        },
    ),
    "v1 of a namespace": ("4:memory:/elsewhere\n1:cpu:/elsewhere\n", {
        "memory/memory.limit_in_bytes": "268435456", "cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000",
    }),
}  # fmt: skip


def grouped(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, files = GROUPS[kind]
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    (folder / "own").write_text(own)
    monkeypatch.setattr(limits, "ROOT", folder)
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

    monkeypatch.setattr(limits, "ROOT", tmp_path)
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
