"""Tensors whose names differ only in numbers, as one.

Equal layers and experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise, product
from math import prod

from ucpl.inference.hf.records import FoundTensor
from ucpl.records import frozen

__all__ = ["Folded", "Form", "Span", "fold", "form_of", "is_literal", "joined", "stepped"]

Form = tuple[str | None, ...]  # parts of a name; None where a number is
Span = tuple[int, ...]  # the numbers that stand at one place of a name, in order

_NUMBERS = {str(n): n for n in range(100_000)}  # parts of a name that count: no zeros in front
_STORED_MAX = 100_000  # places of one folded tensor, those without a name counted: a layout has room for ten such


@frozen
class Folded:
    """One tensor of the spec.

    One of the file, or of all layers.
    """

    pattern: Form
    containers: tuple[str, ...]  # the container of each folded number: "model.layers"
    spans: tuple[Span, ...]
    first: FoundTensor

    @property
    def sample(self) -> str:
        return self.first.name


def fold(tensors: Iterable[FoundTensor]) -> list[Folded]:
    """Join tensors whose names differ only in numbers.

    The numbers must be a full grid, and all else must agree.
    """
    groups: dict[tuple[Form, tuple[int, ...], str, bool], list[tuple[tuple[int, ...], FoundTensor]]] = {}
    for t in tensors:
        form, numbers = form_of(t.name)
        groups.setdefault((form, t.shape, t.dtype, t.is_buffer), []).append((numbers, t))
    kinds = Counter(form for form, *_ in groups)
    out: list[Folded] = []
    for (form, *_), members in groups.items():
        spans = _grid([numbers for numbers, _ in members])
        alone = len(members) == 1 and kinds[form] > 1  # the only one of its kind among several: no layers
        if spans is None or alone or None not in form:
            out += [Folded(tuple(t.name.split(".")), (), (), t) for _, t in members]
            continue
        out.append(_folded(form, spans, members[0][1]))
    return out


def _folded(form: Form, spans: tuple[Span, ...], first: FoundTensor) -> Folded:
    """A full grid as one tensor.

    A constant number behind the first is part of the name (`layer.0` of every block).
    """
    pattern = list(form)
    containers: list[str] = []
    kept: list[Span] = []
    found = iter(spans)
    for i, part in enumerate(first.name.split(".")):
        if form[i] is not None:
            continue
        span, container = next(found), joined(tuple(pattern[:i]), "*")
        if kept and len(span) == 1 and "expert" not in container:
            pattern[i] = part
        else:
            containers.append(container)
            kept.append(span)
    return Folded(tuple(pattern), tuple(containers), tuple(kept), first)


def form_of(name: str) -> tuple[Form, tuple[int, ...]]:
    """The parts of a name, with its numbers apart."""
    parts = name.split(".")
    if is_literal(name):
        return tuple(parts), ()
    form = tuple([None if p in _NUMBERS else p for p in parts])
    return form, tuple([_NUMBERS[p] for p in parts if p in _NUMBERS])


def is_literal(name: str) -> bool:
    """Test whether a template would misread a name.

    It may have braces, or a number in place of a text.
    """
    return "{" in name or "}" in name or name.isdecimal()


def joined(pattern: Form, mark: str) -> str:
    """The name of a pattern, with a mark where numbers are folded."""
    return ".".join(mark if p is None else p for p in pattern)


def stepped(span: Span) -> range | None:
    """The range that some numbers are, where they have one step."""
    steps = {b - a for a, b in pairwise(span)}
    if not span:
        return None
    return range(span[0], span[-1] + 1, steps.pop() if steps else 1) if len(steps) < 2 else None


def _grid(numbers: list[tuple[int, ...]]) -> tuple[Span, ...] | None:
    """Sets of numbers whose product they are, or None."""
    spans = [tuple(sorted(set(column))) for column in zip(*numbers, strict=True)]
    if prod(span[-1] + 1 for span in spans) > _STORED_MAX:
        return None
    return tuple(spans) if set(product(*spans)) == set(numbers) else None
