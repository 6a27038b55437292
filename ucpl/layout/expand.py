"""A layout of any model over one model, written out: one line a tensor, groups by name. What `infer` writes.

Expressions stay as they are (`2 * dp`), so that the text still shows the rule; conditions are decided and gone.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve

from ucpl.layout.library import Library
from ucpl.layout.resolve import CLASSES, _literal, _overlay, _Resolver
from ucpl.layout.scope import Value
from ucpl.syntax import nodes


def expand(
    library: Library,
    call: nodes.Call,
    model: nodes.Model,
    *,
    name: str = "stored",
    inherited: dict[str, tuple[Value, str]] | None = None,
    config: dict[str, Any] | None = None,
) -> nodes.Layout:
    """The layout that `call` names, over `model`, as a layout of its own that needs no other file."""
    resolver = _Resolver(library, config or {}, {}, inherited or {})
    known = library.layout(call.name, call.span)
    assert isinstance(known.node, nodes.Layout)
    arguments = resolver.arguments(known.node.parameters, call, resolver.scope)
    items = resolver.statements(known, arguments, ())
    resolver.bind(model.items)
    resolver.bind(items)
    tensors = resolver.tensors(list(model.items))
    aliases = resolver.aliases(list(model.items), tensors)
    groups = resolver.groups_of_model(resolver.model_groups(list(model.items), tensors), tensors)
    parameters = tuple(
        nodes.Parameter(p.name, _literal(resolver.scope.given[p.name])) for p in known.node.parameters
    )
    explicit = {i.path for i in items if isinstance(i, nodes.Entry) and i.path != "*"}
    classes: dict[str, list[nodes.Entry]] = {}
    for item in items:
        if isinstance(item, nodes.Entry) and item.path == "*" and resolver.entry_holds(item):
            classes.setdefault(item.of or "*", []).append(item)
    inner = [n for n in resolver.scope.given if "#" not in n and n not in {p.name for p in parameters}]
    out: list[Any] = []
    if inner:  # parameters of the layouts that it extends
        out.append(nodes.Let(tuple(nodes.Binding(n, _literal(resolver.scope.given[n])) for n in inner)))
    written = False
    apart = {i.name for i in items if isinstance(i, nodes.Group) and not i.of_model}  # groups with lines of their own
    for item in items:
        match item:
            case nodes.Entry(path="*"):
                if not written:
                    written = True
                    out += _entries(classes, explicit, tensors, aliases)
            case nodes.Entry():
                if resolver.entry_holds(item):
                    out.append(_decided(item))
            case nodes.Files() | nodes.Derive():
                if resolver.holds(item.when):
                    out.append(evolve(item, when=None))
            case nodes.Group(of_model=True):
                out += [evolve(item, name=g, of_model=False, members=m) for g, m in groups if g not in apart]
            case nodes.States():
                if all(resolver.holds(c.args[0]) for c in item.clauses if c.word == "when"):
                    named = tuple(g for g, _ in groups if g not in apart) if item.groups == ("*",) else item.groups
                    out.append(evolve(_decided(item), groups=named))
            case nodes.Assert():
                pass
            case _:
                out.append(item)
    return nodes.Layout(name, parameters, model.name, None, tuple(out))


def _decided(item: Any) -> Any:
    return evolve(item, clauses=tuple(c for c in item.clauses if c.word != "when"))


def _entries(
    classes: dict[str, list[nodes.Entry]], explicit: set[str], tensors: dict[str, Any], aliases: dict[str, str]
) -> list[nodes.Entry]:
    order = {"parameter": ("trainable", "parameter", "*"), "frozen": ("frozen", "parameter", "*"), "buffer": ("buffer", "*")}
    assert set(classes) <= {"*", *CLASSES}
    out: list[nodes.Entry] = []
    for path, tensor in tensors.items():
        if path in explicit:
            continue
        said = next((c for c in order[tensor.kind] if c in classes), None)
        for item in classes.get(said, ()) if said else ():
            if item.shape is not None:
                out.append(_named(item, path, {"name": path}))
    for alias, owner in aliases.items():
        for item in classes.get("alias", ()):
            if item.shape is not None and alias not in explicit:
                out.append(_named(item, alias, {"name": owner, "alias": alias, "owner": owner}))
    return out


def _named(item: nodes.Entry, path: str, names: dict[str, str]) -> nodes.Entry:
    clauses = []
    for clause in item.clauses:
        if clause.word == "when":
            continue
        if clause.word == "as":
            text = clause.args[0]
            for k, v in names.items():
                text = text.replace("{" + k + "}", v)
            clause = evolve(clause, args=(text,))
        clauses.append(clause)
    return nodes.Entry(path, (), item.shape, tuple(clauses), None)


def wildcards_of(
    library: Library,
    call: nodes.Call,
    model: nodes.Model,
    *,
    inherited: dict[str, tuple[Value, str]] | None = None,
) -> dict[str, tuple[nodes.Entry, ...]]:
    """What the wildcard entries of a layout of any model say of each tensor and alias, under its name; patterns as written."""
    resolver = _Resolver(library, {}, {}, inherited or {})
    known = library.layout(call.name, call.span)
    assert isinstance(known.node, nodes.Layout)
    arguments = resolver.arguments(known.node.parameters, call, resolver.scope)
    items = resolver.statements(known, arguments, ())
    resolver.bind(items)
    tensors = resolver.tensors(list(model.items))
    aliases = resolver.aliases(list(model.items), tensors)
    classes: dict[str, list[nodes.Entry]] = {}
    for item in items:
        if isinstance(item, nodes.Entry) and item.path == "*" and resolver.entry_holds(item):
            classes.setdefault(item.of or "*", []).append(item)
    out: dict[str, tuple[nodes.Entry, ...]] = {}
    for entry in _entries(classes, set(), tensors, aliases):
        out[entry.path] = (*out.get(entry.path, ()), entry)
    return out


def items_of(library: Library, call: nodes.Call) -> list[nodes.LayoutItem]:
    """The statements of a layout and of what it extends, each left side once, as they are written."""
    resolver = _Resolver(library, {}, {}, {})
    known = library.layout(call.name, call.span)
    assert isinstance(known.node, nodes.Layout)
    chain = [known.node]
    while chain[-1].extends is not None:
        inner = library.layout(chain[-1].extends.name).node
        assert isinstance(inner, nodes.Layout)
        chain.append(inner)
    items: list[nodes.LayoutItem] = []
    for layout in reversed(chain):
        items = _overlay(items, resolver.expand_uses(layout.items))
    return items
