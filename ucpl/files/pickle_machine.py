"""The stack machine of pickles: instructions in, one inert value out.

The frequent instructions of checkpoints are in one loop, the most frequent first, since a call costs more than most of
them do. Every other one is found in a table. Every read is checked: by index, by struct, or against the size.

Not here: the meaning of the names that a pickle calls (pickle_values).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import Global, PickledCall, TorchDType
from ucpl.files.inert import (
    BYTEARRAY,
    COMPLEX,
    FROZENSET,
    NUMBER_BYTES_MAX,
    ORDERED_DICT,
    SET,
    SIZE,
    Bad,
    attributes_of,
    kind_of,
    set_attributes,
)
from ucpl.files.pickle_runs import Irregular, PickleRuns, Run, ValuesOf
from ucpl.files.pickle_values import MAKER_OF_ID, Build, check_key, record_of, storage_of
from ucpl.records import define

__all__ = ["run"]

INT_TEXT_MAX = NUMBER_BYTES_MAX * 12 // 5  # digits of a number written out as text (protocol 0)

_u16 = struct.Struct("<H").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from

_EMPTY: tuple[object, ...] = ()


def run(
    data: bytes, file: str, build: Build, *, alone: bool = False, runs: PickleRuns | None = None
) -> tuple[object, int]:
    """The value of a pickle, and its number of bytes.

    `alone`: no bytes may follow it. `runs`: records that the machine steps over. Raises: UcplError E420-E427, with the
    place of the instruction.
    """
    machine = _Machine(data, build)
    if runs is not None:
        machine.runs, machine.memo = runs, _MemoOfRuns(runs)
        runs.memo = machine.memo
    try:
        value = _loop(machine)
        if alone and machine.pos != len(data):
            raise Bad("E420", f"has {len(data) - machine.pos} bytes behind its end")
        return value, machine.pos
    except Bad as bad:
        where = f"byte {machine.start} of the pickle"
        fail(bad.code, f"{file}: the pickle {bad.message}", Label(file, where=where))
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        size = len(data)
        if size - machine.pos < 8:
            what = "ends before it is complete"
        else:
            what = "has an instruction that does not fit the one before it"
        fail("E420", f"{file}: the pickle {what}", Label(file, where=f"byte {machine.start} of {size} of the pickle"))


class _MemoOfRuns(dict[int, object]):
    """A memo that has the texts in the records of runs, too.

    It only grows, so that a record's names stay the same.
    """

    def __init__(self, runs: PickleRuns) -> None:
        super().__init__()
        self.runs = runs

    def __setitem__(self, index: int, value: object) -> None:
        if index != len(self):
            raise Irregular
        super().__setitem__(index, value)

    def __len__(self) -> int:
        return super().__len__() + self.runs.stepped

    def __missing__(self, index: int) -> str:
        return self.runs.text(index)


@define(eq=False)
class _Machine:
    """The state of the machine for rare instructions.

    The loop keeps position and stack in local variables.
    """

    data: bytes
    build: Build
    start: int = 0  # of the instruction at hand
    pos: int = 0
    stack: list[object] = field(factory=list)
    below: list[list[object]] = field(factory=list)  # the stacks under each MARK
    memo: dict[int, object] = field(factory=dict)
    named: dict[bytes, Global | TorchDType] = field(factory=dict)  # by the text of a GLOBAL
    runs: PickleRuns | None = None

    def step(self, run: Run, stack: list[object]) -> int:
        """Step over a run, and return the position behind it.

        0: its records are left to the machine.
        """
        if self.runs is None or not self.runs.take(run, len(self.memo)):
            return 0
        stack.append(run)
        if run.form.value is not None:
            stack.append(ValuesOf(run))
        return run.end

    # -- reading

    def block(self, length_bytes: int) -> bytes:
        """Bytes behind their number."""
        raw = self.data[self.pos : self.pos + length_bytes]
        end = self.pos + length_bytes + int.from_bytes(raw, "little")
        if len(raw) < length_bytes or end > len(self.data):
            raise Bad("E420", "has a text that ends behind the pickle")
        found = self.data[self.pos + length_bytes : end]
        self.pos = end
        return found

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise Bad("E420", "has a line without an end")
        found = self.data[self.pos : end]
        self.pos = end + 1
        return found

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    # -- numbers and texts

    def protocol(self) -> None:
        if self.data[self.pos] > 5:
            raise Bad("E421", f"is of protocol {self.data[self.pos]}")
        self.pos += 1

    def frame(self) -> None:
        if self.pos + 8 + _u64(self.data, self.pos)[0] > len(self.data):
            raise Bad("E420", "has a frame that ends behind the pickle")
        self.pos += 8

    def number(self, form: Callable[[bytes, int], tuple[object, ...]], size: int) -> None:
        """BININT, BININT2, BINFLOAT."""
        self.stack.append(form(self.data, self.pos)[0])
        self.pos += size

    def long4(self) -> None:
        if self.data[self.pos + 3] > 127:
            raise Bad("E420", "has a number of negative length")
        if NUMBER_BYTES_MAX < _u32(self.data, self.pos)[0] <= len(self.data) - self.pos - 4:
            raise Bad("E425", f"has a number of {_u32(self.data, self.pos)[0]} bytes")
        self.stack.append(int.from_bytes(self.block(4), "little", signed=True))

    def int_text(self) -> None:
        """INT: text, and the booleans of protocol 1."""
        text = self.line()
        self.stack.append({b"00": False, b"01": True}[text] if text in (b"00", b"01") else _int_of_text(text))

    def float_text(self) -> None:
        try:
            self.stack.append(float(self.line()[:100]))
        except ValueError:
            raise Bad("E420", "has a number that is none") from None

    # -- names

    def name(self) -> None:
        """GLOBAL: two lines, which are met again and again."""
        middle = self.data.find(b"\n", self.pos)
        end = self.data.find(b"\n", middle + 1)
        if middle < 0 or end < 0:
            raise Bad("E420", "has a name without an end")
        text = self.data[self.pos : end]
        known = self.named.get(text)
        if known is None:
            module, _, name = text.partition(b"\n")
            known = self.named[text] = record_of(str(module, "utf-8"), str(name, "utf-8"))
        self.stack.append(known)
        self.pos = end + 1

    def name_on_stack(self) -> None:
        name = self.stack.pop()
        if type(name) is not str or type(module := self.stack[-1]) is not str:
            raise Bad("E426", "refers to something by a name that is no text")
        self.stack[-1] = record_of(module, name)

    # -- the memo

    def put(self) -> None:
        index = _int_of_text(self.line())
        if not 0 <= index <= self.pos:
            raise Bad("E420", f"numbers a value {index} after {self.pos} bytes")
        self.memo[index] = self.stack[-1]

    def get(self) -> None:
        self.stack.append(self.memo[_int_of_text(self.line())])

    # -- containers

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def pair(self) -> None:
        last = self.stack.pop()
        self.stack[-1] = (self.stack[-1], last)

    def triple(self) -> None:
        last, second = self.stack.pop(), self.stack.pop()
        self.stack[-1] = (self.stack[-1], second, last)

    def append(self) -> None:
        last = self.stack.pop()
        _append(self.stack[-1], [last])

    def appends(self) -> None:
        items = self.pop_mark()
        _append(self.stack[-1], items)

    def set_item(self) -> None:
        last, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, last])

    def set_items(self) -> None:
        items = self.pop_mark()
        _set_items(self.stack[-1], items)

    def add_items(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set:
            raise Bad("E422", f"adds members to {kind_of(target)}")
        for item in items:
            check_key(item)
        target.update(items)

    def frozen_set(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        self.stack.append(frozenset(items))

    def list_of(self) -> None:
        items = self.pop_mark()
        self.stack.append(items)

    def dict_of(self) -> None:
        items = self.pop_mark()
        made: dict[object, object] = {}
        _set_items(made, items)
        self.stack.append(made)

    # -- objects

    def new(self) -> None:
        args = self.stack.pop()
        _new(self.stack, self.build, args, {})

    def new_with_names(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        if type(kwargs) is not dict or not all(type(name) is str for name in kwargs):
            raise Bad("E422", f"calls with {kind_of(kwargs)} for named arguments")
        self.build.spend(len(kwargs))
        _new(self.stack, self.build, args, dict(kwargs))

    def set_state(self) -> None:
        state = self.stack.pop()
        _build_state(self.stack[-1], state)


_SELDOM: dict[int, Callable[[_Machine], object]] = {
    0x7D: lambda m: m.stack.append({}),  # EMPTY_DICT
    0x5D: lambda m: m.stack.append([]),  # EMPTY_LIST
    0x8F: lambda m: m.stack.append(set()),  # EMPTY_SET
    0x75: _Machine.set_items,  # SETITEMS
    0x73: _Machine.set_item,  # SETITEM
    0x65: _Machine.appends,  # APPENDS
    0x61: _Machine.append,  # APPEND
    0x86: _Machine.pair,  # TUPLE2
    0x87: _Machine.triple,  # TUPLE3
    0x4D: lambda m: m.number(_u16, 2),  # BININT2
    0x4A: lambda m: m.number(_i32, 4),  # BININT
    0x47: lambda m: m.number(_f64, 8),  # BINFLOAT
    0x63: _Machine.name,  # GLOBAL
    0x93: _Machine.name_on_stack,  # STACK_GLOBAL
    0x62: _Machine.set_state,  # BUILD
    0x81: _Machine.new,  # NEWOBJ
    0x92: _Machine.new_with_names,  # NEWOBJ_EX
    0x4E: lambda m: m.stack.append(None),  # NONE
    0x88: lambda m: m.stack.append(True),  # NEWTRUE
    0x80: _Machine.protocol,  # PROTO
    0x95: _Machine.frame,  # FRAME
    0x8A: lambda m: m.stack.append(int.from_bytes(m.block(1), "little", signed=True)),  # LONG1
    0x8B: _Machine.long4,  # LONG4
    0x43: lambda m: m.stack.append(m.block(1)),  # SHORT_BINBYTES
    0x42: lambda m: m.stack.append(m.block(4)),  # BINBYTES
    0x8E: lambda m: m.stack.append(m.block(8)),  # BINBYTES8
    0x96: lambda m: m.stack.append(bytearray(m.block(8))),  # BYTEARRAY8
    0x8D: lambda m: m.stack.append(str(m.block(8), "utf-8", "surrogatepass")),  # BINUNICODE8
    0x55: lambda m: m.stack.append(_text_of_python2(m.block(1))),  # SHORT_BINSTRING
    0x54: lambda m: m.stack.append(_text_of_python2(m.block(4))),  # BINSTRING
    0x90: _Machine.add_items,  # ADDITEMS
    0x91: _Machine.frozen_set,  # FROZENSET
    0x30: _Machine.pop,  # POP
    0x31: _Machine.pop_mark,  # POP_MARK
    0x32: lambda m: m.stack.append(m.stack[-1]),  # DUP
    0x6C: _Machine.list_of,  # LIST
    0x64: _Machine.dict_of,  # DICT
    0x49: _Machine.int_text,  # INT
    0x4C: lambda m: m.stack.append(_int_of_text(m.line().removesuffix(b"L"))),  # LONG
    0x46: _Machine.float_text,  # FLOAT
    0x56: lambda m: m.stack.append(str(m.line(), "raw-unicode-escape")),  # UNICODE
    0x70: _Machine.put,  # PUT
    0x67: _Machine.get,  # GET
}


def _loop(machine: _Machine) -> object:
    data, build, below, memo = machine.data, machine.build, machine.below, machine.memo
    begun = machine.runs.at if machine.runs is not None else {}
    size = len(data)
    pos = start = 0
    stack = machine.stack
    push = stack.append
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
            elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                if start in begun and (end := machine.step(begun[start], stack)):
                    pos = end
                else:
                    push(memo[data[pos] if op == 0x68 else _u32(data, pos)[0]])
                    pos += 1 if op == 0x68 else 4
            elif op == 0x28:  # MARK
                below.append(stack)
                stack = []
                push = stack.append
            elif op == 0x74:  # TUPLE
                items = stack
                stack = below.pop()
                push = stack.append
                push(tuple(items))
            elif op == 0x58 or op == 0x8C:  # BINUNICODE, SHORT_BINUNICODE
                pos += 4 if op == 0x58 else 1
                end = pos + (_u32(data, pos - 4)[0] if op == 0x58 else data[pos - 1])
                if end > size:
                    raise Bad("E420", "has a text that ends behind the pickle")
                push(str(data[pos:end], "utf-8", "surrogatepass"))
                pos = end
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                stack[-1] = _called(stack[-1], args, build)
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
            elif op == 0x2E:  # STOP
                value = stack.pop()
                if stack or below:
                    raise Bad("E420", "ends with values left over")
                return value
            else:
                seldom = _SELDOM.get(op)
                if seldom is None:
                    raise Bad("E421", f"uses the instruction 0x{op:02x}")
                machine.pos, machine.stack = pos, stack
                seldom(machine)
                pos, stack = machine.pos, machine.stack
                push = stack.append
    finally:
        machine.start, machine.pos = start, pos


# ---- instructions on values ----------------------------------------------------------------------------------------


def _called(function: object, args: object, build: Build) -> object:
    if type(args) is not tuple:
        raise Bad("E422", f"calls with {kind_of(args)} for arguments")
    make = MAKER_OF_ID.get(id(function))
    if make is not None:
        return make(build, args)
    if type(function) is Global or type(function) is PickledCall:
        return PickledCall(function, args)
    raise Bad("E422", f"calls {kind_of(function)}")


def _append(target: object, items: list[object]) -> None:
    if type(target) is list:
        target.extend(items)
    elif type(target) is PickledCall:
        target.list_items.extend(items)
    else:
        raise Bad("E422", f"appends to {kind_of(target)}")


def _set_items(target: object, items: list[object]) -> None:
    """Pairs (key, value, key, value, ...) into a dict or an object."""
    if len(items) & 1:
        raise Bad("E420", "sets a key without a value")
    keys, values = items[::2], items[1::2]
    if type(target) is PickledCall:
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
    elif type(function) is Global or type(function) is PickledCall:
        stack[-1] = PickledCall(function, args, kwargs, new=True)
    else:
        raise Bad("E422", f"makes an object of {kind_of(function)}")


def _build_state(target: object, state: object) -> None:
    if type(target) is PickledCall and target.state is None:
        target.state = state
    elif type(target) is OrderedDict and attributes_of(target) is None and type(state) is dict:
        if not all(type(name) is str for name in state):
            raise Bad("E422", "names an attribute by something that is no text")
        if state:
            set_attributes(target, state)
    else:
        raise Bad("E422", f"sets attributes of {kind_of(target)}")


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
