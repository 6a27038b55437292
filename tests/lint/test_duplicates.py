"""Lines that repeat the extended layout's, word for word.

Of two homes both, since one of them takes the other back.
"""

from __future__ import annotations

from ucpl.layout import load
from ucpl.lint.duplicates import repeated_lines

TEXT = """ucpl 1
model m {
  dim r = 4
  w : r
}
layout x() of m {
  file weights = torch "a.pt"
  w = r  as "w"
  w = r  as "v"
}
layout y() of m extends x() {
  OWN
}
"""


def said(own: str) -> list[str]:
    library = load(("a.ucpl", TEXT.replace("OWN", own)))
    return list(repeated_lines(library, library.files["a.ucpl"]))


def test_one_home_of_two_takes_the_other_back_and_is_no_repetition() -> None:
    assert said('w = r  as "w"') == []
    assert said('w = r  as "u"') == []


def test_both_homes_again_do_nothing() -> None:
    (text,) = said('w = r  as "w"\n  w = r  as "v"')
    assert text.startswith("y: line 12 repeats line 8 of x, word for word")
