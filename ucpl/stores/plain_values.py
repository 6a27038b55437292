"""Values that torch.load(weights_only=True) refuses, written as dicts that it takes, and back.

`{"ucpl": KIND, ...}` stands for an inert object, a name, a dtype, an OrderedDict with attributes, a set. A dict that itself
has a key "ucpl" is written as its items, so that nothing is taken for what it is not.
"""

from __future__ import annotations

from collections import OrderedDict
from types import NoneType
from typing import Any

from ucpl.extents import DTYPES, Call, Global, Size, TorchDType
from ucpl.stores.inert import attributes_of, is_dims, is_name, set_attributes
from ucpl.stores.pickle_values import is_key

_MARK = "ucpl"


def encode(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A value tree without classes. Containers that are shared stay shared."""
    memo = {} if memo is None else memo
    kind = type(value)
    if kind is Global:
        return {_MARK: "global", "name": f"{value.module}:{value.name}"}
    if kind is TorchDType:
        return {_MARK: "dtype", "name": value.name}
    if kind is Size:
        return {_MARK: "size", "of": list(value)}
    if kind is complex:
        return {_MARK: "complex", "of": [value.real, value.imag]}
    if kind is slice:
        return {_MARK: "slice", "of": [value.start, value.stop, value.step]}
    if kind is bytearray:
        return {_MARK: "bytearray", "of": bytes(value)}
    if kind not in (dict, OrderedDict, list, tuple, set, frozenset, Call):
        return value
    if id(value) in memo:
        return memo[id(value)][0]
    if kind is tuple:
        made_tuple = tuple(encode(item, memo) for item in value)
        memo[id(value)] = (made_tuple, value)
        return made_tuple
    if kind is list:
        made_list: list[Any] = []
        memo[id(value)] = (made_list, value)
        made_list.extend(encode(item, memo) for item in value)
        return made_list
    made: dict[str, Any] = {}
    memo[id(value)] = (made, value)
    if kind is set or kind is frozenset:
        made |= {_MARK: kind.__name__, "of": [encode(item, memo) for item in sorted(value, key=repr)]}
    elif kind is Call:
        made |= {_MARK: "call", "function": encode(value.function, memo), "new": value.new}
        made |= {"args": encode(value.args, memo), "kwargs": encode(value.kwargs, memo)}
        made |= {"state": encode(value.state, memo), "list": encode(value.list_items, memo)}
        made["dict"] = [[encode(k, memo), encode(v, memo)] for k, v in value.dict_items]
    elif kind is OrderedDict or _MARK in value or not all(type(key) in (str, int, float, bool, bytes) for key in value):
        made |= {_MARK: "dict", "ordered": kind is OrderedDict}
        made["items"] = [[encode(k, memo), encode(v, memo)] for k, v in value.items()]
        if kind is OrderedDict and (attributes := attributes_of(value)) is not None:
            made["attributes"] = encode(attributes, memo)
    else:
        for key, item in value.items():
            made[key] = encode(item, memo)
    return made


def decode(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """The inverse of `encode`. A dict with an unknown mark is left as it is."""
    memo = {} if memo is None else memo
    kind = type(value)
    if kind not in (dict, OrderedDict, list, tuple):
        return value
    if id(value) in memo:
        return memo[id(value)][0]
    if kind is tuple:
        made_tuple = tuple(decode(item, memo) for item in value)
        memo[id(value)] = (made_tuple, value)
        return made_tuple
    if kind is list:
        made_list: list[Any] = []
        memo[id(value)] = (made_list, value)
        made_list.extend(decode(item, memo) for item in value)
        return made_list
    made = _marked(value, memo)
    if made is not None:
        return made
    plain: dict[Any, Any] = {}
    memo[id(value)] = (plain, value)
    for key, item in value.items():
        plain[key] = decode(item, memo)
    return plain


def _marked(value: dict[Any, Any], memo: dict[int, Any]) -> Any:
    """What a marked dict stands for; None where it is not as `encode` writes it."""
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


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2


def _dict(value: dict[Any, Any], ordered: bool, pairs: list[Any], memo: dict[int, Any]) -> Any:
    made: dict[Any, Any] = OrderedDict() if ordered else {}
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


def _call(value: dict[Any, Any], pairs: list[Any], memo: dict[int, Any]) -> Any:
    function = decode(value["function"], memo)
    if not isinstance(function, (Global, Call)):
        return None
    call = Call(function, new=bool(value.get("new")))
    memo[id(value)] = (call, value)
    args, kwargs, items = (decode(value[part], memo) for part in ("args", "kwargs", "list"))
    is_whole = isinstance(args, list | tuple) and isinstance(kwargs, dict) and isinstance(items, list)
    if not is_whole or not all(map(_is_pair, pairs)) or not all(isinstance(name, str) for name in kwargs):
        return None
    call.args, call.kwargs, call.list_items = tuple(args), kwargs, items
    call.state = decode(value["state"], memo)
    call.dict_items = [(decode(k, memo), decode(v, memo)) for k, v in pairs]
    return call
