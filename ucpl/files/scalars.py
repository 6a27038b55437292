"""The number of a Scalar, without torch.

It is used for messages, and for forms that keep no tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TypeGuard

from ucpl.extents import Counted, Scalar, TensorRef

COUNTED_MAX = 1 << 20  # values in one list or dict of an optimizer's numbers
DEPTH_MAX = 50

_FORMATS = {
    "f64": "<d",
    "f32": "<f",
    "f16": "<e",
    "i64": "<q",
    "i32": "<i",
    "i16": "<h",
    "i8": "<b",
    "u8": "<B",
    "u16": "<H",
    "u32": "<I",
    "u64": "<Q",
    "bool": "<?",
}


def number_of(value: object) -> object:
    """The number in a Scalar of one element; other values unchanged."""
    if not isinstance(value, Scalar):
        return value
    if value.dtype == "bf16" and len(value.data) == 2:
        return struct.unpack("<f", b"\0\0" + value.data)[0]
    form = _FORMATS.get(value.dtype)
    if form is None or struct.calcsize(form) != len(value.data):
        return value
    return struct.unpack(form, value.data)[0]


def is_step(state: str, shape: Sequence[int]) -> bool:
    """Test for a number of steps, a tensor of one dim too."""
    return state == "step" and prod(shape) == 1


def is_counted(value: object) -> TypeGuard[Counted]:
    """Test for a number, text, None, or bounded container of these.

    The bounds are needed: a list of a pickle may hold itself.
    """
    return _is_counted(value, [COUNTED_MAX], DEPTH_MAX)


def _is_counted(value: object, left: list[int], depth: int) -> bool:
    """As `is_counted`; `left`: how many values more are looked at."""
    left[0] -= 1
    if left[0] < 0 or depth < 0:
        return False
    if isinstance(value, list | tuple):
        return all(_is_counted(one, left, depth - 1) for one in value)
    if type(value) is dict:
        return all(isinstance(key, str) and _is_counted(one, left, depth - 1) for key, one in value.items())
    return isinstance(value, (int, float, bool, str)) or value is None


def counted_states(held: Iterable[tuple[tuple[int, ...], Mapping[str, object]]]) -> set[str]:
    """States that are no tensor of a parameter's shape.

    Parameters of several elements decide; it then holds for those of one element, too. held: the shape of each
    parameter, and its states.
    """
    several = ((shape, states) for shape, states in held if prod(shape) != 1)
    return {
        n for shape, states in several for n, v in states.items() if not isinstance(v, TensorRef) or v.shape != shape
    }
