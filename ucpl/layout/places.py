"""Names of places in lines of which nothing is worked out: files, mesh axes, and what templates name."""

from __future__ import annotations

from collections.abc import Iterable

from ucpl.errors import fail
from ucpl.layout.axis_lines import UnknownAxis
from ucpl.layout.near import for_name, for_place, nearest
from ucpl.layout.patterns import dims_in
from ucpl.layout.scope import at
from ucpl.layout.storing import Ground, brackets_of
from ucpl.layout.templates import PLACE_WORDS
from ucpl.syntax import nodes

__all__ = ["demand_places"]


def demand_places(unread: Iterable[nodes.Record], items: Iterable[nodes.LayoutItem], ground: Ground) -> None:
    """`unread`: lines under a condition that does not hold, or of a class that no tensor is in.

    Raises: UcplError E122, E148, E151, E218, and what templates that cannot be read raise.
    """
    items = list(items)
    files = {i.name for i in items if isinstance(i, nodes.Files)}
    meshes = {i.name for i in items if isinstance(i, nodes.Mesh)}
    everywhere = brackets_of(items)
    for item in unread:
        if isinstance(item, nodes.Files):
            for text in (item.template, item.key or ""):
                _demand_template(text, item.span, ground, everywhere)
        elif isinstance(item, nodes.Entry | nodes.States):
            brackets = dims_in(item.indices) if isinstance(item, nodes.Entry) else everywhere
            for clause in item.clauses:
                if clause.word == "on" and clause.args[0] not in meshes:
                    known = ", ".join(sorted(m for m in meshes if m)) or "none; `in` names a file"
                    remedy = f"the meshes with a name are {known}"
                    fail("E218", f"no mesh is called `{clause.args[0]}`", at(item.span), remedy=remedy)
                _demand_clause(clause, item.span, ground, files)
                if clause.word == "as":
                    _demand_template(clause.args[0], item.span, ground, brackets)


def _demand_clause(clause: nodes.Clause, span: nodes.Span, ground: Ground, files: set[str]) -> None:
    here = clause.span if clause.span.line else span
    if clause.word == "in" and clause.args[0] not in files:
        close = nearest(clause.args[0], files)
        remedy = f"did you mean `{close}`?" if close else f'write file {clause.args[0]} = torch "..." in the layout'
        fail("E151", f"no file is called `{clause.args[0]}`", at(here), remedy=remedy)
    if clause.word == "at" and clause.args[0] not in ground.mesh_axes:
        scope = ground.scope
        remedy = for_place(clause.args[0], scope.mesh_axes, is_number=scope.knows(clause.args[0]))
        about = UnknownAxis(clause.args[0]) if not scope.knows(clause.args[0]) else None
        fail("E148", f"at {clause.args[0]}, which is no mesh axis", at(here), remedy=remedy, about=about)


def _demand_template(text: str, span: nodes.Span, ground: Ground, brackets: Iterable[str]) -> None:
    made = ground.template(text, span, brackets)
    known = {n for n, _ in made.sizes} | PLACE_WORDS | ground.mesh_axes
    known |= {n for b in brackets for n in (b, f"{b}.local")}
    for name in sorted(made.names - known):
        if not ground.scope.knows(name) and not name.startswith("config."):
            names = [*ground.scope.names(), *sorted(known)]
            fail(
                "E122",
                f'`{name}` in "{text}" is no index, no mesh axis and no number here',
                at(span),
                remedy=for_name(name, names, "name an index of the brackets, a mesh axis, or a number of the layout"),
            )
