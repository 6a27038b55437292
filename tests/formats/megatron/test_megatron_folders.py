"""Folders around an iteration, of NeMo 2 and Megatron-Bridge.

NeMo 2 has it in `weights`; Megatron-Bridge adds files to it and to the run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.formats.opening import open_checkpoint

ITERATION = Path(__file__).parents[2] / "fixtures" / "megatron" / "dist_muon"


@pytest.fixture
def nemo(tmp_path: Path) -> Path:
    shutil.copytree(ITERATION, tmp_path / "nemo" / "weights")
    (tmp_path / "nemo" / "context" / "tokenizer").mkdir(parents=True)
    (tmp_path / "nemo" / "context" / "model.yaml").write_text("hidden_size: 16\n")
    (tmp_path / "nemo" / "context" / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path / "nemo"


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    run = tmp_path / "bridge"
    shutil.copytree(ITERATION, run / "iter_0000010")
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    (run / "iter_0000010" / "run_config.yaml").write_text("model: tiny\n")
    for name in ("latest_train_state.pt", "iter_0000010/train_state.pt"):
        torch.save({"step": torch.tensor(10)}, run / name)
    return run


def files_in(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if path.parts[0] != "ucpl" and path.suffix != ".distcp"}


OF_CORE = {".metadata", "common.pt", "metadata.json"}


def test_a_folder_of_nemo_is_read_and_written_again(nemo: Path, tmp_path: Path) -> None:
    assert ucpl.compare(nemo, ITERATION)
    ucpl.convert(nemo, tmp_path / "out", "megatron_core(tp=2)")
    context = {"context/model.yaml", "context/tokenizer/tokenizer.json"}
    assert files_in(tmp_path / "out") == {f"weights/{name}" for name in OF_CORE} | context
    assert ucpl.compare(nemo, tmp_path / "out")
    done = ucpl.convert(nemo, tmp_path / "zero", "zero1(dp=2)")
    assert done.plan.account is not None
    assert context <= {name for entry in done.plan.account.of("dropped") for name in entry.names}


def test_a_run_of_megatron_bridge_keeps_its_files(bridge: Path, tmp_path: Path) -> None:
    assert ucpl.compare(bridge, ITERATION)
    ucpl.convert(bridge, tmp_path / "out", "megatron_core(tp=2)")
    own = {f"iter_0000010/{name}" for name in (*OF_CORE, "run_config.yaml", "train_state.pt")}
    assert files_in(tmp_path / "out") == own | {"latest_checkpointed_iteration.txt", "latest_train_state.pt"}
    assert (tmp_path / "out" / "iter_0000010" / "run_config.yaml").read_text() == "model: tiny\n"
    assert ucpl.compare(bridge, tmp_path / "out")
    assert {"run_config.yaml", "train_state.pt"} <= {one.name for one in open_checkpoint(bridge).not_read}
