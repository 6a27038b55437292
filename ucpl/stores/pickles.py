"""Our own pickle machine: bytes to inert values and back. Nothing that a file names is ever imported or called.

A pickle is a program for a small stack machine. `pickle.load` runs it with the names it asks for; here a name is a
`Global`, a call is a `Call`, and only what torch writes for tensors, sizes, dtypes and plain containers becomes a value.
The law is `loads(dumps(value)) == value`, with shared and cyclic containers kept as they are.

Not here: writing (pickle_writer, whose `dumps` is named here too), torch, storages' bytes (torch_files), and what the
values mean.
"""

from __future__ import annotations

import gc
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NoReturn

from attrs import evolve, frozen

from ucpl.errors import Label, fail
from ucpl.extents import BY_TORCH, DTYPES, Call, Global, Size, StorageRef, TensorRef, TorchDType
from ucpl.stores.inert import (
    BYTEARRAY,
    BYTES,
    COMPLEX,
    ENCODE,
    FROZENSET,
    GETATTR,
    MODULE_READ,
    ORDERED_DICT,
    PARAMETER,
    PICKLE_BYTES_MAX,
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
    attributes_of,
    check_nesting,
    is_dims,
    is_name,
    kind_of,
    set_attributes,
    unsafe_globals,
    walk,
)
from ucpl.stores.pickle_writer import dump_pickle, dumps

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

KEY_PARTS_MAX = 64  # parts of one tuple that is a key, nested ones included
INT_TEXT_MAX = 4000  # digits of a number written out as text (protocol 0)


@frozen
class Pickle:
    """A pickle as read: its value, and every storage and tensor that it built, in the order of the file."""

    value: Any
    storages: tuple[StorageRef, ...]
    tensors: tuple[TensorRef, ...]


@frozen
class _Build:
    """What one load has made so far, and how many elements it may still copy from one container to another."""

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


def _is_hooks(value: Any) -> bool:
    return value is None or (type(value) in (dict, OrderedDict) and not value)


def _tensor(build: _Build, storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any) -> TensorRef:
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


def _make_tensor(build: _Build, args: tuple[Any, ...]) -> Any:
    if len(args) != 4:
        _wrong("a tensor")
    return _tensor(build, *args, False)


def _make_tensor_v2(build: _Build, args: tuple[Any, ...]) -> Any:
    if not 5 <= len(args) <= 7:
        _wrong("a tensor")
    if (len(args) > 5 and not _is_hooks(args[5])) or (len(args) > 6 and args[6]):
        return Call(REBUILD_TENSOR_V2, args)  # a conjugate or negated view, or hooks: kept, not read as a tensor
    return _tensor(build, args[0], args[1], args[2], args[3], args[4])


def _make_tensor_v3(build: _Build, args: tuple[Any, ...]) -> Any:
    if not 7 <= len(args) <= 8 or type(args[0]) is not StorageRef or type(args[6]) is not TorchDType:
        _wrong("a tensor")
    if not _is_hooks(args[5]) or (len(args) > 7 and args[7]):
        return Call(REBUILD_TENSOR_V3, args)
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
        return Call(REBUILD_PARAMETER if len(args) == 3 else REBUILD_PARAMETER_WITH_STATE, args)
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
    if make is None or kind not in (TENSOR, PARAMETER):
        return Call(REBUILD_FROM_TYPE_V2, args)
    made = make(build, inner)
    if type(made) is not TensorRef or made.parameter != (kind == PARAMETER):
        return Call(REBUILD_FROM_TYPE_V2, args)
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
    if len(args) != 1 or not is_dims(args[0]):
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
    return Call(GETATTR, args)


_Maker = Callable[[_Build, tuple[Any, ...]], Any]

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
# Looked up by identity: the records here are the only ones that name these (see _named).
_MAKER_OF_ID: dict[int, _Maker] = {id(known): make for known, make in _MAKERS.items()}
_INTERNED: dict[tuple[str, str], Global | TorchDType] = {
    **{(known.module, known.name): known for known in chain(_MAKERS, STORAGE_DTYPES, (TENSOR, PARAMETER))},
    **{("torch", dtype.torch): TorchDType(dtype.name) for dtype in BY_TORCH.values()},
}


def _named(module: str, name: str) -> Global | TorchDType:
    """The record of a name, checked: identifiers joined by dots, so that it can be written back as text."""
    module = MODULE_READ.get(module, module)
    known = _INTERNED.get((module, name))
    if known is not None:
        return known
    if not is_name(module) or not is_name(name):
        raise Bad("E426", f"refers to {ascii(module)[:80]} {ascii(name)[:80]}, which is no name")
    return Global(module, name)


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
                raise Bad("E423", "uses a number of more than 64 bits as a key")
        elif kind is tuple or kind is Size or kind is frozenset:
            if len(part) > KEY_PARTS_MAX - n:
                break
            parts.extend(part)
        elif kind not in _PLAIN_KEYS:
            raise Bad("E423", f"uses a {kind.__name__} as a key")
    if parts:
        raise Bad("E423", f"uses a tuple of more than {KEY_PARTS_MAX} parts as a key")


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
    # All that is made stays: looking for garbage among millions of new values would take a third of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = _run(data, file, build)
        check_nesting(value, file)
    finally:
        if collecting:
            gc.enable()
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
                    raise Bad("E420", f"numbers a value {index} after {pos} bytes")
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
                    raise Bad("E420", "has a text that ends behind the pickle")
                push(str(data[pos:end], "utf-8", "surrogatepass"))
                pos = end
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                function = stack[-1]
                if type(args) is not tuple:
                    raise Bad("E422", f"calls with {kind_of(args)} for arguments")
                make = _MAKER_OF_ID.get(id(function))
                if make is not None:
                    stack[-1] = make(build, args)
                elif type(function) is Global or type(function) is Call:
                    stack[-1] = Call(function, args)
                else:
                    raise Bad("E422", f"calls {kind_of(function)}")
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
                    raise Bad("E420", "has a text that ends behind the pickle")
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
                    raise Bad("E422", f"appends to {kind_of(target)}")
            elif op == 0x63:  # GLOBAL
                middle = data.find(b"\n", pos)
                end = data.find(b"\n", middle + 1)
                if middle < 0 or end < 0:
                    raise Bad("E420", "has a name without an end")
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
                    raise Bad("E422", f"appends to {kind_of(target)}")
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
                    raise Bad("E426", "refers to something by a name that is no text")
                stack[-1] = _named(stack[-1], last)
            elif op == 0x2E:  # STOP
                value = stack.pop()
                if stack or below:
                    raise Bad("E420", "ends with values left over")
                return value
            else:
                # The seldom ones take the stack and give it back, for those that change it.
                pos, stack = _rare(op, data, pos, stack, below, memo, build)
                push = stack.append
    except Bad as bad:
        fail(bad.code, f"{file}: the pickle {bad.message}", Label(file, where=f"byte {start} of the pickle"))
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        if pos >= size or size - pos < 8:
            what = "ends before it is complete"
        else:
            what = "has an instruction that does not fit what stands before it"
        fail("E420", f"{file}: the pickle {what}", Label(file, where=f"byte {start} of {size} of the pickle"))


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
            raise Bad("E420", "has a text that ends behind the pickle")
        found = data[pos + length_bytes : end]
        pos = end
        return found

    def line() -> bytes:
        nonlocal pos
        end = data.find(b"\n", pos)
        if end < 0:
            raise Bad("E420", "has a line without an end")
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
                raise Bad("E421", f"is of protocol {data[pos]}")
            pos += 1
        case 0x95:  # FRAME
            if pos + 8 + _u64(data, pos)[0] > size:
                raise Bad("E420", "has a frame that ends behind the pickle")
            pos += 8
        case 0x8A:  # LONG1
            stack.append(int.from_bytes(block(1), "little", signed=True))
        case 0x8B:  # LONG4
            if data[pos + 3] > 127:
                raise Bad("E420", "has a number of negative length")
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
                raise Bad("E422", f"adds members to {kind_of(stack[-1])}")
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
                raise Bad("E422", f"calls with {kind_of(kwargs)} for named arguments")
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
                raise Bad("E420", "has a number that is none") from None
        case 0x56:  # UNICODE: text
            stack.append(str(line(), "raw-unicode-escape"))
        case 0x70:  # PUT
            index = _int_of_text(line())
            if not 0 <= index <= pos:
                raise Bad("E420", f"numbers a value {index} after {pos} bytes")
            memo[index] = stack[-1]
        case 0x67:  # GET
            stack.append(memo[_int_of_text(line())])
        case _:
            raise Bad("E421", f"uses the instruction 0x{op:02x}")
    return pos, stack


def _int_of_text(text: bytes) -> int:
    try:
        if len(text) <= INT_TEXT_MAX:
            return int(text)
    except ValueError:
        pass
    raise Bad("E420", "has a number that is none")


def _text_of_python2(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Bad("E421", "has bytes of Python 2 that are no text") from None


def _storage(pid: Any) -> StorageRef:
    """The persistent id that torch writes for a storage: ("storage", class, key, location, elements)."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise Bad("E427", "refers to an outside object that is no storage")
    _, kind, name, location, numel = pid
    dtype = STORAGE_DTYPES.get(kind) if type(kind) is Global else None
    if dtype is None:
        raise Bad("E427", f"has a storage of the unknown class {kind_of(kind)}")
    if type(name) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < 1 << 60:
        raise Bad("E427", "has a storage with a wrong name, place or length")
    return StorageRef(name, dtype, numel, location)


def _set_items(target: Any, items: list[Any]) -> None:
    """Pairs (key, value, key, value, ...) into a dict or an object."""
    if len(items) & 1:
        raise Bad("E420", "sets a key without a value")
    keys, values = items[::2], items[1::2]
    kind = type(target)
    if kind is Call:
        target.dict_items.extend(zip(keys, values, strict=True))
        return
    if kind is not dict and kind is not OrderedDict:
        raise Bad("E422", f"sets items of {kind_of(target)}")
    for key in keys:
        if type(key) is not str:
            _check_key(key)
    target.update(zip(keys, values, strict=True))


def _new(stack: list[Any], build: _Build, args: Any, kwargs: dict[str, Any]) -> None:
    function = stack[-1]
    if type(args) is not tuple:
        raise Bad("E422", f"makes an object from {kind_of(args)}")
    make = _MAKER_OF_ID.get(id(function))
    if make is not None and not kwargs and function in (ORDERED_DICT, SET, FROZENSET, SIZE, BYTEARRAY, COMPLEX):
        stack[-1] = make(build, args)
    elif type(function) is Global or type(function) is Call:
        stack[-1] = Call(function, args, kwargs, new=True)
    else:
        raise Bad("E422", f"makes an object of {kind_of(function)}")


def _build_state(target: Any, state: Any) -> None:
    kind = type(target)
    if kind is Call and target.state is None:
        target.state = state
    elif kind is OrderedDict and attributes_of(target) is None and type(state) is dict:
        if not all(type(name) is str for name in state):
            raise Bad("E422", "names an attribute by something that is no text")
        if state:
            set_attributes(target, state)
    else:
        raise Bad("E422", f"sets attributes of {kind_of(target)}")
