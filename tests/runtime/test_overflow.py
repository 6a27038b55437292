"""No cast makes a number infinite.

`lossy`, derived states, sums and products with scales stop the run and report the element's place.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import ucpl
from tests.runtime.casting import MASTERS, PLAIN, SUM, cast
from ucpl.errors import Diagnostic, UcplError

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f8_e5m2": torch.float8_e5m2, "f32": torch.float32}


def converted(folder: Path, source: str, dtype: str, values: list[list[float]]) -> list[float]:
    """To f32 from f64, to all others from f32."""
    found = cast(folder, source, f"{dtype} lossy", values, "f64" if dtype == "f32" else "f32")
    assert found.dtype == TYPES[dtype]
    return found.float().tolist()


def refused(folder: Path, source: str, dtype: str, values: list[list[float]]) -> Diagnostic:
    with pytest.raises(UcplError) as caught:
        converted(folder, source, dtype, values)
    (found,) = caught.value.diagnostics
    assert found.code == "E607" and not (folder / "out").exists()
    return found


@pytest.mark.parametrize("source", [PLAIN, MASTERS])
@pytest.mark.parametrize(
    ("dtype", "most", "over"),
    [
        ("f16", 65519.0, 65520.0),  # the last that rounds to the greatest number, and the first that does not
        ("bf16", 3.39e38, 3.4e38),
        ("f8_e5m2", 57344.0, 61440.0),
        ("f32", 3.4e38, 3.5e38),
    ],
)
def test_the_first_number_beyond_the_greatest_is_named(
    source: str, dtype: str, most: float, over: float, tmp_path: Path
) -> None:
    fits = converted(tmp_path / "fits", source, dtype, [[most, -most, 1.0], [0.0, -2.0, 3.0]])
    assert all(map(math.isfinite, fits)) and fits[4:] == [-2.0, 3.0]
    found = refused(tmp_path / "over", source, dtype, [[most, 1.0, 1.0], [0.0, -over, over]])
    assert found.message.startswith("w: -") and f"too large for {dtype}" in found.message
    assert [(label.file, label.where) for label in found.labels] == [("1.pt", "w[1]"), ("2.pt", "w[0]")]


def test_what_is_no_number_in_the_source_stays_so(tmp_path: Path) -> None:
    odd = [[math.inf, -math.inf, math.nan], [1.0, 2.0, 65504.0]]
    found = converted(tmp_path, PLAIN, "f16", odd)
    assert found[:2] == [math.inf, -math.inf] and math.isnan(found[2]) and found[3:] == odd[1]


def test_a_sum_is_held_against_the_greatest_not_its_parts(tmp_path: Path) -> None:
    each = [[60000.0, 1.0, 1.0, 1.0, 1.0, 60000.0], [-60000.0, 1.0, 1.0, 1.0, 1.0, 60000.0]]
    assert refused(tmp_path, SUM, "f16", each).message.startswith("w: 120000.0 at [1]")
    each[1][5] = 0.0
    assert converted(tmp_path / "fits", SUM, "f16", each) == [0.0, 2.0, 2.0, 2.0, 2.0, 60000.0]


def test_a_product_with_scales_is_held_against_it(tmp_path: Path) -> None:
    text = "ucpl 1\nmodel m {\n  w : 256 dtype f8_e4m3fn\n  s : 2 dtype f32 is scale of w by 128\n}\n"
    for name, lines in (("x", 'w = _ as "w"\n  s = _ as "s"'), ("y", 'w = _ dtype f16 value x * scale as "w"')):
        text += f'layout {name}() of m {{\n  framework torch()\n  file weights = torch "w.pt"\n  {lines}\n}}\n'
    (tmp_path / "spec.ucpl").write_text(text)
    (tmp_path / "in").mkdir()
    weight = torch.ones(256)
    weight[130] = 448.0
    for factor in (146.0, 147.0):
        held = {"w": weight.to(torch.float8_e4m3fn), "s": torch.tensor([1.0, factor])}
        torch.save(held, tmp_path / "in" / "w.pt")
        layout, to = f"{tmp_path}/spec.ucpl:x()", f"{tmp_path}/spec.ucpl:y()"
        if factor == 146.0:
            ucpl.convert(tmp_path / "in", tmp_path / "fits", layout=layout, to=to)
            assert torch.load(tmp_path / "fits" / "w.pt")["w"][130] == torch.tensor(448.0 * factor, dtype=torch.float16)
            continue
        with pytest.raises(UcplError, match="E607") as caught:
            ucpl.convert(tmp_path / "in", tmp_path / "over", layout=layout, to=to)
        assert caught.value.diagnostics[0].message.startswith("w: 65856.0 at [130]")
