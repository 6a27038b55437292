"""Packed weights: the inferred text has comments, with correct lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ucpl

Arrays = dict[str, np.ndarray]
PATH = "model.layers.0.mlp.experts.down_proj"
FRAME = """ucpl 2
model m {{
{model}
}}
layout stored() of m {{
  framework torch()
  file weights = safetensors "model.safetensors"
{layout}
}}
layout cut(tp = 2) of m {{
  framework torch()
  mesh tp
  file weights = safetensors "{{tp}}.safetensors"
{cut}
}}
"""


def folder(path: Path, tensors: Arrays, config: dict[str, object]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def notes(path: Path) -> list[str]:
    return [line[2:] for line in ucpl.infer(path).text().split("\n") if line.startswith("# ")]


def test_the_lines_that_are_shown_of_mxfp4_cut_what_is_stored(tmp_path: Path) -> None:
    blocks = np.arange(2 * 4 * 3 * 16, dtype=np.uint8).reshape(2, 4, 3, 16)
    pair = {f"{PATH}_blocks": blocks, f"{PATH}_scales": np.arange(24, dtype=np.uint8).reshape(2, 4, 3) + 100}
    source = folder(tmp_path / "oss", pair, {"quantization_config": {"quant_method": "mxfp4"}})
    said = notes(source)
    assert said[0].startswith("One pair of *_blocks and *_scales: mxfp4")
    layout = said.index("and in the layout:")
    lines = "\n".join(said[layout + 1 :])
    text = FRAME.format(model="\n".join(said[2:layout]), layout=lines, cut=lines.replace("d1", "d1@tp"))
    (tmp_path / "x.ucpl").write_text(text)
    ucpl.convert(source, tmp_path / "cut", f"{tmp_path}/x.ucpl:cut()", layout=f"{tmp_path}/x.ucpl:stored()")
    for rank in range(2):
        found = load_file(tmp_path / "cut" / f"{rank}.safetensors")
        for name, whole in pair.items():
            np.testing.assert_array_equal(found[name], np.split(whole, 2, axis=1)[rank])


@pytest.mark.parametrize(("method", "count"), [("gptq", 3), ("awq", 2)])
def test_packed_integers_are_described_as_words(method: str, count: int, tmp_path: Path) -> None:
    made: Arrays = {
        "w.qweight": np.zeros((2, 3), np.int32),
        "w.qzeros": np.zeros((1, 3), np.int32),
        "w.scales": np.zeros(3, np.float16),
    }
    made |= {"w.g_idx": np.zeros(2, np.int32)}
    said = notes(folder(tmp_path / "x", made, {"quantization_config": {"quant_method": method, "bits": 4}}))
    assert said[0].startswith(f"{count} tensors of {method}") and "integers of 4 bits" in said[0]


def test_other_tensors_have_no_comment(tmp_path: Path) -> None:
    made: Arrays = {
        "a_blocks": np.zeros((2, 3, 8), np.uint8),
        "a_scales": np.zeros((2, 3), np.uint8),
        "qweight": np.zeros(2, np.int32),
    }
    assert notes(folder(tmp_path / "x", made, {})) == []
