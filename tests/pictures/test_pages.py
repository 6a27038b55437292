"""Pictures as pages.

The same facts as in SVG, no request to anybody, and no name that is more than a text.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.command import ROOT, good, ucpl
from tests.pictures.drawn import Page
from tests.pictures.test_layouts import MODEL
from ucpl import api
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
    """Nothing is fetched, and no script runs."""
    for tag, told in page.elements:
        assert tag not in ("img", "link", "iframe", "object", "embed", "form", "base", "image", "use"), tag
        assert not {"src", "href", "srcset", "action", "xlink:href"} & set(told), (tag, told)
        assert not [name for name in told if name.startswith("on")], (tag, told)
    assert set(re.findall(r"https?://[^\"' <]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    (policy,) = (told["content"] for tag, told in page.elements if told.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'" and "<script" not in text


@pytest.mark.parametrize("call", ["zero1(dp=4)", "spec.ucpl:meshed(tp=2, pp=2, dp=2)"])
def test_a_layout_is_a_page_with_its_picture_and_all_tensors(here: Path, call: str) -> None:
    model = [] if "spec" in call else ["--model", "spec.ucpl:m"]
    page = page_of("show", call, *model)
    good("show", call, *model, "--svg", "out.svg")
    drawn = Page(Path("out.svg").read_text())
    assert set(drawn.texts) <= set(page.texts)
    assert {"embed", "norm", "up", "expert", "scale", "seen", "tail"} <= set(page.texts)


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
    exact = [re.search(r"\n([\d,]+) bytes", t) for t in page.texts]
    (grid,) = picture.grids
    shown = [int(m[1].replace(",", "")) for m in exact if m]
    assert set(grid.amount.ravel().tolist()) - {0} <= set(shown)
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
