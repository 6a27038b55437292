"""Laws of check, compared with plans.

A plan accepts each layout that check calls good, and check calls each layout good that plans accept.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from hypothesis import event, given, settings
from hypothesis import strategies as st

from ucpl.conversion.checking import Checked, check
from ucpl.conversion.requests import Given
from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate
from ucpl.planning import order
from ucpl.testing import Example, layouts, models

ONE_WAY = ("E311",)  # partial sums: a layout of them is a source alone
EDITS = (  # an author's slips, of a pattern, a key or a clause
    (r"@(?:chunk|spread)?\(?\w+(?:, \d+)?\)?", ""),
    (r"\[[^\[\]]*\]( as|$)", r"\1"),
    (r"pad\((\w+), [^()]*\)", r"\1"),
    (r"(\w+) \+ (\w+)", r"\1 + \1"),
    (r"(\w+): (\w+) \+", r"\1: \2 + \1: \2 +"),
    (r"\{(\w+)[^{}]*\}", "0"),
    (r" at \w+\[-?\d+\]", ""),
    (r"\b(\w+) (\w+) as", r"\2 \1 as"),
    (r"\[(\d+)\.\.\]", r"[..\1]"),
)


def checked(example: Example) -> Checked:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ucpl"
        path.write_text(example.text)
        return check(f"{path}:{example.call}", Given())


def reasons(example: Example) -> list[str]:
    """Codes of errors for which each plan rejects the layout.

    The layout is the source and the target.
    """
    try:
        made = locate(resolve(load(("x.ucpl", example.text)), parse_call(example.call)))
        order(build(made, made, dtype_of=lambda file, key: "f32"))
    except UcplError as error:
        return [d.code for d in error.diagnostics if d.code not in ONE_WAY]
    return []


@given(models().flatmap(layouts))
@settings(max_examples=30)
def test_a_layout_that_plans_accept_is_good(example: Example) -> None:
    found = checked(example)
    assert not reasons(example) and not found.findings and not found.unchecked


@given(models().flatmap(layouts), st.data())
@settings(max_examples=120)
def test_a_plan_accepts_each_layout_that_is_called_good(example: Example, data: st.DataObject) -> None:
    head, mark, body = example.text.partition("layout laid")
    places = [(old, new, m) for old, new in EDITS for m in re.finditer(old, body, re.M)]
    if not places:
        return
    _, new, match = data.draw(st.sampled_from(places))
    body = body[: match.start()] + match.expand(new) + body[match.end() :]
    slip = Example(head + mark + body, example.call)
    found = checked(slip)
    event(f"{len(found.findings)} findings of a slip")
    if not found.findings and not found.unchecked:
        assert not reasons(slip), slip.text
