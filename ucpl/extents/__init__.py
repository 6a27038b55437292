"""Extents, inert values and the envelope: facts about files, below every room that reads or writes them."""

from ucpl.extents.dtypes import (
    AS_U8,
    BY_SAFETENSORS,
    BY_STORAGE,
    BY_TORCH,
    DTYPES,
    PAIRED,
    DType,
    bits_of,
    in_elements,
    in_file,
    size_of,
)
from ucpl.extents.envelope import Counted, Envelope, ParameterGroup, Scalar, Setting
from ucpl.extents.records import (
    Call,
    Extent,
    Global,
    Key,
    Size,
    Step,
    StorageRef,
    TensorRef,
    TorchDType,
    key_text,
)
from ucpl.extents.sharding import Section, Sharding
from ucpl.extents.shelves import Shelf, Shelves
from ucpl.extents.structure import Flat, NamedTensor, Plain, StoredTensor, Structure

__all__ = [
    "AS_U8",
    "BY_SAFETENSORS",
    "BY_STORAGE",
    "BY_TORCH",
    "DTYPES",
    "Call",
    "Counted",
    "DType",
    "Envelope",
    "Extent",
    "Flat",
    "Global",
    "Key",
    "NamedTensor",
    "PAIRED",
    "ParameterGroup",
    "Plain",
    "Scalar",
    "Section",
    "Setting",
    "Sharding",
    "Shelf",
    "Shelves",
    "Size",
    "Step",
    "StorageRef",
    "StoredTensor",
    "Structure",
    "TensorRef",
    "TorchDType",
    "bits_of",
    "in_elements",
    "in_file",
    "key_text",
    "size_of",
]
