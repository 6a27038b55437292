"""Refusals of statements that have no effect in their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ucpl.errors import fail
from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout.by_index import whole_name
from ucpl.layout.name_remedies import for_axis, for_name, for_place, nearest
from ucpl.layout.patterns import dims_in
from ucpl.layout.remedies import UnknownAxis, for_unread_dim
from ucpl.layout.scope import Scope, at
from ucpl.layout.storing import Ground, brackets_of
from ucpl.layout.templates import PLACE_WORDS, template

__all__ = ["check_acting", "check_founded", "check_known", "check_places"]

_DEFAULT_FILES = ("weights", "optim", "meta")  # where lines are that name no file
_EVERYWHERE = ("weight", "fp32")  # names of states that need no line of the model
_WITH_NUMBERS = (nodes.Parameter, nodes.Let, nodes.Dims, nodes.Assert, nodes.Entry, nodes.States)
# Names that a `value` clause gives a meaning, and `_` in `_[..size(_) / 2]`: whichever dim it is.
_OF_OTHERS = frozenset({"x", "scale", "_"})


def check_acting(items: Iterable[nodes.Record]) -> None:
    """Check that statements act.

    Raises: UcplError E190 for `buckets` without a flat buffer, and for storing clauses in a line that stores `none`,
    also for clauses about copies that do not exist. E155 for a second `...` in one pattern.
    """
    for item in items:
        if not isinstance(item, nodes.Entry | nodes.States):
            continue
        is_flat = isinstance(item, nodes.States) and isinstance(item.shape, tuple)
        for clause in item.clauses:
            span = clause.span if clause.span.line else item.span
            if clause.word == "buckets" and not is_flat:
                fail(
                    "E190",
                    "`buckets` closes flat buffers, and this line stores tensors one by one",
                    at(span),
                    remedy="take it out, or write it in a state line of flat(each)",
                )
            if item.shape is None and clause.word != "when":
                word = clause.args[0] if clause.word == "copies" else clause.word
                fail(
                    "E190",
                    f"`{word}` is a storing clause, and this line stores `none`",
                    at(span),
                    remedy="take the clause out, or write a pattern for `none`",
                )
        _check_copies(item)
        if isinstance(item.shape, tuple) and _rests(item.shape) > 1:
            fail(
                "E155",
                "`...` is all dims that the pattern does not name, and a second `...` has none left",
                at(item.span),
                remedy="write `...` once; one dim is `_`",
            )


def _check_copies(item: nodes.Entry | nodes.States) -> None:
    """Check that a clause about copies has copies.

    Along an axis that cuts all of a pattern, no two ranks hold the same. Raises E190.
    """
    cut = _cutting(item.shape) if isinstance(item.shape, tuple) else frozenset[str]()
    fixed = {c.args[0] for c in item.clauses if c.word == "at"}
    for clause in item.clauses:
        for axis in clause.args[1] if clause.word == "copies" else ():
            if axis in cut and axis not in fixed:
                fail(
                    "E190",
                    f"`{clause.args[0]} @{axis}` speaks of copies along {axis}, and the pattern is cut over {axis}",
                    at(clause.span if clause.span.line else item.span),
                    remedy=f"take `{clause.args[0]} @{axis}` out, or the cut `@{axis}` where ranks hold copies",
                )


def _cutting(axes: Iterable[nodes.Record]) -> frozenset[str]:
    """Mesh axes that cut all of a pattern.

    Of a sum, those that cut every term.
    """
    out: frozenset[str] = frozenset()
    for axis in axes:
        match axis:
            case nodes.Cut(axis=inner, splits=splits):
                out |= _cutting((inner,)) | {split.mesh_axis for split in splits}
            case nodes.Stack(terms=terms):
                out |= frozenset.intersection(*(_cutting(term.axes) for term in terms))
            case nodes.Pad(axis=inner) | nodes.Trim(axis=inner) | nodes.Flat(axis=inner):
                out |= _cutting((inner,))
    return out


def _rests(axes: Iterable[nodes.Record]) -> int:
    """Number of `...` in one way through a pattern.

    The terms of a sum are ways through the same dims.
    """
    count = 0
    for axis in axes:
        match axis:
            case nodes.Rest():
                count += 1
            case nodes.Stack(terms=terms):
                count += max(_rests(term.axes) for term in terms)
            case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner) | nodes.Flat(axis=inner):
                count += _rests((inner,))
    return count


# ---- statements of a layout of a named model about nothing
# --------------------------------------------------------------


def check_founded(
    fresh: Iterable[nodes.LayoutItem], items: Sequence[nodes.LayoutItem], model_items: Sequence[nodes.ModelItem]
) -> None:
    """Check statements of a layout of a named model.

    `fresh`: those that replace none of a base layout. Raises: UcplError E139 for `none` of an unknown name, E191 for a
    state that the model does not have.
    """
    tensors = {whole_name(i.path) for i in model_items if isinstance(i, nodes.Tensor | nodes.Alias)}
    states = {name: i.scalar for i in model_items if isinstance(i, nodes.State) for name in i.names}
    for item in fresh:
        match item:
            case nodes.Entry(path=path, shape=None, of=None, glob=()) if (
                path != "*" and whole_name(path) not in tensors
            ):
                remedy = for_name(
                    path, tensors, "take the line out: the model has no such tensor, and no base such a line"
                )
                fail("E139", f"`{path} = none`, and there is no `{path}`", at(item.span), remedy=remedy)
            case nodes.Files(name=name, form=None) if not _is_named(name, items):
                fail(
                    "E139",
                    f"`file {name} = none`, and no line is in `{name}`",
                    at(item.span),
                    remedy="take the line out, or correct the name: no layout that is extended has such a file",
                )
            case nodes.States(names=names):
                for name in names or ():
                    _check_state(name, states, item)
            case nodes.Derive(state=one, source=other):
                for name in (one, other):
                    if name not in _EVERYWHERE:
                        _check_state(name, states, item)


def _is_named(name: str, items: Iterable[nodes.LayoutItem]) -> bool:
    """True if a line of a layout may be in a file."""
    return name in _DEFAULT_FILES or any(
        (isinstance(item, nodes.Entry | nodes.States | nodes.Blob) and any(c.args[:1] == (name,) for c in item.clauses))
        or (isinstance(item, nodes.Group) and item.stated is not None and item.stated[0] == name)
        for item in items
    )


def _check_state(name: str, states: dict[str, bool], item: nodes.States | nodes.Derive) -> None:
    is_line = isinstance(item, nodes.States)
    if name == "weight":
        return  # the tensor itself, in a flat buffer, say
    if states.get(name) and is_line:
        fail(
            "E191",
            f"`{name}` is a scalar: one value, no tensor that could be stored so",
            at(item.span),
            remedy=f"take `{name}` out: scalars go along with all other data",
        )
    if name not in states:
        known = list(dict.fromkeys(["weight", *states] if is_line else [*_EVERYWHERE, *states]))
        close = nearest(name, known)
        fail(
            "E191",
            f"the model has no state `{name}`",
            at(item.span, "named here"),
            remedy=f"did you mean `{close}`?"
            if close
            else "all of them are `state *`"
            if name == "all" or "*" in name
            else f"its states are {', '.join(known) or 'none'}; another one is a line of the model: `state {name} : f32`",
        )


# ---- names in expressions that are not evaluated
# ------------------------------------------------------------------------


def check_known(items: Iterable[nodes.Record], scope: Scope, *, with_dims: bool = False) -> None:
    """Check that every name is known, even if it is not evaluated.

    Examples: behind `default(...)`, `and`, or a condition that is not met. with_dims: dims of patterns, too. Raises:
    UcplError E101, E148, E169.
    """
    for item in items:
        if not isinstance(item, _WITH_NUMBERS):
            continue
        if isinstance(item, nodes.Assert) and item.message:
            for name in sorted(template(item.message, item.span).names):
                if not _is_known(name, scope):
                    scope.lookup(name, item.span)
        for node in walk(item):
            if type(node) is nodes.Name and node.path not in _OF_OTHERS and not _is_known(node.path, scope):
                scope.lookup(node.path, node.span)
            elif type(node) is nodes.Split and not scope.knows(node.mesh_axis):
                fail(
                    "E148",
                    f"`@{node.mesh_axis}` cuts over a mesh axis that there is not",
                    at(node.span if node.span.line else item.span),
                    remedy=for_axis(node.mesh_axis, scope.mesh_axes),
                    about=UnknownAxis(node.mesh_axis),
                )
            elif with_dims and type(node) is nodes.Dim and not scope.knows(node.name):
                fail(
                    "E169",
                    f"no dim is called `{node.name}`",
                    at(node.span if node.span.line else item.span, "named here"),
                    remedy=for_unread_dim(item, node.name, scope.names()),
                )


def _is_known(path: str, scope: Scope) -> bool:
    return path.startswith("config.") or scope.knows(path) or scope.knows(path.removesuffix(".size"))


# ---- names of places in lines without effect -------------------------------------------------------------------------


def check_places(unread: Iterable[nodes.Record], items: Iterable[nodes.LayoutItem], ground: Ground) -> None:
    """Check the places of unread lines.

    `unread`: lines under a condition that does not hold, or of a class without tensors. Raises: UcplError E122, E148,
    E151, E218, and errors of templates that cannot be read.
    """
    items = list(items)
    files = {i.name for i in items if isinstance(i, nodes.Files)}
    meshes = {i.name for i in items if isinstance(i, nodes.Mesh)}
    everywhere = brackets_of(items)
    for item in unread:
        if isinstance(item, nodes.Files):
            for text in (item.template, item.key or ""):
                _check_template(text, item.span, ground, everywhere)
        elif isinstance(item, nodes.Entry | nodes.States):
            brackets = dims_in(item.indices) if isinstance(item, nodes.Entry) else everywhere
            for clause in item.clauses:
                if clause.word == "on" and clause.args[0] not in meshes:
                    known = ", ".join(sorted(m for m in meshes if m)) or "none; `in` names a file"
                    remedy = f"the meshes with a name are {known}"
                    fail("E218", f"no mesh is called `{clause.args[0]}`", at(item.span), remedy=remedy)
                _check_clause(clause, item.span, ground, files)
                if clause.word == "as":
                    _check_template(clause.args[0], item.span, ground, brackets)


def _check_clause(clause: nodes.Clause, span: nodes.Span, ground: Ground, files: set[str]) -> None:
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


def _check_template(text: str, span: nodes.Span, ground: Ground, brackets: Iterable[str]) -> None:
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
