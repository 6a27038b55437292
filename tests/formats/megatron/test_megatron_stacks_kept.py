"""Stored names of Megatron-Core in targets for modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import good

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron"
STACK, HALF = "decoder.layers.self_attention.linear_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight_w"


def model_of(source: Path, folder: Path) -> tuple[dict[str, Any], str]:
    out = good("convert", source, folder / "made.pt", "--to", "torch_file", "--force").out
    return torch.load(folder / "made.pt", weights_only=False)["model"], out


@pytest.mark.parametrize(("name", "kept"), [("dist_stacked_tp2_pp2_fully", STACK), ("dist_unstacked_moe_ep2", HALF)])
def test_names_that_no_module_has_are_named_with_a_way_to_those_of_modules(
    name: str, kept: str, tmp_path: Path
) -> None:
    stored, out = model_of(FIXTURES / name, tmp_path)
    assert kept in stored and f"the target keeps {kept.partition('linear')[0]}" in out
    good("convert", FIXTURES / name, tmp_path / "legacy", "--to", "megatron_legacy")
    modules, out = model_of(tmp_path / "legacy", tmp_path)
    assert "the target keeps" not in out
    if kept == STACK:
        assert torch.equal(modules["decoder.layers.1.self_attention.linear_proj.weight"], stored[STACK][1])
    else:
        both = torch.cat([stored[HALF], stored[HALF[:-1] + "v"]])
        assert torch.equal(modules[HALF.removesuffix("_w")], both)
    for call in ("plain()", "megatron_core(tp=1)"):
        assert "the target keeps" not in good("convert", FIXTURES / name, tmp_path / call, "--to", call).out
