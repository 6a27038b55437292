"""A called model: its parameters as numbers, and its statements.

They are over those of the models that it extends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.language import nodes
from ucpl.layout.library import KnownStatement, Library
from ucpl.layout.name_remedies import in_short, nearest
from ucpl.layout.overlay import each_state, overlay, without_gone
from ucpl.layout.scope import Value, at, literal

__all__ = ["own_parameters", "placed", "statements_of"]

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

    One that is handed on under its own name needs no line.
    """
    assert derived.extends is not None
    given = {name: a.value for name, a in placed(base.parameters, derived.extends).items()}
    own = {p.name: p for p in derived.parameters}
    out: Items = []
    for p in base.parameters:
        value = given.get(p.name, p.default)
        if isinstance(value, nodes.Name) and value.path == p.name and p.name in own:
            continue
        if p.name in own:
            fail(
                "E125",
                f"`{p.name}` is a parameter of `{derived.name}` and of `{base.name}`, and is not handed on",
                at(own[p.name].span),
                at(p.span),
                remedy=f"write extends {base.name}({p.name} = {p.name}), or give one of the two another name",
            )
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
