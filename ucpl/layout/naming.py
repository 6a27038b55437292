"""Names of stored tensors: dims in braces are indices in brackets.

`{e}` has a value of its own for each stored tensor if `e` is in brackets. If it is not, one name would be for all of
it, and the number in it would be the dim's size: `{size(e)}` gives that, and `{e}` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NoReturn

from ucpl.errors import fail
from ucpl.language import nodes
from ucpl.layout import axes as ax
from ucpl.layout.by_index import whole_dim, whole_name, whole_text
from ucpl.layout.layout import Entry, Group, LogicalTensor, States
from ucpl.layout.scope import Scope, at
from ucpl.layout.templates import PLACE_WORDS, template
from ucpl.records import frozen

__all__ = ["Naming", "names_in", "naming_of"]


@lru_cache(maxsize=4096)  # an entry with `*` says the same of every tensor
def names_in(text: str) -> frozenset[str]:
    """Names in the braces of a template."""
    return template(text, nodes.NOWHERE).names


Text = tuple[str, nodes.Span]  # a template as it is written, and its statement


@frozen
class Naming:
    """Names in the templates of a layout, and the values of places."""

    scope: Scope
    indices: dict[str, ax.Axis]
    mesh_axes: frozenset[str]
    files: dict[str, tuple[Text, ...]]  # of each file: its path and key

    def check_entry(self, item: nodes.Entry, entry: Entry, tensors: dict[str, LogicalTensor]) -> None:
        """Check that dims in an entry's file and key are indices.

        They must be in the entry's brackets. Raises E122.
        """
        if entry.storing.key is not None:
            dims = {d for path in entry.targets.values() for d in tensors[path].dims}
            self._demand(item, entry.storing.file, (entry, entry.indices), dims)

    def check_line(
        self, item: nodes.States, line: States, entries: Iterable[Entry], layout: Trained, members: Members
    ) -> None:
        """Check the names that a state line adds, and of flat buffers.

        Their indices are those of their group. members: the model's names for that of an entry. Raises E122.
        """
        tensors, groups = layout
        if not isinstance(line.shape, str):
            dims = {d for t in tensors.values() for d in t.dims}
            for name in line.groups or ("",):
                self._demand(item, line.storing.file, (line, groups[name].indices if name in groups else ()), dims)
            return
        is_member = _membership(line, groups)
        for entry in entries:
            of = [tensors[path] for path in entry.targets.values()]
            if all(t.kind == "parameter" for t in of) and is_member(members(entry.path)[0]):
                dims = {d for t in of for d in t.dims}
                self._demand(item, line.storing.file, (entry, entry.indices), dims)

    def _demand(self, item: Item, file: str, owner: Owner, dims: set[str]) -> None:
        said = [(c.args[0], c.span if c.span.line else item.span) for c in item.clauses if c.word == "as"]
        texts = [*self.files.get(file, ()), *said]
        spoken = frozenset[str]().union(*(names_in(text) for text, _ in texts))
        if not spoken:
            return
        brackets = ax.dims_of(*owner[1])
        if isinstance(owner[0], Entry) and not {*brackets} <= {*dims, *(n for d in dims for n in self._of(d))}:
            return  # an index that the tensor does not have: E205
        given = {n for b in brackets for n in self._of(b)} | self.mesh_axes | PLACE_WORDS
        for dim in sorted(dims - set(brackets)):
            for name in self._of(dim):
                if name in spoken and name not in given:
                    text, span = next(t for t in texts if name in names_in(t[0]))
                    self._refuse(name, dim, (text, span), owner[0])

    def _of(self, dim: str) -> Iterator[str]:
        """Value of a place that has this index."""
        yield from (dim, f"{dim}.local", *ax.leaves_of(dim, self.indices))

    def _refuse(self, name: str, dim: str, text: Text, owner: Entry | States) -> NoReturn:
        name, dim, bare = whole_dim(name), whole_dim(dim), name.removesuffix(".local")
        size = self.scope.value(bare) if self.scope.knows(bare) else None
        if isinstance(owner, Entry):
            what = f"`{whole_name(owner.path)}`"
            named = ", ".join([*map(whole_dim, ax.dims_of(*owner.indices)), dim])
            one = f"{whole_name(owner.path)}[{named}] = ... is one stored tensor for each"
        else:
            what, one = "this state line", f"group NAME[{dim}] = ... is one flat buffer for each"
        places = [at(text[1], "named here")]
        if owner.span.line and owner.span.line != text[1].line:
            places.append(at(owner.span, f"no index {dim} in brackets here"))
        fail(
            "E122",
            f'"{whole_text(text[0])}" names `{name}`, which has no value here: {what} has no index `{dim}` in brackets',
            *places,
            remedy=f"{one}; {{size({whole_dim(bare)})}} is the size{'' if size is None else f', {size}'}",
        )


def _membership(line: States, groups: dict[str, Group]) -> Callable[[str], bool]:
    """True if a state line names a group of an entry."""
    of = [groups[name] for name in line.groups or () if name in groups]
    left_out = {m for g in of for w in g.without or () if w in groups for m in groups[w].members or ()}
    if not of or any(g.members is None for g in of):
        return lambda path: path not in left_out
    named = {m for g in of for m in g.members or ()}  # a set: groups of a run have a hundred thousand members
    return lambda path: path in named and path not in left_out


Trained = tuple[dict[str, LogicalTensor], dict[str, Group]]  # tensors and groups of a layout
Members = Callable[[str], tuple[str, ...]]
Owner = tuple[Entry | States, tuple[ax.Axis, ...]]  # owner of a name, and its indices
Item = nodes.Entry | nodes.States


def naming_of(items: Iterable[nodes.LayoutItem], scope: Scope, indices: dict[str, ax.Axis]) -> Naming:
    """Naming of a layout.

    `items`: of the layout; the name of a file is checked against all entries in it.
    """
    items = list(items)
    files = {i.name: i for i in items if isinstance(i, nodes.Files) and scope.holds(i.when)}
    texts = {
        name: tuple((text, i.span) for text in (i.template, i.key) if i.form is not None and text is not None)
        for name, i in files.items()
    }
    axes = frozenset(a for i in items if isinstance(i, nodes.Mesh) for a in i.axes)
    return Naming(scope, indices, axes, texts)
