"""Pictures of the layouts that can run after each loss.

The values of `--json`, in proportion, and names as texts.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.command import ucpl
from tests.conversion.test_contingency import CALL, TEXT
from tests.pictures.drawn import SVG, Page
from tests.pictures.test_pages import demand_alone
from ucpl.pictures.drawing import text_width

LINE = ("--lose", "1..3", "--unit", "node=3", "--room", "3K")
EVIL = "<b onload=alert(1)>&'\u202e"
SEEN = EVIL.replace("\u202e", "\ufffd")
WIDER = {"title": 2.1, "title2": 1.55, "state": 1.25, "": 1.15}  # than a small text


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.ucpl").write_text(TEXT)
    return tmp_path


def drawn(*argv: object, call: str = CALL) -> tuple[Any, ElementTree.Element, Page]:
    """The values of `--json`, the SVG and the page."""
    line = ("contingency", "--from", call, *argv)
    told = ucpl(*line, "--json", "--svg", "out.svg").json
    ucpl(*line, "--html", "out.html")
    text = Path("out.html").read_text()
    page = Page(text)
    demand_alone(page, text)
    return told, ElementTree.fromstring(Path("out.svg").read_text()), page


def test_bars_are_in_proportion_and_say_so(spec: Path) -> None:
    told, svg, page = drawn(*LINE)
    rows = [(loss, choice) for loss in told["losses"] for choice in loss["choices"]]
    groups = [g for g in svg.iter(f"{SVG}g") if "data-call" in g.attrib]
    assert len(groups) == len(rows) > 3
    most_held = max([told["held"], 3072, *(c["held"] for _, c in rows)])
    most_sent = max(c["cost"]["sent"] for _, c in rows)
    for group, (loss, choice) in zip(groups, rows, strict=True):
        assert group.attrib["data-call"] == choice["call"]
        *ranks, held, sent = (float(r.attrib["width"]) for r in group.iter(f"{SVG}rect"))
        wanted = [choice["ranks"], loss["left"] - choice["ranks"], told["ranks"] - loss["left"]]
        assert ranks == pytest.approx([150 * n / told["ranks"] for n in wanted if n], abs=1e-3)
        assert held == pytest.approx(120 * choice["held"] / most_held, abs=1e-3)
        assert sent == pytest.approx(100 * choice["cost"]["sent"] / most_sent, abs=1e-3)
        said = "".join(group.itertext())
        assert choice["plan"] in said
        assert f"uses {choice['ranks']:,} ranks of the {loss['left']:,} that are left" in said
        assert f"{choice['cost']['sent']:,} bytes go between ranks" in said
        assert choice["plan"] in page.texts
    shades = {r.attrib["class"] for r in svg.iter(f"{SVG}rect")}
    assert {"c k", "c s2", "c s11", "c s17", "c s28"} <= shades  # colours and hatchings of all kinds differ


def test_what_does_not_fit_is_reported_with_the_reason(spec: Path) -> None:
    told, svg, page = drawn(*LINE)
    said = [" ".join(t.itertext()) for t in svg.iter(f"{SVG}text")]
    refused = [one for loss in told["losses"] for one in loss["refused"][:6]]
    assert len(refused) > 1
    for one in refused:
        assert any(one["why"] in text for text in said)
        assert f"{one['degrees']}: {one['why']}" in page.texts


def test_a_loss_of_all_says_that_nothing_fits(spec: Path) -> None:
    _, svg, page = drawn("--lose", "16")
    assert "nothing fits" in [t.text for t in svg.iter(f"{SVG}text")]
    assert "nothing fits" in page.texts


@pytest.mark.parametrize("call", [CALL, f"{'long' * 30}.ucpl:x(tp=2, pp=2, dp=4)"])
def test_no_text_overlaps_another(spec: Path, call: str) -> None:
    Path(call.partition(":")[0]).write_text(TEXT)
    _, svg, _ = drawn(*LINE, call=call)
    lines: dict[float, list[tuple[float, float]]] = {}
    for text in svg.iter(f"{SVG}text"):
        begin = float(text.attrib["x"])
        width = text_width(text.text or "") * WIDER.get(text.attrib["class"], 1.0)
        lines.setdefault(float(text.attrib["y"]), []).append((begin, begin + width))
    for line in lines.values():
        line.sort()
        assert line[-1][1] <= 1200
        assert all(a[1] <= b[0] for a, b in pairwise(line)), line


def test_names_are_texts(spec: Path) -> None:
    Path(f"{EVIL}.ucpl").write_text(TEXT)
    _, svg, page = drawn(*LINE, call=f"{EVIL}.ucpl:x(tp=2, pp=2, dp=4)")
    assert any(SEEN in (t.text or "") for t in svg.iter(f"{SVG}text"))
    assert any(SEEN in text for text in page.texts)


def test_one_picture_at_a_time(spec: Path) -> None:
    done = ucpl("contingency", "--from", CALL, "--svg", "a.svg", "--html", "a.html")
    assert done.status == 2 and "error[E171]" in done.err
    assert not Path("a.svg").exists() and not Path("a.html").exists()
