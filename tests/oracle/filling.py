"""The elements that `fill` lines of a target fill, one by one.

The rules are the manual's.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from tests.oracle.homes import Home
from tests.oracle.names import Meaning, Refused, Tensor
from ucpl.language import nodes

__all__ = ["filled"]

Element = tuple[str, str, tuple[int, ...]]  # (state, tensor, index in positions of the tensor)
ITSELF = {"weight", "fp32", "master", "param"}  # the parameter itself
CLASSES = {"parameter": {"trainable", "parameter"}, "frozen": {"frozen", "parameter"}, "buffer": {"buffer"}}


def filled(has: set[Element], derives: dict[str, str], target: Meaning, stored: list[Home]) -> dict[Any, Fraction]:
    """(file, key, position) -> the numbers of elements that the source lacks.

    has: the source's states. derives: its states that are made of others. Raises Refused where no line says a number.
    """
    itself = ITSELF | target.derived | target.origins | set(derives) | set(derives.values())
    lines = [i for i in target.fills if target.numbers.holds(i.when)]
    out = {}
    for home in stored:
        for position, cell in enumerate(home.cells):
            if not isinstance(cell, tuple):
                continue
            path, index = cell[0], tuple(cell[1])
            if {(home.state, path, index), (derives.get(home.state, ""), path, index)} & has:
                continue
            known = any((state, path, index) in has for state in itself)
            said = [
                (rank(i, target), number(i, target))
                for i in lines
                if speaks(i, target, (home.state, path, index), itself) and not (known and isinstance(i, nodes.Fill))
            ]
            best = {value for place, value in said if place == max(p for p, _ in said)}
            if len(best) != 1:
                raise Refused(f"{home.state} of {path}{list(index)}: {sorted(best)}")
            a, b = home.value[path]
            out[home.file, home.key, position] = a * best.pop() + b
    return out


def number(line: Any, target: Meaning) -> Fraction:
    return (
        Fraction(line.value.value) if isinstance(line.value, nodes.Text) else Fraction(target.numbers.value(line.value))
    )


def rank(line: Any, target: Meaning) -> tuple[int, ...]:
    """The greatest holds.

    By name with brackets, by name, the most literal glob, the narrowest class; groups, then names.
    """
    if isinstance(line, nodes.FillStates):
        return int(line.groups not in (None, ("*",))), int(line.names is not None)
    if line.glob:
        return 1, sum(map(len, line.glob)), {None: 0, "parameter": 1}.get(line.of, 2)
    if line.path == "*":
        return 0, 0, {None: 0, "parameter": 1}.get(line.of, 2)
    return 2 + bool(line.indices), 0, 0


def speaks(line: Any, target: Meaning, element: Element, itself: set[str]) -> bool:
    state, path, index = element
    tensor = target.tensors[path]
    if isinstance(line, nodes.FillStates):
        groups = {g.name: g.members or () for g in target.model_groups}
        of = line.groups in (None, ("*",)) or any(path in groups[g] for g in line.groups or ())
        return tensor.kind == "parameter" and of and (state in line.names if line.names else state not in itself)
    if state not in itself or (line.of is not None and line.of not in CLASSES[tensor.kind]):
        return False
    if line.path == "*" or line.glob:
        return not line.glob or matches(line.glob, path)
    return target.aliases.get(line.path, line.path) == path and within(line.indices, tensor, index, target)


def matches(glob: tuple[str, ...], name: str) -> bool:
    """A star is any run of characters, of none, too."""
    if len(glob) == 1:
        return name == glob[0]
    first, rest = glob[0], glob[1:]
    tails = range(len(first), len(name) + 1)
    return name.startswith(first) and any(matches(rest, name[at:]) for at in tails)


def within(brackets: tuple[Any, ...], tensor: Tensor, index: tuple[int, ...], target: Meaning) -> bool:
    left = list(tensor.dims)
    for axis in brackets:
        dim = left[0] if isinstance(axis, nodes.Any_) else axis.name
        left.remove(dim)
        d = tensor.dims.index(dim)
        if tensor.ranges[d][index[d]] not in target.numbers.among(axis.range, target.degree(dim)):
            return False
    return True
