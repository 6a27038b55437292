"""Checked access to values in files.

A file may hold any value at any place. `Value` goes down by keys. Each access returns a value of the requested type, or
stops with the file, the key, the value found and the expected one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NoReturn

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Global, Key, PickledCall, Size, Step, TensorRef, key_text
from ucpl.files.inert import DIMS_MAX
from ucpl.files.torch_files import TorchFile
from ucpl.records import frozen
from ucpl.texts import is_text

Shape = tuple[int, ...]

_TEXT_SHOWN_MAX = 60  # characters
_WHERE_SHOWN_MAX = 1000
_NUMBER_MAX = 1 << 62  # of counts and sizes


class _Missing:
    """The absence of a value."""


_MISSING = _Missing()


@frozen(eq=False)
class Value:
    """A value of a file, and its place in it."""

    path: Path
    file: str
    key: Key
    held: object
    code: str = "E455"  # of errors

    @classmethod
    def of(cls, part: TorchFile, code: str = "E455") -> Value:
        """The complete value of a file."""
        return cls(part.path, part.file, (), part.value, code)

    def wrong(self, expected: str) -> NoReturn:
        """Reject this value.

        Raises: UcplError, of `code`.
        """
        where = key_text(self.key)[:_WHERE_SHOWN_MAX]
        fail(
            self.code,
            f"{self.file}: {where or 'its value'} is {kind_text(self.held)}, expected is {expected}",
            Label(str(self.path), where=where),
        )

    # ---- going down ------------------------------------------------------------------------------------------------

    def find(self, step: Step) -> Value | None:
        """The value at a key or index, or None."""
        held = self.held
        found: object = None
        if isinstance(step, int) and isinstance(held, list | tuple):
            found = held[step] if 0 <= step < len(held) else None
        else:
            found = self.mapping().get(step)
        return None if found is None else self._inner(step, found)

    def at(self, *steps: Step) -> Value:
        """The value at a path, which must exist; it may be None."""
        here = self
        for step in steps:
            if not isinstance(here.held, dict) or step not in here.held:
                here._inner(step, _MISSING).wrong("something")
            here = here._inner(step, here.held[step])
        return here

    def _inner(self, step: Step, held: object) -> Value:
        return Value(self.path, self.file, (*self.key, step), held, self.code)

    def named(self) -> Iterator[tuple[str, Value]]:
        """The values of a dict with only texts as keys."""
        for name, held in self.mapping().items():
            inner = self._inner(name if type(name) is str else repr(name)[:_TEXT_SHOWN_MAX], held)
            if type(name) is not str or not is_text(name):
                inner.wrong("something under a name")
            yield name, inner

    def items(self) -> list[Value]:
        """The values of a list or tuple."""
        if not isinstance(self.held, list | tuple) or isinstance(self.held, Size):
            self.wrong("a list")
        return [self._inner(i, held) for i, held in enumerate(self.held)]

    # ---- the value itself -------------------------------------------------------------------------------------------

    def mapping(self) -> dict[object, object]:
        """A dict, whatever its keys are."""
        if type(self.held) is not dict and type(self.held) is not OrderedDict:
            self.wrong("a dict")
        mapping: dict[object, object] = self.held
        return mapping

    def tensor(self) -> TensorRef:
        if type(self.held) is not TensorRef:
            self.wrong("a tensor")
        return self.held

    def whole(self, least: int = 0) -> int:
        """A whole number that counts something."""
        if type(self.held) is not int or not least <= self.held < _NUMBER_MAX:
            self.wrong(f"a whole number, {least} or more")
        return self.held

    def number(self, below: float = _NUMBER_MAX) -> float:
        """A finite number between 0 and `below`."""
        if not (type(self.held) is int or type(self.held) is float) or not 0 <= self.held < below:
            self.wrong("a number")
        return self.held

    def text(self) -> str:
        if type(self.held) is not str or not is_text(self.held):
            self.wrong("a text")
        return self.held

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(item.text() for item in self.items())

    def shape(self) -> Shape:
        held = self.held
        if not isinstance(held, tuple | list) or len(held) > DIMS_MAX or not all(map(_is_count, held)):
            self.wrong("a shape")
        return tuple(held)


@frozen
class Empty:
    """A tensor without elements, which the plan does not name."""

    dtype: str
    shape: tuple[int, ...]
    buffer: bool = False
    states: dict[str, str] = field(factory=dict)  # that an optimizer has of it, each with its dtype
    numbers: dict[str, object] = field(factory=dict)  # that it has of it: state -> number

    @classmethod
    def of(cls, value: Value) -> Empty:
        """The value that a reader kept."""
        dtype, shape = value.at("dtype"), value.at("shape")
        if not isinstance(dtype.held, str) or dtype.held not in DTYPES:
            dtype.wrong("a dtype")
        if prod(shape.shape()):
            shape.wrong("a shape without elements")
        buffer = value.find("buffer")
        states, numbers = value.find("states"), value.find("numbers")
        return cls(
            dtype.held,
            shape.shape(),
            buffer is not None and buffer.held is True,
            {state: dtype.text() for state, dtype in states.named()} if states is not None else {},
            {state: number.held for state, number in numbers.named()} if numbers is not None else {},
        )


def _is_count(n: object) -> bool:
    return type(n) is int and 0 <= n < _NUMBER_MAX


def kind_text(held: object) -> str:
    """A short description of a value that may be large or unprintable."""
    match held:
        case _Missing():
            return "not there"
        case None:
            return "None"
        case bool():
            return str(held)
        case int():
            return f"the number {held}" if abs(held) < _NUMBER_MAX else "a number of more than 62 bits"
        case float():
            return f"the number {held}"
        case str():
            shown = ascii(held[:_TEXT_SHOWN_MAX])
            return f"the text {shown}" + ("..." if len(held) > _TEXT_SHOWN_MAX else "")
        case TensorRef():
            return f"a tensor of shape {list(held.shape)}"
        case Size():
            return f"the shape {list(held)}"
        case list() | tuple() | dict() | set() | frozenset():
            return f"a {type(held).__name__} of {len(held)}"
        case PickledCall(function=Global(name="_rebuild_from_type_v2"), args=(_, Global() as name, *_)):
            return f"a tensor of the class {name.module}.{name.name}"
        case PickledCall(function=Global() as name):
            return f"an object of {name.module}.{name.name}"
        case _:
            return f"a {type(held).__name__}"
