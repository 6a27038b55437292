"""Messages for a spec with one mistake and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import ROOT, ucpl

EXAMPLES = ROOT / "examples" / "architectures"
CASES = {
    "a key with other capitals": (
        "mamba2", '"{mixer}norm.weight"', '"{mixer}Norm.weight"',
        ["did you mean backbone.layers.0.mixer.norm.weight? The checkpoint has it", "the same of 3 more"], 1,
    ),
    "a key of ranks": (
        "mamba2", '"{mixer}norm.weight"', '"{mixer}norm.weight.{tp}"', ["did you mean backbone.layers.0.mixer.norm.weight?"], 1,
    ),
    "one size": ("mamba2", "k = config.conv_kernel", "k = 5", ["`k` is 5 here, and 4 in the file"], 1),
    "several sizes": (
        "mamba2", "norm              : l n d", "norm              : l n s",
        ["axis 0 is of n = 12, s = 5: correct a size or the pattern, so that 36 elements lie along it"], 1,
    ),
    "axes in another order": (
        "mamba2", "out               = h (n@tp d)", "out               = (n@tp d) h",
        ["the axes are in another order there"], 1,
    ),
    "an axis too many": (
        "mamba2", "norm              = (n@tp d)", "norm              = n@tp d", ["the file has 1 axis, and the line 2"], 1,
    ),
    "layers that the file lacks": (
        "hybrid", "k, v              : l[attention] g d h", "k, v              : l[0, 1, 2] g d h",
        ["the checkpoint has it of other indices: write in the model which ones"], 2,
    ),
    "layers that the model lacks": (
        "qwen3_next", "router             : l e h", "router             : l[1..] e h",
        ["an entry covers others of this name: write these indices in the model, too"], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_line_has_one_message_with_a_remedy(case: str, tmp_path: Path) -> None:
    name, before, after, says, times = CASES[case]
    text = (EXAMPLES / f"{name}.ucpl").read_text(encoding="utf-8")
    if case == "several sizes":
        text = text.replace("norm              = (n@tp d)", "norm              = (n@tp s)")
    assert text.count(before) == 1
    spec = tmp_path / "mine.ucpl"
    spec.write_text(text.replace(before, after), encoding="utf-8")
    folder = EXAMPLES / "checkpoints" / name
    done = ucpl("plan", "--from", f"{spec}:hf()", "--checkpoint", folder, "--to", f"{spec}:hf()")
    assert done.status == 1, done.out
    assert done.err.count("error[") == times, done.err
    assert [one for one in says if one not in done.err] == [], done.err
