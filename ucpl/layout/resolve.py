"""resolve: a layout's statements with every name bound, every number filled in, `extends` applied, rules checked.

The order is: names and numbers (scope), the model's tensors, then the layout's own statements closed one by one.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from attrs import define, evolve, field

from ucpl.errors import Label, fail
from ucpl.layout import axes as ax
from ucpl.layout.layout import (
    BlobRule,
    Derivation,
    Entry,
    FileRule,
    Group,
    Layout,
    LogicalState,
    LogicalTensor,
    Mesh,
    States,
    Storing,
)
from ucpl.layout.library import Known, Library
from ucpl.layout.prefix import prefixed
from ucpl.layout.scope import Scope, Value, at, nearest
from ucpl.layout.templates import template
from ucpl.syntax import nodes

TENSOR_LIMIT = 4_000_000
RANK_LIMIT = 1 << 20
EXTENDS_LIMIT = 32

CLASSES = ("parameter", "trainable", "frozen", "buffer", "alias")


def resolve(
    library: Library,
    call: nodes.Call,
    *,
    model: nodes.Model | None = None,
    config: dict[str, Any] | None = None,
    define_sizes: dict[str, Value] | None = None,
    inherited: dict[str, tuple[Value, str]] | None = None,
    notes: tuple[tuple[str, Any, str], ...] = (),
) -> Layout:
    """Close the layout that `call` names.

    model:        what a layout `of any` is over; a layout of a named model brings its own.
    config:       a Hugging Face config.json, as `config.x`.
    define_sizes: -D name=value; wins over `let` and `dim` of the same name.
    inherited:    values for parameters that the call leaves open, each with its origin (a source's own settings).
    notes:        (name, value, origin) of what went into the call or the library itself: printed with the others.

    Raises UcplError E1xx.
    """
    layout = _Resolver(library, config or {}, define_sizes or {}, inherited or {}).layout(call, model)
    return evolve(layout, origins=(*layout.origins, *notes)) if notes else layout


@define
class _Resolver:
    library: Library
    config: dict[str, Any]
    define_sizes: dict[str, Value]
    inherited: dict[str, tuple[Value, str]]
    scope: Scope = field(init=False)
    origins: list[tuple[str, Any, str]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.scope = Scope(given=dict(self.define_sizes), config=self.config)
        self.origins += [(name, value, "-D") for name, value in self.define_sizes.items()]

    # ---- names ---------------------------------------------------------------------------------------------------

    def layout(self, call: nodes.Call, model: nodes.Model | None) -> Layout:
        known = self.library.layout(call.name, call.span)
        assert isinstance(known.node, nodes.Layout)
        arguments = self.arguments(known.node.parameters, call, Scope(config=self.config))
        items = self.statements(known, arguments, ())
        of = known.node.of
        model_known: Known | None = None
        if of == "any":
            node = model
            if node is None:
                fail(
                    "E114",
                    f"layout `{call.name}` is of any model, and no model is given",
                    at(known.node.span),
                    remedy="name one with --model FILE:NAME, or give a checkpoint",
                )
        else:
            model_known = self.library.model(of, known.node.span)
            assert isinstance(model_known.node, nodes.Model)
            node = model_known.node
        if model_known is not None:
            self.file_lets(model_known.file)
        model_items = self.expand_uses(node.items)
        self.bind(model_items)
        self.bind(items)
        unknown = [n for n in self.define_sizes if n not in self.scope.bindings]
        if unknown:
            close = nearest(unknown[0], list(self.scope.bindings))
            fail(
                "E115",
                f"-D {unknown[0]}: neither model nor layout has a size of that name",
                Label("<command line>", where=f"-D {unknown[0]}"),
                remedy=f"did you mean `{close}`?" if close else f"sizes: {', '.join(sorted(self.scope.bindings)[:20])}",
            )
        meshes = self.meshes(items)
        indices = self.index_rules(model_items, items, meshes)
        tensors = self.tensors(model_items)
        aliases = self.aliases(model_items, tensors)
        for item in [*model_items, *items, *(s for f in self.files_of(known, model_known) for s in f.statements)]:
            if isinstance(item, nodes.Assert):
                self.check_assert(item)
        model_groups = self.model_groups(model_items, tensors)
        files = self.file_rules(items)
        entries = self.entries(items, tensors, aliases, files, indices, node.name)
        groups = self.groups(items, tensors, entries, model_groups)
        framework, settings = self.framework(items)
        states = self.states(model_items)
        lines = self.state_lines(items, files, groups, model_groups)
        sizes = {
            name: value
            for name in [*self.scope.bindings, *self.scope.given]
            if isinstance(value := self.scope_value(name), int)
        }
        return Layout(
            name=call.name,
            call=self.call_text(call.name, known.node.parameters),
            sizes=sizes,
            config=self.config,
            tensors=tensors,
            aliases=aliases,
            states=states,
            model_groups=model_groups,
            meshes=meshes,
            indices=indices,
            files=files,
            entries=entries,
            state_lines=lines,
            groups=groups,
            derived=tuple(
                Derivation(i.state, i.source) for i in items if isinstance(i, nodes.Derive) and self.holds(i.when)
            ),
            blobs=tuple(self.blob(i, files) for i in items if isinstance(i, nodes.Blob)),
            framework=framework,
            settings=settings,
            origins=tuple(self.origins),
            model_name=node.name,
            scope=self.scope,
            not_kept=frozenset(
                n
                for i in items
                if isinstance(i, nodes.States) and i.shape is None
                for n in (i.names if i.names is not None else ("*",))
                if all(self.holds(c.args[0]) for c in i.clauses if c.word == "when")
            ),
        )

    def scope_value(self, name: str) -> Value:
        """A binding's value, or None where it cannot be had: a dim that this model's config leaves out."""
        expr = self.scope.bindings.get(name)
        if expr is not None and name not in self.scope.given and self.lacks_config(expr):
            return None
        return self.scope.lookup(name, nodes.NOWHERE)

    def lacks_config(self, expr: nodes.Expr, chain: tuple[str, ...] = ()) -> bool:
        """Whether an expression rests on a config key that is absent, outside default(...)."""
        match expr:
            case nodes.Name(path=path):
                if path.startswith("config.") or not self.scope.knows(path):
                    return self.scope.lookup(path, expr.span) is None
                inner = self.scope.bindings.get(path)
                if inner is None or path in self.scope.given or path in chain or len(chain) > 200:
                    return False  # a circle is refused where its value is asked for
                return self.lacks_config(inner, (*chain, path))
            case nodes.Function(name="default"):
                return False
            case nodes.Function(args=args) | nodes.List(items=args):
                return any(self.lacks_config(a, chain) for a in args)
            case nodes.Unary(operator="-", operand=operand):
                return self.lacks_config(operand, chain)
            case nodes.Binary(operator=("and" | "or" | "==" | "!=")):
                return False
            case nodes.Binary(left=left, right=right):
                return self.lacks_config(left, chain) or self.lacks_config(right, chain)
            case _:
                return False

    def call_text(self, name: str, parameters: tuple[nodes.Parameter, ...]) -> str:
        def shown(value: Value) -> str:
            return f'"{value}"' if isinstance(value, str) else str(value)

        return f"{name}({', '.join(f'{p.name} = {shown(self.scope.given[p.name])}' for p in parameters)})"

    @staticmethod
    def files_of(*known: Known | None) -> list[nodes.File]:
        return [k.file for k in known if k is not None]

    def file_lets(self, file: nodes.File) -> None:
        self.bind(file.statements)

    def bind(self, items: tuple[Any, ...] | list[Any]) -> None:
        for item in items:
            if isinstance(item, nodes.Let | nodes.Dims):
                for binding in item.bindings:
                    self.scope.bindings[binding.name] = binding.value
                    self.scope.values.pop(binding.name, None)

    def arguments(
        self, parameters: tuple[nodes.Parameter, ...], call: nodes.Call, scope: Scope
    ) -> dict[str, tuple[Value, str]]:
        """Values of a call's arguments, by the parameters' names, each with where it came from."""
        found: dict[str, tuple[Value, str]] = {}
        names = [p.name for p in parameters]
        for position, argument in enumerate(call.arguments):
            if argument.name is None and position >= len(names):
                fail(
                    "E116",
                    f"`{call.name}` takes {len(names)} arguments, not {len(call.arguments)}",
                    at(argument.span) if argument.span.line else Label("<call>", where=call.name),
                )
            name = argument.name or names[position]
            if name not in names:
                close = nearest(name, names)
                fail(
                    "E117",
                    f"`{call.name}` has no parameter `{name}`",
                    at(argument.span) if argument.span.line else Label("<call>", where=call.name),
                    remedy=f"did you mean `{close}`?" if close else f"its parameters: {', '.join(names) or 'none'}",
                )
            if name in found:
                fail("E118", f"`{name}` is given twice to `{call.name}`", at(argument.span))
            found[name] = (scope.evaluate(argument.value), "given")
        return found

    def statements(self, known: Known, arguments: dict[str, tuple[Value, str]], chain: tuple[str, ...]) -> list[Any]:
        """Statements in order, those of the base first, replaced where the left side is the same."""
        layout = known.node
        assert isinstance(layout, nodes.Layout)
        if layout.name in chain or len(chain) > EXTENDS_LIMIT:
            fail("E119", f"`{layout.name}` extends itself: {' -> '.join([*chain, layout.name])}", at(layout.span))
        self.file_lets(known.file)
        for parameter in layout.parameters:
            self.parameter(layout, parameter, arguments, outermost=not chain)
        body = self.expand_uses(layout.items)
        if layout.extends is None:
            self.bind(body)
            return list(body)
        base = self.library.layout(layout.extends.name, layout.extends.span)
        assert isinstance(base.node, nodes.Layout)
        self.bind(body)
        given = self.arguments(base.node.parameters, layout.extends, self.scope)
        inner = self.statements(base, given, (*chain, layout.name))
        self.bind(body)
        return _overlay(inner, body)

    def parameter(
        self,
        layout: nodes.Layout,
        parameter: nodes.Parameter,
        arguments: dict[str, tuple[Value, str]],
        *,
        outermost: bool,
    ) -> None:
        name = parameter.name
        if name in arguments:
            value, origin = arguments[name]
        elif outermost and name in self.inherited:
            value, origin = self.inherited[name]
        elif parameter.default is not None:
            value = self.scope.evaluate(parameter.default)
            origin = f"default of {layout.span.file}:{parameter.span.line}"
        elif name in self.scope.given and not outermost:
            return  # the derived layout's own parameter of that name
        else:
            fail(
                "E124",
                f"`{layout.name}` needs a value for `{name}`",
                at(parameter.span, "has no default"),
                remedy=f"write {layout.name}({name} = ...)",
            )
        if not outermost and name in self.scope.given and self.scope.given[name] != value:
            fail(
                "E125",
                f"`{name}` is {self.scope.given[name]} here and {value} in the layout that is extended",
                at(layout.span),
                remedy="give one of the two parameters another name",
            )
        if outermost:
            self.origins.append((name, value, origin))
        self.scope.given[name] = value

    def expand_uses(self, items: tuple[Any, ...]) -> list[Any]:
        """`use vision() as eye`: the statements of the other model or layout under a prefix."""
        out: list[Any] = []
        for item in items:
            if not isinstance(item, nodes.Use):
                out.append(item)
                continue
            known = self.library._find(
                item.call.name,
                (nodes.Model, nodes.Layout),
                "model or layout",
                item.span,
            )
            assert isinstance(known.node, nodes.Model | nodes.Layout)
            inner: list[Any] = [s for s in known.file.statements if isinstance(s, nodes.Let)]
            if isinstance(known.node, nodes.Layout):
                arguments = self.arguments(known.node.parameters, item.call, self.scope)
                for p in known.node.parameters:
                    value = arguments[p.name][0] if p.name in arguments else None
                    if p.name not in arguments and p.default is not None:
                        value = self.scope.evaluate(p.default)
                    inner.append(nodes.Let((nodes.Binding(p.name, _literal(value), span=p.span),), span=p.span))
            inner += (
                self.flattened(known, ())
                if isinstance(known.node, nodes.Layout)
                else self.expand_uses(known.node.items)
            )
            out += prefixed(inner, item.name, item.key)
        return out

    def flattened(self, known: Known, chain: tuple[str, ...]) -> list[Any]:
        """Statements of a layout that is used, over those that it extends; parameters of the base are `let`."""
        node = known.node
        assert isinstance(node, nodes.Layout)
        if node.name in chain or len(chain) > EXTENDS_LIMIT:
            fail("E119", f"`{node.name}` extends itself: {' -> '.join([*chain, node.name])}", at(node.span))
        own = self.expand_uses(node.items)
        if node.extends is None:
            return own
        base = self.library.layout(node.extends.name, node.extends.span)
        assert isinstance(base.node, nodes.Layout)
        parameters = base.node.parameters
        given = {a.name or parameters[i].name: a.value for i, a in enumerate(node.extends.arguments[: len(parameters)])}
        lets: list[Any] = [s for s in base.file.statements if isinstance(s, nodes.Let)]
        for p in parameters:
            value = given.get(p.name, p.default)
            if value is not None and not (isinstance(value, nodes.Name) and value.path == p.name):
                lets.append(nodes.Let((nodes.Binding(p.name, value, span=p.span),), span=p.span))
        return [*lets, *_overlay(self.flattened(base, (*chain, node.name)), own)]

    # ---- model -----------------------------------------------------------------------------------------------------

    def holds(self, condition: nodes.Expr | None) -> bool:
        return condition is None or bool(self.scope.evaluate(condition))

    def tensors(self, items: list[Any]) -> dict[str, LogicalTensor]:
        default = next((i.name for i in reversed(items) if isinstance(i, nodes.DefaultDtype)), None)
        found: dict[str, LogicalTensor] = {}
        for item in items:
            if not isinstance(item, nodes.Tensor) or not self.holds(item.when):
                continue
            if item.path in found:
                fail(
                    "E130",
                    f"tensor `{item.path}` is defined twice",
                    at(item.span, "again here"),
                    at(found[item.path].span, "first here"),
                )
            found[item.path] = self.tensor(item, default)
            if len(found) > TENSOR_LIMIT:
                fail("E131", f"a model of more than {TENSOR_LIMIT} tensors", at(item.span))
        return found

    def tensor(self, item: nodes.Tensor, default: str | None) -> LogicalTensor:
        names, counts, starts, steps = [], [], [], []
        for position, dim in enumerate(item.dims):
            if dim.name is None:
                name, size = f"{item.path}#{position}", dim.size or 0
                self.scope.given[name] = size
            else:
                name = dim.name
                size = self.scope.integer(nodes.Name(name, span=dim.span))
            if size < 0:
                fail("E132", f"dim `{name}` of `{item.path}` is {size}", at(dim.span))
            if name in names:
                fail(
                    "E133",
                    f"`{item.path}` has dim `{name}` twice",
                    at(dim.span, "second time"),
                    remedy=f"give the second one a name of its own, as in `dim {name}2 = {name}`",
                )
            start, stop, step = (None if e is None else self.scope.integer(e) for e in dim.range or (None,) * 3)
            if step is not None and step <= 0:
                fail("E134", f"step {step} of dim `{name}`", at(dim.span))
            indices = range(size)[start:stop:step]
            names.append(name)
            counts.append(len(indices))
            starts.append(indices.start if len(indices) else 0)
            steps.append(indices.step)
        numel = 1
        for n in counts:
            numel *= n
        if numel > 1 << 61:
            fail("E106", f"`{item.path}` has {numel} elements", at(item.span))
        return LogicalTensor(
            item.path,
            tuple(names),
            tuple(counts),
            tuple(starts),
            tuple(steps),
            item.dtype or default,
            item.kind,
            item.span,
        )

    def aliases(self, items: list[Any], tensors: dict[str, LogicalTensor]) -> dict[str, str]:
        found: dict[str, str] = {}
        for item in items:
            if not isinstance(item, nodes.Alias) or not self.holds(item.when):
                continue
            if item.owner not in tensors:
                fail("E135", f"alias `{item.path}` of `{item.owner}`, which is no tensor", at(item.span))
            if item.path in tensors or item.path in found:
                fail("E130", f"`{item.path}` is defined twice", at(item.span, "again here"))
            found[item.path] = item.owner
        return found

    def states(self, items: list[Any]) -> tuple[LogicalState, ...]:
        found: list[LogicalState] = []
        for item in items:
            if isinstance(item, nodes.State):
                found += [LogicalState(n, item.dtype, item.scalar, item.groups) for n in item.names]
        return tuple(found)

    def model_groups(
        self, items: list[Any], tensors: dict[str, LogicalTensor]
    ) -> tuple[tuple[str, tuple[str, ...]], ...]:
        found: list[tuple[str, tuple[str, ...]]] = []
        seen: dict[str, str] = {}
        for item in items:
            if not isinstance(item, nodes.Group):
                continue
            members = item.members
            if members is None:
                out = {m for g, ms in found for m in ms if g in (item.without or ())}
                members = tuple(p for p, t in tensors.items() if t.kind == "parameter" and p not in out)
            for m in members:
                if m not in tensors:
                    self.unknown_tensor(m, list(tensors), item.span)
                if m in seen:
                    fail("E136", f"`{m}` is in groups `{seen[m]}` and `{item.name}`", at(item.span))
                seen[m] = item.name
            found.append((item.name, members))
        return tuple(found)

    def unknown_tensor(self, name: str, tensors: list[str], span: nodes.Span) -> None:
        close = nearest(name, tensors)
        fail(
            "E137",
            f"no tensor is called `{name}`",
            at(span, "named here"),
            remedy=f"did you mean `{close}`?" if close else "add it to the model, or take this line out",
        )

    # ---- layout ----------------------------------------------------------------------------------------------------

    def meshes(self, items: list[Any]) -> tuple[Mesh, ...]:
        found: list[Mesh] = []
        for item in items:
            if not isinstance(item, nodes.Mesh):
                continue
            degrees = []
            for axis in item.axes:
                degree = self.scope.integer(nodes.Name(axis, span=item.span))
                if degree < 1:
                    fail("E140", f"mesh axis `{axis}` is {degree}", at(item.span))
                degrees.append(degree)
            found.append(Mesh(item.name, item.axes, tuple(degrees)))
            total, first = _product(found[-1].degrees), _product(found[0].degrees)
            if total > RANK_LIMIT:
                fail("E141", f"a mesh of {total} ranks", at(item.span))
            if total != first:
                other = next(i for i in items if isinstance(i, nodes.Mesh))
                fail(
                    "E142",
                    f"mesh `{item.name or 'of ranks'}` has {total} ranks, the first mesh {first}",
                    at(item.span, " x ".join(map(str, degrees))),
                    at(other.span, " x ".join(map(str, found[0].degrees))),
                )
        return tuple(found)

    def index_rules(self, model: list[Any], items: list[Any], meshes: tuple[Mesh, ...]) -> dict[str, ax.Axis]:
        rules = {i.name: i for i in [*model, *items] if isinstance(i, nodes.Index)}
        # One digit that has no size is inferred before anything is closed: slot = l / (vp * pp).
        for name, item in rules.items():
            digits = _digit_names(item.axis)
            if not digits:
                self.axis(item.axis, item.span, meshes)  # says what is wrong with it, unless it is a sum
            if digits == [name]:
                continue
            unknown = [d for d in digits if not self.scope.knows(d)]
            if len(unknown) > 1:
                fail("E143", f"sizes of digits {', '.join(unknown)} are unknown; one may be", at(item.span))
            known = _product([self.scope.integer(nodes.Name(d, span=item.span)) for d in digits if d not in unknown])
            whole = self.scope.integer(nodes.Name(name, span=item.span))
            if unknown:
                if known == 0 or whole % known:
                    fail(
                        "E108", f"{name} = {whole} does not divide by {known}, the product of its digits", at(item.span)
                    )
                self.scope.given[unknown[0]] = whole // known
            elif known != whole:
                fail("E144", f"the digits of `{name}` multiply to {known}, and {name} is {whole}", at(item.span))
        return {name: self.axis(item.axis, item.span, meshes) for name, item in rules.items()}

    def axis(self, node: nodes.Axis, span: nodes.Span, meshes: tuple[Mesh, ...] | None = None) -> ax.Axis:
        """Close a pattern: numbers instead of expressions."""
        here = getattr(node, "span", nodes.NOWHERE)
        here = here if here.line else span
        match node:
            case nodes.Dim():
                return self.ranged(node, here)
            case nodes.Stack(terms=terms):
                return ax.Stack(tuple(ax.Term(t.label, tuple(self.axis(a, here) for a in t.axes)) for t in terms))
            case nodes.Pad(axis=inner, multiple=multiple, kind=kind):
                n = self.scope.integer(multiple)
                if n < 1:
                    fail("E145", f"pad to a multiple of {n}", at(here))
                return ax.Pad(self.axis(inner, here), n, kind)
            case nodes.Trim(axis=inner):
                if isinstance(inner, nodes.Cut):
                    fail(
                        "E146",
                        "trim the whole before it is cut: the end of one piece is not the end of the tensor",
                        at(here),
                        remedy="write trim(x)@dp, or x@chunk(dp, grain) for parts saved without padding",
                    )
                return ax.Trim(self.axis(inner, here))
            case nodes.Flat(axis=inner):
                return ax.Flat(self.axis(inner, here))
            case nodes.Each():
                return ax.Each()
            case nodes.Cut(axis=inner, splits=splits):
                return ax.Cut(self.axis(inner, here), tuple(self.split(s, here) for s in splits))
            case nodes.Any_() | nodes.Rest():
                fail("E147", "`_` and `...` stand for the dims of one tensor, in an entry", at(here))
        raise TypeError(node)

    def ranged(self, node: nodes.Dim, span: nodes.Span) -> ax.Dim:
        if node.range is None:
            return ax.Dim(node.name)
        size = self.scope.integer(nodes.Name(node.name, span=span))
        low = 0 if node.range[0] is None else self.scope.integer(node.range[0])
        high = size if node.range[1] is None else self.scope.integer(node.range[1])
        if not 0 <= low <= high <= size:
            fail("E161", f"{low}..{high} is no range of `{node.name}`, which is {size}", at(span))
        return ax.Dim(node.name, low, high)

    def split(self, split: nodes.Split, span: nodes.Span) -> ax.Split:
        place = split.span if split.span.line else span
        if not self.scope.knows(split.mesh_axis):
            fail("E148", f"`@{split.mesh_axis}` cuts over a mesh axis that has no size", at(place))
        sizes: list[int] = []
        for expr in split.sizes:
            value = self.scope.evaluate(expr)
            for one in value if isinstance(value, list) else [value]:
                if not isinstance(one, int) or one < 0:
                    fail("E104", f"{one!r} is no size of a piece", at(place))
                sizes.append(one)
        grain = 1 if split.grain is None else self.scope.integer(split.grain)
        if grain < 1:
            fail("E145", f"a grain of {grain}", at(place))
        return ax.Split(split.mesh_axis, split.kind, tuple(sizes), grain)

    def file_rules(self, items: list[Any]) -> dict[str, FileRule]:
        found: dict[str, FileRule] = {}
        for item in items:
            if isinstance(item, nodes.Files) and self.holds(item.when):
                path = template(item.template, item.span) if item.form is not None else None
                key = template(item.key, item.span) if item.key is not None else None
                found[item.name] = FileRule(item.name, item.form, path, key, item.span)
        return found

    def storing(
        self, clauses: tuple[nodes.Clause, ...], files: dict[str, FileRule], span: nodes.Span, default: str
    ) -> Storing:
        said: dict[str, nodes.Clause] = {}
        at_clauses: list[tuple[str, int]] = []
        for clause in clauses:
            if clause.word == "at":
                axis, expr = clause.args
                degree = self.scope.integer(nodes.Name(axis, span=clause.span))
                place = self.scope.integer(expr)
                if not -degree <= place < degree:
                    fail("E149", f"at {axis}[{place}], but {axis} is {degree}", at(clause.span))
                at_clauses.append((axis, place % degree))
                continue
            said[clause.word] = clause

        def arg(word: str, default: Any = None) -> Any:
            return said[word].args[0] if word in said else default

        name = arg("in", default)
        if name not in files:
            close = nearest(name, list(files))
            fail(
                "E151",
                f"no file is called `{name}`",
                at(said["in"].span if "in" in said else span),
                remedy=f"did you mean `{close}`?" if close else f'write file {name} = torch "..." in the layout',
            )
        policy, axes = said["copies"].args if "copies" in said else ("same", ())
        key = said.get("as")
        value = (1.0, 0.0)
        if "value" in said:
            value = self.affine(said["value"].args[0], said["value"].span)
        return Storing(
            file=name,
            key=template(key.args[0], key.span if key.span.line else span) if key else None,
            policy=policy,
            policy_axes=tuple(axes),
            at=tuple(at_clauses),
            mesh=arg("on", ""),
            dtype=arg("dtype"),
            lossy="lossy" in said,
            value=value,
        )

    def affine(self, expr: nodes.Expr, span: nodes.Span) -> tuple[float, float]:
        """stored = a * x + b, from the text of a `value` clause; x occurs once."""
        values = []
        for x in (0, 1, 2):
            inner = Scope(given={**self.scope.given, "x": x}, bindings=self.scope.bindings, config=self.config)
            values.append(Fraction(inner.integer(expr)))
        a, b = values[1] - values[0], values[0]
        if a == 0 or values[2] - values[1] != a:
            fail("E152", f"`value {_text(expr)}` is no a * x + b", at(span))
        if a != 1:
            fail(
                "E153",
                f"`value {_text(expr)}` scales by {a}",
                at(span),
                remedy="only sums (x - 1) are supported: a factor on a trained tensor would scale its moments, too",
            )
        return float(a), float(b)

    def entries(
        self,
        items: list[Any],
        tensors: dict[str, LogicalTensor],
        aliases: dict[str, str],
        files: dict[str, FileRule],
        indices: dict[str, ax.Axis],
        model: str,
    ) -> tuple[Entry, ...]:
        written = [i for i in items if isinstance(i, nodes.Entry)]
        explicit = {i.path for i in written if i.path != "*"}
        classes: dict[str, list[nodes.Entry]] = {}
        for item in written:
            if item.path == "*" and self.entry_holds(item):
                classes.setdefault(item.of or "*", []).append(item)
        out: list[Entry] = []
        expanded = False
        for item in written:
            if item.path != "*":
                if item.shape is not None and self.entry_holds(item):
                    out.append(self.entry(item, tensors, aliases, files))
            elif not expanded:
                expanded = True
                out += self.wildcards(classes, explicit, tensors, aliases, files)
        return tuple(out)

    def entry_holds(self, item: nodes.Entry) -> bool:
        return all(self.holds(c.args[0]) for c in item.clauses if c.word == "when")

    def wildcards(
        self,
        classes: dict[str, list[nodes.Entry]],
        explicit: set[str],
        tensors: dict[str, LogicalTensor],
        aliases: dict[str, str],
        files: dict[str, FileRule],
    ) -> list[Entry]:
        """One entry a tensor, in the model's order; the most special class that speaks of it wins."""
        out: list[Entry] = []
        for path, tensor in tensors.items():
            if path in explicit:
                continue
            order = {
                "parameter": ("trainable", "parameter", "*"),
                "frozen": ("frozen", "parameter", "*"),
                "buffer": ("buffer", "*"),
            }
            for name in order[tensor.kind]:
                if name in classes:
                    for item in classes[name]:
                        if item.shape is not None:
                            out.append(self.wild(item, tensor, path, None, files))
                    break
        for alias, owner in aliases.items():
            for item in classes.get("alias", ()) if alias not in explicit else ():
                if item.shape is not None:
                    out.append(self.wild(item, tensors[owner], owner, alias, files))
        return out

    def wild(
        self, item: nodes.Entry, tensor: LogicalTensor, path: str, alias: str | None, files: dict[str, FileRule]
    ) -> Entry:
        left = list(tensor.dims)

        def fill(node: nodes.Axis) -> nodes.Axis | list[nodes.Axis]:
            match node:
                case nodes.Any_():
                    if not left:
                        fail("E155", f"`{path}` has no more dims for `_`", at(item.span), at(tensor.span))
                    return nodes.Dim(left.pop(0), node.range, span=node.span)
                case nodes.Rest():
                    taken: list[nodes.Axis] = [nodes.Dim(n, span=node.span) for n in left]
                    left.clear()
                    return taken
                case nodes.Dim(name=name):
                    if name in left:
                        left.remove(name)
                    return node
                case nodes.Cut(axis=inner):
                    return evolve(node, axis=one(fill(inner), node))
                case nodes.Pad(axis=inner) | nodes.Trim(axis=inner) | nodes.Flat(axis=inner):
                    return evolve(node, axis=one(fill(inner), node))
                case nodes.Stack(terms=terms):
                    new: list[nodes.Term] = []
                    before, after = list(left), list(left)
                    for t in terms:
                        left[:] = before  # the terms of a sum are ways through one dim: each starts at the same place
                        filled: list[nodes.Axis] = []
                        for a in t.axes:
                            got = fill(a)
                            filled += got if isinstance(got, list) else [got]
                        if new and left != after:
                            fail(
                                "E162",
                                f"terms of a sum take different dims of `{path}`",
                                at(item.span),
                                at(tensor.span),
                            )
                        after = list(left)
                        new.append(evolve(t, axes=tuple(filled)))
                    return evolve(node, terms=tuple(new))
                case _:
                    return node

        def one(got: nodes.Axis | list[nodes.Axis], place: nodes.Axis) -> nodes.Axis:
            if not isinstance(got, list):
                return got
            return nodes.Stack((nodes.Term(None, tuple(got), span=place.span),), span=place.span)

        shape: list[nodes.Axis] = []
        for axis in item.shape or ():
            got = fill(axis)
            shape += got if isinstance(got, list) else [got]
        if left:
            fail(
                "E156",
                f"the pattern names {len(tensor.dims) - len(left)} of the {len(tensor.dims)} dims of `{path}`",
                at(item.span),
                at(tensor.span),
                remedy="end the pattern with `...`",
            )
        variables = {"name": path} | ({"alias": alias, "owner": path} if alias else {})
        storing = self.storing(tuple(c for c in item.clauses if c.word != "when"), files, item.span, "weights")
        return Entry(
            path,
            (),
            tuple(self.axis(a, item.span) for a in shape),
            {None: path},
            storing,
            alias,
            variables,
            item.span,
        )

    def entry(
        self, item: nodes.Entry, tensors: dict[str, LogicalTensor], aliases: dict[str, str], files: dict[str, FileRule]
    ) -> Entry:
        alias = item.path if item.path in aliases and item.path not in tensors else None
        path = aliases[item.path] if alias else item.path
        shape_nodes = item.shape or ()
        if path in tensors and any(isinstance(a, nodes.Any_ | nodes.Rest) for a in _walk(shape_nodes)):
            made = self.wild(item, tensors[path], path, alias, files)
            return evolve(made, indices=tuple(self.axis(a, item.span) for a in item.indices))
        shape = tuple(self.axis(a, item.span) for a in shape_nodes)
        targets: dict[str | None, str] = {}
        for label in ax.labels_of(shape):
            if label is None:
                target = path
            else:
                beside = f"{path.rpartition('.')[0]}.{label}" if "." in path else label
                target = next((c for c in (beside, f"{path}.{label}", label) if c in tensors), beside)
            if target not in tensors:
                self.unknown_tensor(target, list(tensors), item.span)
            targets[label] = target
        storing = self.storing(tuple(c for c in item.clauses if c.word != "when"), files, item.span, "weights")
        indices = tuple(self.axis(a, item.span) for a in item.indices)
        variables = {"name": item.path} | ({"alias": alias, "owner": path} if alias else {})
        return Entry(item.path, indices, shape, targets, storing, alias, variables, item.span)

    def groups(
        self,
        items: list[Any],
        tensors: dict[str, LogicalTensor],
        entries: tuple[Entry, ...],
        model_groups: tuple[tuple[str, tuple[str, ...]], ...],
    ) -> dict[str, Group]:
        found: dict[str, Group] = {}
        paths = {e.path for e in entries}
        for item in items:
            if not isinstance(item, nodes.Group):
                continue
            is_reversed = item.order == "reversed"
            dealt = 1 if item.order is None or item.order == "reversed" else self.scope.integer(item.order)
            if dealt < 1:
                fail("E145", f"order dealt {dealt}", at(item.span))
            if item.of_model:
                for name, members in self.groups_of_model(model_groups, tensors):
                    found[name] = Group(name, (), members, None, None, is_reversed, dealt, True, item.span)
                continue
            for m in item.members or ():
                if m not in paths and m not in tensors:
                    self.unknown_tensor(m, sorted(paths), item.span)
            for w in item.without or ():
                if w not in found:
                    fail("E157", f"no group is called `{w}`", at(item.span))
            indices = tuple(self.axis(a, item.span) for a in item.indices)
            found[item.name] = Group(
                item.name, indices, item.members, item.without, item.stated, is_reversed, dealt, False, item.span
            )
        return found

    @staticmethod
    def groups_of_model(
        model_groups: tuple[tuple[str, tuple[str, ...]], ...], tensors: dict[str, LogicalTensor]
    ) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The model's parameter groups; one of all trained parameters where it names none."""
        return model_groups or (("parameters", tuple(p for p, t in tensors.items() if t.kind == "parameter")),)

    def state_lines(
        self,
        items: list[Any],
        files: dict[str, FileRule],
        groups: dict[str, Group],
        model_groups: tuple[tuple[str, tuple[str, ...]], ...],
    ) -> tuple[States, ...]:
        out: list[States] = []
        for item in items:
            if not isinstance(item, nodes.States) or item.shape is None:
                continue
            if not all(self.holds(c.args[0]) for c in item.clauses if c.word == "when"):
                continue
            named = item.groups
            if named == ("*",):
                named = (
                    tuple(g for g, group in groups.items() if group.of_model)
                    or tuple(n for n, _ in model_groups)
                    or None
                )
            for g in named or ():
                if g not in groups and g not in dict(model_groups):
                    close = nearest(g, list(groups))
                    fail(
                        "E157",
                        f"no group is called `{g}`",
                        at(item.span),
                        remedy=f"did you mean `{close}`?" if close else "",
                    )
                if g not in groups:
                    groups[g] = Group(g, (), dict(model_groups)[g], None, None, False, 1, True, item.span)
            if item.shape != "like" and len(item.shape) != 1:
                fail("E158", "a state line stores one axis, as in pad(flat(each), 2 * dp)@dp", at(item.span))
            default = "optim" if "optim" in files else "weights"
            buckets = next((self.scope.integer(c.args[0]) for c in item.clauses if c.word == "buckets"), None)
            clauses = tuple(c for c in item.clauses if c.word not in ("when", "buckets"))
            out.append(
                States(
                    item.names,
                    named,
                    "like" if item.shape == "like" else tuple(self.axis(a, item.span) for a in item.shape),
                    self.storing(clauses, files, item.span, default),
                    buckets,
                    item.span,
                )
            )
        return tuple(out)

    def framework(self, items: list[Any]) -> tuple[str, dict[str, Any]]:
        said = [i for i in items if isinstance(i, nodes.Framework)]
        if not said:
            return "", {}
        settings: dict[str, Any] = {}
        for argument in said[-1].call.arguments:
            if argument.name is None:
                fail("E159", "settings of a framework have names", at(argument.span))
            settings[argument.name] = self.scope.evaluate(argument.value)
        return said[-1].call.name, settings

    def blob(self, item: nodes.Blob, files: dict[str, FileRule]) -> BlobRule:
        clauses = tuple(c for c in item.clauses if c.word in ("in", "as"))
        storing = self.storing(clauses, files, item.span, "meta" if "meta" in files else "weights")
        return BlobRule(item.name, item.mesh_axes, item.fate, storing.file, storing.key)

    def check_assert(self, item: nodes.Assert) -> None:
        if self.lacks_config(item.condition) or self.scope.evaluate(item.condition):
            return
        said = item.message or f"`{_text(item.condition)}` does not hold"
        if item.message:
            from ucpl.layout.templates import render

            said = render(template(item.message, item.span), {}, self.scope)
        fail("E160", said, at(item.span, "asserted here"))


def _overlay(base: list[Any], body: list[Any]) -> list[Any]:
    """Replace statements with the same left side in place, keep the rest, put new ones last."""
    mine: dict[Any, list[Any]] = {}
    for item in body:
        mine.setdefault(_left_side(item), []).append(item)
    known = {_left_side(item) for item in base}
    out: list[Any] = []
    placed: set[Any] = set()
    for item in base:
        side = _left_side(item)
        if side not in mine:
            out.append(item)
        elif side not in placed:
            placed.add(side)
            out += mine[side]
    return out + [item for item in body if _left_side(item) not in known]


def _left_side(item: Any) -> Any:
    match item:
        case nodes.Entry():
            return "entry", item.path, item.of
        case nodes.Group() | nodes.Blob() | nodes.Index() | nodes.Mesh() | nodes.Files():
            return type(item).__name__, item.name
        case nodes.States():
            return "state", item.names, item.groups
        case nodes.Derive():
            return "derive", item.state
        case nodes.Framework():
            return ("framework",)
        case nodes.Let() | nodes.Dims():
            return type(item).__name__, tuple(b.name for b in item.bindings)
    return id(item)


def _digit_names(axis: nodes.Axis) -> list[str]:
    match axis:
        case nodes.Dim(name=name):
            return [name]
        case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner):
            return _digit_names(inner)
        case nodes.Stack(terms=(term,)):
            return [d for inner in term.axes for d in _digit_names(inner)]
        case _:
            return []


def _walk(axes: tuple[nodes.Axis, ...]) -> list[nodes.Axis]:
    out: list[nodes.Axis] = []
    for axis in axes:
        out.append(axis)
        match axis:
            case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner) | nodes.Flat(axis=inner):
                out += _walk((inner,))
            case nodes.Stack(terms=terms):
                for t in terms:
                    out += _walk(t.axes)
            case _:
                pass
    return out


def _product(numbers: Any) -> int:
    out = 1
    for n in numbers:
        out *= n
    return out


def _literal(value: Value) -> nodes.Expr:
    if isinstance(value, str):
        return nodes.Text(value)
    if isinstance(value, list):
        return nodes.List(tuple(map(_literal, value)))
    return nodes.Number(int(value or 0))


def _text(expr: nodes.Expr) -> str:
    from ucpl.syntax import print_expr

    return print_expr(expr)
