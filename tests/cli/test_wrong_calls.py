"""Wrong calls at a terminal of 60 columns.

Each answer names the fault and the text to type, in at most four lines.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver

from tests.cli.command import ROOT
from tests.formats.dcp import test_dcp_chosen as chosen
from ucpl import export
from ucpl.cli import main

LINES, COLUMNS = 4, 60
CALLS = [
    [part.strip() for part in re.split(r" \| ", line)]
    for line in Path(__file__).with_name("wrong_calls.txt").read_text(encoding="utf-8").splitlines()
    if " | " in line and not line.startswith("#")
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, and things that are none."""
    folder = tmp_path_factory.mktemp("calls")
    for name in ("ck", "full"):
        shutil.copytree(ROOT / "examples" / "checkpoint", folder / name)
    shutil.copytree(ROOT / "tests" / "fixtures" / "trainer", folder / "trainer")
    export(folder / "trainer" / "checkpoint-3", folder / "model")
    for name in ("empty", "runs", "runs/a"):
        (folder / name).mkdir()
    save_file({"w": torch.ones(3)}, folder / "runs" / "a" / "model.safetensors")
    for name in ("b.pt", "trained-optim.pt"):
        torch.save({"model": {"w": torch.ones(3)}}, folder / "runs" / name)
    (folder / "note.txt").write_text("hello\n")
    (folder / "config.json").write_text('{"a": 1}\n')
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    (folder / "deep.json").write_text(json.dumps({**config, "n_layer": 5}), encoding="utf-8")
    for name, state in (("gan", chosen.NESTED), ("averages", chosen.AVERAGE)):
        state_dict_saver.save(state, checkpoint_id=folder / name)
    (folder / "m.ucpl").write_text("ucpl 2\nmodel m {\n    w : 6 dtype f32\n}\n")
    return folder


@pytest.mark.parametrize(("call", "wrong", "remedy"), CALLS, ids=[call for call, *_ in CALLS])
def test_an_answer_is_short(call: str, wrong: str, remedy: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    for name, value in (("COLUMNS", str(COLUMNS)), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    out, err = Terminal(), Terminal()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(call.split())
    text = err.getvalue()
    message, help_line = re.sub(r"\s*\\?\n\s+(?!= help)", " ", text), " ".join(text.replace("\\\n", " ").split())
    wrong, remedy, help_line, message = (
        one.replace(str(here.resolve()), ".") for one in (wrong, remedy, help_line, message)
    )
    assert status in (1, 2, 3, 4, 5) and not out.getvalue() and not (here / "out").exists()
    assert message.startswith("error[E") and " ".join(wrong.split()) in " ".join(message.split()), text
    assert f"= help: {' '.join(remedy.split())}" in help_line, text
    lines = text.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, text


def test_a_hundred_calls_are_tried() -> None:
    assert len(CALLS) >= 100 and len({call for call, *_ in CALLS}) == len(CALLS)
    assert {shlex.split(call)[0] for call, *_ in CALLS} >= {
        "convert",
        "export",
        "resume",
        "inspect",
        "verify",
        "compare",
    }
