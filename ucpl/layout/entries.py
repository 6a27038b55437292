"""Entries of tensors: by name, and globs and `*` expanded.

Globs and `*` are expanded for every tensor that no entry names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NoReturn

from attrs import evolve, field

from ucpl.errors import fail
from ucpl.extents import AS_U8, PAIRED
from ucpl.language import nodes, worded
from ucpl.language.walk import inside, walk
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_name
from ucpl.layout.globs import Globs, literals
from ucpl.layout.layout import Entry, Family, GlobMatch, LogicalTensor
from ucpl.layout.models import Alike, ModelTensors, unknown_tensor
from ucpl.layout.name_remedies import nearest
from ucpl.layout.patterns import axes_closed, check_indices, check_live, check_no_flat, dims_in, reject_live
from ucpl.layout.remedies import for_dim, for_entry, for_parts
from ucpl.layout.scales import scaled
from ucpl.layout.scope import NUMBER_LIMIT, Scope, at
from ucpl.layout.storing import Ground, is_there, stated_clauses
from ucpl.records import define, frozen

__all__ = [
    "ModelFamilies", "Placing", "StoredTogether", "Wild", "WrittenEntries", "alike_of", "entries_of", "is_wild",
    "written_entries", "MEMBER", "Kin", "with_sizes",
]  # fmt: skip

BUNDLE_FROM = 200  # tensors of different sizes; fewer keep nodes of their own, by name
STORED_MAX = 1_000_000  # tensors that the entries of one layout name, all indices counted

# The classes that speak of a tensor of a kind, the most special first.
_CLASSES_OF = {
    "parameter": ("trainable", "parameter", "*"),
    "frozen": ("frozen", "parameter", "*"),
    "buffer": ("buffer", "*"),
}


@frozen
class Wild:
    """Entry of a glob or `*` for one tensor or second name."""

    item: nodes.Entry
    path: str  # the tensor's own
    alias: str | None = None
    is_family: bool = False  # then each stored tensor has a name of its own
    bundle: tuple[str, ...] = ()  # so it has in a bundle

    @property
    def variables(self) -> dict[str, str]:
        """Variables that a template may use for the tensor."""
        if self.is_family or self.bundle:
            return {}
        return {"name": self.path} | ({"alias": self.alias, "owner": self.path} if self.alias else {})


@define
class GlobLine:
    """A glob and its class, with all their entries: its homes."""

    glob: tuple[str, ...]
    of: str | None
    items: list[nodes.Entry]
    taken: list[str] = field(factory=list)  # names that it is used for, in any query

    def rank(self, classes: tuple[str, ...]) -> tuple[int, int]:
        """Rank of a line for a tensor of these classes.

        The greatest wins. It compares literal characters, then the class.
        """
        return literals(self.glob), -classes.index(self.of or "*")


@define
class WrittenEntries:
    """Entries of a layout that apply, and wildcards for other tensors."""

    items: list[nodes.Entry]  # in the text's order; globs and those with `*` stand at the first of them
    explicit: frozenset[str]
    classes: dict[str, list[nodes.Entry]]
    lines: list[GlobLine]
    globs: Globs
    found: dict[str, list[nodes.Entry]] = field(factory=dict)  # of tensors, or of kinds if there are no globs

    def wild(
        self, tensors: dict[str, LogicalTensor], aliases: dict[str, str], alike: StoredTogether | None = None
    ) -> Iterator[Wild]:
        """One for each tensor without indices, or for its family or bundle.

        It is the most literal glob, else the most special class.
        """
        joint = {family.names[0]: family for family in (alike.families if alike else {}).values()}
        bundles = {names[0]: names for names in (alike.bundles if alike else ())}
        members = {name for some in ((f.names for f in joint.values()), bundles.values()) for of in some for name in of}
        for path, tensor in tensors.items():
            if path in joint:
                yield from (_of_family(i, joint[path].tensor) for i in self.of(path, tensor))
            elif path in bundles:
                yield from (Wild(i, path, bundle=bundles[path]) for i in self.of(path, tensor))
            elif path not in members and path not in self.explicit and not tensor.is_void:
                yield from (Wild(i, path) for i in self.of(path, tensor) if i.shape is not None)
        for alias, owner in aliases.items():
            if alias not in self.explicit and not tensors[owner].is_void:
                yield from (Wild(i, owner, alias) for i in self.said(alias, ("alias",)) if i.shape is not None)

    def globbed(self, tensors: dict[str, LogicalTensor], aliases: dict[str, str]) -> Iterator[Wild]:
        """Entries of globs alone, `none` with them."""
        owners = {**{path: path for path in tensors}, **aliases}
        for name, owner in owners.items():
            classes = _CLASSES_OF[tensors[name].kind] if name in tensors else ("alias",)
            line = None if name in self.explicit else self.line(name, classes)
            if line is not None:
                yield from (Wild(i, owner, None if name in tensors else name) for i in line.items)

    def of(self, path: str, tensor: LogicalTensor) -> list[nodes.Entry]:
        """The entries that speak of a tensor, found once."""
        key = path if self.lines else tensor.kind
        if key not in self.found:
            self.found[key] = self.said(path, _CLASSES_OF[tensor.kind])
        return self.found[key]

    def said(self, name: str, classes: tuple[str, ...]) -> list[nodes.Entry]:
        """The entries that speak of a name."""
        line = self.line(name, classes)
        if line is not None:
            return line.items
        return next((self.classes[c] for c in classes if c in self.classes), [])

    def line(self, name: str, classes: tuple[str, ...]) -> GlobLine | None:
        """The glob for a name.

        Raises E127 if there are two, and neither is more literal.
        """
        if not self.lines:
            return None
        near = [self.lines[i] for i in self.globs.of(name)]
        ranked = sorted((line for line in near if (line.of or "*") in classes), key=lambda line: line.rank(classes))
        if not ranked:
            return None
        line = ranked[-1]
        if len(ranked) > 1 and ranked[-2].rank(classes) == line.rank(classes):
            _reject_tie(name, ranked[-2], line)
        line.taken.append(name)
        return line

    def matches(self) -> tuple[GlobMatch, ...]:
        """Tensors that each glob took, of those that `wild` was called for."""
        firsts = [(line, line.items[0]) for line in self.lines]
        return tuple(GlobMatch(_shown(i), tuple(line.taken), i.shape is None, i.span) for line, i in firsts)


def _shown(item: nodes.Entry) -> str:
    return f'"{item.path}"' + (f" {_class(item)}" if item.of else "")


def _class(item: nodes.Entry) -> str:
    return worded(item.span, f"of {item.of}", f"is {item.of}")


def _reject_tie(name: str, first: GlobLine, second: GlobLine) -> NoReturn:
    one, other = sorted((first.items[0], second.items[0]), key=lambda item: item.span.start)
    count = literals(first.glob)
    fail(
        "E127",
        f'"{one.path}" and "{other.path}" both match `{name}`, and both with {count} characters that are no star',
        at(one.span),
        at(other.span),
        remedy=f'make one of them more literal, or give the tensor a line by its full name: "{name}" = ...',
    )


def _of_family(item: nodes.Entry, tensor: LogicalTensor) -> Wild:
    return Wild(evolve(item, indices=(nodes.Dim(tensor.dims[0]),)), tensor.path, is_family=True)


def is_wild(item: nodes.Entry) -> bool:
    """True if an entry is for tensors that it does not name."""
    return item.path == "*" or bool(item.glob)


def written_entries(items: Iterable[nodes.Record], scope: Scope) -> WrittenEntries:
    said = [i for i in items if isinstance(i, nodes.Entry)]
    classes: dict[str, list[nodes.Entry]] = {}
    lines: dict[tuple[tuple[str, ...], str | None], GlobLine] = {}
    for item in said:
        _check_place(item)
        if is_wild(item) and is_there(item, scope):
            if item.glob:
                lines.setdefault((item.glob, item.of), GlobLine(item.glob, item.of, [])).items.append(item)
            else:
                classes.setdefault(item.of or "*", []).append(item)
    globs = Globs([line.glob for line in lines.values()])
    return WrittenEntries(said, frozenset(i.path for i in said if not is_wild(i)), classes, list(lines.values()), globs)


def _check_place(item: nodes.Entry) -> None:
    """Check that classes belong to wildcards, and brackets to single tensors."""
    if is_wild(item) and item.indices:
        fail(
            "E128",
            f"{_shown(item) if item.glob else '`*`'} speaks of many tensors, and an index in brackets belongs to one",
            at(item.span),
            remedy="take the brackets out: in a layout of any model each tensor has a name of its own",
        )
    if item.of is not None and not is_wild(item):
        fail(
            "E128",
            f"`{item.path}` is one tensor, and `{_class(item)}` selects some of many",
            at(item.span),
            remedy=f"take `{_class(item)}` out; a class follows `*` or a glob",
        )


@frozen(eq=False)
class Placing:
    """Entries of all tensors.

    taken: the tensors of each glob. families: tensors that entries store together.
    """

    entries: tuple[Entry, ...]
    taken: tuple[GlobMatch, ...]
    families: dict[str, Family]
    wild: range  # numbers of the entries that globs and `*` make


def entries_of(
    items: Iterable[nodes.LayoutItem],
    ground: Ground,
    tensors: dict[str, LogicalTensor],
    aliases: dict[str, str],
    folding: ModelFamilies | None = None,
) -> Placing:
    """Entries of all tensors, with families and bundles on request."""
    written = written_entries(items, ground.scope)
    alike = StoredTogether({}, ())
    if folding is not None:
        alike = alike_of(tensors, frozenset((*written.explicit, *aliases.values())), folding, written)
        with_sizes(ground.scope, tensors, alike)
    families = alike.families
    placed = {**tensors, **{path: family.tensor for path, family in families.items()}}
    for item in written.items:
        check_no_flat((*item.indices, *(item.shape or ())), item.span)
        reject_live(item.indices, item.span, "an index")
        check_indices(item.indices, item.span)
    out: list[Entry] = []
    wild, expanded = range(0), False
    for item in written.items:
        if not is_wild(item):
            if item.shape is not None and is_there(item, ground.scope):
                out.append(_entry(item, ground, tensors, aliases))
        elif not expanded:
            expanded = True
            first = len(out)
            out += (_wild(w, ground, placed) for w in written.wild(tensors, aliases, alike))
            wild = range(first, len(out))
    _reject_many(out, ground, tensors)
    return Placing(tuple(out), written.matches(), families, wild)


def _reject_many(entries: list[Entry], ground: Ground, tensors: Mapping[str, LogicalTensor]) -> None:
    """A limit that costs nothing: bracketed indices multiply.

    The named tensors are not enumerated to be counted.
    """
    total = elements = 0

    def size_of(name: str) -> int:
        return ground.scope.size(name)

    for entry in entries:
        leaves = {leaf for name in ax.dims_of(*entry.indices) for leaf in ax.leaves_of(name, ground.indices)}
        count = prod(max(1, ground.scope.size(leaf, entry.span)) for leaf in leaves if ground.scope.knows(leaf))
        count *= max(1, len(entry.bundle))
        total += count
        if entry.bundle:
            elements += sum([prod(tensors[path].counts) for path in entry.bundle])
        else:
            elements += count * prod(ax.longest(axis, size_of) for axis in entry.shape)
        if elements > NUMBER_LIMIT:
            fail("E106", f"`{entry.path}`, padded as it is, makes {elements} elements of all entries", at(entry.span))
        if total > STORED_MAX:
            fail(
                "E168",
                f"`{entry.path}` is stored {count} times; all entries together are {total} tensors,"
                f" and {STORED_MAX} are allowed",
                at(entry.span),
            )


def _entry(item: nodes.Entry, ground: Ground, tensors: dict[str, LogicalTensor], aliases: dict[str, str]) -> Entry:
    """An entry that names its tensor, or the labels of several."""
    alias = item.path if item.path in aliases and item.path not in tensors else None
    path = aliases[item.path] if alias else item.path
    of = _spoken_of(item, path, tensors)
    if not of and path not in tensors and not _labels(item):
        unknown_tensor(path, tensors, item.span, for_parts(item) or for_entry(item, tensors, ground.scope.names()))
    _check_dims(item, of, ground.scope)
    indices = axes_closed(item.indices, ground.scope, item.span)
    if path in tensors and any(isinstance(a, nodes.Any_ | nodes.Rest) for a in walk(*(item.shape or ()))):
        made = evolve(_filled(Wild(item, path, alias), ground, tensors), indices=indices)
        ground.naming.check_entry(item, made, tensors)
        return made
    shape = axes_closed(item.shape or (), ground.scope, item.span)
    targets = {label: _target(path, label, tensors, item.span) for label in ax.labels_of(shape)}
    variables = {"name": whole_name(item.path)} | ({"alias": alias, "owner": path} if alias else {})
    storing = ground.storing(stated_clauses(item), item.span, "weights", dims_in(item.indices))
    storing = scaled(storing, item, targets.values(), tensors)
    entry = Entry(item.path, indices, shape, targets, storing, alias, variables, item.span)
    check_live(entry, tensors)
    ground.naming.check_entry(item, entry, tensors)
    return entry


def _spoken_of(item: nodes.Entry, path: str, tensors: dict[str, LogicalTensor]) -> list[LogicalTensor]:
    """Tensors of an entry that exist; with labels, the labelled ones."""
    found = [ax.tensor_of_label(path, label, tensors) for label in _labels(item)]
    return [tensors[p] for p in found or [path] if p in tensors]


def _labels(item: nodes.Entry) -> list[str]:
    labels = [t.label for s in walk(*(item.shape or ())) if isinstance(s, nodes.Stack) for t in s.terms]
    return [label for label in dict.fromkeys(labels) if label is not None]


def _check_dims(item: nodes.Entry, of: list[LogicalTensor], scope: Scope) -> None:
    """Check that all dims of the pattern are known.

    Raises E169: with the tensor, its dims, and the one that may be meant.
    """
    named = [n for n in walk(*item.indices, *(item.shape or ())) if isinstance(n, nodes.Dim)]
    for node in named:
        if of and not scope.knows(node.name):
            dims = list(dict.fromkeys(d for t in of for d in t.dims if "#" not in d))
            left = [d for d in dims if d not in {n.name for n in named}]
            under = [d for d in dims if d.endswith(f".{node.name}")]  # of a model that is used
            close = (under[0] if len(under) == 1 else nearest(node.name, left or dims)) or (
                left[0] if len(left) == 1 else nearest(node.name, scope.names())
            )
            paths = " and ".join(f"`{t.path}`" for t in of)
            fail(
                "E169",
                f"no dim is called `{node.name}`: {paths} {'has' if len(of) == 1 else 'have'} {' '.join(dims) or 'none'}",
                at(node.span if node.span.line else item.span, "named here"),
                at(of[0].span, "its dims"),
                remedy=for_dim(item, node.name, of, close, scope.mesh_axes),
            )


def _target(path: str, label: str | None, tensors: dict[str, LogicalTensor], span: nodes.Span) -> str:
    target = path if label is None else ax.tensor_of_label(path, label, tensors)
    if target not in tensors:
        unknown_tensor(target, tensors, span)
    return target


def _wild(wild: Wild, ground: Ground, tensors: dict[str, LogicalTensor]) -> Entry:
    entry = _filled(wild, ground, tensors)
    ground.naming.check_entry(wild.item, entry, tensors)
    return entry


def _filled(wild: Wild, ground: Ground, tensors: dict[str, LogicalTensor]) -> Entry:
    """An entry whose pattern says `_` and `...`, for one tensor."""
    item, tensor = wild.item, tensors[wild.path]
    if not item.indices and whole_name(wild.path) != wild.path:
        fail(
            "E199",
            f"`{whole_name(wild.path)}` has layers of different sizes, which are not stacked",
            at(item.span),
            at(tensor.span),
            remedy=f"give it a line of its own, with its index in brackets: {whole_name(wild.path)}[...] = ...",
        )
    _check_dims(item, [tensor], ground.scope)
    named = _named((*item.indices, *(item.shape or ())))
    named |= {dim for dim in tensor.dims if named.intersection(ax.leaves_of(dim, ground.indices))}
    filling = _Filling([dim for dim in tensor.dims if dim not in named], item, tensor)
    shape = tuple(a for axis in item.shape or () for a in filling.filled(axis))
    if filling.left:
        fail(
            "E156",
            f"the pattern names {len(tensor.dims) - len(filling.left)} of the {len(tensor.dims)} dims of `{tensor.path}`",
            at(item.span),
            at(tensor.span),
            remedy="end the pattern with `...`",
        )
    storing = ground.storing(stated_clauses(item), item.span, "weights", dims_in(item.indices))
    storing = scaled(storing, item, (tensor.path,), tensors)
    closed = axes_closed(shape, ground.scope, item.span)
    indices = axes_closed(item.indices, ground.scope, item.span) if wild.is_family else ()
    path = f"{tensor.path} and {len(wild.bundle) - 1:,} more" if wild.bundle else tensor.path
    targets: dict[str | None, str] = {None: tensor.path}
    entry = Entry(path, indices, closed, targets, storing, wild.alias, wild.variables, item.span, wild.bundle)
    check_live(entry, tensors)
    return entry


def _named(axes: Iterable[nodes.Axis]) -> set[str]:
    """Dims that axes name outside of sums.

    The terms of a sum are ways through one dim: each has names of its own.
    """
    out: set[str] = set()
    for node in axes:
        match node:
            case nodes.Dim(name=name):
                out.add(name)
            case nodes.Stack(terms=(term,)):
                out |= _named(term.axes)
            case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner):
                out |= _named((inner,))
    return out


def _sized(among: nodes.Among | None, dim: str) -> nodes.Among | None:
    """`_[..size(_) / 2]` is half of whichever dim `_` is."""

    def named(node: nodes.Record) -> nodes.Record | None:
        match node:
            case nodes.Function(name="size", args=(nodes.Name(path="_"),)):
                return evolve(node, args=(nodes.Name(dim, span=node.span),))
            case _:
                return None

    return None if among is None else inside(among, named)


@define
class _Filling:
    """Names for `_` and `...`.

    They are the dims of one tensor that neither pattern nor brackets name, in order.
    """

    left: list[str]
    item: nodes.Entry
    tensor: LogicalTensor

    def filled(self, node: nodes.Axis) -> tuple[nodes.Axis, ...]:
        """One axis, or the several that `...` means."""
        match node:
            case nodes.Any_():
                if not self.left:
                    fail(
                        "E155",
                        f"`{self.tensor.path}` has no more dims for `_`",
                        at(self.item.span),
                        at(self.tensor.span),
                    )
                name = self.left.pop(0)
                return (nodes.Dim(name, _sized(node.range, name), span=node.span),)
            case nodes.Rest():
                taken, self.left = self.left, []
                return tuple(nodes.Dim(n, span=node.span) for n in taken)
            case nodes.Dim():
                return (node,)
            case nodes.Stack(terms=terms):
                return (evolve(node, terms=self.terms(terms)),)
            case _:
                return (inside(node, self.one),)

    def one(self, node: nodes.Record) -> nodes.Record | None:
        """A single axis inside another: the dims of `...` are multiplied there."""
        if not isinstance(node, nodes.Axis):
            return node
        got = self.filled(node)
        return got[0] if len(got) == 1 else nodes.Stack((nodes.Term(None, got, span=node.span),), span=node.span)

    def terms(self, terms: tuple[nodes.Term, ...]) -> tuple[nodes.Term, ...]:
        """Terms of a sum as ways through one dim.

        Each starts at the same place, and all end at one.
        """
        before, after = list(self.left), list(self.left)
        new: list[nodes.Term] = []
        for term in terms:
            named = _named(term.axes)
            self.left = [dim for dim in before if dim not in named]
            axes = tuple(a for axis in term.axes for a in self.filled(axis))
            if new and self.left != after:
                fail(
                    "E162",
                    f"terms of a sum take different dims of `{self.tensor.path}`",
                    at(self.item.span),
                    at(self.tensor.span),
                )
            after = list(self.left)
            new.append(evolve(term, axes=axes))
        return tuple(new)


# ---- families --------------------------------------------------------------------------------------------------------


MEMBER = "#name"  # ends the name of the dim over the members
_NUMBER = re.compile(r"\d+")
_PARTS = re.compile(r"\d+|\D+")

Kin = Mapping[str, str]  # tensor -> its family in another checkpoint


@frozen(eq=False)
class StoredTogether:
    """Tensors that entries store together.

    bundles: the names of tensors of different sizes, in the model's order.
    """

    families: dict[str, Family]
    bundles: tuple[tuple[str, ...], ...]


@frozen(eq=False)
class ModelFamilies:
    """Families that a model allows, for both sides of a plan.

    groups: the members of each parameter group. kin: of each tensor, its family in another checkpoint, for a comparison;
    families and members are then in the order of their numbers, in any checkpoint.
    """

    model: ModelTensors
    groups: tuple[tuple[str, ...], ...]
    kin: Kin | None = None

    def alike(self, tensors: Mapping[str, LogicalTensor], apart: frozenset[str]) -> Alike:
        """Tensors of equal facts, whose names differ in numbers alone.

        They are found once for both sides.
        """
        is_shared = self.kin is None and tensors is self.model.tensors
        found = self.model.alike.get((apart, self.groups)) if is_shared else None
        if found is not None:
            return found
        found = {}
        group_of = {path: n for n, members in enumerate(self.groups) for path in members}
        for path in self.ordered(tensors):
            tensor = tensors[path]
            if path not in apart and _is_plain(tensor):
                facts = tensor.dtype, tensor.kind, tensor.state_dtypes, group_of.get(path)
                own = tensor.counts, facts, self.kin.get(path) if self.kin else None
                found.setdefault((_NUMBER.sub("*", path), own), []).append(path)
        if is_shared:
            self.model.alike[apart, self.groups] = found
        return found

    def ordered(self, tensors: Mapping[str, LogicalTensor]) -> Iterable[str]:
        return tensors if self.kin is None else sorted(tensors, key=_by_numbers)


def alike_of(
    tensors: Mapping[str, LogicalTensor], apart: frozenset[str], folding: ModelFamilies, written: WrittenEntries
) -> StoredTogether:
    """Families and bundles of tensors that model and layout treat alike.

    Their dims have no names. Names that differ in numbers alone are one family. Other names with the same sizes are one, too.
    Of the rest, tensors with as many dims are a bundle.

    apart: tensors that something speaks of by name. written: the entries of the layout.
    """
    found: dict[tuple[str, object], list[str]] = {}
    kind_of: dict[object, object] = {}  # of bundles
    entries: dict[int, tuple[int, ...]] = {}  # of each list of entries: none if one of them stores nothing
    for (name, said), members in folding.alike(tensors, apart).items():
        for path in members if written.lines else members[:1]:  # without globs, a kind has one list of entries
            lines = written.of(path, tensors[path])
            if id(lines) not in entries:
                entries[id(lines)] = tuple(map(id, lines)) if all(item.shape is not None for item in lines) else ()
            if stored := entries[id(lines)]:
                kind_of[said, stored] = len(said[0]), said[1], stored
                found.setdefault((name, (said, stored)), []).extend([path] if written.lines else members)
    if written.lines:  # a glob can part tensors, so that others come first
        place = {path: n for n, path in enumerate(folding.ordered(tensors))}
        found = dict(sorted(found.items(), key=lambda one: place[one[1][0]]))
    by_size: dict[object, tuple[list[str], str | None]] = {}  # in the model's order, with the form of them all
    for key, paths in found.items():
        if len(paths) > 1:
            by_size[key] = paths, key[0]
        else:
            by_size.setdefault(key[1], ([], None))[0].extend(paths)
    out: dict[str, Family] = {}
    for paths, form in by_size.values():
        if len(paths) > 1:
            path = name = form or f"{paths[0]} and {len(paths) - 1} more"
            number = 2
            while path in tensors or path in out:
                path, number = f"{name} ({number})", number + 1
            out[path] = _family(path, paths, tensors[paths[0]])
    rest: dict[object, list[str]] = {}
    for common, (paths, _) in by_size.items():
        if len(paths) == 1 and all(map(_has_any_size, written.of(paths[0], tensors[paths[0]]))):
            rest.setdefault(kind_of[common], []).append(paths[0])
    return StoredTogether(out, tuple(tuple(paths) for paths in rest.values() if len(paths) >= BUNDLE_FROM))


def _by_numbers(path: str) -> list[tuple[int, str]]:
    """The path with its numbers as numbers."""
    return [(int(one), "") if one.isdecimal() else (-1, one) for one in _PARTS.findall(path)]


def _has_any_size(item: nodes.Entry) -> bool:
    """True if the pattern fits tensors of any size.

    Each axis is a dim, uncut or in chunks.
    """

    def is_plain(axis: nodes.Axis) -> bool:
        match axis:
            case nodes.Any_(range=None) | nodes.Rest():
                return True
            case nodes.Cut(axis=nodes.Any_(range=None), splits=(nodes.Split(kind="chunk"),)):
                return True
        return False

    return all(map(is_plain, item.shape or ()))


def _is_plain(tensor: LogicalTensor) -> bool:
    is_own = tensor.scaling is None and tensor.scale is None and not tensor.lacks
    if not is_own or tensor.is_void or 0 in tensor.counts or whole_name(tensor.path) != tensor.path:
        return False
    if tensor.dtype in AS_U8 or tensor.dtype in PAIRED:  # whose elements share bytes
        return False
    return all("#" in dim for dim in tensor.dims)


def _family(path: str, paths: list[str], first: LogicalTensor) -> Family:
    tensor = LogicalTensor(
        path,
        (f"{path}{MEMBER}", *(f"{path}#{n}" for n in range(len(first.dims)))),
        (len(paths), *first.counts),
        (range(len(paths)), *first.indices),
        first.dtype,
        first.kind,
        span=first.span,
        state_dtypes=first.state_dtypes,
    )
    return Family(tensor, tuple(paths))


def with_sizes(scope: Scope, tensors: Mapping[str, LogicalTensor], alike: StoredTogether) -> None:
    """Sizes of dims without names, for the scope.

    They are of families, of the first tensor of a bundle, and of tensors in none.
    """
    members = {name for family in alike.families.values() for name in family.names}
    members.update(name for names in alike.bundles for name in names[1:])
    families = (family.tensor for family in alike.families.values())
    given = scope.given
    for tensor in (*(t for path, t in tensors.items() if path not in members), *families):
        for dim, count in zip(tensor.dims, tensor.counts, strict=True):
            if dim.startswith(f"{tensor.path}#"):
                given.setdefault(dim, count)
