"""Pickles by ucpl's own machine: bytes to inert values and back.

No name in a file is imported or called. A pickle is a program for a small stack machine. `pickle.load` runs it with the
names in it; here a name is a `Global`, a call is a `PickledCall`, and only torch's forms of tensors, sizes, dtypes and plain
containers become values. The law is `loads(dumps(value)) == value`, with shared and cyclic containers kept as they are.

Not here: the machine (pickle_machine), writing (pickle_writer, whose `dumps` is named here too), torch, storages' bytes
(torch_files), and the meaning of values.
"""

from __future__ import annotations

import gc

from ucpl.errors import Label, fail
from ucpl.extents import StorageRef, TensorRef
from ucpl.files.inert import (
    PICKLE_BYTES_MAX,
    attributes_of,
    check_nesting,
    set_attributes,
    tensors_of,
    unsafe_globals,
    walk,
)
from ucpl.files.pickle_machine import run
from ucpl.files.pickle_runs import PickleRuns
from ucpl.files.pickle_values import Build
from ucpl.files.pickle_writer import dump_pickle, dumps
from ucpl.records import frozen

__all__ = [
    "Pickle",
    "attributes_of",
    "dump_pickle",
    "dumps",
    "load_pickle",
    "loads",
    "set_attributes",
    "tensors_of",
    "unsafe_globals",
    "walk",
]


@frozen
class Pickle:
    """A pickle: its value, and its storages and tensors in file order."""

    value: object
    storages: tuple[StorageRef, ...]
    tensors: tuple[TensorRef, ...]
    size: int = 0  # bytes, up to its end


def loads(data: bytes, file: str = "pickle", *, alone: bool = False) -> object:
    """The inert value of a pickle (protocols 0 to 5).

    `file` is the name in errors. alone: no bytes may follow it, since a loader may run them, too. Raises: UcplError
    E420-E427.
    """
    return load_pickle(data, file, alone=alone).value


def load_pickle(data: bytes, file: str = "pickle", *, alone: bool = False, runs: PickleRuns | None = None) -> Pickle:
    """As `loads`, with the storages and tensors that were built.

    `runs`: records that are in the value as a `Run` each. Raises: Irregular, too, if the pickle changes
    the names that they refer to.
    """
    if len(data) > PICKLE_BYTES_MAX:
        fail("E425", f"the pickle has {len(data)} bytes, more than {PICKLE_BYTES_MAX} are not read", Label(file))
    build = Build([], [], [4 * len(data) + (1 << 20)])
    # All that is made stays: looking for garbage among millions of new values would take a third of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value, size = run(data, file, build, alone=alone, runs=runs)
        check_nesting(value, file)
    finally:
        if collecting:
            gc.enable()
    return Pickle(value, tuple(build.storages), tuple(build.tensors), size)
