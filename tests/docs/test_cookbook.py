"""Commands of the pages by need, and files for CI.

A page runs in one folder, in its order, over copies of checkpoints that frameworks wrote.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ROOT, good, ucpl
from tests.docs.blocks import blocks
from tests.docs.test_pages import agrees, commands, run

FIXTURES = ROOT / "tests" / "fixtures"
PLACES = {
    "runs/zero2": ROOT / "examples" / "checkpoint",
    "runs/zero1": FIXTURES / "deepspeed" / "z1_dp4",
    "runs/tp2": FIXTURES / "deepspeed" / "tp2_dp2_z1_uneven",
    "runs/moe": FIXTURES / "deepspeed" / "moe_ep2_dp4_z1",
    "runs/fsdp": FIXTURES / "dcp" / "fsdp2_w4",
    "runs/accelerate": FIXTURES / "accelerate" / "fsdp",
    "runs/megatron": FIXTURES / "megatron" / "dist_adam_tp2",
    "out/checkpoint-3": FIXTURES / "trainer" / "checkpoint-3",
    "step-2.ckpt": FIXTURES / "lightning" / "step-2.ckpt",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name, path in PLACES.items():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    return tmp_path


@pytest.mark.parametrize(("page", "least"), [("COOKBOOK", 30), ("FAQ", 15), ("WHEN_IT_REFUSES", 30), ("MIGRATION", 14)])
def test_every_command_of_the_page_does_what_it_shows(page: str, least: int, here: Path) -> None:
    ran = 0
    for block in blocks(ROOT / "docs" / f"{page}.md"):
        if block.info in (("yaml",), ("python",)):  # tests/interop/test_callbacks.py runs the callbacks
            continue
        assert block.info == ("console",), block
        for command, shown in commands(block):
            done = run(command, here)
            ran += 1
            assert done.status == 0, f"{block}: {command}\n{done.out}{done.err}"
            assert agrees(shown, done.out), f"{block}: {command}\n{done.out}"
    assert ran >= least


def test_the_table_of_the_cookbook_names_every_checkpoint() -> None:
    text = (ROOT / "docs" / "COOKBOOK.md").read_text(encoding="utf-8").partition("\n\n`-D")[0]
    assert set(re.findall(r"`([\w./-]+)`", text.partition("|---|---|")[2])) - {"save_state"} == set(PLACES)


def test_the_commands_of_the_table_of_the_readme_are_those_of_the_cookbook() -> None:
    rows = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("| I type |\n|---|---|---|\n")[2]
        .partition("\n\n")[0]
    )
    shown = re.findall(r"`((?:srun )?ucpl [^`]+)` \|$", rows, re.MULTILINE)
    run = {
        command
        for block in blocks(ROOT / "docs" / "COOKBOOK.md")
        if block.info == ("console",)
        for command, _ in commands(block)
    }
    prose = set(re.findall(r"`(srun [^`]+)`", (ROOT / "docs" / "COOKBOOK.md").read_text(encoding="utf-8")))
    assert len(shown) == rows.count("\n") + 1 == 21
    assert [command for command in shown if command not in run | prose] == []


@pytest.mark.parametrize("page", ["COOKBOOK", "FAQ", "WHEN_IT_REFUSES", "MIGRATION"])
def test_a_page_of_recipes_is_short(page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").stat().st_size < 12_000


# ---- continuous integration ------------------------------------------------------------------------------------------


def yaml_of(name: str) -> Any:
    return import_module("yaml").safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(("is_damaged", "status"), [(False, 0), (True, 1)])
def test_the_action_verifies_a_checkpoint(is_damaged: bool, status: int, tmp_path: Path) -> None:
    action = yaml_of("action.yml")
    step = action["runs"]["steps"][-1]
    given = {"checkpoint": "a run", "options": action["inputs"]["options"]["default"]}
    values = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)
        for name, text in step["env"].items()
    }
    shutil.copytree(PLACES["runs/zero1"], tmp_path / "a run")
    if is_damaged:
        file = next((tmp_path / "a run").rglob("*_optim_states.pt"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    script = f'ucpl() {{ "{sys.executable}" -m ucpl "$@"; }}\n{step["run"]}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **values}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert all("${{" not in one.get("run", "") for one in action["runs"]["steps"])


def test_the_hooks_of_pre_commit_run(tmp_path: Path) -> None:
    hooks = {hook["id"]: hook for hook in yaml_of(".pre-commit-hooks.yaml")}
    tidy, wrong = tmp_path / "tidy.ucpl", tmp_path / "wrong.ucpl"
    tidy.write_text("ucpl 2\nmodel m {\n    w : 6 dtype f32\n}\n")
    wrong.write_text("ucpl 2\nmodel m {\n  w : 6 dtype f33\n}\n")
    assert all(re.search(hook["files"], str(tidy)) and hook["language"] == "python" for hook in hooks.values())
    good(*hooks["ucpl-fmt"]["entry"].split()[1:], tidy)
    assert tidy.read_text().splitlines()[2] == "  w : 6  dtype f32"
    check = hooks["ucpl-check"]["entry"].split()[1:]
    assert good(*check, tidy).status == 0 and ucpl(*check, tidy, wrong).status == 1
