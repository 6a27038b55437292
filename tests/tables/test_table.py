"""Rows of more columns, against NumPy's own padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucpl.tables import each, once, widened


@given(
    st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(-2, 2), st.sampled_from((np.int64, np.int32))
)
def test_rows_keep_what_they_hold_and_the_rest_is_filled(
    rows: int, columns: int, more: int, fill: int, dtype: type[np.signedinteger]
) -> None:
    held: NDArray[np.signedinteger] = np.arange(10, 10 + rows * columns, dtype=dtype).reshape(rows, columns)
    wanted = np.pad(held, ((0, 0), (0, more)), constant_values=fill)
    made = widened(held, columns + more, fill)
    assert made.dtype == dtype
    np.testing.assert_array_equal(made, wanted, strict=True)


def test_rows_that_are_wide_enough_are_the_same_array() -> None:
    held = np.arange(6).reshape(2, 3)
    assert widened(held, 3, 0) is held
    with pytest.raises(ValueError):
        widened(held, 2, 0)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_each_number_once_in_order(dtype: type[np.integer[Any]]) -> None:
    for values in ([], [0], [3, 0, 3, 255 % 128, 0], [[2, 1], [1, 2]]):
        array = np.array(values, dtype=dtype)
        assert each(array) == np.unique(array).tolist()
        assert once(array).dtype == dtype
