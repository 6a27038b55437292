"""Extents, inert values and the train state: facts about files.

This package is below all packages that read or write files.
"""

from ucpl.extents.dtypes import (
    AS_U8,
    BY_SAFETENSORS,
    BY_STORAGE,
    BY_TORCH,
    DTYPES,
    EXACT,
    PAIRED,
    STORED,
    DType,
    bits_of,
    holds,
    in_elements,
    in_file,
    largest,
    size_of,
)
from ucpl.extents.evidence import Seen, doubt, together
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
from ucpl.extents.structure import BlobWay, CarriedBlob, Flat, NamedTensor, Plain, StoredTensor, Structure, as_filed
from ucpl.extents.train_state import Counted, ParameterGroup, Scalar, Setting, TrainState

__all__ = [
    "AS_U8",
    "BY_SAFETENSORS",
    "BY_STORAGE",
    "BY_TORCH",
    "DTYPES",
    "EXACT",
    "PAIRED",
    "STORED",
    "BlobWay",
    "Call",
    "CarriedBlob",
    "Counted",
    "DType",
    "TrainState",
    "Extent",
    "Flat",
    "Global",
    "Key",
    "NamedTensor",
    "ParameterGroup",
    "Plain",
    "Scalar",
    "Section",
    "Seen",
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
    "as_filed",
    "bits_of",
    "doubt",
    "holds",
    "in_elements",
    "in_file",
    "key_text",
    "largest",
    "size_of",
    "together",
]
