"""The verification of a save. tests/interop/test_callbacks.py runs it in the Trainers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.command import ROOT
from ucpl.integrations import fault_in, report

TRAINER = ROOT / "tests" / "fixtures" / "trainer" / "checkpoint-3"


def test_the_first_fault_of_a_save_has_its_code_and_the_command(tmp_path: Path) -> None:
    save = shutil.copytree(TRAINER, tmp_path / "checkpoint-3")
    assert fault_in(save) == ""
    shard = next((save / "global_step3").glob("*_optim_states.pt"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
    damaged = fault_in(save)
    shard.write_bytes(whole[:100])
    for text in (damaged, fault_in(save)):
        assert text.startswith(f"{save} is damaged: E4") and shard.name in text
        assert text.endswith(f"`ucpl verify {save}` lists all findings")


def test_a_fault_stops_or_warns() -> None:
    report("", stop=True)
    with pytest.raises(RuntimeError, match="is damaged"):
        report("out is damaged", stop=True)
    with pytest.warns(UserWarning, match="is damaged"):
        report("out is damaged", stop=False)
