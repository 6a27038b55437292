"""Every command of docs/NODE_DIED.md and of the page without a disk.

They run in order, in one shell each: a job loses a rank, and resumes with its state.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.test_pages import agrees, commands

pytestmark = pytest.mark.interop

PAGES = ("NODE_DIED", "NODE_DIED_WITHOUT_THE_DISK")
MARK = "@@ command"
# By machine: losses, digests, processes, buffers, releases, and which save was the last one before the end.
VARIES = re.compile(
    r"(?m)\b\d\.\d{3}\b|\b[0-9a-f]{16}\b|(?<=pid: )[\d.]+|(?<=buffers ).*|(?<=deepspeed ).*|(?<=at step )\d+"
    r"|(?<=global_step)\d+|(?<=\S) in [0-9.e+-]+ s(?:, [0-9.e+-]+ MiB/s)?$"
    r"|(?<=^vault      ).*|(?<=writers live, ).*|(?<=generation ).*"
)
SECONDS = 900  # one minute on a quiet machine, four on a busy one


@pytest.fixture(scope="module", params=PAGES)
def said(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[tuple[Block, str, str, str]]:
    """Each command: its block, the page's output and the real one."""
    here = tmp_path_factory.mktemp("node_died")
    page = [block for block in blocks(ROOT / "docs" / f"{request.param}.md") if block.info == ("console",)]
    shutil.copytree(ROOT / "examples" / "node_died", here / "examples" / "node_died")
    listed = [(block, *one) for block in page for one in commands(block)]
    script = ["set -e"]
    command_of = here / "bin" / "ucpl"  # one process, which a page's `kill` ends
    command_of.parent.mkdir()
    command_of.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ucpl "$@"\n')
    command_of.chmod(0o755)
    for number, (_, command, _) in enumerate(listed):
        script += [f"echo '{MARK} {number}'", command]
    path = f"{command_of.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "NO_COLOR": "1", "COLUMNS": "140"}
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(script)], cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    timer = threading.Timer(SECONDS, os.killpg, (shell.pid, signal.SIGKILL))
    timer.start()
    try:
        out, err = shell.communicate()
    finally:
        timer.cancel()
        with suppress(ProcessLookupError):  # and whatever it left in the background
            os.killpg(shell.pid, signal.SIGKILL)
    printed = re.split(rf"^{MARK} \d+\n", out, flags=re.MULTILINE)[1:]
    logs = "".join(f"\n{log.name}\n{log.read_text()[-2000:]}" for log in sorted(here.glob("*.log")))
    assert shell.returncode == 0, f"{listed[len(printed) - 1][1]}\n{out[-2000:]}\n{err[-3000:]}{logs}"
    return [(*one, text) for one, text in zip(listed, printed, strict=True)]


def test_every_command_prints_what_the_page_shows(said: list[tuple[Block, str, str, str]]) -> None:
    for block, command, shown, printed in said:
        assert agrees(VARIES.sub("", shown), VARIES.sub("", printed)), f"{block}: {command}\n{printed}"


def test_the_walk_is_complete(said: list[tuple[Block, str, str, str]]) -> None:
    """Three ranks have the bits of four in both ways."""
    ran = "\n".join(command for _, command, _, _ in said)
    walks = [("ucpl contingency", "kill -9", "-m ucpl apply", "ucpl compare", "--fill"),
             ("ucpl vault serve", "kill -9", "rm -r $V/d3", "--fill vault:$V", "ucpl vault persist")]  # fmt: skip
    assert [all(word in ran for word in walk) for walk in walks].count(True) == 1
    states = [printed for _, command, _, printed in said if command.startswith("grep ^state")]
    assert len(states) == 2
    assert states[0] == states[1]
    assert re.fullmatch(r"state at step \d+ is the one that was saved: [0-9a-f]{16}\n", states[0])
