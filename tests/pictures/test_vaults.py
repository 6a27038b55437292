"""Pictures of vaults.

Each rank's bytes twice, in proportion, and each block once, in the group that it is in.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.command import ucpl
from tests.pictures.drawn import SVG, Page
from tests.pictures.test_pages import demand_alone
from tests.vault.states import JOB

CALL = f"{JOB}:job(dp=4, tp=2)"
EVIL = "<b onload=alert(1)>&'"


def drawn(top: Path, *argv: object) -> ElementTree.Element:
    ucpl("show", *argv, "--svg", top / "out.svg")
    return ElementTree.fromstring((top / "out.svg").read_text())


def widths(svg: ElementTree.Element, key: str, number: int) -> list[float]:
    (group,) = (g for g in svg.iter(f"{SVG}g") if g.attrib.get(key) == str(number))
    return [float(rect.attrib["width"]) for rect in group.iter(f"{SVG}rect")]


@pytest.mark.parametrize(
    ("domains", "protect"), [(4, "raim5"), (8, "rs(6, 2)"), (8, "raim5(4)"), (4, "mirror"), (2, "none")]
)
def test_slots_are_in_proportion_and_blocks_are_in_their_groups(tmp_path: Path, domains: int, protect: str) -> None:
    argv = (CALL, "--domains", domains, "--protect", protect)
    told = ucpl("vault", "plan", *argv, "--json").json
    svg = drawn(tmp_path, *argv)
    sizes = [d["saved"] + d["for_others"] for d in told["domains"]]
    for number, domain in enumerate(told["domains"]):
        found = widths(svg, "data-domain", number)
        count = len(domain["ranks"]) + bool(domain["for_others"])
        assert len(found) == 2 * count and found[:count] == found[count:]
        assert sum(found[:count]) == pytest.approx(420 * sizes[number] / max(sizes), abs=0.01)
        saved = sum(found[: len(domain["ranks"])])
        assert saved == pytest.approx(420 * domain["saved"] / max(sizes), abs=0.01)
    blocks = [t.text or "" for g in svg.iter(f"{SVG}g") if "data-blocks" in g.attrib for t in g.iter(f"{SVG}title")]
    assert (blocks == []) == (protect == "none")
    each = {"raim5": (3, 1), "rs(6, 2)": (6, 2), "raim5(4)": (3, 1), "mirror": (1, 1), "none": (0, 0)}[protect]
    assert Counter("data for others" in text for text in blocks) == {
        kind: domains * n for kind, n in ((False, each[0]), (True, each[1])) if n
    }
    assert all(f"any {each[0]} of {sum(each)} make the others" in text for text in blocks)
    assert len(set(blocks)) == len(blocks)
    sentence = "".join(svg.itertext())
    assert f"any 1 of {domains} domains lost" in sentence and protect.partition("(")[0] in sentence


def test_names_are_texts_and_a_page_needs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / f"{EVIL.replace('/', '')}.ucpl"
    file.write_text(JOB.read_text())
    call = f"{file}:job(dp=2)"
    ucpl("show", call, "--domains", 2, "--html", tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    page = Page(text)
    demand_alone(page, text)
    assert "2 ranks in 2 domains · mirror(1) · two slots of each" in page.texts
    assert drawn(tmp_path, call, "--domains", 2) is not None


def test_many_domains_are_reported_not_drawn(tmp_path: Path) -> None:
    svg = drawn(tmp_path, f"{JOB}:job(dp=70)", "--domains", 70, "--protect", "raim5(35)")
    assert len([g for g in svg.iter(f"{SVG}g") if "data-domain" in g.attrib]) == 64
    assert "and 6 domains more" in "".join(svg.itertext())
    assert len([g for g in svg.iter(f"{SVG}g") if "data-blocks" in g.attrib]) == 35


@pytest.mark.parametrize(
    "argv",
    [
        ("--domains", "2"),
        ("--protect", "none", "--svg", "o.svg", "--rank", "0"),
        ("--domains", "2", "--svg", "o.svg", "--each"),
    ],
)
def test_what_is_no_picture_of_a_vault_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ucpl("show", CALL, *argv)
    assert done.status == 2 and "E171" in done.err and not list(tmp_path.iterdir())
