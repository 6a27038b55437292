"""Dims whose size depends on an index (`dim f = [64, 128, 64] by l`), expanded.

Of a tensor with such a dim, the layers of one size are a tensor of their own: `w : l f h` is `w[f=64] : l[0, 2] f h`
and `w[f=128] : l[1] f h`, in which `f` has one size. From there on they are tensors like any others, and those that are
alike fold. An entry is expanded in the same way, so that every cut is of the size that its layers have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from attrs import evolve

from ucpl.errors import fail
from ucpl.language import nodes, print_expr
from ucpl.language.walk import inside, rewritten, walk
from ucpl.layout.arithmetic import meant_number
from ucpl.layout.axes import tensor_of_label
from ucpl.layout.brackets import chosen
from ucpl.layout.scope import Scope, at
from ucpl.records import frozen

__all__ = ["of_sizes", "whole_dim", "whole_name", "whole_text", "written_out"]

Sizes = tuple[tuple[str, int], ...]  # dims by an index, each with one of its sizes
_OF = re.compile(r"\.of[0-9]+_*$")
_IN_BRACES = re.compile(r"\.of[0-9]+_*(?=\b[^{}]*\})")
_SUFFIX = re.compile(r"(?:\[\w+=[0-9]+(?:, \w+=[0-9]+)*\])?(?:\[\w+=[0-9]+\.\.[0-9]+\])?$")
_BRACES = re.compile(r"\{([^{}:]*)((?::[^{}]*)?)\}")
_WORD = re.compile(r"[A-Za-z_][\w.]*")


def whole_name(path: str) -> str:
    """The text's name for a tensor: `w`, of `w[f=64]` and of `w[v=5..8]`.

    The latter are its live rows.
    """
    return _SUFFIX.sub("", path) if path.endswith("]") else path


def whole_dim(name: str) -> str:
    """The name that the text has for a dim: `f`, of `f.of64`."""
    return _OF.sub("", name)


def whole_text(text: str) -> str:
    """A template with the text's names of dims in its braces."""
    return _IN_BRACES.sub("", text)


def of_sizes(names: Iterable[str], tensors: Iterable[str]) -> set[str]:
    """The names, and for each full name its tensors."""
    said = set(names)
    return said | {t for t in tensors if whole_name(t) in said}


@frozen
class Varying:
    """A dim that has a size for each value of an index."""

    name: str
    index: str
    sizes: tuple[int, ...]


def written_out(
    model_items: list[nodes.ModelItem], items: list[nodes.LayoutItem], scope: Scope
) -> tuple[list[nodes.ModelItem], list[nodes.LayoutItem]]:
    """The statements without dims by an index. Raises E198, E199."""
    said = [(b, i.span) for i in model_items if isinstance(i, nodes.Dims) for b in i.bindings if b.by is not None]
    if not said:
        return model_items, items
    dims = {b.name: _varying(b, scope) for b, _ in said}
    tensors = {i.path for i in model_items if isinstance(i, nodes.Tensor)}
    work = _Work(dims, scope, frozenset(tensors), {}, {}, {})
    new_model = [made for item in model_items for made in work.of_model(item)]
    entries = {id(i): work.of_layout(i) for i in items if isinstance(i, nodes.Entry)}  # groups speak of them all
    new_items = [made for item in items for made in entries.get(id(item)) or work.of_group(item)]
    bindings = tuple(nodes.Binding(name, nodes.Number(size)) for name, size in work.sizes.items())
    return [*new_model, nodes.Dims(bindings)] if bindings else new_model, new_items


def _varying(binding: nodes.Binding, scope: Scope) -> Varying:
    assert binding.by is not None
    value = scope.lookup(binding.name, binding.span)
    if value is None:
        scope.size(binding.name, binding.span)  # names the absent key of the config
    count = scope.size(binding.by, binding.span)
    if not isinstance(value, list) or not all(isinstance(n, int) and n >= 0 for n in value):
        text = f"`{binding.name}` by `{binding.by}` is a list of sizes, not {value!r}"
        fail("E198", text, at(binding.span), remedy=_listed(binding, value, count))
    sizes = tuple(n for n in value if isinstance(n, int))
    if len(sizes) != count:
        fail(
            "E198",
            f"`{binding.name}` has {len(sizes)} sizes, and `{binding.by}` is {count}",
            at(binding.span),
            remedy=f"write {count} sizes, one for each index of `{binding.by}`",
        )
    return Varying(binding.name, binding.by, sizes)


def _listed(binding: nodes.Binding, value: object, count: int) -> str:
    """Remedy for sizes that are no list of whole numbers."""
    if not isinstance(value, list):
        line = f"dim {binding.name} = {print_expr(binding.value)}"
        return f"one size for all indices has no brackets: {line}; a list has one for each of the {count}"
    numbers = [one if isinstance(one, int) else meant_number(one) for one in value]
    if None in numbers:
        return f"write {count} whole numbers, one for each index of `{binding.by}`"
    return f"write whole numbers, without quotes or points: {numbers}"


@frozen
class _Work:
    dims: Mapping[str, Varying]
    scope: Scope
    tensors: frozenset[str]  # all names of the model
    sizes: dict[str, int]  # of the dims of one size
    parts: dict[str, list[tuple[Sizes, frozenset[int]]]]  # of each tensor with such dims: the sizes, and whose they are
    homes: dict[str, list[str]]  # paths of entries, as they were written out

    # ---- the model ---------------------------------------------------------------------------------------------------

    def of_model(self, item: nodes.ModelItem) -> Sequence[nodes.ModelItem]:
        match item:
            case nodes.Tensor() if any(d.name in self.dims for d in item.dims):
                return self.tensor(item)
            case nodes.Alias(path=path, owner=owner) if owner in self.parts:
                self.parts[path] = self.parts[owner]
                return [evolve(item, path=_named(path, s), owner=_named(owner, s)) for s, _ in self.parts[owner]]
            case nodes.Group(members=tuple(members)):
                return [evolve(item, members=tuple(p for m in members for p in self.named(m)))]
        return [item]

    def tensor(self, item: nodes.Tensor) -> list[nodes.Tensor]:
        mine = [self.dims[d.name] for d in item.dims if d.name is not None and d.name in self.dims]
        index = next((d for d in item.dims if d.name == mine[0].index), None)
        other = next((v for v in mine if v.index != mine[0].index), None)
        if index is None or other is not None:
            lacking = other or mine[0]
            others = [d.name for d in item.dims if d.name is not None and d.name not in self.dims]
            instead = (
                f", or say by which of its dims they are: dim {lacking.name} = ... by {others[0]}" if others else ""
            )
            fail(
                "E199",
                f"`{item.path}` has `{lacking.name}`, which is by `{lacking.index}`, and "
                + ("no such dim" if index is None else f"`{mine[0].name}`, which is by `{mine[0].index}`"),
                at(item.span),
                remedy=f"give it the dim that the sizes are by: {item.path} : {lacking.index} ...{instead}",
            )
        count = self.scope.size(mine[0].index, item.span)
        has = range(count) if index.range is None else chosen(index.range, mine[0].index, count, self.scope)
        found: dict[Sizes, list[int]] = {}
        for i in has:
            found.setdefault(tuple((v.name, v.sizes[i]) for v in mine), []).append(i)
        self.parts[item.path] = [(sizes, frozenset(values)) for sizes, values in found.items()]
        out = []
        for sizes, values in found.items():
            only = nodes.Among(tuple(map(nodes.Number, values)), span=index.span)
            dims = (evolve(d, range=only) if d is index else d for d in item.dims)
            out.append(evolve(item, path=_named(item.path, sizes), dims=tuple(self.sized(d, sizes) for d in dims)))
        return out

    def named(self, path: str) -> list[str]:
        """Tensors that a name means."""
        return [_named(path, sizes) for sizes, _ in self.parts[path]] if path in self.parts else [path]

    # ---- the layout --------------------------------------------------------------------------------------------------

    def of_layout(self, item: nodes.Entry) -> Sequence[nodes.LayoutItem]:
        return [item] if item.glob or item.path == "*" else self.entry(item)

    def of_group(self, item: nodes.LayoutItem) -> Sequence[nodes.LayoutItem]:
        match item:
            case nodes.Entry():
                return []
            case nodes.Index(name=name) if name in self.dims:
                return self.rule(item)
            case nodes.Group(members=tuple(members)):
                named = (p for m in members for p in self.homes.get(m, self.named(m)))
                return [evolve(item, members=tuple(dict.fromkeys(named)))]
        return [item]

    def rule(self, item: nodes.Index) -> list[nodes.Index]:
        """Rule of a dim by an index: all sizes are dealt alike."""
        if any(isinstance(n, nodes.Stack) for n in walk(item.axis)):
            fail(
                "E199",
                f"`{item.name}` has several sizes, and digits have one each",
                at(item.span),
                remedy=f"write the digits' dims in the tensor, or cut the complete index: index {item.name} = {item.name}@tp",
            )

        def change(node: nodes.Record) -> nodes.Record | None:
            if isinstance(node, nodes.Dim) and node.name == item.name:
                return evolve(inside(node, change), name=self.dim(item.name, size))
            if isinstance(node, nodes.Name) and node.path == item.name:
                return nodes.Number(size, span=node.span)
            return None

        out = []
        for size in dict.fromkeys(self.dims[item.name].sizes):
            out.append(evolve(rewritten(item, change), name=self.dim(item.name, size)))
        return out

    def entry(self, item: nodes.Entry) -> list[nodes.Entry]:
        """One a combination of sizes that a layer has."""
        labels = [t.label for s in walk(*(item.shape or ())) if isinstance(s, nodes.Stack) for t in s.terms if t.label]
        stands = {label: tensor_of_label(item.path, label, self.tensors) for label in labels}
        of = [p for p in stands.values() if p in self.parts] or [p for p in (item.path,) if p in self.parts]
        if not of:
            return [item]
        if not all(self.parts[p] for p in of):  # no layer has all of them
            self.homes.setdefault(item.path, [])
            return []
        index = self.dims[self.parts[of[0]][0][0][0][0]].index
        if item.shape is not None and index not in {n.name for n in walk(*item.indices) if isinstance(n, nodes.Dim)}:
            fail(
                "E199",
                f"`{item.path}` has layers of different sizes, which are not stacked",
                at(item.span),
                remedy=f"store them one by one: {item.path}[{index}] = ...",
            )
        out = []
        for chosen_parts in product(*(self.parts[p] for p in of)):
            sizes = dict(pair for one, _ in chosen_parts for pair in one)
            if frozenset.intersection(*(values for _, values in chosen_parts)):
                found = tuple(sizes.items())
                by_path = {p: _named(p, one) for p, (one, _) in zip(of, chosen_parts, strict=True)}
                named = {label: by_path.get(p, p) for label, p in stands.items()}
                out.append(self.of_size(item, found, named))
        self.homes.setdefault(item.path, []).extend(e.path for e in out)
        return out

    def of_size(self, item: nodes.Entry, sizes: Sizes, named: Mapping[str, str]) -> nodes.Entry:
        """The entry of the layers of these sizes.

        `named`: its labels that are tensors by size.
        """

        of_dim = dict(sizes)

        def template(text: str) -> str:
            """A template with the dim of this size in braces.

            A dim by an index can be an index itself (blocks of a stage).
            """
            return _BRACES.sub(lambda m: "{" + _WORD.sub(word, m[1]) + m[2] + "}", text)

        def word(match: re.Match[str]) -> str:
            name, dot, rest = match[0].rpartition(".") if match[0].endswith((".local", ".size")) else (match[0], "", "")
            return f"{self.dim(name, of_dim[name])}{dot}{rest}" if name in of_dim else match[0]

        def change(node: nodes.Record) -> nodes.Record | None:
            if isinstance(node, nodes.Term) and node.label is not None:
                return evolve(node, label=named[node.label], axes=tuple(rewritten(a, change) for a in node.axes))
            if isinstance(node, nodes.Dim) and node.name in of_dim:
                return evolve(inside(node, change), name=self.dim(node.name, of_dim[node.name]))
            if isinstance(node, nodes.Name) and node.path in of_dim:
                return nodes.Number(of_dim[node.path], span=node.span)
            if isinstance(node, nodes.Clause) and node.word == "as":
                return evolve(node, args=(template(node.args[0].replace("{name}", item.path)),))
            return None

        return evolve(rewritten(item, change), path=_named(item.path, sizes))

    # ---- names -------------------------------------------------------------------------------------------------------

    def sized(self, dim: nodes.Dimension, sizes: Sizes) -> nodes.Dimension:
        size = dict(sizes).get(dim.name or "")
        return dim if size is None or dim.name is None else evolve(dim, name=self.dim(dim.name, size))

    def dim(self, name: str, size: int) -> str:
        """A dim of one size: its name in expanded texts."""
        made = f"{name}.of{size}"
        while self.scope.knows(made) and made not in self.sizes:
            made += "_"
        self.sizes[made] = size
        return made


def _named(path: str, sizes: Sizes) -> str:
    shown = (f"{name.rpartition('.')[2]}={size}" for name, size in sizes)
    return f"{path}[{', '.join(shown)}]"
