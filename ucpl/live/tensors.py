"""The one access to the memory of tensors of a running job.

A tensor may be a view with gaps, the conjugate or the negative of the stored numbers, be a DTensor or a Parameter, or
have no memory. No other module looks at memory of tensors (tests/test_project.py). Not here: dtypes by their names in specs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from math import floor, gcd, log2
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from ucpl.records import frozen

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Goal", "Place", "address_of", "boxed", "flat_bytes", "flat_of", "is_aligned", "is_direct", "is_inference", "is_nested",
    "is_placed", "memory_of", "overflows", "overlap", "part_of", "parts_of", "place_of", "plain", "survives", "tensor_of",
    "unreadable", "unwritable",
]  # fmt: skip

Place = tuple[object, ...]
_PLAIN = torch.Tensor, torch.nn.Parameter


def is_placed(tensor: object) -> TypeGuard[DTensor]:
    """True for a DTensor.

    Its module is slow to import, and only loaded modules can have made one.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of this rank: a DTensor's local part, or the tensor."""
    mine: torch.Tensor = tensor._local_tensor if is_placed(tensor) else tensor
    if type(mine).__name__ == "AsyncCollectiveTensor":
        mine = mine.wait()  # type: ignore[attr-defined]
    return mine


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of this rank that make up its part.

    Several for classes of torch and TorchRec that keep several.
    """
    mine = part_of(tensor)
    shards = getattr(mine, "local_shards", None)
    return [getattr(one, "tensor", one) for one in shards()] if callable(shards) else [mine]


def is_inference(tensor: torch.Tensor) -> bool:
    """True if only inference mode may write the tensor."""
    return any(part.is_inference() for part in parts_of(tensor))


def is_nested(tensor: torch.Tensor) -> bool:
    """True if it has no shape.

    Classes that answer for torch need not know the question.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.is_nested


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain torch tensor without a gradient.

    For a tensor that is readable.
    """
    with torch._C.DisableTorchFunctionSubclass():
        mine = part_of(tensor).detach()
        return mine if type(mine) is torch.Tensor else mine.as_subclass(torch.Tensor)


def unreadable(tensor: object) -> str:
    """The reason that a value has no elements in memory, or ""."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}, and no tensor with bytes"
    mine = tensor
    if type(tensor) not in _PLAIN:
        if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
            return "a parameter that a lazy module has not made yet"
        if is_placed(tensor) and any(one.is_partial() for one in tensor.placements):
            return "a DTensor whose ranks hold terms of a sum (Partial): redistribute it first"
        mine = part_of(tensor)
        parts = parts_of(tensor)
        if len(parts) != 1 or parts[0] is not mine:
            return next(filter(None, map(unreadable, parts)), "")
    if mine.is_meta:
        return "a tensor on no device (meta), and no tensor with bytes: call to_empty(device=...) first"
    if type(mine).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or mine.is_nested:
        return f"a tensor of class {type(mine).__name__}, whose elements torch does not store as one array"
    if mine.layout != torch.strided:
        return f"a tensor of {mine.dtype} and layout {mine.layout}: give it dense (to_dense())"
    if mine.is_quantized:
        return f"a tensor of {mine.dtype} and layout {mine.layout}, which is quantised: give it dequantised"
    try:
        held = mine.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        # torch.func wraps tensors of the CPU; tensors of some other devices have no storage that can be asked.
        return f"a tensor of class {type(mine).__name__} without memory of its own" if mine.device.type == "cpu" else ""
    elements = mine.numel() if mine.is_contiguous() else _reach(mine)
    if elements and held < (mine.storage_offset() + elements) * mine.itemsize:
        return "a tensor whose memory was freed"
    return ""


def unwritable(tensor: object) -> str:
    """The reason why a tensor cannot be filled; empty if it can."""
    if why := unreadable(tensor):
        return why
    assert isinstance(tensor, torch.Tensor)
    return (
        ""
        if all(_is_apart(plain(part)) for part in parts_of(tensor))
        else "a view whose elements share memory (expanded or overlapping): clone it first"
    )


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor, in memory if stored as such."""
    return plain(tensor).resolve_conj().resolve_neg()


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements end to end, in row-major order.

    The tensor's own memory if it has that order, else a copy.
    """
    flat = values_of(tensor).contiguous().view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,), flat.storage_offset())  # of one element


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `flat_of`, on the tensor's device."""
    return flat_of(tensor).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of `flat_of`, on the host."""
    found: memoryview = flat_bytes(tensor).cpu().numpy().data
    return found


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's first byte in its device's memory."""
    return plain(tensor).data_ptr()


def tensor_of(
    data: bytearray | memoryview | NDArray[np.uint8], dtype: torch.dtype, shape: Iterable[int]
) -> torch.Tensor:
    """A tensor of the CPU over the same memory. Raises: ValueError, RuntimeError."""
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(tuple(shape))


def boxed(flat: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A box in the result of `flat_of` or a `Goal`, by steps.

    Steps are in elements.
    """
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)


def is_direct(tensor: torch.Tensor) -> bool:
    """True if a file's bytes can be copied into its memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_aligned(tensor: torch.Tensor, size: int) -> bool:
    """True if its bytes can be viewed as words of `size` bytes."""
    return not (tensor.data_ptr() | int(tensor.storage_offset())) % size


@frozen(eq=False)
class Goal:
    """A tensor to fill.

    `flat` are its elements end to end; `put` copies them into the tensor if they are elsewhere.
    """

    flat: torch.Tensor
    _into: torch.Tensor
    _is_own: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Goal:
        """Of a tensor that is not `unwritable`."""
        into = plain(tensor)
        is_own = into.is_contiguous() and not (into.is_conj() or into.is_neg() or into.is_inference())
        flat = flat_of(into)
        return cls(flat if is_own else flat.clone(), into, is_own)

    def put(self) -> None:
        if not self._is_own:
            with torch.inference_mode() if self._into.is_inference() else nullcontext():
                self._into.copy_(self.flat.view(self._into.shape))


# ---- Casts -----------------------------------------------------------------------------------------------------------------


def survives(values: torch.Tensor, made: torch.Tensor) -> bool:
    """True if a cast kept every value."""
    back = made.to(values.dtype)
    return bool(((back == values) | ((back != back) & (values != values))).all())


def overflows(values: torch.Tensor, made: torch.Tensor) -> bool:
    """True if a cast changed a finite number to infinite."""
    if not (values.is_floating_point() or values.is_complex()):
        return False
    if made.is_floating_point() and made.element_size() == 1:  # torch takes the largest number in place of infinity
        known = torch.finfo(made.dtype)
        most = known.max + 2.0 ** floor(log2(known.max)) * known.eps / 2
        wide = values.double()
        return bool((wide.isfinite() & (wide.abs() > most)).any())
    return bool((values.isfinite() & ~made.isfinite()).any()) if values.element_size() > 1 else False


# ---- Memory that tensors share -----------------------------------------------------------------------------------------------


def place_of(tensor: torch.Tensor) -> Place:
    """A key that is equal for two tensors with one memory.

    They have the same address and properties.
    """
    mine = part_of(tensor)
    bits = mine.is_conj(), mine.is_neg()
    return mine.data_ptr(), mine.dtype, tuple(mine.shape), mine.stride(), str(mine.device), bits


def _reach(tensor: torch.Tensor) -> int:
    """Elements of memory from its first element to behind its last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


def _is_apart(tensor: torch.Tensor) -> bool:
    """True if no two elements share memory."""
    dims = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    reach, nested = 1, tensor.numel() > 0
    for step, count in dims:
        nested = nested and step >= reach
        reach += (count - 1) * step
    if nested or not tensor.numel():
        return True
    if any(step == 0 for step, _ in dims):
        return False
    marks = np.zeros(reach, np.bool_)
    _seen(marks, tensor, 0, tensor.element_size())[...] = True
    return int(marks.sum()) == tensor.numel()


def _seen(marks: NDArray[np.bool_], tensor: torch.Tensor, at: int, unit: int) -> NDArray[np.bool_]:
    """A tensor's memory among units of `unit` bytes.

    Its first unit has the number `at`.
    """
    count = tensor.element_size() // unit
    steps = (*(step * count for step in tensor.stride()), 1)
    return np.ndarray((*tensor.shape, count), np.bool_, marks, at, steps)


@frozen(eq=False)
class _Span:
    """A tensor with its first address and the one after its last."""

    low: int
    end: int
    name: str
    tensor: torch.Tensor
    is_read: bool

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, is_read: bool) -> _Span:
        mine = plain(tensor)
        low = mine.data_ptr()
        return cls(low, low + _reach(mine) * mine.element_size(), name, mine, is_read)


def overlap(
    goals: Iterable[tuple[str, torch.Tensor]], read: Iterable[tuple[str, torch.Tensor]] = ()
) -> tuple[str, str] | None:
    """Names of a tensor to fill and of another that shares bytes.

    The other is filled or read. None: there are no such.
    """
    spans = [_Span.of(name, tensor, False) for name, tensor in goals]
    spans += [_Span.of(name, tensor, True) for name, tensor in read]
    by_device: dict[torch.device, list[_Span]] = {}
    for span in spans:
        if span.low < span.end:
            by_device.setdefault(span.tensor.device, []).append(span)
    for some in by_device.values():
        for cluster in _clusters(sorted(some, key=lambda one: one.low)):
            if (pair := _meeting(cluster)) is not None:
                return pair
    return None


def _clusters(some: list[_Span]) -> Iterator[list[_Span]]:
    """Runs of tensors between whose first and last bytes others are."""
    cluster: list[_Span] = []
    end = 0
    for one in some:
        if cluster and one.low >= end:
            yield cluster
            cluster = []
        cluster.append(one)
        end = max(end, one.end)
    if cluster:
        yield cluster


def _meeting(cluster: list[_Span]) -> tuple[str, str] | None:
    """Two of a cluster that share a byte; first the filled one."""
    if len(cluster) == 1 or all(one.is_read for one in cluster):
        return None
    base, end = cluster[0].low, max(one.end for one in cluster)
    unit = gcd(*(n for one in cluster for n in (one.low - base, one.tensor.element_size())))
    filled, marks = (np.zeros((end - base) // unit, np.bool_) for _ in range(2))
    done: list[_Span] = []
    for one in sorted(cluster, key=lambda one: one.is_read):
        at = (one.low - base) // unit
        mine = _seen(filled, one.tensor, at, unit)
        if mine.any():
            here = _seen(marks, one.tensor, at, unit)
            for other in done:
                marks[:] = False
                _seen(marks, other.tensor, (other.low - base) // unit, unit)[...] = True
                if here.any():
                    return other.name, one.name
        if not one.is_read:
            done.append(one)
            mine[...] = True
    return None
