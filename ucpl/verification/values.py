"""Compare values that are not tensors: hyper-parameters, counters, client_state with its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from attrs import field

from ucpl.errors import Diagnostic, Label, catalogue
from ucpl.extents import DTYPES, Extent, Global, Joined, PickledCall, Scalar, TensorRef, TorchDType
from ucpl.files.carrying import Place, by_place, origin_of
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.scalars import number_of
from ucpl.records import frozen
from ucpl.registry import format_named

__all__ = ["ValueDifference", "ValueTensors", "apart", "value_text", "unlike_hypers", "unlike_numbers"]

_CONTAINERS = (dict, list, tuple, PickledCall)
_NUMBERS = (bool, int, float)


@frozen
class ValueDifference:
    """One place where two values differ, as texts."""

    path: str
    a: str
    b: str


class ValueTensors:
    """The tensors inside values of one checkpoint, by place, and its folder."""

    def __init__(self, root: Path, known: dict[Place, Extent]) -> None:
        self.root = root
        self._known = known

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ValueTensors:
        """The tensors that a checkpoint carries."""
        return cls(checkpoint.root, by_place(checkpoint.carried_extents.values()))

    def extent(self, t: TensorRef) -> Extent | None:
        file, name = origin_of(t.storage.name)
        return self._known.get((file, name, t.offset, t.shape, t.stride, t.storage.dtype))

    def chunks(self, extent: Extent) -> Iterator[bytes]:
        """The tensor's bytes, row-major, about a MiB at a time.

        Raises: UcplError E610, E611.
        """
        from ucpl.verification.tiles import JoinedBoxes, TensorBoxes, tiles_of  # who only prints values reads none

        opened = JoinedBoxes if isinstance(extent, Joined) else TensorBoxes
        with opened.of(self.root, extent) as tiles:
            for tile in tiles_of(extent.shape, DTYPES[extent.dtype].itemsize, is_row_major=True):
                yield tiles.read(tile).tobytes()


def apart(path: str, a: object, b: object, ours: ValueTensors, theirs: ValueTensors) -> Iterator[ValueDifference]:
    """Every place where two value trees differ. Numbers are equal by value.

    A NaN equals itself.
    """
    yield from _Trees(ours, theirs).apart(path, a, b)


@frozen
class _Trees:
    ours: ValueTensors
    theirs: ValueTensors
    # Containers that were compared with each other: shared ones are compared once, and a cycle ends.
    met: set[tuple[int, int]] = field(factory=set)

    def apart(self, path: str, a: object, b: object) -> Iterator[ValueDifference]:
        a, b = number_of(a), number_of(b)
        if isinstance(a, TensorRef) and isinstance(b, TensorRef):
            yield from _tensors(path, a, b, self.ours, self.theirs)
        elif isinstance(a, _CONTAINERS) and isinstance(b, _CONTAINERS):
            if (id(a), id(b)) not in self.met:
                self.met.add((id(a), id(b)))
                yield from self.inside(path, a, b)
        elif isinstance(a, float) and isinstance(b, float) and a != a and b != b:
            return
        elif isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS):
            if a != b:
                yield ValueDifference(path, value_text(a), value_text(b))
        elif type(a) is not type(b) or a != b:
            yield ValueDifference(path, value_text(a), value_text(b))

    def inside(self, path: str, a: object, b: object) -> Iterator[ValueDifference]:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in [*a, *(k for k in b if k not in a)]:
                name = f"{path}.{key}" if path else str(key)
                if key not in a or key not in b:
                    yield ValueDifference(name, _value_or_nothing(a, key), _value_or_nothing(b, key))
                else:
                    yield from self.apart(name, a[key], b[key])
        elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            if len(a) != len(b):
                yield ValueDifference(path, f"{len(a)} values", f"{len(b)} values")
            for i, (x, y) in enumerate(zip(a, b, strict=False)):
                yield from self.apart(f"{path}[{i}]", x, y)
        elif isinstance(a, PickledCall) and isinstance(b, PickledCall):
            for name in ("function", "args", "kwargs", "state", "list_items", "dict_items"):
                yield from self.apart(f"{path}.{name}", getattr(a, name), getattr(b, name))
        else:
            yield ValueDifference(path, value_text(a), value_text(b))


def _tensors(
    path: str, a: TensorRef, b: TensorRef, ours: ValueTensors, theirs: ValueTensors
) -> Iterator[ValueDifference]:
    if (a.storage.dtype, tuple(a.shape)) != (b.storage.dtype, tuple(b.shape)):
        yield ValueDifference(path, value_text(a), value_text(b))
        return
    mine, yours = ours.extent(a), theirs.extent(b)
    if 0 in a.shape:
        return
    if mine is None or yours is None:
        reach = ("a tensor" if x is not None else "a tensor out of reach" for x in (mine, yours))
        yield ValueDifference(path, *reach)
        return
    at = 0
    size = DTYPES[mine.dtype].itemsize
    for x, y in zip(ours.chunks(mine), theirs.chunks(yours), strict=False):
        if x != y:
            first = (
                int(np.flatnonzero(np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8))[0])
                if len(x) == len(y)
                else 0
            )
            n = (at + first) // size
            low = n * size - at
            index = [int(i) for i in np.unravel_index(n, mine.shape)] if mine.shape else []
            values = (x[low : low + size], y[low : low + size])
            yield ValueDifference(f"{path}{index}", *(value_text(number_of(Scalar(mine.dtype, (), v))) for v in values))
            return
        at += len(x)


def _value_or_nothing(value: dict[object, object], key: object) -> str:
    return value_text(value[key]) if key in value else "nothing"


def value_text(value: object) -> str:
    """A value in few words."""
    match value:
        case TensorRef():
            return f"a tensor {value.storage.dtype} {list(value.shape)}"
        case PickledCall():
            return f"an object of {value_text(value.function)}"
        case Global():
            return f"{value.module}.{value.name}"
        case TorchDType():
            return value.name
        case Scalar():
            return f"{value.data.hex()} ({value.dtype})"
        case dict():
            return f"a dict of {len(value)}"
        case _:
            text = repr(value)
            return text if len(text) <= 60 else text[:57] + "..."


# ---- values of groups ------------------------------------------------------------------------------------------------


def unlike_hypers(known: Checkpoint, written: Checkpoint, code: str, *, every: bool = False) -> Iterator[Diagnostic]:
    """Hyper-parameters of a parameter that differ; of two groups, the first parameter.

    known: the checkpoint with the right values. every: also values and parameters that one side lacks.
    """
    ours, theirs = ValueTensors.of(known), ValueTensors.of(written)
    left = {"params", "param_names", *format_named(written.state.framework).remade_hypers}
    groups = {name: i for i, group in enumerate(known.state.groups) for name in group.members}
    there = {name: j for j, group in enumerate(written.state.groups) for name in group.members}
    met: set[tuple[int, int | None]] = set()
    for name, i in groups.items():
        j, right = there.get(name), known.state.groups[i]
        if (i, j) in met or (j is None and not every):
            continue
        met.add((i, j))
        if j is None:
            yield _unlike(code, (known, written), "the group", name, (right.name, "nothing"))
            continue
        mine = written.state.groups[j]
        for key in dict.fromkeys((*right.hyper, *mine.hyper)):
            if key in left:
                continue
            if key in right.hyper and key in mine.hyper:
                for one in apart(str(key), right.hyper[key], mine.hyper[key], ours, theirs):
                    yield _unlike(code, (known, written), one.path, name, (one.a, one.b))
            elif every and not _is_default(value := {**right.hyper, **mine.hyper}[key]):
                text = value_text(number_of(value))
                both = (text, "nothing") if key in right.hyper else ("nothing", text)
                yield _unlike(code, (known, written), str(key), name, both)


def unlike_numbers(known: Checkpoint, written: Checkpoint, code: str) -> Iterator[Diagnostic]:
    """The first parameter of each state with another number, as `step`."""
    for state in dict.fromkeys((*known.state.scalars, *written.state.scalars)):
        right, mine = known.state.scalars.get(state, {}), written.state.scalars.get(state, {})
        for name in dict.fromkeys((*right, *mine)):
            a, b = number_of(right.get(name)), number_of(mine.get(name))
            if a != b and not (a is None and b == 0) and not (b is None and a == 0):
                yield _unlike(code, (known, written), state, name, (value_text(a), value_text(b)))
                break


def _unlike(
    code: str, sides: tuple[Checkpoint, Checkpoint], what: str, name: str, values: tuple[str, str]
) -> Diagnostic:
    known, written = (str(one.top) for one in sides)
    return Diagnostic(
        code,
        f"{what} of `{name}` is {values[1]} in {written}, and {values[0]} in {known}",
        (Label(known, values[0], where=what), Label(written, values[1], where=what)),
        remedy=catalogue()[code].remedy,
    )


def _is_default(value: object) -> bool:
    """If a value is the default of an optimizer."""
    return value is None or value is False or isinstance(value, str)
