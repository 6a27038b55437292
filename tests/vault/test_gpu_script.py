"""The script that times tensors of a GPU, without one."""

import json
import os

import torch

from benchmarks import gpu


def ran(monkeypatch, capsys, *arguments):
    for name in ("UCPL_CACHE", "PYTHONPATH"):  # which the script sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr("sys.argv", ["gpu.py", *map(str, arguments)])
    return gpu.main(), capsys.readouterr().out


def test_each_phase_of_a_save_is_a_method():
    for owner, name, _ in gpu.PHASES:
        assert callable(getattr(owner, name, None)), name


def test_without_a_gpu_the_script_reports_it_and_ends(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, said = ran(monkeypatch, capsys)
    assert status == 0 and "there is no GPU: nothing was checked or timed" in said


def test_a_table_that_fails_is_a_failure_and_leaves_the_others(monkeypatch, capsys, tmp_path):
    def broken(*_):
        yield ("first", "1", "2")
        raise AttributeError("a name that is gone")

    title, head, _, divisor = gpu.TABLES["saves"]
    monkeypatch.setitem(gpu.TABLES, "saves", (title, head, broken, divisor))
    tables = ("--limit", 900, "--tables", "saves,reshard", "--json", tmp_path / "found.json")
    status, said = ran(monkeypatch, capsys, "--cpu", "--gib", 0.001, "--folder", tmp_path, *tables)
    found = json.loads((tmp_path / "found.json").read_text())
    assert status == 1 and "FAILED saves: AttributeError" in said
    assert found["failed"] == [["saves", "AttributeError: a name that is gone"]]
    timed = [row[0] for row in found["tables"]["reshard"]]
    for way in ("reshard by gloo, by row to by column", "reshard by gloo, transposed"):
        assert any(name.startswith(way) for name in timed)
