"""Conditions that hold always, never, or as their names say."""

from __future__ import annotations

import pytest

from ucpl.language import parse_expr
from ucpl.lint.dead_statements import constant_condition


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("tp > 2 and tp < 2", False),
        ("tp > 2 or tp <= 2", True),
        ("tp < 1", False),
        ("tp", True),
        ("not (n > 1) and n > 1", False),
        ("n == 8 and n == 9", False),
        ('config.kind == "a" and config.kind == "b"', False),
        ("tp > 2", None),
        ("tp > 2 and dp > 2", None),
        ("n > 0", None),  # a number that is no axis may be 0 or less
        ("n != -1 or n == 3", None),
        ("config.tie or not config.tie", True),
        ("config.window == config.window", True),
        ("n > 3 and n < 5", None),  # 4
        ("tp % 2 == 1 and tp % 2 == 0", None),  # computed values are not evaluated
        ("default(n, 3) > 2 and n < 2", None),
    ],
)
def test_a_condition_is_constant_where_no_number_changes_it(text: str, truth: bool | None) -> None:
    assert constant_condition(parse_expr(text), {"tp", "dp"}) is truth
