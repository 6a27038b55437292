"""Names that statements use: of expressions, patterns and templates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.language.words import HOLE

__all__ = ["holes_of", "names_of"]

_NAME = re.compile(r"[A-Za-z_][\w.]*")


def names_of(texts: Iterable[nodes.Record]) -> Iterator[str]:
    """Every name of expressions, patterns and templates.

    Of dotted ones also each end: `eye.h.size` has `h`.
    """
    for node in walk(*texts):
        for name in _own_names(node):
            steps = name.removesuffix(".size").removesuffix(".local").split(".")
            yield from (".".join(steps[i:]) for i in range(len(steps)))


def _own_names(node: nodes.Record) -> Iterator[str]:
    match node:
        case nodes.Name(path=name) | nodes.Dim(name=name) | nodes.Dimension(name=str() as name):
            yield name
        case nodes.Split(mesh_axis=name):
            yield name
        case nodes.Binding(by=str() as name):
            yield name
        case nodes.Mesh(axes=names):
            yield from names
        case nodes.Files(template=text, key=key):
            yield from holes_of(text + (key or ""))
        case nodes.Domain(template=text):
            yield from holes_of(text)
        case nodes.Use(key=str() as text) | nodes.Assert(message=str() as text):
            yield from holes_of(text)
        case nodes.Group(stated=(_, str() as text)):
            yield from holes_of(text)
        case nodes.Clause(word="as", args=(str() as text,)) | nodes.Text(value=text):
            yield from holes_of(text)


def holes_of(text: str) -> Iterator[str]:
    """Names in the braces of a template."""
    for hole in HOLE.finditer(text):
        yield from _NAME.findall(hole[1])
