"""Uses of a layout's declarations: files of lines, and names of numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve

from ucpl.language import nodes
from ucpl.language.quoting import HOLE
from ucpl.language.walk import walk

__all__ = ["holes_of", "lines_in_file", "names_of", "without_unused"]

_NAME = re.compile(r"[A-Za-z_][\w.]*")


def without_unused(items: Sequence[nodes.LayoutItem]) -> list[nodes.LayoutItem]:
    """Statements without unused files and numbers.

    Decided conditions may have used them.
    """
    out: list[nodes.LayoutItem] = [
        item for item in items if not (isinstance(item, nodes.Files) and not lines_in_file(item.name, items))
    ]
    always = {*names_of(_distinct(item for item in out if not isinstance(item, nodes.Let)))}
    while True:
        named = always | {*names_of(item for item in out if isinstance(item, nodes.Let))}
        kept: list[nodes.LayoutItem] = []
        is_same = True
        for item in out:
            if isinstance(item, nodes.Let):
                bindings = tuple(b for b in item.bindings if b.name in named)
                is_same = is_same and len(bindings) == len(item.bindings)
                if not bindings:
                    continue
                item = item if len(bindings) == len(item.bindings) else evolve(item, bindings=bindings)
            kept.append(item)
        if is_same:
            return out
        out = kept


def _distinct(items: Iterable[nodes.LayoutItem]) -> Iterator[nodes.Record]:
    """The statements, with shared axes and clauses of entries once.

    A line of a layout of any model is an entry of each tensor, with the same axes.
    """
    seen: set[int] = set()
    for item in items:
        if not isinstance(item, nodes.Entry) or item.indices:
            yield item
            continue
        for one in (*(item.shape or ()), *item.clauses):
            if id(one) not in seen:
                seen.add(id(one))
                yield one


def lines_in_file(name: str, items: Sequence[nodes.LayoutItem]) -> list[nodes.LayoutItem]:
    """Lines in a file, by their `in` or because they name none."""
    has_optim = any(isinstance(i, nodes.Files) and i.name == "optim" for i in items)
    out: list[nodes.LayoutItem] = []
    for item in items:
        match item:
            case nodes.States(shape=None) if has_optim:
                continue
            case nodes.Entry(clauses=clauses):
                default = "weights"
            case nodes.States(clauses=clauses):
                default = "optim" if has_optim else "weights"
            case nodes.Blob(clauses=clauses):
                default = "meta"
            case nodes.Group(stated=(str() as of, _)) if of == name:
                out.append(item)
                continue
            case _:
                continue
        if next((c.args[0] for c in clauses if c.word == "in"), default) == name:
            out.append(item)
    return out


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
