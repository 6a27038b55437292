"""Turns what the parser recognises into records, one method per rule of the grammar, while it parses.

lark calls a method as soon as its rule is complete, so no tree is built in between. All tokens are kept as children:
the first and the last say where the record stands. A rule whose value is not a record hands up a `Part`.
The methods stand by subject in `recording/`: each file's class adds its own to those of the one before.

Not here: anything that needs more than one statement (see definitions.py).
"""

from __future__ import annotations

from lark import Token

from ucpl.errors import fail
from ucpl.syntax import nodes
from ucpl.syntax.recording.layouts import ENTRY_CLASSES, ONCE, Layouts
from ucpl.syntax.recording.places import Children, Part

__all__ = ["ENTRY_CLASSES", "ONCE", "VERSION", "Part", "Recorder"]

VERSION = 1


class Recorder(Layouts):
    """The methods that lark calls, by the names of the rules: those of files, and all others."""

    def import_(self, children: Children) -> nodes.Import:
        names = tuple(c.value for c in children[3::2])
        return nodes.Import(self.string(children[1]), names, span=self.span(children))

    def model(self, children: Children) -> nodes.Model:
        name, *rest = (c for c in children if not isinstance(c, Token))
        parts = {c.kind: c.value for c in rest if isinstance(c, Part)}
        items = tuple(c for c in rest if not isinstance(c, Part))
        span = self.span(children)
        return nodes.Model(name.value, items, parts.get("parameters", ()), parts.get("extends"), span=span)

    def parameters(self, children: Children) -> Part:
        return Part("parameters", tuple(children[1:-1:2]), self.span(children))

    def extends(self, children: Children) -> Part:
        return Part("extends", children[1], self.span(children))

    def layout(self, children: Children) -> nodes.Layout:
        name, parameters, of, *rest = (c for c in children if not isinstance(c, Token))
        base = rest.pop(0).value if rest and isinstance(rest[0], Part) else None
        model, arguments = (of.name, of.arguments) if isinstance(of, nodes.Call) else (of.value, ())
        span = self.span(children)
        return nodes.Layout(name.value, parameters.value, model, base, tuple(rest), arguments, span=span)

    def drop(self, children: Children) -> Part:
        return Part("drop", tuple(c.value for c in children[1::2]), self.span(children))

    def freeze(self, children: Children) -> Part:
        return Part("freeze", tuple(c.value for c in children[1::2]), self.span(children))

    def train(self, children: Children) -> Part:
        named = isinstance(children[-2], Token) and children[-2] == "in"
        group = children[-1].value if named else None
        names = children[1:-2:2] if named else children[1::2]
        return Part("train", tuple((c.value, group) for c in names), self.span(children))

    def plan(self, children: Children) -> nodes.Plan:
        drop, freeze, train = (
            tuple(one for part in children[6:] if part.kind == kind for one in part.value)
            for kind in ("drop", "freeze", "train")
        )
        return nodes.Plan(children[1].value, children[3], children[5], drop, freeze, train, span=self.span(children))

    def header(self, children: Children) -> Part:
        number = children[1]
        if number != str(VERSION):
            fail(
                "E003",
                f"this file is written in version {number[:20]} of the language; this program reads version {VERSION}",
                self.label(number, "not a version that is known here"),
            )
        return Part("header", VERSION, self.span(children))

    def start(self, children: Children) -> nodes.File:
        statements = tuple(c for c in children if not isinstance(c, Token | Part))
        return nodes.File(self.source.name, VERSION, statements, self.source.text)
