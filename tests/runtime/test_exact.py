"""`dtype bf16 exact`: a lossy cast is checked value by value.

The cast is refused if one value does not fit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.casting import MASTERS, MEAN, PLAIN, cast
from ucpl.errors import UcplError


def converted(folder: Path, source: str, word: str, values: list[list[float]]) -> list[float]:
    found = cast(folder, source, f"bf16 {word}", values)
    assert found.dtype == torch.bfloat16
    return found.tolist()


@pytest.mark.parametrize("source", [PLAIN, MASTERS])
def test_values_that_fit_go_over_and_one_that_does_not_ends_the_run(source: str, tmp_path: Path) -> None:
    fits, off = [[1.0, -0.5, 2.0**100], [0.0, float("inf"), -3.0]], 1 + 2.0**-9
    for name, values in (("a", fits), ("b", [fits[0], [0.0, off, -3.0]])):
        (tmp_path / name).mkdir()
        if name == "a":
            assert converted(tmp_path / name, source, "exact", values) == [*fits[0], *fits[1]]
            continue
        with pytest.raises(UcplError, match="E605") as caught:
            converted(tmp_path / name, source, "exact", values)
        (found,) = caught.value.diagnostics
        assert found.message.startswith("w: f32") and repr(off) in found.message and "[1]" in found.message
        assert found.labels[0].file == "1.pt" and not (tmp_path / name / "out").exists()


def test_a_mean_is_exact_or_refused(tmp_path: Path) -> None:
    for name, last in (("a", 3.0), ("b", 3 + 2.0**-6)):
        (tmp_path / name).mkdir()
        values = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 4.0, 3.0, 4.0, 5.0, last]]
        if name == "a":
            assert converted(tmp_path / name, MEAN, "exact", values) == [1.0, 3.0, 3.0, 4.0, 5.0, 4.5]
            continue
        with pytest.raises(UcplError, match="E605") as caught:
            converted(tmp_path / name, MEAN, "exact", values)
        assert "mean" in caught.value.diagnostics[0].message and "[1]" in caught.value.diagnostics[0].message


def test_without_a_word_the_cast_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UcplError, match="E306") as caught:
        converted(tmp_path, PLAIN, "", [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    assert caught.value.diagnostics[0].remedy == "keep f32, or write `dtype bf16 lossy` on the entry"


def test_one_line_asks_for_rounding_or_for_none(tmp_path: Path) -> None:
    with pytest.raises(UcplError, match="E175"):
        converted(tmp_path, PLAIN, "lossy exact", [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
