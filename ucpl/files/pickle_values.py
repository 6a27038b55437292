"""Inert values from a pickle's calls: one function for each known name.

Each checks its arguments. Unknown names stay a `PickledCall` or a `Global`; nothing is imported or called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NoReturn

from attrs import evolve

from ucpl.extents import BY_TORCH, DTYPES, Global, PickledCall, Size, StorageRef, TensorRef, TorchDType
from ucpl.files.inert import (
    BYTEARRAY,
    BYTES,
    COMPLEX,
    ENCODE,
    FROZENSET,
    GETATTR,
    MODULE_READ,
    ORDERED_DICT,
    PARAMETER,
    REBUILD_FROM_TYPE_V2,
    REBUILD_PARAMETER,
    REBUILD_PARAMETER_WITH_STATE,
    REBUILD_TENSOR,
    REBUILD_TENSOR_V2,
    REBUILD_TENSOR_V3,
    SET,
    SIZE,
    SLICE,
    STORAGE_DTYPES,
    TENSOR,
    Bad,
    is_dims,
    is_name,
    kind_of,
)
from ucpl.files.pickle_runs import Run
from ucpl.records import frozen

Args = tuple[object, ...]  # arguments of a pickle's call

KEY_PARTS_MAX = 64  # parts of one tuple that is a key, nested ones included


@frozen
class Build:
    """The results of one load, and its remaining budget of copied elements."""

    storages: list[StorageRef]
    tensors: list[TensorRef]
    copies: list[int]

    def spend(self, elements: int) -> None:
        self.copies[0] -= elements
        if self.copies[0] < 0:
            raise Bad("E425", "copies its own parts again and again")


# ---- from arguments to values: one function per known name; args is a tuple -----------------------------------------


def _wrong(what: str) -> NoReturn:
    raise Bad("E427", f"wrong arguments for {what}")


def _is_hooks(value: object) -> bool:
    return value is None or (type(value) in (dict, OrderedDict) and not value)


def _tensor(build: Build, storage: object, geometry: Args) -> TensorRef:
    """`geometry`: offset, shape, stride and requires_grad."""
    offset, shape, stride, requires_grad = geometry
    if not (
        type(storage) is StorageRef
        and type(offset) is int
        and -(1 << 63) <= offset < 1 << 63
        and is_dims(shape)
        and is_dims(stride)
        and len(shape) == len(stride)
        and type(requires_grad) is bool
    ):
        _wrong("a tensor")
    made = TensorRef(storage, offset, tuple(shape), tuple(stride), requires_grad)
    build.tensors.append(made)
    return made


def _make_tensor(build: Build, args: Args) -> object:
    if len(args) != 4:
        _wrong("a tensor")
    return _tensor(build, args[0], (*args[1:], False))


def _make_tensor_v2(build: Build, args: Args) -> object:
    if not 5 <= len(args) <= 7:
        _wrong("a tensor")
    if (len(args) > 5 and not _is_hooks(args[5])) or (len(args) > 6 and args[6]):
        return PickledCall(REBUILD_TENSOR_V2, args)  # a conjugate or negated view, or hooks: kept, not read as a tensor
    return _tensor(build, args[0], args[1:5])


def _make_tensor_v3(build: Build, args: Args) -> object:
    if not 7 <= len(args) <= 8 or type(args[0]) is not StorageRef or type(args[6]) is not TorchDType:
        _wrong("a tensor")
    if not _is_hooks(args[5]) or (len(args) > 7 and args[7]):
        return PickledCall(REBUILD_TENSOR_V3, args)
    raw, dtype = args[0], DTYPES[args[6].name]
    nbytes = raw.numel * DTYPES[raw.dtype].itemsize
    if nbytes % dtype.itemsize:
        _wrong(f"a tensor of {dtype.name} in a storage of {nbytes} bytes")
    storage = StorageRef(raw.name, dtype.name, nbytes // dtype.itemsize, raw.location)
    return _tensor(build, storage, args[1:5])


def _make_parameter(build: Build, args: Args) -> object:
    if len(args) not in (3, 4) or type(args[1]) is not bool or not _is_hooks(args[2]):
        _wrong("a parameter")
    if type(args[0]) is not TensorRef:
        return PickledCall(REBUILD_PARAMETER if len(args) == 3 else REBUILD_PARAMETER_WITH_STATE, args)
    attributes = args[3] if len(args) == 4 and args[3] else args[0].attributes
    made = evolve(args[0], requires_grad=args[1], parameter=True, attributes=attributes)
    build.tensors.append(made)
    return made


def _make_from_type(build: Build, args: Args) -> object:
    """`_rebuild_from_type_v2(function, type, args, state)`: a tensor with Python attributes."""
    if len(args) != 4:
        _wrong("a tensor with attributes")
    function, kind, inner, state = args
    if type(inner) is not tuple:
        _wrong("a tensor with attributes")
    make = _TENSOR_MAKERS.get(function) if type(function) is Global else None
    if make is None or kind not in (TENSOR, PARAMETER):
        return PickledCall(REBUILD_FROM_TYPE_V2, args)
    made = make(build, inner)
    if type(made) is not TensorRef or made.parameter != (kind == PARAMETER):
        return PickledCall(REBUILD_FROM_TYPE_V2, args)
    return evolve(made, attributes=state) if state else made


def _make_ordered_dict(build: Build, args: Args) -> object:
    made: OrderedDict[object, object] = OrderedDict()
    if not args:
        return made
    (items,) = args if len(args) == 1 else (None,)
    if type(items) is dict or type(items) is OrderedDict:
        build.spend(len(items))
        made.update(items)
        return made
    if not (type(items) is list or type(items) is tuple):
        _wrong("an OrderedDict")
    build.spend(len(items))
    for pair in items:
        if not (type(pair) is list or type(pair) is tuple) or len(pair) != 2:
            _wrong("an OrderedDict")
        check_key(pair[0])
        made[pair[0]] = pair[1]
    return made


def _make_size(build: Build, args: Args) -> object:
    if not args:
        return Size()
    if len(args) != 1 or not is_dims(args[0]):
        _wrong("a torch.Size")
    return Size(args[0])


def _members(build: Build, args: Args, what: str) -> Iterable[object]:
    if not args:
        return ()
    (members,) = args if len(args) == 1 else (None,)
    if type(members) is list or type(members) is tuple or type(members) is set or type(members) is frozenset:
        build.spend(len(members))
        for member in members:
            check_key(member)
        return members
    _wrong(what)


def _make_set(build: Build, args: Args) -> object:
    return set(_members(build, args, "a set"))


def _make_frozenset(build: Build, args: Args) -> object:
    return frozenset(_members(build, args, "a frozenset"))


def _make_complex(build: Build, args: Args) -> object:
    parts = [part for part in args if type(part) is float or (type(part) is int and abs(part) < 1 << 1000)]
    if not len(parts) == len(args) <= 2:
        _wrong("a complex number")
    return complex(*parts)


def _make_slice(build: Build, args: Args) -> object:
    if not 1 <= len(args) <= 3 or not all(part is None or type(part) is int for part in args):
        _wrong("a slice")
    return slice(*args)


def _encoded(build: Build, args: Args, what: str) -> bytes:
    """Bytes in protocol 2's form: text of code points 0 to 255."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        _wrong(what)
    build.spend(len(args[0]))
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        _wrong(what)


def _make_encoded(build: Build, args: Args) -> object:
    return _encoded(build, args, "bytes")


def _make_bytes(build: Build, args: Args) -> object:
    if args:
        _wrong("bytes")  # bytes(n) would allocate
    return b""


def _make_bytearray(build: Build, args: Args) -> object:
    if not args:
        return bytearray()
    if len(args) == 1 and type(args[0]) is bytes:
        build.spend(len(args[0]))
        return bytearray(args[0])
    return bytearray(_encoded(build, args, "a bytearray"))


def _make_attribute(build: Build, args: Args) -> object:
    """`getattr(Outer, "Inner")`, protocol 2's form of a nested class.

    Only the name is made.
    """
    if len(args) == 2 and type(args[0]) is Global and type(args[1]) is str and args[1].isidentifier():
        return Global(args[0].module, f"{args[0].name}.{args[1]}")
    return PickledCall(GETATTR, args)


_Maker = Callable[[Build, Args], object]

_TENSOR_MAKERS: dict[Global, _Maker] = {
    REBUILD_TENSOR: _make_tensor,
    REBUILD_TENSOR_V2: _make_tensor_v2,
    REBUILD_TENSOR_V3: _make_tensor_v3,
    REBUILD_PARAMETER: _make_parameter,
}
_MAKERS: dict[Global, _Maker] = {
    **_TENSOR_MAKERS,
    REBUILD_PARAMETER_WITH_STATE: _make_parameter,
    REBUILD_FROM_TYPE_V2: _make_from_type,
    ORDERED_DICT: _make_ordered_dict,
    SIZE: _make_size,
    SET: _make_set,
    FROZENSET: _make_frozenset,
    COMPLEX: _make_complex,
    SLICE: _make_slice,
    ENCODE: _make_encoded,
    BYTES: _make_bytes,
    BYTEARRAY: _make_bytearray,
    GETATTR: _make_attribute,
}
# Looked up by identity: the records here are the only ones that name these (see record_of).
MAKER_OF_ID: dict[int, _Maker] = {id(known): make for known, make in _MAKERS.items()}
_INTERNED: dict[tuple[str, str], Global | TorchDType] = {
    **{(known.module, known.name): known for known in chain(_MAKERS, STORAGE_DTYPES, (TENSOR, PARAMETER))},
    **{("torch", dtype.torch): TorchDType(dtype.name) for dtype in BY_TORCH.values()},
}


def record_of(module: str, name: str) -> Global | TorchDType:
    """The record of a name that can be written back.

    A name is identifiers joined by dots.
    """
    module = MODULE_READ.get(module, module)
    known = _INTERNED.get((module, name))
    if known is not None:
        return known
    if not is_name(module) or not is_name(name):
        raise Bad("E426", f"refers to {ascii(module)[:80]} {ascii(name)[:80]}, which is no name")
    return Global(module, name)


_PLAIN_KEYS = frozenset(
    {str, float, bool, type(None), bytes, complex, Global, TorchDType, PickledCall, StorageRef, TensorRef, Run}
)


def is_key(value: object) -> bool:
    """Test whether a value can be a key, without hashing it."""
    parts, seen = [value], 0
    while parts:
        part = parts.pop()
        seen += 1
        if (type(part) is tuple or type(part) is Size or type(part) is frozenset) and len(part) <= KEY_PARTS_MAX:
            parts.extend(part)
        elif type(part) is not int and type(part) not in _PLAIN_KEYS:
            return False
        if seen > KEY_PARTS_MAX:
            return False
    return True


def check_key(key: object) -> None:
    """Check that a key can be hashed quickly and without deep recursion."""
    if type(key) in _PLAIN_KEYS or (type(key) is int and -(1 << 64) < key < 1 << 64):
        return
    parts = [key]
    for n in range(KEY_PARTS_MAX):
        if not parts:
            return
        part = parts.pop()
        if type(part) is int:
            if not -(1 << 64) < part < 1 << 64:  # far larger ones are made to collide
                raise Bad("E423", "uses a number of more than 64 bits as a key")
        elif type(part) is tuple or type(part) is Size or type(part) is frozenset:
            if len(part) > KEY_PARTS_MAX - n:
                break
            parts.extend(part)
        elif type(part) not in _PLAIN_KEYS:
            raise Bad("E423", f"uses a {type(part).__name__} as a key")
    if parts:
        raise Bad("E423", f"uses a tuple of more than {KEY_PARTS_MAX} parts as a key")


def storage_of(pid: object) -> StorageRef:
    """The storage of a persistent id of torch.

    It is ("storage", class, key, location, elements); before torch 1.6 a None follows, if it is no view of another
    storage.
    """
    if type(pid) is tuple and len(pid) == 6 and pid[5] is None:
        pid = pid[:5]
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise Bad("E427", "refers to an outside object that is no storage")
    _, kind, name, location, numel = pid
    dtype = STORAGE_DTYPES.get(kind) if type(kind) is Global else None
    if dtype is None:
        raise Bad("E427", f"has a storage of the unknown class {kind_of(kind)}")
    if type(name) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < 1 << 60:
        raise Bad("E427", "has a storage with a wrong name, place or length")
    return StorageRef(name, dtype, numel, location)
