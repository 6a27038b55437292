"""Measurements of a disk, and estimates made of them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from attrs import asdict, evolve

from tests.cli.command import FIXTURES, good, ucpl
from ucpl.conversion import bandwidths as bw
from ucpl.conversion import calibrating
from ucpl.planning.cost import Cost

KNOWN = bw.Bandwidths("/disk", "2026-01-01T00:00:00Z", 2, 1e9, 1e10, 4e9, 2e9, 1e10, 3e10, 1e-6, 1e-3, 0.5, 70 << 20)


def cost(read: int, written: int, runs: int = 0, files: int = 0) -> Cost:
    one = [np.array([n], dtype=np.int64) for n in (read, 0, 0, written, runs)]
    return Cost(one[0], one[1], one[2], one[3], one[4], files, files)


@pytest.mark.parametrize("seed", range(3))
def test_more_of_anything_takes_longer_and_a_faster_disk_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    read, written, runs, files = (int(n) for n in rng.integers(1 << 20, 1 << 33, 4))
    base = bw.estimate(cost(read, written), KNOWN)
    assert base.warm <= base.cold
    for more in (
        cost(2 * read, written),
        cost(read, 2 * written),
        cost(read, written, runs),
        cost(read, written, 0, files),
    ):
        assert bw.estimate(more, KNOWN).cold >= base.cold
    for name in ("read", "reread", "write", "sync", "digest"):
        faster = bw.estimate(cost(read, written), evolve(KNOWN, **{name: 2 * getattr(KNOWN, name)}))
        assert faster.cold <= base.cold and faster.warm <= base.warm


def test_an_estimate_is_the_disk_s_where_that_is_slower() -> None:
    said = bw.estimate(cost(10**9, 10**9), KNOWN)
    assert said.warm == pytest.approx(0.5 + 0.5 + 1.0) and said.cold == pytest.approx(0.5 + 0.5 + 1.0 + 1.0)
    assert said.memory == (70 << 20) + 8 * (1 << 20)


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "_run", lambda target: (0.5, 70 << 20))
    monkeypatch.setattr(bw, "place", lambda: tmp_path / "kept" / "bandwidths.json")
    (tmp_path / "disk").mkdir()
    good("calibrate", tmp_path / "disk", "--size", "8M")
    assert not list((tmp_path / "disk").iterdir())
    found = bw.bandwidths_at(tmp_path / "kept" / "bandwidths.json")
    assert found.folder == str(tmp_path / "disk") and found.start == 0.5
    assert all(n > 1e6 for n in (found.read, found.reread, found.write, found.sync, found.copy, found.digest))
    printed = good("plan", "--from", FIXTURES / "z1_dp4", "--to", "zero3(dp=3)").out
    assert f"(measured at {found.folder}, {found.when})" in printed


def test_a_plan_says_what_it_costs(tmp_path: Path) -> None:
    (tmp_path / "known.json").write_text(bw.text_of(KNOWN))
    line = ("plan", "--from", FIXTURES / "z1_dp4", "--to", "zero3(dp=3)", "--bandwidths", tmp_path / "known.json")
    made = good(*line, "--json").json["cost"]
    assert made["read"] == sum(made["ranks"]["read"]) and made["estimate"]["warm"] > 0.5
    out = good(*line).out
    assert f"cost       reads {made['read']:,} bytes" in out and "estimate   " in out and "% of the bytes read" in out


def test_a_file_of_other_figures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    line = ("plan", "--from", FIXTURES / "z1_dp4", "--to", "zero3(dp=3)", "--bandwidths", path)
    assert ucpl(*line).status == 3
    for change in ({"read": 0}, {"sync": "fast"}, {"when": 3}, {"call": True}):
        path.write_text(json.dumps({**asdict(KNOWN), **change}))
        done = ucpl(*line)
        assert done.status != 0 and "E176" in done.err and f"`{next(iter(change))}` is" in done.err
    path.write_text("no figures")
    done = ucpl(*line, "-o", tmp_path / "made.plan")
    assert "E176" in done.err and "`ucpl calibrate FOLDER`" in done.err
    assert not done.out and not (tmp_path / "made.plan").exists()  # before anything is planned
    assert ucpl("calibrate", tmp_path / "nowhere").status != 0


def test_a_disk_without_room_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written here, whatever is refused.

    A product that forgot to look would fill the machine's own disk.
    """

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(calibrating, "_run", lambda target: (0.5, 70 << 20))
    monkeypatch.setattr(calibrating, "_disk", full)
    (tmp_path / "disk").mkdir()
    done = ucpl("calibrate", tmp_path / "disk", "--size", "100T", "-o", tmp_path / "b.json")
    assert done.status == 4 and "error[E501]: 109951162777600 bytes are to be written" in done.err
    assert "M would do" in done.err and not done.out
    done = ucpl("calibrate", tmp_path / "disk", "-o", tmp_path / "b.json")
    assert done.status == 4 and "error[E179]" in done.err and "No space left on device" in done.err
    done = ucpl("calibrate", tmp_path / "disk", "-o", tmp_path / "no" / "b.json")
    assert done.status == 4 and "its folder is not there" in done.err and not done.out
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["disk"]
    done = ucpl("calibrate", tmp_path / "disk", "--size", "0")
    assert "error[E173]: --size 0: no size" in done.err
