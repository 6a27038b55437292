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

from attrs import frozen

from ucpl.errors import Label, fail
from ucpl.extents import Call, Global, StorageRef, TensorRef
from ucpl.stores.inert import (
    BYTEARRAY,
    COMPLEX,
    FROZENSET,
    NUMBER_BYTES_MAX,
    ORDERED_DICT,
    PICKLE_BYTES_MAX,
    SET,
    SIZE,
    Bad,
    attributes_of,
    check_nesting,
    kind_of,
    set_attributes,
    unsafe_globals,
    walk,
)
from ucpl.stores.pickle_values import MAKER_OF_ID, Build, check_key, record_of, storage_of
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

INT_TEXT_MAX = NUMBER_BYTES_MAX * 12 // 5  # digits of a number written out as text (protocol 0)


@frozen
class Pickle:
    """A pickle as read: its value, and every storage and tensor that it built, in the order of the file."""

    value: object
    storages: tuple[StorageRef, ...]
    tensors: tuple[TensorRef, ...]


# ---- the machine ---------------------------------------------------------------------------------------------------

_u16 = struct.Struct("<H").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from

_EMPTY: tuple[object, ...] = ()


def loads(data: bytes, file: str = "pickle") -> object:
    """The value of a pickle (protocols 0 to 5), inert. `file` is the name that errors give.

    Raises: UcplError E420-E427.
    """
    return load_pickle(data, file).value


def load_pickle(data: bytes, file: str = "pickle") -> Pickle:
    """As `loads`, with the storages and tensors that were built."""
    if len(data) > PICKLE_BYTES_MAX:
        fail("E425", f"the pickle has {len(data)} bytes, more than {PICKLE_BYTES_MAX} are not read", Label(file))
    build = Build([], [], [4 * len(data) + (1 << 20)])
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


def _run(data: bytes, file: str, build: Build) -> object:
    """One loop, the most frequent instructions first. Every read is checked: by index, by struct, or against `size`."""
    size = len(data)
    pos = start = 0
    stack: list[object] = []
    push = stack.append
    below: list[list[object]] = []  # the stacks under each MARK
    memo: dict[int, object] = {}
    globals_seen: dict[bytes, object] = {}
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
                make = MAKER_OF_ID.get(id(function))
                if make is not None:
                    stack[-1] = make(build, args)
                elif type(function) is Global or type(function) is Call:
                    stack[-1] = Call(function, args)
                else:
                    raise Bad("E422", f"calls {kind_of(function)}")
            elif op == 0x51:  # BINPERSID
                made = storage_of(stack[-1])
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
                    named = globals_seen[text] = record_of(str(module, "utf-8"), str(name, "utf-8"))
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
                stack[-1] = record_of(stack[-1], last)
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
    stack: list[object],
    below: list[list[object]],
    memo: dict[int, object],
    build: Build,
) -> tuple[int, list[object]]:
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

    def pop_mark() -> list[object]:
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
            if NUMBER_BYTES_MAX < _u32(data, pos)[0] <= size - pos - 4:
                raise Bad("E425", f"has a number of {_u32(data, pos)[0]} bytes")
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
                check_key(item)
            stack[-1].update(items)
        case 0x91:  # FROZENSET
            items = pop_mark()
            for item in items:
                check_key(item)
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
            made: dict[object, object] = {}
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


def _set_items(target: object, items: list[object]) -> None:
    """Pairs (key, value, key, value, ...) into a dict or an object."""
    if len(items) & 1:
        raise Bad("E420", "sets a key without a value")
    keys, values = items[::2], items[1::2]
    if type(target) is Call:
        target.dict_items.extend(zip(keys, values, strict=True))
        return
    if not (type(target) is dict or type(target) is OrderedDict):
        raise Bad("E422", f"sets items of {kind_of(target)}")
    for key in keys:
        if type(key) is not str:
            check_key(key)
    target.update(zip(keys, values, strict=True))


def _new(stack: list[object], build: Build, args: object, kwargs: dict[str, object]) -> None:
    function = stack[-1]
    if type(args) is not tuple:
        raise Bad("E422", f"makes an object from {kind_of(args)}")
    make = MAKER_OF_ID.get(id(function))
    if make is not None and not kwargs and function in (ORDERED_DICT, SET, FROZENSET, SIZE, BYTEARRAY, COMPLEX):
        stack[-1] = make(build, args)
    elif type(function) is Global or type(function) is Call:
        stack[-1] = Call(function, args, kwargs, new=True)
    else:
        raise Bad("E422", f"makes an object of {kind_of(function)}")


def _build_state(target: object, state: object) -> None:
    if type(target) is Call and target.state is None:
        target.state = state
    elif type(target) is OrderedDict and attributes_of(target) is None and type(state) is dict:
        if not all(type(name) is str for name in state):
            raise Bad("E422", "names an attribute by something that is no text")
        if state:
            set_attributes(target, state)
    else:
        raise Bad("E422", f"sets attributes of {kind_of(target)}")
