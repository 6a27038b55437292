"""Layouts: names bound, numbers filled in, `extends` applied, rules checked.

`resolve` is the verb of this room.
"""

from ucpl.layout.expand import close, expand
from ucpl.layout.layout import (
    BlobRule,
    Derivation,
    Entry,
    FileRule,
    Group,
    Layout,
    LogicalState,
    LogicalTensor,
    Mesh,
    States,
    Storing,
    domains_of,
)
from ucpl.layout.library import Library, load
from ucpl.layout.resolve import resolve

__all__ = [
    "BlobRule",
    "Derivation",
    "Entry",
    "FileRule",
    "Group",
    "Layout",
    "Library",
    "LogicalState",
    "LogicalTensor",
    "Mesh",
    "States",
    "Storing",
    "close",
    "domains_of",
    "expand",
    "load",
    "resolve",
]
