"""The pickle writer: a value tree to the bytes of torch.save.

Framework classes are written by name only. Protocol 2. Without recursion, and the same bytes for equal trees in every
process. Its law is in pickles.
"""

from __future__ import annotations

import gc
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Global, PickledCall, Size, StorageRef, TensorRef, TorchDType
from ucpl.files.inert import (
    BYTEARRAY,
    COMPLEX,
    ENCODE,
    FROZENSET,
    GETATTR,
    LEAVES,
    MODULE_WRITTEN,
    NUMBER_BYTES_MAX,
    ORDERED_DICT,
    PICKLE_BYTES_MAX,
    REBUILD_FROM_TYPE_V2,
    REBUILD_PARAMETER,
    REBUILD_PARAMETER_WITH_STATE,
    REBUILD_TENSOR_V2,
    REBUILD_TENSOR_V3,
    SET,
    SIZE,
    SLICE,
    TENSOR,
    UNTYPED_STORAGE,
    Bad,
    attributes_of,
    check_nesting,
    is_dims,
    is_foreign,
    is_name,
    kind_of,
    walk,
)
from ucpl.records import frozen

__all__ = ["dump_pickle", "dumps"]

_STORAGE_NAMES = {dtype.name: Global("torch", dtype.storage) for dtype in DTYPES.values() if dtype.storage}
_LEAVES = LEAVES - {bytearray}  # which stays shared, as lists do
_JOINED = 10_000  # instructions that are joined: each alone takes 40 bytes
_BATCH = 1000  # items between one MARK and its APPENDS or SETITEMS, as Python's pickler does


def dumps(value: object) -> bytes:
    """The pickle of a value tree, of protocol 2 as in torch.save.

    Equal trees give equal bytes. Lists, dicts, objects and tensors that are shared stay shared; texts and names are
    shared if they are equal.

    Raises: UcplError E440 for an object that a pickle cannot hold.
    """
    return dump_pickle(value)[0]


def dump_pickle(value: object) -> tuple[bytes, tuple[StorageRef, ...]]:
    """As `dumps`, with the storages of the pickle in order (each once)."""
    collecting = gc.isenabled()  # nothing that is made here is garbage
    gc.disable()
    try:
        check_nesting(value, "the value", "E440")
        writer = _Writer()
        writer.write(value)
    except Bad as bad:
        where = next(("/".join(map(str, key)) for key, part in walk(value) if is_foreign(part)), "")
        fail(bad.code, bad.message + (f" (it is at {where})" if where else ""), Label("the value", where=where))
    finally:
        if collecting:
            gc.enable()
    return b"".join((*writer.done, *writer.out)), tuple(writer.storages)


class _Op(bytes):
    """Instructions among values that are still to be written."""

    __slots__ = ()


@frozen
class _Then:
    """The remaining work once the parts of a container are written."""

    do: Callable[[], None]


@frozen(eq=False)
class _Writer:
    """A writer without recursion: `todo` holds the remaining work, last first."""

    out: list[bytes] = field(factory=list)  # the last instructions
    done: list[bytes] = field(factory=list)  # those before, joined
    storages: dict[StorageRef, None] = field(factory=dict)
    _memo: dict[Hashable, int] = field(factory=dict)  # a text or name, or the id of a container -> its number
    _todo: list[object] = field(factory=list)
    _dims: dict[tuple[int, ...], bytes] = field(factory=dict)
    _quick: dict[int, bytes] = field(factory=dict)  # id of a name of this module -> the instruction that gets it

    def write(self, root: object) -> None:
        todo, out = self._todo, self.out
        out.append(b"\x80\x02")
        todo.append(root)
        size = 0
        while todo:
            item = todo.pop()
            if type(item) is _Op:
                out.append(item)
            elif type(item) is _Then:
                item.do()
            else:
                self._value(item)
            if len(out) > _JOINED:
                self.done.append(b"".join(out))
                out.clear()
                size += len(self.done[-1])
                if size > PICKLE_BYTES_MAX:
                    raise Bad("E440", f"a value of more than {PICKLE_BYTES_MAX} bytes cannot be written")
        out.append(b".")

    def _later(self, *items: object) -> None:
        """Write these next, in this order."""
        self._todo.extend(reversed(items))

    def _put(self, ident: Hashable) -> None:
        number = len(self._memo)
        self._memo[ident] = number
        self.out.append(b"q%c" % number if number < 256 else b"r" + number.to_bytes(4, "little"))

    def _get(self, number: int) -> None:
        self.out.append(b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little"))

    def _made(self, value: object, *more: object) -> _Then:
        """Number `value` behind its instruction, then write `more` into it.

        If it already has a number, one of its own parts refers to it and has written it: then this one is dropped.
        """

        def do() -> None:
            number = self._memo.get(id(value))
            if number is not None:
                self.out.append(b"0")
                self._get(number)
            else:
                self._put(id(value))
                self._later(*more)

        return _Then(do)

    # -- leaves

    def _text(self, text: str) -> None:
        number = self._memo.get(text)
        if number is not None:
            self._get(number)
        else:
            self.out.append(_raw_text(text))
            self._put(text)

    def _name(self, name: Global) -> None:
        number = self._memo.get(name)
        if number is not None:
            self._get(number)
            return
        if not (is_name(name.module) and is_name(name.name)):
            raise Bad("E440", f"the name {name.module!a} {name.name!a} cannot be written")
        outer, _, inner = name.name.rpartition(".")
        if outer:  # protocol 2 has no dotted names
            self._name(GETATTR)
            self._name(Global(name.module, outer))
            self._text(inner)
            self.out.append(b"\x86R")
        else:
            module = MODULE_WRITTEN.get(name.module, name.module)
            self.out.append(f"c{module}\n{name.name}\n".encode())
        self._put(name)

    def _known(self, name: Global) -> None:
        """As `_name`, for the names that this module keeps.

        Hashing records is slow.
        """
        quick = self._quick.get(id(name))
        if quick is not None:
            self.out.append(quick)
            return
        self._name(name)
        number = self._memo[name]
        self._quick[id(name)] = b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")

    def _encoded(self, function: Global, data: bytes, codec: str) -> None:
        self._name(function)
        self.out.append(_raw_text(data.decode("latin-1")))
        self._text(codec)
        self.out.append(b"\x86R")

    def _dtype(self, name: str) -> None:
        self._name(Global("torch", DTYPES[name].torch))

    def _tuple_of_ints(self, dims: tuple[int, ...]) -> bytes:
        found = self._dims.get(dims)
        if found is None:
            if not is_dims(dims):
                raise Bad("E440", f"the dimensions {dims!r} cannot be written")
            ints = b"".join(map(_number, dims))
            ends = (b")", b"\x85", b"\x86", b"\x87")
            found = ints + ends[len(dims)] if len(dims) <= 3 else b"(" + ints + b"t"
            self._dims[dims] = found
        return found

    def _storage(self, storage: StorageRef) -> None:
        """The persistent id of a storage."""
        self.storages[storage] = None
        dtype = DTYPES[storage.dtype]
        self.out.append(b"(")
        self._text("storage")
        if dtype.storage is None:
            self._known(UNTYPED_STORAGE)
            numel = storage.numel * dtype.itemsize
        else:
            self._known(_STORAGE_NAMES[storage.dtype])
            numel = storage.numel
        self._text(storage.name)
        self._text(storage.location)
        self.out.append(_number(numel) + b"tQ")

    # -- all values

    def _value(self, value: object) -> None:
        if type(value) is str:
            self._text(value)
        elif type(value) is int:
            self.out.append(_number(value))
        elif type(value) is float:
            self.out.append(struct.pack(">cd", b"G", value))
        elif value is None:
            self.out.append(b"N")
        elif type(value) is bool:
            self.out.append(b"\x88" if value else b"\x89")
        elif type(value) is tuple and not value:
            self.out.append(b")")
        elif type(value) in _LEAVES:
            self._leaf(value)
        elif (number := self._memo.get(id(value))) is not None:
            self._get(number)
        else:
            self._container(value)

    def _leaf(self, value: object) -> None:
        """Values without other values, except the most frequent kinds."""
        if type(value) is TorchDType:
            self._dtype(value.name)
        elif type(value) is Global:
            self._name(value)
        elif type(value) is Size:
            self._known(SIZE)
            self.out.append(self._tuple_of_ints(tuple(value)) + b"\x85R")
        elif type(value) is StorageRef:
            if DTYPES[value.dtype].storage is None:
                raise Bad("E440", f"a storage of {value.dtype} without a tensor cannot be written")
            self._storage(value)
        elif type(value) is bytes:
            self._encoded(ENCODE, value, "latin1")
        elif type(value) is complex:
            self._name(COMPLEX)
            self.out.append(struct.pack(">cdcd", b"G", value.real, b"G", value.imag) + b"\x86R")
        elif type(value) is slice:
            self._name(SLICE)
            self._later(value.start, value.stop, value.step, _Op(b"\x87R"))

    def _container(self, value: object) -> None:
        if type(value) is TensorRef:
            self._tensor(value)
        elif type(value) is dict:
            self.out.append(b"}")
            self._put(id(value))
            self._later(*_batches_of_pairs(list(value.items())))
        elif type(value) is list:
            self.out.append(b"]")
            self._put(id(value))
            self._later(*_batches(value))
        elif type(value) is tuple:
            if len(value) <= 3:
                end = _Op((b"\x85", b"\x86", b"\x87")[len(value) - 1])
                self._later(*value, end, self._made(value))
            else:
                self._later(_Op(b"("), *value, _Op(b"t"), self._made(value))
        elif type(value) is OrderedDict:
            self._known(ORDERED_DICT)
            self.out.append(b")R")
            self._put(id(value))
            attributes = attributes_of(value)
            state = () if attributes is None else (attributes, _Op(b"b"))
            self._later(*_batches_of_pairs(list(value.items())), *state)
        elif type(value) is PickledCall:
            self._call(value)
        elif type(value) is set or type(value) is frozenset:
            self._name(SET if type(value) is set else FROZENSET)
            members = sorted(value, key=_rank)
            self._later(_Op(b"]"), *_batches(members), _Op(b"\x85R"), self._made(value))
        elif type(value) is bytearray:
            self._encoded(BYTEARRAY, bytes(value), "latin-1")
            self._put(id(value))
        else:
            kind = type(value)
            raise Bad("E440", f"a {kind.__module__}.{kind.__qualname__} cannot be written")

    def _call(self, value: PickledCall) -> None:
        if value.kwargs and not value.new:
            raise Bad("E440", "a call with named arguments cannot be written, only an object that is made with them")
        if type(value.args) is not tuple:
            raise Bad("E440", f"a call with {kind_of(value.args)} for arguments cannot be written")
        make: tuple[object, ...] = (_Op(b"R"),)
        if value.new:
            make = (value.kwargs, _Op(b"\x92")) if value.kwargs else (_Op(b"\x81"),)
        more: list[object] = [*_batches(value.list_items), *_batches_of_pairs(value.dict_items)]
        if value.state is not None:
            more += (value.state, _Op(b"b"))
        self._later(value.function, value.args, *make, self._made(value, *more))

    def _tensor(self, tensor: TensorRef) -> None:
        if tensor.attributes is None:
            if tensor.parameter:
                self._known(REBUILD_PARAMETER)
                self._geometry(tensor, False)
                self._flag_and_hooks(tensor)
                self.out.append(b"\x87R")
            else:
                self._geometry(tensor, tensor.requires_grad)
            self._put(id(tensor))
        elif tensor.parameter:
            self._known(REBUILD_PARAMETER_WITH_STATE)
            self.out.append(b"(")
            self._geometry(tensor, False)
            self._flag_and_hooks(tensor)
            self._later(tensor.attributes, _Op(b"tR"), self._made(tensor))
        else:
            self._known(REBUILD_FROM_TYPE_V2)
            self.out.append(b"(")
            self._geometry(tensor, tensor.requires_grad, TENSOR)
            self._later(tensor.attributes, _Op(b"tR"), self._made(tensor))

    def _flag_and_hooks(self, tensor: TensorRef) -> None:
        self.out.append(b"\x88" if tensor.requires_grad else b"\x89")
        self._known(ORDERED_DICT)
        self.out.append(b")R")

    def _geometry(self, tensor: TensorRef, requires_grad: bool, kind: Global | None = None) -> None:
        """The call of _rebuild_tensor_v2, or v3 for dtypes without a storage class.

        With `kind`: function, kind and arguments.
        """
        dtype = DTYPES[tensor.storage.dtype]
        self._known(REBUILD_TENSOR_V2 if dtype.storage else REBUILD_TENSOR_V3)
        if kind is not None:
            self._name(kind)
        self.out.append(b"(")
        self._storage(tensor.storage)
        dims = self._tuple_of_ints(tensor.shape) + self._tuple_of_ints(tensor.stride)
        self.out.append(_number(tensor.offset) + dims + (b"\x88" if requires_grad else b"\x89"))
        self._known(ORDERED_DICT)
        self.out.append(b")R")
        if dtype.storage is None:
            self._dtype(dtype.name)
        self.out.append(b"t" if kind is not None else b"tR")


def _batches(items: Sequence[object]) -> list[object]:
    """A list's items with the instructions that append them."""
    if len(items) == 1:
        return [items[0], _Op(b"a")]
    found: list[object] = []
    for start in range(0, len(items), _BATCH):
        found += (_Op(b"("), *items[start : start + _BATCH], _Op(b"e"))
    return found


def _batches_of_pairs(pairs: Sequence[tuple[object, object]]) -> list[object]:
    """A dict's items with the instructions that set them."""
    if len(pairs) == 1:
        return [*pairs[0], _Op(b"s")]
    found: list[object] = []
    for start in range(0, len(pairs), _BATCH):
        found += (_Op(b"("), *chain.from_iterable(pairs[start : start + _BATCH]), _Op(b"u"))
    return found


def _number(value: int) -> bytes:
    if 0 <= value <= 0xFF:
        return b"K%c" % value
    if 0 <= value <= 0xFFFF:
        return b"M" + value.to_bytes(2, "little")
    if -0x80000000 <= value <= 0x7FFFFFFF:
        return b"J" + value.to_bytes(4, "little", signed=True)
    if value.bit_length() // 8 >= NUMBER_BYTES_MAX:
        raise Bad("E440", f"a number of {value.bit_length() // 8 + 1} bytes cannot be written")
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a%c" % len(raw) + raw
    return b"\x8b" + len(raw).to_bytes(4, "little") + raw


def _raw_text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) > 0xFFFFFFFF:
        raise Bad("E440", "a text of more than 4 GiB cannot be written")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _rank(member: object) -> tuple[str, str]:
    """A sort key of members that is equal in every process."""
    if type(member) is PickledCall:
        return "Call", str(_rank(member.function))
    if type(member) is tuple:
        return "tuple", str([_rank(part) for part in member])
    if type(member) is frozenset:
        return "frozenset", str(sorted(_rank(part) for part in member))
    if type(member) is int:
        return "int", f"{member:+025d}"
    return type(member).__name__, repr(member)
