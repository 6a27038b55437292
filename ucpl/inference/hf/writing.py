"""The text of a spec.

A model, its layout on disk, and tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import evolve, field

from ucpl.inference.hf.folding import Folded, Form, fold, joined
from ucpl.inference.hf.kinds import Kinds
from ucpl.inference.hf.matching import Versions
from ucpl.inference.hf.quantised import GROUP, Pair, PairText, Whole, grains_of, notes_of, pairs_of, whole_of
from ucpl.inference.hf.recipes import parts_of, roles_of
from ucpl.inference.hf.records import ModelFacts, Vector, agrees, identifier, moves
from ucpl.inference.hf.sizes import Axis, DimSize, SizeSolver, Stacked
from ucpl.inference.hf.varying import numbers_of
from ucpl.language import nodes, upgraded
from ucpl.language.printer import print_item, statements_of
from ucpl.language.words import is_dotted
from ucpl.records import define, frozen
from ucpl.texts import Json

__all__ = ["text_of"]

_EXPERTS = re.compile(r"expert")
_EXPERTS_RANK = 3  # axes of a weight that holds all experts
_ONE_STAGE, _STAGES = "tp_{tp:02}.safetensors", "pp_{pp:02}_tp_{tp:02}.safetensors"
_TP = {
    "colwise": 0,
    "rowwise": 1,
    "colwise_gather_output": 0,
    "embedding_rowwise": 0,
    "colwise_rep": 0,
    "rowwise_rep": 1,
}
_HELD_WHOLE = re.compile(r"replicated|moe_tp_experts|grouped|dispatch|sequence_parallel|mla_")


def text_of(facts: ModelFacts) -> str:
    """The text of a .ucpl, in its usual form."""
    return _Writer(facts).text()


@define
class _Lines:
    """Statements of the text, by place."""

    tensors: list[nodes.Tensor] = field(factory=list)  # of the model
    remarks: dict[str, str] = field(factory=dict)  # by the path of a tensor
    entries: list[nodes.Entry] = field(factory=list)
    products: list[nodes.Entry] = field(factory=list)  # of `dequantised`
    is_cut: bool = False


@frozen
class _Stored:
    """A stored tensor for the text: path, dims, key, and axes."""

    path: str
    indices: tuple[str, ...]
    extents: tuple[nodes.Dimension, ...]
    clauses: tuple[nodes.Clause, ...]
    axes: tuple[_Named, ...]


@frozen
class _Dim:
    """A dim's name in the text, and its cut by tensor parallelism."""

    name: str
    cut: str | None = None
    grain: int = 1  # it is cut in units of so many


@frozen
class _Named:
    """An axis with names for its dims.

    `parts` is empty if it is no stack.
    """

    outer: tuple[_Dim, ...]
    parts: tuple[tuple[str, tuple[_Dim, ...]], ...] = ()


@define
class _Writer:
    facts: ModelFacts
    folded: list[Folded] = field(init=False)
    by_pattern: dict[Form, Folded] = field(init=False)
    sizes: SizeSolver = field(init=False)
    versions: Versions = field(init=False)
    kinds: Kinds = field(init=False)
    dims: dict[str, str] = field(factory=dict)  # name -> its expression
    counts: dict[str, str] = field(factory=dict)  # container -> dim
    said: list[str] = field(factory=list)
    frozen: dict[tuple[int, str], str] = field(factory=dict)  # (number, keys that move it) -> a tensor
    models: set[str] = field(init=False)
    pairs: dict[Form, tuple[Pair, list[Whole | None]]] = field(init=False)  # by the pattern of either tensor
    grains: dict[str, int] = field(init=False)
    digits: list[str] = field(factory=list)  # dims that are stored as groups
    layers: dict[str, str] = field(factory=dict)  # container -> the text of its keys

    def __attrs_post_init__(self) -> None:
        self.folded = fold(self.facts.tensors)
        self.by_pattern = {f.pattern: f for f in self.folded}
        self.sizes = SizeSolver(self.facts)
        self.versions = Versions(self.facts, self.folded)
        self.kinds = Kinds(self.facts, self.sizes, self.dims)
        self.models = set(_model_types(self.facts.config))
        pairs = [(p, self.wholes(p)) for p in pairs_of(self.facts, self.folded)]
        self.pairs = {f.pattern: found for found in pairs for f in (found[0].weight, found[0].scale)}
        self.grains = grains_of(pairs)

    def text(self) -> str:
        folded = self.folded
        self.count(folded)
        names = self.paths(folded)
        dtypes = [f.first.dtype for f in folded if f.pattern not in self.pairs] or ["f32"]
        common = max(dict.fromkeys(dtypes), key=dtypes.count)
        lines = _Lines()
        found: list[tuple[Folded, _Stored]] = []
        named = dict(zip((f.pattern for f in folded), names, strict=True))
        for f, path in zip(folded, names, strict=True):
            if f.pattern in self.pairs:
                if f is self.pairs[f.pattern][0].weight:
                    self.write_pair(lines, self.pairs[f.pattern], path, named[self.pairs[f.pattern][0].scale.pattern])
                continue
            found.append((f, self.stored(f, path)))
        kept = self.settled(found)
        for f, _ in found:
            self.write(lines, f, kept[f.sample], None if f.first.dtype == common else f.first.dtype)
        model = _model_name(self.facts.config)
        return self.page(model, common, lines, dict(zip((f.sample for f in folded), names, strict=True)))

    def page(self, model: str, dtype: str, found: _Lines, names: dict[str, str]) -> str:
        what = self.facts.origin
        lines = ["ucpl 1", "", f"# Written by `ucpl import hf`, from {what}: a first spec, to be read and corrected."]
        lines += [
            _remark(note)
            for note in (*self.facts.notes, *self.said, *self.numbers(), *notes_of(self.facts, bool(self.pairs)))
        ]
        if self.facts.behind is not None:
            lines += [_remark(self.facts.behind.note), "", f"let mtp = {self.facts.behind.value}"]
        lines += ["", f"model {model} {{"]
        lines += [f"  dim {name} = {value}" for name, value in self.dims.items()]
        lines += [f"  let {name} = {value}" for name, value in self.kinds.lets.items()]
        lines += [f"  {line}" for line in self.digits]
        alone = [f"{print_item(t)}{found.remarks[t.path]}" for t in found.tensors if t.path in found.remarks]
        together = _joined_lines(t for t in found.tensors if t.path not in found.remarks)
        lines += ["", f"  dtype {dtype}", *map(_indented, [*together, *alone])]
        owners = {f.name for f in self.facts.tensors}
        for alias, owner in self.facts.aliases.items():
            if owner in names:
                lines.append(f"  {print_item(nodes.Alias(alias, names[owner]))}")
            elif owner in owners:
                said = f"{alias} is a second name of {owner}, one of several that are folded above"
                lines.append(f"  {_remark(said)}")
        entries = _joined_lines(e if found.is_cut else _everywhere(e) for e in found.entries)
        lines += ["}", ""]
        lines += [f'layout hf(shard = "5GB") of {model} {{', "  framework huggingface(shard = shard)"]
        lines += [*map(_indented, self.ranks() if found.is_cut else ())]
        lines += [
            '  file weights = safetensors "model.safetensors"',
            "  derive fp32 from weight  # it has no other masters",
            *(f'  let {name} = "{container}.{{{self.counts[container]}}}."' for container, name in self.layers.items()),
        ]
        lines += ["", *map(_indented, entries), "}"]
        if found.products:
            lines += ["", "# Each weight times its scales, rounded once."]
            lines += [f'layout dequantised(shard = "5GB") of {model} extends hf(shard = shard) {{']
            lines += [*map(_indented, _joined_lines(found.products)), "}"]
        if found.is_cut:
            lines += [
                "",
                "# Heads and their groups are not split; the inner width and the vocabulary are in chunks. One file a rank.",
                f"layout tensor_parallel(tp, pp = 1) of {model} extends hf() {{",
                "  framework torch()",
                f'  file weights = safetensors "{_ONE_STAGE}" when pp == 1',
                f'  file weights = safetensors "{_STAGES}" when pp > 1',
                "}",
            ]
        return upgraded("\n".join(lines) + "\n", f"{model}.ucpl")

    def ranks(self) -> list[str]:
        """The mesh and its indices.

        Each stage has a run of the layers.
        """
        dims = dict.fromkeys(self.counts[c] for c in self.stacks())
        dealt = (nodes.Index(d, nodes.Cut(nodes.Dim(d), (nodes.Split("pp", "spread"),))) for d in dims)
        return ["let tp = 1, pp = 1", "mesh pp tp", *map(print_item, dealt)]

    def stacks(self) -> list[str]:
        """The containers of layers: numbered, and in no other one."""
        found = dict.fromkeys(f.containers[0] for f in self.folded if f.containers)
        return [c for c in found if not _EXPERTS.search(c.rpartition(".")[2])]

    def stage(self, f: Folded) -> tuple[nodes.Clause, ...]:
        """The stage of a tensor outside the layers.

        A tensor before them is in the first stage, one behind them in the last. Every stage has it if there are several
        stacks of layers, or if a second name shares it.
        """
        stacks = self.stacks()
        if f.containers or len(stacks) != 1 or not self.sizes.is_built or f.sample in self.facts.aliases.values():
            return ()
        if f.sample.startswith(f"{stacks[0]}."):
            return ()
        first = nodes.Number(0)
        layers = self.folded.index(next(g for g in self.folded if g.containers))
        is_before = self.folded.index(f) < layers
        return (nodes.Clause("at", ("pp", first if is_before else nodes.Unary("-", nodes.Number(1)))),)

    # ---- one tensor ----------------------------------------------------------------------------------------------

    def stored(self, f: Folded, path: str) -> _Stored:
        """A tensor with the cut of its dims or the class's plan."""
        indices = tuple(self.counts[c] for c in f.containers)
        extents = tuple(self.extent(f, i) for i in range(len(f.containers)))
        key = nodes.Clause("as", (self.template(f, indices, path),))
        stored = _Stored(path, indices, extents, (*self.stage(f), key), self.axes(f, set(indices)))
        return stored if any(_is_cut(axis) for axis in stored.axes) else self.planned(f, stored)

    def settled(self, found: list[tuple[Folded, _Stored]]) -> dict[str, _Stored]:
        """The tensors with cuts that a job can run.

        The modules of a layer are cut alike or not at all. A dim that only one module of a layer is cut along stays
        complete, and so does one whose double or triple is an axis of the same module's neighbour: parts of unknown
        order may be in it.
        """
        modules: dict[tuple[Form, str], set[Form]] = {}
        for f, stored in found:
            for name in _cut_names(stored):
                modules.setdefault((_layer(f), name), set()).add(_module(f))
        for pair, wholes in self.pairs.values():
            for whole in wholes:
                if whole is not None and whole.of:
                    modules.setdefault((_layer(pair.weight), whole.of), set()).add(_module(pair.weight))
        for f, stored in found:  # dims that one tensor is cut along are one
            keys = [(_layer(f), name) for name in _cut_names(stored)]
            several = set().union(*(modules[key] for key in keys))
            modules |= dict.fromkeys(keys, several)
        alone = {key for key, several in modules.items() if len(several) < 2 and key[0]}
        fused = self.fused(found)
        out: dict[str, _Stored] = {}  # by sample: tensors of several shapes can have one pattern
        for f, stored in found:
            refused = {n for n in _cut_names(stored) if (_layer(f), n) in alone or (_parent(f), n) in fused}
            out[f.sample] = evolve(stored, axes=tuple(_uncut(a, refused) for a in stored.axes))
        return out

    def fused(self, found: list[tuple[Folded, _Stored]]) -> set[tuple[Form, str]]:
        """Cut dims of a module, next to an unexplained multiple of them."""
        out: set[tuple[Form, str]] = set()
        for f, stored in found:
            for i, axis in enumerate(stored.axes):
                if axis.parts or not (names := {d.name for d in axis.outer if d.cut}):
                    continue
                for g, other in found:
                    if _parent(g) != _parent(f) or (many := self.multiple(g, other, self.vector(f, i))) is None:
                        continue
                    out |= {(_parent(f), name) for name in names}
                    self.say(
                        f"{joined(g.pattern, '*')}: an axis is {many} * {' * '.join(d.name for d in axis.outer)}. Its"
                        f" {many} parts may be side by side: write them. Until then the tensors of the module stay complete."
                    )
        return out

    def multiple(self, f: Folded, stored: _Stored, vector: Vector) -> int | None:
        """2 or 3, if an axis is so many times as long.

        The axis is so in every version, and has no parts and no cuts.
        """
        for i, axis in enumerate(stored.axes):
            if axis.parts or _is_cut(axis) or (not self.sizes.is_built and self.meant(f, i) is not None):
                continue
            mine = self.vector(f, i)
            for many in (2, 3):
                if len(mine) == len(vector) and agrees(
                    mine, tuple(many * b or a for a, b in zip(mine, vector, strict=True))
                ):
                    return many
        return None

    def write(self, lines: _Lines, f: Folded, stored: _Stored, dtype: str | None) -> None:
        kind = "buffer" if f.first.is_buffer else "parameter"
        for name, dims in _tensors(stored):
            item = nodes.Tensor(name, (*stored.extents, *map(nodes.Dimension, dims)), dtype, kind)  # type: ignore[arg-type]
            lines.tensors.append(item)
            if remark := self.remark(f, stored):
                lines.remarks[name] = remark
        lines.is_cut |= any(_is_cut(axis) for axis in stored.axes)
        lines.entries.append(_entry(stored))

    def wholes(self, pair: Pair) -> list[Whole | None]:
        """The axes of a weight in blocks, as one dim each.

        If dims give no cut, the class's plan does.
        """
        found = [whole_of(self.meant(pair.whole, i), n) for i, n in enumerate(pair.whole.first.shape)]
        axis = self.planned_axis(pair.whole)
        if axis is not None and axis < len(found) and not any(w is not None and w.of for w in found):
            size = found[axis].size if found[axis] is not None else None  # type: ignore[union-attr]
            if size is not None:
                found[axis] = Whole(evolve(size, cut="chunk"), size.name)
        return found

    def write_pair(self, lines: _Lines, found: tuple[Pair, list[Whole | None]], path: str, scale: str) -> None:
        """Write a weight in blocks and its scale: model, files, products, ranks.

        Ranks have the scales of their parts.
        """
        pair, wholes = found
        indices = tuple(self.counts[c] for c in pair.weight.containers)
        extents = tuple(self.extent(pair.weight, i) for i in range(len(indices)))
        taken = set(indices)
        dims = [
            self.dim(w.size, taken).name if w is not None else self.named(None, n, taken).outer[0].name
            for w, n in zip(wholes, pair.whole.first.shape, strict=True)
        ]
        blocks = [self.blocks(name, by) for name, by in zip(dims, pair.by, strict=True)]
        if pair.packed:
            path = path.removesuffix("_blocks")
            self.dims[f"{dims[1]}_{GROUP}"] = str(GROUP)
            line = f"index {dims[1]} = ({blocks[1]} {dims[1]}_{GROUP})"
            self.digits += [line] if line not in self.digits else []
        text = PairText(pair, (path, scale), indices, tuple(dims), tuple(blocks))
        types = ("f4_e2m1fn", "f8_e8m0fnu") if pair.packed else (pair.weight.first.dtype, pair.scale.first.dtype)
        lines.tensors += text.tensors(extents, types)
        keys = [
            self.template(f, indices, name)
            for f, name in zip((pair.weight, pair.scale, pair.whole), (path, scale, path), strict=True)
        ]
        lines.products += text.product(keys[2])
        cut = next((i for i in pair.order if (w := wholes[i]) is not None and w.of), None)
        if cut is not None:
            whole = wholes[cut]
            assert whole is not None
            lines.entries += text.cut((keys[0], keys[1]), cut, self.grains.get(whole.of, 1) * whole.unit)
            lines.is_cut = True
        else:
            lines.entries += text.stored((keys[0], keys[1]))

    def blocks(self, name: str, by: int) -> str:
        """The dim that counts blocks of another one."""
        if by == 1:
            return name
        return self.dim(DimSize(f"{name}_blocks", f"ceil({name}, {by})", (0,)), set()).name

    def remark(self, f: Folded, stored: _Stored) -> str:
        shape = f.first.shape
        unnamed = all(
            len(a.outer) == 1 and a.outer[0].name in (f"n{n}", f"m{n}") for a, n in zip(stored.axes, shape, strict=True)
        )
        square = len(shape) == 2 and shape[0] == shape[1] and unnamed
        return f"   # square, {shape[0]} by {shape[1]}: the shape does not distinguish the axes" if square else ""

    def axes(self, f: Folded, taken: set[str]) -> tuple[_Named, ...]:
        """The axes with their dims named.

        taken: names that the tensor has already.
        """
        out = []
        for i, size in enumerate(f.first.shape):
            found = self.meant(f, i)
            out.append(self.named(found, size, taken))
            if found is None:
                self.unexplained(joined(f.pattern, "*"), size, self.vector(f, i))
        return tuple(out)

    def vector(self, f: Folded, axis: int) -> Vector:
        """The size of an axis in every version, or its own only.

        If a version lacks the tensor, roles must decide.
        """
        shape = self.versions.shape(f)
        return shape[axis] if shape is not None else (f.first.shape[axis],)

    def meant(self, f: Folded, axis: int) -> Axis | None:
        """The dims of an axis; None: an unexplained number."""
        name = joined(f.pattern, "*")
        wanted = [axes[axis] for axes in roles_of(name) if axis < len(axes)]
        vector = self.vector(f, axis)
        for recipe in parts_of(self.models, name, axis):
            stacked = self.sizes.stacked(vector, recipe, name)
            if stacked is not None:
                return stacked
        plain = self.sizes.axis(vector, wanted, name)
        split = self.facts.splits.get(name)
        is_linear = len(f.first.shape) < _EXPERTS_RANK
        if split is None or (axis if is_linear else not axis):
            return plain
        if plain is not None and any(s.cut for s in plain) and not is_linear:
            return plain
        return self.sizes.split(vector, split, name) or plain

    def unexplained(self, name: str, size: int, vector: Vector) -> None:
        """Report a number that equals a key's, or that follows some key."""
        if self.sizes.is_built:
            if moves(vector):
                keys = [f"config.{k}" for k in self.sizes.movers(vector)]
                self.frozen.setdefault((size, ", ".join(keys)), name)
            return
        keys = [f"config.{k}" for k, n in numbers_of(self.facts.config).items() if n == size and n > 1]
        if keys:
            self.say(f"{size} is {', '.join(keys)}: whether a dim is one of them, the author knows.")

    def numbers(self) -> list[str]:
        """Numbers of the text that another config changes.

        Each has the keys that it follows.
        """
        kinds = [
            f"{container}: config.{key} also changes the layers that have a tensor, and the text may not follow it."
            for container, keys in self.kinds.notes.items()
            for key in keys
        ]
        return kinds + [
            f"{number} ({name}) follows {keys or 'several keys'} in a way that is unknown here: another config needs"
            " another number."
            for (number, keys), name in self.frozen.items()
        ]

    def say(self, note: str) -> None:
        if note not in self.said:
            self.said.append(note)

    def named(self, axis: Axis | None, size: int, taken: set[str]) -> _Named:
        if isinstance(axis, Stacked):
            outer = tuple(self.dim(s, taken) for s in axis.outer)
            before = set(taken)
            parts = tuple((label, tuple(self.dim(s, set(before)) for s in sizes)) for label, sizes in axis.parts)
            taken |= {d.name for _, dims in parts for d in dims}
            return _Named(outer, parts)
        if axis is not None:
            return _Named(tuple(self.dim(s, taken) for s in axis))
        for letter in "nmpqrstuvw":
            if f"{letter}{size}" not in taken:
                break
        return _Named((self.dim(DimSize(f"{letter}{size}", str(size), (size,)), taken),))

    def dim(self, size: DimSize, taken: set[str]) -> _Dim:
        """A dim of that value, renamed if the name is taken."""
        name, n = size.name, 2
        while self.dims.get(name, size.text) != size.text or name in taken:
            name, n = f"{size.name}{n}", n + 1
        self.dims[name] = size.text
        taken.add(name)
        return _Dim(name, size.cut, self.grains.get(size.name, 1))

    # ---- indices -------------------------------------------------------------------------------------------------

    def count(self, folded: list[Folded]) -> None:
        """A dim for every numbered container, named after its config key."""
        containers = dict.fromkeys(c for f in folded for c in f.containers)
        used: set[str] = set()
        for container in containers:
            vector = self.versions.counted(container)
            found = self.sizes.count(vector, container)
            short = _counting(container, found, self.dims)
            inside = any(dim == short and container.startswith(f"{c}.") for c, dim in self.counts.items())
            if found is not None and self.dims.get(short) == found.text and not inside:
                self.counts[container] = short  # two containers that one key counts have one dim
                continue
            behind = self.facts.behind
            text = found.text if found is not None else str(vector[0])
            if found is None and self.sizes.is_built and moves(vector):
                keys = [f"config.{k}" for k in self.sizes.movers(vector)]
                self.frozen.setdefault((vector[0], ", ".join(keys)), f"{container}.*")
            text += " + mtp" if behind is not None and behind.container == container else ""
            name = self.dim(DimSize(short, text, vector), used).name
            self.counts[container] = name

    def extent(self, f: Folded, place: int) -> nodes.Dimension:
        container = f.containers[place]
        lengths = self.versions.length(container)
        return nodes.Dimension(
            self.counts[container], None, self.kinds.among(self.versions.spans(f, place), lengths, container)
        )

    # ---- names ---------------------------------------------------------------------------------------------------

    def paths(self, folded: list[Folded]) -> list[str]:
        """Names in the spec, without folded numbers unless they would collide.

        A tensor of a layer has its name in there, if no other tensor has it.
        """
        short = [_short(f) for f in folded]
        inner = [_inner(f) or s for f, s in zip(folded, short, strict=True)]
        aliases = set(self.facts.aliases)
        taken = {f.sample for f in folded if not f.containers} | aliases
        out = []
        for f, within, s in zip(folded, inner, short, strict=True):
            if within not in aliases and (inner + short).count(within) == 1 + (within == s) and is_dotted(within):
                out.append(within)
            elif short.count(s) == 1 and s not in aliases and (is_dotted(s) or not f.containers):
                out.append(s)
            else:
                out.append(_marked(f, taken))
        return out

    def template(self, f: Folded, indices: tuple[str, ...], path: str) -> str:
        """The key of a tensor, with its name if possible."""
        if path == f.sample and not f.containers:
            return "{name}"
        numbers = iter(indices)
        key = ".".join(f"{{{next(numbers)}}}" if p is None else p for p in f.pattern)
        if path != _inner(f):
            return key
        rest = key.removeprefix(f"{f.containers[0]}.{{{indices[0]}}}.")
        return f"{{{self.layer(f.containers[0])}}}{'{name}' if rest == path else rest}"

    def layer(self, container: str) -> str:
        """The text that a container's keys begin with."""
        if container not in self.layers:
            name = "layer" if not self.layers else f"{self.counts[container]}_layer"
            while name in self.dims or name in self.layers.values():
                name += "_"
            self.layers[container] = name
        return self.layers[container]

    def planned(self, f: Folded, stored: _Stored) -> _Stored:
        """The pattern with the cut of the class's plan, if any."""
        axis = self.planned_axis(f)
        if axis is None or axis >= len(stored.axes) or len(stored.axes[axis].outer) != 1 or stored.axes[axis].parts:
            return stored  # the bias of a rowwise module is held by every rank
        cut = _Named((_Dim(stored.axes[axis].outer[0].name, "chunk"),))
        axes = tuple(cut if i == axis else a for i, a in enumerate(stored.axes))
        return evolve(stored, axes=axes)

    def planned_axis(self, f: Folded) -> int | None:
        """The axis along which the class's plan cuts the tensor's module."""
        module, _, leaf = joined(f.pattern, "*").rpartition(".")
        whole = f"{module}.{leaf}"
        style = self.facts.cuts.get(module, self.facts.cuts.get(whole))
        if style is None or _HELD_WHOLE.search(style):
            return None
        axis = _TP.get(style)
        if axis is None:
            self.say(f"{whole}: the class's plan says `{style}`, which tensor_parallel does not cut: write its parts.")
        return axis


# ---- patterns --------------------------------------------------------------------------------------------------------


def _tensors(stored: _Stored) -> list[tuple[str, list[str]]]:
    """The model tensors of a stored one: itself, or its named parts."""
    fused = next((i for i, a in enumerate(stored.axes) if a.parts), None)
    plain = [[d.name for d in a.outer] for a in stored.axes]
    if fused is None:
        return [(stored.path, [name for names in plain for name in names])]
    out = []
    for label, dims in stored.axes[fused].parts:
        names = [*plain[:fused], [*plain[fused], *(d.name for d in dims)], *plain[fused + 1 :]]
        out.append((_beside(stored.path, label), [name for axis in names for name in axis]))
    return out


def _label(path: str, label: str) -> str:
    leaf = path.rpartition(".")[2]
    return f"{label}_bias" if leaf.endswith("bias") and not label.endswith("bias") else label


def _beside(path: str, label: str) -> str:
    return path.rpartition(".")[0] + "." + _label(path, label)


def _everywhere(entry: nodes.Entry) -> nodes.Entry:
    """The entry without a stage, for a layout without stages."""
    return evolve(entry, clauses=tuple(c for c in entry.clauses if c.word != "at"))


def _indented(line: str) -> str:
    return f"  {line}"


def _entry(stored: _Stored) -> nodes.Entry:
    left = True
    pattern = []
    for axis in stored.axes:
        pattern.append(_pattern(axis, stored.path, cut=left))
        left = left and not _is_cut(axis)  # one cut is all: the first
    return nodes.Entry(stored.path, (), tuple(pattern), stored.clauses)  # the key has the indices


def _pattern(axis: _Named, path: str, *, cut: bool) -> nodes.Axis:
    outer = _product(axis.outer, cut=cut)
    if not axis.parts:
        return outer[0] if len(outer) == 1 else nodes.Stack((nodes.Term(None, outer),))
    cut = cut and not any(d.cut for d in axis.outer)
    terms = tuple(nodes.Term(_label(path, label), _product(dims, cut=cut)) for label, dims in axis.parts)
    stack = nodes.Stack(terms)
    return nodes.Stack((nodes.Term(None, (*outer, stack)),)) if outer else stack


def _product(dims: tuple[_Dim, ...], *, cut: bool) -> tuple[nodes.Axis, ...]:
    out: list[nodes.Axis] = []
    for d in dims:
        if cut and d.cut is not None:
            cut = False
            kind = "chunk" if d.cut == "chunk" or d.grain > 1 else "equal"
            grain = nodes.Number(d.grain) if d.grain > 1 else None
            out.append(nodes.Cut(nodes.Dim(d.name), (nodes.Split("tp", kind, grain=grain),)))  # type: ignore[arg-type]
        else:
            out.append(nodes.Dim(d.name))
    return tuple(out)


def _is_cut(axis: _Named) -> bool:
    return bool(_cut_dims(axis))


def _cut_dims(axis: _Named) -> set[str]:
    return {d.name for dims in (axis.outer, *(dims for _, dims in axis.parts)) for d in dims if d.cut}


def _cut_names(stored: _Stored) -> set[str]:
    return {name for axis in stored.axes for name in _cut_dims(axis)}


def _uncut(axis: _Named, names: set[str]) -> _Named:
    def dims(found: tuple[_Dim, ...]) -> tuple[_Dim, ...]:
        return tuple(evolve(d, cut=None) if d.name in names else d for d in found)

    return _Named(dims(axis.outer), tuple((label, dims(found)) for label, found in axis.parts))


def _module(f: Folded) -> Form:
    """The module of a tensor, by its pattern."""
    return f.pattern[:-1] if f.pattern[-1] in ("weight", "bias") else f.pattern


def _parent(f: Folded) -> Form:
    """The module that uses the tensor's own."""
    return _module(f)[:-1]


def _layer(f: Folded) -> Form:
    """The layer of a tensor, or empty outside of layers.

    It is all up to the number of the first container.
    """
    first = next((i for i, part in enumerate(f.pattern) if part is None), -1)
    return f.pattern[: first + 1]


# ---- names -----------------------------------------------------------------------------------------------------------


def _model_types(config: dict[str, Json]) -> list[str]:
    """The kinds of model in a config and its parts."""
    own = config.get("model_type")
    inner = [name for value in config.values() if isinstance(value, dict) for name in _model_types(value)]
    return [*([own] if isinstance(own, str) else []), *inner]


def _counting(container: str, found: DimSize | None, taken: dict[str, str]) -> str:
    """The dim that counts a container.

    `l`, or `decoder_l` of a second stack.
    """
    parts = [p for p in container.split(".") if p not in ("", "*")]
    last = identifier(parts[-1]) if parts else "index"
    if _EXPERTS.search(last):
        return found.name if found is not None else last
    if "l" not in taken:
        return "l"
    if "*" in container.split("."):
        return last
    tower = next((p for p in parts[:-1] if p != "model"), last)
    return f"{identifier(tower)}_l"


def _model_name(config: dict[str, Json]) -> str:
    """The name of the model: `any` would be that of no model."""
    name = identifier(str(config.get("model_type") or "model"))
    return "any_model" if name == "any" else name


def _remark(text: str) -> str:
    """A line of remarks with only printable characters of a config."""
    return f"# {''.join(c if c.isprintable() else ' ' for c in text)}"


def _short(f: Folded) -> str:
    """A folded name without numbers; a single one keeps its own."""
    parts = [p for p in f.pattern if p is not None and not (f.containers and p.isdecimal())]
    return ".".join(parts)


def _inner(f: Folded) -> str:
    """The name in a layer, without numbers.

    It is empty outside of layers, and behind another number.
    """
    if not f.containers or "*" in f.containers[0].split(".") or any(p is not None and p.isdecimal() for p in f.pattern):
        return ""
    return ".".join(p for p in f.pattern[f.pattern.index(None) + 1 :] if p is not None)


def _marked(f: Folded, taken: set[str]) -> str:
    """A unique name with marks in place of numbers."""
    mark = "#"
    while f.containers and joined(f.pattern, mark) in taken:
        mark += "#"
    name = joined(f.pattern, mark)
    taken.add(name)
    return name


# ---- lines -----------------------------------------------------------------------------------------------------------


def _joined_lines(items: Iterable[nodes.Tensor] | Iterable[nodes.Entry]) -> list[str]:
    """Lines of tensors or entries; those that are alike share one."""
    groups: dict[object, list[nodes.Tensor | nodes.Entry]] = {}
    for item in items:
        alike = evolve(item, path="")
        if isinstance(alike, nodes.Entry):  # each left side has brackets of its own
            alike = evolve(alike, indices=())
        groups.setdefault(alike, []).append(item)
    found = [evolve(item, joined=i > 0) for group in groups.values() for i, item in enumerate(group)]
    return [row.text() for _, row in statements_of(_typed(found))]


def _typed(items: Sequence[nodes.Tensor | nodes.Entry]) -> list[nodes.ModelItem] | list[nodes.LayoutItem]:
    tensors: list[nodes.ModelItem] = [i for i in items if isinstance(i, nodes.Tensor)]
    entries: list[nodes.LayoutItem] = [i for i in items if isinstance(i, nodes.Entry)]
    return tensors or entries
