"""A layout expanded to one that needs no other file.

`infer` writes it, and a written checkpoint has it. `expand`: of any model over one model, one line a tensor.
Expressions stay as they are (`2 * dp`), so that the text still shows the rule; conditions are decided and gone, with
all names that only they use. `close`: of a named model, its numbers filled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from attrs import evolve

from ucpl.language import nodes
from ucpl.language.walk import lowest_version, rewritten
from ucpl.layout.by_index import whole_name
from ucpl.layout.entries import is_wild, written_entries
from ucpl.layout.layout import LogicalTensor
from ucpl.layout.library import Library
from ucpl.layout.models import ModelGroups, aliases_of, groups_of, tensors_of, trained_groups
from ucpl.layout.resolve import resolved
from ucpl.layout.scope import Config, Scope, Value, literal
from ucpl.layout.statements import CallInputs, Inherited, OpenedLayout, items_of, open_layout
from ucpl.layout.storing import is_there, stated_clauses
from ucpl.layout.used_names import holes_of, names_of

__all__ = [
    "close",
    "expand",
    "items_of",
    "wildcards_of",
    "distinct",
    "holes_of",
    "lines_in_file",
    "names_of",
    "without_unused",
]

Item = TypeVar("Item", bound=nodes.Record)


# ---- of any model ------------------------------------------------------------------------------------------------------


def expand(
    library: Library,
    call: nodes.Call,
    model: nodes.Model,
    *,
    name: str = "stored",
    inherited: Inherited | None = None,
    config: Config | None = None,
    is_named: bool = True,
) -> nodes.Layout:
    """The called layout over `model`, so that it needs no other file.

    is_named: keys have the names of tensors, and a group its members; else `{name}`, and `all` where no order matters.
    """
    opened = open_layout(library, call, CallInputs(config or {}, {}, inherited or {}), model)
    tensors = tensors_of(opened.model_items, opened.scope)
    entries = _wild_entries(opened, tensors, is_named=is_named)
    groups = groups_of(opened.model_items, tensors)
    is_grouped = any(isinstance(i, nodes.Group) for i in opened.items)
    if not groups and is_grouped:  # else `*` stays: nothing names a group
        is_all = not is_named and not any(map(_is_in_order, opened.items))
        groups = ((ALL, ()),) if is_all and trained_groups(groups, tensors) else trained_groups(groups, tensors)
    apart = {i.name for i in opened.items if isinstance(i, nodes.Group) and not i.of_model}  # with lines of their own
    fixed = _fixed(opened)
    out: list[nodes.LayoutItem] = [*_lets(fixed), *_inner_parameters(opened)]
    for item in opened.items:
        if isinstance(item, nodes.Entry) and is_wild(item):
            out += entries
            entries = []
        else:
            out += _written(item, opened.scope, tuple(g for g in groups if g[0] not in apart))
    parameters = tuple(p for p in _parameters(opened) if p.name not in fixed)
    return nodes.Layout(name, parameters, model.name, None, tuple(without_unused(_founded(out, opened.model_items))))


ALL = "parameters"  # the group of a model without groups


def _members(item: nodes.Group, name: str, members: tuple[str, ...]) -> nodes.Group:
    """A group of the model as one of the layout.

    Without members it has all parameters.
    """
    return evolve(item, name=name, of_model=False, members=members or None, without=None if members else ())


def _is_in_order(item: nodes.LayoutItem) -> bool:
    """True if a line of states depends on a group's order."""
    if not isinstance(item, nodes.States) or item.shape is None:
        return False
    keys = (holes_of(c.args[0]) for c in item.clauses if c.word == "as")
    return item.shape != "like" or not {"bucket", "number", "member"}.isdisjoint(name for key in keys for name in key)


def _fixed(opened: OpenedLayout) -> dict[str, Value]:
    """Arguments that conditions read, and that are no degree.

    The conditions are decided, so the text is right for these values alone.
    """
    conditions = [i.when for i in opened.items if isinstance(i, nodes.Files | nodes.Derive) and i.when is not None]
    conditions += [
        c.args[0]
        for i in opened.items
        if isinstance(i, nodes.Entry | nodes.States)
        for c in i.clauses
        if c.word == "when"
    ]
    rules = {b.name: b for i in opened.items if isinstance(i, nodes.Let) for b in i.bindings}
    asked: set[str] = set()
    new = {*names_of(conditions)}
    while new:
        asked |= new
        new = {*names_of([rules[name] for name in new if name in rules])} - asked
    axes = {axis for i in opened.items if isinstance(i, nodes.Mesh) for axis in i.axes}
    return {name: value for name, value in opened.arguments.items() if name in asked and name not in axes}


def _written(item: nodes.LayoutItem, scope: Scope, groups: ModelGroups) -> Iterable[nodes.LayoutItem]:
    """One statement with its condition decided, and `*` as its groups."""
    match item:
        case nodes.Group(of_model=True):
            return [_members(item, g, m) for g, m in groups]
        case nodes.States(groups=("*",)) if groups and is_there(item, scope):
            return [evolve(item, clauses=stated_clauses(item), groups=tuple(g for g, _ in groups))]
        case nodes.Assert():
            return []
        case _:
            return [d for d in (_decided(item, scope),) if d is not None]


def wildcards_of(
    library: Library, call: nodes.Call, model: nodes.Model, *, inherited: Inherited | None = None
) -> dict[str, tuple[nodes.Entry, ...]]:
    """Wildcard entries of a layout of any model, by tensor or alias.

    Patterns are as written.
    """
    opened = open_layout(library, call, CallInputs(inherited=inherited or {}), model)
    out: dict[str, tuple[nodes.Entry, ...]] = {}
    for entry in _wild_entries(opened, tensors_of(opened.model_items, opened.scope), every=True):
        out[entry.path] = (*out.get(entry.path, ()), entry)
    return out


def _wild_entries(
    opened: OpenedLayout, tensors: dict[str, LogicalTensor], *, every: bool = False, is_named: bool = True
) -> list[nodes.Entry]:
    """Globs and entries with `*`, one a tensor that no other names.

    `every`: those that others name, too. `is_named`: with the names in their keys.
    """
    written = written_entries(opened.items, opened.scope)
    if every:
        written = evolve(written, explicit=frozenset())
    out = []
    for wild in written.wild(tensors, aliases_of(opened.model_items, tensors, opened.scope)):
        clauses = stated_clauses(wild.item)
        if is_named or wild.alias:
            clauses = tuple(_named(c, wild.variables) for c in clauses)
        out.append(nodes.Entry(wild.alias or wild.path, (), wild.item.shape, clauses, None))
    return out


def _named(clause: nodes.Clause, names: dict[str, str]) -> nodes.Clause:
    if clause.word != "as":
        return clause
    text = clause.args[0]
    for name, value in names.items():
        text = text.replace("{" + name + "}", value)
    return evolve(clause, args=(text,))


# ---- of a named model --------------------------------------------------------------------------------------------------


def close(
    library: Library,
    call: nodes.Call,
    *,
    config: Config | None = None,
    sizes: dict[str, Value] | None = None,
    inherited: Inherited | None = None,
) -> nodes.File:
    """A layout of a named model and that model as one text.

    It needs no other file: numbers are filled in, conditions decided.
    """
    given = CallInputs(config or {}, sizes or {}, inherited or {})
    opened = open_layout(library, call, given)
    resolved(opened, given.sizes)
    assert opened.model_file is not None
    lets = [s for f in (opened.model_file, opened.link.file) for s in f.statements if isinstance(s, nodes.Let)]
    opened.scope.bind([*lets, *opened.model_items, *opened.items])
    known = {n for n in opened.scope.given if "#" not in n}
    spoken = {*names_of([*opened.model_items, *(i for i in opened.items if not isinstance(i, nodes.Let))])}
    texts = {n for n, v in opened.scope.bindings.items() if isinstance(v, nodes.Text) and n not in spoken}
    known |= texts  # parts of templates, which have them in their places by now
    model_items = _closed(opened.scope, [*lets, *opened.model_items], known)
    items = _without_globs(opened, _without_repetitions(opened.items))
    layout_items = [*_inner_parameters(opened), *_closed(opened.scope, [*lets, *items], known)]
    model = nodes.Model(opened.model.name, tuple(model_items))
    layout_items = _founded(layout_items, model_items)
    layout = nodes.Layout("stored", _parameters(opened), opened.model.name, None, tuple(layout_items))
    return nodes.File("layout.ucpl", lowest_version(layout), (model, layout))


def _without_globs(opened: OpenedLayout, items: list[nodes.LayoutItem]) -> list[nodes.LayoutItem]:
    """Globs of a base layout of any model, expanded.

    One line a tensor, `none` included.
    """
    if not any(isinstance(i, nodes.Entry) and i.glob for i in items):
        return items
    tensors = tensors_of(opened.model_items, opened.scope)
    written = written_entries(items, opened.scope)
    lines = [
        nodes.Entry(w.alias or w.path, (), w.item.shape, tuple(_named(c, w.variables) for c in stated_clauses(w.item)))
        for w in written.globbed(tensors, aliases_of(opened.model_items, tensors, opened.scope))
    ]
    first = next(n for n, i in enumerate(items) if isinstance(i, nodes.Entry) and i.glob)
    rest = [i for i in items if not (isinstance(i, nodes.Entry) and i.glob)]
    return [*rest[:first], *lines, *rest[first:]]


def _without_repetitions(items: Sequence[nodes.LayoutItem]) -> list[nodes.LayoutItem]:
    """Statements without repetitions from used layouts.

    One text has a mesh, the framework, and a derived state once. A second mesh without a name gets one, which nothing
    uses.
    """
    last = max((n for n, i in enumerate(items) if isinstance(i, nodes.Framework)), default=-1)
    meshes: set[tuple[str, tuple[str, ...]]] = set()
    seen: set[tuple[str, str]] = set()
    out: list[nodes.LayoutItem] = []
    for n, item in enumerate(items):
        match item:
            case nodes.Mesh():
                if (item.name, item.axes) in meshes:
                    continue
                is_second = any(name == item.name for name, _ in meshes)
                out.append(evolve(item, name=f"{item.name or 'mesh'}{len(meshes)}") if is_second else item)
                meshes.add((item.name, item.axes))
            case nodes.Framework():
                out += [item] if n == last else []  # by number: a line of a layout that is used twice is one object
            case nodes.Derive(state=name) | nodes.Group(of_model=True, name=name) | nodes.Domain(kind=name):
                mark = (type(item).__name__, name)
                out += [item] if mark not in seen else []
                seen.add(mark)
            case _:
                out.append(item)
    return out


def _closed(scope: Scope, items: Sequence[Item], given: set[str]) -> list[Item]:
    """Statements with their conditions decided and their numbers filled in.

    Numbers replace names of a config, and asserts are left out.
    """
    out: list[Item] = []
    seen: set[str] = set()
    for item in items:
        if isinstance(item, nodes.Assert):
            continue
        if isinstance(item, nodes.Let | nodes.Dims):
            own = [b.name for b in item.bindings if b.name not in seen]
            values = {n: v for n in own if (v := scope.value(n)) is not None}
            if isinstance(item, nodes.Let):
                values = {n: v for n, v in values.items() if n not in given}
            seen |= values.keys()
            if values:
                out.append(evolve(item, bindings=tuple(nodes.Binding(n, literal(v)) for n, v in values.items())))
        elif (decided := _decided(item, scope)) is not None:
            out.append(rewritten(decided, lambda node: _number(node, scope)))
    return out


def _number(node: nodes.Record, scope: Scope) -> nodes.Record | None:
    """Value of a config, as a literal."""
    if isinstance(node, nodes.Name) and node.path.startswith("config."):
        value = scope.lookup(node.path, node.span)
        return None if value is None else literal(value)
    return None


# ---- both --------------------------------------------------------------------------------------------------------------


def _decided(item: Item, scope: Scope) -> Item | None:
    """A statement without its condition; None where that does not hold."""
    if isinstance(item, nodes.Tensor | nodes.Alias | nodes.Files | nodes.Derive | nodes.Index):
        return evolve(item, when=None) if scope.holds(item.when) else None
    if isinstance(item, nodes.Entry | nodes.States):
        return evolve(item, clauses=stated_clauses(item)) if is_there(item, scope) else None
    if isinstance(item, nodes.Fill | nodes.FillStates):
        return None  # it describes how to make a checkpoint, not its storage
    return item


def _founded(items: Iterable[nodes.LayoutItem], model_items: Sequence[nodes.ModelItem]) -> list[nodes.LayoutItem]:
    """Statements without those for states and tensors that this model lacks.

    Layouts of any model have them; in a closed text every line has an effect.
    """
    states = {name for i in model_items if isinstance(i, nodes.State) for name in i.names if not i.scalar}
    tensors = {whole_name(i.path) for i in model_items if isinstance(i, nodes.Tensor | nodes.Alias)}
    out: list[nodes.LayoutItem] = []
    for item in items:
        match item:
            case nodes.States(names=tuple(names)):
                kept = tuple(name for name in names if name in states)
                out += [evolve(item, names=kept)] if kept else []
            case nodes.Derive(state=one, source=other) if not {one, other} <= {*states, "weight", "fp32"}:
                pass
            case nodes.Entry(path=path, shape=None, of=None) if path != "*" and whole_name(path) not in tensors:
                pass
            case _:
                out.append(item)
    return out


def _parameters(opened: OpenedLayout) -> tuple[nodes.Parameter, ...]:
    return tuple(nodes.Parameter(name, literal(value)) for name, value in opened.arguments.items())


def _inner_parameters(opened: OpenedLayout) -> list[nodes.Let]:
    """Values besides the layout's own parameters.

    They are the parameters of the layouts that it extends, and sizes.
    """
    inner = {
        n: v for n, v in opened.scope.given.items() if "#" not in n and n not in opened.arguments and v is not None
    }
    return _lets(inner)


def _lets(values: Mapping[str, Value]) -> list[nodes.Let]:
    return [nodes.Let(tuple(nodes.Binding(n, literal(v)) for n, v in values.items()))] if values else []


# ---- uses of declarations --------------------------------------------------------------------------------------------


def without_unused(items: Sequence[nodes.LayoutItem]) -> list[nodes.LayoutItem]:
    """Statements without unused files and numbers.

    Decided conditions may have used them.
    """
    out: list[nodes.LayoutItem] = [
        item for item in items if not (isinstance(item, nodes.Files) and not lines_in_file(item.name, items))
    ]
    always = {*names_of(distinct(item for item in out if not isinstance(item, nodes.Let)))}
    while True:
        named = always | {*names_of(item for item in out if isinstance(item, nodes.Let))}
        kept: list[nodes.LayoutItem] = []
        is_same = True
        for item in out:
            if isinstance(item, nodes.Let):
                bindings = tuple(b for b in item.bindings if b.name in named)
                is_same = is_same and len(bindings) == len(item.bindings)
                if not bindings:
                    continue
                item = item if len(bindings) == len(item.bindings) else evolve(item, bindings=bindings)
            kept.append(item)
        if is_same:
            return out
        out = kept


def distinct(items: Iterable[nodes.Record]) -> Iterator[nodes.Record]:
    """The statements, with shared axes and clauses of entries once.

    A line of a layout of any model is an entry of each tensor, with the same axes.
    """
    seen: set[int] = set()
    for item in items:
        if not isinstance(item, nodes.Entry) or item.indices:
            yield item
            continue
        for one in (*(item.shape or ()), *item.clauses):
            if id(one) not in seen:
                seen.add(id(one))
                yield one


def lines_in_file(name: str, items: Sequence[nodes.LayoutItem]) -> list[nodes.LayoutItem]:
    """Lines in a file, by their `in` or because they name none."""
    has_optim = any(isinstance(i, nodes.Files) and i.name == "optim" for i in items)
    out: list[nodes.LayoutItem] = []
    for item in items:
        match item:
            case nodes.States(shape=None) if has_optim:
                continue
            case nodes.Entry(clauses=clauses):
                default = "weights"
            case nodes.States(clauses=clauses):
                default = "optim" if has_optim else "weights"
            case nodes.Blob(clauses=clauses):
                default = "meta"
            case nodes.Group(stated=(str() as of, _)) if of == name:
                out.append(item)
                continue
            case _:
                continue
        if next((c.args[0] for c in clauses if c.word == "in"), default) == name:
            out.append(item)
    return out
