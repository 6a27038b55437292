"""A resolved layout: numbers, names and closed templates, and nothing else.

No torch, no disk, no ranks yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np
from attrs import evolve, field
from numpy.typing import NDArray

from ucpl.errors import fail
from ucpl.language import nodes
from ucpl.language.nodes import NOWHERE, Span
from ucpl.layout.arithmetic import Value
from ucpl.layout.axes import Axis
from ucpl.layout.brackets import Indices
from ucpl.layout.scope import Config, Scope, at
from ucpl.layout.templates import PLACE_WORDS, Template, closed, columns, evaluate
from ucpl.records import frozen

Box = tuple[tuple[int, ...], tuple[int, ...]]  # positions low <= p < high, a number a dim


class Policy(IntEnum):
    """Policy for the copies of an element.

    Tables hold the numbers, texts the words. Under `any @dp`, copies at the first coordinate of dp lead: they are equal
    to each other, and read if the tensor has no other home. Those at other coordinates are `any`.
    """

    SAME = 0
    MEAN = 1
    SUM = 2
    ANY = 3
    LEAD = 4
    MAX = 5

    @property
    def word(self) -> str:
        return self.name.lower()


@frozen
class Scaling:
    """Owner of a scale.

    Element (i, j, ...) is of the block that holds elements i * sizes[0], ... of `of`.
    """

    of: str
    along: tuple[int, ...]  # of each dim of the scale: the dim of the tensor
    sizes: tuple[int, ...]  # elements of a block, along each dim of the scale


@frozen
class LogicalTensor:
    """One tensor of the model: a product of named dims.

    A tensor may have only some indices of a dim (`l[1.. by 2]`, `l[1, 4]`): position p along dim i is index
    `indices[i][p]` of the full dim, and `counts` has the number of its indices.
    """

    path: str
    dims: tuple[str, ...]
    counts: tuple[int, ...]
    indices: tuple[Indices, ...]
    dtype: str | None
    kind: Literal["parameter", "buffer", "frozen"]
    scaling: Scaling | None = None  # of a scale: its tensor
    scale: str | None = None  # of a tensor in blocks: its scale
    span: Span = field(default=NOWHERE, eq=False, repr=False)
    state_dtypes: tuple[tuple[str, str], ...] = ()  # of those of its states that have a type of their own
    lacks: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of states without some of its dims: these dims, by position
    is_void: bool = False  # it has none of the indices of a dim (`l[4..]` of 4): there is no such tensor in this model

    @property
    def numel(self) -> int:
        return prod(self.counts)

    def of(self, state: str) -> LogicalTensor:
        """The tensor with the counts of one of its states.

        There is one element along each dim that the state lacks.
        """
        lacked = dict(self.lacks).get(state, ())
        if not lacked:
            return self
        at = [i in lacked for i in range(len(self.dims))]
        counts = tuple(1 if one else n for one, n in zip(at, self.counts, strict=True))
        indices = tuple(range(1) if one else has for one, has in zip(at, self.indices, strict=True))
        return evolve(self, counts=counts, indices=indices)


@frozen(eq=False)
class Family:
    """Tensors of the model that a layout stores alike, as one tensor.

    Its first dim is over their names; the others are theirs.
    """

    tensor: LogicalTensor
    names: tuple[str, ...]  # in the model's order


@frozen
class LogicalState:
    """A state next to each trained parameter (of `groups`, or of all)."""

    name: str
    dtype: str  # of tensors that say no other: see LogicalTensor.state_dtypes
    scalar: bool
    groups: tuple[str, ...] | None
    is_reduced: bool = False  # it lacks dims: only tensors with these dims in `lacks` have it


@frozen
class Mesh:
    """Ranks as a grid, major to minor.

    All meshes of a layout number the same ranks.
    """

    name: str
    axes: tuple[str, ...]
    degrees: tuple[int, ...]


@frozen
class DomainRule:
    """Failure domains: ranks with the same text of the template."""

    kind: str  # node, process
    path: Template
    span: Span = field(default=NOWHERE, eq=False, repr=False)


@frozen
class FileRule:
    """Place of a named file.

    `form` is torch, safetensors, dcp, ...; None stores nothing.
    """

    name: str
    form: str | None
    path: Template | None
    key: Template | None
    span: Span = field(default=NOWHERE, eq=False, repr=False)


@frozen
class Storing:
    """Clauses of an entry or state line, closed."""

    file: str  # name of a FileRule
    key: Template | None
    policy: Policy  # how copies along `policy_axes` are put together; same: there is nothing to put together
    policy_axes: tuple[str, ...]
    loose: tuple[str, ...]  # `any @dp`: of copies along these one is trusted
    at: tuple[tuple[str, int], ...]  # (mesh axis, coordinate)
    mesh: str  # "" is the first
    dtype: str | None
    lossy: bool
    exact: bool  # a cast that could lose is looked at value by value
    value: tuple[float, float]  # stored = a * x + b
    scaled: bool = False  # stored = x * the scale of its block

    @property
    def speaks_of_copies(self) -> bool:
        """True if copies are not simply the same along every axis."""
        return self.policy is not Policy.SAME or bool(self.loose)


@frozen
class Entry:
    """Storage of one tensor (or several fused ones: `targets` by label).

    The entry of a bundle is that of its first tensor. The others have the same pattern over their own dims.
    """

    path: str
    indices: tuple[Axis, ...]
    shape: tuple[Axis, ...]
    targets: dict[str | None, str]  # label -> path of the logical tensor
    storing: Storing
    alias: str | None = None  # the alias's name, when this stores a second name of a tied tensor
    variables: dict[str, str] = field(factory=dict)  # template variables: name, alias
    span: Span = field(default=NOWHERE, eq=False, repr=False)
    bundle: tuple[str, ...] = ()  # tensors of different sizes that it stores, each in tensors of its own

    @property
    def paths(self) -> tuple[str, ...]:
        """Every tensor that it stores."""
        return self.bundle or tuple(self.targets.values())


@frozen
class GlobMatch:
    """A glob over names, and the tensors and second names it matches."""

    glob: str  # as it is written, with its class
    names: tuple[str, ...]
    is_none: bool = False  # it says that they are not stored
    span: Span = field(default=NOWHERE, eq=False, repr=False)


@frozen
class States:
    """A state line.

    `names` None: every state that no other line names for the group. `groups` None: every tensor.
    """

    names: tuple[str, ...] | None
    groups: tuple[str, ...] | None
    shape: tuple[Axis, ...] | Literal["like", "like(1)"]
    storing: Storing
    buckets: int | None
    span: Span = field(default=NOWHERE, eq=False, repr=False)


@frozen
class Group:
    """Tensors that share flat buffers.

    Exactly one of members, without, stated; `dealt` ways, or `reversed`.
    """

    name: str
    indices: tuple[Axis, ...]
    members: tuple[str, ...] | None
    without: tuple[str, ...] | None
    stated: tuple[str, str] | None  # (file rule, key)
    is_reversed: bool
    dealt: int
    of_model: bool = False
    span: Span = field(default=NOWHERE, eq=False, repr=False)


@frozen
class Filling:
    """One `fill` line: values of some elements that the source lacks."""

    text: str  # as it is written
    rank: tuple[int, ...]  # of two lines that speak of one element the one of greater rank holds
    names: frozenset[str]  # tensors
    boxes: dict[str, tuple[Box, ...]]  # parts of them that are meant; of a tensor without any: all of it
    states: frozenset[str] | None  # None: the parameter itself, its weight and its master
    value: float | None  # None: the tensor's weight, for a master
    span: Span = field(default=NOWHERE, eq=False, repr=False)


@frozen
class BlobRule:
    name: str
    mesh_axes: tuple[str, ...]
    fate: Literal["keep", "first", "remap", "drop"]
    file: str
    key: Template
    at: tuple[tuple[str, int], ...] = ()
    span: Span = field(default=NOWHERE, eq=False, repr=False)


@frozen
class Derivation:
    """`derive weight from fp32`: the state is not stored.

    It is the other, rounded to nearest even.
    """

    state: str
    source: str


@frozen(eq=False, slots=False)
class Layout:
    """A closed layout.

    `sizes` holds dims and mesh axes; `origins` has the origin of every value.
    """

    name: str
    call: str
    sizes: dict[str, int]
    config: Config
    tensors: dict[str, LogicalTensor]
    aliases: dict[str, str]
    states: tuple[LogicalState, ...]
    model_groups: tuple[tuple[str, tuple[str, ...]], ...]
    meshes: tuple[Mesh, ...]
    indices: dict[str, Axis]  # `index` statements: a bracketed index, or a dim, as its digits
    files: dict[str, FileRule]
    entries: tuple[Entry, ...]
    state_lines: tuple[States, ...]
    groups: dict[str, Group]
    derived: tuple[Derivation, ...]
    blobs: tuple[BlobRule, ...]
    framework: str
    settings: dict[str, Value]
    origins: tuple[tuple[str, object, str], ...]
    model_name: str = ""
    model_arguments: tuple[tuple[str, Value], ...] = ()  # of the model's parameters
    taken: tuple[GlobMatch, ...] = ()  # tensors of each glob, in the text's order
    not_kept: frozenset[str] = frozenset()  # states that it says it stores `none` of; "*" is all of them
    fillings: tuple[Filling, ...] = ()
    domains: dict[str, DomainRule] = field(factory=dict)  # by kind
    extended: frozenset[Span] = frozenset()  # where lines of entries stand that are those of a layout that it extends
    families: dict[str, Family] = field(factory=dict)  # tensors that entries store together, by the name of all
    wild: range = range(0)  # numbers of the entries that globs and `*` make: they follow the model's order

    def __str__(self) -> str:
        counts = {
            "tensors": len(self.tensors),
            "files": len(self.files),
            "entries": len(self.entries),
            "state lines": len(self.state_lines),
        }
        text = ", ".join(f"{count:,} {what}" for what, count in counts.items())
        return f"{self.call} of {self.model_call or 'any'}, {self.ranks:,} ranks: {text}"

    def dtype_of(self, path: str, state: str) -> str:
        """Type of a tensor's weight or of one of its states.

        Empty if the model has none.
        """
        tensor = self.placed[path]
        if state == "weight":
            return tensor.dtype or ""
        return dict(tensor.state_dtypes).get(state) or self.state_dtypes.get(state, "")

    @cached_property
    def placed(self) -> dict[str, LogicalTensor]:
        """Tensors as entries store them, in the model's order.

        A family replaces its members.
        """
        if not self.families:
            return self.tensors
        first = {family.names[0]: family.tensor for family in self.families.values()}
        members = {name for family in self.families.values() for name in family.names}
        found = (first.get(path, None if path in members else tensor) for path, tensor in self.tensors.items())
        return {tensor.path: tensor for tensor in found if tensor is not None}

    def members(self, path: str) -> tuple[str, ...]:
        """Tensors of the model behind a stored one's name."""
        return self.families[path].names if path in self.families else (path,)

    @cached_property
    def state_dtypes(self) -> dict[str, str]:
        """The type of each state, of tensors that say no other."""
        return {s.name: s.dtype for s in reversed(self.states)}

    @cached_property
    def reduced(self) -> frozenset[str]:
        """States that lack dims of their parameters."""
        return frozenset(s.name for s in self.states if s.is_reduced)

    @property
    def ranks(self) -> int:
        return prod(self.meshes[0].degrees) if self.meshes else 1

    @property
    def model_call(self) -> str:
        """The model as it is called: `gpt(layers = 4)`."""
        shown = ", ".join(f'{n} = "{v}"' if isinstance(v, str) else f"{n} = {v}" for n, v in self.model_arguments)
        return f"{self.model_name}({shown})" if shown else self.model_name

    def mesh_of(self, axis: str) -> Mesh | None:
        return next((m for m in self.meshes if axis in m.axes), None)


# ---- failure domains -------------------------------------------------------------------------------------------------


Column = NDArray[np.int64]


def domain_rules(items: Iterable[nodes.LayoutItem], scope: Scope) -> dict[str, DomainRule]:
    """`domain` statements by kind.

    Raises: UcplError E122, and errors of templates that cannot be read.
    """
    found: dict[str, DomainRule] = {}
    for item in items:
        if not isinstance(item, nodes.Domain):
            continue
        path = closed(item.template, item.span, scope, frozenset(scope.mesh_axes) | {"rank"})
        odd = sorted(path.names & (PLACE_WORDS - {"rank"}) - set(scope.mesh_axes))
        odd = odd or sorted(path.names - PLACE_WORDS - set(scope.mesh_axes) - {n for n, _ in path.sizes})
        if odd:
            axes = ", ".join(f"{{{axis}}}" for axis in scope.mesh_axes) or "{rank}"
            what = f'"{item.template}" names `{odd[0]}`, which a rank does not have'
            fail("E122", what, at(item.span), remedy=f"a domain is given by places of the mesh: {axes}")
        found[item.kind] = DomainRule(item.kind, path, item.span)
    return found


def domains_of(layout: Layout, kind: str) -> tuple[tuple[int, ...], ...]:
    """Ranks of each domain, in the order of their first ranks.

    There are none for a kind that the layout does not have.
    """
    rule = layout.domains.get(kind)
    if rule is None:
        return ()
    ranks = np.arange(max(1, layout.ranks))
    told: dict[str, Column] = {"rank": ranks}
    for mesh in layout.meshes:
        step = 1
        for axis, degree in zip(reversed(mesh.axes), reversed(mesh.degrees), strict=True):
            told[axis] = ranks // step % degree
            step *= degree
    return _grouped(rule, told, len(ranks))


def _grouped(rule: DomainRule, told: Mapping[str, Column], count: int) -> tuple[tuple[int, ...], ...]:
    values = {**dict(rule.path.sizes), **told}
    _, holes = columns(rule.path)
    marks = np.zeros(count, np.int64)
    for hole in holes:
        column = np.broadcast_to(np.asarray(evaluate(hole.expr, values)), count)
        _, inner = np.unique(column, return_inverse=True)
        _, marks = np.unique(np.stack([marks, inner]), axis=1, return_inverse=True)
    _, first, which = np.unique(marks, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    found: list[list[int]] = [[] for _ in order]
    for rank, one in enumerate(place[which.reshape(-1)]):
        found[one].append(rank)
    return tuple(map(tuple, found))
