"""Standard output and standard error that take nothing.

A log on a full disk, a daemon that has closed them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "checkpoint"
CASES = {
    "full": (">/dev/full", 4),
    "both full": (">/dev/full 2>/dev/full", 4),
    "closed": (">&-", 0),
    "errors closed": ("2>&-", 0),
    "all closed": ("<&- >&- 2>&-", 0),
}


def shell(text: str, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(["sh", "-c", text], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.fault(
    "Disk and files", "standard output that is full or closed", "the work completes; status 4 if it is full"
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("case", CASES)
def test_output_that_cannot_be_written_stops_no_work(tmp_path: Path, case: str, unbuffered: str) -> None:
    into, status = CASES[case]
    target = tmp_path / "out"
    done = shell(f'"{sys.executable}" -m ucpl convert "{EXAMPLE}" "{target}" --to "zero1(dp=3)" {into}', unbuffered)
    assert (done.returncode, (target / "ucpl" / "manifest.json").is_file()) == (status, True), done.stderr
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr
    if case == "full":
        assert "standard output cannot be written: No space left on device; all else was done" in done.stderr


@pytest.mark.parametrize("verb", ["infer", "inspect --json"])
def test_an_answer_that_is_lost_is_no_success(verb: str) -> None:
    assert shell(f'"{sys.executable}" -m ucpl {verb} "{EXAMPLE}" >/dev/full').returncode == 4
