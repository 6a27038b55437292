"""Do both sides speak of the same tensors, and of what is to be dropped?"""

from __future__ import annotations

from ucpl.errors import Label, fail
from ucpl.layout.scope import at, nearest
from ucpl.regions import Placement

__all__ = ["check_drops", "check_models"]


def check_drops(source: Placement, drop: tuple[str, ...]) -> None:
    """Every name to be dropped is one of the source's. E300."""
    held = {p.state for p in source.parts}
    for name in drop:
        known = held | set(source.tensors) | set(source.layout.aliases)
        if name not in known and not any(s.name == name for s in source.layout.states):
            close = nearest(name, [*sorted(held), *source.tensors])
            fail(
                "E300",
                f"--drop {name}: no tensor or state of that name",
                Label("<command line>", where=f"--drop {name}"),
                remedy=f"did you mean `{close}`?" if close else f"its states: {', '.join(sorted(held))}",
            )


def check_models(source: Placement, target: Placement, drop: set[str]) -> None:
    """Both sides speak of the same tensors. E301, E302."""
    ours = source.layout.tensors
    for path, tensor in target.layout.tensors.items():
        other = ours.get(path)
        there = at(tensor.span, "target") if tensor.span.line else Label(target.layout.call, where=path)
        if other is None:
            if path in drop:
                continue
            fail(
                "E301",
                f"the target stores `{path}`, which the source's model lacks",
                at(tensor.span) if tensor.span.line else there,
                remedy="source and target must be layouts of one model",
            )
        named = all("#" not in d for d in (*tensor.dims, *other.dims))
        if other.counts != tensor.counts or (named and other.dims != tensor.dims):
            fail(
                "E302",
                f"`{path}` is {_shape(other.dims, other.counts)} in the source and"
                f" {_shape(tensor.dims, tensor.counts)} in the target",
                at(other.span, "source") if other.span.line else Label(source.layout.call, where=path),
                there,
            )


def _shape(dims: tuple[str, ...], counts: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(c) if "#" in d else f"{d}={c}" for d, c in zip(dims, counts, strict=True)) + "]"
