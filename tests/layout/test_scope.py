"""Expressions, evaluated; where names come from and which of several meanings wins."""

from __future__ import annotations

import math

import pytest

from ucpl.errors import UcplError
from ucpl.language import nodes, parse_expr
from ucpl.layout.name_remedies import nearest
from ucpl.layout.scope import Config, Scope, literal

VALUES = {
    "2 + 3 * 4": 14,
    "(2 + 3) * 4": 20,
    "7 - 2 - 1": 4,
    "12 / 2 / 3": 2,
    "7 % 4": 3,
    "(-7) % 4": 1,
    "-3 + 5": 2,
    "2 < 3": 1,
    "3 < 3": 0,
    "3 <= 3": 1,
    "3 > 3": 0,
    "3 >= 3": 1,
    "2 == 2": 1,
    "2 != 2": 0,
    '"a" == "a"': 1,
    "[1, 2] == [1, 2]": 1,
    "not 0": 1,
    "not 3": 0,
    "1 and 2": 1,
    "1 and 0": 0,
    "0 or 5": 1,
    "0 or 0": 0,
    "0 and 1 / 0": 0,
    "1 or 1 / 0": 1,
    "1 or 0 and 0": 1,
    "not 0 and 0": 0,
    "not (0 and 0)": 1,
    "2 + 1 == 3 and 1": 1,
    "min(3, 1, 2)": 1,
    "max(3, 1, 2)": 3,
    "lcm(4, 6)": 12,
    "lcm(0, 6)": 0,
    "gcd(12, 18, 8)": 2,
    "gcd(0, 0)": 0,
    "ceil(7, 2)": 4,
    "ceil(6, 2)": 3,
    "ceil(-7, 2)": -3,
    "floor(7, 2)": 3,
    "floor(-7, 2)": -4,
    "length([4, 5])": 2,
    "length(config.list)": 2,
    "config.list[0]": 1,
    "config.list[-1]": 2,
    "config.list[length(config.list) - 2] + 1": 2,
    "item([1, 2], 1)": 2,
    "size(a)": 8,
    "a.size": 8,
    "default(config.none, 4)": 4,
    "default(config.depth, 4)": 3,
    "default(config.none, config.none, a)": 8,
    "default(0, 4)": 0,
    "config.flag": 1,
    "config.inner.deep": 5,
    "config.list": [1, 2],
    "config.none": None,
    "config.inner": None,
    "config.depth.more": None,
    "[a, 2 * a]": [8, 16],
    "a * config.list": [8, 16],
    "config.list + [3, 4] % 3 - 1": [0, 2],
    "[8, 4] / config.list / 2": [4, 1],
    "-[1, -a]": [-1, 8],
    "b": 4,
}
CONFIG: Config = {"depth": 3, "flag": True, "inner": {"deep": 5}, "list": [1, 2], "none": None}


def scope() -> Scope:
    return Scope(given={"a": 8}, bindings={"b": parse_expr("a / 2"), "a": parse_expr("1")}, config=CONFIG)


@pytest.mark.parametrize("text", VALUES)
def test_the_value_of_an_expression(text: str) -> None:
    found = scope().evaluate(parse_expr(text))
    assert found == VALUES[text] and type(found) is type(VALUES[text])


REFUSED = {
    "7 / 2": "E108",
    "7 / 0": "E107",
    "7 % 0": "E107",
    "ceil(1, 0)": "E107",
    "floor(1, 0)": "E107",
    "config.list[2]": "E104",
    "config.list[-3]": "E104",
    "length(4)": "E104",
    "config.none[0]": "E105",
    "config.list[config.none]": "E105",
    "item([], 0)": "E104",
    "4611686018427387904 + 1": "E106",
    "4611686018427387903 + 2": "E106",
    "-4611686018427387904 - 1": "E106",
    "3037000500 * 3037000500": "E106",
    "lcm(4611686018427387903, 4611686018427387902)": "E106",
    '"a" + 1': "E104",
    '[1, "a"] * 2': "E104",
    "[1, 2] + [1, 2, 3]": "E104",
    "[1] < 2": "E104",
    "[7, 8] / 2": "E108",
    "config.list / [1, 0]": "E107",
    "[4611686018427387904] + 1": "E106",
    "[1] + config.none": "E105",
    "config.none + 1": "E105",
    "floor(1)": "E109",
    "ceil(1)": "E109",
    "size(1, 2)": "E109",
    "c": "E101",
    "c.size": "E101",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_an_expression_is_refused_for(text: str) -> None:
    with pytest.raises(UcplError) as caught:
        scope().evaluate(parse_expr(text))
    assert caught.value.diagnostics[0].code == REFUSED[text]


def test_numbers_up_to_the_limit_are_taken() -> None:
    assert scope().evaluate(parse_expr("4611686018427387903 + 1")) == 1 << 62
    assert scope().evaluate(parse_expr("-4611686018427387903 - 1")) == -(1 << 62)
    assert scope().evaluate(parse_expr("min(4611686018427387904, 1)")) == 1
    with pytest.raises(UcplError):
        Scope(given={"a": 1 << 63}).size("a")


def test_remainders_say_both_numbers() -> None:
    with pytest.raises(UcplError, match="7 / 2 leaves a remainder of 1"):
        scope().evaluate(parse_expr("7 / 2"))


def test_a_list_holds_no_columns() -> None:
    import numpy as np

    from ucpl.layout.templates import evaluate

    with pytest.raises(UcplError) as caught:
        evaluate(parse_expr("[a]"), {"a": np.arange(3)})
    assert caught.value.diagnostics[0].code == "E104"


def test_the_command_line_wins_and_the_last_binding_holds() -> None:
    names = scope()
    assert names.lookup("a", nodes.NOWHERE) == 8
    names.bind([nodes.Let((nodes.Binding("b", nodes.Number(1)),)), nodes.Dims((nodes.Binding("b", nodes.Number(2)),))])
    assert names.lookup("b", nodes.NOWHERE) == 2
    names.bind([nodes.Let((nodes.Binding("b", nodes.Number(3)),))])
    assert names.lookup("b", nodes.NOWHERE) == 3  # not the value that was found before


def test_what_rests_on_a_config_that_is_absent() -> None:
    names = Scope(given={"g": 1}, bindings={t: parse_expr(e) for t, e in BINDINGS.items()}, config={"there": 1})
    lacking = {t for t in BINDINGS if names.lacks_config(parse_expr(t))}
    assert lacking == {"gone", "rests", "twice", "negative", "inside", "listed"}
    assert names.value("rests") is None and names.value("there") == 1 and names.value("g") == 1


BINDINGS = {
    "there": "config.there",
    "gone": "config.gone",
    "rests": "gone + 1",
    "twice": "2 * rests",
    "negative": "-gone",
    "inside": "max(1, gone)",
    "listed": "[gone]",
    "spared": "default(gone, 2)",
    "asked": "gone == 1",
    "either": "gone or 1",
}


def test_deep_definitions_are_refused_and_not_a_stack_overflow() -> None:
    deep = " + ".join(["{}"] + ["1"] * 50)
    bindings = {f"n{i}": parse_expr(deep.format(f"n{i - 1}")) for i in range(1, 90)}
    names = Scope(given={"n0": 1}, bindings=bindings)
    try:
        assert names.size("n89") == 1 + 89 * 50
    except UcplError as error:
        assert error.diagnostics[0].code == "E103"


def test_what_is_asked_again_is_no_runaway_and_what_definitions_take_is(monkeypatch) -> None:
    monkeypatch.setattr("ucpl.layout.scope.STEPS_LIMIT", 50)
    names = Scope(given={"n": 1}, bindings={"small": parse_expr("n + 1"), "large": parse_expr(" + ".join(["n"] * 60))})
    assert [names.size("small") for _ in range(200)] == [2] * 200
    with pytest.raises(UcplError) as caught:
        names.size("large")
    assert caught.value.diagnostics[0].code == "E103"


def test_definitions_are_nested_a_hundred_deep_and_no_deeper() -> None:
    bindings = {f"n{i}": parse_expr(f"n{i - 1}") for i in range(1, 200)}
    assert Scope(given={"n0": 1}, bindings=bindings).size("n99") == 1
    with pytest.raises(UcplError) as caught:
        Scope(given={"n0": 1}, bindings=bindings).size("n105")
    assert caught.value.diagnostics[0].code == "E103"


def test_a_value_as_it_is_written() -> None:
    assert literal("x") == nodes.Text("x") and literal(3) == nodes.Number(3)
    assert literal([1, ["a"]]) == nodes.List((nodes.Number(1), nodes.List((nodes.Text("a"),))))
    assert literal(None) == nodes.Number(0)


def test_the_nearest_name_is_near() -> None:
    assert nearest("hiden", ["hidden", "heads"]) == "hidden"
    assert nearest("xyz", ["hidden", "heads"]) is None
    assert nearest("TP", ["dp", "tp"]) == "tp"  # other capitals before other letters
    assert nearest("W", ["w", "W_q"]) == "w"


def test_lcm_is_that_of_python() -> None:
    assert scope().evaluate(parse_expr("lcm(6, 10, 15)")) == math.lcm(6, 10, 15)
