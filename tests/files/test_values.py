"""Checked access to values in files: file, key, found and expected value."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ucpl.errors import UcplError
from ucpl.extents import Global, PickledCall, Size, StorageRef, TensorRef
from ucpl.files.values import Empty, Value, kind_text

TENSOR = TensorRef(StorageRef("0", "f32", 6), 0, (2, 3), (3, 1))


def value(held: Any, *key: str | int) -> Value:
    return Value(Path("/there/a.pt"), "a.pt", key, held)


def refused(ask: Callable[[], object]) -> str:
    with pytest.raises(UcplError) as caught:
        ask()
    (found,) = caught.value.diagnostics
    assert found.code == "E455"
    assert found.labels[0].file == "/there/a.pt"
    return found.message


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: value({}).at("a"), "a.pt: a is not there, expected is something"),
        (lambda: value({"a": None}).at("a", "b"), "a.pt: a/b is not there, expected is something"),
        (lambda: value([1], "a").mapping(), "a.pt: a is a list of 1, expected is a dict"),
        (lambda: value(Size([2])).items(), "a.pt: its value is the shape [2], expected is a list"),
        (lambda: value(True, "n").whole(), "a.pt: n is True, expected is a whole number, 0 or more"),
        (lambda: value(0, "n").whole(1), "a.pt: n is the number 0, expected is a whole number, 1 or more"),
        (lambda: value(1 << 62).whole(), "a.pt: its value is a number of more than 62 bits, expected is"),
        (lambda: value(1 << 20000).whole(), "a.pt: its value is a number of more than 62 bits, expected is"),
        (lambda: value("\ud800").text(), r"the text '\ud800', expected is a text"),
        (lambda: value(["a", 1], "k").texts(), "a.pt: k/1 is the number 1, expected is a text"),
        (lambda: value((2, -1)).shape(), "a tuple of 2, expected is a shape"),
        (lambda: value((1,) * 65).shape(), "a tuple of 65, expected is a shape"),
        (lambda: value((2, True)).shape(), "a tuple of 2, expected is a shape"),
        (lambda: value(1, "t").tensor(), "a.pt: t is the number 1, expected is a tensor"),
        (lambda: list(value({3: 1}).named()), "a.pt: 3 is the number 1, expected is something under a name"),
        (lambda: list(value({"\ud800": 1}).named()), "is the number 1, expected is something under a name"),
        (lambda: value(float("inf")).number(), "the number inf, expected is a number"),
        (lambda: value(-1.0).number(), "the number -1.0, expected is a number"),
        (lambda: Empty.of(value({"dtype": "f33", "shape": [0]})), "dtype is the text 'f33', expected is a dtype"),
        (lambda: Empty.of(value({"dtype": "f32", "shape": [1]})), "expected is a shape without elements"),
    ],
)
def test_what_is_not_as_asked_is_refused_with_what_was_found(ask: Callable[[], object], message: str) -> None:
    assert message in refused(ask)


def test_what_is_as_asked_is_given() -> None:
    tree = value(OrderedDict(a=[1, {"b": (2, 3)}], t=TENSOR, none=None))
    assert tree.at("a").items()[1].at("b").shape() == (2, 3)
    assert tree.at("a").items()[1].at("b").key == ("a", 1, "b")
    assert tree.find("none") is None
    assert tree.find("nothing") is None
    assert tree.at("none").held is None
    assert tree.at("t").tensor() is TENSOR
    assert tree.at("a").find(0) is not None and tree.at("a").find(2) is None
    assert [name for name, _ in tree.named()] == ["a", "t", "none"]
    assert Empty.of(value({"dtype": "f32", "shape": [2, 0], "buffer": True})) == Empty("f32", (2, 0), True)


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ("x" * 100, f"the text '{'x' * 60}'..."),
        (TENSOR, "a tensor of shape [2, 3]"),
        (PickledCall(Global("m", "C")), "an object of m.C"),
        (b"raw", "a bytes"),
        (frozenset({1}), "a frozenset of 1"),
    ],
)
def test_found_values_are_described_briefly(held: Any, text: str) -> None:
    assert kind_text(held) == text
