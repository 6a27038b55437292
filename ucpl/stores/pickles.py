"""Our own pickle machine: bytes to inert values and back. Nothing that a file names is ever imported or called.

A pickle is a program for a small stack machine. `pickle.load` runs it with the names it asks for; here a name is a
`Global`, a call is a `Call`, and only what torch writes for tensors, sizes, dtypes and plain containers becomes a value.
The law is `loads(dumps(value)) == value`, with shared and cyclic containers kept as they are.

Attributes of an OrderedDict (torch's `_metadata` of a state_dict) are kept beside it: `attributes_of`, `set_attributes`.

Not here: torch, storages' bytes (torch_files), and what the values mean.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NoReturn

from attrs import evolve, field, frozen

from ucpl.errors import Label, fail
from ucpl.extents import BY_STORAGE, BY_TORCH, DTYPES, Call, Global, Key, Size, Step, StorageRef, TensorRef, TorchDType

__all__ = [
    "Pickle",
    "attributes_of",
    "dump_pickle",
    "dumps",
    "load_pickle",
    "loads",
    "set_attributes",
    "unsafe_globals",
    "walk",
]

PICKLE_BYTES_MAX = 1 << 30  # a data.pkl of a million tensors has 100 MB
NESTING_MAX = 200  # levels
WALK_VALUES_MAX = 10_000_000  # values met on all paths
KEY_PARTS_MAX = 64  # parts of one tuple that is a key, nested ones included
DIMS_MAX = 64  # torch's own limit
INT_TEXT_MAX = 4000  # digits of a number written out as text (protocol 0)

_ATTRIBUTES = "ucpl_attributes"
# Python 2's names, which protocol 2 still uses. The others of pickle's table are of no use here.
_MODULE_READ = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_MODULE_WRITTEN = {new: old for old, new in _MODULE_READ.items()}


def attributes_of(mapping: OrderedDict[Any, Any]) -> dict[str, Any] | None:
    """The attributes that a file gave to an OrderedDict (BUILD), such as `{"_metadata": ...}`. None where it gave none."""
    found = vars(mapping).get(_ATTRIBUTES)
    return found if isinstance(found, dict) else None


def set_attributes(mapping: OrderedDict[Any, Any], attributes: dict[str, Any] | None) -> None:
    """Give an OrderedDict the attributes that it is written with. They lie under one name: a file cannot shadow a method."""
    vars(mapping).pop(_ATTRIBUTES, None)
    if attributes is not None:
        vars(mapping)[_ATTRIBUTES] = attributes


# ---- known names ---------------------------------------------------------------------------------------------------

_ORDERED_DICT = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")
_TENSOR = Global("torch", "Tensor")
_PARAMETER = Global("torch.nn.parameter", "Parameter")
_REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor")
_REBUILD_TENSOR_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_TENSOR_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_REBUILD_PARAMETER_WITH_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
_REBUILD_FROM_TYPE_V2 = Global("torch._tensor", "_rebuild_from_type_v2")
_ENCODE = Global("_codecs", "encode")
_BYTES = Global("builtins", "bytes")
_BYTEARRAY = Global("builtins", "bytearray")
_SET = Global("builtins", "set")
_FROZENSET = Global("builtins", "frozenset")
_COMPLEX = Global("builtins", "complex")
_SLICE = Global("builtins", "slice")
_GETATTR = Global("builtins", "getattr")
_UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")

_STORAGE_DTYPES: dict[Global, str] = {
    **{Global(module, name): dtype.name for name, dtype in BY_STORAGE.items() for module in ("torch", "torch.cuda")},
    _UNTYPED_STORAGE: "u8",
    Global("torch", "UntypedStorage"): "u8",
}


@frozen
class Pickle:
    """A pickle as read: its value, and every storage and tensor that it built, in the order of the file."""

    value: Any
    storages: tuple[StorageRef, ...]
    tensors: tuple[TensorRef, ...]


class _Bad(Exception):
    """Something wrong at the instruction at hand: the machine adds the file and the position."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@frozen
class _Build:
    """What one load has made so far, and how many elements it may still copy from one container to another."""

    storages: list[StorageRef]
    tensors: list[TensorRef]
    copies: list[int]

    def spend(self, elements: int) -> None:
        self.copies[0] -= elements
        if self.copies[0] < 0:
            raise _Bad("E425", "copies its own parts again and again")


# ---- from arguments to values: one function per known name; args is a tuple -----------------------------------------


def _wrong(what: str) -> NoReturn:
    raise _Bad("E427", f"wrong arguments for {what}")


def _is_dims(value: Any) -> bool:
    return (
        type(value) in (tuple, Size)
        and len(value) <= DIMS_MAX
        and all(type(n) is int and -(1 << 63) <= n < 1 << 63 for n in value)
    )


def _is_hooks(value: Any) -> bool:
    return value is None or (type(value) in (dict, OrderedDict) and not value)


def _tensor(build: _Build, storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any) -> TensorRef:
    if not (
        type(storage) is StorageRef
        and type(offset) is int
        and -(1 << 63) <= offset < 1 << 63
        and _is_dims(shape)
        and _is_dims(stride)
        and len(shape) == len(stride)
        and type(requires_grad) is bool
    ):
        _wrong("a tensor")
    made = TensorRef(storage, offset, tuple(shape), tuple(stride), requires_grad)
    build.tensors.append(made)
    return made


def _make_tensor(build: _Build, args: tuple[Any, ...]) -> Any:
    if len(args) != 4:
        _wrong("a tensor")
    return _tensor(build, *args, False)


def _make_tensor_v2(build: _Build, args: tuple[Any, ...]) -> Any:
    if not 5 <= len(args) <= 7:
        _wrong("a tensor")
    if (len(args) > 5 and not _is_hooks(args[5])) or (len(args) > 6 and args[6]):
        return Call(_REBUILD_TENSOR_V2, args)  # a conjugate or negated view, or hooks: kept, not read as a tensor
    return _tensor(build, *args[:5])


def _make_tensor_v3(build: _Build, args: tuple[Any, ...]) -> Any:
    if not 7 <= len(args) <= 8 or type(args[0]) is not StorageRef or type(args[6]) is not TorchDType:
        _wrong("a tensor")
    if not _is_hooks(args[5]) or (len(args) > 7 and args[7]):
        return Call(_REBUILD_TENSOR_V3, args)
    raw, dtype = args[0], DTYPES[args[6].name]
    nbytes = raw.numel * DTYPES[raw.dtype].itemsize
    if nbytes % dtype.itemsize:
        _wrong(f"a tensor of {dtype.name} in a storage of {nbytes} bytes")
    storage = StorageRef(raw.name, dtype.name, nbytes // dtype.itemsize, raw.location)
    return _tensor(build, storage, *args[1:5])


def _make_parameter(build: _Build, args: tuple[Any, ...]) -> Any:
    if len(args) not in (3, 4) or type(args[1]) is not bool or not _is_hooks(args[2]):
        _wrong("a parameter")
    if type(args[0]) is not TensorRef:
        return Call(_REBUILD_PARAMETER if len(args) == 3 else _REBUILD_PARAMETER_WITH_STATE, args)
    attributes = args[3] if len(args) == 4 and args[3] else args[0].attributes
    made = evolve(args[0], requires_grad=args[1], parameter=True, attributes=attributes)
    build.tensors.append(made)
    return made


def _make_from_type(build: _Build, args: tuple[Any, ...]) -> Any:
    """`_rebuild_from_type_v2(function, type, args, state)`: a tensor with Python attributes."""
    if len(args) != 4 or type(args[2]) is not tuple:
        _wrong("a tensor with attributes")
    function, kind, inner, state = args
    make = _TENSOR_MAKERS.get(function) if type(function) is Global else None
    if make is None or kind not in (_TENSOR, _PARAMETER):
        return Call(_REBUILD_FROM_TYPE_V2, args)
    made = make(build, inner)
    if type(made) is not TensorRef or made.parameter != (kind == _PARAMETER):
        return Call(_REBUILD_FROM_TYPE_V2, args)
    return evolve(made, attributes=state) if state else made


def _make_ordered_dict(build: _Build, args: tuple[Any, ...]) -> Any:
    made: OrderedDict[Any, Any] = OrderedDict()
    if not args:
        return made
    if len(args) == 1 and type(args[0]) in (dict, OrderedDict):
        build.spend(len(args[0]))
        made.update(args[0])
        return made
    if len(args) != 1 or type(args[0]) not in (list, tuple):
        _wrong("an OrderedDict")
    build.spend(len(args[0]))
    for pair in args[0]:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            _wrong("an OrderedDict")
        _check_key(pair[0])
        made[pair[0]] = pair[1]
    return made


def _make_size(build: _Build, args: tuple[Any, ...]) -> Any:
    if not args:
        return Size()
    if len(args) != 1 or not _is_dims(args[0]):
        _wrong("a torch.Size")
    return Size(args[0])


def _members(build: _Build, args: tuple[Any, ...], what: str) -> Iterable[Any]:
    if not args:
        return ()
    if len(args) != 1 or type(args[0]) not in (list, tuple, set, frozenset):
        _wrong(what)
    build.spend(len(args[0]))
    for member in args[0]:
        _check_key(member)
    found: Iterable[Any] = args[0]
    return found


def _make_set(build: _Build, args: tuple[Any, ...]) -> Any:
    return set(_members(build, args, "a set"))


def _make_frozenset(build: _Build, args: tuple[Any, ...]) -> Any:
    return frozenset(_members(build, args, "a frozenset"))


def _make_complex(build: _Build, args: tuple[Any, ...]) -> Any:
    if len(args) > 2 or not all(type(part) is float or (type(part) is int and abs(part) < 1 << 1000) for part in args):
        _wrong("a complex number")
    return complex(*args)


def _make_slice(build: _Build, args: tuple[Any, ...]) -> Any:
    if not 1 <= len(args) <= 3 or not all(part is None or type(part) is int for part in args):
        _wrong("a slice")
    return slice(*args)


def _encoded(build: _Build, args: tuple[Any, ...], what: str) -> bytes:
    """Bytes as protocol 2 writes them: text of code points 0 to 255."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        _wrong(what)
    build.spend(len(args[0]))
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        _wrong(what)


def _make_encoded(build: _Build, args: tuple[Any, ...]) -> Any:
    return _encoded(build, args, "bytes")


def _make_bytes(build: _Build, args: tuple[Any, ...]) -> Any:
    if args:
        _wrong("bytes")  # bytes(n) would allocate
    return b""


def _make_bytearray(build: _Build, args: tuple[Any, ...]) -> Any:
    if not args:
        return bytearray()
    if len(args) == 1 and type(args[0]) is bytes:
        build.spend(len(args[0]))
        return bytearray(args[0])
    return bytearray(_encoded(build, args, "a bytearray"))


def _make_attribute(build: _Build, args: tuple[Any, ...]) -> Any:
    """`getattr(Outer, "Inner")`, which is how protocol 2 names a nested class. Only the name is made."""
    if len(args) == 2 and type(args[0]) is Global and type(args[1]) is str and args[1].isidentifier():
        return Global(args[0].module, f"{args[0].name}.{args[1]}")
    return Call(_GETATTR, args)


_Maker = Callable[[_Build, tuple[Any, ...]], Any]

_TENSOR_MAKERS: dict[Global, _Maker] = {
    _REBUILD_TENSOR: _make_tensor,
    _REBUILD_TENSOR_V2: _make_tensor_v2,
    _REBUILD_TENSOR_V3: _make_tensor_v3,
    _REBUILD_PARAMETER: _make_parameter,
}
_MAKERS: dict[Global, _Maker] = {
    **_TENSOR_MAKERS,
    _REBUILD_PARAMETER_WITH_STATE: _make_parameter,
    _REBUILD_FROM_TYPE_V2: _make_from_type,
    _ORDERED_DICT: _make_ordered_dict,
    _SIZE: _make_size,
    _SET: _make_set,
    _FROZENSET: _make_frozenset,
    _COMPLEX: _make_complex,
    _SLICE: _make_slice,
    _ENCODE: _make_encoded,
    _BYTES: _make_bytes,
    _BYTEARRAY: _make_bytearray,
    _GETATTR: _make_attribute,
}
# Looked up by identity: the records here are the only ones that name these (see _named).
_MAKER_OF_ID: dict[int, _Maker] = {id(known): make for known, make in _MAKERS.items()}
_INTERNED: dict[tuple[str, str], Global | TorchDType] = {
    **{(known.module, known.name): known for known in chain(_MAKERS, _STORAGE_DTYPES, (_TENSOR, _PARAMETER))},
    **{("torch", dtype.torch): TorchDType(dtype.name) for dtype in BY_TORCH.values()},
}


def _named(module: str, name: str) -> Global | TorchDType:
    """The record of a name, checked: identifiers joined by dots, so that it can be written back as text."""
    module = _MODULE_READ.get(module, module)
    known = _INTERNED.get((module, name))
    if known is not None:
        return known
    if not _is_name(module) or not _is_name(name):
        raise _Bad("E426", f"refers to {ascii(module)[:80]} {ascii(name)[:80]}, which is no name")
    return Global(module, name)


def _is_name(text: str) -> bool:
    return len(text) <= 1000 and all(part.isidentifier() for part in text.split("."))


_PLAIN_KEYS = frozenset({str, float, bool, type(None), bytes, complex, Global, TorchDType, Call, StorageRef, TensorRef})


def _check_key(key: Any) -> None:
    """A key is hashed: this must be quick, bounded, and without recursion on the file's choosing."""
    if type(key) in _PLAIN_KEYS or (type(key) is int and -(1 << 64) < key < 1 << 64):
        return
    parts = [key]
    for n in range(KEY_PARTS_MAX):
        if not parts:
            return
        part = parts.pop()
        kind = type(part)
        if kind is int:
            if not -(1 << 64) < part < 1 << 64:  # far larger ones are made to collide
                raise _Bad("E423", "uses a number of more than 64 bits as a key")
        elif kind is tuple or kind is Size or kind is frozenset:
            if len(part) > KEY_PARTS_MAX - n:
                break
            parts.extend(part)
        elif kind not in _PLAIN_KEYS:
            raise _Bad("E423", f"uses a {kind.__name__} as a key")
    if parts:
        raise _Bad("E423", f"uses a tuple of more than {KEY_PARTS_MAX} parts as a key")


# ---- the machine ---------------------------------------------------------------------------------------------------

_u16 = struct.Struct("<H").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from

_EMPTY: tuple[Any, ...] = ()


def loads(data: bytes, file: str = "pickle") -> Any:
    """The value of a pickle (protocols 0 to 5), inert. `file` is the name that errors give.

    Raises: UcplError E420-E427.
    """
    return load_pickle(data, file).value


def load_pickle(data: bytes, file: str = "pickle") -> Pickle:
    """As `loads`, with the storages and tensors that were built."""
    if len(data) > PICKLE_BYTES_MAX:
        fail("E425", f"the pickle has {len(data)} bytes, more than {PICKLE_BYTES_MAX} are not read", Label(file))
    build = _Build([], [], [4 * len(data) + (1 << 20)])
    value = _run(data, file, build)
    _check_nesting(value, file)
    return Pickle(value, tuple(build.storages), tuple(build.tensors))


def _run(data: bytes, file: str, build: _Build) -> Any:
    """One loop, the most frequent instructions first. Every read is checked: by index, by struct, or against `size`."""
    size = len(data)
    pos = start = 0
    stack: list[Any] = []
    push = stack.append
    below: list[list[Any]] = []  # the stacks under each MARK
    memo: dict[int, Any] = {}
    globals_seen: dict[bytes, Any] = {}
    try:
        while True:
            start = pos
            op = data[pos]
            pos += 1
            if op == 0x71:  # BINPUT
                memo[data[pos]] = stack[-1]
                pos += 1
            elif op == 0x72:  # LONG_BINPUT
                (index,) = _u32(data, pos)
                if index > pos:  # each instruction puts at most one
                    raise _Bad("E420", f"numbers a value {index} after {pos} bytes")
                memo[index] = stack[-1]
                pos += 4
            elif op == 0x4B:  # BININT1
                push(data[pos])
                pos += 1
            elif op == 0x68:  # BINGET
                push(memo[data[pos]])
                pos += 1
            elif op == 0x6A:  # LONG_BINGET
                push(memo[_u32(data, pos)[0]])
                pos += 4
            elif op == 0x28:  # MARK
                below.append(stack)
                stack = []
                push = stack.append
            elif op == 0x74:  # TUPLE
                items = stack
                stack = below.pop()
                push = stack.append
                push(tuple(items))
            elif op == 0x58:  # BINUNICODE
                pos += 4
                end = pos + _u32(data, pos - 4)[0]
                if end > size:
                    raise _Bad("E420", "has a text that ends behind the pickle")
                push(str(data[pos:end], "utf-8", "surrogatepass"))
                pos = end
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                function = stack[-1]
                if type(args) is not tuple:
                    raise _Bad("E422", f"calls with {_kind(args)} for arguments")
                make = _MAKER_OF_ID.get(id(function))
                if make is not None:
                    stack[-1] = make(build, args)
                elif type(function) is Global or type(function) is Call:
                    stack[-1] = Call(function, args)
                else:
                    raise _Bad("E422", f"calls {_kind(function)}")
            elif op == 0x51:  # BINPERSID
                made = _storage(stack[-1])
                build.storages.append(made)
                stack[-1] = made
            elif op == 0x29:  # EMPTY_TUPLE
                push(_EMPTY)
            elif op == 0x89:  # NEWFALSE
                push(False)
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x8C:  # SHORT_BINUNICODE
                pos += 1
                end = pos + data[pos - 1]
                if end > size:
                    raise _Bad("E420", "has a text that ends behind the pickle")
                push(str(data[pos:end], "utf-8", "surrogatepass"))
                pos = end
            elif op == 0x7D:  # EMPTY_DICT
                push({})
            elif op == 0x5D:  # EMPTY_LIST
                push([])
            elif op == 0x75:  # SETITEMS
                items = stack
                stack = below.pop()
                push = stack.append
                _set_items(stack[-1], items)
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x4D:  # BININT2
                push(_u16(data, pos)[0])
                pos += 2
            elif op == 0x65:  # APPENDS
                items = stack
                stack = below.pop()
                push = stack.append
                target = stack[-1]
                if type(target) is list:
                    target.extend(items)
                elif type(target) is Call:
                    target.list_items.extend(items)
                else:
                    raise _Bad("E422", f"appends to {_kind(target)}")
            elif op == 0x63:  # GLOBAL
                middle = data.find(b"\n", pos)
                end = data.find(b"\n", middle + 1)
                if middle < 0 or end < 0:
                    raise _Bad("E420", "has a name without an end")
                text = data[pos:end]
                named = globals_seen.get(text)
                if named is None:
                    module, _, name = text.partition(b"\n")
                    named = globals_seen[text] = _named(str(module, "utf-8"), str(name, "utf-8"))
                push(named)
                pos = end + 1
            elif op == 0x61:  # APPEND
                last = stack.pop()
                target = stack[-1]
                if type(target) is list:
                    target.append(last)
                elif type(target) is Call:
                    target.list_items.append(last)
                else:
                    raise _Bad("E422", f"appends to {_kind(target)}")
            elif op == 0x73:  # SETITEM
                last = stack.pop()
                _set_items(stack[-2], [stack.pop(), last])
            elif op == 0x47:  # BINFLOAT
                push(_f64(data, pos)[0])
                pos += 8
            elif op == 0x62:  # BUILD
                last = stack.pop()
                _build_state(stack[-1], last)
            elif op == 0x81:  # NEWOBJ
                args = stack.pop()
                _new(stack, build, args, {})
            elif op == 0x4E:  # NONE
                push(None)
            elif op == 0x88:  # NEWTRUE
                push(True)
            elif op == 0x4A:  # BININT
                push(_i32(data, pos)[0])
                pos += 4
            elif op == 0x87:  # TUPLE3
                last = stack.pop()
                second = stack.pop()
                stack[-1] = (stack[-1], second, last)
            elif op == 0x93:  # STACK_GLOBAL
                last = stack.pop()
                if type(last) is not str or type(stack[-1]) is not str:
                    raise _Bad("E426", "refers to something by a name that is no text")
                stack[-1] = _named(stack[-1], last)
            elif op == 0x2E:  # STOP
                value = stack.pop()
                if stack or below:
                    raise _Bad("E420", "ends with values left over")
                return value
            else:
                # The seldom ones take the stack and give it back, for those that change it.
                pos, stack = _rare(op, data, pos, stack, below, memo, build)
                push = stack.append
    except _Bad as bad:
        fail(bad.code, f"{file}: the pickle {bad.message}", Label(file, where=f"byte {start} of the pickle"))
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        if pos >= size or size - pos < 8:
            what = "ends before it is complete"
        else:
            what = "has an instruction that does not fit what stands before it"
        fail("E420", f"{file}: the pickle {what}", Label(file, where=f"byte {start} of {size} of the pickle"))


def _kind(value: Any) -> str:
    if type(value) is Global:
        return f"the name {value.module}.{value.name}"
    return f"a {type(value).__name__}"


def _rare(
    op: int,
    data: bytes,
    pos: int,
    stack: list[Any],
    below: list[list[Any]],
    memo: dict[int, Any],
    build: _Build,
) -> tuple[int, list[Any]]:
    """The instructions that checkpoints seldom use. Returns the position behind this one, and the stack."""
    size = len(data)

    def block(length_bytes: int) -> bytes:
        nonlocal pos
        raw = data[pos : pos + length_bytes]
        end = pos + length_bytes + int.from_bytes(raw, "little")
        if len(raw) < length_bytes or end > size:
            raise _Bad("E420", "has a text that ends behind the pickle")
        found = data[pos + length_bytes : end]
        pos = end
        return found

    def line() -> bytes:
        nonlocal pos
        end = data.find(b"\n", pos)
        if end < 0:
            raise _Bad("E420", "has a line without an end")
        found = data[pos:end]
        pos = end + 1
        return found

    def pop_mark() -> list[Any]:
        nonlocal stack
        items = stack
        stack = below.pop()
        return items

    match op:
        case 0x80:  # PROTO
            if data[pos] > 5:
                raise _Bad("E421", f"is of protocol {data[pos]}")
            pos += 1
        case 0x95:  # FRAME
            if pos + 8 + _u64(data, pos)[0] > size:
                raise _Bad("E420", "has a frame that ends behind the pickle")
            pos += 8
        case 0x8A:  # LONG1
            stack.append(int.from_bytes(block(1), "little", signed=True))
        case 0x8B:  # LONG4
            if data[pos + 3] > 127:
                raise _Bad("E420", "has a number of negative length")
            stack.append(int.from_bytes(block(4), "little", signed=True))
        case 0x43:  # SHORT_BINBYTES
            stack.append(block(1))
        case 0x42:  # BINBYTES
            stack.append(block(4))
        case 0x8E:  # BINBYTES8
            stack.append(block(8))
        case 0x96:  # BYTEARRAY8
            stack.append(bytearray(block(8)))
        case 0x8D:  # BINUNICODE8
            stack.append(str(block(8), "utf-8", "surrogatepass"))
        case 0x55 | 0x54:  # SHORT_BINSTRING, BINSTRING: a str of Python 2
            stack.append(_text_of_python2(block(1 if op == 0x55 else 4)))
        case 0x8F:  # EMPTY_SET
            stack.append(set())
        case 0x90:  # ADDITEMS
            items = pop_mark()
            if type(stack[-1]) is not set:
                raise _Bad("E422", f"adds members to {_kind(stack[-1])}")
            for item in items:
                _check_key(item)
            stack[-1].update(items)
        case 0x91:  # FROZENSET
            items = pop_mark()
            for item in items:
                _check_key(item)
            stack.append(frozenset(items))
        case 0x92:  # NEWOBJ_EX
            kwargs = stack.pop()
            args = stack.pop()
            if type(kwargs) is not dict or not all(type(name) is str for name in kwargs):
                raise _Bad("E422", f"calls with {_kind(kwargs)} for named arguments")
            build.spend(len(kwargs))
            _new(stack, build, args, dict(kwargs))
        case 0x30:  # POP
            if stack:
                stack.pop()
            else:
                pop_mark()
        case 0x31:  # POP_MARK
            pop_mark()
        case 0x32:  # DUP
            stack.append(stack[-1])
        case 0x6C:  # LIST
            items = pop_mark()
            stack.append(items)
        case 0x64:  # DICT
            items = pop_mark()
            made: dict[Any, Any] = {}
            _set_items(made, items)
            stack.append(made)
        case 0x49:  # INT: text, and the booleans of protocol 1
            text = line()
            stack.append({b"00": False, b"01": True}[text] if text in (b"00", b"01") else _int_of_text(text))
        case 0x4C:  # LONG: text
            stack.append(_int_of_text(line().removesuffix(b"L")))
        case 0x46:  # FLOAT: text
            try:
                stack.append(float(line()[:100]))
            except ValueError:
                raise _Bad("E420", "has a number that is none") from None
        case 0x56:  # UNICODE: text
            stack.append(str(line(), "raw-unicode-escape"))
        case 0x70:  # PUT
            index = _int_of_text(line())
            if not 0 <= index <= pos:
                raise _Bad("E420", f"numbers a value {index} after {pos} bytes")
            memo[index] = stack[-1]
        case 0x67:  # GET
            stack.append(memo[_int_of_text(line())])
        case _:
            raise _Bad("E421", f"uses the instruction 0x{op:02x}")
    return pos, stack


def _int_of_text(text: bytes) -> int:
    try:
        if len(text) <= INT_TEXT_MAX:
            return int(text)
    except ValueError:
        pass
    raise _Bad("E420", "has a number that is none")


def _text_of_python2(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _Bad("E421", "has bytes of Python 2 that are no text") from None


def _storage(pid: Any) -> StorageRef:
    """The persistent id that torch writes for a storage: ("storage", class, key, location, elements)."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise _Bad("E427", "refers to an outside object that is no storage")
    _, kind, name, location, numel = pid
    dtype = _STORAGE_DTYPES.get(kind) if type(kind) is Global else None
    if dtype is None:
        raise _Bad("E427", f"has a storage of the unknown class {_kind(kind)}")
    if type(name) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < 1 << 60:
        raise _Bad("E427", "has a storage with a wrong name, place or length")
    return StorageRef(name, dtype, numel, location)


def _set_items(target: Any, items: list[Any]) -> None:
    """Pairs (key, value, key, value, ...) into a dict or an object."""
    if len(items) & 1:
        raise _Bad("E420", "sets a key without a value")
    keys, values = items[::2], items[1::2]
    kind = type(target)
    if kind is Call:
        target.dict_items.extend(zip(keys, values, strict=True))
        return
    if kind is not dict and kind is not OrderedDict:
        raise _Bad("E422", f"sets items of {_kind(target)}")
    for key in keys:
        if type(key) is not str:
            _check_key(key)
    target.update(zip(keys, values, strict=True))


def _new(stack: list[Any], build: _Build, args: Any, kwargs: dict[str, Any]) -> None:
    function = stack[-1]
    if type(args) is not tuple:
        raise _Bad("E422", f"makes an object from {_kind(args)}")
    make = _MAKER_OF_ID.get(id(function))
    if make is not None and not kwargs and function in (_ORDERED_DICT, _SET, _FROZENSET, _SIZE, _BYTEARRAY, _COMPLEX):
        stack[-1] = make(build, args)
    elif type(function) is Global or type(function) is Call:
        stack[-1] = Call(function, args, kwargs, new=True)
    else:
        raise _Bad("E422", f"makes an object of {_kind(function)}")


def _build_state(target: Any, state: Any) -> None:
    kind = type(target)
    if kind is Call and target.state is None:
        target.state = state
    elif kind is OrderedDict and attributes_of(target) is None and type(state) is dict:
        if not all(type(name) is str for name in state):
            raise _Bad("E422", "names an attribute by something that is no text")
        if state:
            set_attributes(target, state)
    else:
        raise _Bad("E422", f"sets attributes of {_kind(target)}")


# ---- over values ---------------------------------------------------------------------------------------------------

_LEAVES = frozenset(
    {str, int, float, bool, type(None), bytes, complex, bytearray, slice, Global, TorchDType, Size, StorageRef}
)


def _parts(value: Any) -> list[Any]:
    """The values directly in a value: keys too where they are more than words and numbers."""
    kind = type(value)
    if kind is tuple or kind is list or kind is set or kind is frozenset:
        return list(value)
    if kind is dict or kind is OrderedDict:
        found = list(value.values())
        found.extend(key for key in value if type(key) not in _LEAVES)
        if kind is OrderedDict and (attributes := attributes_of(value)) is not None:
            found.append(attributes)
        return found
    if kind is Call:
        found = [value.function, *value.args, value.state, *value.list_items]
        found.extend(value.kwargs.values())
        for pair in value.dict_items:
            found.extend(pair)
        return found
    if kind is TensorRef and value.attributes is not None:
        return [value.attributes]
    return []


def _check_nesting(root: Any, file: str, code: str = "E424") -> None:
    """Whoever walks a value may recurse: no path through it is longer than NESTING_MAX. Without recursion here.

    A value met again counts as high as it was found to be, a cycle is cut where it closes.
    """
    height: dict[int, int] = {}  # of what lies under a container; 0 while it is being looked at
    path: list[tuple[int, Iterator[Any]]] = []
    highest = [0]
    todo: Iterator[Any] = iter((root,))
    leaves = _LEAVES
    while True:
        for child in todo:
            if type(child) in leaves:
                continue
            known = height.get(id(child))
            if known is None:
                if type(child) is TensorRef and child.attributes is None:
                    continue
                height[id(child)] = 0
                path.append((id(child), todo))
                todo = iter(_parts(child))
                highest.append(0)
                break
            if known > highest[-1]:
                highest[-1] = known
        else:
            if not path:
                return
            done, todo = path.pop()
            here = highest.pop() + 1
            height[done] = here
            if here > highest[-1]:
                highest[-1] = here
        if len(path) + highest[-1] > NESTING_MAX:
            fail(code, f"{file}: its values nest more than {NESTING_MAX} deep", Label(file))


def _step(key: Any, n: int) -> Step:
    """A dict's key as a step: words and numbers as they are, others by their text."""
    if type(key) is str or type(key) is int:
        return key
    if key is None or type(key) in (bool, float, Global, TorchDType, Size, bytes):
        return repr(key)
    return f"@key{n}"


def walk(root: Any, file: str = "pickle") -> Iterator[tuple[Key, Any]]:
    """Every value under `root` with its path, containers before their parts, in the order of the file.

    Steps: a dict's key, an index of a list or tuple, and of an object `@args`, `@kwargs`, `@state`, `@list`, `@dict`; the
    attributes of an OrderedDict or tensor are under `@attributes`. A container shared by several paths is met on each,
    a cycle is entered once.

    Raises: UcplError E425 where sharing unfolds to more than WALK_VALUES_MAX values.
    """
    path: list[tuple[int, Key, Iterator[tuple[Step, Any]]]] = []
    entered: set[int] = set()
    here: Key = ()
    ident = 0
    todo: Iterator[tuple[Step, Any]] = iter(())
    met = 0
    pending: tuple[Key, Any] | None = ((), root)
    while True:
        if pending is None:
            for step, child in todo:
                pending = (here + (step,), child)
                break
            else:
                if not path:
                    return
                entered.discard(ident)
                ident, here, todo = path.pop()
                continue
        key, value = pending
        pending = None
        met += 1
        if met > WALK_VALUES_MAX:
            fail("E425", f"{file}: its values unfold to more than {WALK_VALUES_MAX}", Label(file))
        yield key, value
        if type(value) in _LEAVES or id(value) in entered:
            continue
        steps = _steps(value)
        if steps:
            path.append((ident, here, todo))
            ident, here, todo = id(value), key, iter(steps)
            entered.add(ident)


def _steps(value: Any) -> list[tuple[Step, Any]]:
    kind = type(value)
    found: list[tuple[Step, Any]]
    if kind is tuple or kind is list:
        return list(enumerate(value))
    if kind is dict or kind is OrderedDict:
        found = [(_step(key, n), item) for n, (key, item) in enumerate(value.items())]
        if kind is OrderedDict and (attributes := attributes_of(value)) is not None:
            found.append(("@attributes", attributes))
        return found
    if kind is set or kind is frozenset:
        return [(f"@member{n}", member) for n, member in enumerate(value)]
    if kind is Call:
        found = [("@function", value.function)]
        for step, part in (
            ("@args", value.args),
            ("@kwargs", value.kwargs),
            ("@list", value.list_items),
            ("@dict", value.dict_items),
        ):
            if part:
                found.append((step, part))
        if value.state is not None:
            found.append(("@state", value.state))
        return found
    if kind is TensorRef and value.attributes is not None:
        return [("@attributes", value.attributes)]
    return []


# What torch.load(weights_only=True) of torch 2.6 to 2.13 accepts without being told, by name.
_SAFE = frozenset(
    {
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        "collections.Counter",
        "collections.OrderedDict",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch._tensor._rebuild_from_type_v2",
        *(
            f"torch._utils.{name}"
            for name in (
                "_rebuild_parameter",
                "_rebuild_parameter_with_state",
                "_rebuild_qtensor",
                "_rebuild_tensor",
                "_rebuild_tensor_v2",
                "_rebuild_tensor_v3",
                "_rebuild_sparse_tensor",
                "_rebuild_meta_tensor_no_storage",
                "_rebuild_nested_tensor",
                "_rebuild_wrapper_subclass",
                "_rebuild_device_tensor_from_numpy",
                "_rebuild_device_tensor_from_cpu_tensor",
            )
        ),
        *(f"{known.module}.{known.name}" for known in _STORAGE_DTYPES if known.module == "torch"),
        "torch.storage.UntypedStorage",
    }
)


def unsafe_globals(value: Any) -> list[str]:
    """The names under `value` that torch.load(weights_only=True) refuses, sorted: "module.name".

    Which of them a framework is known to need is the caller's to say.
    """
    found: set[str] = set()
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        kind = type(item)
        if kind is Global:
            name = f"{item.module}.{item.name}"
            if name not in _SAFE:
                found.add(name)
        elif kind is slice:
            found.add("builtins.slice")
        elif kind in _LEAVES or id(item) in seen:
            continue
        else:
            if kind is frozenset:
                found.add("builtins.frozenset")
            seen.add(id(item))
            todo.extend(_parts(item))
            if kind is dict or kind is OrderedDict:
                todo.extend(key for key in item if type(key) is Global)
    return sorted(found)


# ---- writing -------------------------------------------------------------------------------------------------------

_BATCH = 1000  # items between one MARK and its APPENDS or SETITEMS, as Python's pickler does


def dumps(value: Any) -> bytes:
    """The pickle of a value tree, of protocol 2 as torch.save writes it. Equal trees give equal bytes.

    Lists, dicts, objects and tensors that are shared stay shared; texts and names are shared by what they say.

    Raises: UcplError E440 for what is no value of a pickle.
    """
    return dump_pickle(value)[0]


def dump_pickle(value: Any) -> tuple[bytes, tuple[StorageRef, ...]]:
    """As `dumps`, with the storages that the pickle refers to, in its order (each once)."""
    try:
        _check_nesting(value, "the value", "E440")
        writer = _Writer()
        writer.write(value)
    except _Bad as bad:
        where = next(("/".join(map(str, key)) for key, part in walk(value) if _is_foreign(part)), "")
        fail(bad.code, bad.message + (f" (it is at {where})" if where else ""), Label("the value", where=where))
    return b"".join(writer.out), tuple(writer.storages)


_CONTAINERS = frozenset({list, dict, tuple, OrderedDict, set, frozenset, Call, TensorRef})


def _is_foreign(value: Any) -> bool:
    return type(value) not in _LEAVES and type(value) not in _CONTAINERS


class _Op(bytes):
    """Instructions among values that are still to be written."""

    __slots__ = ()


@frozen
class _Then:
    """What remains to do once the parts of a container are written."""

    do: Callable[[], None]


@frozen(eq=False)
class _Writer:
    """Writes without recursion: `todo` holds what is still to be written, last first."""

    out: list[bytes] = field(factory=list)
    storages: dict[StorageRef, None] = field(factory=dict)
    _memo: dict[Any, int] = field(factory=dict)  # a text or name, or the id of a container -> its number
    _todo: list[Any] = field(factory=list)
    _dims: dict[tuple[int, ...], bytes] = field(factory=dict)

    def write(self, root: Any) -> None:
        todo, out = self._todo, self.out
        out.append(b"\x80\x02")
        todo.append(root)
        size = counted = 0
        while todo:
            item = todo.pop()
            if type(item) is _Op:
                out.append(item)
            elif type(item) is _Then:
                item.do()
            else:
                self._value(item)
            if len(out) - counted > 100_000:
                size += sum(map(len, out[counted:]))
                counted = len(out)
                if size > PICKLE_BYTES_MAX:
                    raise _Bad("E440", f"a value of more than {PICKLE_BYTES_MAX} bytes cannot be written")
        out.append(b".")

    def _later(self, *items: Any) -> None:
        """Write these next, in this order."""
        self._todo.extend(reversed(items))

    def _put(self, ident: Any) -> None:
        number = len(self._memo)
        self._memo[ident] = number
        self.out.append(b"q%c" % number if number < 256 else b"r" + number.to_bytes(4, "little"))

    def _get(self, number: int) -> None:
        self.out.append(b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little"))

    def _made(self, value: Any, *more: Any) -> _Then:
        """Behind the instruction that makes `value`: number it, then write `more` into it.

        If it was numbered meanwhile, one of its own parts refers to it and has written it: then this one is dropped.
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
        if not (_is_name(name.module) and _is_name(name.name)):
            raise _Bad("E440", f"the name {name.module!a} {name.name!a} cannot be written")
        outer, _, inner = name.name.rpartition(".")
        if outer:  # protocol 2 has no dotted names
            self._name(_GETATTR)
            self._name(Global(name.module, outer))
            self._text(inner)
            self.out.append(b"\x86R")
        else:
            module = _MODULE_WRITTEN.get(name.module, name.module)
            self.out.append(f"c{module}\n{name.name}\n".encode())
        self._put(name)

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
            if not _is_dims(dims):
                raise _Bad("E440", f"the dimensions {dims!r} cannot be written")
            ints = b"".join(map(_number, dims))
            ends = (b")", b"\x85", b"\x86", b"\x87")
            found = ints + ends[len(dims)] if len(dims) <= 3 else b"(" + ints + b"t"
            self._dims[dims] = found
        return found

    def _storage(self, storage: StorageRef, untyped: bool = False) -> None:
        """The persistent id of a storage."""
        self.storages[storage] = None
        dtype = DTYPES[storage.dtype]
        self.out.append(b"(")
        self._text("storage")
        if untyped or dtype.storage is None:
            self._name(_UNTYPED_STORAGE)
            numel = storage.numel * dtype.itemsize
        else:
            self._name(Global("torch", dtype.storage))
            numel = storage.numel
        self._text(storage.name)
        self._text(storage.location)
        self.out.append(_number(numel) + b"tQ")

    # -- all values

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self._text(value)
        elif kind is int:
            self.out.append(_number(value))
        elif kind is float:
            self.out.append(struct.pack(">cd", b"G", value))
        elif value is None:
            self.out.append(b"N")
        elif kind is bool:
            self.out.append(b"\x88" if value else b"\x89")
        elif kind is TorchDType:
            self._dtype(value.name)
        elif kind is Global:
            self._name(value)
        elif kind is Size:
            self._name(_SIZE)
            self.out.append(self._tuple_of_ints(tuple(value)) + b"\x85R")
        elif kind is StorageRef:
            self._storage(value)
        elif kind is bytes:
            self._encoded(_ENCODE, value, "latin1")
        elif kind is complex:
            self._name(_COMPLEX)
            self.out.append(struct.pack(">cdcd", b"G", value.real, b"G", value.imag) + b"\x86R")
        elif kind is slice:
            self._name(_SLICE)
            self._later(value.start, value.stop, value.step, _Op(b"\x87R"))
        elif kind is tuple and not value:
            self.out.append(b")")
        elif (number := self._memo.get(id(value))) is not None:
            self._get(number)
        else:
            self._container(value)

    def _container(self, value: Any) -> None:
        kind = type(value)
        if kind is TensorRef:
            self._tensor(value)
        elif kind is dict:
            self.out.append(b"}")
            self._put(id(value))
            self._later(*_batches_of_pairs(list(value.items())))
        elif kind is list:
            self.out.append(b"]")
            self._put(id(value))
            self._later(*_batches(value))
        elif kind is tuple:
            if len(value) <= 3:
                end = _Op((b"\x85", b"\x86", b"\x87")[len(value) - 1])
                self._later(*value, end, self._made(value))
            else:
                self._later(_Op(b"("), *value, _Op(b"t"), self._made(value))
        elif kind is OrderedDict:
            self._name(_ORDERED_DICT)
            self.out.append(b")R")
            self._put(id(value))
            attributes = attributes_of(value)
            state = () if attributes is None else (attributes, _Op(b"b"))
            self._later(*_batches_of_pairs(list(value.items())), *state)
        elif kind is Call:
            self._call(value)
        elif kind is set or kind is frozenset:
            self._name(_SET if kind is set else _FROZENSET)
            members = sorted(value, key=_rank)
            self._later(_Op(b"]"), *_batches(members), _Op(b"\x85R"), self._made(value))
        elif kind is bytearray:
            self._encoded(_BYTEARRAY, bytes(value), "latin-1")
            self._put(id(value))
        else:
            raise _Bad("E440", f"a {kind.__module__}.{kind.__qualname__} cannot be written")

    def _call(self, value: Call) -> None:
        if value.kwargs and not value.new:
            raise _Bad("E440", "a call with named arguments cannot be written, only an object that is made with them")
        if type(value.args) is not tuple:
            raise _Bad("E440", f"a call with {_kind(value.args)} for arguments cannot be written")
        make: tuple[Any, ...] = (_Op(b"R"),)
        if value.new:
            make = (value.kwargs, _Op(b"\x92")) if value.kwargs else (_Op(b"\x81"),)
        more: list[Any] = [*_batches(value.list_items), *_batches_of_pairs(value.dict_items)]
        if value.state is not None:
            more += (value.state, _Op(b"b"))
        self._later(value.function, value.args, *make, self._made(value, *more))

    def _tensor(self, tensor: TensorRef) -> None:
        if tensor.attributes is None:
            if tensor.parameter:
                self._name(_REBUILD_PARAMETER)
                self._geometry(tensor, False)
                self._flag_and_hooks(tensor)
                self.out.append(b"\x87R")
            else:
                self._geometry(tensor, tensor.requires_grad)
            self._put(id(tensor))
        elif tensor.parameter:
            self._name(_REBUILD_PARAMETER_WITH_STATE)
            self.out.append(b"(")
            self._geometry(tensor, False)
            self._flag_and_hooks(tensor)
            self._later(tensor.attributes, _Op(b"tR"), self._made(tensor))
        else:
            self._name(_REBUILD_FROM_TYPE_V2)
            self.out.append(b"(")
            self._geometry(tensor, tensor.requires_grad, _TENSOR)
            self._later(tensor.attributes, _Op(b"tR"), self._made(tensor))

    def _flag_and_hooks(self, tensor: TensorRef) -> None:
        self.out.append(b"\x88" if tensor.requires_grad else b"\x89")
        self._name(_ORDERED_DICT)
        self.out.append(b")R")

    def _geometry(self, tensor: TensorRef, requires_grad: bool, kind: Global | None = None) -> None:
        """The call of _rebuild_tensor_v2 (v3 for dtypes without a storage class); with `kind`, function, kind and arguments."""
        dtype = DTYPES[tensor.storage.dtype]
        self._name(_REBUILD_TENSOR_V2 if dtype.storage else _REBUILD_TENSOR_V3)
        if kind is not None:
            self._name(kind)
        self.out.append(b"(")
        self._storage(tensor.storage)
        dims = self._tuple_of_ints(tensor.shape) + self._tuple_of_ints(tensor.stride)
        self.out.append(_number(tensor.offset) + dims + (b"\x88" if requires_grad else b"\x89"))
        self._name(_ORDERED_DICT)
        self.out.append(b")R")
        if dtype.storage is None:
            self._dtype(dtype.name)
        self.out.append(b"t" if kind is not None else b"tR")


def _batches(items: list[Any]) -> list[Any]:
    """A list's items with the instructions that append them."""
    if len(items) == 1:
        return [items[0], _Op(b"a")]
    found: list[Any] = []
    for start in range(0, len(items), _BATCH):
        found += (_Op(b"("), *items[start : start + _BATCH], _Op(b"e"))
    return found


def _batches_of_pairs(pairs: list[tuple[Any, Any]]) -> list[Any]:
    """A dict's items with the instructions that set them."""
    if len(pairs) == 1:
        return [*pairs[0], _Op(b"s")]
    found: list[Any] = []
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
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a%c" % len(raw) + raw
    return b"\x8b" + len(raw).to_bytes(4, "little") + raw


def _raw_text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) > 0xFFFFFFFF:
        raise _Bad("E440", "a text of more than 4 GiB cannot be written")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _rank(member: Any) -> tuple[str, str]:
    """An order of a set's members that is the same in every process."""
    kind = type(member)
    if kind is Call:
        return "Call", str(_rank(member.function))
    if kind is tuple or kind is frozenset:
        ranks = [_rank(part) for part in member]
        return kind.__name__, str(ranks if kind is tuple else sorted(ranks))
    if kind is int:
        return "int", f"{member:+025d}"
    return kind.__name__, repr(member)
