"""Closed templates: numbers, and the names that a place provides.

One place and a column of places give the same result.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpl.errors import UcplError
from ucpl.language import nodes, parse_expr
from ucpl.layout.scope import Scope
from ucpl.layout.templates import Hole, closed, columns, evaluate, key_steps, nested, render, template

PLACES = frozenset({"tp", "pp", "l", "l.local", "name", "key", "state"})
SCOPE = Scope(
    given={"tp": 2, "pp": 4, "l": 8, "stage": 1, "tag": "a/b:c"},
    bindings={"half": parse_expr("l / 2")},
    config={"depth": 3, "theta": 1.5},
)


def close(text: str) -> str:
    return closed(text, nodes.NOWHERE, SCOPE, PLACES).text


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("x", "x"),
        ("r{tp}", "r{tp}"),
        ("r{tp + pp * size(tp):02}", "r{tp + pp * 2:02}"),
        ("r{pp.size}", "r{4}"),
        ("r{half + tp}", "r{4 + tp}"),
        ("r{stage}", "r{1}"),
        ("r{size(tp) * pp.size}", "r{8}"),
        ("r{1 - 3}", "r{-2}"),
        ("r{tp * (1 - 3)}", "r{tp * -2}"),
        ("r{config.depth * l}", "r{3 * l}"),
        ("r{config.theta}", 'r{"1.5"}'),
        ("r{default(config.none, tp)}", "r{default(default(), tp)}"),
        ("r{tag}", 'r{"a/b:c"}'),
        ("{l.local}{elsewhere}", "{l.local}{elsewhere}"),
    ],
)
def test_what_no_place_changes_is_a_number(text: str, want: str) -> None:
    assert close(text) == want


def test_a_closed_template_reads_as_itself() -> None:
    for text in ("r{tp + pp * 2:02}", 'r{"a/b:c"}/{l}', 'x{"}"}'):
        assert close(text) == text
        assert template(text, nodes.NOWHERE).text == text


def test_rendering_needs_the_place_alone() -> None:
    rule = closed("mp_{tp + pp * size(tp):02}/{l.local}.{tag}", nodes.NOWHERE, SCOPE, PLACES)
    assert render(rule, {"tp": 1, "pp": 3, "l.local": 5}) == "mp_07/5.a/b:c"
    assert [s.text for s in key_steps(rule)] == [rule.text] * 2  # the `/` of a word makes no step
    assert rule.names == {"tp", "pp", "l.local"}


def test_a_name_that_the_place_lacks_is_its_size_or_has_no_value() -> None:
    assert render(closed("{l}", nodes.NOWHERE, SCOPE, PLACES), {}) == "8"
    assert render(closed("{l}", nodes.NOWHERE, SCOPE, PLACES), {"l": 3}) == "3"
    for text, close_to in (("{lo}", ""), ("{stagee}", "did you mean `stage`?"), ("{config.none}", "")):
        with pytest.raises(UcplError) as caught:
            render(closed(text, nodes.NOWHERE, SCOPE, PLACES), {"tp": 0})
        assert caught.value.diagnostics[0].code == "E122"
        assert text.strip("{}") in caught.value.diagnostics[0].message
        assert close_to in caught.value.diagnostics[0].remedy


def test_one_key_inside_another() -> None:
    inner = closed("w/{l}", nodes.NOWHERE, SCOPE, PLACES)
    outer = closed("opt/{key}/{state}", nodes.NOWHERE, SCOPE, PLACES)
    made = nested(outer, inner)
    assert made.text == "opt/w/{l}/{state}" and dict(made.sizes)["l"] == 8
    assert render(made, {"l": 2, "state": "s"}) == "opt/w/2/s"
    assert len(key_steps(made)) == 4


def test_columns_are_the_texts_and_what_is_between_them() -> None:
    rule = closed("a{tp:02}b{pp}", nodes.NOWHERE, SCOPE, PLACES)
    texts, holes = columns(rule)
    assert texts == ("a", "b", "")
    assert [(h.path, h.format) for h in holes] == [("tp", "02"), ("pp", "")]
    assert columns(closed("{tp}{pp}", nodes.NOWHERE, SCOPE, PLACES))[0] == ("", "", "")
    assert columns(closed("", nodes.NOWHERE, SCOPE, PLACES)) == (("",), ())
    assert all(isinstance(h, Hole) for h in holes)


NUMBERS = st.integers(-9, 9)


def expressions() -> st.SearchStrategy[str]:
    leaves = st.sampled_from(["a", "b", "0", "1", "2", "3", "7"])
    operators = st.sampled_from(["+", "-", "*", "/", "%", "<", ">", "<=", ">=", "==", "!=", "and", "or"])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, operators, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
            inner.map(lambda t: f"(not {t})"),
            inner.map(lambda t: f"(-{t})"),
            st.tuples(st.sampled_from(["min", "max", "gcd", "lcm", "ceil", "floor", "default"]), inner, inner).map(
                lambda t: f"{t[0]}({t[1]}, {t[2]})"
            ),
        ),
        max_leaves=6,
    )


@given(expressions(), st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6))
def test_columns_give_what_each_place_gives(text: str, places: list[tuple[int, int]]) -> None:
    """A column is refused if one of its numbers is refused.

    Otherwise each element equals the result of that place alone.
    """
    expr = parse_expr(text)
    table = np.array(places, dtype=np.int64)
    try:
        alone = [evaluate(expr, {"a": a, "b": b}) for a, b in places]
    except UcplError as error:
        code = error.diagnostics[0].code
        try:
            evaluate(expr, {"a": table[:, 0], "b": table[:, 1]})
        except UcplError as other:
            assert other.diagnostics[0].code in (code, "E107", "E108")
        else:
            pytest.fail("a column is good and one of its numbers is not")
        return
    try:
        found = np.broadcast_to(np.asarray(evaluate(expr, {"a": table[:, 0], "b": table[:, 1]})), len(places))
    except UcplError:
        # `and` and `or` stop early at one place alone; a column continues if any of its numbers does.
        assert " and " in text or " or " in text
        return
    assert found.tolist() == alone


OPERATIONS = [*(f"a {o} b" for o in ("+", "-", "*", "%", "<", ">", "<=", ">=", "==", "!=", "and", "or")), "not a", "-a"]
OPERATIONS += [
    "min(a, b)",
    "max(a, b)",
    "gcd(a, b)",
    "lcm(a, b)",
    "ceil(a, b)",
    "floor(a, b)",
    "item([9, 8, 7], a % 3)",
    "default(a, b)",
    "a * b / b",
    "min(a, 3)",
]


@pytest.mark.parametrize("text", OPERATIONS)
def test_every_operation_over_columns(text: str) -> None:
    a, b = np.array([0, 6, -4, 9, 3], dtype=np.int64), np.array([2, 6, 3, 4, 12], dtype=np.int64)
    expr = parse_expr(text)
    alone = [evaluate(expr, {"a": x, "b": y}) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert np.asarray(evaluate(expr, {"a": a, "b": b})).tolist() == alone


def test_columns_do_not_wrap_around() -> None:
    huge = np.array([1, 1 << 40], dtype=np.int64)
    assert np.asarray(evaluate(parse_expr("a * 4 - a"), {"a": huge})).tolist() == [3, 3 << 40]
    for text in ("a * a", "a * a * a", "lcm(a, a + 1)", "a * 8388608"):
        with pytest.raises(UcplError) as caught:
            evaluate(parse_expr(text), {"a": huge})
        assert caught.value.diagnostics[0].code == "E106"
    with pytest.raises(UcplError):
        evaluate(parse_expr("a * a"), {"a": -huge})
    mixed = {"a": np.array([1 << 61, 1], dtype=np.int64), "b": np.array([1, 1 << 40], dtype=np.int64)}
    assert np.asarray(evaluate(parse_expr("a * b"), mixed)).tolist() == [1 << 61, 1 << 40]
