"""Small values without torch: a Scalar's number, for messages and for forms that keep no tensor."""

from __future__ import annotations

import struct

from ucpl.extents import Scalar

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
    """The number in a Scalar of one element; anything else as it is."""
    if not isinstance(value, Scalar):
        return value
    if value.dtype == "bf16" and len(value.data) == 2:
        return struct.unpack("<f", b"\0\0" + value.data)[0]
    form = _FORMATS.get(value.dtype)
    if form is None or struct.calcsize(form) != len(value.data):
        return value
    return struct.unpack(form, value.data)[0]
