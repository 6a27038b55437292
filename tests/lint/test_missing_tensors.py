"""A line with a key whose elements no rank has.

`check` says it, as it says holes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ucpl.conversion.checking import check
from ucpl.conversion.requests import Given

TEXT = """ucpl 1
model m {{
  dim a = 4, b = 3
  w : a b
}}
layout x(dp = 2) of m {{
  mesh dp
  file weights = torch "f.{{dp}}"
  {line}
}}
"""


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ('w = a[..0] b as "w"', "12 of 12"),
        ('w[a[..0]] = b as "w.{a}"', "12 of 12"),
        ('w[a[4..]] = b as "w.{a}"', "12 of 12"),
        ('w = a b as "w"', ""),
    ],
)
def test_a_line_that_stores_nothing_is_reported(line: str, missing: str, tmp_path: Path) -> None:
    (tmp_path / "x.ucpl").write_text(TEXT.format(line=line))
    found = check(str(tmp_path / "x.ucpl"), Given()).findings
    assert [f.code for f in found] == (["E313"] if missing else [])
    assert all(missing in f.message and "w[a=0, b=0]" in f.message for f in found)


def test_parts_that_have_indices_in_common_are_reported(tmp_path: Path) -> None:
    for line, said in {
        'w = (a[..3] + a[2..]) b as "w"': "`a[2..3]` is in two parts",
        'w = (a[..2] b + a[1..] b) as "w"': "`a[1..2]` is in two parts",
        'w = (a[..3] + a[3..]) b as "w"': "",
        'w = (a[2..] + a[..2]) b as "w"': "",
    }.items():
        (tmp_path / "x.ucpl").write_text(TEXT.format(line=line))
        found = check(str(tmp_path / "x.ucpl"), Given()).findings
        assert [f.code for f in found] == (["E304"] if said else []), line
        assert all(said in f.message and "begin where the first ends" in f.remedy for f in found)
