"""Element types by the names the language uses, without torch."""

from __future__ import annotations

from attrs import frozen


@frozen
class DType:
    """One element type: its size in bytes and its name in torch and in safetensors."""

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
)

DTYPES: dict[str, DType] = {row[0]: DType(*row) for row in _ROWS}
BY_STORAGE: dict[str, DType] = {d.storage: d for d in DTYPES.values() if d.storage}
BY_TORCH: dict[str, DType] = {d.torch: d for d in DTYPES.values()}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES.values() if d.safetensors}
