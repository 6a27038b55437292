"""The values of names from a text and its config.json.

A rank's part uses the smallest degrees that divide.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import RLock
from typing import TYPE_CHECKING

from attrs import field

from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.lsp.files import Config, EditorTexts
from ucpl.lsp.mending import mended
from ucpl.records import define, frozen

if TYPE_CHECKING:
    from ucpl.layout import Layout, Library, LogicalTensor
    from ucpl.layout.scope import Scope, Value
    from ucpl.placement import Part, Placement

__all__ = ["TensorShare", "TextSizes", "sizes_of"]

DEGREES = (2, 3, 4, 5, 6, 7, 8)  # degrees to try for an axis; then 1
SHOWN_MAX = 3


@frozen
class TensorShare:
    """The first rank's part of a tensor, in one layout.

    `stored`: (count, shape, the first one's key).
    """

    call: str
    ranks: int
    elements: int
    stored: tuple[tuple[int, tuple[int, ...], str], ...]


@define(eq=False)
class TextSizes:
    """The values of one state of a text.

    Each is computed once, when it is needed, by one thread at a time.
    """

    library: Library | None
    config: Config | None
    file: nodes.File | None
    located: dict[str, Placement | None] = field(factory=dict)
    calls: dict[str, str] = field(factory=dict)
    lock: AbstractContextManager[object] = field(factory=RLock)

    def number(self, block: str, name: str) -> Value:
        """The value of a name in a model or layout ("": outside).

        None if it has no value.
        """
        placement = self.placement(block) if self._node(block, nodes.Layout) is not None else None
        if placement is not None and name in placement.layout.sizes:
            return placement.layout.sizes[name]
        return self._alone(block, name)

    def _alone(self, block: str, name: str) -> Value:
        """The value in the model, or the file, alone."""
        layout = self._node(block, nodes.Layout)
        try:
            with self.lock:
                scope, _ = self._scope(layout.of if isinstance(layout, nodes.Layout) else block)
            if isinstance(layout, nodes.Layout):
                scope.bind(layout.items)
            return scope.value(name) if scope.knows(name) or name.startswith("config.") else None
        except UcplError:
            return None

    def _scope(self, model: str) -> tuple[Scope, Sequence[nodes.ModelItem]]:
        """The names of a model without a layout, and its statements.

        The statements of its bases are included.
        """
        from ucpl.layout.scope import Scope
        from ucpl.layout.statements import called_model

        scope = Scope(config=self.config.values if self.config is not None else {})
        scope.bind(self.file.statements if self.file is not None else ())
        node = self._node(model, nodes.Model)
        if self.library is None or not isinstance(node, nodes.Model):
            return scope, ()
        scope.bind(self.library.model(model).file.statements)
        try:
            items = called_model(self.library, nodes.Call(model)).items
        except UcplError:  # it has a parameter that only a call gives
            items = node.items
        scope.bind(items)
        return scope, items

    def _node(self, name: str, kind: type) -> nodes.Model | nodes.Layout | None:
        found = self.library.known.get(name) if self.library is not None and name else None
        return found.node if found is not None and isinstance(found.node, kind) else None  # type: ignore[return-value]

    def layouts(self) -> list[str]:
        """The layouts that the file itself has."""
        statements = self.file.statements if self.file is not None else ()
        return [s.name for s in statements if isinstance(s, nodes.Layout)]

    def layouts_of(self, model: str) -> list[str]:
        statements = self.file.statements if self.file is not None else ()
        return [s.name for s in statements if isinstance(s, nodes.Layout) and s.of == model]

    def placement(self, layout: str) -> Placement | None:
        """A layout at the smallest degrees above one that divide.

        For the first rank; None if it cannot be placed.
        """
        with self.lock:
            if layout not in self.located:
                self.located[layout] = self._placed(layout)
            return self.located[layout]

    def _placed(self, name: str) -> Placement | None:
        node = self._node(name, nodes.Layout)
        if not isinstance(node, nodes.Layout) or node.of == "any":
            return None
        axes = self._axes(node)
        found = self._at(name, dict.fromkeys(axes, DEGREES[0]))
        if found is None:
            found = self._searched(name, {p.name: 1 for p in node.parameters if p.default is None}, axes)
        if found is not None:
            self.calls[name] = _short_call(found.layout)
        return found

    def _axes(self, node: nodes.Layout) -> list[str]:
        """The arguments of a call for its ranks.

        They are mesh axes with the default 1, and parameters without a default.
        """
        from ucpl.conversion.degrees import degrees_of

        assert self.library is not None
        try:
            meshed = degrees_of(self.library, node)
        except UcplError:
            meshed = ()
        single = nodes.Number(1)
        return [p.name for p in node.parameters if p.default is None or (p.name in meshed and p.default == single)]

    def _searched(self, name: str, given: dict[str, int], axes: Sequence[str]) -> Placement | None:
        """Raise each axis in turn to the smallest degree that divides."""
        found = self._at(name, given)
        for axis in axes:
            for degree in DEGREES:
                tried = self._at(name, {**given, axis: degree})
                if tried is not None:
                    given, found = {**given, axis: degree}, tried
                    break
        return found

    def _at(self, name: str, degrees: dict[str, int]) -> Placement | None:
        from ucpl.conversion.requests import Called, Given
        from ucpl.conversion.side import located

        assert self.library is not None
        call = nodes.Call(name, tuple(nodes.Argument(p, nodes.Number(n)) for p, n in degrees.items()))
        config = self.config.values if self.config is not None else None
        try:
            return located(Called(self.library, call), Given(config=config), rank=0).placement
        except UcplError:
            return None

    def tensor(self, model: str, path: str) -> LogicalTensor | None:
        """A tensor of a model, with its sizes.

        A layout of the file gives them, else the model alone.
        """
        for layout in self.layouts_of(model):
            placement = self.placement(layout)
            if placement is not None:
                return placement.layout.tensors.get(path)
        from ucpl.layout.models import tensors_of

        try:
            with self.lock:
                scope, items = self._scope(model)
            alone = [i for i in items if not isinstance(i, nodes.Tensor) or i.path == path]
            return tensors_of(alone, scope).get(path)
        except UcplError:
            return None

    def held(self, layout: str, path: str) -> TensorShare | None:
        """The first rank's part of a tensor's weight or a joined entry."""
        placement = self.placement(layout)
        if placement is None:
            return None
        numbers = [placement.tensors.index(path)] if path in placement.tensors else []
        parts = [
            p for p in placement.parts if p.state == "weight" and (p.label == path or set(numbers) & set(p.tensors))
        ]
        numbers = numbers or sorted({n for part in parts for n in part.tensors})
        elements = sum(_elements(part, number) for part in parts for number in numbers)
        stored = _stored(parts, numbers)
        return TensorShare(_short_call(placement.layout), placement.layout.ranks, elements, stored) if numbers else None


def _elements(part: Part, number: int) -> int:
    """The number of a tensor's elements in a part.

    Copies count each time.
    """
    folded = part.folded
    return int(folded.volume[folded.tensor == number].sum())


def _stored(parts: list[Part], numbers: list[int]) -> tuple[tuple[int, tuple[int, ...], str], ...]:
    """The stored tensors, those of one shape together."""
    from ucpl.extents import key_text

    shapes: Counter[tuple[int, ...]] = Counter()
    first: dict[tuple[int, ...], str] = {}
    for part in parts:
        pieces = part.pieces
        for home in sorted(
            {h for h, t in zip(pieces.home.tolist(), pieces.tensor.tolist(), strict=True) if t in numbers}
        ):
            one = part.homes.home(home)
            shapes[one.shape] += 1
            first.setdefault(one.shape, f"{one.file}: {key_text(one.key)}")
    return tuple((count, shape, first[shape]) for shape, count in shapes.most_common(SHOWN_MAX))


def _short_call(layout: Layout) -> str:
    """The call with the arguments that have no default."""
    from ucpl.extents.train_state import is_of_default

    texts = [f"{n} = {v}" for n, v, origin in layout.origins if not is_of_default(origin)]
    return f"{layout.name}({', '.join(texts)})"


def sizes_of(texts: EditorTexts, path: str) -> TextSizes:
    """The values of a file in the editor.

    If it does not parse, of the statements without faults.
    """
    from ucpl.layout import load

    outline = texts.outline(path)
    text = mended(outline) if outline is not None else None
    config = texts.config(path)
    if text is None:
        return TextSizes(None, config, None)

    def beside(name: str) -> str | None:
        place = os.path.normpath(name)
        other = texts.outline(place) if place in texts.opened else None
        return mended(other) if other is not None else texts.text(place)

    try:
        library = load((path, text), read=beside)
    except UcplError:
        return TextSizes(None, config, None)
    return TextSizes(library, config, library.files[path])
