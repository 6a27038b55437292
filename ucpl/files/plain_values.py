"""Values that torch.load(weights_only=True) refuses, written as dicts that it takes, and back.

`{"ucpl": KIND, ...}` encodes an inert object, a name, a dtype, an OrderedDict with attributes, a set. A dict with its
own key "ucpl" is written as its items, so that decoding is unambiguous.
"""

from __future__ import annotations

from collections import OrderedDict
from types import NoneType
from typing import overload

from ucpl.extents import DTYPES, Global, PickledCall, Size, TorchDType
from ucpl.files.inert import LEAVES, attributes_of, is_dims, is_name, set_attributes
from ucpl.files.pickle_values import is_key

_MARK = "ucpl"
_Memo = dict[int, tuple[object, object]]  # by id: the copy of a value, and the value, which keeps its id taken


@overload
def encode(value: dict[str, object], memo: _Memo | None = None) -> dict[str, object]: ...
@overload
def encode(value: object, memo: _Memo | None = None) -> object: ...
def encode(value: object, memo: _Memo | None = None) -> object:
    """A value tree without classes. Containers that are shared stay shared."""
    memo = {} if memo is None else memo
    if type(value) in LEAVES:
        return _leaf(value)
    if id(value) in memo:
        return memo[id(value)][0]
    if type(value) is tuple:
        made_tuple = tuple(encode(item, memo) for item in value)
        memo[id(value)] = (made_tuple, value)
        return made_tuple
    if type(value) is list:
        made_list: list[object] = []
        memo[id(value)] = (made_list, value)
        made_list.extend(encode(item, memo) for item in value)
        return made_list
    made: dict[object, object] = {}
    if type(value) is set or type(value) is frozenset:
        memo[id(value)] = (made, value)
        made |= {_MARK: type(value).__name__, "of": [encode(item, memo) for item in sorted(value, key=repr)]}
    elif type(value) is PickledCall:
        memo[id(value)] = (made, value)
        _put_call(made, value, memo)
    elif type(value) is dict or type(value) is OrderedDict:
        memo[id(value)] = (made, value)
        _put_items(made, value, memo)
    else:
        return value  # a tensor: torch.load takes it
    return made


def _leaf(value: object) -> object:
    """A value without other values, in a form that torch.load takes."""
    if type(value) is Global:
        return {_MARK: "global", "name": f"{value.module}:{value.name}"}
    if type(value) is TorchDType:
        return {_MARK: "dtype", "name": value.name}
    if type(value) is Size:
        return {_MARK: "size", "of": list(value)}
    if type(value) is complex:
        return {_MARK: "complex", "of": [value.real, value.imag]}
    if type(value) is slice:
        return {_MARK: "slice", "of": [value.start, value.stop, value.step]}
    if type(value) is bytearray:
        return {_MARK: "bytearray", "of": bytes(value)}
    return value


def _put_call(made: dict[object, object], value: PickledCall, memo: _Memo) -> None:
    made |= {_MARK: "call", "function": encode(value.function, memo), "new": value.new}
    made |= {"args": encode(value.args, memo), "kwargs": encode(value.kwargs, memo)}
    made |= {"state": encode(value.state, memo), "list": encode(value.list_items, memo)}
    made["dict"] = [[encode(k, memo), encode(v, memo)] for k, v in value.dict_items]


def _put_items(made: dict[object, object], value: dict[object, object], memo: _Memo) -> None:
    is_ordered = type(value) is OrderedDict
    if not is_ordered and _MARK not in value and all(type(key) in (str, int, float, bool, bytes) for key in value):
        for key, item in value.items():
            made[key] = encode(item, memo)
        return
    made |= {_MARK: "dict", "ordered": is_ordered}
    made["items"] = [[encode(k, memo), encode(v, memo)] for k, v in value.items()]
    if type(value) is OrderedDict and (attributes := attributes_of(value)) is not None:
        made["attributes"] = encode(attributes, memo)


def decode(value: object, memo: _Memo | None = None) -> object:
    """The inverse of `encode`; dicts with unknown marks are unchanged."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][0]
    if type(value) is tuple:
        made_tuple = tuple(decode(item, memo) for item in value)
        memo[id(value)] = (made_tuple, value)
        return made_tuple
    if type(value) is list:
        made_list: list[object] = []
        memo[id(value)] = (made_list, value)
        made_list.extend(decode(item, memo) for item in value)
        return made_list
    if not (type(value) is dict or type(value) is OrderedDict):
        return value
    made = _marked(value, memo)
    if made is not None:
        return made
    plain: dict[object, object] = {}
    memo[id(value)] = (plain, value)
    for key, item in value.items():
        plain[key] = decode(item, memo)
    return plain


def _marked(value: dict[object, object], memo: _Memo) -> object:
    """The value of a marked dict, or None if it is invalid."""
    match value:
        case {"ucpl": "global", "name": str(name)} if name.count(":") == 1 and all(map(is_name, name.split(":"))):
            return Global(*name.split(":"))
        case {"ucpl": "dtype", "name": str(name)} if name in DTYPES:
            return TorchDType(name)
        case {"ucpl": "size", "of": list(numbers)} if is_dims(tuple(numbers)):
            return Size(numbers)
        case {"ucpl": "complex", "of": [float(real), float(imag)]}:
            return complex(real, imag)
        case {"ucpl": "slice", "of": [start, stop, step]} if all(
            type(n) in (int, NoneType) for n in (start, stop, step)
        ):
            return slice(start, stop, step)
        case {"ucpl": "bytearray", "of": bytes(raw)}:
            return bytearray(raw)
        case {"ucpl": "set" | "frozenset" as word, "of": list(items)}:
            members = [decode(item, memo) for item in items]
            if all(map(is_key, members)):
                return set(members) if word == "set" else frozenset(members)
        case {"ucpl": "dict", "ordered": ordered, "items": list(pairs)} if all(map(_is_pair, pairs)):
            return _dict(value, bool(ordered), pairs, memo)
        case {"ucpl": "call", "function": _, "args": _, "kwargs": _, "state": _, "list": _, "dict": list(pairs)}:
            return _call(value, pairs, memo)
    return None


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2


def _dict(value: dict[object, object], ordered: bool, pairs: list[tuple[object, object]], memo: _Memo) -> object:
    made: dict[object, object] = OrderedDict() if ordered else {}
    memo[id(value)] = (made, value)
    for key, item in pairs:
        named = decode(key, memo)
        if not is_key(named):
            return None
        made[named] = decode(item, memo)
    attributes = decode(value.get("attributes"), memo)
    if isinstance(made, OrderedDict) and isinstance(attributes, dict):
        set_attributes(made, attributes)
    return made


def _call(value: dict[object, object], pairs: list[tuple[object, object]], memo: _Memo) -> object:
    function = decode(value["function"], memo)
    if not isinstance(function, (Global, PickledCall)):
        return None
    call = PickledCall(function, new=bool(value.get("new")))
    memo[id(value)] = (call, value)
    args, kwargs, items = decode(value["args"], memo), decode(value["kwargs"], memo), decode(value["list"], memo)
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict) or not isinstance(items, list):
        return None
    if not all(map(_is_pair, pairs)) or not all(isinstance(name, str) for name in kwargs):
        return None
    call.args, call.kwargs, call.list_items = tuple(args), kwargs, items
    call.state = decode(value["state"], memo)
    call.dict_items = [(decode(k, memo), decode(v, memo)) for k, v in pairs]
    return call
