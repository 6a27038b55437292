"""Values that stand beside tensors, held against each other: hyper-parameters, counters, client_state with its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import frozen

from ucpl.extents import DTYPES, Call, Extent, Global, Scalar, TensorRef, TorchDType
from ucpl.stores.carrying import by_place, origin_of
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.scalars import number_of

__all__ = ["Apart", "Beside", "apart", "value_text"]

_CHUNK = 1 << 20


@frozen
class Apart:
    """One place where two values differ, as texts."""

    path: str
    a: str
    b: str


class Beside:
    """The tensors inside carried values of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.root = checkpoint.root
        self._known = by_place(checkpoint.carried_extents.values())

    def extent(self, t: TensorRef) -> Extent | None:
        file, name = origin_of(t.storage.name)
        return self._known.get((file, name, t.offset, t.shape, t.stride, t.storage.dtype))

    def chunks(self, extent: Extent) -> Iterator[bytes]:
        """The tensor's bytes, row-major, about a MiB at a time."""
        size = DTYPES[extent.dtype].itemsize
        fd = os.open(self.root / extent.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if extent.is_contiguous:
                begin, end = extent.storage_start + extent.offset * size, extent.numel * size
                for at in range(0, end, _CHUNK):
                    yield os.pread(fd, min(_CHUNK, end - at), begin + at)
                return
            raw = np.frombuffer(os.pread(fd, extent.storage_bytes, extent.storage_start), np.uint8)
            view = np.lib.stride_tricks.as_strided(
                raw[extent.offset * size :], (*extent.shape, size), (*(s * size for s in extent.stride), 1)
            )
            whole = np.ascontiguousarray(view).tobytes()
            for at in range(0, len(whole), _CHUNK):
                yield whole[at : at + _CHUNK]
        finally:
            os.close(fd)


def apart(path: str, a: Any, b: Any, ours: Beside, theirs: Beside) -> Iterator[Apart]:
    """Every place where two value trees differ. Numbers are equal by value; a NaN equals itself."""
    yield from _apart(path, a, b, ours, theirs, 0)


def _apart(path: str, a: Any, b: Any, ours: Beside, theirs: Beside, depth: int) -> Iterator[Apart]:
    a, b = number_of(a), number_of(b)
    if isinstance(a, TensorRef) and isinstance(b, TensorRef):
        yield from _tensors(path, a, b, ours, theirs)
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            name = f"{path}.{key}" if path else str(key)
            if key not in a or key not in b:
                yield Apart(name, _said(a, key), _said(b, key))
            else:
                yield from _apart(name, a[key], b[key], ours, theirs, depth + 1)
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            yield Apart(path, f"{len(a)} values", f"{len(b)} values")
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _apart(f"{path}[{i}]", x, y, ours, theirs, depth + 1)
    elif isinstance(a, Call) and isinstance(b, Call):
        for name in ("function", "args", "kwargs", "state", "list_items", "dict_items"):
            yield from _apart(f"{path}.{name}", getattr(a, name), getattr(b, name), ours, theirs, depth + 1)
    elif isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return
    elif isinstance(a, (bool, int, float)) and isinstance(b, (bool, int, float)):
        if a != b:
            yield Apart(path, value_text(a), value_text(b))
    elif type(a) is not type(b) or a != b:
        yield Apart(path, value_text(a), value_text(b))


def _tensors(path: str, a: TensorRef, b: TensorRef, ours: Beside, theirs: Beside) -> Iterator[Apart]:
    if (a.storage.dtype, tuple(a.shape)) != (b.storage.dtype, tuple(b.shape)):
        yield Apart(path, value_text(a), value_text(b))
        return
    mine, yours = ours.extent(a), theirs.extent(b)
    if mine is None or yours is None:
        if mine is not yours:
            yield Apart(path, "a tensor" if mine else "a tensor out of reach", "a tensor" if yours else "out of reach")
        return
    at = 0
    size = DTYPES[mine.dtype].itemsize
    for x, y in zip(ours.chunks(mine), theirs.chunks(yours), strict=False):
        if x != y:
            first = (
                int(np.flatnonzero(np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8))[0])
                if len(x) == len(y)
                else 0
            )
            n = (at + first) // size
            low = n * size - at
            index = [int(i) for i in np.unravel_index(n, mine.shape)] if mine.shape else []
            values = (x[low : low + size], y[low : low + size])
            yield Apart(f"{path}{index}", *(value_text(number_of(Scalar(mine.dtype, (), v))) for v in values))
            return
        at += len(x)


def _said(value: dict[Any, Any], key: Any) -> str:
    return value_text(value[key]) if key in value else "nothing"


def value_text(value: Any) -> str:
    """A value in few words."""
    match value:
        case TensorRef():
            return f"a tensor {value.storage.dtype} {list(value.shape)}"
        case Call():
            return f"an object of {value_text(value.function)}"
        case Global():
            return f"{value.module}.{value.name}"
        case TorchDType():
            return value.name
        case Scalar():
            return f"{value.data.hex()} ({value.dtype})"
        case dict():
            return f"a dict of {len(value)}"
        case _:
            text = repr(value)
            return text if len(text) <= 60 else text[:57] + "..."
