"""Lines of a layout that do nothing over one model, though they may over another: remarks, no faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ucpl.layout import Layout
from ucpl.layout.by_index import whole_name
from ucpl.layout.near import nearest
from ucpl.syntax import nodes

__all__ = ["idle_lines", "unknown_drops"]

_EVERYWHERE = ("weight", "fp32")


def idle_lines(layout: Layout, items: Iterable[nodes.LayoutItem], *, of_any: bool) -> Iterator[str]:
    """What of the layout's own statements does nothing. Those of a layout of any model are written for families of models:
    of these, `*` alone is told, and names that nothing has.
    """
    spoken = {entry.span for entry in layout.entries}
    states = {state.name for state in layout.states}
    for item in items:
        match item:
            case nodes.Entry(path="*", of=of, shape=tuple()) if item.span not in spoken:
                if (of is None or not of_any) and all(c.word != "when" for c in item.clauses):
                    yield _line(layout, of)
            case nodes.Entry(path=path, shape=None, glob=()) if of_any and path != "*":
                if path not in layout.tensors and path not in layout.aliases:
                    close = nearest(path, [*layout.tensors, *layout.aliases])
                    hint = f": did you mean `{close}`?" if close else ""
                    yield f"{layout.name}: `{path} = none`, and {layout.model_name} has no `{path}`{hint}"
            case nodes.Derive(state=one, source=other) if of_any:
                for name in dict.fromkeys((one, other)):
                    if name not in _EVERYWHERE and name not in states:
                        known = ", ".join([*_EVERYWHERE, *sorted(states - {*_EVERYWHERE})])
                        yield (
                            f"{layout.name}: `derive {one} from {other}`, and {layout.model_name} has no state `{name}`."
                            f" The states are {known}"
                        )


def _line(layout: Layout, of: str | None) -> str:
    said = f"* of {of}" if of else "*"
    what = "second name" if of == "alias" else f"{of} tensor" if of else "tensor"
    return (
        f"{layout.name}: the line `{said} = ...` speaks of no tensor: {layout.model_name} has no {what} without a line of"
        " its own. Take it out, or take the others out"
    )


def unknown_drops(layout: Layout, drop: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Names of a plan's `drop` that are no tensor and no state of its source, each with what to write instead."""
    known = [
        *(s.name for s in layout.states),
        "weight",
        *layout.tensors,
        *map(whole_name, layout.tensors),
        *layout.aliases,
    ]
    for name in drop:
        if name not in known:
            close = nearest(name, known)
            states = ", ".join(s.name for s in layout.states) or "none"
            yield name, f"did you mean `{close}`?" if close else f"write a tensor, or a state; the states are {states}"
