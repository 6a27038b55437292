"""A Scalar's number without torch, against NumPy's and torch's own bytes."""

import struct
from typing import Any

import numpy as np
import pytest

from ucpl.extents import Scalar
from ucpl.files.scalars import is_counted, number_of

NUMPY = {
    "f64": "<f8",
    "f32": "<f4",
    "f16": "<f2",
    "i64": "<i8",
    "i32": "<i4",
    "i16": "<i2",
    "i8": "i1",
    "u8": "u1",
    "u16": "<u2",
    "u32": "<u4",
    "u64": "<u8",
    "bool": "?",
}


@pytest.mark.parametrize("dtype", NUMPY)
def test_each_dtype_is_read_as_numpy_reads_it(dtype: str) -> None:
    numbers = [0, 1] if dtype == "bool" else [0, 1, 100] if dtype[0] == "u" else [0, 1, -7, 100]
    for number in numbers:
        made = np.array(number, NUMPY[dtype])
        found = number_of(Scalar(dtype, (), made.tobytes()))
        assert found == made.item()
        assert type(found) is type(made.item())


@pytest.mark.parametrize("number", [0.0, 1.0, -2.5, 3.140625, float("inf")])
def test_bf16_is_the_upper_half_of_f32(number: float) -> None:
    assert number_of(Scalar("bf16", (), struct.pack("<f", number)[2:])) == number


@pytest.mark.parametrize(
    "given",
    [
        *(3, 2.5, None, "text", [1]),
        Scalar("f32", (2,), bytes(8)),  # of two elements
        Scalar("bf16", (2,), bytes(4)),
        Scalar("f32", (0,), b""),
        Scalar("c64", (), bytes(8)),  # no number of Python's struct
        Scalar("f8_e4m3fn", (), b"\1"),
    ],
)
def test_what_is_no_one_number_stays_as_it_is(given: Any) -> None:
    assert number_of(given) is given


def test_a_list_that_holds_itself_or_unfolds_without_end_counts_nothing() -> None:
    """A pickle can say both."""
    of_itself: list[Any] = [1]
    of_itself.append(of_itself)
    doubled: list[Any] = [1]
    for _ in range(40):
        doubled = [doubled, doubled]
    assert not is_counted(of_itself) and not is_counted({"a": of_itself}) and not is_counted(doubled)
    assert is_counted([1, "a", {"b": [None, 2.5]}]) and is_counted([0.9] * 100_000)
