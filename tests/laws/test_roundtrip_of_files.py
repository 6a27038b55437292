"""`roundtrip`: a user's file carried there and back at many degrees."""

from __future__ import annotations

import pytest

from tests.laws.test_locate import LAYOUTS
from tests.laws.test_round_trip import TWO
from ucpl.errors import UcplError
from ucpl.testing import roundtrip


def test_every_layout_is_tried_at_changed_degrees() -> None:
    rows, columns = roundtrip(TWO, examples=6)
    assert (rows.layout, columns.layout) == ("rows", "columns")
    assert rows.tried and columns.tried
    assert len(rows.tried) + len(rows.refused) == 6
    assert any("does not divide by tp = 3" in r for r in rows.refused)
    assert "rows(tp = 2) -> rows(tp = 4)" in roundtrip(TWO, "rows", examples=12)[0].tried
    assert rows.elements == 16 * len(rows.tried)


def test_the_same_call_gives_the_same_report() -> None:
    assert str(roundtrip(TWO, "rows", 5)[0]) == str(roundtrip(TWO, "rows", 5)[0])


def test_sizes_that_rest_on_a_config_get_small_ones() -> None:
    text = TWO.replace("a = 4", "a = config.hidden_size")
    (report,) = roundtrip(text, "rows", examples=8)
    assert set(report.sizes) == {"a"} and report.tried
    (report,) = roundtrip(text, "rows", examples=8, config={"hidden_size": 12})
    assert report.sizes == {} and report.elements == 48 * len(report.tried)


def test_a_model_too_large_to_number_is_made_smaller() -> None:
    (report,) = roundtrip(TWO.replace("a = 4, b = 3", "a = 65536, b = 4096"), "rows", examples=4)
    assert set(report.sizes) == {"a"} or set(report.sizes) == {"a", "b"}
    assert report.tried


def test_layouts_of_frameworks_come_back() -> None:
    (report,) = roundtrip((LAYOUTS / "fsdp.ucpl").read_text(), "fsdp2_tp", examples=2)
    assert len(report.tried) + len(report.refused) == 2 and report.tried


def test_a_layout_that_loses_elements_is_caught() -> None:
    with pytest.raises(UcplError) as caught:
        roundtrip(TWO.replace("w = a@tp b", "w = a@tp b at tp[0]"), "rows", examples=6)
    assert caught.value.diagnostics[0].code in ("E308", "E309")


def test_an_unknown_layout_and_one_without_a_model_are_refused() -> None:
    with pytest.raises(UcplError) as caught:
        roundtrip(TWO, "rwos")
    assert caught.value.diagnostics[0].code == "E110"
    with pytest.raises(UcplError) as caught:
        roundtrip((LAYOUTS / "any.ucpl").read_text(), "plain")
    assert caught.value.diagnostics[0].code == "E114"
