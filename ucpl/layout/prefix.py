"""One model or layout inside another: its names under a prefix.

`use vision() as eye key "vision_tower.{key}"` gives dims and tensors the names `eye.h`, `eye.patch`; mesh axes keep
theirs, since ranks are shared. Files of the inner layout get a prefix, too, and the key template wraps their keys.
"""

from __future__ import annotations

import re
from typing import Any

import attrs

from ucpl.syntax import nodes

_BRACES = re.compile(r"\{([^{}:]*)((?::[^{}]*)?)\}")
_WORDS = re.compile(r"[A-Za-z_][\w.]*(?!\s*\(|[\w.])")  # not the name of a function
# What a stored tensor's place gives to a template, and words of expressions.
_GIVEN = frozenset(
    {"name", "alias", "owner", "key", "state", "bucket", "group", "member", "number", "rank", "and", "or", "not"}
)


def prefixed(items: list[Any], prefix: str, key: str | None) -> list[Any]:
    """The statements with every name of their own under `prefix.`."""
    shared = {a for i in items if isinstance(i, nodes.Mesh) for a in i.axes} | {"config", "x"}
    return [_rename(i, prefix, shared, key) for i in items]


def _rename(node: Any, prefix: str, shared: set[str], key: str | None) -> Any:
    def name(text: str) -> str:
        return text if text.partition(".")[0] in shared or text == "*" else f"{prefix}.{text}"

    def template(text: str) -> str:
        """The names in braces: dims of the inner model are under the prefix, what the place itself gives is not."""
        return _BRACES.sub(lambda m: "{" + _WORDS.sub(lambda w: word(w[0]), m[1]) + m[2] + "}", text)

    def word(text: str) -> str:
        return text if text in _GIVEN else name(text)

    def walk(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(walk, value))
        return (
            _rename(value, prefix, shared, key)
            if attrs.has(type(value)) and not isinstance(value, nodes.Span)
            else value
        )

    match node:
        case nodes.Name(path=path):
            return attrs.evolve(node, path=name(path))
        case nodes.Dim():
            return attrs.evolve(node, name=name(node.name), range=walk(node.range))
        case nodes.Term():
            return attrs.evolve(node, axes=walk(node.axes))
        case nodes.Mesh() | nodes.Split():
            inner = {"sizes": walk(node.sizes), "grain": walk(node.grain)} if isinstance(node, nodes.Split) else {}
            return attrs.evolve(node, **inner)
        case nodes.Clause(word="as"):
            return attrs.evolve(node, args=(template(node.args[0]),))
        case nodes.Clause(word="at"):
            return attrs.evolve(node, args=(node.args[0], walk(node.args[1])))
        case nodes.Clause(word=("copies" | "on" | "dtype")):
            return node
        case nodes.Clause(word="in"):
            return attrs.evolve(node, args=(name(node.args[0]),))
        case nodes.Entry():
            clauses = walk(node.clauses)
            if not any(c.word == "in" for c in clauses):
                clauses = (*clauses, nodes.Clause("in", (name("weights"),), span=node.span))
            if key is not None:
                clauses = tuple(_wrap(c, key) for c in clauses)
            return attrs.evolve(
                node, path=name(node.path), indices=walk(node.indices), shape=walk(node.shape), clauses=clauses
            )
        case nodes.Group():
            return attrs.evolve(
                node,
                name=name(node.name),
                indices=walk(node.indices),
                members=node.members and tuple(map(name, node.members)),
                without=node.without and tuple(map(name, node.without)),
                order=walk(node.order),
            )
        case nodes.States():
            return attrs.evolve(
                node,
                groups=node.groups and tuple(map(name, node.groups)),
                shape=walk(node.shape),
                clauses=walk(node.clauses),
            )
        case nodes.Alias():
            return attrs.evolve(node, path=name(node.path), owner=name(node.owner), when=walk(node.when))
        case nodes.Tensor():
            return attrs.evolve(node, path=name(node.path), dims=walk(node.dims), when=walk(node.when))
        case nodes.Dimension():
            return attrs.evolve(node, name=node.name and name(node.name), range=walk(node.range))
        case nodes.Files():
            return attrs.evolve(
                node,
                name=name(node.name),
                template=template(node.template),
                key=node.key and template(node.key),
                when=walk(node.when),
            )
        case nodes.Binding() | nodes.Index():
            fields = {
                f.name: walk(getattr(node, f.name)) for f in attrs.fields(type(node)) if f.name not in ("span", "name")
            }
            return attrs.evolve(node, **{**fields, "name": name(node.name)})
        case nodes.State():
            return attrs.evolve(node, groups=node.groups and tuple(map(name, node.groups)))
        case nodes.DefaultDtype():
            return node
    fields = {f.name: walk(getattr(node, f.name)) for f in attrs.fields(type(node)) if f.name != "span"}
    return attrs.evolve(node, **fields)


def _wrap(clause: nodes.Clause, key: str) -> nodes.Clause:
    """The outer key template around an inner `as`."""
    return attrs.evolve(clause, args=(key.replace("{key}", clause.args[0]),)) if clause.word == "as" else clause
