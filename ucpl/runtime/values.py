"""Values that change on the way: casts, `a * x + b`, means and sums.

Everything else moves as bits.

Casts round to nearest even, once: a value that was computed in fp64 goes to bf16 or f16 through an fp32 that was
rounded to odd, so that the second rounding cannot undo the first. A NaN stays a NaN with its sign. All of it is NumPy,
so that bits do not depend on the processor (torch's vectorised and scalar casts of NaN to bf16 differ); torch is
imported for f8 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ucpl.extents import AS_U8, DTYPES, bits_of, largest
from ucpl.records import frozen
from ucpl.runtime.rows import Rule

__all__ = [
    "Array",
    "Conversion",
    "Wide",
    "decode",
    "encode",
    "first_half",
    "infinite_at",
    "mean",
    "put",
    "value_text",
]

Array = NDArray[Any]
Wide = np.dtype[np.generic]
U8 = NDArray[np.uint8]

_NUMPY = {
    "f64": "<f8", "f32": "<f4", "f16": "<f2", "i64": "<i8", "i32": "<i4", "i16": "<i2", "i8": "i1", "u8": "u1", "bool": "u1",
    "c64": "<c8", "c128": "<c16", "u16": "<u2", "u32": "<u4", "u64": "<u8",
}  # fmt: skip
_FP64: Wide = np.dtype(np.float64)
_COMPLEX = ("c64", "c128")
_MANTISSA = {
    "f64": 53, "f32": 24, "f16": 11, "bf16": 8, "f8_e4m3fn": 4, "f8_e5m2": 3, "f8_e8m0fnu": 1, "f4_e2m1fn": 2,
}  # fmt: skip
_EXPONENT = {
    "f64": 11, "f32": 8, "f16": 5, "bf16": 8, "f8_e4m3fn": 4, "f8_e5m2": 5, "f8_e8m0fnu": 8, "f4_e2m1fn": 2,
}  # fmt: skip
_FLOATS = tuple(_MANTISSA)
_EXPONENT_BITS = {"f16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}  # all of them set: infinite, or NaN
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_F4_VALUES = np.concatenate([_E2M1, -_E2M1])  # by their bits: the sign is the highest of four


@cache
def _f8_values(dtype: str) -> NDArray[np.float32]:
    """All 256 values of an 8-bit float, by their bits."""
    import torch

    bits = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    values: NDArray[np.float32] = bits.view(getattr(torch, DTYPES[dtype].torch)).to(torch.float32).numpy()
    return values


@cache
def _e8m0_values() -> NDArray[np.float32]:
    """2 ** (bits - 127), an exponent alone.

    If all bits are set, it is NaN.
    """
    with np.errstate(over="ignore"):
        values = np.ldexp(np.float32(1), np.arange(-127, 129, dtype=np.int32)).astype(np.float32)
    values[255] = np.nan
    return values


def decode(raw: U8, dtype: str, half: str = "") -> Array:
    """Numbers of contiguous bytes.

    bf16, f8 and f4 become fp32 (exact), all others stay. half: the meant element of a byte of two, "low" or "high";
    without it each byte is a number of its own.
    """
    match bits_of(dtype):
        case "f4_e2m1fn" if half:
            numbers: Array = _F4_VALUES[raw & 15 if half == "low" else raw >> 4]
            return numbers
        case "f4_e2m1fn":
            return raw
        case "f8_e8m0fnu":
            return _e8m0_values()[raw]
        case "bf16":
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        case "f8_e4m3fn" | "f8_e5m2":
            return _f8_values(dtype)[raw]
        case _:
            return raw.view(_NUMPY[dtype])


def encode(values: Array, dtype: str) -> U8:
    """Bytes of numbers in `dtype`, each rounded once, to nearest even.

    Types of scaled blocks can hold zeros alone.
    """
    with np.errstate(all="ignore"):
        match bits_of(dtype):
            case "f4_e2m1fn" | "f8_e8m0fnu":
                assert not values.any(), "nothing is cast to these: E324, E605"
                return np.zeros(len(values), np.uint8)
            case "bf16":
                bits = _single(values).view(np.uint32)
                rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                if nan.any():
                    rounded = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
                narrow: U8 = rounded.astype("<u2").view(np.uint8)
                return narrow
            case "f8_e4m3fn" | "f8_e5m2":
                import torch

                cast = torch.from_numpy(_single(values)).to(getattr(torch, DTYPES[dtype].torch))
                result: U8 = cast.view(torch.uint8).numpy()
                return result
            case "bool":
                truth: U8 = (values != 0).astype(np.uint8)
                return truth
            case _:
                wanted = np.dtype(_NUMPY[dtype])
                if wanted.kind in "iu" and values.dtype.kind == "f":
                    values = np.rint(values)
                return np.ascontiguousarray(values.astype(wanted)).view(np.uint8)


def _single(values: Array) -> NDArray[np.float32]:
    """fp32 numbers for a narrower float: exact, or rounded to odd."""
    if values.dtype in (np.float32, np.float16) or (values.dtype.kind in "iu" and values.dtype.itemsize <= 2):
        return np.ascontiguousarray(values.astype(np.float32))
    wide = values.astype(np.float64)
    near = wide.astype(np.float32)
    inexact = (near.astype(np.float64) != wide) & np.isfinite(wide)
    if inexact.any():
        even = (near.view(np.uint32) & np.uint32(1)) == 0
        toward = np.where(near.astype(np.float64) < wide, np.float32(np.inf), np.float32(-np.inf))
        near = np.where(inexact & even, np.nextafter(near, toward), near)
    return np.ascontiguousarray(near)


@frozen
class Conversion:
    """Conversion from one dtype to another under a rule.

    `check_exact`: no rounding is allowed, and the types alone do not exclude it.
    """

    source: str
    target: str
    rule: Rule

    @property
    def is_identity(self) -> bool:
        return bits_of(self.source) == bits_of(self.target) and self.rule.keeps_values

    @property
    def check_exact(self) -> bool:
        if self.rule.lossy or self.rule.reduces:
            return False
        return not self.rule.keeps_values or not _widens(self.source, self.target)

    @property
    def is_possible(self) -> bool:
        if self.is_identity:
            return True
        if bits_of(self.target) in AS_U8:
            return False
        return (self.source in _COMPLEX) == (self.target in _COMPLEX) and (
            self.source not in _COMPLEX or self.rule.keeps_values
        )

    def read(self, raw: U8) -> Array:
        """Numbers from stored bytes of the source."""
        return decode(raw, self.source, self.rule.half)

    @property
    def wide(self) -> Wide:
        """Type of 8 bytes that holds every value of the source.

        fp64 does not hold integers of 64 bits.
        """
        if self.rule.source_value == self.rule.target_value == (1.0, 0.0) and self.source in ("i64", "u64"):
            return np.dtype(_NUMPY[self.source])
        return _FP64

    def logical(self, raw: U8, wide: Wide = _FP64) -> Array:
        """Values of the tensor from stored numbers: (stored - b) / a.

        They are in fp64, or in the type `wide`.
        """
        values: Array = self.read(raw).astype(wide)
        a, b = self.rule.source_value
        if (a, b) != (1.0, 0.0):
            values = (values - b) / a
        return values

    @property
    def may_overflow(self) -> bool:
        """True if a finite number of the source may become infinite."""
        return largest(self.target) is not None and not (self.rule.keeps_values and _widens(self.source, self.target))

    def stored(self, values: Array) -> U8:
        """Bytes of the target for values of the tensor.

        They are a * x + b, rounded once.
        """
        a, b = self.rule.target_value
        if (a, b) != (1.0, 0.0):
            values = a * values + b
        return encode(values, self.target)

    def convert(self, raw: U8) -> U8:
        if self.is_identity:
            return raw
        if self.rule.keeps_values:
            return encode(self.read(raw), self.target)
        return self.stored(self.logical(raw))

    def rounded_at(self, values: Array, made: U8, count: Array) -> int | None:
        """First rounded value of the tensor.

        Only values that something was added to count.
        """
        with np.errstate(all="ignore"):
            a, b = self.rule.target_value
            after = decode(made, self.target)
            if values.dtype.kind == "f":
                after = (after.astype(np.float64) - b) / a
            same = _kept(values, after) | (count == 0)
        return None if same.all() else int(np.flatnonzero(~same)[0])

    def inexact_at(self, raw: U8, made: U8) -> int | None:
        """First element that changed in a cast that must keep all values."""
        with np.errstate(all="ignore"):
            before, after = self.read(raw), decode(made, self.target)
            if not self.rule.keeps_values:  # stored numbers must give back the tensor's own value
                a, b = self.rule.target_value
                before, after = self.logical(raw), (after.astype(np.float64) - b) / a
            same = _kept(before, after)
        return None if same.all() else int(np.flatnonzero(~same)[0])


def infinite_at(made: U8, dtype: str, before: Callable[[], Array]) -> int | None:
    """First number that its type made infinite or NaN, or None.

    It is finite `before` and too large for the type.
    """
    if dtype in _EXPONENT_BITS:
        bits = _EXPONENT_BITS[dtype]
        lost = (made.view("<u2") & bits) == bits
    else:
        lost = ~np.isfinite(decode(made, dtype))
    if not lost.any():
        return None
    lost &= np.isfinite(before())
    return int(np.flatnonzero(lost)[0]) if lost.any() else None


def _kept(before: Array, after: Array) -> Array:
    """Mask of equal numbers of two types; NaN equals NaN."""
    if before.dtype.kind in "iu" and after.dtype.kind in "iu":
        same: Array = (before == after) & ((before < 0) == (after < 0))
    elif before.dtype.kind in "iu":
        # An integer that a float holds comes back from it; 2 ** 63 does not fit where it would come back to. In
        # fp64, since the bounds would be infinite in a narrow float.
        after = after.astype(np.float64)
        inside = (after >= np.iinfo(before.dtype).min) & (after < float(np.iinfo(before.dtype).max) + 1)
        same = inside & (np.where(inside, after, 0).astype(before.dtype) == before)
    else:
        same = (before == after) | ((before != before) & (after != after))
    return same


def _widens(source: str, target: str) -> bool:
    """True if one dtype holds every value of the other."""
    source, target = bits_of(source), bits_of(target)
    if source == target:
        return True
    if source in _FLOATS and target in _FLOATS:
        return _MANTISSA[source] <= _MANTISSA[target] and _EXPONENT[source] <= _EXPONENT[target]
    if source in _COMPLEX or target in _COMPLEX:
        return (source, target) == ("c64", "c128")
    if source == "bool":
        return True
    if target == "bool" or source in _FLOATS:
        return False
    a = np.dtype(_NUMPY[source])
    if target in _FLOATS:
        return target in ("f64", "f32") and 8 * a.itemsize <= _MANTISSA[target]
    return np.can_cast(a, np.dtype(_NUMPY[target]), "safe")


def mean(total: Array, count: Array) -> Array:
    """Means from sums and the numbers of added values.

    Places without any keep 0.
    """
    return total / np.maximum(count, 1)


def put(how: str, into: tuple[Array, Array], more: tuple[Array, Array]) -> None:
    """Add values and their numbers to others at the same places.

    Or keep the greater. Of a NaN and a number the greater is a NaN, of two zeros the positive one: it does not depend
    on their order.
    """
    (total, count), (values, seen) = into, more
    if how != "max":
        total += values
    else:
        greater = np.maximum(total, values)
        if total.dtype.kind == "f":
            greater = np.where((total == 0) & (values == 0), total + values, greater)
            greater[np.isnan(greater)] = np.nan
        total[...] = np.where(seen == 0, total, np.where(count == 0, values, greater))
    count += seen


def first_half(one: bytes, other: bytes) -> int:
    """Index of the first different element (0 or 1) of two bytes."""
    return int(one[0] & 15 == other[0] & 15)


def value_text(raw: bytes, dtype: str, half: str = "") -> str:
    """One element as text with its bits: `0.5 (bits 3f00)`.

    Of a byte of two, the `low` or the `high` one.
    """
    value = decode(np.frombuffer(raw, np.uint8), dtype, half)[0]
    if half:
        return f"{value.item()!r} (bits {raw[0] & 15 if half == 'low' else raw[0] >> 4:x})"
    number = bool(value) if dtype == "bool" and value in (0, 1) else value.item()
    return f"{number!r} (bits {raw[::-1].hex()})"
