"""Fill lines from `--fill NAME=VALUE`, added to a target's layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve

from ucpl.conversion.requests import Called
from ucpl.errors import Label, UcplError, fail
from ucpl.language import nodes, parse
from ucpl.language.words import quote
from ucpl.layout.fills import COUNTED, PARAMETER
from ucpl.layout.globs import matches
from ucpl.layout.library import KnownStatement
from ucpl.layout.name_remedies import nearest
from ucpl.records import frozen
from ucpl.registry import format_named
from ucpl.resources import VERSIONS

if TYPE_CHECKING:
    from ucpl.conversion.side import Side

__all__ = ["numbers_of_fills", "with_fills"]

SHOWN = 60  # characters of an argument that a message repeats
SHOWN_NAMES = 3
_WORD = re.compile(r'[^\s"\[\]]+')
_NUMBER = re.compile(r"[+-]?[0-9]+")
_TEXT = "ucpl {}\nlayout x() of any {{\n  fill {} = {}\n}}\n"


def with_fills(one: Called, texts: Sequence[str], model: nodes.Model, source: Iterable[str] = ()) -> Called:
    """The layout with these lines after its own.

    model: the model of the layout. source: the source's tensors; a message names those of the model that it lacks.

    Raises: UcplError E197.
    """
    if not texts:
        return one
    layout = one.library.layout(one.call.name)
    assert isinstance(layout.node, nodes.Layout)
    known = _Names(model, frozenset(source), one.is_of_any)
    lines = tuple(line for text in texts for line in _lines(text, known))
    made = KnownStatement(evolve(layout.node, items=(*layout.node.items, *lines)), layout.file)
    return Called(evolve(one.library, known={**one.library.known, one.call.name: made}), one.call)


def numbers_of_fills(source: Side, target: Side) -> tuple[dict[str, dict[str, float]], tuple[str, ...]]:
    """Numbers (`step`) from `fill` lines, and one note for each state.

    The lines give numbers to parameters that have none.
    """
    has_numbers = not format_named(target.layout.framework).has_tensors_alone(target.layout.settings)
    known = source.checkpoint.state.scalars if source.checkpoint is not None else None
    kept = {s.name for s in source.layout.states if s.scalar}
    counted = {s.name for s in target.layout.states if s.scalar}
    ours = {path for path, t in source.layout.tensors.items() if t.kind == "parameter"}
    found: dict[str, dict[str, float]] = {}
    for line in sorted(target.layout.fillings, key=lambda line: line.rank) if has_numbers else ():
        for state in (s.name for s in target.layout.states if s.name in counted and s.name in (line.states or ())):
            had = known.get(state, {}).keys() if known is not None else ours if state in kept else set()
            for path in target.layout.tensors:
                if path in line.names and path not in had and line.value is not None:
                    found.setdefault(state, {})[path] = line.value
    said = []
    for state, numbers in found.items():
        for value in sorted({*numbers.values()}):
            n = sum(v == value for v in numbers.values())
            said.append(f"{state} with {value:g}: {n:,} parameter{'s' * (n != 1)} (the source has none of them)")
    for line in target.layout.fillings:
        if line.span.line and line.states and line.states <= counted and not line.states & found.keys():
            names = " and no ".join(sorted(line.states))
            why = "the source has all of it" if has_numbers else f"the target stores no {names}"
            said.append(f"nothing by `{line.text}`: {why}")
    return found, tuple(said)


def _read(left: str, value: str) -> nodes.File:
    """The line, in the newest version that has its words."""
    try:
        return parse(_TEXT.format(VERSIONS[-1], left, value), "--fill")
    except UcplError as error:
        with suppress(UcplError):
            return parse(_TEXT.format(VERSIONS[0], left, value), "--fill")
        raise error from None


@frozen
class _Names:
    """Names that the left of a line can mean."""

    model: nodes.Model
    source: frozenset[str]
    is_of_any: bool

    @property
    def tensors(self) -> list[str]:
        return [i.path for i in self.model.items if isinstance(i, nodes.Tensor | nodes.Alias)]

    @property
    def states(self) -> set[str]:
        return {name for i in self.model.items if isinstance(i, nodes.State) for name in i.names}

    def to_write(self) -> str:
        """Tensors that the source lacks, and the model's states."""
        stored = (i.path for i in self.model.items if isinstance(i, nodes.Tensor))
        lacking = [name for name in stored if name not in self.source] if self.source else []
        more = f" and {len(lacking) - SHOWN_NAMES:,} more" if len(lacking) > SHOWN_NAMES else ""
        first = ", ".join(f"`{name}`" for name in lacking[:SHOWN_NAMES])
        known = f"the source lacks {first}{more}; " if lacking else "the source has every tensor; " * bool(self.source)
        return f"{known}the states are {', '.join(sorted(self.states)) or 'none'}"


def _lines(text: str, known: _Names) -> list[nodes.LayoutItem]:
    """Parse `exp_avg=0`, `embed[v[32000..]]=0` or `state exp_avg=0`.

    A bare name is a tensor or, as in --drop, a state.
    """
    left, equals, value = (part.strip() for part in text.rpartition("="))
    if not equals or not left or not value:
        _refuse(text, "not of the form NAME=VALUE")
    if not _NUMBER.fullmatch(value) and value != "weight":
        value = f'"{value}"'
    if _WORD.fullmatch(left) and left != "*":  # a name or a glob, as --drop takes it
        left = quote(left)
    try:
        (layout,) = _read(left, value).statements
    except UcplError as error:
        _refuse(text, f"this is no fill line: {error.diagnostics[0].message}")
    assert isinstance(layout, nodes.Layout)
    here = nodes.Span(0, len(text), 1, 1, f"--fill {text[:SHOWN]}")
    return [_meant(text, evolve(line, span=here), known) for line in layout.items]


def _meant(text: str, line: nodes.LayoutItem, known: _Names) -> nodes.LayoutItem:
    """Resolve a bare name: if no tensor has it, a state.

    Over any model, the state can be a new one of a known optimizer.
    """
    if isinstance(line, nodes.Fill) and line.glob and not any(matches(line.glob, name) for name in known.tensors):
        _refuse(text, "it matches no tensor", known.to_write())
    if not isinstance(line, nodes.Fill) or line.path == "*" or line.glob or line.indices or line.of:
        return line
    tensors, states, name = known.tensors, known.states, line.path
    if name in tensors and name in states:
        _refuse(text, f"`{name}` is a tensor and a state", f"for the state: --fill 'state {name}=0'")
    if name in tensors:
        return line
    from ucpl.conversion.grouping import FROM_ZERO

    usual = {*FROM_ZERO, *COUNTED} if known.is_of_any else set()
    if name in states or name in PARAMETER or name in usual:
        return nodes.FillStates((name,), None, line.value, line.when, span=line.span)
    if "." in name:
        close = nearest(name, tensors)
        _refuse(text, f"no tensor is called `{name}`", f"did you mean `{close}`?" if close else known.to_write())
    close = nearest(name, [*tensors, *states, *sorted(usual)])
    new = f"a state that is new: --fill 'state {name}={text.rpartition('=')[2].strip()}'"
    if not known.is_of_any:
        new = f"a new state needs a line in the model {known.model.name}"
    remedy = f"did you mean `{close}`? {new[0].upper()}{new[1:]}" if close else f"{known.to_write()}; {new}"
    _refuse(text, f"no tensor and no state is called `{name}`", remedy)


def _refuse(text: str, what: str, remedy: str = "") -> NoReturn:
    fail(
        "E197", f"--fill {text[:SHOWN]}: {what}", Label("<command line>", where=f"--fill {text[:SHOWN]}"), remedy=remedy
    )
