"""States with fewer dims than their parameters.

Examples are sums of rows (Adagrad) and means of rows and columns (Adafactor).

Such a state has one element along each dim that it lacks. Entries store it by their own patterns, without these dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from attrs import evolve

from ucpl.errors import fail
from ucpl.language import nodes
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_dim, whole_name
from ucpl.layout.globs import Globs
from ucpl.layout.layout import Entry, LogicalTensor, States
from ucpl.layout.name_remedies import for_name
from ucpl.layout.scope import at
from ucpl.records import frozen
from ucpl.registry import format_named

__all__ = ["check_carried_states", "reduced_entry", "with_reduced_states"]

_WORDS = ("and", "in", "of", "on", "at", "is")  # that authors put between dims and tensors
Lacked = dict[str, tuple[int, ...]]  # of a state: positions of the dims that it lacks


# ---- models ----------------------------------------------------------------------------------------------------------


def with_reduced_states(
    items: Iterable[nodes.ModelItem],
    tensors: dict[str, LogicalTensor],
    groups: Sequence[tuple[str, tuple[str, ...]]],
) -> dict[str, LogicalTensor]:
    """Tensors with the dims that their states lack.

    Raises: UcplError E008, E137, E191, E225.
    """
    items = list(items)
    said = [item for item in items if isinstance(item, nodes.State) and item.without]
    if not said:
        return tensors
    named = {whole_name(item.path) for item in items if isinstance(item, nodes.Tensor)}
    members = {name: set(of) for name, of in groups}
    found: dict[str, Lacked] = {}
    for item in said:
        own = None if item.groups is None else {m for g in item.groups for m in members.get(g, ())}
        for path, clause in _clauses(item, tensors, (named, {*members}), own):
            positions = _positions(item, clause, tensors[path], tensors)
            if positions:
                found.setdefault(path, {}).update(dict.fromkeys(item.names, positions))
    return {p: evolve(t, lacks=tuple(found[p].items())) if p in found else t for p, t in tensors.items()}


def _clauses(
    item: nodes.State,
    tensors: Mapping[str, LogicalTensor],
    known: tuple[set[str], set[str]],
    own: set[str] | None,
) -> Iterator[tuple[str, nodes.Without]]:
    """Each parameter with the clause that names it."""
    by_name: dict[str, nodes.Without] = {}
    for clause in item.without:
        for name in clause.of or ():
            if "*" not in name:
                _check_name(item, clause, name, tensors, known)
                if own is not None and name not in {*map(whole_name, own)}:
                    fail(
                        "E225",
                        f"`{name}` is in no group of {item.names[0]}, which is for {', '.join(item.groups or ())}",
                        at(clause.span, "named here"),
                        remedy=f"take `{name}` out, or the groups: state {item.names[0]} : {item.dtype}  without ...",
                    )
                if by_name.setdefault(name, clause) is not clause:
                    _twice(item, name, clause, by_name[name])
    globs = [(glob, clause) for clause in item.without for glob in clause.of or () if "*" in glob]
    finder = Globs([tuple(glob.split("*")) for glob, _ in globs])
    everything = [clause for clause in item.without if clause.of is None]
    if len(everything) > 1:
        _twice(item, "each parameter", everything[1], everything[0])
    for path, tensor in tensors.items():
        if tensor.kind != "parameter" or (own is not None and path not in own):
            continue
        name = whole_name(path)
        matched = list({id(globs[i][1]): globs[i][1] for i in finder.of(name)}.values())
        if name not in by_name and len(matched) > 1:
            _twice(item, name, matched[1], matched[0])
        own_clause = by_name.get(name) or next(iter(matched or everything), None)
        if own_clause is not None:
            yield path, own_clause


def _check_name(
    item: nodes.State,
    clause: nodes.Without,
    name: str,
    tensors: Mapping[str, LogicalTensor],
    known: tuple[set[str], set[str]],
) -> None:
    named, groups = known
    if name not in named:
        remedy = for_name(name, named, "correct the name, or add the tensor to the model")
        if name in groups:
            remedy = (
                f"`{name}` is a group: state {item.names[0]} : {item.dtype} for {name}  without {' '.join(clause.dims)}"
            )
        fail("E137", f"no tensor is called `{name}`", at(clause.span, "named here"), remedy=remedy)
    kind = next((t.kind for path, t in tensors.items() if whole_name(path) == name), "parameter")
    if kind != "parameter":
        fail(
            "E191",
            f"`{name}` is {kind}: it has no {item.names[0]}",
            at(clause.span, "named here"),
            remedy=f"take `{name}` out of the list",
        )


def _twice(item: nodes.State, name: str, one: nodes.Without, other: nodes.Without) -> NoReturn:
    quoted = name if " " in name else f"`{name}`"
    fail(
        "E008",
        f"{' and '.join(item.names)} of {quoted}: two clauses say the dims that are lacking",
        at(other.span, "this one"),
        at(one.span, "and this one"),
        remedy="write all dims in one clause, as in `without r d for w`; or name the tensor in one of the two",
    )


def _has(tensor: LogicalTensor, dims: Iterable[str]) -> bool:
    return {*dims} <= {*map(whole_dim, tensor.dims)}


def _positions(
    item: nodes.State, clause: nodes.Without, tensor: LogicalTensor, tensors: Mapping[str, LogicalTensor]
) -> tuple[int, ...]:
    dims = [whole_dim(dim) for dim in tensor.dims]
    odd = next((dim for dim in clause.dims if dim not in dims), None)
    if odd is not None:
        if odd in _WORDS:
            remedy = f"dims have spaces between, and tensors come after `for`: without {dims[-1]} for {tensor.path}"
            fail("E225", f"`{odd}` is no dim of `{whole_name(tensor.path)}`", at(clause.span), remedy=remedy)
        shown = " ".join(d for d in dims if "#" not in d)
        remedy = f"its dims are {shown}" if shown else "its dims have no names: give them names in the model"
        if clause.of is None:
            has = (whole_name(p) for p, t in tensors.items() if t.kind == "parameter" and _has(t, clause.dims))
            named = ", ".join([*dict.fromkeys(has)][:4])
            remedy += "; or name the tensors that have the state"
            remedy += f": without {' '.join(clause.dims)} for {named}" if named else ""
        fail(
            "E225",
            f"`without {odd}` of {item.names[0]}: `{whole_name(tensor.path)}` has no dim `{odd}`",
            at(clause.span),
            at(tensor.span, "defined here"),
            remedy=remedy,
        )
    return tuple(i for i, dim in enumerate(dims) if dim in clause.dims)


def check_carried_states(lines: Iterable[States], model_items: Iterable[nodes.ModelItem], framework: str) -> None:
    """Check that the files of a framework have states of these shapes.

    Raises: UcplError E225 for a framework with own files.
    """
    reduced = [n for item in model_items if isinstance(item, nodes.State) and item.without for n in item.names]
    if not reduced or not framework or format_named(framework).is_of_a_spec:
        return
    for line in lines:
        if line.names is None or not {*line.names}.isdisjoint(reduced):
            fail(
                "E225",
                f"{reduced[0]} lacks dims of its parameters, and files of {framework}() have one value for each element",
                at(line.span),
                remedy=f"leave it out: state {reduced[0]} = none, and --drop {reduced[0]}; or a layout of framework torch()"
                " stores it",
            )


# ---- entries ---------------------------------------------------------------------------------------------------------


def reduced_entry(
    entry: Entry,
    tensors: Mapping[str, LogicalTensor],
    indices: Mapping[str, ax.Axis],
    state: str,
    *,
    keeps_axes: bool,
) -> Entry | None:
    """The entry without the dims that a state lacks.

    None: its tensors do not have this state. keeps_axes: an axis without dims has one element, else it is left out.
    Raises: UcplError E225.
    """
    lacked = {label: dict(tensors[path].lacks).get(state) for label, path in entry.targets.items()}
    if not any(lacked.values()):
        return None
    if not all(lacked.values()):
        other = next(path for label, path in entry.targets.items() if not lacked[label])
        _refuse(entry, state, f"packs `{other}`, which has no {state}, with tensors that have one", _APART)
    names: dict[str | None, dict[str, int]] = {}  # of each label: names that it lacks, with the first index there
    for label, path in entry.targets.items():
        tensor = tensors[path]
        names[label] = {
            leaf: tensor.indices[i][0] if leaf == tensor.dims[i] and len(tensor.indices[i]) else 0
            for i in lacked[label] or ()
            for leaf in (tensor.dims[i], *ax.leaves_of(tensor.dims[i], indices))
        }
    brackets = {leaf for name in ax.dims_of(*entry.indices) for leaf in (name, *ax.leaves_of(name, indices))}
    for own in names.values():
        if both := brackets & own.keys():
            _refuse(
                entry,
                state,
                f"has `{min(both)}` in brackets, and {state} lacks it",
                f"put {min(both)} into the pattern, where one number is stored for all of its indices",
            )
    pattern = _Pattern(entry, state, names)
    axes = [pattern.of(axis, None) for axis in entry.shape]
    if not any(kept for _, kept in axes) and not keeps_axes:
        _refuse(
            entry,
            state,
            f"has no dim that {state} keeps",
            "one value of a parameter is `scalar`; or store an axis of one element: state ... = like(1)",
        )
    return evolve(entry, shape=tuple(axis for axis, _ in axes) if keeps_axes else _merged(axes))


_APART = "store the tensors by lines of their own, as a job does that has this state of each"


def _refuse(entry: Entry, state: str, said: str, remedy: str) -> NoReturn:
    fail("E225", f"{state} of `{entry.path}`: the line {said}", at(entry.span), remedy=remedy)


def _merged(axes: Sequence[tuple[ax.Axis, bool]]) -> tuple[ax.Axis, ...]:
    """Axes of one element as factors of their neighbours."""
    out: list[list[ax.Axis]] = []
    early: list[ax.Axis] = []
    for axis, kept in axes:
        if kept:
            out.append([axis, *early])
            early = []
        elif out:
            out[-1].append(axis)
        else:
            early.append(axis)
    return tuple(one[0] if len(one) == 1 else ax.Stack((ax.Term(None, tuple(one)),)) for one in out)


@frozen
class _Pattern:
    """Axes of an entry, as a state has them.

    Each comes with a flag: some dim of it is kept. names: of each label, the lacked names with their first index.
    """

    entry: Entry
    state: str
    names: Mapping[str | None, Mapping[str, int]]

    def of(self, axis: ax.Axis, label: str | None) -> tuple[ax.Axis, bool]:
        match axis:
            case ax.Dim():
                return self.dim(axis, label)
            case ax.Copies():
                return axis, False
            case ax.Stack(terms=(ax.Term(label=None, axes=inner),)):
                return self.product(inner, label)
            case ax.Stack(terms=terms):
                return self.sum(axis, terms, label)
            case ax.Cut(axis=inner) | ax.Pad(axis=inner) | ax.Trim(axis=inner):
                made, kept = self.of(inner, label)
                return (evolve(axis, axis=made), True) if kept else (made, False)
            case _:
                return axis, True

    def dim(self, dim: ax.Dim, label: str | None) -> tuple[ax.Axis, bool]:
        of = [self.names[label]] if label in self.names else [*self.names.values()]
        first = [own[dim.name] for own in of if dim.name in own]
        if not first:
            return dim, True
        if len(first) < len(of):
            text = f"has `{dim.name}` for several tensors, and {self.state} of only some of them lacks it"
            _refuse(self.entry, self.state, text, _APART)
        if dim.low or dim.high is not None:
            text = f"has a part of `{dim.name}`, and {self.state} lacks this dim"
            _refuse(self.entry, self.state, text, f"write the dim once, complete: {dim.name}")
        return ax.Dim(dim.name, first[0], first[0] + 1), False

    def product(self, inner: Sequence[ax.Axis], label: str | None) -> tuple[ax.Axis, bool]:
        made = [self.of(axis, label) for axis in inner]
        kept = any(one for _, one in made)
        axes = tuple(axis for axis, _ in made if kept or not isinstance(axis, ax.Copies))
        return ax.Stack((ax.Term(None, axes),)), kept

    def sum(self, axis: ax.Stack, terms: Sequence[ax.Term], label: str | None) -> tuple[ax.Axis, bool]:
        made = [(term, [self.of(a, term.label or label) for a in term.axes]) for term in terms]
        if not all(any(kept for _, kept in axes) for _, axes in made):
            text = f"packs tensors along dims that {self.state} lacks: one number of the packed tensor belongs to all of them"
            _refuse(self.entry, self.state, text, _APART)
        return ax.Stack(tuple(evolve(term, axes=tuple(a for a, _ in axes)) for term, axes in made)), True
