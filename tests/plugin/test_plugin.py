"""A format of another package.

Its wheel is built and installed, and the command converts to it and from it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
PLUGIN, SOURCE = ROOT / "examples" / "plugin", ROOT / "examples" / "checkpoint"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel of the package is installed."""
    top = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(top), str(PLUGIN)],
        check=True,
    )
    (wheel,) = top.glob("npy_folder-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(top / "site"), str(wheel)], check=True)
    return top / "site"


def ucpl(site: Path, *call: str, status: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}
    done = subprocess.run([sys.executable, "-m", "ucpl", *call], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_checkpoint_goes_to_a_format_of_another_package_and_back(site: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    said = ucpl(site, "convert", str(SOURCE), str(there), "--to", "npy_folder()")
    assert "a folder of .npy files has no place for it" in said
    truth = torch.load(SOURCE / "truth.pt", weights_only=False)
    index = json.loads((there / "index.json").read_text(encoding="utf-8"))
    count = 0
    for name, states in truth["params"].items():
        for state, value in states.items():
            if state in index["tensors"][name]["files"]:
                file, _ = index["tensors"][name]["files"][state]
                assert np.array_equal(np.load(there / file), value.numpy()), (name, state)
                count += 1
    assert count > 20
    assert [group["lr"] for group in index["groups"]] == truth["lr"]
    assert [group["weight_decay"] for group in index["groups"]] == truth["weight_decay"]
    ucpl(site, "convert", str(there), str(back), "--to", "zero2(dp=4)")
    lines = ucpl(site, "compare", str(SOURCE), str(back), status=1)
    named = {line.split()[1].rstrip(":") for line in lines.splitlines() if line.startswith("differs")}
    assert named == {"lr_scheduler", "global_samples", "client_state.epoch", "client_state.cursor"}


def test_what_such_a_format_leaves_is_named(site: Path) -> None:
    account = json.loads(ucpl(site, "plan", "--from", str(SOURCE), "--to", "npy_folder()", "--json"))["plan"]["account"]
    left = {entry["kind"]: entry["names"] for entry in account["entries"] if entry["fate"] == "dropped"}
    assert left["client_state"] == ["epoch", "cursor"] and "lr_scheduler" in left["value"]


def test_checks_know_the_layout_of_a_package(site: Path, tmp_path: Path) -> None:
    assert "npy_folder" in ucpl(site, "convert", str(SOURCE), str(tmp_path / "x"), "--to", "npy_foldr()", status=2)
    ucpl(site, "convert", str(SOURCE), str(tmp_path / "there"), "--to", "npy_folder()")
    assert ucpl(site, "verify", str(tmp_path / "there")).splitlines()[-1] == "sound"
    file = next((tmp_path / "there").glob("*.npy"))
    file.write_bytes(file.read_bytes()[:-4])
    ucpl(site, "verify", str(tmp_path / "there"), status=1)
