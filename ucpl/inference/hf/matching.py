"""Each folded tensor's sizes and ranges in every version of the class."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import field

from ucpl.inference.hf.folding import Folded, Form, Span, form_of, joined
from ucpl.inference.hf.records import FoundTensor, ModelFacts, Vector
from ucpl.records import define

__all__ = ["Versions"]


@define
class _Same:
    """Tensors of one version whose names differ in numbers alone."""

    shapes: dict[tuple[int, ...], tuple[int, ...]] = field(factory=dict)  # numbers -> shape


class Versions:
    """The variations of a class, by the forms of names."""

    def __init__(self, facts: ModelFacts, folded: Iterable[Folded]) -> None:
        self._versions = [_by_form(v.tensors) for v in facts.variations]
        own: dict[str, int] = {}
        for f in folded:
            for container, span in zip(f.containers, f.spans, strict=True):
                own[container] = max(own.get(container, 0), span[-1] + 1)
        if self._versions:  # these count layers that are not folded, too
            all_ = _lengths(_by_form(facts.tensors))
            own = {container: max(n, all_.get(container, 0)) for container, n in own.items()}
        self._lengths = [own, *map(_lengths, self._versions)]
        self._behind = facts.behind

    def shape(self, f: Folded) -> tuple[Vector, ...] | None:
        """The sizes of each axis.

        None if the tensor has other axes in a version.
        """
        form, numbers = form_of(f.sample)
        shapes = [f.first.shape]
        lacking = (0,) * len(f.first.shape)
        for version in self._versions:
            same = version.get(form)
            if same is None:
                shapes.append(lacking)
                continue
            found = set(same.shapes.values())
            shape = found.pop() if len(found) == 1 else same.shapes.get(numbers)
            if shape is not None and len(shape) != len(shapes[0]):
                return None
            shapes.append(shape or lacking)
        return tuple(zip(*shapes, strict=True))

    def length(self, container: str) -> Vector:
        """The length of a container in each version."""
        return tuple(lengths.get(container, 0) for lengths in self._lengths)

    def counted(self, container: str) -> Vector:
        """The class's own length of a container, without layers behind the last."""
        first, *others = self.length(container)
        behind = self._behind
        return (first - behind.count if behind is not None and behind.container == container else first, *others)

    def spans(self, f: Folded, place: int) -> list[Span | None]:
        """The numbers at a place of a name in each version.

        None: a version lacks the tensor.
        """
        form, _ = form_of(f.sample)
        number = [i for i, part in enumerate(form) if part is None]
        at = number.index([i for i, part in enumerate(f.pattern) if part is None][place])
        found: list[Span | None] = [f.spans[place]]
        for version in self._versions:
            same = version.get(form)
            alike = same is not None and len(set(same.shapes.values())) == 1
            found.append(tuple(sorted({n[at] for n in same.shapes})) if same is not None and alike else None)
        return found


def _by_form(tensors: Iterable[FoundTensor]) -> dict[Form, _Same]:
    out: dict[Form, _Same] = {}
    for t in tensors:
        form, numbers = form_of(t.name)
        out.setdefault(form, _Same()).shapes[numbers] = t.shape
    return out


def _lengths(version: dict[Form, _Same]) -> dict[str, int]:
    """The length of each container: one more than its greatest number."""
    out: dict[str, int] = {}
    for form, same in version.items():
        places = [i for i, part in enumerate(form) if part is None]
        for i, column in zip(places, zip(*same.shapes, strict=True), strict=True):
            container = joined(form[:i], "*")
            out[container] = max(out.get(container, 0), max(column) + 1)
    return out
