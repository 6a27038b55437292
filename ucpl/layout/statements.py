"""Statements of a called layout, in order, with every name bound.

Resolving and expanding begin with them. Arguments are evaluated, the bases are laid under the layout, and `use` is
replaced by its contents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents.train_state import of_default
from ucpl.language import nodes
from ucpl.language.source import STATEMENTS_MAX
from ucpl.language.walk import walk
from ucpl.layout.axes import tensor_of_label
from ucpl.layout.bases import NO_FILE, fresh, overlay, own_parameters, placed, statements_of
from ucpl.layout.by_index import written_out
from ucpl.layout.fills import with_filled_states
from ucpl.layout.implied import with_implied_indices
from ucpl.layout.library import KnownStatement, Library, Link
from ucpl.layout.models import divided, states_once
from ucpl.layout.scope import Config, Scope, Value, at, literal
from ucpl.layout.templates import spelled_out
from ucpl.records import define, frozen

__all__ = ["CallInputs", "Inherited", "Note", "OpenedLayout", "items_of", "open_layout", "without_absent"]

Inherited = dict[str, tuple[Value, str]]  # name -> (value, where it is from)
Note = tuple[str, object, str]  # (name, value, where it is from)
Item = TypeVar("Item", bound=nodes.Record)


@frozen
class CallInputs:
    """Inputs of a call besides the texts."""

    config: Config = field(factory=dict)
    sizes: dict[str, Value] = field(factory=dict)  # -D name=value
    inherited: Inherited = field(factory=dict)  # for parameters that the call leaves open


@define
class OpenedLayout:
    """A called layout.

    `scope` knows every name of `items` and `model_items`.
    """

    library: Library
    link: Link[nodes.Layout]
    model: nodes.Model
    model_file: nodes.File | None  # None: the model was given, and no text defines it
    items: list[nodes.LayoutItem]
    model_items: list[nodes.ModelItem]
    scope: Scope
    origins: list[Note]
    besides: list[nodes.ModelItem]  # statements of the model without its plain tensors: see `divided`
    extended: frozenset[nodes.Span] = frozenset()  # of entries of layouts that this one extends
    fresh: tuple[nodes.LayoutItem, ...] = ()  # its own statements of left sides that no layout has that it extends

    @property
    def layout(self) -> nodes.Layout:
        return self.link.node

    @property
    def arguments(self) -> dict[str, Value]:
        """The layout's parameters and their values."""
        return {p.name: self.scope.given[p.name] for p in self.layout.parameters}

    @property
    def definitions(self) -> list[nodes.Record]:
        """All statements that define or assert numbers.

        They are those of layout, model and their files, and parameters.
        """
        texts = [self.link.file, *([self.model_file] if self.model_file is not None else [])]
        parameters = (*self.layout.parameters, *self.model.parameters)
        return [*parameters, *self.besides, *self.items, *(s for f in texts for s in f.statements)]


def open_layout(
    library: Library, call: nodes.Call, given: CallInputs, model: nodes.Model | None = None
) -> OpenedLayout:
    """Open a called layout.

    `model`: the model of a layout `of any`. Raises E1xx.
    """
    chain = library.chain(call.name, call.span)
    scope = Scope(given=dict(given.sizes), config=given.config)
    scope.places = {name: Label("<command line>", where=f"-D {name}={value}") for name, value in given.sizes.items()}
    fixed = [b.name for i in chain[0].node.items if isinstance(i, nodes.Let) for b in i.bindings]
    for name, argument in placed(chain[0].node.parameters, call, fixed).items():
        if argument.span.line:  # of a plan or of a caller; trials have none
            scope.places[name] = at(argument.span)
    tried = {a.name: a.value for a in call.arguments if not a.span.line}
    for p in chain[0].node.parameters:
        if p.default is not None and tried.get(p.name) == p.default:  # the text of a default, as a call
            scope.places[p.name] = at(p.span)
    reader = _Reader(library, scope, given.inherited, [(name, value, "-D") for name, value in given.sizes.items()])
    items = reader.statements(chain, _arguments(chain[0].node.parameters, call, Scope(config=given.config)))
    outermost = chain[0].node
    model_file: nodes.File | None = None
    of_model = nodes.Call(outermost.of, outermost.arguments, span=outermost.span)
    if outermost.of != "any":
        known = library.model(outermost.of, outermost.span)
        assert isinstance(known.node, nodes.Model)
        model, model_file = known.node, known.file
        of_model = _called(model, of_model, scope, {p.name for link in chain for p in link.node.parameters})
        scope.bind(model_file.statements)
    elif model is None:
        fail(
            "E114",
            f"layout `{call.name}` is of any model, and no model is given",
            at(outermost.span),
            remedy="name one with --model FILE:NAME, or give a checkpoint",
        )
    plain, others = divided(model) if outermost.of == "any" else ((), model)
    model_items: list[nodes.ModelItem] = own_parameters(others, of_model, given.sizes)
    model_items += statements_of(
        library, KnownStatement(others, model_file or NO_FILE), lambda items: reader.uses(items, word="model")
    )
    model_items = states_once(model_items)
    scope.bind(model_items)
    of_files = {s.span for file in library.files.values() for s in file.statements}
    own = [item for item in model_items if item.span not in of_files]
    reject_second_meanings(scope, own, [*(p for link in chain for p in link.node.parameters), *items], given.sizes)
    scope.bind(items)
    if model_file is not None:
        _check_one_value(
            [*model_file.statements, *model_items], [link for link in chain if link.file is not model_file], scope
        )
    if outermost.of == "any":
        model_items = with_filled_states(items, model_items, scope)
    items = with_implied_indices(items, model_items, plain)
    model_items, items = written_out(*without_absent(model_items, items, scope), scope)
    scope.bind(model_items)
    scope.bind(items)
    extended = frozenset(i.span for i in items if isinstance(i, nodes.Entry)) - reader.own_spans
    every = [*plain, *model_items] if plain else model_items
    opened = (library, chain[0], model, model_file, items, every, scope, reader.origins, model_items)
    return OpenedLayout(*opened, extended, tuple(reader.fresh))


def _check_one_value(of_model: Iterable[nodes.Record], links: Sequence[Link[nodes.Layout]], scope: Scope) -> None:
    """Check that layout and model agree on numbers of files.

    A number of a layout's file that differs from the model's would be taken by the model, and by the layout with it. A
    number inside a layout is meant to win. Raises: UcplError E125.
    """
    theirs = _bindings(of_model)
    inside = _bindings(i for link in links for i in link.node.items)
    ours = _bindings(s for link in reversed(links) for s in link.file.statements)
    for name in (n for n in ours if n in theirs and n not in inside and n not in scope.given):
        a, b = ours[name], theirs[name]
        if a.value != b.value and (here := scope.evaluate(a.value)) != (there := scope.evaluate(b.value)):
            fail(
                "E125",
                f"`{name}` is {here} in the layout's file and {there} for its model",
                at(a.span),
                at(b.span),
                remedy="give one of the two another name",
            )


def _bindings(items: Iterable[nodes.Record]) -> dict[str, nodes.Binding]:
    """Bindings of `let` and `dim` statements; the last definition holds."""
    return {b.name: b for i in items if isinstance(i, nodes.Let | nodes.Dims) for b in i.bindings}


def _placed(item: nodes.Record, use: nodes.Use) -> nodes.Record:
    """A statement of a used layout, on its ranks."""
    if isinstance(item, nodes.Entry | nodes.States) and item.shape is not None:
        return evolve(item, clauses=(*item.clauses, *use.at))
    return item


def _called(model: nodes.Model, call: nodes.Call, scope: Scope, taken: set[str]) -> nodes.Call:
    """`of gpt(layers = n)`: the arguments as numbers of the layout.

    One name has one value: `taken` are the layout's. Raises E116 to E118, E125.
    """
    given = placed(model.parameters, call)
    arguments: list[nodes.Argument] = []
    for p in model.parameters:
        expr = given[p.name].value if p.name in given else p.default
        value = None if expr is None else scope.evaluate(expr)
        if p.name in taken and (expr is None or value != scope.given[p.name]):
            fail(
                "E125",
                f"`{p.name}` is {scope.given[p.name]} in the layout, and a parameter of `{model.name}`, too",
                at(call.span),
                at(p.span),
                remedy=f"hand it on: of {model.name}({p.name} = {p.name}), or give one of the two another name",
            )
        if p.name in given:
            shown = literal(value) if isinstance(value, int | str | list) else given[p.name].value
            arguments.append(nodes.Argument(p.name, shown, span=given[p.name].span))
    return nodes.Call(call.name, tuple(arguments), span=call.span)


def called_model(library: Library, call: nodes.Call, sizes: Mapping[str, Value] | None = None) -> nodes.Model:
    """The called model without parameters, base and used models.

    It can be moved away from its library. Numbers of its arguments stay as they are. sizes: -D, for parameters that
    nothing else gives. Raises E008, E110, E116 to E119, E124, E125, E139.
    """
    known = library.model(call.name, call.span)
    assert isinstance(known.node, nodes.Model)
    reader = _Reader(library, Scope(), {}, [])
    lets = own_parameters(known.node, call, sizes or {})
    items = statements_of(library, known, lambda items: reader.uses(items, word="model"))
    return nodes.Model(known.node.name, (*lets, *states_once(items)), span=known.node.span)


def items_of(library: Library, call: nodes.Call) -> list[nodes.LayoutItem]:
    """Statements of a layout and of its bases, each left side once.

    They are as written, but for texts within templates.
    """
    if call.name not in library.written:
        chain = library.chain(call.name, call.span)
        reader = _Reader(library, Scope(), {}, [], axes=_axes_of(chain), is_written=True)
        items = reader.written(chain)
        if chain[0].node.of != "any":
            model = library.model(chain[0].node.of, chain[0].node.span)
            of_model = statements_of(library, model, lambda items: reader.uses(items, word="model"))
            items = with_implied_indices(items, of_model)
        library.written[call.name] = items
    return [*library.written[call.name]]


def _axes_of(chain: Sequence[Link[nodes.Layout]]) -> tuple[tuple[str, ...], ...]:
    """The axes of each mesh that a layout and its bases state."""
    return tuple(i.axes for link in chain for i in link.node.items if isinstance(i, nodes.Mesh))


@define
class _Count:
    """Of statements that `use` has written out, whoever used it."""

    statements: int = 0


@define
class _Reader:
    """Reader that binds names; `origins` has the origins of parameters."""

    library: Library
    scope: Scope
    inherited: Inherited
    origins: list[Note]
    axes: tuple[tuple[str, ...], ...] = ()  # of each mesh of the layout and of its bases
    is_written: bool = False  # statements as they are written: nothing is worked out
    count: _Count = field(factory=_Count)
    own_spans: frozenset[nodes.Span] = frozenset()  # of the layout itself
    fresh: list[nodes.LayoutItem] = field(factory=list)
    founded: set[nodes.Span] = field(factory=set)  # statements of used layouts that replace one of their own bases

    def statements(
        self, chain: Sequence[Link[nodes.Layout]], arguments: Inherited, used: tuple[str, ...] = ()
    ) -> list[nodes.LayoutItem]:
        """Statements in order, the base's first.

        They are replaced if the left side is the same. used: names of layouts, each used by the one before, that lead
        here.
        """
        bodies: list[list[nodes.LayoutItem]] = []
        self.axes += _axes_of(chain)
        for link in reversed(chain):  # numbers of files; those of the derived layout's hold
            self.scope.bind(link.file.statements)
        for link in reversed(chain):  # arguments of `use` may name them; those of the derived layout hold
            self.scope.bind(link.node.items)
        own: set[str] = set()
        for depth, link in enumerate(chain):
            _reject_globs(link.node)
            handed_on = {p.name for derived in chain[:depth] for p in derived.node.parameters}
            for parameter in link.node.parameters:
                if parameter.name in arguments or parameter.name not in handed_on:
                    self.parameter(link.node, parameter, arguments, outermost=depth == 0)
            bodies.append(self.uses(spelled_out(link.node.items, self.scope), used))
            self.scope.bind(_without(bodies[-1], own))
            own |= _defined(bodies[-1])
            if link.node.extends is not None:
                arguments = _arguments(chain[depth + 1].node.parameters, link.node.extends, self.scope)
        self.own_spans = frozenset(i.span for i in bodies[0])
        items: list[nodes.LayoutItem] = []
        for body in reversed(bodies):
            self.fresh = [item for item in fresh(items, body) if item.span not in self.founded]
            items = overlay(items, body)
        return items

    def written(self, chain: Sequence[Link[nodes.Layout]], used: tuple[str, ...] = ()) -> list[nodes.LayoutItem]:
        """Statements of a layout over its bases, with no number worked out."""
        scope = Scope()
        for link in reversed(chain):
            scope.bind(link.file.statements)
        for link in reversed(chain):
            scope.bind(link.node.items)
        items: list[nodes.LayoutItem] = []
        for link in reversed(chain):
            items = overlay(items, self.uses(spelled_out(link.node.items, scope), used))
        return items

    def _of_default(self, layout: nodes.Layout, parameter: nodes.Parameter, default: nodes.Expr) -> Value:
        """Value of a default.

        Of other parameters it knows those before it. Raises E101.
        """
        try:
            return self.scope.evaluate(default)
        except UcplError as error:
            later = {p.name for p in layout.parameters} - {*self.scope.given, parameter.name}
            name = next((n.path for n in walk(default) if isinstance(n, nodes.Name) and n.path in later), None)
            found = error.diagnostics[0]
            if found.code != "E101" or name is None:
                raise
            remedy = f"a default knows the names before it: put `{name}` before `{parameter.name}`, or give a number"
            raise UcplError(evolve(found, remedy=remedy)) from None

    def parameter(
        self, layout: nodes.Layout, parameter: nodes.Parameter, arguments: Inherited, *, outermost: bool
    ) -> None:
        name, given = parameter.name, self.scope.given
        if name in arguments:
            value, origin = arguments[name]
        elif outermost and name in self.inherited:
            value, origin = self.inherited[name]
        elif parameter.default is not None:
            value = self._of_default(layout, parameter, parameter.default)
            self.scope.places.setdefault(name, at(parameter.span))
            origin = of_default(layout.span.file, parameter.span.line)
        elif name in given and not outermost:
            return  # a number of the derived layout
        else:
            fail(
                "E124",
                f"`{layout.name}` needs a value for `{name}`",
                at(parameter.span, "has no default"),
                remedy=f"write {layout.name}({name} = ...)",
            )
        if not outermost and name in given and given[name] != value:
            fail(
                "E125",
                f"`{name}` is {given[name]} here and {value} in the layout that is extended",
                at(layout.span),
                remedy="give one of the two parameters another name",
            )
        if outermost:
            self.origins.append((name, value, origin))
        given[name] = value

    def uses(self, items: Iterable[Item], chain: tuple[str, ...] = (), word: str = "layout") -> list[Item]:
        """Statements of a used model or layout (`use vision() as eye`), under a prefix."""
        out: list[Item] = []
        for item in items:
            out += self.used(item, chain, word) if isinstance(item, nodes.Use) else (item,)  # type: ignore[arg-type]
        return out

    def used(self, item: nodes.Use, chain: tuple[str, ...], word: str) -> list[nodes.Record]:
        known = self.library.find(item.call.name, (nodes.Model, nodes.Layout), word, item.span)
        _check_alike(known.node, item, word)
        if item.call.name in chain:
            fail("E165", f"`{item.call.name}` uses itself: {' -> '.join([*chain, item.call.name])}", at(item.span))
        chain = (*chain, item.call.name)
        if item.at and not isinstance(known.node, nodes.Layout):
            fail("E123", f"`{item.call.name}` is a model, and a model is on no ranks", at(item.at[0].span))
        outer: list[nodes.Record] = []
        if isinstance(known.node, nodes.Layout):
            inner = [*self.within(item, chain), *self.of_such_a_model(known.node)]
        else:
            assert isinstance(known.node, nodes.Model)
            given = placed(known.node.parameters, item.call)
            own = evolve(known.node, parameters=tuple(p for p in known.node.parameters if p.name not in given))
            inner = [*own_parameters(own, nodes.Call(own.name), {})]
            inner += statements_of(self.library, known, lambda items: self.uses(items, chain, "model"))
            # Arguments are numbers of the outer model: these names get no prefix.
            outer = [nodes.Let((nodes.Binding(f"{item.name}.{n}", a.value, span=a.span),)) for n, a in given.items()]
        from ucpl.layout.nesting import prefixed

        self.count.statements += len(inner)
        if self.count.statements > STATEMENTS_MAX:  # each use of a model that uses others multiplies
            fail("E166", f"`use` statements write out more than {STATEMENTS_MAX} statements", at(item.span))
        return [*outer, *(_placed(i, item) for i in prefixed(inner, item.name, item.key) if not self.is_shared(i))]

    def is_shared(self, item: nodes.Record) -> bool:
        """True if an inner mesh is a part of an outer one.

        It has no name. An example: `mesh tp` of `mesh pp tp`.
        """
        return (
            isinstance(item, nodes.Mesh)
            and not item.name
            and any(item.axes == tuple(a for a in mesh if a in item.axes) for mesh in self.axes)
        )

    def of_such_a_model(self, layout: nodes.Layout) -> list[nodes.Assert]:
        """Check that a used layout is of the model under the prefix.

        A used layout `of gpt(layers = 4)` needs a model of that name.
        """
        if layout.of == "any" or not layout.arguments:
            return []
        model = self.library.model(layout.of, layout.span).node
        assert isinstance(model, nodes.Model)
        given = placed(model.parameters, nodes.Call(layout.of, layout.arguments, span=layout.span))
        return [nodes.Assert(nodes.Binary("==", nodes.Name(p), a.value), span=a.span) for p, a in given.items()]

    def within(self, use: nodes.Use, used: tuple[str, ...]) -> list[nodes.Record]:
        """Statements of a used layout over its bases, its numbers before them.

        It is read in a scope of its own: a number `n` of it is not the outer `n`. Only mesh axes are shared.
        """
        from ucpl.layout import nesting

        links = self.library.chain(use.call.name, use.call.span)
        if self.is_written:
            return [*self.written(links, used)]
        call, axes = use.call, (a for mesh in self.axes for a in mesh)
        scope = Scope(nesting.given_within(links, use, self.scope, axes), config=self.scope.config)
        reader = _Reader(self.library, scope, {}, [], self.axes, count=self.count)
        arguments = nesting.axes_here(links[0].node, nesting.axes_in(links), self.scope)
        arguments |= self.of_use(links[0].node, call)
        items = reader.statements(links, arguments, used)
        unfounded = {item.span for item in reader.fresh}
        self.founded |= reader.founded | {i.span for i in items if i.span.line and i.span not in unfounded}
        nesting.check_axes(links, call, reader.scope, self.scope)
        nesting.check_groups(items)
        return nesting.numbers_within(links, reader.scope, self.scope) + nesting.on_these_ranks(
            links, items, self.scope
        )

    def of_use(self, layout: nodes.Layout, call: nodes.Call) -> Inherited:
        """Arguments of a used layout.

        Raises E101: numbers of the model need no argument.
        """
        try:
            return _arguments(layout.parameters, call, self.scope)
        except UcplError as error:
            found = error.diagnostics[0]
            if found.code != "E101":
                raise
            own = f"sizes of the used model need no argument: `layout {layout.name}(...) of {layout.of}` has them"
            remedy = f"{found.remedy}\n{own}"
            raise UcplError(evolve(found, remedy=remedy)) from None


def _check_alike(used: nodes.Record, item: nodes.Use, word: str) -> None:
    """A model uses models, and a layout layouts. Raises E110."""
    other = "layout" if word == "model" else "model"
    if isinstance(used, nodes.Layout if word == "model" else nodes.Model):
        name = item.call.name
        remedy = f"a model uses models, and a layout layouts: name the {word} that `{name}` belongs to, or define one"
        fail("E110", f"no {word} is called `{name}`: it is a {other}", at(item.span), remedy=remedy)


def _arguments(parameters: tuple[nodes.Parameter, ...], call: nodes.Call, scope: Scope) -> Inherited:
    """Arguments of a call, by the parameters' names, each with its origin."""
    given = placed(parameters, call)
    return {name: (scope.evaluate(argument.value), "given") for name, argument in given.items()}


def _reject_globs(layout: nodes.Layout) -> None:
    """Refuse globs in a layout of a named model.

    They are for names that the text does not know.
    """
    if layout.of == "any":
        return
    item = next((i for i in layout.items if isinstance(i, nodes.Entry | nodes.Fill) and i.glob), None)
    if item is not None:
        fail(
            "E126",
            f'"{item.path}" is a glob over names, and `{layout.name}` is a layout of `{layout.of}`, which names its tensors',
            at(item.span),
            remedy=f"write one line a tensor, or `layout {layout.name}(...) of any`;"
            " a star that is part of a name is written \\u{2a}",
        )


def _defined(items: Iterable[nodes.Record]) -> set[str]:
    """Names that `let` and `dim` statements define."""
    return {b.name for i in items if isinstance(i, nodes.Let | nodes.Dims) for b in i.bindings}


def _without(items: Iterable[nodes.Record], names: set[str]) -> list[nodes.Let]:
    """Definitions of other names than these."""
    bindings = [b for i in items if isinstance(i, nodes.Let | nodes.Dims) for b in i.bindings if b.name not in names]
    return [nodes.Let(tuple(bindings))] if bindings else []


# ---- one name has one value ------------------------------------------------------------------------------------------


def reject_second_meanings(
    scope: Scope, model: Sequence[nodes.Record], layout: Sequence[nodes.Record], said: Collection[str]
) -> None:
    """Refuse two meanings of one name.

    `model` and `layout` are their statements, the layout's parameters among them; `said` are names of -D, which win.
    Numbers of a file are no part of either: a layout may give another value. A name that both define is refused unless
    its values are one, or one of them is not known yet. Raises: UcplError E125.
    """
    ours = {name: (value, span) for name, value, span in _numbers_defined(model) if name not in said}
    shared = [found for found in _numbers_defined(layout) if found[0] in ours]
    if not shared:
        return
    before, after = (evolve(scope, bindings=dict(scope.bindings), values={}, pending=[]) for _ in range(2))
    after.bind(layout)
    for name, value, span in shared:
        here = scope.given.get(name) if value is None else _value(after, value)
        there = _value(before, ours[name][0])
        if None not in (here, there) and here != there:
            fail(
                "E125",
                f"`{name}` is {there} in the model and {here} in the layout",
                at(span, "the layout's"),
                at(ours[name][1], "the model's"),
                remedy=f"a layout and its model share their names: give the layout's `{name}` another name",
            )


def _numbers_defined(items: Iterable[nodes.Record]) -> Iterator[tuple[str, nodes.Expr | None, nodes.Span]]:
    for item in items:
        if isinstance(item, nodes.Let | nodes.Dims):
            yield from ((b.name, b.value, b.span) for b in item.bindings)
        elif isinstance(item, nodes.Parameter):
            yield item.name, None, item.span


def _value(scope: Scope, expr: nodes.Expr | None) -> Value:
    """Value, or None if nothing gives one of its names."""
    try:
        return None if expr is None else scope.evaluate(expr)
    except UcplError:
        return None


# ---- tensors under a condition ---------------------------------------------------------------------------------------


_NEVER = nodes.Clause("when", (nodes.Number(0),))


def without_absent(
    model_items: Sequence[nodes.ModelItem], items: Iterable[nodes.LayoutItem], scope: Scope
) -> tuple[list[nodes.ModelItem], list[nodes.LayoutItem]]:
    """Statements with those of absent tensors under a condition that never holds.

    A tensor whose condition needs a config, and there is none, is not absent: its line asks for the config.
    """
    said = [i for i in model_items if isinstance(i, nodes.Tensor | nodes.Alias)]
    if all(i.when is None for i in said):
        return [*model_items], [*items]
    names = {i.path for i in said}
    absent = names - {i.path for i in said if scope.holds(i.when) or _is_open(i.when, scope)}
    if not absent:
        return [*model_items], [*items]
    named = [(i, _is_skipped(i, names, absent)) for i in items]
    lines = {i.path for i, is_skipped in named if isinstance(i, nodes.Entry) and is_skipped}
    lines -= {
        i.path for i, is_skipped in named if isinstance(i, nodes.Entry) and not is_skipped and i.shape is not None
    }
    of_groups = absent | lines
    made = [_skipped(i) if is_skipped else _lessened(i, of_groups) for i, is_skipped in named]
    return [_lessened(i, absent) for i in model_items], made


def _is_open(condition: nodes.Expr | None, scope: Scope) -> bool:
    return condition is not None and not scope.config and scope.lacks_config(condition)


def _is_skipped(item: nodes.LayoutItem, names: set[str], absent: set[str]) -> bool:
    """True if a line names absent tensors and no other."""
    if isinstance(item, nodes.Fill):
        return item.path in absent
    if not isinstance(item, nodes.Entry) or item.shape is None:
        return False
    labels = [t.label for s in walk(*item.shape) if isinstance(s, nodes.Stack) for t in s.terms if t.label is not None]
    return all(p in absent for p in ([tensor_of_label(item.path, label, names) for label in labels] or [item.path]))


def _skipped(item: nodes.LayoutItem) -> nodes.LayoutItem:
    if isinstance(item, nodes.Entry):
        return evolve(item, clauses=(*item.clauses, _NEVER))
    assert isinstance(item, nodes.Fill)
    return evolve(item, when=nodes.Number(0))


def _lessened(item: Item, absent: set[str]) -> Item:
    """A group without absent members."""
    if isinstance(item, nodes.Group) and absent.intersection(item.members or ()):
        return evolve(item, members=tuple(m for m in item.members or () if m not in absent))
    return item
