"""The end of a process of a command, with all output printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.command import FIXTURES, ROOT, alone, good, ucpl

WATCHED = """
import atexit, os, sys, threading
atexit.register(print, "last")
end = os._exit
def ended(status):
    os.write(1, b"at once\\n")
    end(status)
os._exit = ended
{before}
from ucpl.cli import command
command()
"""
SOURCE = FIXTURES / "z1_dp4"


def test_output_and_last_calls_are_complete_before_the_end() -> None:
    done = alone("inspect", SOURCE, code=WATCHED.format(before=""))
    assert (done.status, done.out, done.err) == (0, good("inspect", SOURCE).out + "last\nat once\n", "")


@pytest.mark.parametrize("before", ["sys.setprofile(lambda *_: None)", "sys.settrace(lambda *_: None)"])
def test_a_profile_sees_the_end_that_python_makes(before: str) -> None:
    assert alone("explain", "E500", code=WATCHED.format(before=before)).out.endswith("\nlast\n")


def test_a_thread_is_waited_for() -> None:
    waits = "threading.main_thread().join(), print('of a thread')"  # until Python itself ends that thread
    before = f"threading.Thread(target=lambda: ({waits})).start()"
    done = alone("explain", "E500", code=WATCHED.format(before=before))
    assert "of a thread\n" in done.out and "at once" not in done.out


@pytest.mark.parametrize("argv", [("explain", "E500"), ("nosuchverb",), ("inspect", "/nowhere")])
def test_the_status_of_a_process_is_that_of_the_command(argv: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", "ucpl", *argv], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == ((found := ucpl(*argv)).status, found.out, found.err)


def test_a_full_disk_behind_the_output_is_reported() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "ucpl", "explain", "E500"], cwd=ROOT, stdout=full, stderr=-1)
    assert done.returncode == 4 and b"E179" in done.stderr
