"""The type that each state of a tensor has: one for all tensors, or another for those that a state line names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from ucpl.errors import fail
from ucpl.layout.by_index import whole_name
from ucpl.layout.globs import Globs, literals
from ucpl.layout.layout import LogicalTensor
from ucpl.layout.near import for_name
from ucpl.layout.scope import at
from ucpl.syntax import nodes

__all__ = ["with_state_types"]


def with_state_types(items: Iterable[nodes.ModelItem], tensors: dict[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """The tensors, each with the types of its states that differ from those of other tensors.

    Raises: UcplError E008, E127, E137, E191.
    """
    items = list(items)
    said = [item for item in items if isinstance(item, nodes.State) and item.typed]
    if not said:
        return tensors
    named = {whole_name(item.path) for item in items if isinstance(item, nodes.Tensor)}
    kinds = {whole_name(path): t.kind for path, t in tensors.items()}
    trained = {path: whole_name(path) for path, t in tensors.items() if t.kind == "parameter"}
    found: dict[str, dict[str, str]] = {}
    for item in said:
        by_name, globs = _named(item), [(p, t) for t in item.typed for p in t.of if "*" in p]
        _demand_trained(item, by_name, named, kinds)
        finder = Globs([tuple(pattern.split("*")) for pattern, _ in globs])
        for path, name in trained.items():
            one = by_name.get(name) or _most_literal(name, [globs[i] for i in finder.of(name)])
            if one is not None:
                found.setdefault(path, {}).update(dict.fromkeys(item.names, one.dtype))
    return {
        path: evolve(tensor, state_dtypes=tuple(found[path].items())) if path in found else tensor
        for path, tensor in tensors.items()
    }


def _named(item: nodes.State) -> dict[str, nodes.TypedOf]:
    """Names without a star. Raises E008 where one has two types."""
    out: dict[str, nodes.TypedOf] = {}
    for typed in item.typed:
        for name in typed.of:
            first = out.setdefault(name, typed)
            if first is not typed:
                fail(
                    "E008",
                    f"{' and '.join(item.names)} of `{name}` {'has' if len(item.names) == 1 else 'have'} two types",
                    at(first.span, first.dtype),
                    at(typed.span, typed.dtype),
                    remedy="take the name out of one of the two lists",
                )
    return {name: typed for name, typed in out.items() if "*" not in name}


def _demand_trained(
    item: nodes.State, by_name: dict[str, nodes.TypedOf], named: set[str], kinds: Mapping[str, str]
) -> None:
    """Each name is one of the model's, under whatever condition, and of a parameter. Raises E137, E191."""
    for name, typed in by_name.items():
        if name not in named:
            fail(
                "E137", f"no tensor is called `{name}`", at(typed.span, "named here"), remedy=for_name(name, named, "")
            )
        if kinds.get(name, "parameter") != "parameter":
            fail(
                "E191",
                f"`{name}` is {kinds[name]}: it has no {item.names[0]}",
                at(typed.span, "named here"),
                remedy=f"take `{name}` out of the list",
            )


def _most_literal(name: str, near: list[tuple[str, nodes.TypedOf]]) -> nodes.TypedOf | None:
    """The glob that speaks of a name. Raises E127 where two do with other types, and neither is more literal."""
    if not near:
        return None
    most = max(literals(tuple(pattern.split("*"))) for pattern, _ in near)
    best = [(pattern, typed) for pattern, typed in near if literals(tuple(pattern.split("*"))) == most]
    (one, first), *others = best
    for other, typed in others:
        if typed.dtype != first.dtype:
            fail(
                "E127",
                f'"{one}" and "{other}" both match `{name}`, and both with {most} characters that are no star',
                at(first.span, first.dtype),
                at(typed.span, typed.dtype),
                remedy="make one of them more literal, or name the tensor in full",
            )
    return first
