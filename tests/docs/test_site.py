"""The pages as a site.

Built with every link checked, from nothing but this checkout, fetching nothing when it is read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from ucpl.cli.verbs import VERBS
from ucpl.errors import catalogue
from ucpl.resources import spec_files

OUTSIDE = re.compile(
    r'<(?:script|img|iframe)[^>]*\bsrc="(?:https?:)?//|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(?:https?:)?//'
)


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)


FAULTS = [
    ("TUTORIAL.md", "[x](LANGUAGE.md#no-such-heading)", "no-such-heading"),
    ("TUTORIAL.md", "[x](NOWHERE.md)", "NOWHERE.md"),
    ("LOST.md", "# Nobody leads here", "LOST.md"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Build the site with all the faults at once; return its messages.

    A site with a warning is written, and then refused: it is looked at all the same, and only the faults are to be reported.
    """
    top = tmp_path_factory.mktemp("site")
    for name in ("docs", "editors", "examples"):
        shutil.copytree(ROOT / name, top / name, ignore=shutil.ignore_patterns("checkpoints", "__pycache__"))
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, top)
    for page, line, _ in FAULTS:
        with (top / "docs" / page).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    done = build(top, top / "site")
    assert done.returncode != 0 and f"Aborted with {len(FAULTS)} warnings in strict mode" in done.stdout + done.stderr
    return top / "site", re.findall(r"^(?:WARNING|ERROR).*\n(?: .*\n)*", done.stderr, re.MULTILINE)


@pytest.fixture(scope="module")
def site(built: tuple[Path, list[str]]) -> Path:
    return built[0]


@pytest.fixture(scope="module")
def refused(built: tuple[Path, list[str]]) -> list[str]:
    return built[1]


def test_every_page_is_there_and_is_found(site: Path) -> None:
    pages = {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    generated = {"index.html", "ERRORS.html", "FAULTS.html", "GRAMMAR.html", "SPECS.html", "VERBS.html"}
    pages = {p.replace("README", "index") for p in pages} | generated
    assert pages - {p.relative_to(site).as_posix() for p in site.rglob("*.html")} == set()
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {one["location"] for one in index["docs"]}
    assert {f"ERRORS.html#{code.lower()}" for code in catalogue()} - places == set()
    assert {f"VERBS.html#{verb}" for verb in VERBS} - places == set()
    assert {f"SPECS.html#{re.sub(r'[./]', '', name)}" for name, _ in spec_files()} - places == set()


def test_a_code_in_prose_leads_to_its_entry(site: Path) -> None:
    text = (site / "RANKS.html").read_text(encoding="utf-8")
    assert '<a href="ERRORS.html#e621">E621</a>' in text
    decisions = "".join(p.read_text(encoding="utf-8") for p in (site / "decisions").glob("*.html"))
    assert '<a href="../ERRORS.html#e' in decisions


def test_code_of_the_language_has_colours_and_no_fence_is_lost(site: Path) -> None:
    text = (site / "LANGUAGE.html").read_text(encoding="utf-8")
    assert '<span class="k">layout</span>' in text and '<span class="nd">tp</span>' in text
    assert "```" not in re.sub(r"<[^>]*>", "", text)


def test_the_first_page_leads_to_the_others(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    for page in ("TUTORIAL.html", "LANGUAGE.html", "EDITORS.html", "CHANGELOG.html", "decisions/index.html"):
        assert f'href="{page}"' in text
    assert "make_checkpoint.py" not in re.sub(r'<div class="highlight.*?</div>', "", text, flags=re.DOTALL)


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    found = {p.name: OUTSIDE.findall(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}
    assert {name: hits for name, hits in found.items() if hits} == {}
    styles = "\n".join(p.read_text(encoding="utf-8") for p in site.rglob("*.css"))
    assert "fonts.googleapis" not in styles and re.search(r"url\(['\"]?https?:", styles) is None


@pytest.mark.parametrize(("page", "line", "said"), FAULTS)
def test_a_link_that_leads_nowhere_and_a_page_without_a_place_fail(
    page: str, line: str, said: str, refused: list[str]
) -> None:
    """Each is a warning, and prevents the site's build."""
    assert len([warning for warning in refused if said in warning and page in warning]) == 1
    assert len(refused) == len(FAULTS)
