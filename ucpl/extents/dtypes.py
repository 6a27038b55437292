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
    ("f8_e8m0fnu", 1, "float8_e8m0fnu", None, "F8_E8M0"),
    ("f4_e2m1fn", 1, "float4_e2m1fn_x2", None, "F4"),  # a byte has two
)

DTYPES: dict[str, DType] = {row[0]: DType(*row) for row in _ROWS}
BY_STORAGE: dict[str, DType] = {d.storage: d for d in DTYPES.values() if d.storage}
BY_TORCH: dict[str, DType] = {d.torch: d for d in DTYPES.values()}
BY_SAFETENSORS: dict[str, DType] = {d.safetensors: d for d in DTYPES.values() if d.safetensors}

# Types whose bits many files keep as u8. What is stored so has a name of its own, which is in no file.
AS_U8: dict[str, str] = {name: f"{name} in u8" for name in ("f4_e2m1fn", "f8_e8m0fnu")}
DTYPES |= {name: DType(name, 1, "uint8", "ByteStorage", "U8") for name in AS_U8.values()}

PAIRED = frozenset({"f4_e2m1fn", AS_U8["f4_e2m1fn"]})  # two elements to a byte, the first in its low half


def bits_of(dtype: str) -> str:
    """What the bits of a stored tensor mean: `f4_e2m1fn in u8` are f4_e2m1fn."""
    return dtype.removesuffix(" in u8")


def in_file(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape by which a file states a tensor: of two elements to a byte, the bytes are counted, as torch does."""
    stated = "u8" if dtype in AS_U8.values() else dtype
    if dtype in PAIRED and shape:
        shape = (*shape[:-1], -(-shape[-1] // 2))
    return stated, shape


def in_elements(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in elements of a tensor that a file states."""
    return (*shape[:-1], 2 * shape[-1]) if dtype in PAIRED and shape else shape


def size_of(dtype: str, numel: int) -> int:
    """Bytes of so many elements."""
    return (numel + 1) // 2 if dtype in PAIRED else numel * DTYPES[dtype].itemsize
