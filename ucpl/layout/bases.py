"""A called model: its parameters and statements, over those of others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeVar

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.language import nodes
from ucpl.layout.library import KnownStatement, Library
from ucpl.layout.name_remedies import in_short, nearest
from ucpl.layout.scope import Value, at, literal

__all__ = ["own_parameters", "placed", "statements_of", "each_state", "fresh", "left_side", "overlay", "without_gone"]

Items = list[nodes.ModelItem]
Uses = Callable[[Iterable[nodes.ModelItem]], Items]
NO_FILE = nodes.File("", 1, ())


def statements_of(library: Library, known: KnownStatement, uses: Uses) -> Items:
    """All statements but the values of its own parameters.

    First are the numbers of the files, and the arguments of bases. uses: a function that expands `use`, of each body
    before one is laid over another.
    """
    chain = library.models(known)
    heads: Items = []
    items: Items = []
    for i in reversed(range(len(chain))):
        if i + 1 < len(chain):
            heads += _base_parameters(chain[i].node, chain[i + 1].node)
        heads += [s for s in chain[i].file.statements if isinstance(s, nodes.Let)]
        body = uses(chain[i].node.items)
        if len(chain) > 1:
            own = {n for s in chain[i].node.items if isinstance(s, nodes.State | nodes.Gone) for n in s.names}
            body = each_state(body)
            of_used = [s for s in body if isinstance(s, nodes.State) and s.names[0] not in own]  # united, not replaced
            items = [*overlay(items, [s for s in body if s not in of_used]), *of_used]
        else:
            items = without_gone((), body)
    return [*heads, *items]


# ---- parameters ------------------------------------------------------------------------------------------------------


def own_parameters(model: nodes.Model, call: nodes.Call, sizes: Mapping[str, Value]) -> Items:
    """Parameters of a model as `let`.

    Values are from the call, else the default, else -D.
    """
    given = {name: a.value for name, a in placed(model.parameters, call).items()}
    out: Items = []
    for p in model.parameters:
        value = given.get(p.name, p.default)
        if value is None and p.name in sizes:
            value = literal(sizes[p.name])
        if value is None:
            _needs(model, p, f"write {model.name}({p.name} = ...), or give it with -D {p.name}=...")
        out.append(_let(p, value))
    return out


def _base_parameters(derived: nodes.Model, base: nodes.Model) -> Items:
    """Parameters of a base as the derived model gives them.

    One that the derived model has, too, needs no line: it has the value there.
    """
    assert derived.extends is not None
    given = {name: a.value for name, a in placed(base.parameters, derived.extends).items()}
    own = {p.name: p for p in derived.parameters}
    out: Items = []
    for p in base.parameters:
        value = given.get(p.name)
        if p.name in own and (value is None or (isinstance(value, nodes.Name) and value.path == p.name)):
            continue
        if p.name in own:
            fail(
                "E125",
                f"`{p.name}` is a parameter of `{derived.name}` and of `{base.name}`, with another value",
                at(own[p.name].span),
                at(p.span),
                remedy=f"leave it out of `{base.name}(...)`, or give one of the two another name",
            )
        value = value or p.default
        if value is None:
            _needs(base, p, f"write extends {base.name}({p.name} = ...)")
        out.append(_let(p, value))
    return out


def _needs(model: nodes.Model, parameter: nodes.Parameter, remedy: str) -> NoReturn:
    place = at(parameter.span, "has no default")
    fail("E124", f"`{model.name}` needs a value for `{parameter.name}`", place, remedy=remedy)


def _let(parameter: nodes.Parameter, value: nodes.Expr) -> nodes.Let:
    return nodes.Let((nodes.Binding(parameter.name, value, span=parameter.span),), span=parameter.span)


def placed(
    parameters: tuple[nodes.Parameter, ...], call: nodes.Call, fixed: Sequence[str] = ()
) -> dict[str, nodes.Argument]:
    """Arguments of a call by the parameters' names.

    `fixed`: the values that the text gives with `let`. Raises E116, E117, E118.
    """
    found: dict[str, nodes.Argument] = {}
    names = [p.name for p in parameters]

    def place(argument: nodes.Argument) -> Label:
        return at(argument.span) if argument.span.line else Label("<call>", where=call.name)

    for position, argument in enumerate(call.arguments):
        if argument.name is None and position >= len(names):
            known = f"its parameters are {', '.join(names)}" if names else f"write {call.name}()"
            fail(
                "E116",
                f"`{call.name}` takes {len(names)} arguments, not {len(call.arguments)}",
                place(argument),
                remedy=known,
            )
        name = argument.name or names[position]
        if name not in names:
            close = nearest(name, names)
            remedy = f"did you mean `{close}`?" if close else f"its parameters: {in_short(names)}"
            if name in fixed:
                remedy = (
                    f"its text fixes it with `let {name} = ...`: leave it out, or call a layout that leaves it open"
                )
            fail("E117", f"`{call.name}` has no parameter `{name}`", place(argument), remedy=remedy)
        if name in found:
            fail("E118", f"`{name}` is given twice to `{call.name}`", at(argument.span))
        found[name] = argument
    return found


Item = TypeVar("Item", bound=nodes.Record)


# ---- one body of statements over another -----------------------------------------------------------------------------


def overlay(base: list[Item], body: list[Item]) -> list[Item]:
    """Replace statements with the same left side in place.

    Others stay, and new ones come last.
    """
    mine: dict[Hashable, list[Item]] = {}
    for item in body:
        mine.setdefault(left_side(item), []).append(item)
    known: dict[Hashable, list[Item]] = {}
    for item in base:
        known.setdefault(left_side(item), []).append(item)
    out: list[Item] = []
    placed: set[Hashable] = set()
    for item in base:
        side = left_side(item)
        if side not in mine:
            out.append(item)
        elif side not in placed:
            placed.add(side)
            out += _with_key(known[side], mine[side])
    return without_gone(base, out + [item for item in body if left_side(item) not in known])


def _with_key(base: list[Item], items: list[Item]) -> list[Item]:
    """Lines of an entry, with the keys of replaced lines.

    Lines with a key keep theirs. Several replaced lines are homes of one tensor: they have no one key to take.
    """
    keys = [c for one in base if isinstance(one, nodes.Entry) for c in one.clauses if c.word == "as"]
    if len(base) != 1 or len(keys) != 1:
        return items
    return [
        evolve(one, clauses=(*one.clauses, keys[0]))
        if isinstance(one, nodes.Entry) and one.shape is not None and all(c.word != "as" for c in one.clauses)
        else one
        for one in items
    ]


def fresh(base: Iterable[Item], body: Iterable[Item]) -> list[Item]:
    """Statements of a body whose left side the base does not have."""
    known = {left_side(item) for item in base}
    return [item for item in body if left_side(item) not in known]


def without_gone(base: Iterable[nodes.Record], items: Iterable[Item]) -> list[Item]:
    """Statements without those that `none` removes, and the removing ones.

    Raises E139 if the base has no such statement.
    """
    known = {left_side(item): item for item in base}
    out: list[Item] = []
    for item in items:
        if not isinstance(item, nodes.Gone):
            out.append(item)
        elif left_side(item) not in known:
            names = [side[1] for side in known if isinstance(side, tuple) and side[0] == _KIND[item.kind]]
            close = nearest(item.names[0], [n for n in names if isinstance(n, str)])
            fail(
                "E139",
                f"there is no {item.kind} `{item.names[0]}` that could be taken back",
                at(item.span),
                remedy=f"did you mean `{close}`?" if close else "take the line out: nothing that is extended says it",
            )
    return out


def each_state(items: Iterable[nodes.ModelItem]) -> list[nodes.ModelItem]:
    """Items of a model with one statement a state.

    So one of several on a line can be replaced.
    """
    out: list[nodes.ModelItem] = []
    for item in items:
        if isinstance(item, nodes.State) or (isinstance(item, nodes.Gone) and item.kind == "state"):
            out += [evolve(item, names=(name,)) for name in item.names]
        else:
            out.append(item)
    return out


_KIND = {"tensor": "tensor", "alias": "tensor", "state": "kept", "group": "Group"}


def left_side(item: nodes.Record) -> Hashable:
    """Identity of a statement.

    Of two with one left side, that of the extending layout holds.
    """
    match item:
        case nodes.Entry():
            return "entry", item.path, item.of, item.glob
        case nodes.Group() | nodes.Blob() | nodes.Index() | nodes.Mesh() | nodes.Files():
            return type(item).__name__, item.name
        case nodes.Domain():
            return "domain", item.kind
        case nodes.Tensor() | nodes.Alias():
            return "tensor", item.path
        case nodes.State(names=(name,)):
            return "kept", name
        case nodes.Gone():
            return _KIND[item.kind], item.names[0]
        case nodes.DefaultDtype():
            return ("dtype",)
        case nodes.States():
            return "state", item.names, item.groups
        case nodes.Derive():
            return "derive", item.state
        case nodes.Fill():
            return "fill", item.path, item.of, item.glob, item.indices
        case nodes.FillStates():
            return "fill state", item.names, item.groups
        case nodes.Framework():
            return ("framework",)
        case nodes.Let() | nodes.Dims():
            return type(item).__name__, tuple(b.name for b in item.bindings)
    return id(item)
