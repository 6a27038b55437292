"""Every command of docs/TUTORIAL.md, in order, in an empty folder.

A line under a command must be part of its output. A command that is a verb or a script alone runs in this process,
which has loaded torch already; lines of a shell run in one.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.command import ucpl
from tests.formats.huggingface.folders import assert_equal, tensors_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "TUTORIAL.md"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty working folder, with `python` and `ucpl` on its path."""
    program = tmp_path / "bin"
    program.mkdir()
    for name, arguments in (("python", ""), ("ucpl", "-m ucpl")):
        (program / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (program / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("PATH", f"{program}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)  # as of a script in it
    before = set(sys.modules)
    yield home
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(home)):
            del sys.modules[name]


def told(command):
    """The output of a command that succeeds."""
    match shlex.split(command):
        case ["ucpl", *arguments] if not re.search(r"[|;<>&]", command):
            done = ucpl(*arguments)
            status, said = done.status, done.out + done.err
        case ["python", script]:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                runpy.run_path(script, run_name="__main__")
            status, said = 0, printed.getvalue()
        case _:
            ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=1800)
            status, said = ended.returncode, ended.stdout + ended.stderr
    assert status == 0, f"{command}\n{said}"
    return said


def test_the_tutorial_from_nothing_to_a_proof(home):
    ran = []
    for kind, body in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        match kind:
            case "python":
                (home / body.splitlines()[0].removeprefix("# ")).write_text(body)
            case "ucpl":
                (home / "captioner.ucpl").write_text(body)
            case "sh":
                for command, wanted in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
                    said = told(command)
                    for line in wanted.splitlines():
                        assert line.strip() in said, f"{command}\nshould print: {line}\nprinted:\n{said}"
                    ran.append(command)
    verbs = {command.split()[1] for command in ran if command.startswith("ucpl ")}
    assert {"inspect", "import", "check", "show", "roundtrip", "convert", "verify", "compare"} <= verbs
    assert_equal(tensors_of(home / "whole"), tensors_of(home / "back"))
    whole, part = load_file(home / "whole" / "model.safetensors"), load_file(home / "parts" / "rank_1.safetensors")
    qkv = whole["text.blocks.2.qkv.weight"].reshape(3, 6, 2, 12)[:, 2:4].reshape(12, 12)
    assert torch.equal(part["text.blocks.2.qkv.weight"], qkv)
    assert torch.equal(part["eye.patch.weight"], whole["eye.patch.weight"])
