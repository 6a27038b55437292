"""One model or layout inside another: its names under a prefix.

`use vision() as eye key "vision_tower.{key}"` gives dims and tensors the names `eye.h`, `eye.patch`; mesh axes keep
theirs, since ranks are shared. Files of the inner layout get a prefix, too, and the key template wraps their keys; where it
has no file of a name, the outer one's is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import evolve

from ucpl.layout.templates import PLACE_WORDS
from ucpl.records import frozen
from ucpl.syntax import nodes
from ucpl.syntax.walk import inside, rewritten

_BRACES = re.compile(r"\{([^{}:]*)((?::[^{}]*)?)\}")
_WORDS = re.compile(r"[A-Za-z_][\w.]*(?!\s*\(|[\w.])")  # not the name of a function
# What a stored tensor's place gives to a template, and words of expressions.
_GIVEN = PLACE_WORDS | {"and", "or", "not"}
_OF_A_VALUE = {"x", "scale"}


def prefixed(items: Iterable[nodes.Record], prefix: str, key: str | None) -> list[nodes.Record]:
    """The statements with every name of their own under `prefix.`. A default dtype is that of these tensors alone."""
    items = _with_dtypes(items)
    shared = frozenset(a for i in items if isinstance(i, nodes.Mesh) for a in i.axes) | {"config"}
    files = frozenset(i.name for i in items if isinstance(i, nodes.Files))
    renaming = _Renaming(prefix, shared, key, files)
    return [rewritten(i, renaming.change) for i in items]


def _with_dtypes(items: Iterable[nodes.Record]) -> list[nodes.Record]:
    """What a model says of dtype, on each of its tensors: whoever uses it, and what else is used, may have another."""
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
        """The record under its new names, with what it holds; None for one that names nothing itself."""
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
        """The names in braces: dims of the inner model are under the prefix, what the place itself gives is not."""

        def word(match: re.Match[str]) -> str:
            return match[0] if match[0] in _GIVEN else self.name(match[0])

        return _BRACES.sub(lambda m: "{" + _WORDS.sub(word, m[1]) + m[2] + "}", text)

    def clause(self, node: nodes.Clause) -> nodes.Clause:
        match node.word:
            case "as":
                return evolve(node, args=(self.template(node.args[0]),))
            case "in":
                return evolve(node, args=(self.file(node.args[0]),))
            case "value":  # x and scale are what is stored: a dim may be called so all the same
                return inside(node, evolve(self, shared=self.shared | _OF_A_VALUE).change)
            case _:
                return inside(node, self.change)

    def entry(self, node: nodes.Entry) -> nodes.Entry:
        clauses = node.clauses
        if node.shape is not None and not any(c.word == "in" for c in clauses):
            clauses = (*clauses, nodes.Clause("in", (self.file("weights"),), span=node.span))
        glob = (f"{self.prefix}.{node.glob[0]}", *node.glob[1:]) if node.glob else ()
        path = f"{self.prefix}.{node.path}" if glob else self.name(node.path)
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
        """In the inner layout's own file, and under its keys: `{key}` of an entry is so already."""
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
