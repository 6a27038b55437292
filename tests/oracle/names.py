"""Names, numbers and statements of a text.

The results of `extends`, `use`, classes of tensors and conditions.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import attrs
from attrs import evolve, field, frozen, mutable

from ucpl.language import nodes, parse, parse_call, parse_expr

SPECS = Path(__file__).parents[2] / "specs"


class Refused(ValueError):
    """The text uses something that the language does not allow."""


# ---- numbers ---------------------------------------------------------------------------------------------------------

COMPARE = {
    "<": int.__lt__, ">": int.__gt__, "<=": int.__le__, ">=": int.__ge__, "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip


def combined(operator: str, a: int, b: int) -> int:
    if operator == "/" and a % b:
        raise Refused(f"{a} / {b} leaves a remainder")
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0, "%": a % b if b else 0}[operator]


@mutable
class Numbers:
    """Values of names: given values win over written ones."""

    given: dict[str, Any] = field(factory=dict)
    written: dict[str, nodes.Expr] = field(factory=dict)
    config: dict[str, Any] = field(factory=dict)

    def knows(self, name: str) -> bool:
        return name in self.given or name in self.written

    def name(self, path: str) -> Any:
        if path in self.given:
            return self.given[path]
        if path in self.written:
            return self.value(self.written[path])
        if path.startswith("config."):
            node: Any = self.config
            for step in path.split(".")[1:]:
                node = node.get(step) if isinstance(node, dict) else None
            return int(node) if isinstance(node, bool) else node
        if path.endswith(".size"):
            return self.name(path[: -len(".size")])
        raise Refused(f"no number is called {path}")

    def value(self, expr: Any) -> Any:
        match expr:
            case nodes.Number(value=value) | nodes.Text(value=value):
                return value
            case nodes.Name(path=path):
                return self.name(path)
            case nodes.List(items=items):
                return [self.value(i) for i in items]
            case nodes.Unary(operator="not", operand=operand):
                return int(not self.value(operand))
            case nodes.Unary(operand=operand):
                value = self.value(operand)
                return [-n for n in value] if isinstance(value, list) else -value
            case nodes.Binary(operator="and", left=left, right=right):
                return int(bool(self.value(left) and self.value(right)))
            case nodes.Binary(operator="or", left=left, right=right):
                return int(bool(self.value(left) or self.value(right)))
            case nodes.Binary(operator=operator, left=left, right=right):
                a, b = self.value(left), self.value(right)
                if operator in COMPARE:
                    return int(COMPARE[operator](a, b))
                if isinstance(a, list) and isinstance(b, list):
                    return [combined(operator, x, y) for x, y in zip(a, b, strict=True)]
                if isinstance(a, list):
                    return [combined(operator, x, b) for x in a]
                return [combined(operator, a, y) for y in b] if isinstance(b, list) else combined(operator, a, b)
            case nodes.Function(name="default", args=args):
                return next((v for v in map(self.value, args) if v is not None), None)
            case nodes.Function(name="where", args=(listed, *wanted)):
                ask = [self.value(w) for w in wanted]
                return [i for i, x in enumerate(self.value(listed)) if (x == ask[0] if ask else x)]
            case nodes.Function(name="item", args=(listed, place)):
                return self.value(listed)[self.value(place)]
            case nodes.Function(name="length", args=(listed,)):
                return len(self.value(listed))
            case nodes.Function(name="floor", args=(a, b)):
                return math.floor(Fraction(self.value(a), self.value(b)))
            case nodes.Function(name="ceil", args=(a, b)):
                return math.ceil(Fraction(self.value(a), self.value(b)))
            case nodes.Function(name="size", args=(a,)):
                return self.value(a)
            case nodes.Function(name=name, args=args):
                how: Any = {"min": min, "max": max, "lcm": math.lcm, "gcd": math.gcd}[name]
                return how(*map(self.value, args)) if name in ("lcm", "gcd") else how(map(self.value, args))
        raise TypeError(expr)

    def among(self, brackets: nodes.Among | None, size: int) -> list[int]:
        """The indices of a dim that its brackets leave, in order."""
        if brackets is None:
            return list(range(size))
        said: set[int] = set()
        for item in brackets.items:
            if isinstance(item, nodes.Range):
                a, b, by = (None if e is None else self.value(e) for e in (item.start, item.stop, item.step))
                said |= set(list(range(size))[a:b:by])
                continue
            value = self.value(item)
            for one in value if isinstance(value, list) else [value]:
                said.add(list(range(size))[one])
        return [i for i in range(size) if (i in said) != brackets.others]

    def holds(self, when: nodes.Expr | None) -> bool:
        return when is None or bool(self.value(when))

    def render(self, template: str, here: dict[str, Any]) -> str:
        """Braces filled in: a name of `here` is that value.

        Size(a) and a.size are sizes all the same.
        """
        inner = Numbers({**self.given, **here}, self.written, self.config)

        def one(m: re.Match[str]) -> str:
            text = re.sub(r"size\(\s*([\w.]+)\s*\)|([\w.]+)\.size", lambda s: str(self.name(s[1] or s[2])), m[1])
            text = text.strip()
            value = inner.given[text] if text in inner.given else inner.value(parse_expr(text))
            if isinstance(value, str) and "{" in value and text not in here:  # a text with names of its own
                return self.render(value, here)
            return format(value, m[2] or "")

        return re.sub(r"\{([^{}:]*)(?::([^{}]*))?\}", one, template)


# ---- files -----------------------------------------------------------------------------------------------------------


def known_names(text: str, name: str) -> dict[str, tuple[Any, nodes.File]]:
    """Every model and layout of a text and its imports.

    Over the shipped specs.
    """
    return shipped() | defined(parse(text, name), Path(name).parent)


@cache
def shipped() -> dict[str, tuple[Any, nodes.File]]:
    found: dict[str, tuple[Any, nodes.File]] = {}
    for path in sorted(SPECS.glob("*.ucpl")):
        found |= defined(parse(path.read_text(), path.name), path.parent)
    return found


def defined(file: nodes.File, beside: Path) -> dict[str, tuple[Any, nodes.File]]:
    found: dict[str, tuple[Any, nodes.File]] = {}
    for item in file.statements:
        if isinstance(item, nodes.Import):
            found |= defined(parse((beside / item.file).read_text(), item.file), beside)
    return found | {s.name: (s, file) for s in file.statements if isinstance(s, nodes.Model | nodes.Layout)}


def lets(file: nodes.File) -> list[Any]:
    return [s for s in file.statements if isinstance(s, nodes.Let)]


# ---- use: names under a prefix -----------------------------------------------------------------------------------------


def own_names(items: list[Any]) -> set[str]:
    """Every name that the statements define themselves."""
    out: set[str] = set()
    for item in items:
        match item:
            case nodes.Let() | nodes.Dims():
                out |= {b.name for b in item.bindings}
            case nodes.Tensor() | nodes.Alias() | nodes.Entry():
                out |= {item.path}
            case nodes.Files() | nodes.Index() | nodes.Group():
                out |= {item.name}
    axes = {a for i in items if isinstance(i, nodes.Mesh) for a in i.axes}
    return out - axes - {"*"}


def under(items: list[Any], prefix: str, key: str | None, model: set[str]) -> list[Any]:
    """The same statements with every own name under `prefix.`"""
    axes = {a for i in items if isinstance(i, nodes.Mesh) for a in i.axes}
    own = (own_names(items) | model) - axes

    def name(text: str) -> str:
        base = text.removesuffix(".local").removesuffix(".size")
        return f"{prefix}.{text}" if text in own or base in own else text

    def member(text: str) -> str:
        return f"{prefix}.{text}" if text != "*" else text

    def template(text: str) -> str:
        return re.sub(
            r"\{([^{}:]*)((?::[^{}]*)?)\}",
            lambda m: "{" + re.sub(r"[A-Za-z_][\w.]*", lambda n: name(n[0]), m[1]) + m[2] + "}",
            text,
        )

    def of_states(clauses: tuple[nodes.Clause, ...]) -> tuple[nodes.Clause, ...]:
        """In the inner layout's optim, else its weights.

        Keys are wrapped, and that of an entry is already.
        """
        files = [f for f in ("optim", "weights") if any(isinstance(i, nodes.Files) and i.name == f for i in items)]
        if files and not any(c.word == "in" for c in clauses):
            clauses = (*clauses, nodes.Clause("in", (f"{prefix}.{files[0]}",)))
        around = key or "{key}"
        return tuple(
            evolve(c, args=(around.replace("{key}", c.args[0]),)) if c.word == "as" and "{key}" not in c.args[0] else c
            for c in clauses
        )

    def walk(node: Any) -> Any:
        match node:
            case tuple():
                return tuple(map(walk, node))
            case nodes.Name():
                return evolve(node, path=name(node.path))
            case nodes.Text(value=text) if "{" in text:
                return evolve(node, value=template(text))
            case nodes.Dim():
                return evolve(node, name=name(node.name), range=walk(node.range))
            case nodes.Dimension(name=str() as text):
                return evolve(node, name=name(text), range=walk(node.range))
            case nodes.Binding():
                return evolve(node, name=name(node.name), value=walk(node.value), by=node.by and name(node.by))
            case nodes.Clause(word="as"):
                return evolve(node, args=(template(node.args[0]),))
            case nodes.Clause(word="in"):
                return evolve(node, args=(member(node.args[0]),))
            case nodes.Clause(word=("value" | "when" | "buckets")):
                return evolve(node, args=walk(node.args))
            case nodes.Clause(word="at"):
                return evolve(node, args=(node.args[0], walk(node.args[1])))
            case nodes.Clause():
                return node
            case nodes.Entry():
                clauses = walk(node.clauses)
                if not any(c.word == "in" for c in clauses):
                    clauses = (*clauses, nodes.Clause("in", (f"{prefix}.weights",)))
                clauses = tuple(
                    evolve(c, args=((key or "{key}").replace("{key}", c.args[0]),)) if c.word == "as" else c
                    for c in clauses
                )
                if node.path != "*" and not node.glob and all(c.word != "named" for c in clauses):
                    clauses = (*clauses, nodes.Clause("named", (node.path,)))  # in its key
                glob = (f"{prefix}.{node.glob[0]}", *node.glob[1:]) if node.glob else ()
                return evolve(
                    node,
                    glob=glob,
                    path=member(node.path),
                    indices=walk(node.indices),
                    shape=walk(node.shape),
                    clauses=clauses,
                )
            case nodes.Tensor():
                scaling = node.scaling and evolve(node.scaling, of=member(node.scaling.of), by=walk(node.scaling.by))
                return evolve(node, path=member(node.path), dims=walk(node.dims), when=walk(node.when), scaling=scaling)
            case nodes.Alias():
                return evolve(node, path=member(node.path), owner=member(node.owner), when=walk(node.when))
            case nodes.Files():
                return evolve(
                    node,
                    name=member(node.name),
                    template=template(node.template),
                    key=node.key and template(node.key),
                    when=walk(node.when),
                )
            case nodes.Domain():
                return evolve(node, template=template(node.template))
            case nodes.Index():
                return evolve(node, name=name(node.name), axis=walk(node.axis), when=walk(node.when))
            case nodes.Group():
                return evolve(
                    node,
                    name=member(node.name),
                    indices=walk(node.indices),
                    members=node.members and tuple(map(member, node.members)),
                    without=node.without and tuple(map(member, node.without)),
                    order=walk(node.order),
                )
            case nodes.States():
                return evolve(
                    node,
                    groups=node.groups and tuple(map(member, node.groups)),
                    shape=walk(node.shape),
                    clauses=of_states(walk(node.clauses)) if node.shape is not None else walk(node.clauses),
                )
            case nodes.State():
                typed = tuple(evolve(t, of=tuple(map(member, t.of))) for t in node.typed)
                prefixes = f"{prefix}.{node.within}".rstrip(".")
                return evolve(
                    node, groups=node.groups and tuple(map(member, node.groups)), typed=typed, within=prefixes
                )
            case nodes.Mesh() | nodes.DefaultDtype() | None | str() | int():
                return node
        kept = {"span", "name", "mesh_axis"}
        fields = {f.name: walk(getattr(node, f.name)) for f in attrs.fields(type(node)) if f.name not in kept}
        return evolve(node, **fields)

    return [walk(i) for i in items]


# ---- a layout with everything bound ------------------------------------------------------------------------------------


@frozen
class Tensor:
    dims: tuple[str, ...]
    ranges: tuple[tuple[int, ...], ...]  # the indices of each complete dim
    dtype: str | None
    kind: str
    scale_of: str | None = None  # the tensor that it has one element of each block of
    blocks: tuple[int, ...] = ()  # their lengths, along the dims that it does not share with that tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))


@mutable
class Meaning:
    """A layout over its model, every statement in force."""

    numbers: Numbers
    tensors: dict[str, Tensor] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)
    absent: set[str] = field(factory=set)  # their condition does not hold
    states: list[nodes.State] = field(factory=list)
    meshes: list[nodes.Mesh] = field(factory=list)
    indices: dict[str, nodes.Axis] = field(factory=dict)
    files: dict[str, nodes.Files] = field(factory=dict)
    entries: list[nodes.Entry] = field(factory=list)  # wildcards written out; `none` gone
    groups: dict[str, nodes.Group] = field(factory=dict)
    lines: list[nodes.States] = field(factory=list)
    blobs: list[nodes.Blob] = field(factory=list)
    state_types: dict[tuple[str, str], str] = field(factory=dict)  # (tensor, state) -> its type
    derived: set[str] = field(factory=set)
    origins: set[str] = field(factory=set)  # their origins
    fills: list[Any] = field(factory=list)
    model_groups: list[nodes.Group] = field(factory=list)
    by: dict[str, str] = field(factory=dict)  # dims whose size depends on an index, and that index

    def degree(self, axis: str) -> int:
        return int(self.numbers.name(axis))

    @property
    def ranks(self) -> int:
        return math.prod(self.degree(a) for a in self.meshes[0].axes) if self.meshes else 1


def mean(
    text: str,
    call: str,
    *,
    name: str = "text.ucpl",
    model: nodes.Model | None = None,
    config: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
) -> Meaning:
    """The layout that `call` names in a text or shipped spec.

    It is over its model or the one given.
    """
    known = known_names(text, name)
    numbers = Numbers(dict(sizes or {}), {}, config or {})
    node = parse_call(call)
    layout, _ = known[node.name]
    given = given_to(layout.parameters, node, numbers)
    items = statements(known, layout, given, numbers)
    if layout.of == "any":
        assert model is not None
        model_items = list(model.items)
    else:
        model_node, model_file = known[layout.of]
        bind(lets(model_file), numbers)
        model_items = model_statements(known, layout.of, by_name(model_node.parameters, layout.arguments), numbers)
    bind(model_items, numbers)
    bind(items, numbers)
    numbers.given.update(sizes or {})
    out = Meaning(numbers)
    out.meshes = [i for i in items if isinstance(i, nodes.Mesh)]
    out.meshes = [m for m in out.meshes if m is out.meshes[0] or not set(m.axes) < set(out.meshes[0].axes)]  # of a part
    if len({math.prod(out.degree(a) for a in m.axes) for m in out.meshes}) > 1:
        raise Refused("meshes of different size")
    rules = [i for i in [*model_items, *items] if isinstance(i, nodes.Index)]
    out.indices = {i.name: i.axis for i in rules if numbers.holds(i.when)}
    for dim, axis in out.indices.items():  # one unknown digit of a dim is inferred
        unknown = [d for d in digits_of(axis) if not numbers.knows(d)]
        if unknown:
            rest = math.prod(numbers.name(d) for d in digits_of(axis) if d not in unknown)
            numbers.given[unknown[0]] = numbers.name(dim) // rest
    out.by = {b.name: b.by for i in model_items if isinstance(i, nodes.Dims) for b in i.bindings if b.by is not None}
    for dim, index in out.by.items():
        if not isinstance(numbers.name(dim), list) or len(numbers.name(dim)) != numbers.name(index):
            raise Refused(f"{dim} has not one size for each value of {index}")
    default = next((i.name for i in reversed(model_items) if isinstance(i, nodes.DefaultDtype)), None)
    for item in model_items:
        if isinstance(item, nodes.Tensor) and numbers.holds(item.when):
            out.tensors[item.path] = tensor_of(item, numbers, default, out.by)
        if isinstance(item, nodes.Alias) and numbers.holds(item.when):
            out.aliases[item.path] = item.owner
        if isinstance(item, nodes.State):
            out.states.append(item)
    conditional = {i.path for i in model_items if isinstance(i, nodes.Tensor | nodes.Alias)}
    out.absent = conditional - out.tensors.keys() - out.aliases.keys()
    for n in {n for s in out.states for n in s.names}:
        said = [s for s in out.states if n in s.names]
        out.state_types |= {(path, n): type_of(path, said) for path in out.tensors}
    out.files = {i.name: i for i in items if isinstance(i, nodes.Files) and numbers.holds(i.when)}
    blobs = [i for i in items if isinstance(i, nodes.Blob)]
    out.blobs = [b for b in blobs if all(numbers.holds(c.args[0]) for c in b.clauses if c.word == "when")]
    items = [implied(out, i) for i in items]
    out.entries = entries_of(out, items)
    out.groups = groups_of(out, items, model_items)
    out.lines = [i for i in items if isinstance(i, nodes.States) and i.shape is not None and clauses_hold(out, i)]
    out.lines = [evolve(i, groups=model_group_names(out)) if i.groups == ("*",) else i for i in out.lines]
    out.fills = [i for i in items if isinstance(i, nodes.Fill | nodes.FillStates)]
    out.model_groups = [i for i in model_items if isinstance(i, nodes.Group)]
    out.origins = {i.source for i in items if isinstance(i, nodes.Derive) and numbers.holds(i.when)}
    out.derived = {i.state for i in items if isinstance(i, nodes.Derive) and numbers.holds(i.when)}
    return out


def given_to(parameters: tuple[nodes.Parameter, ...], call: nodes.Call, numbers: Numbers) -> dict[str, Any]:
    names = [p.name for p in parameters]
    return {a.name or names[i]: numbers.value(a.value) for i, a in enumerate(call.arguments)}


def by_name(parameters: tuple[nodes.Parameter, ...], arguments: tuple[nodes.Argument, ...]) -> dict[str, nodes.Expr]:
    names = [p.name for p in parameters]
    if any(a.name is not None and a.name not in names for a in arguments):
        raise Refused("an argument of no parameter")
    return {a.name or names[i]: a.value for i, a in enumerate(arguments)}


def model_statements(known: dict[str, Any], name: str, given: dict[str, nodes.Expr], numbers: Numbers) -> list[Any]:
    """A model's own statements, in the places of the base's.

    `none` removes them.
    """
    model, file = known[name]
    lines: list[Any] = []
    for p in model.parameters:
        value = given.get(p.name, p.default)
        if value is not None and value != nodes.Name(p.name):  # its own name: handed on
            lines.append(nodes.Let((nodes.Binding(p.name, value),)))
    body = one_a_state(used(known, list(model.items), numbers))
    base: list[Any] = []
    if model.extends is not None:
        parameters = known[model.extends.name][0].parameters
        own = {p.name for p in model.parameters}
        handed = {p.name: nodes.Name(p.name) for p in parameters if p.name in own}  # but for those that the call gives
        exprs: dict[str, nodes.Expr] = {**handed, **by_name(parameters, model.extends.arguments)}
        base = model_statements(known, model.extends.name, exprs, numbers)
    mine = {model_left(i): [j for j in body if model_left(j) == model_left(i)] for i in body}
    out: list[Any] = []
    for item in base:
        out += mine.get(model_left(item), [item])
        mine |= {model_left(item): []} if model_left(item) in mine else {}
    rest = [i for i in body if mine[model_left(i)]]
    return [*lets(file), *lines, *(i for i in [*out, *rest] if not isinstance(i, nodes.Gone))]


def one_a_state(items: list[Any]) -> list[Any]:
    states = nodes.State | nodes.Gone
    return [evolve(i, names=(n,)) if isinstance(i, states) else i for i in items for n in getattr(i, "names", ("",))]


def model_left(item: Any) -> Any:
    match item:
        case nodes.Tensor() | nodes.Alias():
            return "tensor", item.path
        case nodes.Gone(kind=kind, names=(name,)):
            return "tensor" if kind == "alias" else kind, name
        case nodes.State(names=(name,)):
            return "state", name
        case nodes.Group(name=name):
            return "group", name
        case nodes.DefaultDtype():
            return "dtype"
    return left(item)


def bind(items: list[Any], numbers: Numbers) -> None:
    for item in items:
        if isinstance(item, nodes.Let | nodes.Dims):
            numbers.written.update({b.name: b.value for b in item.bindings})


def used(known: dict[str, Any], items: list[Any], numbers: Numbers) -> list[Any]:
    """`use` written out."""
    out: list[Any] = []
    for item in items:
        if not isinstance(item, nodes.Use):
            out.append(item)
            continue
        inner, _ = known[item.call.name]
        if isinstance(inner, nodes.Model):  # arguments are numbers of the outer model: they get no prefix
            said = by_name(inner.parameters, item.call.arguments)
            free = [p for p in inner.parameters if p.name not in said]
            items_of = model_statements(
                known, inner.name, {p.name: nodes.Name(p.name) for p in inner.parameters}, numbers
            )
            body = [nodes.Let((nodes.Binding(p.name, p.default),)) for p in free if p.default] + items_of
            out += [nodes.Let((nodes.Binding(f"{item.name}.{n}", e),)) for n, e in said.items()]
            own = [i.name for i in body if isinstance(i, nodes.DefaultDtype)]
            for dtype in own:  # of its tensors alone
                body = [evolve(i, dtype=i.dtype or dtype) if isinstance(i, nodes.Tensor) else i for i in body]
            body = [i for i in body if not isinstance(i, nodes.DefaultDtype)]
            out += under(body, item.name, item.key, set(said))
            continue
        body = within(known, item, numbers)
        of = known[inner.of][0].items if inner.of != "any" else ()
        inside = under(body, item.name, item.key, own_names(used(known, list(of), numbers)))
        out += [
            evolve(i, clauses=(*i.clauses, *item.at)) if isinstance(i, nodes.Entry | nodes.States) else i
            for i in inside
        ]
    return out


def within(known: dict[str, Any], item: nodes.Use, numbers: Numbers) -> list[Any]:
    """A layout that is used, with numbers of its own.

    Ranks are shared, so that an axis keeps its degree here.
    """
    layout, _ = known[item.call.name]
    chain = bases(known, layout)
    shared = {a for one in chain for i in one.items if isinstance(i, nodes.Mesh) for a in i.axes if numbers.knows(a)}
    own = Numbers({}, {}, numbers.config)
    here = {p.name: numbers.name(p.name) for p in layout.parameters if p.name in shared}
    body = statements(known, layout, here | given_to(layout.parameters, item.call, numbers), own)
    parameters = {p.name for one in chain for p in one.parameters}
    if any(own.given[a] != numbers.name(a) for a in shared & parameters):
        raise Refused("another number of ranks")
    out = [line for one in reversed(chain) for line in lets(known[one.name][1])] + body
    gone = parameters | shared
    out = [
        evolve(i, bindings=tuple(b for b in i.bindings if b.name not in gone)) if isinstance(i, nodes.Let) else i
        for i in out
    ]
    return out + [nodes.Let((nodes.Binding(p, nodes.Number(own.given[p])),)) for p in sorted(parameters - shared)]


def statements(
    known: dict[str, Any],
    layout: nodes.Layout,
    given: dict[str, Any],
    numbers: Numbers,
    over: list[Any] | None = None,
    handed: frozenset[str] = frozenset(),
) -> list[Any]:
    """Those of the base in order; same left sides are replaced.

    New ones are last.

    `over`: statements of layouts that extend this one; their numbers hold, and those of their parameters, `handed`.
    """
    over = over or []
    _, file = known[layout.name]
    bind(lets(file), numbers)
    for p in layout.parameters:
        if p.name in given:
            numbers.given[p.name] = given[p.name]
        elif p.default is not None and p.name not in handed:
            numbers.given[p.name] = numbers.value(p.default)
    for one in reversed(bases(known, layout)):
        bind(list(one.items), numbers)
    bind(over, numbers)
    body = used(known, list(layout.items), numbers)
    bind([*body, *over], numbers)
    if layout.extends is None:
        return body
    base, _ = known[layout.extends.name]
    arguments = given_to(base.parameters, layout.extends, numbers)
    handed |= {p.name for p in layout.parameters}
    inner = statements(known, base, arguments, numbers, [*body, *over], handed)
    out: list[Any] = []
    done: set[Any] = set()
    for item in inner:
        side = left(item)
        mine = [i for i in body if left(i) == side]
        if not mine:
            out.append(item)
        elif side not in done:
            done.add(side)
            keys = [i for i in inner if left(i) == side]
            said = [c for i in keys for c in getattr(i, "clauses", ()) if c.word == "as"]
            for one in mine:  # without a key: that of the one line that it replaces
                lacks = isinstance(one, nodes.Entry) and one.shape is not None and len(keys) == len(said) == 1
                lacks = lacks and all(c.word != "as" for c in one.clauses)
                out.append(evolve(one, clauses=(*one.clauses, said[0])) if lacks else one)
    fresh = {left(i) for i in inner}
    bind([*body, *over], numbers)
    return out + [i for i in body if left(i) not in fresh]


def bases(known: dict[str, Any], layout: nodes.Layout) -> list[nodes.Layout]:
    """A layout and those that it extends."""
    return [layout, *(bases(known, known[layout.extends.name][0]) if layout.extends is not None else [])]


def left(item: Any) -> Any:
    match item:
        case nodes.Entry():
            return "entry", item.path, item.of, item.glob
        case nodes.States():
            return "state", item.names, item.groups
        case nodes.Group() | nodes.Files() | nodes.Index() | nodes.Mesh() | nodes.Blob():
            return type(item), item.name
        case nodes.Domain():
            return "domain", item.kind
        case nodes.Derive():
            return "derive", item.state
        case nodes.Fill():
            return "fill", item.path, item.of, item.glob, item.indices
        case nodes.FillStates():
            return "fill state", item.names, item.groups
        case nodes.Framework():
            return "framework"
        case nodes.Let() | nodes.Dims():
            return type(item), tuple(b.name for b in item.bindings)
    return id(item)


def digits_of(axis: nodes.Axis) -> list[str]:
    match axis:
        case nodes.Dim(name=name):
            return [name]
        case nodes.Cut(axis=inner) | nodes.Pad(axis=inner):
            return digits_of(inner)
        case nodes.Stack(terms=(term,)):
            return [d for a in term.axes for d in digits_of(a)]
    return []


def type_of(path: str, lines: list[nodes.State]) -> str:
    """Full names win over globs, long globs over short ones, then lines.

    A line of a used model is of that model's tensors; where it says another type than the line around it, `"eye.*"` says it.
    """
    own = sorted((s for s in lines if path.startswith(f"{s.within}.") or not s.within), key=lambda s: len(s.within))
    outermost = own[0] if own and not own[0].within else min(lines, key=lambda s: s.within.count(".") + bool(s.within))
    said = [(pattern, t.dtype) for s in lines for t in s.typed for pattern in t.of]
    around = outermost.dtype
    for line in own:
        if line.dtype != around:
            said.append((f"{line.within}.*", line.dtype))
        around = line.dtype
    said = [(p, dtype) for p, dtype in said if re.fullmatch(".*".join(map(re.escape, p.split("*"))), path, re.DOTALL)]
    rank = [("*" not in p, len(p.replace("*", ""))) for p, _ in said]
    best = {dtype for (_, dtype), mine in zip(said, rank, strict=True) if mine == max(rank)}
    if len(best) > 1:
        raise Refused(f"{path} has two types of {outermost.names}")
    return best.pop() if best else outermost.dtype


def tensor_of(item: nodes.Tensor, numbers: Numbers, default: str | None, by: dict[str, str]) -> Tensor:
    names, ranges = [], []
    for n, dim in enumerate(item.dims):
        name = dim.name if dim.name is not None else f"{item.path}#{n}"
        if dim.name is None:
            numbers.given[name] = dim.size
        names.append(name)
        size = max(numbers.name(name), default=0) if name in by else numbers.name(name)
        ranges.append(tuple(numbers.among(dim.range, size)))
    scaling = item.scaling
    of, blocks = (scaling.of, tuple(numbers.value(e) for e in scaling.by)) if scaling else (None, ())
    return Tensor(tuple(names), tuple(ranges), item.dtype or default, item.kind, of, blocks)


def scale_of(meaning: Meaning, path: str, index: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The scale of an element: dims of one name are the same.

    The others are blocks of dims that the scale lacks, in order.
    """
    (name,) = (p for p, t in meaning.tensors.items() if t.scale_of == path)
    scale, dims = meaning.tensors[name], meaning.tensors[path].dims
    lacks = iter([d for d in dims if d not in scale.dims])
    blocks = iter(scale.blocks)
    found = [index[dims.index(d)] if d in dims else index[dims.index(next(lacks))] // next(blocks) for d in scale.dims]
    return name, tuple(found)


def clauses_hold(meaning: Meaning, item: Any) -> bool:
    return all(meaning.numbers.holds(c.args[0]) for c in item.clauses if c.word == "when")


SPEAKS_OF = {
    "parameter": ("trainable", "parameter", None),
    "frozen": ("frozen", "parameter", None),
    "buffer": ("buffer", None),
}


def entries_of(meaning: Meaning, items: list[Any]) -> list[nodes.Entry]:
    """Entries in force.

    Wildcards and globs match each tensor that no line names, at the place of the first of them.
    """
    written = [i for i in items if isinstance(i, nodes.Entry)]
    named = {i.path for i in written if i.path != "*" and not i.glob}
    inforce = [i for i in written if clauses_hold(meaning, i) and not is_of_absent(meaning, i)]
    wild = [i for i in inforce if i.path == "*" or i.glob]
    out: list[nodes.Entry] = []
    first = next((i for i in written if i.path == "*" or i.glob), None)
    for item in written:
        if item is first:
            for path, tensor in meaning.tensors.items():
                if path not in named:
                    out += spoken_of(path, SPEAKS_OF[tensor.kind], wild)
            for alias in meaning.aliases:
                if alias not in named:
                    out += spoken_of(alias, ("alias",), wild)
        elif item not in wild and item.path not in ("*",) and not item.glob and item.shape is not None:
            out += [item] if item in inforce else []
    return [with_dims(meaning, e) for e in out]


def implied(meaning: Meaning, item: Any) -> Any:
    """An entry with the indices that only key and file name."""
    said = {c.word: c.args for c in getattr(item, "clauses", ())}
    if not isinstance(item, nodes.Entry) or item.glob or item.path == "*" or item.shape is None or "as" not in said:
        return item
    file = meaning.files.get(said.get("in", ("weights",))[0])
    texts = [said["as"][0], *((file.template, file.key or "") if file is not None else ())]
    holes = " ".join(re.sub(r"size\([^()]*\)", "", hole) for text in texts for hole in re.findall(r"\{([^{}:]*)", text))
    words = set(re.findall(r"[A-Za-z_][\w.]*", holes)) - {a for m in meaning.meshes for a in m.axes}
    labels, named, axes = [], set(), [*item.indices, *item.shape]
    while axes:
        axis = axes.pop(0)
        named |= {axis.name} if isinstance(axis, nodes.Dim) else set()
        labels += [t.label for t in getattr(axis, "terms", ()) if t.label is not None]
        axes += [a for t in getattr(axis, "terms", ()) for a in t.axes]
        axes += [axis.axis] if hasattr(axis, "axis") else []
    out: list[str] = []
    for tensor in (tensor_named(meaning, item.path, label) for label in labels or [None]):
        for dim in meaning.tensors[tensor].dims if tensor in meaning.tensors else ():
            digits = digits_of(meaning.indices[dim]) if dim in meaning.indices else [dim]
            if {dim, f"{dim}.local", *digits} & words and not named & {dim, *digits} and dim not in out:
                out.append(dim)
    return evolve(item, indices=(*item.indices, *map(nodes.Dim, out)))


def tensor_named(meaning: Meaning, path: str, label: str | None) -> str:
    """Tensor of a label: near the entry's, below, or farther out."""
    path = meaning.aliases.get(path, path)
    if label is None:
        return path
    steps = path.split(".")[:-1]
    around = [".".join([*steps[:n], label]) for n in range(len(steps), -1, -1)]
    return next((t for t in (around[0], f"{path}.{label}", *around[1:]) if t in meaning.tensors), around[0])


def is_of_absent(meaning: Meaning, item: nodes.Entry) -> bool:
    """Test if every tensor of the line is absent.

    An absent tensor is in the model's text, under a condition that does not hold.
    """
    found, axes = [], list(item.shape or ())
    while axes:
        axis = axes.pop()
        if isinstance(axis, nodes.Stack):
            found += [t.label for t in axis.terms if t.label]
            axes += [a for t in axis.terms for a in t.axes]
        elif hasattr(axis, "axis"):
            axes.append(axis.axis)
    steps = item.path.split(".")[:-1]
    around = [".".join(steps[:n]) + "." * bool(n) for n in range(len(steps), -1, -1)]
    all_names = meaning.absent | {*meaning.tensors, *meaning.aliases}
    named = [
        next((p for p in (around[0] + x, f"{item.path}.{x}", *(a + x for a in around[1:])) if p in all_names), x)
        for x in found
    ] or [item.path]
    return all(name in meaning.absent for name in named)


def spoken_of(name: str, classes: tuple[str | None, ...], wild: list[nodes.Entry]) -> list[nodes.Entry]:
    """The wildcard line of one name.

    The glob with most characters that are no star, of equals that of the narrowest
    class; without one, the narrowest class."""

    def strength(w: nodes.Entry) -> tuple[int, int]:
        return sum(len(text) for text in w.glob), -classes.index(w.of)

    mine = [
        w for w in wild if w.glob and w.of in classes and re.fullmatch(".*".join(map(re.escape, w.glob)), name, re.S)
    ]
    if mine:
        best = max(map(strength, mine))
        said = [w for w in mine if strength(w) == best]
        if len({w.glob for w in said}) > 1:
            raise Refused(f"two globs match {name}")
    else:
        of = next((c for c in classes if any(w.of == c and not w.glob for w in wild)), "nobody")
        said = [w for w in wild if w.of == of and not w.glob]
    return [evolve(w, path=name, glob=()) for w in said if w.shape is not None]


def of_its_size(node: Any, dim: str) -> Any:
    """Among the indices of `_`, `size(_)` is that dim's size."""
    if isinstance(node, tuple):
        return tuple(of_its_size(one, dim) for one in node)
    if not attrs.has(type(node)):
        return node
    if isinstance(node, nodes.Function) and node.name == "size" and getattr(node.args[0], "path", "") == "_":
        return nodes.Name(dim)
    return evolve(node, **{a.name: of_its_size(getattr(node, a.name), dim) for a in attrs.fields(type(node))})


def with_dims(meaning: Meaning, entry: nodes.Entry) -> nodes.Entry:
    """`_` and `...` written out."""
    path = meaning.aliases.get(entry.path, entry.path)
    if path not in meaning.tensors:
        return entry

    def named(axes: tuple[nodes.Axis, ...]) -> set[str]:
        """Dims by name, but for those in terms of a sum."""
        out = {a.name for a in axes if isinstance(a, nodes.Dim)}
        for axis in axes:
            if isinstance(axis, nodes.Stack) and len(axis.terms) == 1:
                out |= named(axis.terms[0].axes)
            elif isinstance(axis, nodes.Cut | nodes.Pad | nodes.Trim):
                out |= named((axis.axis,))
        return {d for name in out for d in (name, *(i for i, r in meaning.indices.items() if name in digits_of(r)))}

    taken = named((*entry.indices, *(entry.shape or ())))
    left = [d for d in meaning.tensors[path].dims if d not in taken]

    def fill(axes: tuple[nodes.Axis, ...]) -> tuple[nodes.Axis, ...]:
        out: list[nodes.Axis] = []
        for axis in axes:
            match axis:
                case nodes.Any_():
                    out.append(nodes.Dim(left[0], of_its_size(axis.range, left.pop(0))))
                case nodes.Rest():
                    out += [nodes.Dim(n) for n in left]
                    left.clear()
                case nodes.Dim(name=name):
                    if name in left:
                        left.remove(name)
                    out.append(axis)
                case nodes.Cut() | nodes.Pad() | nodes.Trim():
                    inner = fill((axis.axis,))
                    whole = inner[0] if len(inner) == 1 else nodes.Stack((nodes.Term(None, inner),))
                    out.append(evolve(axis, axis=whole))
                case nodes.Stack(terms=terms):
                    before, new = list(left), []
                    for t in terms:  # terms of a sum are ways through the same dims
                        left[:] = [d for d in before if d not in named(t.axes)]
                        new.append(evolve(t, axes=fill(t.axes)))
                    out.append(nodes.Stack(tuple(new)))
                case _:
                    out.append(axis)
        return tuple(out)

    assert entry.shape is not None
    return evolve(entry, shape=fill(entry.shape))


def model_group_names(meaning: Meaning) -> tuple[str, ...]:
    return tuple(n for n, g in meaning.groups.items() if g.of_model)


def groups_of(meaning: Meaning, items: list[Any], model_items: list[Any]) -> dict[str, nodes.Group]:
    trained = tuple(p for p, t in meaning.tensors.items() if t.kind == "parameter")
    of_model: list[tuple[str, tuple[str, ...]]] = []
    for item in model_items:
        if isinstance(item, nodes.Group):
            gone = {m for n, members in of_model if n in (item.without or ()) for m in members}
            own = tuple(m for m in item.members or () if m not in meaning.absent)
            of_model.append((item.name, own if item.members else tuple(p for p in trained if p not in gone)))
    found: dict[str, nodes.Group] = {}
    for item in items:
        if isinstance(item, nodes.Group) and item.of_model:
            for name, members in of_model or [("parameters", trained)]:
                found[name] = evolve(item, name=name, members=members)
        elif isinstance(item, nodes.Group):
            lines = [i for i in items if isinstance(i, nodes.Entry)]
            none = {i.path for i in lines if is_of_absent(meaning, i)} - {e.path for e in meaning.entries}
            kept = item.members and tuple(m for m in item.members if m not in meaning.absent | none)
            found[item.name] = evolve(item, members=kept)
    for name, members in of_model:
        found.setdefault(name, nodes.Group(name, members=members, of_model=True))
    return found
