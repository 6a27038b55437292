"""Frozen parameters whose names torch's modules do not use.

A torch file does not distinguish them from buffers, and DeepSpeed's stages 2 and 3 keep them apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl
from ucpl.api import open_checkpoint
from ucpl.registry import format_named


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A trained Linear, a frozen vector, a mask and a statistic."""
    linear = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model = {
        **linear.state_dict(),
        "scale": torch.arange(4.0),
        "mask": torch.ones(4),
        "norm.running_var": torch.ones(4),
    }
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    return tmp_path / "run.pt"


def kinds(path: Path) -> dict[str, str]:
    return {t.name: t.kind for t in open_checkpoint(path).state.tensors}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_guess_is_reported_where_it_matters_and_the_caller_decides(stage: int, run: Path, tmp_path: Path) -> None:
    goal = ucpl.plan(str(run), f"zero{stage}(dp=2)").target
    text = "\n".join(format_named(goal.framework).advice(open_checkpoint(run), goal))
    assert "scale, mask count as buffers" in text and "--freeze NAME" in text
    made = ucpl.convert(run, tmp_path / "new", f"zero{stage}(dp=2)", freeze=["scale"])
    assert made.plan.changed == ("a frozen parameter by --freeze scale: scale, which was taken for a buffer",)
    there = kinds(tmp_path / "new")
    assert (there["scale"], there["mask"]) == ("frozen", "buffer")
    ucpl.convert(tmp_path / "new", tmp_path / "back.pt", "torch_file()")
    assert torch.equal(torch.load(tmp_path / "back.pt")["model"]["scale"], torch.arange(4.0))


def test_elsewhere_nothing_is_printed_and_no_glob_changes_a_buffer(run: Path) -> None:
    goal = ucpl.plan(str(run), "zero1(dp=2)").target
    assert not any(
        "count as buffers" in text for text in format_named(goal.framework).advice(open_checkpoint(run), goal)
    )
    for text in ("*cale", "*mask"):
        with pytest.raises(ucpl.UcplError, match="which nothing trains"):
            ucpl.plan(str(run), "zero2(dp=2)", freeze=[text])


def test_a_source_that_distinguishes_them_is_not_contradicted(run: Path, tmp_path: Path) -> None:
    ucpl.convert(run, tmp_path / "zero", "zero2(dp=2)")
    with pytest.raises(ucpl.UcplError, match="mask is a buffer, which nothing trains"):
        ucpl.plan(str(tmp_path / "zero"), "zero3(dp=2)", freeze=["mask"])
