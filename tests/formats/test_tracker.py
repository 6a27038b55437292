"""The tracker of a layout with files of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucpl

SPEC = """ucpl 1
model m {{
  w : 4 6
}}
layout own(tracker = "{tracker}") of m {{
  framework torch(tracker = tracker, step = "7")
  file weights = torch "sub/w.pt"
  * = ... in weights as "{{name}}"
}}
"""


def made(tmp_path: Path, tracker: str) -> Path:
    (tmp_path / "run").mkdir()
    save_file({"w": torch.arange(24.0).view(4, 6)}, tmp_path / "run" / "model.safetensors", {"format": "pt"})
    (tmp_path / "run" / "config.json").write_text(json.dumps({"hidden": 6}))
    (tmp_path / "own.ucpl").write_text(SPEC.format(tracker=tracker))
    ucpl.convert(tmp_path / "run", tmp_path / "target", f"{tmp_path}/own.ucpl:own()")
    return tmp_path / "target"


@pytest.mark.parametrize("tracker", ["sub/w.pt", "config.json"])
def test_a_tracker_with_the_name_of_another_file_is_refused(tracker: str, tmp_path: Path) -> None:
    with pytest.raises(ucpl.UcplError, match=f"E507.*`{tracker}`") as caught:
        made(tmp_path, tracker)
    assert "latest.txt" in caught.value.diagnostics[0].remedy
    assert not (tmp_path / "target").exists()


def test_a_tracker_names_the_step(tmp_path: Path) -> None:
    assert (made(tmp_path, "latest.txt") / "latest.txt").read_text() == "7\n"
