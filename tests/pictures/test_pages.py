"""Pictures as pages.

The same facts as in SVG, no request to anybody, and no name that is more than a text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.command import ROOT, good, ucpl
from tests.pictures.drawn import Page, elements_of, held_by
from tests.pictures.test_layouts import MODEL
from ucpl import api
from ucpl.conversion.requests import Given
from ucpl.conversion.showing import shown
from ucpl.pictures.flows import plan_picture

EVIL = "<img src=x onerror=alert(1)>\"'&</td><script>alert(2)</script>\u202e\u0007"
SEEN = EVIL.replace("\u202e", "\ufffd").replace("\u0007", "\ufffd")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.ucpl").write_text(MODEL)
    return tmp_path


def page_of(*argv: object) -> Page:
    good(*argv, "--html", "out.html")
    text = Path("out.html").read_text()
    page = Page(text)
    demand_alone(page, text)
    return page


def demand_alone(page: Page, text: str) -> None:
    """Nothing is fetched, and one script runs: the page's own."""
    for tag, told in page.elements:
        assert tag not in ("img", "link", "iframe", "object", "embed", "form", "base", "image", "use"), tag
        assert not {"src", "href", "srcset", "action", "xlink:href"} & set(told), (tag, told)
        assert not [name for name in told if name.startswith("on")], (tag, told)
    assert set(re.findall(r"https?://[^\"' <]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    (policy,) = (told["content"] for tag, told in page.elements if told.get("http-equiv") == "Content-Security-Policy")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    mark = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{mark}'"


@pytest.mark.parametrize(
    "call",
    ["zero1(dp=4)", "zero3(dp=3)", "spec.ucpl:meshed(tp=2, pp=2, dp=2)", "spec.ucpl:meshed(tp=1, pp=3, dp=4, ep=4)"],
)
def test_each_rank_and_tensor_is_there_and_areas_are_right(here: Path, call: str) -> None:
    model = [] if "spec" in call else ["--model", "spec.ucpl:m"]
    page = page_of("show", call, *model)
    text = call if "spec" in call else f"spec.ucpl:{call}"
    (here / "all.ucpl").write_text(MODEL + f"layout all() of m extends {call} {{\n}}\n" if model else MODEL)
    placement = shown(text if not model else "all.ucpl:all()", None, Given(), None)[0].placement
    ranks = placement.layout.ranks
    held = held_by(placement, ranks)
    seen = set()
    for (tensor, states, depth), level in page.levels.items():
        told: dict[int, int] = defaultdict(int)
        for title, cells in level.cells.items():
            elements = elements_of(title.split("\n")[1])
            assert sum(c.share for c in cells) == pytest.approx(elements / level.elements, rel=1e-4)
            assert len({tuple(c.ranks) for c in cells}) == 1
            for rank in cells[0].ranks:
                told[rank] += elements
        if depth == 0:
            for state in states.split():
                seen.add((tensor, state))
                assert told == held[tensor, state], (tensor, state)
    assert seen == set(held)


def test_names_are_texts(here: Path) -> None:
    Path("evil").mkdir()
    save_file({EVIL: torch.zeros(3, 2), "w": torch.ones(2)}, "evil/model.safetensors", {"format": "pt"})
    for argv in (["inspect", "evil"], ["show", "evil"]):
        page = page_of(*argv)
        assert SEEN in "".join(page.texts) and "\u202e" not in Path("out.html").read_text()
    good("plan", "--from", "evil", "--to", "plain()", "-o", "a.plan")
    page = page_of("show", "a.plan")
    assert any(SEEN in text for text in (*page.texts, *(told.get("title", "") for _, told in page.elements)))


def test_a_plan_is_a_page_with_the_same_amounts(here: Path) -> None:
    block = ROOT / "docs" / "pictures" / "block.ucpl"
    good("plan", block, "grow", "-o", "a.plan")
    page = page_of("show", "a.plan")
    picture = plan_picture(api.load_plan(Path("a.plan")))
    cells = [told["title"] for tag, told in page.elements if tag == "td" and told.get("class", "").startswith("h")]
    (grid,) = picture.grids
    assert len(cells) == grid.amount.size
    exact = [re.search(r"\n([\d,]+) bytes", t) for t in cells]
    assert [int(m[1].replace(",", "")) for m in exact if m] == grid.amount.ravel().tolist()
    assert {e.label for e in picture.entries} <= set(page.texts)


def test_a_checkpoint_is_a_page_with_all_files_and_tensors(here: Path) -> None:
    source = ROOT / "examples" / "checkpoint"
    facts = good("inspect", source, "--json").json
    page = page_of("inspect", source)
    text = set(page.texts)
    opened = api.open_checkpoint(source)
    assert set(opened.files) <= text
    names = {t.split(", also ")[0] for t in text}
    assert {t["name"] for t in facts["tensors"]} <= names
    assert {s["origin"] for s in facts["settings"].values()} <= text
    assert f"{facts['kinds']['parameter']['elements']:,} elements of {facts['states']['fp32']} tensors" in text


@pytest.mark.parametrize(
    "argv", [["show", "zero1(dp=2)", "--model", "spec.ucpl:m", "--svg", "a.svg", "--html", "a.html"]]
)
def test_one_picture_at_a_time(here: Path, argv: list[str]) -> None:
    done = ucpl(*argv)
    assert done.status == 2 and "error[E171]" in done.err
    assert not Path("a.svg").exists() and not Path("a.html").exists()


def test_a_file_that_is_there_is_replaced_complete_or_not_at_all(here: Path) -> None:
    Path("a.html").write_text("before")
    good("show", "zero1(dp=2)", "--model", "spec.ucpl:m", "--html", "a.html")
    assert Path("a.html").read_text().startswith("<!DOCTYPE html>")
    Path("folder").mkdir()
    for argv in (["show", "zero1(dp=2)", "--model", "spec.ucpl:m"], ["inspect", str(ROOT / "examples" / "checkpoint")]):
        done = ucpl(*argv, "--html", "folder")
        assert done.status == 4 and "error[E179]" in done.err
    assert sorted(p.name for p in here.iterdir()) == ["a.html", "folder", "spec.ucpl"]
