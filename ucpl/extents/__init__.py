"""Extents, inert values and the envelope: facts about files, below every room that reads or writes them."""

from ucpl.extents.dtypes import BY_SAFETENSORS, BY_STORAGE, BY_TORCH, DTYPES, DType
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
    "key_text",
]
