"""Storage of a layout's tensors, closed: files, clauses, groups, state lines, blobs.

The framework is included. Not here: the shapes in entries (entries.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NoReturn

from attrs import evolve

from ucpl.errors import fail
from ucpl.language import nodes, print_expr
from ucpl.language.walk import walk
from ucpl.layout import axes as ax
from ucpl.layout.layout import (
    BlobRule,
    Derivation,
    Entry,
    FileRule,
    Group,
    Layout,
    LogicalTensor,
    Policy,
    States,
    Storing,
)
from ucpl.layout.models import ModelGroups, trained_groups, unknown_tensor
from ucpl.layout.name_remedies import for_axis, for_place, nearest
from ucpl.layout.naming import Naming, naming_of
from ucpl.layout.patterns import axes_closed, check_flat, check_indices, check_no_flat, dims_in, reject_live
from ucpl.layout.remedies import UnknownAxis, for_rest
from ucpl.layout.scope import Scope, Value, at
from ucpl.layout.templates import PLACE_WORDS, Template, closed
from ucpl.records import define, frozen
from ucpl.registry import Format, format_named, formats

__all__ = [
    "Ground",
    "blobs_of",
    "check_carried",
    "check_names",
    "derived_of",
    "framework_of",
    "ground_of",
    "groups_of_layout",
    "is_there",
    "states_lines",
]


# ---- copies on ranks -------------------------------------------------------------------------------------------------


@frozen
class CopyPolicy:
    how: Policy = Policy.SAME  # how copies along `axes` are put together; same: there is nothing to put together
    axes: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()  # along these one is trusted


def copies_of(clauses: Iterable[nodes.Clause], mesh_axes: Set[str]) -> CopyPolicy:
    """Policies of copies along each axis.

    It is `same` for all that no clause names. Raises E148, E154.
    """
    said: dict[str, nodes.Clause] = {}
    for clause in (c for c in clauses if c.word == "copies"):
        for axis in clause.args[1]:
            _check_axis(axis, clause, mesh_axes)
            if axis in said:
                _two(f"the copies along `{axis}`", said[axis], clause)
            said[axis] = clause
    together = [c for c in said.values() if c.args[0] not in ("same", "any")]
    other = next((c for c in together if c.args[0] != together[0].args[0]), None)
    if other is not None:
        _two("how copies are put together", together[0], other)
    return CopyPolicy(
        Policy[together[0].args[0].upper()] if together else Policy.SAME,
        tuple(a for a, c in said.items() if c in together),
        tuple(a for a, c in said.items() if c.args[0] == "any"),
    )


def _check_axis(axis: str, clause: nodes.Clause, mesh_axes: Set[str]) -> None:
    if axis in mesh_axes:
        return
    word = clause.args[0]
    fail(
        "E148",
        f"`{word} @{axis}` speaks of copies along `{axis}`, which no mesh has",
        at(clause.span),
        remedy=for_axis(axis, sorted(mesh_axes), f"{word} @"),
        about=UnknownAxis(axis),
    )


def _two(what: str, one: nodes.Clause, other: nodes.Clause) -> None:
    words = one.args[0], other.args[0]
    axes = " ".join(f"@{a}" for a in dict.fromkeys((*one.args[1], *other.args[1])))
    fail(
        "E154",
        f"two clauses say {what}: `{words[0]}` and `{words[1]}`",
        at(one.span, words[0]),
        at(other.span, words[1]),
        remedy=f"keep one: `{words[0]} {axes}` or `{words[1]} {axes}`",
    )


# ---- the framework's settings ----------------------------------------------------------------------------------------

_DEGREES = ("dp", "tp", "pp", "ep", "edp", "fsdp")
_STAGES = {0: "none", 1: "optimizer states are cut", 2: "gradients, too", 3: "parameters, too"}


def check_settings(item: nodes.Framework) -> None:
    """Check framework and settings.

    Raises: UcplError E436 for an unknown framework, E159 for a setting without a name, E192 for an unknown one.
    """
    name = item.call.name
    if name not in formats():
        meant = next((one.name for one in formats().values() if name.lower() in one.other_names), "")
        close = meant or nearest(name, formats())
        fail(
            "E436",
            f"no framework is called `{name}`",
            at(item.span),
            remedy=(f"did you mean `{close}`? " if close else "")
            + f"one of {', '.join(formats())}; `framework torch()` writes files that the spec alone describes",
        )
    for argument in item.call.arguments:
        if argument.name is None:
            fail("E159", "settings of a framework have names", at(argument.span))
        if argument.name not in format_named(name).settings:
            _refuse(format_named(name), argument)


def check_setting_values(item: nodes.Framework, settings: Mapping[str, Value]) -> None:
    """Check values of settings.

    Raises: UcplError E192 for an unknown stage of ZeRO, and for a degree below 1.
    """
    format_named(item.call.name).check_settings(settings)
    for argument in item.call.arguments:
        name, value = argument.name or "", settings.get(argument.name or "")
        if isinstance(value, str) and (name == "stage" or name in _DEGREES):
            remedy = f"a number has no quotes: {name} = {value if value.isdecimal() else 1}"
            said = print_expr(argument.value)
            fail("E192", f"framework {item.call.name}({name} = {said}): it is a text", at(argument.span), remedy=remedy)
        if name == "stage" and value is not None and value not in _STAGES:
            stages = ", ".join(f"{n} ({what})" for n, what in _STAGES.items())
            remedy = f"the stages of ZeRO are {stages}: write, for one, stage = 1"
        elif name in _DEGREES and isinstance(value, int) and value < 1:
            remedy = f"a degree is 1 or more: write {name} = {name}, the size of the mesh axis"
        else:
            continue
        fail(
            "E192", f"framework {item.call.name}({name} = {value}): no {name} is that", at(argument.span), remedy=remedy
        )


def _refuse(own: Format, argument: nodes.Argument) -> NoReturn:
    known = own.settings
    text = argument.name or ""
    close = nearest(text, known)
    others = [other.name for other in formats().values() if text in other.settings]
    whose = f"it is one of {' and '.join(others)}; " if others else ""
    fail(
        "E192",
        f"framework {own.name}() has no setting `{text}`",
        at(argument.span),
        remedy=f"did you mean `{close}`?" if close else f"{whose}the settings of {own.name}() are {', '.join(known)}",
    )


# ---- files, clauses, groups, state lines -----------------------------------------------------------------------------

SCALED = ("x * scale", "scale * x")  # each element times the scale of its block

_OF_A_RANK = (
    ".distcp"  # which rank has written a chunk says nothing: a layout speaks of the folder, as `.metadata` does
)
_NO_FACTOR = (
    "write a sum, x - 1: a factor would scale the moments of a trained tensor, too;"
    " or x * scale, of a tensor that has a scale"
)

DEALT_MAX = 1 << 16  # ways in which a group is dealt

Clauses = tuple[nodes.Clause, ...]


def is_there(item: nodes.Entry | nodes.States, scope: Scope) -> bool:
    """True if the conditions of an entry or state line hold."""
    return all(scope.holds(c.args[0]) for c in item.clauses if c.word == "when")


def stated_clauses(item: nodes.Entry | nodes.States) -> Clauses:
    """The clauses of an entry or state line without its conditions."""
    return tuple(c for c in item.clauses if c.word != "when")


@define
class Ground:
    """Context of entries and state lines.

    It has names, files, index rules, and the variables that a place gives to templates.
    """

    scope: Scope
    files: dict[str, FileRule]
    indices: dict[str, ax.Axis]
    mesh_axes: frozenset[str]
    naming: Naming

    def template(self, text: str, span: nodes.Span, brackets: Iterable[str]) -> Template:
        """A closed template. `brackets`: the indices that the places it names have."""
        names = {n for b in brackets for n in (b, f"{b}.local", *ax.leaves_of(b, self.indices))}
        return closed(text, span, self.scope, PLACE_WORDS | self.mesh_axes | names)

    def storing(self, clauses: Clauses, span: nodes.Span, default: str, brackets: Iterable[str] = ()) -> Storing:
        """Clauses of a statement.

        `default`: the file of one that names none.
        """
        said = {c.word: c for c in clauses if c.word != "at"}
        name = said["in"].args[0] if "in" in said else default
        if name not in self.files:
            close = nearest(name, self.files)
            fail(
                "E151",
                f"no file is called `{name}`",
                at(said["in"].span if "in" in said else span),
                remedy=f"did you mean `{close}`?" if close else _of_no_file(name, self.files),
            )
        if "lossy" in said and "exact" in said:
            fail("E175", "`lossy` and `exact` on one line", *(at(said[word].span, word) for word in ("lossy", "exact")))
        copies = copies_of(clauses, self.mesh_axes)
        key = said.get("as")
        scaled = "value" in said and print_expr(said["value"].args[0]) in SCALED
        return Storing(
            file=name,
            key=self.template(key.args[0], key.span if key.span.line else span, brackets) if key else None,
            policy=copies.how,
            policy_axes=copies.axes,
            loose=copies.loose,
            at=self.coordinates([c for c in clauses if c.word == "at"]),
            mesh=said["on"].args[0] if "on" in said else "",
            dtype=said["dtype"].args[0] if "dtype" in said else None,
            lossy="lossy" in said,
            exact="exact" in said,
            value=self.affine(said["value"]) if "value" in said and not scaled else (1.0, 0.0),
            scaled=scaled,
        )

    def coordinates(self, clauses: list[nodes.Clause]) -> tuple[tuple[str, int], ...]:
        """Coordinates of a line: one of each axis that it names."""
        out: dict[str, tuple[int, nodes.Clause]] = {}
        for clause in clauses:
            axis, place = self.coordinate(clause)
            there, first = out.setdefault(axis, (place, clause))
            if there != place:
                fail(
                    "E149",
                    f"at {axis}[{there}] and at {axis}[{place}], and no rank is both",
                    at(first.span),
                    at(clause.span),
                    remedy=f"write the line twice, once for each coordinate of {axis}: a second line is a second home",
                )
        return tuple((axis, place) for axis, (place, _) in out.items())

    def coordinate(self, clause: nodes.Clause) -> tuple[str, int]:
        """`at pp[-1]`: a mesh axis and a coordinate on it."""
        axis, expr = clause.args
        if axis not in self.mesh_axes:
            remedy = for_place(axis, self.scope.mesh_axes, is_number=self.scope.knows(axis))
            about = UnknownAxis(axis) if not self.scope.knows(axis) else None  # a dim's name is no new axis
            fail("E148", f"at {axis}, which is no mesh axis", at(clause.span), remedy=remedy, about=about)
        degree = self.scope.size(axis, clause.span)
        place = self.scope.integer(expr)
        if not -degree <= place < degree:
            fail(
                "E149",
                f"at {axis}[{place}], but {axis} is {degree}",
                at(clause.span),
                remedy=f"coordinates of {axis} are 0 .. {degree - 1}; the last is {axis}[-1]",
            )
        return axis, place % degree

    def affine(self, clause: nodes.Clause) -> tuple[float, float]:
        """Coefficients of `a * x + b` from a `value` clause.

        The result is the stored number; x occurs once.
        """
        expr = clause.args[0]
        _check_x(expr, self.scope)
        values = []
        for x in (0, 1, 2):
            inner = Scope(given={**self.scope.given, "x": x}, bindings=self.scope.bindings, config=self.scope.config)
            values.append(inner.integer(expr))
        a, b = values[1] - values[0], values[0]
        if a == 0 or values[2] - values[1] != a:
            fail("E152", f"`value {print_expr(expr)}` is no a * x + b", at(clause.span))
        if a != 1:
            fail(
                "E153",
                f"`value {print_expr(expr)}` scales by {a}",
                at(clause.span),
                remedy=_NO_FACTOR,
            )
        if b == 0:
            remedy = "take it out; `value x - 1` is stored one less"
            fail("E190", "`value x` stores each number as it is", at(clause.span), remedy=remedy)
        return float(a), float(b)


def _of_no_file(name: str, files: Iterable[str]) -> str:
    """Error for a path behind `in`: it must be a name."""
    if "." in name or "/" in name:
        return f"`in` takes the name of a `file` line, not a path: {', '.join(files) or 'there is none yet'}"
    return f'write file {name} = torch "..." in the layout'


def _check_x(expr: nodes.Expr, scope: Scope) -> None:
    """Check that `value` has a sum of numbers and x.

    Raises: UcplError E101 of another name, E153 of a quotient.
    """
    for node in walk(expr):
        if isinstance(node, nodes.Name) and not node.path.startswith("config."):
            if node.path not in ("x", "scale") and not scope.knows(node.path):
                remedy = "write a sum, x - 1: `x` is each number of the tensor"
                if "scale" in node.path:
                    remedy = "`scale` is the scale of the tensor, by this word alone: value x * scale"
                fail("E101", f"no number is called `{node.path}`", at(node.span, "used here"), remedy=remedy)
        elif isinstance(node, nodes.Binary) and node.operator == "/":
            if any(isinstance(n, nodes.Name) and n.path == "x" for n in walk(node)):
                fail("E153", f"`value {print_expr(expr)}` divides x", at(node.span, "used here"), remedy=_NO_FACTOR)


MEMORY = "memory"  # a form: tensors of a rank by their keys; on a disk, it is a safetensors file


def ground_of(items: Iterable[nodes.LayoutItem], scope: Scope, indices: dict[str, ax.Axis]) -> Ground:
    """Files of a layout, and the other context of its statements."""
    items = list(items)
    mesh_axes = frozenset(a for i in items if isinstance(i, nodes.Mesh) for a in i.axes)
    ground = Ground(scope, {}, indices, mesh_axes, naming_of(items, scope, indices))
    brackets = brackets_of(items)
    known = [format_named(i.call.name) for i in items if isinstance(i, nodes.Framework)]
    for item in items:
        if isinstance(item, nodes.Files) and scope.holds(item.when):
            text = f"{item.template}.safetensors" if item.form == MEMORY else item.template
            path = ground.template(text, item.span, brackets) if item.form is not None else None
            is_chunked = any(one.stores_chunks(item.form) for one in known)
            if is_chunked and item.template.endswith(_OF_A_RANK):
                folder = item.template[: item.template.rfind("/") + 1]
                path = ground.template(f"{folder}.metadata", item.span, brackets)
            key = ground.template(item.key, item.span, brackets) if item.key is not None else None
            ground.files[item.name] = FileRule(item.name, item.form, path, key, item.span)
    return ground


def brackets_of(items: Iterable[nodes.LayoutItem]) -> tuple[str, ...]:
    """All names in brackets of entries and groups.

    A file's template may use them.
    """
    axes = [a for i in items if isinstance(i, nodes.Entry | nodes.Group) for a in i.indices]
    return tuple(dict.fromkeys(dims_in(axes)))


# ---- groups and states -----------------------------------------------------------------------------------------------


def groups_of_layout(
    items: Iterable[nodes.LayoutItem],
    ground: Ground,
    tensors: dict[str, LogicalTensor],
    entries: Iterable[Entry],
    model_groups: ModelGroups,
) -> dict[str, Group]:
    """Groups of the layout, with the members that it names."""
    stored = {e.path for e in entries}
    found: dict[str, Group] = {}
    for item in items:
        if not isinstance(item, nodes.Group):
            continue
        is_reversed = item.order == "reversed"
        dealt = 1 if item.order is None or item.order == "reversed" else ground.scope.integer(item.order)
        if not 1 <= dealt <= DEALT_MAX:
            fail("E145", f"order dealt {dealt}", at(item.span))
        if item.of_model:
            for name, members in trained_groups(model_groups, tensors):
                found[name] = Group(name, (), members, None, None, is_reversed, dealt, True, item.span)
            continue
        for m in item.members or ():
            if m not in stored and m not in tensors:
                unknown_tensor(m, sorted(stored), item.span)
        for w in item.without or ():
            if w in dict(model_groups):
                found = {name: _of_model(name, model_groups, item.span) for name, _ in model_groups} | found
            if w not in found:
                fail(
                    "E157",
                    f"no group is called `{w}`",
                    at(item.span),
                    remedy=for_rest(item.name, w, {*stored, *tensors}),
                )
        check_no_flat(item.indices, item.span)
        reject_live(item.indices, item.span, "an index")
        check_indices(item.indices, item.span)
        indices = axes_closed(item.indices, ground.scope, item.span)
        found[item.name] = Group(
            item.name, indices, item.members, item.without, item.stated, is_reversed, dealt, False, item.span
        )
    return found


def _of_model(name: str, model_groups: ModelGroups, span: nodes.Span) -> Group:
    """A group of the model, without a line in the layout."""
    return Group(name, (), dict(model_groups)[name], None, None, False, 1, True, span)


def states_lines(
    items: Iterable[nodes.LayoutItem],
    ground: Ground,
    groups: dict[str, Group],
    entries: Sequence[Entry],
    model_groups: ModelGroups,
) -> tuple[States, ...]:
    """State lines.

    Groups of the model that only a state line names are added to `groups`. In all groups, tensors that an entry packs
    become that entry.
    """
    items = list(items)
    brackets = brackets_of(items)
    out: list[States] = []
    for item in items:
        if not isinstance(item, nodes.States) or item.shape is None or not is_there(item, ground.scope):
            continue
        named = _named_groups(item, groups, dict(model_groups))
        for g in named or ():
            if g not in groups:
                groups[g] = _of_model(g, model_groups, item.span)
        if not isinstance(item.shape, str) and len(item.shape) != 1:
            fail("E158", "a state line stores one axis, as in pad(flat(each), 2 * dp)@dp", at(item.span))
        if not isinstance(item.shape, str):
            check_flat(item.shape[0], item.span)
            reject_live(item.shape, item.span, "a flat buffer")
        buckets = next((ground.scope.integer(c.args[0]) for c in item.clauses if c.word == "buckets"), None)
        clauses = tuple(c for c in stated_clauses(item) if c.word != "buckets")
        default = "optim" if "optim" in ground.files else "weights"
        shape = item.shape if isinstance(item.shape, str) else axes_closed(item.shape, ground.scope, item.span)
        storing = ground.storing(clauses, item.span, default, brackets)
        if not isinstance(shape, str) and storing.key is None and ground.files[storing.file].form is not None:
            fail(
                "E158",
                "a flat has no key in its file",
                at(item.span),
                remedy='write its key, as "{state}"; as "" for a file that is nothing else',
            )
        names = item.names and tuple(dict.fromkeys(item.names))  # a repeated name is meant once
        out.append(States(names, named, shape, storing, buckets, item.span))
    if packs := _packs(entries):
        written = dict(groups)  # a group that names the tensors of a pack does not name the pack
        groups.update(
            (name, _with_packs(group, packs, _named_apart(group, written, out))) for name, group in written.items()
        )
    return tuple(out)


def _named_apart(group: Group, groups: Mapping[str, Group], lines: Iterable[States]) -> Set[str]:
    """Members of groups of the layout with the same states."""
    if not group.of_model:
        return frozenset()
    states: dict[str, set[str]] = {}
    for line in lines:
        for g in line.groups or ():
            states.setdefault(g, set()).update(line.names or ("*",))
    mine = states.get(group.name, set())
    return {
        m
        for g, other in groups.items()
        if not other.of_model and mine & states.get(g, set())
        for m in other.members or ()
    }


def _packs(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Packs of each tensor that has no entry of its own."""
    stored = {e.path for e in entries}
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        for path in dict.fromkeys(entry.targets.values()) if len(entry.targets) > 1 else ():
            if path not in stored:
                found.setdefault(path, []).append(entry)
    return found


def _with_packs(group: Group, packs: dict[str, list[Entry]], apart: Set[str]) -> Group:
    """A group with entries in place of the tensors that they pack.

    `apart`: entries that are not its own. Raises E136 if the group has only some of an entry's tensors.
    """
    if group.members is None:
        return group
    own = set(group.members)
    packs = {m: [e for e in found if e.path not in apart] for m, found in packs.items()}
    for entry in (e for m in group.members for e in packs.get(m, ())):
        missing = [path for path in entry.targets.values() if path not in own]
        if missing and entry.path not in own:
            there = next(m for m in entry.targets.values() if m in own)
            fail(
                "E136",
                f"`{there}` is in the group `{group.name}` and `{missing[0]}` is not, and `{entry.path}` stores them together",
                at(group.span),
                at(entry.span, "packed here"),
                remedy=f"a pack is one member of a group: put {', '.join(missing)} in `{group.name}`, too, or name"
                f" `{entry.path}` in a group of the layout",
            )
    named = (path for m in group.members for path in ([e.path for e in packs[m]] if packs.get(m) else [m]))
    return evolve(group, members=tuple(dict.fromkeys(named)))


def check_names(items: Iterable[nodes.LayoutItem], ground: Ground, layout: Layout) -> None:
    """Check names of a state line: a dim must be an index.

    Raises E122.
    """
    said = [i for i in items if isinstance(i, nodes.States) and i.shape is not None and is_there(i, ground.scope)]
    for item, line in zip(said, layout.state_lines, strict=True):
        ground.naming.check_line(item, line, layout.entries, (layout.placed, layout.groups), layout.members)


def _named_groups(
    item: nodes.States, groups: dict[str, Group], of_model: dict[str, tuple[str, ...]]
) -> tuple[str, ...] | None:
    """Groups that a state line names; `*` is all of them."""
    if item.groups == ("*",):
        return tuple(g for g, group in groups.items() if group.of_model) or tuple(of_model) or None
    for g in item.groups or ():
        if g not in groups and g not in of_model:
            close = nearest(g, groups)
            fail(
                "E157",
                f"no group is called `{g}`",
                at(item.span),
                remedy=f"did you mean `{close}`?" if close else "",
            )
    return item.groups


def not_kept(items: Iterable[nodes.LayoutItem], scope: Scope) -> frozenset[str]:
    """States that the layout stores as `none`; `*` is all of them."""
    return frozenset(
        name
        for item in items
        if isinstance(item, nodes.States) and item.shape is None and is_there(item, scope)
        for name in (item.names if item.names is not None else ("*",))
    )


# ---- data that is no tensor
# ---------------------------------------------------------------------------------------------


def framework_of(items: Iterable[nodes.LayoutItem], scope: Scope) -> tuple[str, dict[str, Value]]:
    """The framework that writes all other data, with its settings.

    The last statement holds.
    """
    said = [i for i in items if isinstance(i, nodes.Framework)]
    if not said:
        return "", {}
    check_settings(said[-1])
    settings = {a.name: scope.evaluate(a.value) for a in said[-1].call.arguments if a.name is not None}
    check_setting_values(said[-1], settings)
    return said[-1].call.name, settings


def derived_of(items: Iterable[nodes.LayoutItem], scope: Scope) -> tuple[Derivation, ...]:
    """Derived states.

    Raises: UcplError E193 if derived states form a circle.
    """
    said = [i for i in items if isinstance(i, nodes.Derive) and scope.holds(i.when)]
    of = {item.state: item for item in said}
    for item in said:
        chain = [item]
        while (before := of.get(chain[-1].source)) is not None and before not in chain:
            chain.append(before)
        if before is item:
            fail(
                "E193",
                f"`{item.state}` is derived from itself: {' from '.join([item.state, *(c.source for c in chain)])}",
                *(at(c.span) for c in chain),
                remedy="one of them is stored, by an entry or a state line: take its `derive` out",
            )
    return tuple(Derivation(i.state, i.source) for i in said)


# ---- blobs -----------------------------------------------------------------------------------------------------------

_ACTING = ("in", "as", "at", "when")


def blobs_of(items: Iterable[nodes.LayoutItem], ground: Ground) -> tuple[BlobRule, ...]:
    """Blobs.

    Raises: UcplError E148 for an axis of no mesh, E190 for a clause that has nothing to act on.
    """
    out = []
    for item in items:
        if not isinstance(item, nodes.Blob):
            continue
        idle = next((c for c in item.clauses if c.word not in _ACTING), None)
        if idle is not None:
            fail(
                "E190",
                f"`{idle.args[0] if idle.word == 'copies' else idle.word}` speaks of tensors, and a blob is none",
                at(idle.span if idle.span.line else item.span),
                remedy="take it out; a blob has the clauses `in`, `as`, `at` and `when`",
            )
        if not all(ground.scope.holds(c.args[0]) for c in item.clauses if c.word == "when"):
            continue
        for axis in item.mesh_axes:
            if axis not in ground.mesh_axes:
                fail(
                    "E148",
                    f"`blob {item.name} @{axis}`: `{axis}` is no mesh axis",
                    at(item.span),
                    remedy=for_axis(axis, ground.scope.mesh_axes),
                    about=UnknownAxis(axis),
                )
        clauses = tuple(c for c in item.clauses if c.word != "when")
        storing = ground.storing(clauses, item.span, "meta" if "meta" in ground.files else "weights")
        key = storing.key or ground.template("{name}", item.span, ())
        out.append(BlobRule(item.name, item.mesh_axes, item.fate, storing.file, key, storing.at, item.span))
    return tuple(out)


def check_carried(blobs: Iterable[BlobRule], framework: str, files: Mapping[str, FileRule]) -> None:
    """Check that each blob is carried.

    Raises UcplError E237 if a framework's store does so without help, or if a file cannot.
    """
    for blob in blobs:
        if framework and not format_named(framework).is_of_a_spec:  # other files have only the layout's tensors
            fail(
                "E237",
                f"`blob {blob.name}` in a layout of framework {framework}(), whose store has data that is no tensor",
                at(blob.span),
                remedy="take the line out: schedules, counters, the loss scaler and client_state go over without a line;"
                " `--drop NAME` leaves a key of client_state out",
            )
        if files[blob.file].form in ("safetensors", "memory"):
            fail(
                "E237",
                f"`blob {blob.name}` in file `{blob.file}`, and a safetensors file has tensors alone",
                at(blob.span),
                remedy='put it into a file of its own: file meta = torch "meta_{rank}.pt"',
            )
