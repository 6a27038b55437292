"""Resolve a layout: names bound, numbers filled in, `extends` applied, rules checked.

The order is: names and numbers (statements.py), the model's tensors (models.py), then the layout's own statements,
closed one by one (patterns.py, storing.py, entries.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from attrs import evolve

from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.language import nodes, print_expr
from ucpl.language.walk import walk
from ucpl.layout import axes as ax
from ucpl.layout.entries import Kin, ModelFamilies, entries_of, is_wild
from ucpl.layout.fills import fillings_of
from ucpl.layout.layout import Entry, GlobMatch, Layout, Mesh, States, domain_rules
from ucpl.layout.library import Library
from ucpl.layout.misplaced_statements import check_acting, check_founded, check_known, check_places
from ucpl.layout.models import (
    ModelTensors,
    UnknownTensor,
    aliases_of,
    check_digits,
    check_sizes,
    for_alias,
    groups_of,
    states_of,
    tensors_of,
)
from ucpl.layout.name_remedies import in_short, nearest
from ucpl.layout.patterns import index_rules, meshes_of
from ucpl.layout.reduced_states import check_carried_states, with_reduced_states
from ucpl.layout.remedies import UnknownAxis, with_lines
from ucpl.layout.scales import check_block_edges
from ucpl.layout.scope import Config, Scope, Value, at
from ucpl.layout.statements import CallInputs, Note, OpenedLayout, open_layout
from ucpl.layout.storing import (
    blobs_of,
    check_carried,
    check_names,
    derived_of,
    framework_of,
    ground_of,
    groups_of_layout,
    not_kept,
    states_lines,
)
from ucpl.layout.templates import closed, render, template

__all__ = ["resolve", "resolved", "check_meshes"]


def resolve(
    library: Library,
    call: nodes.Call,
    *,
    model: nodes.Model | None = None,
    config: Config | None = None,
    define_sizes: dict[str, Value] | None = None,
    inherited: dict[str, tuple[Value, str]] | None = None,
    notes: tuple[Note, ...] = (),
    fold: bool = False,
    kin: Kin | None = None,
) -> Layout:
    """Close the layout that `call` names.

    model:        the model of a layout `of any`; a layout of a named model brings its own.
    config:       a Hugging Face config.json, as `config.x`.
    define_sizes: -D name=value; wins over `let` and `dim` of the same name.
    inherited:    values for parameters that the call leaves open, each with its origin (a source's own settings).
    notes:        (name, value, origin) of values that the call or the library has already: printed with the others.
    fold:         tensors that the layout stores alike are one family (`Layout.families`).
    kin:          of each tensor, its family in a checkpoint that is compared with this one.

    Raises UcplError E1xx.
    """
    given = CallInputs(config or {}, define_sizes or {}, inherited or {})
    opened = open_layout(library, call, given, model)
    try:
        layout = resolved(opened, given.sizes, fold=fold, kin=kin)
    except UcplError as error:
        found = error.diagnostics[0]
        if isinstance(found.about, UnknownAxis):
            raise UcplError(with_lines(found, found.about, opened.layout, opened.items)) from None
        raise
    return evolve(layout, origins=(*layout.origins, *notes)) if notes else layout


def resolved(opened: OpenedLayout, sizes: Mapping[str, Value], *, fold: bool = False, kin: Kin | None = None) -> Layout:
    """The layout of these statements.

    Afterwards the scope knows the sizes of digits, too.
    """
    items, besides, scope = opened.items, opened.besides, opened.scope
    _reject_unknown_sizes(sizes, opened)
    meshes = meshes_of(items, scope)
    scope.mesh_axes = tuple(dict.fromkeys(axis for mesh in meshes for axis in mesh.axes))
    check_digits(besides)
    check_sizes(opened.model_items, [*besides, *items], scope)
    indices = index_rules([*besides, *items], scope)
    known = _known(opened) if fold and _can_fold(opened) else None
    tensors = known.tensors if known is not None else tensors_of(opened.model_items, scope)
    aliases = aliases_of(besides, tensors, scope)
    _check_asserts(opened)
    model_groups = groups_of(besides, tensors)
    tensors = with_reduced_states(besides, tensors, model_groups)
    check_acting(items)
    if opened.layout.of != "any":
        check_founded(opened.fresh, items, besides)
    ground = ground_of(items, scope, indices)
    try:
        folding = None
        if known is not None:
            folding = ModelFamilies(known, tuple(members for _, members in model_groups), kin)
        placing = entries_of(items, ground, tensors, aliases, folding)
        entries, families = placing.entries, placing.families
        groups = groups_of_layout(items, ground, tensors, entries, model_groups)
    except UcplError as error:
        found = error.diagnostics[0]
        if isinstance(found.about, UnknownTensor):
            add_reason(found, found.about.name, opened, tensors, aliases)
        raise
    check_block_edges(entries, tensors, _sizes(scope), indices)
    framework, settings = framework_of(items, scope)
    state_lines = states_lines(items, ground, groups, entries, model_groups)
    check_carried_states(state_lines, besides, framework)
    derived, states = derived_of(items, scope), states_of(besides)
    layout = Layout(
        name=opened.layout.name,
        call=_call_text(opened),
        sizes=_sizes(scope),
        config=scope.config,
        tensors=tensors,
        aliases=aliases,
        states=states,
        model_groups=model_groups,
        meshes=meshes,
        indices=indices,
        files=ground.files,
        entries=entries,
        state_lines=state_lines,
        groups=groups,
        derived=derived,
        blobs=blobs_of(items, ground),
        framework=framework,
        settings=settings,
        origins=(*opened.origins, *map(_origin, placing.taken)),
        taken=placing.taken,
        model_name=opened.model.name,
        model_arguments=tuple((p.name, scope.value(p.name)) for p in opened.model.parameters),
        not_kept=not_kept(items, scope),
        fillings=fillings_of(
            items, scope, (tensors, aliases, states, model_groups), (n for d in derived for n in (d.state, d.source))
        ),
        domains=domain_rules(items, scope),
        extended=opened.extended,
        families=families,
        wild=placing.wild,
    )
    check_carried(layout.blobs, framework, ground.files)
    check_known(opened.definitions, scope)
    unread = _unread(items, layout)
    check_known(unread, scope, with_dims=opened.layout.of != "any")
    check_places(unread, items, ground)
    check_names(items, ground, layout)
    check_meshes(layout)
    return layout


def _known(opened: OpenedLayout) -> ModelTensors:
    keep = opened.besides is not opened.model_items
    return ModelTensors.of(opened.model, opened.model_items, opened.scope, keep=keep)


def _can_fold(opened: OpenedLayout) -> bool:
    """True if a layout of any model treats tensors only as wholes."""
    if opened.layout.of != "any" or any(isinstance(i, nodes.Fill | nodes.FillStates) for i in opened.items):
        return False
    entries = [i for i in opened.items if isinstance(i, nodes.Entry)]
    groups = [i for i in opened.items if isinstance(i, nodes.Group)]
    if not all(i.of_model and not i.indices for i in groups) or any(i.indices for i in entries):
        return False
    states = [i for i in opened.items if isinstance(i, nodes.States) and i.shape is not None]
    if states and not groups and not (all(map(is_wild, entries)) and all(isinstance(i.shape, str) for i in states)):
        return False  # without groups, states are in the order of the lines of their tensors
    axes = [node for i in entries for node in walk(*(i.shape or ()))]
    is_live = any(isinstance(node, nodes.Pad) and node.kind == "live" for node in axes)
    splits = (split for node in axes if isinstance(node, nodes.Cut) for split in node.splits)
    return not is_live and all(split.mesh_axis != "tp" for split in splits)


def _unread(items: Iterable[nodes.LayoutItem], layout: Layout) -> list[nodes.Record]:
    """Lines that were not evaluated.

    Their condition does not hold, or no tensor is in their class.
    """
    read = {e.span for e in layout.entries} | {s.span for s in layout.state_lines}
    read |= {f.span for f in layout.files.values()}
    out: list[nodes.Record] = [i for i in items if isinstance(i, nodes.Entry | nodes.States) and i.shape is not None]
    out += [i for i in items if isinstance(i, nodes.Files) and i.form is not None]
    return [i for i in out if getattr(i, "span", nodes.NOWHERE) not in read]


def _origin(taken: GlobMatch) -> Note:
    """Number of tensors of a glob, for the list of decisions."""
    where = f"{taken.span.file}:{taken.span.line}"
    count = len(taken.names)
    return (
        taken.glob,
        count,
        f"tensor{'s' * (count != 1)} that {where} takes" if count else f"{where} matches no tensor",
    )


def _sizes(scope: Scope) -> dict[str, int]:
    """Every name that is an integer.

    Names that need an absent key of the config are left out.
    """
    return {n: v for n in [*scope.bindings, *scope.given] if isinstance(v := scope.value(n), int)}


def _reject_unknown_sizes(sizes: Mapping[str, Value], opened: OpenedLayout) -> None:
    """Report dims of tensors without a size: it must be given."""
    scope = opened.scope
    open_dims = {d.name for i in opened.besides if isinstance(i, nodes.Tensor) for d in i.dims if d.name}
    unknown = next((n for n in sizes if n not in scope.bindings and n not in open_dims), None)
    if unknown is not None:
        own = [p.name for p in opened.layout.parameters]
        close = nearest(unknown, sorted({*scope.bindings, *open_dims, *own}))
        others = [] if opened.layout.of == "any" else sorted({*scope.bindings, *open_dims}.difference(own))
        sizes_there = ("; sizes: " + ", ".join(others[:20])) if others else ""
        has = f"parameters of {opened.layout.name}: {in_short(own)}{sizes_there}"
        remedy = f"did you mean `{close}`?" if close else has
        known = [k.node for k in opened.library.known.values() if isinstance(k.node, nodes.Layout)]
        of = next((k for k in (opened.layout, *known) if unknown in {p.name for p in k.parameters}), None)
        if of is not None:
            call = f"{of.name}({unknown} = {sizes[unknown]})"
            remedy = f"`{unknown}` is a parameter of {of.name}: write it in the call, {call}"
        fail(
            "E115",
            f"-D {unknown}: neither model nor layout has a size of that name",
            Label("<command line>", where=f"-D {unknown}"),
            remedy=remedy,
        )


def _check_asserts(opened: OpenedLayout) -> None:
    for item in opened.definitions:
        if isinstance(item, nodes.Assert):
            if item.message:
                template(item.message, item.span)
            _check_assert(item, opened.scope)


def _check_assert(item: nodes.Assert, scope: Scope) -> None:
    """Check an assert.

    If it needs an absent key of the config, it has no effect.
    """
    if scope.lacks_config(item.condition) or scope.evaluate(item.condition):
        return
    said = f"`{print_expr(item.condition)}` does not hold"
    if item.message:
        said = render(closed(item.message, item.span, scope, frozenset()), {})
    fail("E160", said, at(item.span, "asserted here"))


def _call_text(opened: OpenedLayout) -> str:
    def shown(value: Value) -> str:
        return f'"{value}"' if isinstance(value, str) else str(value)

    return f"{opened.layout.name}({', '.join(f'{n} = {shown(v)}' for n, v in opened.arguments.items())})"


# ---- names for which the model has no tensor
# ---------------------------------------------------------------------------


def add_reason(
    found: Diagnostic, name: str, opened: OpenedLayout, tensors: Iterable[str], aliases: Mapping[str, str]
) -> None:
    """Add the reason to `found`, an E137.

    Raises E105 or E137 if a reason is known.
    """
    _left_out(found, name, opened)
    _of_another_part(found, name, opened, tensors)
    _of_another_model(found, name, opened)
    if name in aliases:  # of a group's member that is no tensor alone
        raise UcplError(evolve(found, remedy=for_alias(name, aliases))) from None


def _left_out(found: Diagnostic, name: str, opened: OpenedLayout) -> None:
    """Reason: the tensor's condition does not hold.

    Raises E137, or E105 if a config decides.
    """
    for item in opened.model_items:
        if not isinstance(item, nodes.Tensor | nodes.Alias) or item.when is None or item.path != name:
            continue
        condition = print_expr(item.when)
        open_now = not opened.scope.config and opened.scope.lacks_config(item.when)
        fail(
            "E105" if open_now else "E137",
            f"`{item.path}` is in the model when {condition}, which {'has no value' if open_now else 'does not hold'}",
            *found.labels,
            at(item.span, "its condition"),
            remedy="give the key in --config"
            if open_now
            else f"this line has other tensors, too: write it once with `{name}`, when {condition}, and once without",
        )


def _of_another_part(found: Diagnostic, name: str, opened: OpenedLayout, tensors: Iterable[str]) -> None:
    """Reason: the model has nothing under a used layout's prefix.

    Raises E137.
    """
    chain = opened.library.chain(opened.layout.name, opened.layout.span)
    known = {path.partition(".")[0] for path in tensors if "." in path}
    for use in [i for link in chain for i in link.node.items if isinstance(i, nodes.Use)]:
        if name.startswith(f"{use.name}.") and use.name not in known:
            parts = [i.name for i in opened.model.items if isinstance(i, nodes.Use)]
            close = nearest(use.name, parts)
            has = f"it uses {', '.join(parts)}" if parts else f"write `use ... as {use.name}` in the model, too"
            text = f"the model {opened.model.name} uses nothing as `{use.name}`"
            remedy = f"did you mean `{close}`?" if close else has
            fail("E137", text, at(use.span, "used here"), *found.labels, remedy=remedy)


def _of_another_model(found: Diagnostic, name: str, opened: OpenedLayout) -> None:
    """Reason: the tensor of an extended layout is of another model.

    This model does not extend that one. Raises E137.
    """
    node, library = opened.layout, opened.library
    for link in library.chain(node.name, node.span)[1:]:
        other = link.node.of
        paths = [i.path for i in link.node.items if isinstance(i, nodes.Entry)]
        if other not in (node.of, "any") and name in paths:
            bases = [] if node.of == "any" else library.models(library.model(node.of))
            if other not in [base.node.name for base in bases]:
                text = f"`{link.node.name}` is of {other}, and `{node.name}`, which extends it, of {node.of}"
                remedy = f"write `of {other}`" + (f", or let {node.of} extend {other}" if bases else "")
                fail("E137", text, at(node.span), *found.labels, remedy=remedy)


# ---- the mesh of a line's axes ---------------------------------------------------------------------------------------


Line = Entry | States


def check_meshes(layout: Layout) -> None:
    """Check the meshes of all lines.

    Raises: UcplError E218 for a mesh that does not exist, E219 for an axis of another.
    """
    lines: tuple[Line, ...] = (*layout.entries, *layout.state_lines)
    for line in lines:
        if line.storing.mesh:
            mesh = _mesh_of(line, layout)
            for axis, use in _axes(line, layout):
                _demand(line, axis, use, (mesh, layout))


def _mesh_of(line: Line, layout: Layout) -> Mesh:
    found = next((m for m in layout.meshes if m.name == line.storing.mesh), None)
    if found is None:
        fail(
            "E218",
            f"{_named(line)} is on mesh `{line.storing.mesh}`, and there is none of that name",
            at(line.span),
            remedy=_instead_of_mesh(line.storing.mesh, layout),
        )
    return found


def _instead_of_mesh(name: str, layout: Layout) -> str:
    named = [m.name for m in layout.meshes if m.name]
    axes = [a for m in layout.meshes for a in m.axes]
    if name in axes:
        return (
            f"take `on {name}` out: `{name}` is an axis of a mesh, and a line is on all of them. A cut over it is `@{name}`,"
            f" one of its ranks `at {name}[0]`"
        )
    return f"the meshes with a name are {', '.join(named)}" if named else f"take `on {name}` out: no mesh has a name"


def _axes(line: Line, layout: Layout) -> Iterator[tuple[str, str]]:
    """Mesh axes that a line uses, each with the use."""
    known = {a for m in layout.meshes for a in m.axes}
    cut = ax.mesh_axes_of(*line.shape) if not isinstance(line.shape, str) else ()
    yield from ((a, "is cut over") for a in cut if a in known)
    for axis in _dealt(line.indices, layout, frozenset()) if isinstance(line, Entry) else ():
        if layout.sizes.get(axis, 1) > 1:  # an index that one rank has all of is dealt to nobody
            yield axis, "is dealt over"
    yield from ((a, "uses a coordinate of") for a, _ in line.storing.at)
    yield from ((a, f"says `{line.storing.policy.word}` of") for a in line.storing.policy_axes)
    yield from ((a, "says `any` of") for a in line.storing.loose)
    names = line.storing.key.names if line.storing.key is not None else frozenset()
    yield from ((a, "names in its key") for a in sorted(names & known))


def _dealt(axes: tuple[ax.Axis, ...], layout: Layout, seen: frozenset[str]) -> Iterator[str]:
    """Mesh axes that deal the indices in brackets.

    They do so by their own cuts and by `index` statements.
    """
    yield from ax.mesh_axes_of(*axes)
    for name in ax.dims_of(*axes):
        if name in layout.indices and name not in seen:
            yield from _dealt((layout.indices[name],), layout, seen | {name})


def _demand(line: Line, axis: str, use: str, where: tuple[Mesh, Layout]) -> None:
    mesh, layout = where
    first = layout.mesh_of(axis)  # whose coordinates the axis has
    if first is None:
        return  # an axis of no mesh is refused where it cuts
    if axis not in mesh.axes:
        fail(
            "E219",
            f"{_named(line)} is on mesh `{mesh.name}` and {use} `{axis}`, an axis of {_called(first)}",
            at(line.span),
            remedy=f"mesh {mesh.name} has {', '.join(mesh.axes)}: take one of these, or leave `on {mesh.name}` out",
        )
    if _step(first, axis) != _step(mesh, axis) and layout.sizes.get(axis, 1) > 1:
        fail(
            "E219",
            f"{_named(line)} {use} `{axis}` on mesh `{mesh.name}`, where other ranks have its coordinates"
            f" than on {_called(first)}",
            at(line.span),
            remedy=f"give the axis of mesh {mesh.name} a name of its own: `let {mesh.name}_{axis} = {axis}`",
        )


def _step(mesh: Mesh, axis: str) -> int:
    """Distance of neighbours along an axis, in ranks."""
    return prod(mesh.degrees[mesh.axes.index(axis) + 1 :])


def _named(line: Line) -> str:
    return f"`{line.path}`" if isinstance(line, Entry) else "a state line"


def _called(mesh: Mesh) -> str:
    return f"mesh `{mesh.name}`" if mesh.name else f"the mesh `{' '.join(mesh.axes)}`"
