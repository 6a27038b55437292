"""Strategies: models and layouts that no person would write. Hypothesis is imported when one is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from ucpl.syntax import nodes, parse
from ucpl.testing.choices import Draw
from ucpl.testing.drawn_layouts import DIMS, DrawnLayout
from ucpl.testing.laws import Example

if TYPE_CHECKING:
    from hypothesis import strategies as st

__all__ = ["layout_pairs", "layouts", "meshes", "models"]

RANKS_MAX = 12


def models() -> st.SearchStrategy[nodes.Model]:
    """Models of one to five tensors over named dims of one to six, some with only a range of a dim; states; perhaps groups."""
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Draw) -> nodes.Model:
        sizes = {
            d: draw(st.integers(1, 6))
            for d in draw(st.lists(st.sampled_from(DIMS), min_size=1, max_size=4, unique=True))
        }
        lines = ["  dim " + ", ".join(f"{k} = {v}" for k, v in sizes.items()), "  dtype f32"]
        split = next((d for d, n in sizes.items() if n in (4, 6) and draw(st.booleans())), None)
        if split is not None:
            lines += [f"  dim {split}1 = 2, {split}2 = {sizes[split]} / 2", f"  index {split} = ({split}1 {split}2)"]
        names = draw(st.lists(st.sampled_from(("a", "b", "c", "x.p", "x.q", "y")), min_size=1, max_size=5, unique=True))
        trained = []
        ranges = {d: draw(_ranges(n)) for d, n in sizes.items()}
        for name in names:
            dims = draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3, unique=True))
            shown = [d + (ranges[d] if d != split and draw(st.integers(0, 3)) == 0 else "") for d in dims]
            kind = draw(st.sampled_from(("", "", "", "", " is buffer", " is frozen")))
            trained += [name] * (not kind)
            lines.append(f"  {name} : {' '.join(shown) or '()'}{kind}")
        lines.append("  state fp32, exp_avg : f32")
        if len(trained) > 1 and draw(st.booleans()):
            at = draw(st.integers(1, len(trained) - 1))
            lines += [f"  group first = {', '.join(trained[:at])}", f"  group second = {', '.join(trained[at:])}"]
        file = parse("ucpl 1\nmodel made {\n" + "\n".join(lines) + "\n}\n", "made.ucpl")
        (model,) = file.statements
        assert isinstance(model, nodes.Model)
        return model

    return drawn()


@cache
def _ranges(size: int) -> st.SearchStrategy[str]:
    from hypothesis import strategies as st

    low = st.integers(0, size - 1)
    some = st.lists(low, min_size=1, max_size=min(3, max(1, size - 1))).map(lambda of: ", ".join(map(str, of)))
    return low.flatmap(
        lambda a: st.sampled_from((f"[{a}..]", f"[..{a + 1}]", f"[{a}.. by 2]", f"[{a}..{size}]", f"[not {a}.. by 2]"))
    ) | some.flatmap(lambda of: st.sampled_from((f"[{of}]", f"[not {of}]", f"[where([{of}], {size - 1})]")))


@cache
def meshes() -> st.SearchStrategy[dict[str, int]]:
    """Mesh axes with their degrees, major to minor; at most a dozen ranks."""
    from hypothesis import strategies as st

    axes = st.lists(st.sampled_from(("pp", "dp", "tp")), min_size=1, max_size=3, unique=True)
    return axes.flatmap(lambda names: st.fixed_dictionaries({n: st.integers(1, 4) for n in names})).filter(
        lambda degrees: math.prod(degrees.values()) <= RANKS_MAX
    )


def layouts(model: nodes.Model, *, name: str = "laid", whole: bool = True) -> st.SearchStrategy[Example]:
    """Layouts of a model: any mesh, any cut, pads, packs, brackets, homes, flats.

    whole: every state that the model has is stored, so that any two of them can be converted into each other.
    """
    return _laid()(model, name, whole)


# A strategy that is asked for in every example is made once: Hypothesis reads the source of each function that it composes.


@cache
def _laid() -> Callable[[nodes.Model, str, bool], st.SearchStrategy[Example]]:
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Draw, model: nodes.Model, name: str, whole: bool) -> Example:
        return DrawnLayout(draw, model, draw(meshes()), whole).example(name)

    return drawn


def layout_pairs(model: nodes.Model) -> st.SearchStrategy[tuple[Example, Example]]:
    """Two layouts of one model, on different meshes: at least one degree changes."""
    return _paired()(model)


@cache
def _paired() -> Callable[[nodes.Model], st.SearchStrategy[tuple[Example, Example]]]:
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Draw, model: nodes.Model) -> tuple[Example, Example]:
        first = draw(meshes())
        second = draw(meshes().filter(lambda degrees: degrees != first))
        return (
            DrawnLayout(draw, model, first, True).example("source"),
            DrawnLayout(draw, model, second, True).example("target"),
        )

    return drawn
