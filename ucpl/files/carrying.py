"""Values that are copied between checkpoints, with the tensors in them.

A value tree names storages by their name within one file. While it is carried, a storage's name also has its file, so
that values of several files may stand side by side; the store that writes a target gives them names of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeVar, overload

from attrs import evolve

from ucpl.extents import Extent, Global, Joined, Key, PickledCall, StorageRef, TensorRef, key_text
from ucpl.files.checkpoint import Carried, Checkpoint
from ucpl.files.inert import LEAVES
from ucpl.files.pickles import attributes_of, set_attributes

K = TypeVar("K")
_Change = Callable[[TensorRef], object]
_Memo = dict[int, tuple[object, object]]  # by id: the changed copy of a value, and the value, which keeps its id taken
_Pieces = tuple[tuple[tuple[int, ...], Extent], ...]
_JOINT = "\0"  # in no file's name, and in no member's that a zip archive is read with


@overload
def mapped(value: dict[K, object], change: _Change, memo: _Memo | None = None) -> dict[K, object]: ...
@overload
def mapped(value: Global | PickledCall, change: _Change, memo: _Memo | None = None) -> Global | PickledCall: ...
@overload
def mapped(value: object, change: _Change, memo: _Memo | None = None) -> object: ...
def mapped(value: object, change: _Change, memo: _Memo | None = None) -> object:
    """A copy of a value tree with every tensor changed.

    Containers that are shared stay shared, cycles stay cycles.
    """
    memo = {} if memo is None else memo
    if type(value) in LEAVES:
        return value
    if type(value) is TensorRef:
        made = change(value)
        if type(made) is TensorRef and made.attributes is not None:
            made = evolve(made, attributes=mapped(made.attributes, change, memo))
        return made
    if id(value) in memo:
        return memo[id(value)][0]
    if type(value) is list:
        listed: list[object] = []
        memo[id(value)] = (listed, value)
        listed.extend(mapped(item, change, memo) for item in value)
        return listed
    if type(value) is dict or type(value) is OrderedDict:
        return _mapped_dict(value, change, memo)
    if type(value) is PickledCall:
        return _mapped_call(value, change, memo)
    if type(value) is tuple or type(value) is set or type(value) is frozenset:
        made_other = type(value)(mapped(item, change, memo) for item in value)
        memo[id(value)] = (made_other, value)
        return made_other
    return value


def _mapped_dict(value: dict[object, object], change: _Change, memo: _Memo) -> dict[object, object]:
    made: dict[object, object] = OrderedDict() if type(value) is OrderedDict else {}
    memo[id(value)] = (made, value)
    for key, item in value.items():
        made[mapped(key, change, memo)] = mapped(item, change, memo)
    if isinstance(value, OrderedDict) and isinstance(made, OrderedDict) and (found := attributes_of(value)) is not None:
        set_attributes(made, mapped(found, change, memo))
    return made


def _mapped_call(value: PickledCall, change: _Change, memo: _Memo) -> PickledCall:
    call = PickledCall(value.function, new=value.new)
    memo[id(value)] = (call, value)
    call.function = mapped(value.function, change, memo)
    call.args = tuple(mapped(item, change, memo) for item in value.args)
    call.kwargs = {key: mapped(item, change, memo) for key, item in value.kwargs.items()}
    call.state = mapped(value.state, change, memo)
    call.list_items = [mapped(item, change, memo) for item in value.list_items]
    call.dict_items = [(mapped(k, change, memo), mapped(v, change, memo)) for k, v in value.dict_items]
    return call


def lifted(value: object, file: str) -> object:
    """A value of one file for carrying.

    Storages are named by file and name.
    """
    return mapped(value, lambda t: evolve(t, storage=evolve(t.storage, name=f"{file}{_JOINT}{t.storage.name}")))


def origin_of(name: str) -> tuple[str, str]:
    """(file, storage) of the name of a lifted storage.

    The file is empty if it was not lifted.
    """
    file, _, storage = name.rpartition(_JOINT)
    return file, storage


Place = tuple[str, str, int, tuple[int, ...], tuple[int, ...], str]  # file, storage, offset, shape, stride, dtype


def by_place(extents: Iterable[Extent]) -> dict[Place, Extent]:
    """Extents by the fields that a TensorRef has."""
    return {(e.file, e.storage, e.offset, e.shape, e.stride, e.dtype): e for e in extents}


def marks_of(checkpoint: Checkpoint) -> Callable[[object], object]:
    """A key of values of a checkpoint, for comparison.

    Tensors are compared by their bytes' CRC, or by their place if the file has no CRC.
    """
    return marks_among(checkpoint.carried_extents.values())


def marks_among(known: Iterable[Extent]) -> Callable[[object], object]:
    """The same for values whose tensors are among these."""
    extents = by_place(known)

    def mark(value: object, above: tuple[int, ...] = ()) -> object:
        if type(value) is TensorRef:
            file, name = origin_of(value.storage.name)
            extent = extents.get((file, name, value.offset, value.shape, value.stride, value.storage.dtype))
            bytes_ = (
                (extent.crc, extent.storage_bytes) if extent is not None and extent.crc is not None else (file, name)
            )
            return "tensor", value.storage.dtype, value.shape, value.stride, value.offset, bytes_
        if id(value) in above:
            return "cycle", len(above) - above.index(id(value))
        inner = (*above, id(value))
        if isinstance(value, dict):
            return "dict", tuple((mark(k, inner), mark(v, inner)) for k, v in value.items())
        if isinstance(value, list | tuple):
            return type(value).__name__, tuple(mark(v, inner) for v in value)
        if isinstance(value, set | frozenset):
            return "set", frozenset(mark(v, inner) for v in value)
        if type(value) is PickledCall:
            parts = (value.function, value.args, value.kwargs, value.state, value.list_items, value.dict_items)
            return "call", tuple(mark(v, inner) for v in parts)
        return type(value).__name__, repr(value)

    return mark


def unlike_callers(checkpoint: Checkpoint) -> dict[int, tuple[object, ...]]:
    """Keys of client_state that differ from the first rank's, by rank."""
    of = checkpoint.state.parallel.carried_by_rank.of
    if len(of) < 2:
        return {}
    marks = marks_of(checkpoint)
    first = {key: marks(value) for key, value in of[0].items()}
    found = {
        rank: tuple(key for key, value in mine.items() if key not in first or marks(value) != first[key])
        for rank, mine in enumerate(of[1:], 1)
    }
    return {rank: keys for rank, keys in found.items() if keys}


class Storages:
    """Names for storages of one target file: "0", "1", ...

    They are given while its value tree is built. `extents` are the source's carried tensors, by place.
    """

    def __init__(self, extents: dict[Place, Extent]) -> None:
        self._extents = extents
        self._count = 0
        self._settled: dict[Place, TensorRef] = {}
        self._empty: dict[str, StorageRef] = {}
        self.carried: list[Carried] = []

    def fresh(self) -> str:
        self._count += 1
        return str(self._count - 1)

    def tensor(self, dtype: str, shape: tuple[int, ...], requires_grad: bool = False) -> TensorRef:
        """A contiguous tensor that fills a new storage."""
        numel = 1
        for n in shape:
            numel *= n
        if numel == 0:
            return self.empty(dtype, shape)
        return TensorRef(StorageRef(self.fresh(), dtype, numel), 0, shape, strides(shape), requires_grad)

    def empty(self, dtype: str, shape: tuple[int, ...] = (0,), requires_grad: bool = False) -> TensorRef:
        """A tensor without elements; all of one dtype share an empty storage."""
        if dtype not in self._empty:
            self._empty[dtype] = StorageRef(self.fresh(), dtype, 0)
        return TensorRef(self._empty[dtype], 0, shape, strides(shape), requires_grad)

    def extent(self, extent: Extent) -> TensorRef:
        """A carried tensor, contiguous, in a new storage of its own."""
        if extent.numel == 0:
            return self.empty(extent.dtype, extent.shape)
        made = self.tensor(extent.dtype, extent.shape)
        self.carried.append(Carried(extent, made.storage.name))
        return made

    @overload
    def value(self, value: dict[K, object]) -> dict[K, object]: ...
    @overload
    def value(self, value: object) -> object: ...
    def value(self, value: object) -> object:
        """A carried value tree (see `lifted`) with storages of this file."""
        return mapped(value, self._settle)

    def _settle(self, tensor: TensorRef) -> TensorRef:
        file, name = origin_of(tensor.storage.name)
        if not file:
            return tensor  # already of this file
        place = (file, name, tensor.offset, tensor.shape, tensor.stride, tensor.storage.dtype)
        if place not in self._settled:  # a tensor that is met twice stays one
            self._settled[place] = self.extent(self._extents[place])
        made = self._settled[place]
        return evolve(
            made, requires_grad=tensor.requires_grad, parameter=tensor.parameter, attributes=tensor.attributes
        )


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    out: list[int] = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def joined(file: str, key: Key, dtype: str, shape: tuple[int, ...], pieces: _Pieces) -> Joined:
    """One tensor of stored pieces that cover it; each has its begin."""
    size = sum(extent.storage_bytes for _, extent in pieces)
    return Joined(file, key, dtype, shape, strides(shape), 0, f"joined:{key_text(key)}", 0, size, pieces=pieces)
