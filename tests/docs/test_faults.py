"""The page of faults: complete rows, known sections, plain English."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.faults import SECTIONS, failpoints, faults, page
from tests.english.rules import check_text
from ucpl.runtime import failpoints as points


def test_each_marker_is_a_row_of_a_known_section() -> None:
    rows_found = list(faults())
    assert len(rows_found) > 150
    assert {one.section for one in rows_found} == set(SECTIONS)
    assert len({one.test for one in rows_found}) == len(rows_found)
    text = page()
    rows = re.findall(r"^\| .* \| `(tests/\S+\.py::test_\w+)` \|$", text, re.MULTILINE)
    assert sorted(rows) == sorted(one.test for one in rows_found)
    assert [one for one in rows_found if not one.fault or not one.guarantee] == []


def test_the_page_names_each_failpoint_and_action() -> None:
    last = page().partition("## Failpoints")[2]
    assert len(failpoints()) > 20
    source = Path(points.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z-]+)`", last))
    assert set(failpoints()) <= named
    assert [action for action in named - set(failpoints()) if f'"{action}"' not in source] == []


def test_the_page_is_plain_english() -> None:
    assert [(found.found, found.instead) for found in check_text(page())] == []
