"""Statements of layouts and their clauses."""

from __future__ import annotations

from collections.abc import Callable

from lark import Token

from ucpl.syntax import nodes
from ucpl.syntax.nodes import Clause
from ucpl.syntax.quoting import unquote
from ucpl.syntax.recording.models import Models
from ucpl.syntax.recording.places import Children, Part, when_of

__all__ = ["ENTRY_CLASSES", "ONCE", "Layouts"]

DOMAINS = ("node", "process")
ENTRY_CLASSES = ("parameter", "trainable", "frozen", "buffer", "alias")
ONCE = frozenset(
    {"on", "in", "as", "dtype", "lossy", "exact", "value", "when", "buckets"}
)  # `at` and policies may repeat


def _clause(word: str) -> Callable[[Layouts, Children], Clause]:
    """The method of a clause of one word and one argument."""

    def build(self: Layouts, children: Children) -> Clause:
        argument = children[1]
        if isinstance(argument, Part):
            argument = argument.value
        elif isinstance(argument, Token):
            argument = self.string(argument)
        return Clause(word, (argument,), span=self.span(children))

    return build


class Layouts(Models):
    """Methods of the rules under "layout", one a statement and one a clause."""

    def parameter(self, children: Children) -> nodes.Parameter:
        default = children[2] if len(children) > 1 else None
        return nodes.Parameter(children[0].value, default, span=self.span(children))

    def mesh(self, children: Children) -> nodes.Mesh:
        names = [c.value for c in children if isinstance(c, Part)]
        named = len(children) > 2 and isinstance(children[2], Token)
        name, axes = (names[0], names[1:]) if named else ("", names)
        for i, axis in enumerate(axes):
            if axis in axes[:i]:
                parts = [c for c in children if isinstance(c, Part) and c.value == axis]
                others = " ".join(one for one in axes if one != axis)
                remedy = (
                    f"axes stand side by side, without a sign between\nwrite: mesh {others}" if axis in "xX" else ""
                )
                self._twice("E008", f"the mesh axis `{axis}`", parts[-2], parts[-1], remedy)
        return nodes.Mesh(name, tuple(axes), span=self.span(children))

    def domain(self, children: Children) -> nodes.Domain:
        kind = self.word(children[1], DOMAINS, "a kind of domain")
        return nodes.Domain(kind, self.string(children[3]), span=self.span(children))

    def file(self, children: Children) -> nodes.Files:
        name, form, when = children[1].value, children[3], when_of(children)
        if form.type == "NONE":
            return nodes.Files(name, None, when=when, span=self.span(children))
        key = next((c.value for c in children if isinstance(c, Part) and c.kind == "key"), None)
        return nodes.Files(name, str(form), self.string(children[4]), key, when, span=self.span(children))

    def framework(self, children: Children) -> nodes.Framework:
        return nodes.Framework(children[1], span=self.span(children))

    def derive(self, children: Children) -> nodes.Derive:
        return nodes.Derive(children[1].value, children[3].value, when_of(children), span=self.span(children))

    def of_class(self, children: Children) -> Part:
        word = self.word(children[1], ENTRY_CLASSES, "a class of tensors")
        return Part("class", word, self.span(children))

    def entry(self, children: Children) -> nodes.Entry:
        path = "*" if isinstance(children[0], Token) else children[0].value
        parts = {c.kind: c.value for c in children[1:] if isinstance(c, Part)}
        return nodes.Entry(
            path,
            parts.get("indices", ()),
            parts.get("shape"),
            self._clauses(children),
            parts.get("class"),
            self._glob(children[0]),
            span=self.span(children),
        )

    def _glob(self, left: Token | Part) -> tuple[str, ...]:
        """The texts between the stars of a quoted left side. One that is written by its number is part of the name."""
        if isinstance(left, Token) or left.kind != "quoted":
            return ()
        start = left.span.start
        texts = self.source.text[start + 1 : left.span.stop - 1].split("*")
        return tuple(unquote(f'"{text}"', self.source, start) for text in texts) if len(texts) > 1 else ()

    def states(self, children: Children) -> nodes.States:
        names = tuple(c.value for c in children if isinstance(c, Part) and c.kind == "name")
        parts = {c.kind: c.value for c in children if isinstance(c, Part)}
        like = any(isinstance(c, Token) and c.type == "LIKE" for c in children)
        return nodes.States(
            names or None,
            parts.get("groups"),
            "like" if like else parts.get("shape"),
            self._clauses(children),
            span=self.span(children),
        )

    def fill(self, children: Children) -> nodes.Fill:
        path = "*" if isinstance(children[1], Token) else children[1].value
        parts = {c.kind: c.value for c in children[2:] if isinstance(c, Part)}
        return nodes.Fill(
            path,
            parts.get("indices", ()),
            self._filled(children),
            parts.get("class"),
            self._glob(children[1]),
            when_of(children),
            span=self.span(children),
        )

    def fill_states(self, children: Children) -> nodes.FillStates:
        names = tuple(c.value for c in children if isinstance(c, Part) and c.kind == "name")
        groups = next((c.value for c in children if isinstance(c, Part) and c.kind == "groups"), None)
        value = self._filled(children)
        return nodes.FillStates(names or None, groups, value, when_of(children), span=self.span(children))

    @staticmethod
    def _filled(children: Children) -> nodes.Expr:
        """What stands behind `=`."""
        at = next(i for i, c in enumerate(children) if isinstance(c, Token) and c == "=")
        value: nodes.Expr = children[at + 1]
        return value

    def fate(self, children: Children) -> Part:
        word = self.word(children[0], ("keep", "first", "remap", "drop"), "a fate of a blob")
        return Part("fate", word, self.span(children))

    def blob(self, children: Children) -> nodes.Blob:
        axes = tuple(c.value for c in children if isinstance(c, Part) and c.kind == "name")
        fate = next(c.value for c in children if isinstance(c, Part) and c.kind == "fate")
        return nodes.Blob(children[1].value, axes, fate, self._clauses(children), span=self.span(children))

    on_mesh, in_file, as_key = _clause("on"), _clause("in"), _clause("as")
    value, when, buckets = _clause("value"), _clause("when"), _clause("buckets")

    def stored_dtype(self, children: Children) -> Clause:
        return Clause("dtype", (self._element_type(children[1]),), span=self.span(children))

    def lossy(self, children: Children) -> Clause:
        return Clause("lossy", (), span=self.span(children))

    def exact(self, children: Children) -> Clause:
        return Clause("exact", (), span=self.span(children))

    def policy(self, children: Children) -> Part:
        return Part("policy", str(children[0]), self.span(children))

    def copies(self, children: Children) -> Clause:
        axes = tuple(c.value for c in children[2::2])
        return Clause("copies", (children[0].value, axes), span=self.span(children))

    def at(self, children: Children) -> Clause:
        return Clause("at", (children[1].value, children[3]), span=self.span(children))

    def _clauses(self, children: Children) -> tuple[Clause, ...]:
        clauses = tuple(c for c in children if isinstance(c, Clause))
        seen: dict[str, Clause] = {}
        for clause in clauses:
            if clause.word in seen:
                self._twice("E009", f"the clause `{clause.word}`", seen[clause.word], clause)
            if clause.word in ONCE:
                seen[clause.word] = clause
        return clauses
