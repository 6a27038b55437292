"""CRCs combined from the CRCs of parts, compared with zlib."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpl.runtime.joined_crcs import combine, combine_groups, crc_of_zeros, shift


@given(st.lists(st.binary(max_size=300)))
def test_combined_pieces_are_the_total(pieces: list[bytes]) -> None:
    assert combine([zlib.crc32(p) for p in pieces], [len(p) for p in pieces]) == zlib.crc32(b"".join(pieces))


@given(st.lists(st.lists(st.binary(max_size=50), min_size=1, max_size=5)), st.lists(st.binary(), max_size=3))
def test_groups_are_combined_each_for_itself(groups: list[list[bytes]], before: list[bytes]) -> None:
    pieces = [*before, *(piece for group in groups for piece in group)]
    starts = len(before) + np.cumsum([0, *(len(group) for group in groups)])[: len(groups)]
    found = combine_groups([zlib.crc32(p) for p in pieces], [len(p) for p in pieces], starts)
    assert found.tolist() == [zlib.crc32(b"".join(group)) for group in groups]


@given(st.binary(max_size=100), st.integers(0, 70_000))
def test_shifting_is_appending(data: bytes, nbytes: int) -> None:
    assert shift([zlib.crc32(data)], [nbytes])[0] ^ crc_of_zeros(nbytes) == zlib.crc32(data + bytes(nbytes))
    assert crc_of_zeros(nbytes) == zlib.crc32(bytes(nbytes))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**61), st.integers(0, 2**61))
def test_shifts_add_up_for_any_length(crc: int, a: int, b: int) -> None:
    assert shift(shift([crc], [a]), [b])[0] == shift([crc], [a + b])[0]


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**61)), min_size=17, max_size=40))
def test_many_are_shifted_as_each_alone(pairs: list[tuple[int, int]]) -> None:
    crcs, lengths = zip(*pairs, strict=True)
    assert shift(crcs, lengths).tolist() == [shift([crc], [n])[0] for crc, n in pairs]


def test_lengths_are_not_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        shift([1], [-1])
    assert combine([], []) == 0
    assert crc_of_zeros(5 << 30) == combine([crc_of_zeros(1 << 30)] * 5, [1 << 30] * 5)
