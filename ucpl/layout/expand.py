"""A layout of any model over one model, written out: one line a tensor, groups by name. What `infer` writes.

Expressions stay as they are (`2 * dp`), so that the text still shows the rule; conditions are decided and gone.
"""

from __future__ import annotations

from typing import Any

import attrs
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
    parameters = tuple(nodes.Parameter(p.name, _literal(resolver.scope.given[p.name])) for p in known.node.parameters)
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
    order = {
        "parameter": ("trainable", "parameter", "*"),
        "frozen": ("frozen", "parameter", "*"),
        "buffer": ("buffer", "*"),
    }
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


def close(
    library: Library,
    call: nodes.Call,
    *,
    name: str = "stored",
    config: dict[str, Any] | None = None,
    sizes: dict[str, Value] | None = None,
    inherited: dict[str, tuple[Value, str]] | None = None,
) -> nodes.File:
    """A layout of a named model and that model as one text that needs no other file: numbers filled in, conditions decided."""
    resolver = _Resolver(library, config or {}, dict(sizes or {}), inherited or {})
    resolver.layout(call, None)
    known = library.layout(call.name, call.span)
    assert isinstance(known.node, nodes.Layout)
    model_known = library.model(known.node.of, known.node.span)
    assert isinstance(model_known.node, nodes.Model)
    arguments = resolver.arguments(known.node.parameters, call, resolver.scope)
    items = resolver.statements(known, arguments, ())
    lets = [s for f in (model_known.file, known.file) for s in f.statements if isinstance(s, nodes.Let)]
    resolver.bind([*lets, *model_known.node.items, *items])
    given = [n for n in resolver.scope.given if "#" not in n]
    parameters = {p.name for p in known.node.parameters}
    inner = [n for n in given if n not in parameters and not isinstance(resolver.scope.given[n], type(None))]
    head: list[Any] = (
        [nodes.Let(tuple(nodes.Binding(n, _literal(resolver.scope.given[n])) for n in inner))] if inner else []
    )
    model_items = _closed(resolver, [*lets, *resolver.expand_uses(model_known.node.items)], set(given))
    layout_items = _closed(resolver, [*lets, *items], set(given))
    layout = nodes.Layout(
        name,
        tuple(nodes.Parameter(p.name, _literal(resolver.scope.given[p.name])) for p in known.node.parameters),
        model_known.node.name,
        None,
        (*head, *layout_items),
    )
    model = nodes.Model(model_known.node.name, tuple(model_items))
    return nodes.File("layout.ucpl", 1, (model, layout))


def _closed(resolver: _Resolver, items: list[Any], given: set[str]) -> list[Any]:
    """Statements with their conditions decided, their numbers in place of names of a config, and no asserts."""
    out: list[Any] = []
    seen: set[str] = set()
    for item in items:
        match item:
            case nodes.Assert():
                continue
            case nodes.Let() | nodes.Dims():
                bindings = []
                for binding in item.bindings:
                    value = resolver.scope_value(binding.name)
                    if value is None or binding.name in seen or (isinstance(item, nodes.Let) and binding.name in given):
                        continue
                    seen.add(binding.name)
                    bindings.append(nodes.Binding(binding.name, _literal(value)))
                if bindings:
                    out.append(evolve(item, bindings=tuple(bindings)))
            case nodes.Tensor() | nodes.Alias() | nodes.Files() | nodes.Derive():
                if resolver.holds(item.when):
                    out.append(_with_numbers(resolver, evolve(item, when=None)))
            case nodes.Entry() | nodes.States():
                if all(resolver.holds(c.args[0]) for c in item.clauses if c.word == "when"):
                    out.append(_with_numbers(resolver, _decided(item)))
            case _:
                out.append(_with_numbers(resolver, item))
    return out


def _with_numbers(resolver: _Resolver, node: Any) -> Any:
    """The same with what a config gives as literals."""
    if isinstance(node, nodes.Name) and node.path.startswith("config."):
        value = resolver.scope.lookup(node.path, node.span)
        return node if value is None else _literal(value)
    if isinstance(node, tuple):
        return tuple(_with_numbers(resolver, n) for n in node)
    if not attrs.has(type(node)) or isinstance(node, nodes.Span):
        return node
    changed = {}
    for field in attrs.fields(type(node)):
        if field.name == "span":
            continue
        before = getattr(node, field.name)
        after = _with_numbers(resolver, before)
        if after is not before:
            changed[field.name] = after
    return evolve(node, **changed) if changed else node
