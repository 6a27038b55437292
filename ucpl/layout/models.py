"""Statements of a model, closed: tensors, aliases, states and parameter groups."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from operator import is_
from typing import NoReturn

from attrs import evolve, field

from ucpl.errors import UcplError, fail
from ucpl.language import nodes, print_expr, print_item, worded
from ucpl.language.walk import walk
from ucpl.layout.arithmetic import NotWhole
from ucpl.layout.brackets import Indices, chosen
from ucpl.layout.by_index import whole_name
from ucpl.layout.globs import Globs, literals
from ucpl.layout.layout import LogicalState, LogicalTensor
from ucpl.layout.name_remedies import for_name, nearest
from ucpl.layout.remedies import CONFIG_KEYS, for_extent, for_open_dim, for_rest, for_tensor
from ucpl.layout.scales import with_scalings
from ucpl.layout.scope import Scope, UnknownNumber, at
from ucpl.records import define, frozen

__all__ = [
    "Alike",
    "ModelGroups",
    "ModelTensors",
    "UnknownTensor",
    "aliases_of",
    "check_digits",
    "check_sizes",
    "divided",
    "for_alias",
    "groups_of",
    "states_of",
    "states_once",
    "tensors_of",
    "trained_groups",
    "unknown_tensor",
]

TENSOR_LIMIT = 4_000_000
ELEMENTS_LIMIT = 1 << 61

ModelGroups = tuple[tuple[str, tuple[str, ...]], ...]  # (group, its members)


@frozen
class UnknownTensor:
    """Name of an E137: no tensor of the model has it.

    A caller that knows the reason adds it.
    """

    name: str


Facts = tuple[
    tuple[int, ...], object, str | None
]  # counts, the other facts of a model, and the family in another checkpoint
Alike = dict[tuple[str, Facts], list[str]]  # by the name without its numbers


def divided(model: nodes.Model) -> tuple[tuple[nodes.Tensor, ...], nodes.Model]:
    """The plain tensors of a model, and the model without them.

    A plain tensor has a name, sizes, a type and a kind. A model of files has tens of thousands: a search for other
    statements is faster without them. If one tensor has more than that, none is plain.
    """
    others: list[nodes.ModelItem] = []
    plain: list[nodes.Tensor] = []
    seen: dict[int, bool] = {}  # by identity: a model of files has one record for all dims of a shape
    for item in model.items:
        if isinstance(item, nodes.Tensor):
            dims = item.dims
            if id(dims) not in seen:
                seen[id(dims)] = all(dim.name is None and dim.range is None for dim in dims)
            if item.when is not None or item.scaling is not None or not seen[id(dims)]:
                return (), model
            plain.append(item)
        elif _is_of_wholes(item):
            others.append(item)
        else:
            return (), model
    return (tuple(plain), evolve(model, items=tuple(others))) if model.extends is None else ((), model)


def _is_of_wholes(item: nodes.ModelItem) -> bool:
    """True if a statement has names of tensors, and of no dims."""
    match item:
        case nodes.Alias(when=None) | nodes.Group() | nodes.DefaultDtype() | nodes.State(without=()):
            return True
    return False


@define(eq=False, slots=False)
class ModelTensors:
    """The tensors of a given model, for both sides of a plan.

    Their dims are numbers, so no layout changes one of them. `alike`: by named tensors and groups.
    """

    items: Sequence[nodes.ModelItem]
    tensors: dict[str, LogicalTensor]
    alike: dict[object, Alike] = field(factory=dict)

    @classmethod
    def of(cls, model: nodes.Model, items: Sequence[nodes.ModelItem], scope: Scope, *, keep: bool) -> ModelTensors:
        """They are made once while the model lives.

        keep: no layout changes one of them.
        """
        known = _KEPT.get(id(model))
        if known is not None and len(known.items) == len(items) and all(map(is_, known.items, items)):
            return known
        made = cls(items, tensors_of(items, scope, families=True))
        if keep:
            _KEPT[id(model)] = made
            weakref.finalize(model, _KEPT.pop, id(model), None)
        return made


_KEPT: dict[int, ModelTensors] = {}  # of models that live


def tensors_of(items: Sequence[nodes.ModelItem], scope: Scope, *, families: bool = False) -> dict[str, LogicalTensor]:
    """All tensors of a model, by name.

    families: the scope learns the sizes of dims without names later, those of families once (`with_sizes`).
    """
    default = next((i.name for i in reversed(items) if isinstance(i, nodes.DefaultDtype)), None)
    found: dict[str, LogicalTensor] = {}
    numbers: dict[int, _Numbers | None] = {}  # by identity: a model of files has one record for all dims of a shape
    for item in items:
        if not isinstance(item, nodes.Tensor) or (item.when is not None and not scope.holds(item.when)):
            continue
        if item.path in found:
            fail(
                "E130",
                f"tensor `{item.path}` is defined twice",
                at(item.span, "again here"),
                at(found[item.path].span, "first here"),
            )
        if id(item.dims) not in numbers:
            numbers[id(item.dims)] = _Numbers.of(item)
        known = numbers[id(item.dims)]
        found[item.path] = tensor = known.tensor(item, default) if known else _tensor(item, default, scope, items)
        if known and not families:
            scope.given.update(zip(tensor.dims, tensor.counts, strict=True))
        if len(found) > TENSOR_LIMIT:
            fail("E131", f"a model of more than {TENSOR_LIMIT} tensors", at(item.span))
    return with_state_types(items, with_scalings(items, found, scope))


def _tensor(
    item: nodes.Tensor, default: str | None, scope: Scope, items: Sequence[nodes.ModelItem] = ()
) -> LogicalTensor:
    """One tensor.

    `items`: of the complete model, so that all open sizes are reported at once.
    """
    names: list[str] = []
    indices: list[Indices] = []  # those that the tensor has, of each dim
    for position, dim in enumerate(item.dims):
        name, size = _dimension(item, position, scope, items)
        if size < 0:
            fail("E132", f"dim `{name}` of `{item.path}` is {size}", *scope.labels_at(name, at(dim.span)))
        if name in names:
            fail(
                "E133",
                f"`{item.path}` has dim `{name}` twice",
                at(dim.span, "second time"),
                remedy=f"give the second one a name of its own, as in `dim {name}2 = {name}`",
            )
        names.append(name)
        indices.append(range(size) if dim.range is None else chosen(dim.range, name, size, scope))
    counts = tuple(map(len, indices))
    if prod(counts) > ELEMENTS_LIMIT:
        fail("E106", f"`{item.path}` has {prod(counts)} elements", at(item.span))
    return LogicalTensor(
        item.path,
        tuple(names),
        counts,
        tuple(indices),
        item.dtype or default,
        item.kind,
        span=item.span,
        is_void=any(d.range is not None and not has for d, has in zip(item.dims, indices, strict=True)),
    )


@frozen
class _Numbers:
    """Dims that are numbers.

    A model of files has tens of thousands of tensors with them.
    """

    counts: tuple[int, ...]
    indices: tuple[Indices, ...]
    ends: tuple[str, ...]  # of the dims' names

    @classmethod
    def of(cls, item: nodes.Tensor) -> _Numbers | None:
        """None if a dim has a name or a range."""
        if any(dim.name is not None or dim.range is not None for dim in item.dims):
            return None
        counts = tuple([dim.size or 0 for dim in item.dims])
        if prod(counts) > ELEMENTS_LIMIT:
            fail("E106", f"`{item.path}` has {prod(counts)} elements", at(item.span))
        return cls(counts, tuple(map(range, counts)), tuple([f"#{n}" for n in range(len(counts))]))

    def tensor(self, item: nodes.Tensor, default: str | None) -> LogicalTensor:
        path = item.path
        names = tuple([path + end for end in self.ends])
        return LogicalTensor(path, names, self.counts, self.indices, item.dtype or default, item.kind, span=item.span)


def _dimension(item: nodes.Tensor, position: int, scope: Scope, items: Sequence[nodes.ModelItem]) -> tuple[str, int]:
    """Name and size of one dim.

    One without a name has one that no text can write.
    """
    dim = item.dims[position]
    if dim.name is not None:
        if not scope.knows(dim.name):
            _reject_no_dims(items, scope)
            fail(
                "E101",
                f"`{item.path}` has a dim `{dim.name}` that has no size",
                at(dim.span, "named here"),
                remedy=_no_dim(item, position, items)
                or for_open_dim(dim.name, scope.names(), _open_dims(items, scope)),
                about=UnknownNumber(dim.name),
            )
        try:
            return dim.name, scope.size(dim.name, dim.span)
        except UcplError as error:
            found = error.diagnostics[0]
            sizes = found.about.value if isinstance(found.about, NotWhole) else None
            if isinstance(sizes, list) and all(isinstance(one, int) for one in sizes):
                remedy = _by_which(item, dim.name, len(sizes), scope, items)
                raise UcplError(evolve(found, remedy=remedy or found.remedy)) from None
            raise
    name = f"{item.path}#{position}"
    scope.given[name] = size = dim.size or 0
    return name, size


def _no_dim(item: nodes.Tensor, position: int, items: Sequence[nodes.ModelItem]) -> str:
    return for_extent(item, position, {i.path for i in items if isinstance(i, nodes.Tensor)})


def _reject_no_dims(items: Sequence[nodes.ModelItem], scope: Scope) -> None:
    """Report a word among the dims that is probably none.

    A key of a config may be a dim without a size. Raises: UcplError E101.
    """
    for item in items:
        for position, dim in enumerate(item.dims if isinstance(item, nodes.Tensor) and scope.holds(item.when) else ()):
            if dim.name is None or dim.name in CONFIG_KEYS or scope.knows(dim.name):
                continue
            assert isinstance(item, nodes.Tensor)
            if remedy := _no_dim(item, position, items):
                message = f"`{item.path}` has a dim `{dim.name}` that has no size"
                fail("E101", message, at(dim.span, "named here"), remedy=remedy)


def check_sizes(items: Sequence[nodes.ModelItem], rules: Iterable[nodes.Record], scope: Scope) -> None:
    """Check that each dim of an `index` statement has a size.

    A digit of another is fine, too. Raises: UcplError E101, as its tensor does.
    """
    dealt = [rule for rule in rules if isinstance(rule, nodes.Index)]
    digits = {d.name for rule in dealt for d in walk(rule.axis) if isinstance(d, nodes.Dim) and d.name != rule.name}
    unknown = {rule.name for rule in dealt if not scope.knows(rule.name)} - digits
    for item in items if unknown else ():
        if isinstance(item, nodes.Tensor) and scope.holds(item.when):
            for position, dim in enumerate(item.dims):
                if dim.name in unknown:
                    _dimension(item, position, scope, items)


def check_digits(items: Iterable[nodes.ModelItem]) -> None:
    """Check that an `index` of a model has digits alone.

    Raises: UcplError E201.
    """
    for rule in items:
        if isinstance(rule, nodes.Index) and (
            cut := next((s for s in walk(rule.axis) if isinstance(s, nodes.Split)), None)
        ):
            fail(
                "E201",
                f"`index {rule.name}` of a model is cut over `{cut.mesh_axis}`, and a model has no ranks",
                at(rule.span),
                remedy="put the line into the layouts with these ranks",
            )


def _by_which(item: nodes.Tensor, name: str, count: int, scope: Scope, items: Sequence[nodes.ModelItem]) -> str:
    """Remedy for a dim whose size is a list.

    It names dims with as many indices.
    """
    said = scope.bindings.get(name)
    is_key = isinstance(said, nodes.Name) and said.path.startswith("config.")
    if said is None or not (is_key or isinstance(said, nodes.List)):
        return ""
    sizes = print_expr(said)

    def line(by: str) -> str:
        return worded(said.span, f"{name} = {sizes} by {by}", f"{name}[{by}] = {sizes}")

    known = [d.name for i in items if isinstance(i, nodes.Tensor) for d in i.dims if d.name and d.name != name]
    new = ""
    fitting = [n for n in dict.fromkeys(known) if _is(n, count, scope)]
    mine = [n for n in fitting if n in {d.name for d in item.dims}]
    why = "a dim with a size for each index of another names that one"
    if len(mine or fitting) > 1:
        return f"{why}: {' or '.join(f'`dim {line(n)}`' for n in mine or fitting)}, which have {count} indices each"
    if not fitting:
        new = next(n for n in ("s", "stage", f"{name}_index") if not scope.knows(n))
        why = f"{why}, and no dim here has {count} indices"
    one = next(iter(mine or fitting), "") or new
    tensor = "" if mine else "\n       " + print_item(evolve(item, dims=(nodes.Dimension(one), *item.dims)))
    lines = f"{new} = {count}, {line(one)}" if new else line(one)
    return f"{why}\nwrite: dim {lines}{tensor}"


def _is(name: str, count: int, scope: Scope) -> bool:
    """True if a dim has that many indices.

    An error in another dim is reported there.
    """
    try:
        return scope.knows(name) and scope.value(name) == count
    except UcplError:
        return False


def _open_dims(items: Iterable[nodes.ModelItem], scope: Scope) -> list[str]:
    """Dims of a model's tensors that nothing gives a size."""
    named = (d.name for i in items if isinstance(i, nodes.Tensor) for d in i.dims if d.name is not None)
    return [name for name in dict.fromkeys(named) if not scope.knows(name)]


def aliases_of(items: Iterable[nodes.ModelItem], tensors: dict[str, LogicalTensor], scope: Scope) -> dict[str, str]:
    """Second names of tensors, each with the first."""
    found: dict[str, str] = {}
    for item in items:
        if not isinstance(item, nodes.Alias) or not scope.holds(item.when):
            continue
        if item.owner not in tensors:
            remedy = for_name(item.owner, tensors, "")
            remedy = remedy or for_tensor(item.owner, tensors, "name the tensor that it is the same as")
            fail("E135", f"alias `{item.path}` of `{item.owner}`, which is no tensor", at(item.span), remedy=remedy)
        if item.path in tensors or item.path in found:
            fail("E130", f"`{item.path}` is defined twice", at(item.span, "again here"))
        found[item.path] = item.owner
    return found


def states_of(items: Iterable[nodes.ModelItem]) -> tuple[LogicalState, ...]:
    return tuple(
        LogicalState(name, item.dtype, item.scalar, item.groups, bool(item.without))
        for item in items
        if isinstance(item, nodes.State)
        for name in item.names
    )


def states_once(items: Iterable[nodes.ModelItem]) -> list[nodes.ModelItem]:
    """One statement for a state that several models define.

    One of the models uses the others; the state is of the groups of them all. Raises: UcplError E008.
    """
    items = list(items)
    lines: dict[str, list[nodes.State]] = {}
    for item in items:
        if isinstance(item, nodes.State):
            for name in item.names:
                lines.setdefault(name, []).append(item)
    out: list[nodes.ModelItem] = []
    for item in items:
        if not isinstance(item, nodes.State) or all(len(lines.get(name, ())) == 1 for name in item.names):
            out.append(item)
            continue
        for name in item.names:
            if said := lines.pop(name, None):  # its first place
                out.append(_united(name, said))
    return out


def _united(name: str, said: Sequence[nodes.State]) -> nodes.State:
    """One line for several.

    Its own type is the outermost model's, and those of used models are of their tensors.
    """
    first = min(said, key=lambda s: len(s.within.split(".")) if s.within else 0)
    for other in said:
        if other.scalar != first.scalar or (first.scalar and other.dtype != first.dtype):
            told = at(other.span, _of_state(other)), at(first.span, _of_state(first))
            remedy = "give it one form in all models, or another name in one of them"
            fail("E008", f"the state `{name}` is defined twice, differently", *told, remedy=remedy)
    groups = dict.fromkeys(g for s in said for g in s.groups or ())
    typed = tuple(dict.fromkeys(t for s in said for t in (*s.typed, *_typed_within(s, first, said))))
    without = tuple(dict.fromkeys(t for s in said for t in s.without))
    return evolve(
        first,
        names=(name,),
        typed=typed,
        without=without,
        groups=None if any(s.groups is None for s in said) else tuple(groups),
    )


def _typed_within(one: nodes.State, first: nodes.State, said: Sequence[nodes.State]) -> tuple[nodes.TypedOf, ...]:
    """The type of a used model's line, if the outer type differs.

    It is written `dtype f32 of "eye.*"`.
    """
    around = [s for s in said if not s.within or one.within.startswith(f"{s.within}.")]
    outer = max(around, key=lambda s: len(s.within), default=first)
    if one is first or one.dtype == outer.dtype:
        return ()
    return (nodes.TypedOf(one.dtype, (f"{one.within}.*",), span=one.span),)


def _of_state(item: nodes.State) -> str:
    return f"{item.dtype}{' scalar' if item.scalar else ''} here"


def groups_of(items: Sequence[nodes.ModelItem], tensors: dict[str, LogicalTensor]) -> ModelGroups:
    """The parameter groups that the model names. Raises E136, E137, E157, E190."""
    found: list[tuple[str, tuple[str, ...]]] = []
    seen: dict[str, str] = {}
    for item in items:
        if not isinstance(item, nodes.Group):
            continue
        _check_plain(item)
        members = item.members
        if members is None:
            for name in item.without or ():
                if name not in dict(found):
                    fail(
                        "E157", f"no group is called `{name}`", at(item.span), remedy=for_rest(item.name, name, tensors)
                    )
            out = {m for g, ms in found for m in ms if g in (item.without or ())}
            members = tuple(p for p, t in tensors.items() if t.kind == "parameter" and p not in out)
        for m in members:
            if m not in tensors:
                unknown_tensor(m, tensors, item.span, _no_member(m, items, tensors))
            if m in seen:
                fail("E136", f"`{m}` is in groups `{seen[m]}` and `{item.name}`", at(item.span))
            seen[m] = item.name
        found.append((item.name, members))
    _check_groups(items, [name for name, _ in found], tensors)
    return tuple(found)


def _no_member(name: str, items: Iterable[nodes.ModelItem], tensors: Iterable[str]) -> str:
    """Remedy for a second name, or an entry's name in layouts."""
    said = for_alias(name, {i.path: i.owner for i in items if isinstance(i, nodes.Alias)})
    if said or nearest(name, tensors) or "*" in name:
        return said
    return f"a model's group has tensors of the model, and entries of layouts are members there: {', '.join(list(tensors)[:6])}"


def for_alias(name: str, aliases: Mapping[str, str]) -> str:
    """Of a member that is a second name; else empty."""
    owner = aliases.get(name)
    return f"`{name}` is a second name of `{owner}`, which is trained under its own: name `{owner}`" if owner else ""


def _check_plain(item: nodes.Group) -> None:
    """Check that a model's group has members alone.

    The order of a buffer is a layout's. Raises E190.
    """
    what = "an order" if item.order is not None else "an index" if item.indices else "a file" if item.stated else ""
    if what:
        remedy = "a model's group has members alone: say it in the layout, `group g = a, b  order reversed`"
        fail(
            "E190",
            f"the group `{item.name}` of a model has {what}, which nothing acts on",
            at(item.span),
            remedy=remedy,
        )


def _check_groups(items: Sequence[nodes.ModelItem], names: Sequence[str], tensors: Collection[str]) -> None:
    """Check that the groups of states are groups of the model.

    Raises E157.
    """
    for item in items:
        for name in (item.groups or ()) if isinstance(item, nodes.State) else ():
            if name not in names:
                of_tensor = name in tensors or any(isinstance(i, nodes.Tensor) and i.path == name for i in items)
                remedy = (_some_tensors(item, name) if of_tensor else "") or (
                    f"`{name}` is a tensor, and `for` has groups here: group {name}_only = {name}"
                    if of_tensor
                    else for_name(name, names, f"define it: `group {name} = ...`, and its members")
                )
                fail("E157", f"no group is called `{name}`", at(item.span), remedy=remedy)


def _some_tensors(item: nodes.ModelItem, name: str) -> str:
    """Remedy for tensors of a `without` clause before it, or ""."""
    if not isinstance(item, nodes.State) or len(item.without) != 1 or item.without[0].of is not None:
        return ""
    dims = " ".join(item.without[0].dims)
    line = (
        f"state {', '.join(item.names)} : {item.dtype or 'f32'} without {dims} for {', '.join(item.groups or (name,))}"
    )
    return f"the tensors that lack a dim come after it\nwrite: {line}"


def trained_groups(groups: ModelGroups, tensors: dict[str, LogicalTensor]) -> ModelGroups:
    """Parameter groups of the model.

    If it names none, one of all trained parameters.
    """
    return groups or (("parameters", tuple(p for p, t in tensors.items() if t.kind == "parameter")),)


def unknown_tensor(name: str, tensors: Iterable[str], span: nodes.Span, remedy: str = "") -> NoReturn:
    fail(
        "E137",
        f"no tensor is called `{name}`",
        at(span, "named here"),
        remedy=remedy or for_tensor(name, tensors),
        about=UnknownTensor(name),
    )


# ---- the type of each state ------------------------------------------------------------------------------------------


def with_state_types(items: Iterable[nodes.ModelItem], tensors: dict[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """Tensors with the types of their states, if these differ from others'.

    Raises: UcplError E008, E127, E137, E191.
    """
    items = list(items)
    said = [item for item in items if isinstance(item, nodes.State) and item.typed]
    if not said:
        return tensors
    named = {whole_name(item.path) for item in items if isinstance(item, nodes.Tensor)}
    kinds = {whole_name(path): t.kind for path, t in tensors.items()}
    trained = {path: whole_name(path) for path, t in tensors.items() if t.kind == "parameter"}
    found: dict[str, dict[str, str]] = {}
    for item in said:
        by_name, globs = _named(item), [(p, t) for t in item.typed for p in t.of if "*" in p]
        _check_trained(item, by_name, named, kinds)
        for pattern, typed in globs:
            if not any(Globs([tuple(pattern.split("*"))]).of(name) for name in named):
                first = " ".join(sorted(named)[:4])
                fail(
                    "E137",
                    f"no tensor is called as `{pattern}`",
                    at(typed.span, "named here"),
                    remedy=f"a star is a part of names that there are: {first}, ...",
                )
        finder = Globs([tuple(pattern.split("*")) for pattern, _ in globs])
        for path, name in trained.items():
            one = by_name.get(name) or _most_literal(name, [globs[i] for i in finder.of(name)])
            if one is not None:
                found.setdefault(path, {}).update(dict.fromkeys(item.names, one.dtype))
    return {
        path: evolve(tensor, state_dtypes=tuple(found[path].items())) if path in found else tensor
        for path, tensor in tensors.items()
    }


def _named(item: nodes.State) -> dict[str, nodes.TypedOf]:
    """Names without a star. Raises E008 where one has two types."""
    out: dict[str, nodes.TypedOf] = {}
    for typed in item.typed:
        for name in typed.of:
            first = out.setdefault(name, typed)
            if first is not typed:
                fail(
                    "E008",
                    f"{' and '.join(item.names)} of `{name}` {'has' if len(item.names) == 1 else 'have'} two types",
                    at(first.span, first.dtype),
                    at(typed.span, typed.dtype),
                    remedy="take the name out of one of the two lists",
                )
    return {name: typed for name, typed in out.items() if "*" not in name}


def _check_trained(
    item: nodes.State, by_name: dict[str, nodes.TypedOf], named: set[str], kinds: Mapping[str, str]
) -> None:
    """Check that each name is a parameter, under any condition.

    Raises E137, E191.
    """
    for name, typed in by_name.items():
        if name not in named:
            fail(
                "E137", f"no tensor is called `{name}`", at(typed.span, "named here"), remedy=for_name(name, named, "")
            )
        if kinds.get(name, "parameter") != "parameter":
            fail(
                "E191",
                f"`{name}` is {kinds[name]}: it has no {item.names[0]}",
                at(typed.span, "named here"),
                remedy=f"take `{name}` out of the list",
            )


def _most_literal(name: str, near: list[tuple[str, nodes.TypedOf]]) -> nodes.TypedOf | None:
    """The glob for a name.

    Raises E127 if two have different types, and neither is more literal.
    """
    if not near:
        return None
    most = max(literals(tuple(pattern.split("*"))) for pattern, _ in near)
    best = [(pattern, typed) for pattern, typed in near if literals(tuple(pattern.split("*"))) == most]
    (one, first), *others = best
    for other, typed in others:
        if typed.dtype != first.dtype:
            fail(
                "E127",
                f'"{one}" and "{other}" both match `{name}`, and both with {most} characters that are no star',
                at(first.span, first.dtype),
                at(typed.span, typed.dtype),
                remedy="make one of them more literal, or name the tensor in full",
            )
    return first
