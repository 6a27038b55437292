"""Element types by the names the language uses, without torch."""

from __future__ import annotations

import math

from ucpl.records import frozen


@frozen
class DType:
    """One element type.

    Its size in bytes and its name in file formats.
    """

    name: str  # "f32", "bf16", ...
    itemsize: int  # bytes
    torch: str  # attribute of torch: "float32"
    storage: str | None  # class of the legacy typed storage in torch pickles: "FloatStorage"
    safetensors: str | None


_ROWS = (
    ("f64", 8, "float64", "DoubleStorage", "F64"),
    ("f32", 4, "float32", "FloatStorage", "F32"),
    ("f16", 2, "float16", "HalfStorage", "F16"),
    ("bf16", 2, "bfloat16", "BFloat16Storage", "BF16"),
    ("i64", 8, "int64", "LongStorage", "I64"),
    ("i32", 4, "int32", "IntStorage", "I32"),
    ("i16", 2, "int16", "ShortStorage", "I16"),
    ("i8", 1, "int8", "CharStorage", "I8"),
    ("u8", 1, "uint8", "ByteStorage", "U8"),
    ("bool", 1, "bool", "BoolStorage", "BOOL"),
    ("c64", 8, "complex64", "ComplexFloatStorage", "C64"),
    ("c128", 16, "complex128", "ComplexDoubleStorage", None),
    ("u16", 2, "uint16", None, "U16"),
    ("u32", 4, "uint32", None, "U32"),
    ("u64", 8, "uint64", None, "U64"),
    ("f8_e4m3fn", 1, "float8_e4m3fn", None, "F8_E4M3"),
    ("f8_e5m2", 1, "float8_e5m2", None, "F8_E5M2"),
    ("f8_e8m0fnu", 1, "float8_e8m0fnu", None, "F8_E8M0"),
    ("f4_e2m1fn", 1, "float4_e2m1fn_x2", None, "F4"),  # a byte has two
)

DTYPES: dict[str, DType] = {row[0]: DType(*row) for row in _ROWS}
BY_STORAGE: dict[str, DType] = {d.storage: d for d in DTYPES.values() if d.storage}
BY_TORCH: dict[str, DType] = {d.torch: d for d in DTYPES.values()}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES.values() if d.safetensors}

# Types whose bits many files keep as u8. Their stored form has a name of its own, which is in no file.
AS_U8: dict[str, str] = {name: f"{name} in u8" for name in ("f4_e2m1fn", "f8_e8m0fnu")}
STORED: dict[str, DType] = DTYPES | {name: DType(name, 1, "uint8", "ByteStorage", "U8") for name in AS_U8.values()}

PAIRED = frozenset({"f4_e2m1fn", AS_U8["f4_e2m1fn"]})  # two elements to a byte, the first in its low half


def bits_of(dtype: str) -> str:
    """The dtype of a stored tensor's bits: `f4_e2m1fn in u8` is f4_e2m1fn."""
    return dtype.removesuffix(" in u8")


def in_file(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape by which a file states a tensor.

    If two elements are in a byte, the shape counts bytes, as in torch.
    """
    stated = "u8" if dtype in AS_U8.values() else dtype
    if dtype in PAIRED and shape:
        shape = (*shape[:-1], -(-shape[-1] // 2))
    return stated, shape


def in_elements(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in elements of a tensor that a file states."""
    return (*shape[:-1], 2 * shape[-1]) if dtype in PAIRED and shape else shape


def size_of(dtype: str, numel: int) -> int:
    """Bytes of so many elements."""
    return (numel + 1) // 2 if dtype in PAIRED else numel * STORED[dtype].itemsize


# Of floating types: bits of a significand, the least exponent of a normal number, the greatest number.
_FLOATS = {
    "f64": (53, -1022, 1.7976931348623157e308),
    "f32": (24, -126, 3.4028234663852886e38),
    "f16": (11, -14, 65504.0),
    "bf16": (8, -126, 3.3895313892515355e38),
    "f8_e4m3fn": (4, -6, 448.0),
    "f8_e5m2": (3, -14, 57344.0),
    "c64": (24, -126, 3.4028234663852886e38),
    "c128": (53, -1022, 1.7976931348623157e308),
}


def largest(dtype: str) -> float | None:
    """The greatest finite number of a floating type; None for other types.

    Types of scaled blocks count as others.
    """
    return _FLOATS[dtype][2] if dtype in _FLOATS else None


# Every value of the first is exactly a value of the second.
EXACT = {
    ("bf16", "f32"), ("f16", "f32"), ("bf16", "f64"), ("f16", "f64"), ("f32", "f64"), ("u8", "i16"), ("u8", "i32"),
    ("u8", "i64"),
    ("i8", "i16"), ("i8", "i32"), ("i8", "i64"), ("i16", "i32"), ("i16", "i64"), ("i32", "i64"), ("i32", "f64"), ("i16", "f32"),
    ("i8", "bf16"), ("i8", "f16"), ("i8", "f32"), ("u8", "bf16"), ("u8", "f16"), ("u8", "f32"),
    ("f8_e4m3fn", "f16"), ("f8_e5m2", "f16"),
    ("bool", "u8"), ("f8_e4m3fn", "f32"), ("f8_e5m2", "f32"), ("f8_e4m3fn", "bf16"), ("f8_e5m2", "bf16"),
    ("f8_e8m0fnu", "bf16"), ("f8_e8m0fnu", "f32"), ("f8_e8m0fnu", "f64"), ("f4_e2m1fn", "f8_e4m3fn"), ("f4_e2m1fn", "f8_e5m2"),
    ("f4_e2m1fn", "bf16"), ("f4_e2m1fn", "f16"), ("f4_e2m1fn", "f32"), ("f4_e2m1fn", "f64"),
}  # fmt: skip


def wide(*dtypes: str) -> str:
    """A type that holds all values of these; "" if none does.

    It is one of them, f32 or f64. No cast makes complex numbers of others.
    """
    found = sorted({*dtypes})
    for one in (*found, "f32", "f64"):
        if all(d == one or (d, one) in EXACT for d in found):
            return one
    return ""


def can_train(dtype: str) -> bool:
    """Test for a type that gradients have: torch trains no integers."""
    return dtype.startswith(("f", "bf", "c"))


def holds(dtype: str, value: float) -> bool:
    """Test whether a dtype can represent a finite number exactly.

    >>> [holds("bf16", v) for v in (0.0, 0.5, 256.0, 257.0)]
    [True, True, True, False]
    """
    if bits_of(dtype) in AS_U8:  # of these only the bits are moved
        return False
    if dtype in _FLOATS:
        bits, least, most = _FLOATS[dtype]
        step = 2.0 ** max(math.frexp(value)[1] - bits, least - bits + 1)
        return value == 0 or (abs(value) <= most and step > 0 and (value / step).is_integer())
    if dtype == "bool":
        return value in (0.0, 1.0)
    width = 8 * DTYPES[dtype].itemsize
    low, high = (0, 2**width) if dtype.startswith("u") else (-(2 ** (width - 1)), 2 ** (width - 1))
    return value.is_integer() and low <= value < high
