"""Each folded tensor's sizes and ranges in every version of the class."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from ucpl.frontends.hf.folding import Folded, Form, form_of, joined
from ucpl.frontends.hf.records import Facts, Found, Vector

__all__ = ["Versions"]


@define
class _Same:
    """Tensors of one version whose names differ in numbers alone."""

    shapes: dict[tuple[int, ...], tuple[int, ...]] = field(factory=dict)  # numbers -> shape
    low: list[int] = field(factory=list)  # the least number in each place
    high: list[int] = field(factory=list)

    def ends(self) -> None:
        """Its least and greatest numbers, once all are known."""
        columns = list(zip(*self.shapes, strict=True))
        self.low, self.high = [*map(min, columns)], [*map(max, columns)]


class Versions:
    """The variations of a class, by the forms of names."""

    def __init__(self, facts: Facts, folded: Iterable[Folded]) -> None:
        self._versions = [_by_form(v.tensors) for v in facts.variations]
        own: dict[str, int] = {}
        for f in folded:
            for container, span in zip(f.containers, f.ranges, strict=True):
                own[container] = max(own.get(container, 0), span.stop)
        self._lengths = [own, *map(_lengths, self._versions)]

    def shape(self, f: Folded) -> tuple[Vector, ...] | None:
        """The sizes of each axis, or None where a version has no such tensor."""
        form, numbers = form_of(f.sample)
        shapes = [f.first.shape]
        for version in self._versions:
            same = version.get(form)
            if same is None:
                return None
            found = set(same.shapes.values())
            shape = found.pop() if len(found) == 1 else same.shapes.get(numbers)
            if shape is None or len(shape) != len(shapes[0]):
                return None
            shapes.append(shape)
        return tuple(zip(*shapes, strict=True))

    def length(self, container: str) -> Vector:
        """How many a container has. A version that lacks it has as many as the first."""
        return tuple(lengths.get(container, self._lengths[0][container]) for lengths in self._lengths)

    def ends(self, f: Folded, place: int) -> tuple[Vector, Vector]:
        """The first number at a place of the name, and the one behind the last."""
        form, _ = form_of(f.sample)
        span = f.ranges[place]
        number = [i for i, part in enumerate(form) if part is None]
        place = number.index([i for i, part in enumerate(f.pattern) if part is None][place])
        found = [version[form] for version in self._versions if form in version]
        return (span.start, *(s.low[place] for s in found)), (span.stop, *(s.high[place] + 1 for s in found))


def _by_form(tensors: Iterable[Found]) -> dict[Form, _Same]:
    out: dict[Form, _Same] = {}
    for t in tensors:
        form, numbers = form_of(t.name)
        out.setdefault(form, _Same()).shapes[numbers] = t.shape
    for same in out.values():
        same.ends()
    return out


def _lengths(version: dict[Form, _Same]) -> dict[str, int]:
    """How many each container has: one more than the greatest number in it."""
    out: dict[str, int] = {}
    for form, same in version.items():
        places = [i for i, part in enumerate(form) if part is None]
        for i, high in zip(places, same.high, strict=True):
            container = joined(form[:i], "*")
            out[container] = max(out.get(container, 0), high + 1)
    return out
