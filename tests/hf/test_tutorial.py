"""Every command of docs/TUTORIAL.md, in order, in an empty folder. A line under a command must be part of what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.hf.folders import assert_equal, tensors_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "TUTORIAL.md"


def test_the_tutorial_from_nothing_to_a_proof(tmp_path):
    program = tmp_path / "bin"
    program.mkdir()
    for name, arguments in (("python", ""), ("ucpl", "-m ucpl")):
        (program / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (program / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    env = {**os.environ, "PATH": f"{program}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    ran = []
    for kind, body in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        match kind:
            case "python":
                (home / body.splitlines()[0].removeprefix("# ")).write_text(body)
            case "ucpl":
                (home / "captioner.ucpl").write_text(body)
            case "sh":
                for command, wanted in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
                    done = subprocess.run(
                        command, shell=True, cwd=home, env=env, capture_output=True, text=True, timeout=1800
                    )
                    said = done.stdout + done.stderr
                    assert done.returncode == 0, f"{command}\n{said}"
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
