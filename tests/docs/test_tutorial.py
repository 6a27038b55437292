"""The blocks of docs/TUTORIAL.md, in order, with its scripts.

The output is the page's; a line `...` means any lines. A command that is a verb or a script alone runs in this process,
which has loaded torch already; lines of a shell run in one. `tests/interop/test_tutorial.py` runs the same with transformers.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.command import ucpl
from tests.docs.blocks import ROOT, Block, blocks
from tests.docs.test_pages import agrees, commands

PAGE = ROOT / "docs" / "TUTORIAL.md"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, with `python` and `ucpl` on its path."""
    program = tmp_path / "bin"
    program.mkdir()
    for name, arguments in (("python", ""), ("ucpl", "-m ucpl")):
        (program / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (program / name).chmod(0o755)
    home = tmp_path / "home"
    shutil.copytree(ROOT / "examples" / "tutorial", home, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PATH", f"{program}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # errors in their place
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)  # as of a script in it
    before = set(sys.modules)
    yield home
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(home)):
            del sys.modules[name]


def output_of(command: str) -> str:
    """The output of a command that succeeds, as a terminal shows it."""
    match shlex.split(command):
        case ["ucpl", *arguments] if not re.search(r"[|;<>&]", command):
            done = ucpl(*arguments)
            status, out = done.status, done.out + done.err
        case ["python", script]:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                runpy.run_path(script, run_name="__main__")
            status, out = 0, printed.getvalue()
        case _:
            ended = subprocess.run(
                command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
            )
            status, out = ended.returncode, ended.stdout
    assert status == 0, f"{command}\n{out}"
    return out


def run(page: list[Block], home: Path, kinds: set[tuple[str, ...]]) -> list[str]:
    """Write the files of the page, run its commands and return them."""
    ran = []
    for block in page:
        match block.info:
            case ("ucpl", "file"):
                (home / "glm4.ucpl").write_text(block.text)
            case ("ucpl", "append"):
                with (home / "glm4.ucpl").open("a") as file:
                    file.write(f"\n{block.text}")
            case info if info in kinds:
                for command, shown in commands(block):
                    out = output_of(command)
                    assert agrees(shown, out), f"{block}: {command}\nprinted:\n{out}"
                    ran.append(command)
            case info:
                assert info == ("sh", "transformers")
    return ran


def test_the_tutorial_from_a_folder_to_a_proof(home: Path) -> None:
    ran = run(blocks(PAGE), home, {("sh",)})
    verbs = {command.split()[1] for command in ran if command.startswith("ucpl ")}
    assert {"inspect", "import", "check", "show", "roundtrip", "convert", "verify", "compare"} <= verbs
    folder, back = (load_file(home / name / "model.safetensors") for name in ("folder", "back"))
    assert folder.keys() == back.keys() and all(torch.equal(folder[k], back[k]) for k in folder)
    part = torch.load(home / "ranks" / "stage_1_rank_0.pt")
    heads = folder["model.layers.3.self_attn.q_proj.weight"].reshape(4, 2, 6, 24)  # groups, heads, elements
    assert torch.equal(part["layers.1.qkv"].reshape(2, 4, 6, 24)[:, :2], heads[:2])
    assert torch.equal(part["norm"], folder["model.norm.weight"]) and "embed" not in part
