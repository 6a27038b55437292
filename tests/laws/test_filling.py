"""Laws of `fill`.

Elements that a source lacks are filled by the target's lines, all others are moved, and nothing else happens.

The source is a layout at other degrees, without some tensors, states and ends of tensors.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import moves as mv
from tests.laws.agreement import both
from tests.oracle import filled, homes
from tests.oracle.names import Refused
from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.language import nodes, parse, print_file
from ucpl.placement import Part, Placement, locate
from ucpl.planning import order
from ucpl.planning.files import load_plan, save_plan
from ucpl.testing import Example, layout_pairs, models
from ucpl.verification.proof.coverage import prove


@frozen
class Less:
    """The removed elements.

    (tensor, state) pairs, and of some tensors the ends of their dims.
    """

    gone: frozenset[tuple[str, str]]
    sizes: dict[str, tuple[int, ...]]
    shorter: bool  # the source's model has the shorter tensor; else its layout stores a part of the full one

    def has(self, state: str, path: str, index: tuple[int, ...]) -> bool:
        inside = all(i < n for i, n in zip(index, self.sizes.get(path, (1 << 60,) * len(index)), strict=True))
        return (path, state) not in self.gone and inside

    def of(self, placement: Placement) -> Placement:
        layout = placement.layout
        if self.shorter:
            tensors = dict(layout.tensors)
            for path, sizes in self.sizes.items():
                indices = tuple(i[:n] for i, n in zip(tensors[path].indices, sizes, strict=True))
                tensors[path] = evolve(tensors[path], counts=sizes, indices=indices)
            layout = evolve(layout, tensors=tensors)
        parts = (self.part(placement, p) for p in placement.parts)
        return evolve(placement, layout=layout, parts=tuple(p for p in parts if len(p.folded)))

    def part(self, placement: Placement, part: Part) -> Part:
        p = part.folded
        names = [placement.tensors[t] for t in p.tensor.tolist()]
        keep = np.array([(name, part.state) not in self.gone for name in names], dtype=bool)
        high = p.high.copy()
        for row, name in enumerate(names):
            for d, n in enumerate(self.sizes.get(name, ())):
                high[row, d] = min(high[row, d], n)
        keep &= (high > p.low).all(axis=1)
        return evolve(part, folded=p.replace(high=high).take(keep))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Example, Example, Less]:
    """Two layouts of one model.

    The second one fills the elements that the first lacks.
    """
    source, target = draw(models().flatmap(layout_pairs))
    layout = target.layout()
    states = [s.name for s in layout.states if not s.scalar]
    trained = [p for p, t in layout.tensors.items() if t.kind == "parameter"]
    pairs = [(p, "weight") for p in layout.tensors] + [(p, s) for p in trained for s in states]
    gone = set(draw(st.lists(st.sampled_from(pairs), max_size=4)))
    for path in draw(st.lists(st.sampled_from(list(layout.tensors)), max_size=2)):
        gone |= {(path, s) for s in ("weight", *states)}
    sizes = {}
    for path in draw(st.lists(st.sampled_from(list(layout.tensors)), max_size=2, unique=True)):
        counts = layout.tensors[path].counts
        sizes[path] = tuple(draw(st.integers(1, n)) if n else n for n in counts)
    lines = draw(st.lists(_lines(layout.tensors, states), max_size=3, unique_by=_left))
    base: list[Any] = [nodes.Fill("*", (), nodes.Number(1))]
    base += [nodes.FillStates((s,), None, nodes.Number(2 + i)) for i, s in enumerate(states) if s != "fp32"]
    text = with_lines(target.text, [*base, *lines])
    return source, evolve(target, text=text), Less(frozenset(gone), sizes, draw(st.booleans()))


def _left(line: Any) -> Any:
    return repr(evolve(line, value=nodes.Number(0)))


def _lines(tensors: dict[str, Any], states: list[str]) -> st.SearchStrategy[Any]:
    paths = st.sampled_from(list(tensors))
    number = st.integers(8, 15).map(nodes.Number)

    def part(path: str) -> st.SearchStrategy[Any]:
        dims = [d for d in tensors[path].dims if "#" not in d]
        if not dims:
            return st.just(())
        from_ = st.integers(0, 4).map(lambda n: nodes.Among((nodes.Range(nodes.Number(n)),)))
        return st.tuples(st.builds(nodes.Dim, st.sampled_from(dims), from_))

    by_name = paths.flatmap(lambda p: st.builds(nodes.Fill, st.just(p), st.just(()) | part(p), number))
    by_class = st.builds(
        nodes.Fill, st.just("*"), st.just(()), number, st.sampled_from(["parameter", "trainable", "buffer", "frozen"])
    )
    others = [s for s in states if s != "fp32"]
    return st.one_of(
        by_name, by_class, *([st.builds(nodes.FillStates, st.just(tuple(others)), st.none(), number)] if others else [])
    )


def with_lines(text: str, lines: list[Any]) -> str:
    """The text with these lines in its layouts."""
    file = parse(text)
    return print_file(
        evolve(
            file,
            statements=tuple(
                evolve(s, items=(*s.items, *lines)) if isinstance(s, nodes.Layout) else s for s in file.statements
            ),
        )
    )


@given(cases())
@settings(max_examples=15, deadline=None)
def test_what_is_lacking_is_filled_and_nothing_else(case: tuple[Example, Example, Less]) -> None:
    source, target, less = case
    here, _ = both(source.text, source.call, name=source.name)
    there, _ = both(target.text, target.call, name=target.name)
    cells = mv.cells(here)
    has = {c for held in cells.values() for c in held if c is not None and less.has(*c)}
    assert not here.derived
    try:
        wanted = filled(has, {}, there, homes(there))
    except Refused:
        wanted = None
    try:
        graph = build(less.of(locate(source.layout())), locate(target.layout()))
    except UcplError as error:
        assert wanted is None, error
        assert {d.code for d in error.diagnostics} <= {"E303", "E308", "E318"}, error
        return
    assert wanted is not None, "nothing says what is there"
    prove(graph)
    plan = order(graph)
    shared = set(mv.second_names(plan))
    wanted = {k: v for k, v in wanted.items() if k[:2] not in shared}
    assert mv.filled(plan) == {k: [float(v)] for k, v in wanted.items()}
    moved = {(*f.target[0], f.target[1]) for f in mv.fills(plan) if f.kind != "check"}
    elements = {
        (h.file, h.key, i)
        for h in homes(there)
        for i, c in enumerate(h.cells)
        if isinstance(c, tuple) and (h.file, h.key) not in shared
    }
    assert moved | wanted.keys() == elements and not moved & wanted.keys()
    with tempfile.TemporaryDirectory() as folder:
        save_plan(plan, Path(folder) / "a.plan")
        again = load_plan(Path(folder) / "a.plan")
    assert mv.filled(again) == mv.filled(plan) and again.filled == plan.filled
