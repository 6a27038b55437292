"""Values that torch.load(weights_only=True) refuses, written as dicts that it takes, and back.

`{"ucpl": KIND, ...}` stands for an inert object, a name, a dtype, an OrderedDict with attributes, a set. A dict that itself
has a key "ucpl" is written as its items, so that nothing is taken for what it is not.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ucpl.extents import Call, Global, Size, TorchDType
from ucpl.stores.pickles import attributes_of, set_attributes

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
    match value:
        case {"ucpl": "global", "name": str(name)} if name.count(":") == 1:
            return Global(*name.split(":"))
        case {"ucpl": "dtype", "name": str(name)}:
            return TorchDType(name)
        case {"ucpl": "size", "of": list(numbers)}:
            return Size(numbers)
        case {"ucpl": "complex", "of": [float(real), float(imag)]}:
            return complex(real, imag)
        case {"ucpl": "slice", "of": [start, stop, step]}:
            return slice(start, stop, step)
        case {"ucpl": "bytearray", "of": bytes(raw)}:
            return bytearray(raw)
        case {"ucpl": "set" | "frozenset" as word, "of": list(items)}:
            members = [decode(item, memo) for item in items]
            return set(members) if word == "set" else frozenset(members)
        case {"ucpl": "dict", "ordered": ordered, "items": list(pairs)}:
            made: dict[Any, Any] = OrderedDict() if ordered else {}
            memo[id(value)] = (made, value)
            for key, item in pairs:
                made[decode(key, memo)] = decode(item, memo)
            if isinstance(made, OrderedDict) and "attributes" in value:
                set_attributes(made, decode(value["attributes"], memo))
            return made
        case {"ucpl": "call", "function": _, "args": _, "kwargs": _, "state": _, "list": _, "dict": list(pairs)}:
            function = decode(value["function"], memo)
            if not isinstance(function, (Global, Call)):
                return None
            call = Call(function, new=bool(value.get("new")))
            memo[id(value)] = (call, value)
            call.args = tuple(decode(value["args"], memo))
            call.kwargs = decode(value["kwargs"], memo)
            call.state = decode(value["state"], memo)
            call.list_items = decode(value["list"], memo)
            call.dict_items = [(decode(k, memo), decode(v, memo)) for k, v in pairs]
            return call
    return None
