"""Nested models and layouts (`use vision(tp = tp) as eye`): names, numbers, ranks.

`use vision() as eye key "vision_tower.{key}"` gives dims and tensors the names `eye.h`, `eye.patch`; mesh axes keep
theirs, since ranks are shared. Files of the inner layout get a prefix, too, and the key template wraps their keys; if
it has no file of a name, the outer one's is meant. Numbers of a layout inside another are its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import evolve

from ucpl.errors import fail
from ucpl.language import nodes
from ucpl.language.walk import inside, rewritten
from ucpl.layout.library import Link
from ucpl.layout.scope import Scope, Value, at, literal
from ucpl.layout.templates import PLACE_WORDS
from ucpl.records import frozen

__all__ = ["axes_here", "axes_in", "check_axes", "check_groups", "given_within", "numbers_within", "on_these_ranks"]


# ---- names under a prefix --------------------------------------------------------------------------------------------

_BRACES = re.compile(r"\{([^{}:]*)((?::[^{}]*)?)\}")
_WORDS = re.compile(r"[A-Za-z_][\w.]*(?!\s*\(|[\w.])")  # not the name of a function
# Variables that a stored tensor's place gives to a template, and words of expressions.
_GIVEN = PLACE_WORDS | {"and", "or", "not"}
_OF_A_VALUE = {"x", "scale"}


def prefixed(items: Iterable[nodes.Record], prefix: str, key: str | None) -> list[nodes.Record]:
    """Statements with every name of their own under `prefix.`.

    A default dtype is that of these tensors alone.
    """
    items = _with_dtypes(items)
    shared = frozenset(a for i in items if isinstance(i, nodes.Mesh) for a in i.axes) | {"config"}
    files = frozenset(i.name for i in items if isinstance(i, nodes.Files))
    renaming = _Renaming(prefix, shared, key, files)
    return [rewritten(i, renaming.change) for i in items]


def _with_dtypes(items: Iterable[nodes.Record]) -> list[nodes.Record]:
    """A model's default dtype, on each of its tensors.

    An outer model, and another used one, may have another default.
    """
    items = list(items)
    default = next((i.name for i in items if isinstance(i, nodes.DefaultDtype)), None)
    rest = [i for i in items if not isinstance(i, nodes.DefaultDtype)]
    return [evolve(i, dtype=i.dtype or default) if isinstance(i, nodes.Tensor) else i for i in rest]


@frozen
class _Renaming:
    prefix: str
    shared: frozenset[str]  # names that the inner layout has in common with the outer
    key: str | None  # the template around keys
    files: frozenset[str]  # that the inner layout has

    def change(self, node: nodes.Record) -> nodes.Record | None:
        """The record under its new names, with its contents.

        None for one that names nothing itself.
        """
        match node:
            case nodes.Name(path=path):
                return evolve(node, path=self.name(path))
            case nodes.Clause():
                return self.clause(node)
            case nodes.Entry():
                return self.entry(inside(node, self.change))
            case nodes.Blob():
                return self.blob(inside(node, self.change))
        made = inside(node, self.change)
        match made:
            case nodes.Binding(by=str(index)):
                made = evolve(made, name=self.name(made.name), by=self.name(index))
            case nodes.Dim() | nodes.Binding() | nodes.Index() | nodes.Files() as named:
                made = evolve(named, name=self.name(named.name))
            case nodes.Group():
                made = evolve(
                    made, name=self.name(made.name), members=self.names(made.members), without=self.names(made.without)
                )
            case nodes.Fill():
                glob = (f"{self.prefix}.{made.glob[0]}", *made.glob[1:]) if made.glob else ()
                made = evolve(made, path=f"{self.prefix}.{made.path}" if glob else self.name(made.path), glob=glob)
            case nodes.TypedOf(of=of):
                made = evolve(made, of=tuple(f"{self.prefix}.{n}" if "*" in n else self.name(n) for n in of))
            case nodes.Without(dims=dims, of=of):
                tensors = of and tuple(f"{self.prefix}.{n}" if "*" in n else self.name(n) for n in of)
                made = evolve(made, dims=tuple(map(self.name, dims)), of=tensors)
            case nodes.State(within=within):
                inner = f"{self.prefix}.{within}" if within else self.prefix
                made = evolve(made, groups=self.names(made.groups), within=inner)
            case nodes.FillStates():
                made = evolve(made, groups=self.names(made.groups))
            case nodes.States():
                made = evolve(made, groups=self.names(made.groups), clauses=self.of_states(made))
            case nodes.Alias():
                made = evolve(made, path=self.name(made.path), owner=self.name(made.owner))
            case nodes.Tensor():
                made = evolve(made, path=self.name(made.path))
            case nodes.Assert(message=str(text)):
                made = evolve(made, message=self.template(text))
            case nodes.Scaling():
                made = evolve(made, of=self.name(made.of))
            case nodes.Dimension():
                made = evolve(made, name=made.name and self.name(made.name))
        if isinstance(made, nodes.Domain):
            made = evolve(made, template=self.template(made.template))
        if isinstance(made, nodes.Files):
            made = evolve(made, template=self.template(made.template), key=made.key and self.template(made.key))
        return made

    def name(self, text: str) -> str:
        return text if text.partition(".")[0] in self.shared or text == "*" else f"{self.prefix}.{text}"

    def file(self, name: str) -> str:
        return self.name(name) if name in self.files else name

    def names(self, texts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return texts and tuple(map(self.name, texts))

    def template(self, text: str) -> str:
        """The names in braces.

        Dims of the inner model are under the prefix, variables of the place are not.
        """

        def word(match: re.Match[str]) -> str:
            return match[0] if match[0] in _GIVEN else self.name(match[0])

        return _BRACES.sub(lambda m: "{" + _WORDS.sub(word, m[1]) + m[2] + "}", text)

    def clause(self, node: nodes.Clause) -> nodes.Clause:
        match node.word:
            case "as":
                return evolve(node, args=(self.template(node.args[0]),))
            case "in":
                return evolve(node, args=(self.file(node.args[0]),))
            case "value":  # x and scale are the stored numbers: a dim may have such a name all the same
                return inside(node, evolve(self, shared=self.shared | _OF_A_VALUE).change)
            case _:
                return inside(node, self.change)

    def entry(self, node: nodes.Entry) -> nodes.Entry:
        clauses = node.clauses
        if node.shape is not None and not any(c.word == "in" for c in clauses):
            clauses = (*clauses, nodes.Clause("in", (self.file("weights"),), span=node.span))
        glob = (f"{self.prefix}.{node.glob[0]}", *node.glob[1:]) if node.glob else ()
        path = f"{self.prefix}.{node.path}" if glob else self.name(node.path)
        if not glob and path != "*":  # the key has the name in the inner layout: `key` gives the prefix
            clauses = tuple(
                evolve(c, args=(c.args[0].replace("{name}", node.path),)) if c.word == "as" else c for c in clauses
            )
        return evolve(node, path=path, clauses=tuple(map(self.wrapped, clauses)), glob=glob)

    def blob(self, node: nodes.Blob) -> nodes.Blob:
        clauses = node.clauses
        own = next((name for name in ("meta", "weights") if name in self.files), None)
        if own is not None and not any(c.word == "in" for c in clauses):
            clauses = (*clauses, nodes.Clause("in", (self.file(own),), span=node.span))
        if self.key is not None and not any(c.word == "as" for c in clauses):
            clauses = (*clauses, nodes.Clause("as", (node.name,), span=node.span))
        return evolve(node, name=self.name(node.name), clauses=tuple(map(self.wrapped, clauses)))

    def of_states(self, node: nodes.States) -> tuple[nodes.Clause, ...]:
        """In the inner layout's own file, and under its keys.

        `{key}` of an entry is so already.
        """
        clauses = node.clauses
        own = next((name for name in ("optim", "weights") if name in self.files), None)
        if node.shape is not None and own and not any(c.word == "in" for c in clauses):
            clauses = (*clauses, nodes.Clause("in", (self.file(own),), span=node.span))
        return tuple(c if c.word == "as" and "{key}" in c.args[0] else self.wrapped(c) for c in clauses)

    def wrapped(self, clause: nodes.Clause) -> nodes.Clause:
        """The outer key template around an inner `as`."""
        if self.key is None or clause.word != "as":
            return clause
        return evolve(clause, args=(self.key.replace("{key}", clause.args[0]),))


# ---- numbers and ranks of a layout inside another --------------------------------------------------------------------

Origins = dict[str, tuple[Value, str]]


def axes_in(links: Sequence[Link[nodes.Layout]]) -> frozenset[str]:
    """Axes of all meshes of a layout and of its bases."""
    return frozenset(a for link in links for i in link.node.items if isinstance(i, nodes.Mesh) for a in i.axes)


def given_within(
    links: Sequence[Link[nodes.Layout]], use: nodes.Use, here: Scope, axes: Iterable[str]
) -> dict[str, Value]:
    """Given numbers (`-D eye.h=4`) of the used layout, by their inner names.

    `axes` that are here are included.
    """
    head = f"{use.name}."
    parameters = {p.name for link in links for p in link.node.parameters}  # the call gives their values
    found = {name: here.given[name] for name in axes if name in here.given}
    found |= {name.removeprefix(head): value for name, value in here.given.items() if name.startswith(head)}
    return {name: value for name, value in found.items() if name not in parameters}


def axes_here(layout: nodes.Layout, axes: frozenset[str], here: Scope) -> Origins:
    """Parameters that are also axes of the outer layout.

    If the call leaves one open, it is as it is here, not the default.
    """
    known = [p for p in layout.parameters if p.name in axes and here.knows(p.name)]
    return {p.name: (here.size(p.name, p.span), "the mesh") for p in known}


def check_axes(links: Sequence[Link[nodes.Layout]], call: nodes.Call, inside: Scope, here: Scope) -> None:
    """Check that shared axes have one number of ranks.

    Raises: UcplError E125 if a parameter of the layout, or of a base, is another number.
    """
    axes = axes_in(links)
    for p in (p for link in links for p in link.node.parameters):
        if p.name in axes and here.knows(p.name) and here.size(p.name, call.span) != inside.given[p.name]:
            fail(
                "E125",
                f"`{p.name}` is {here.size(p.name)} here and {inside.given[p.name]} in `{call.name}`, which is used here",
                at(call.span),
                at(p.span),
                remedy=f"ranks are shared: write {p.name} = {p.name}, or give the axis another name",
            )


def numbers_within(links: Sequence[Link[nodes.Layout]], inside: Scope, here: Scope) -> list[nodes.Record]:
    """Numbers of the files, and values of all parameters, as `let`.

    An axis of the outer layout has its value there.
    """
    out: list[nodes.Record] = [s for link in reversed(links) for s in link.file.statements if isinstance(s, nodes.Let)]
    shared = {a for a in axes_in(links) if here.knows(a)}
    parameters = {p.name: p for link in links for p in link.node.parameters}
    for name, p in parameters.items():
        if name not in shared:
            out.append(nodes.Let((nodes.Binding(name, _written(inside.given[name]), span=p.span),), span=p.span))
    return out


def _written(value: Value) -> nodes.Expr:
    """A value as it is written.

    A key that the config lacks stays one, so that `default` and `not` know it.
    """
    return nodes.Name("config.") if value is None else literal(value)


def on_these_ranks(
    links: Sequence[Link[nodes.Layout]], items: Iterable[nodes.Record], here: Scope
) -> list[nodes.Record]:
    """Statements without the axes and numbers of the outer layout.

    Axes must be the same; numbers are left out if a parameter has the name.
    """
    shared = {a for a in axes_in(links) if here.knows(a)}
    taken = shared | {p.name for link in links for p in link.node.parameters}
    out: list[nodes.Record] = []
    for item in items:
        if not isinstance(item, nodes.Let | nodes.Dims):
            out.append(item)
            continue
        kept = tuple(b for b in item.bindings if b.name not in taken)
        if kept:
            out.append(evolve(item, bindings=kept))
        for b in item.bindings:
            if b.name in shared:
                out.append(nodes.Assert(nodes.Binary("==", nodes.Name(b.name), b.value), span=b.span))
    return out


def check_groups(items: Iterable[nodes.Record]) -> None:
    """Check that a used model's state line is of its own groups.

    `all` and `*` are of the complete model. Raises: UcplError E194.
    """
    rests = {i.name for i in items if isinstance(i, nodes.Group) and i.without is not None}
    for item in items:
        if isinstance(item, nodes.States) and item.shape is not None:
            of_all = item.groups is None or item.groups == ("*",)
            rest = next((g for g in item.groups or () if g in rests), None)
            if of_all or rest:
                fail(
                    "E194",
                    f"a state line of all that is trained{f', in `{rest}`,' if rest else ''} in a layout that is used",
                    at(item.span),
                    remedy="name its tensors, group own = w, b, and write `of own`;"
                    " or write the state line in the layout that uses this one",
                )
