"""Damage to values and bytes.

A type exchanged, a number made huge, a list shortened, a key dropped, a header bent.
"""

from __future__ import annotations

import math
import reprlib
from collections import OrderedDict
from collections.abc import Callable
from random import Random
from typing import Any

from attrs import define, evolve, field

from ucpl.extents import Global, PickledCall, Size, StorageRef, TensorRef, TorchDType

LONELY = "\ud800"  # half of a character
NAMES: tuple[Any, ...] = (
    "",
    "a.b",
    "..",
    "/",
    "*",
    "weight",
    "fp32",
    LONELY,
    "²",
    "\0",
    "x" * 5000,
    0,
    -1,
    10**30,
    None,
)
KEYS: tuple[Any, ...] = (*NAMES, (1, "a"), b"key", 1.5, True)


def _cycle() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


# Makers, as some values are changed later on.
VALUES: tuple[Callable[[], Any], ...] = (
    *(lambda v=value: v for value in (None, True, False, 0, 1, 2, 3, -1, 4, 10**6, 10**12, 1 << 62, 1 << 63, 10**30)),
    *(lambda v=value: v for value in (-(10**30), 1 << 16000, 0.0, 0.5, 2.0, 1e300, math.inf, -math.inf, math.nan)),
    *(lambda v=value: v for value in ("", "x", "auto", "fp32", LONELY, "²", "x" * 70000, b"", b"raw", 1j, ())),
    *(
        lambda v=value: v
        for value in ((1,), (1, 2, 3), ("a", [1]), Size(), Size([2, 3]), Size([1 << 62] * 3), frozenset({1}))
    ),
    *(list, dict, set, OrderedDict, _cycle, lambda: bytearray(b"x"), lambda: slice(1, 2, None)),
    *(lambda: [0], lambda: [1, 2], lambda: ["a"], lambda: [[]], lambda: [{}], lambda: [None], lambda: {"a": 1}),
    *(lambda: {0: {}}, lambda: {"enabled": True}, lambda: [{"params": [0]}], lambda: {"state": {}, "param_groups": []}),
    *(
        lambda: TorchDType("bf16"),
        lambda: Global("os", "system"),
        lambda: PickledCall(Global("builtins", "eval"), ("1",)),
    ),
    *(
        lambda: PickledCall(Global("collections", "Counter"), ({"a": 1},)),
        lambda: PickledCall(Global("a", "B"), new=True, state=[1]),
    ),
)


def value_of(rng: Random, tensors: list[TensorRef]) -> Any:
    """A value to put somewhere.

    Now and then a tensor of the same file.
    """
    if tensors and rng.random() < 0.15:
        return rng.choice(tensors)
    return rng.choice(VALUES)()


@define(eq=False)
class Kept:
    """The contents of containers before the damage.

    A tree is damaged and mended instead of read anew.
    """

    before: list[tuple[Any, Any]] = field(factory=list)  # (container, its content), in the order of the damage
    bends: bool = False  # whether a tensor was put there that its file does not have

    def keep(self, container: Any) -> None:
        held = evolve(container) if type(container) is PickledCall else container.copy()
        self.before.append((container, held))

    def mend(self) -> None:
        for container, held in reversed(self.before):
            if type(container) is PickledCall:
                container.args, container.state = held.args, held.state
                container.list_items, container.dict_items = held.list_items, held.dict_items
            else:
                container.clear()
                (container.extend if type(container) is list else container.update)(held)
        self.before.clear()


def damage_value(
    rng: Random, root: Any, tensors: list[TensorRef] | None = None, kept: Kept | None = None
) -> tuple[Any, str]:
    """A value tree with one to three changed parts, and their description.

    `kept` mends it.
    """
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        root, how = _once(rng, root, tensors or [], kept or Kept())
        done.append(how)
    return root, "; ".join(done)


def _once(rng: Random, root: Any, tensors: list[TensorRef], kept: Kept) -> tuple[Any, str]:
    path: list[tuple[Any, Any]] = []  # (container, key)
    here = root
    while (steps := _steps(here)) and (not path or rng.random() < 0.75):
        key = rng.choice(steps)
        path.append((here, key))
        here = _part(here, key)
    if not path:
        made = value_of(rng, tensors)
        return made, f"the whole became {_short(made)}"
    container, key = path[-1]
    kept.keep(container)
    where = "/".join(str(k)[:40] for _, k in path)
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            made = value_of(rng, tensors)
            _put(container, key, made)
            return root, f"{where} became {_short(made)}"
        case 4:
            _drop(container, key)
            return root, f"{where} was dropped"
        case 5 if isinstance(container, list):
            container.insert(key, value_of(rng, tensors))
            return root, f"{where} was pushed on"
        case 5 | 6 if isinstance(container, dict):
            other = rng.choice(KEYS)
            container[other] = _part(container, key) if rng.random() < 0.5 else value_of(rng, tensors)
            if rng.random() < 0.5:
                _drop(container, key)
            return root, f"{where} was renamed to {_short(other)}"
        case 7:
            other = rng.choice(_steps(container))
            one, two = _part(container, key), _part(container, other)
            _put(container, key, two)
            _put(container, other, one)
            return root, f"{where} was exchanged with {str(other)[:40]}"
        case 8:
            made = _near(rng, here)
            kept.bends |= type(here) is TensorRef
            _put(container, key, made)
            return root, f"{where} became {_short(made)}, from {_short(here)}"
        case _:
            wrapped: Any = [here] if rng.random() < 0.5 else {"a": here}
            _put(container, key, wrapped)
            return root, f"{where} was wrapped"


def _near(rng: Random, value: Any) -> Any:
    """Something near a value, where limits are."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice(
                (
                    value + 1,
                    value - 1,
                    value * 2,
                    -value,
                    value * 10**9,
                    value << 62,
                    hex(value),
                    float(max(-1 << 60, min(value, 1 << 60))),
                )
            )
        case float():
            return rng.choice((-value, value + 1, math.nan, str(value)))
        case str():
            many = 100 if len(value) < 100_000 else 2  # damaged before, it may have been made long already
            return rng.choice(
                (value + "x", value[:-1], value.upper(), value + ".0", f"0.{value}", value * many, LONELY + value)
            )
        case Size():
            return rng.choice(
                (Size(value[:-1]), Size([*value, 1]), Size([n + 1 for n in value]), list(value), Size([-1, *value]))
            )
        case list():
            return rng.choice(
                (value[:-1], value + value, [*value, None], tuple(value), value[::-1], dict(enumerate(value)))
            )
        case tuple():
            return rng.choice((value[:-1], value + value, (*value, None), list(value), value[::-1]))
        case dict():
            pairs = list(value.items())
            rng.shuffle(pairs)
            return rng.choice((dict(pairs), dict(pairs[:-1]), list(value), OrderedDict(pairs), [*value.values()]))
        case TensorRef():
            storage = value.storage
            return rng.choice(
                (
                    TensorRef(storage, value.offset, (value.shape and value.shape[:-1]) or (), value.stride[:-1]),
                    TensorRef(storage, value.offset, (0,), (1,)),
                    TensorRef(storage, value.offset, (), ()),
                    TensorRef(storage, value.offset, (1, *value.shape), (1, *value.stride)),
                    TensorRef(storage, value.offset, value.shape, tuple(0 for _ in value.stride)),
                    TensorRef(storage, 0, (1 << 40,), (0,)),
                    TensorRef(StorageRef(storage.name, "u8", storage.numel), 0, (1,), (1,)),
                )
            )
        case PickledCall():
            return rng.choice((value.state, value.args, value.function, list(value.args)))
        case _:
            return None


def _steps(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    if type(value) is list:
        return list(range(len(value)))
    if type(value) is PickledCall:
        return [name for name in ("args", "state", "list_items", "dict_items") if getattr(value, name)]
    return []


def _part(container: Any, key: Any) -> Any:
    return getattr(container, key) if type(container) is PickledCall else container[key]


def _put(container: Any, key: Any, value: Any) -> None:
    if type(container) is not PickledCall:
        container[key] = value
    elif key == "args":
        container.args = tuple(value) if isinstance(value, list | tuple) else (value,)
    elif key == "state":
        container.state = value
    else:
        setattr(container, key, [])


def _drop(container: Any, key: Any) -> None:
    if type(container) is PickledCall:
        _put(container, key, [])
    else:
        del container[key]


class Short(reprlib.Repr):
    """Of large values a few parts.

    A tree of thousands took longer to print than to read.
    """

    maxlevel = 3

    def repr_Call(self, value: PickledCall, level: int) -> str:
        return f"Call({value.function!r}, ...)"

    def repr_OrderedDict(self, value: OrderedDict[Any, Any], level: int) -> str:
        return self.repr_dict(value, level)


SHORT = Short()


def _short(value: Any) -> str:
    if type(value) is int:
        return f"int of {value.bit_length()} bits"
    try:
        return f"{type(value).__name__} {SHORT.repr(value)[:60].encode('ascii', 'backslashreplace').decode()}"
    except ValueError:  # a number in it that Python does not print
        return type(value).__name__


def damage_bytes(rng: Random, raw: bytes, low: int = 0, high: int | None = None) -> tuple[bytes, str]:
    """Bytes with some changed, cut or doubled between two positions."""
    made = bytearray(raw)
    high = len(made) if high is None else min(high, len(made))
    at = rng.randrange(low, high) if low < high else 0
    match rng.randrange(6):
        case 0:
            return bytes(made[:at]), f"cut at {at}"
        case 1:
            size = rng.randrange(1, 9)
            made[at : at + size] = b""
            return bytes(made), f"{size} bytes gone at {at}"
        case 2:
            size = rng.randrange(1, 40)
            made[at:at] = made[at : at + size]
            return bytes(made), f"{size} bytes doubled at {at}"
        case 3:
            made[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\x01\0\0\0"))
            return bytes(made), f"a number bent at {at}"
        case _:
            places = [rng.randrange(low, high) for _ in range(rng.choice((1, 1, 2, 8)))] if low < high else []
            for place in places:
                made[place] = rng.choice((made[place] ^ (1 << rng.randrange(8)), rng.randrange(256)))
            return bytes(made), f"bytes changed at {places}"
