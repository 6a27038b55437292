"""import hf: a first spec of a transformers model, from its config, its class, or the headers of its files.

Names and shapes are facts: of a folder's safetensors headers where there are any, else of the class that the config names,
made on torch's meta device. Repeated layers are folded where their numbers have no gaps and their shapes agree. A size is
named after a config key where exactly one key has it; where two have, or a matrix is square, the text says so instead.

Not here: what fused tensors are made of (q, k, v; gate, up). A shape cannot tell: the author writes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib import import_module
from itertools import pairwise, product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Protocol

from attrs import define, field, frozen

from ucpl.errors import Label, fail
from ucpl.extents import BY_TORCH
from ucpl.stores.huggingface import HuggingFace
from ucpl.syntax import format_text, nodes
from ucpl.syntax.printer import print_item
from ucpl.syntax.quoting import is_dotted
from ucpl.texts import Json, is_endless, json_object, read_text

__all__ = ["import_hf"]

Config = dict[str, Json]

_LAYERS = re.compile(r"layer|block|depth")
_EXPERTS = re.compile(r"expert")
_NUMBER = re.compile("0|[1-9][0-9]{0,4}")
_STORED_MAX = 100_000  # places of one folded tensor, those without a name counted: a layout has room for ten such
_SIZES = re.compile(r"size|dim|embd|inner|position|rank|width|channel|heads|ffn|d_model|d_ff|d_kv|experts|labels")
_DEPTH_MAX = 8  # of configs inside a config
_TP = {
    "colwise": 0,
    "rowwise": 1,
    "colwise_gather_output": 0,
    "embedding_rowwise": 0,
    "colwise_rep": 0,
    "rowwise_rep": 1,
}


@frozen
class Found:
    """One stored tensor, as a header or a class has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool = False


@frozen
class Facts:
    """All that is known of a model before its text is written."""

    tensors: tuple[Found, ...]
    config: Config
    aliases: dict[str, str]
    cuts: dict[str, str]  # module pattern (model.layers.*.mlp.up_proj) -> colwise, rowwise, ...
    notes: tuple[str, ...]
    has_files: bool


def import_hf(path: str | Path) -> str:
    """The text of a .ucpl with a model, a layout `hf()`, and one `tensor_parallel(tp)` where the class states a plan.

    path: a config.json, a folder with one, a folder with .safetensors files, or such a file.

    Raises: UcplError E395, E396, and what the files raise (E380-E386, E430-E434).
    """
    return _Writer(_facts(Path(path))).text()


# ---- facts -----------------------------------------------------------------------------------------------------------


def _facts(path: Path) -> Facts:
    folder = path if os.path.isdir(path) else path.parent
    config_file = path if path.suffix == ".json" else folder / "config.json"
    config = _read_config(config_file) if os.path.isfile(config_file) else None
    is_there = os.path.exists(path) and not is_endless(path)
    stores = path.suffix != ".json" and is_there and HuggingFace().recognises(path)
    if config is None and not stores:
        fail("E395", f"{path} has neither a config.json nor .safetensors files", Label(str(path)))
    notes: list[str] = []
    made = _class_of(config, config_file, needed=not stores, notes=notes) if config is not None else None
    if not stores:
        assert made is not None and config is not None
        notes.append(
            "Names are those of the class in memory: files on disk may differ (fused experts). A folder tells."
        )
        return Facts(made.tensors, config, made.aliases, made.cuts, tuple(notes), False)
    opened = HuggingFace().open(path)
    buffers = {t.name for t in made.tensors if t.is_buffer} if made is not None else set[str]()
    tensors = tuple(Found(t.name, t.shape, t.dtype, t.name in buffers) for t in opened.tensors)
    names = {t.name for t in tensors}
    aliases = dict(opened.aliases)
    for alias, owner in (made.aliases if made is not None else {}).items():
        if owner in names and alias not in names:
            aliases[alias] = owner
    if made is None and config is not None and config.get("tie_word_embeddings") and not aliases:
        notes.append("The config ties word embeddings; which names share a tensor is the class's to say: add `alias`.")
    return Facts(tensors, config or {}, aliases, made.cuts if made is not None else {}, tuple(notes), True)


def _read_config(file: Path) -> Config:
    value = json_object(read_text(file))
    if isinstance(value, str):
        fail("E395", f"{file} is no config: {value}", Label(str(file)))
    return value


@frozen
class _Class:
    tensors: tuple[Found, ...]
    aliases: dict[str, str]
    cuts: dict[str, str]


def _class_of(config: Config, file: Path, *, needed: bool, notes: list[str]) -> _Class | None:
    """The class that a config names, on the meta device. Without transformers, or where it fails: None, unless needed."""
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
    except ImportError:
        if needed:
            fail("E396", "transformers is not installed: a config alone has no names", Label(str(file)))
        notes.append(
            "transformers is not installed: no plan of tensor parallelism, no aliases, no buffers were looked up."
        )
        return None
    try:
        place = str(file.parent if file.name == "config.json" else file)
        made_config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        kind = _model_class(transformers, config)
        with torch.device("meta"):
            if kind is not None:
                model = kind(made_config)
            else:
                model = transformers.AutoModel.from_config(made_config, trust_remote_code=False)
    except Exception as error:
        if needed:
            fail("E396", f"transformers cannot build {file.name}: {type(error).__name__}: {error}", Label(str(file)))
        notes.append(f"transformers could not build the class ({type(error).__name__}): only headers were read.")
        return None
    tied = getattr(model, "_tied_weights_keys", None) or {}
    aliases = (
        dict(tied)
        if isinstance(tied, dict) and config.get("tie_word_embeddings", made_config.tie_word_embeddings)
        else {}
    )
    kept = model.state_dict(keep_vars=True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = tuple(
        Found(name, tuple(t.shape), _dtype(config, t), name not in parameters)
        for name, t in kept.items()
        if name not in aliases and t.numel()
    )
    plan = getattr(model, "_tp_plan", None) or {}
    return _Class(tensors, {a: o for a, o in aliases.items() if o in kept}, {str(k): str(v) for k, v in plan.items()})


def _model_class(transformers: ModuleType, config: Config) -> type | None:
    """The class of a model that a config names. Whatever else of transformers it names is not called."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else None


class _Tensor(Protocol):
    """As much of a torch tensor as is asked."""

    @property
    def dtype(self) -> _TorchDtype: ...


class _TorchDtype(Protocol):
    @property
    def is_floating_point(self) -> bool: ...


def _dtype(config: Config, tensor: _Tensor) -> str:
    said = config.get("dtype") or config.get("torch_dtype")
    if isinstance(said, str) and said in BY_TORCH and tensor.dtype.is_floating_point:
        return BY_TORCH[said].name
    return BY_TORCH[str(tensor.dtype).removeprefix("torch.")].name


# ---- folding ---------------------------------------------------------------------------------------------------------


@frozen
class Folded:
    """One tensor of the spec: one of the file, or all layers of one."""

    pattern: tuple[str | None, ...]  # parts of the name; None where a number is folded
    containers: tuple[str, ...]  # what each folded number counts: "model.layers"
    ranges: tuple[range, ...]
    first: Found

    @property
    def sample(self) -> str:
        return self.first.name


def fold(tensors: Iterable[Found]) -> list[Folded]:
    """Tensors whose names differ only in numbers, as one: where the numbers are a full grid and all shapes agree."""
    groups: dict[tuple[str | None, ...], list[tuple[tuple[int, ...], Found]]] = {}
    for t in tensors:
        parts = t.name.split(".")
        numbers = () if _is_literal(t.name) else tuple(int(p) for p in parts if _is_number(p))
        pattern = tuple(None if numbers and _is_number(p) else p for p in parts)
        groups.setdefault(pattern, []).append((numbers, t))
    out: list[Folded] = []
    for form, members in groups.items():
        ranges = _grid([numbers for numbers, _ in members])
        alike = len({(t.shape, t.dtype, t.is_buffer) for _, t in members}) == 1
        if ranges is None or not alike or None not in form:
            out += [Folded(tuple(t.name.split(".")), (), (), t) for _, t in members]
            continue
        containers = []
        for i, part in enumerate(form):
            if part is None:
                containers.append(_joined(form[:i], "*"))
        out.append(Folded(form, tuple(containers), ranges, members[0][1]))
    return out


def _is_literal(name: str) -> bool:
    """Whether a template would read something into a name that is not there: a hole, or a number for a text."""
    return "{" in name or "}" in name or name.isdecimal()


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _grid(numbers: list[tuple[int, ...]]) -> tuple[range, ...] | None:
    """Ranges (with a step) whose product the numbers are, or None."""
    ranges = []
    for column in zip(*numbers, strict=True):
        values = sorted(set(column))
        steps = {b - a for a, b in pairwise(values)}
        if len(steps) > 1:
            return None
        step = steps.pop() if steps else 1
        ranges.append(range(values[0], values[-1] + 1, step))
    if prod(r.stop for r in ranges) > _STORED_MAX:
        return None
    return tuple(ranges) if set(product(*ranges)) == set(numbers) else None


# ---- the text --------------------------------------------------------------------------------------------------------


@define
class _Lines:
    """Statements of the text, by where they stand."""

    tensors: list[str] = field(factory=list)  # of the model
    entries: list[str] = field(factory=list)  # of `hf`
    parallel: list[str] = field(factory=list)  # of `tensor_parallel`


@define
class _Writer:
    facts: Facts
    keys: dict[int, list[str]] = field(factory=dict)  # size -> config keys that have it
    dims: dict[str, str] = field(factory=dict)  # name -> its expression
    counts: dict[str, str] = field(factory=dict)  # container -> dim
    lengths: dict[str, int] = field(factory=dict)  # container -> how many
    said: list[str] = field(factory=list)

    def text(self) -> str:
        self.keys = _config_sizes(self.facts.config)
        folded = fold(self.facts.tensors)
        self.count(folded)
        names = self.paths(folded)
        dtypes = [f.first.dtype for f in folded]
        common = max(dict.fromkeys(dtypes), key=dtypes.count) if dtypes else "f32"
        lines = _Lines()
        for f, path in zip(folded, names, strict=True):
            indices = tuple(self.counts[c] for c in f.containers)
            dims = self.axes(f)
            kind = "buffer" if f.first.is_buffer else "parameter"
            dtype = f.first.dtype if f.first.dtype != common else None
            extents = tuple(self.extent(i, c, r) for i, c, r in zip(indices, f.containers, f.ranges, strict=True))
            extents += tuple(nodes.Dimension(d) for d in dims)
            square = len(f.first.shape) == 2 and f.first.shape[0] == f.first.shape[1]
            remark = (
                f"   # square, {f.first.shape[0]} by {f.first.shape[1]}: which axis is which, no shape tells"
                if square
                else ""
            )
            lines.tensors.append(print_item(nodes.Tensor(path, extents, dtype, kind)) + remark)  # type: ignore[arg-type]
            brackets = tuple(nodes.Dim(i) for i in indices)
            said = nodes.Clause("as", (self.template(f, indices),))
            lines.entries.append(print_item(nodes.Entry(path, brackets, tuple(map(nodes.Dim, dims)), (said,))))
            cut = self.cut(f, dims)
            if cut is not None:
                lines.parallel.append(print_item(nodes.Entry(path, brackets, cut, (said,))))
        model = _identifier(str(self.facts.config.get("model_type") or "model"))
        return self.page(model, common, lines, dict(zip((f.sample for f in folded), names, strict=True)))

    def page(self, model: str, dtype: str, found: _Lines, names: dict[str, str]) -> str:
        what = "headers of its files" if self.facts.has_files else "its transformers class"
        lines = ["ucpl 1", "", f"# Written by `ucpl import hf`, from {what}: a first spec, to be read and corrected."]
        lines += [f"# {note}" for note in self.facts.notes]
        lines += [f"# {note}" for note in self.said]
        lines += ["", f"model {model} {{"]
        lines += [f"  dim {name} = {value}" for name, value in self.dims.items()]
        lines += ["", f"  dtype {dtype}", *(f"  {t}" for t in found.tensors)]
        owners = {f.name for f in self.facts.tensors}
        for alias, owner in self.facts.aliases.items():
            if owner in names:
                lines.append(f"  {print_item(nodes.Alias(alias, names[owner]))}")
            elif owner in owners:
                lines.append(f"  # {alias} is a second name of {owner}, one of several that are folded above")
        lines += ["}", "", f'layout hf(shard = "5GB") of {model} {{', "  framework huggingface(shard = shard)"]
        lines += ['  file weights = safetensors "model.safetensors"', "", *(f"  {e}" for e in found.entries), "}"]
        if found.parallel:
            lines += ["", "# As base_model_tp_plan cuts it: colwise by outputs, rowwise by inputs. One file a rank."]
            lines += [f"layout tensor_parallel(tp) of {model} extends hf() {{", "  framework torch()", "  mesh tp"]
            lines += [
                '  file weights = safetensors "tp_{tp:02}.safetensors"',
                "",
                *(f"  {e}" for e in found.parallel),
                "}",
            ]
        return format_text("\n".join(lines) + "\n", f"{model}.ucpl")

    # ---- dims ----------------------------------------------------------------------------------------------------

    def count(self, folded: list[Folded]) -> None:
        """A dim for every numbered container: named after the config key that counts it, if one does."""
        for f in folded:
            for container, span in zip(f.containers, f.ranges, strict=True):
                self.lengths[container] = max(self.lengths.get(container, 0), span[-1] + 1)
        for container, length in self.lengths.items():
            last = next((p for p in reversed(container.split(".")) if p not in ("", "*")), "index")
            wanted = _EXPERTS if _EXPERTS.search(last) else _LAYERS
            keys = [k for k in self.keys.get(length, ()) if wanted.search(k.rpartition(".")[2])]
            short = "l" if wanted is _LAYERS and "l" not in self.dims else _identifier(last)
            value = f"config.{keys[0]}" if len(keys) == 1 else str(length)
            self.counts[container] = self.dim(short, value)

    def dim(self, name: str, value: str) -> str:
        """A dim of that name and value; another name where it is taken by another value."""
        n, base = 2, name
        while self.dims.get(name, value) != value or (name in self.counts.values()):
            name = f"{base}{n}"
            n += 1
        self.dims[name] = value
        return name

    def extent(self, dim: str, container: str, span: range) -> nodes.Dimension:
        length = self.lengths[container]
        if span == range(length):
            return nodes.Dimension(dim)
        start = nodes.Number(span.start) if span.start else None
        stop = nodes.Number(span.stop) if span.stop < length else None
        step = nodes.Number(span.step) if span.step > 1 else None
        return nodes.Dimension(dim, None, nodes.Among((nodes.Range(start, stop, step),)))

    def axes(self, f: Folded) -> tuple[str, ...]:
        out: list[str] = []
        shape = f.first.shape
        for size in shape:
            keys = [k for k in self.keys.get(size, ()) if _SIZES.search(k.rpartition(".")[2])]
            keys += self.multiples(size) if keys else []
            named = len(keys) == 1 and shape.count(size) == 1
            if named:
                out.append(self.dim(_identifier(keys[0].rpartition(".")[2]), f"config.{keys[0]}"))
                continue
            if len(keys) > 1:
                note = f"{size} is {', '.join(f'config.{k}' for k in keys)}: which of them a dim is, the author knows."
                note = note.replace("config.2 * ", "2 * config.").replace("config.3 * ", "3 * config.")
                if note not in self.said:
                    self.said.append(note)
            for letter in "nmpqrstuvw":
                if (name := f"{letter}{size}") not in out:
                    out.append(self.dim(name, str(size)))
                    break
        return tuple(out)

    def multiples(self, size: int) -> list[str]:
        """Twice or thrice a size of the config: what is fused (gate and up; q, k and v) looks like any other number."""
        out = []
        for n in (2, 3):
            for key in self.keys.get(size // n, ()) if size % n == 0 else ():
                if _SIZES.search(key.rpartition(".")[2]):
                    out.append(f"{n} * {key}")
        return out

    # ---- names ---------------------------------------------------------------------------------------------------

    def paths(self, folded: list[Folded]) -> list[str]:
        """Names in the spec: those of the file without the numbers that are folded, unless two would be the same."""
        short = [".".join(p for p in f.pattern if p is not None) for f in folded]
        aliases = set(self.facts.aliases)
        taken = {f.sample for f in folded if not f.containers} | aliases
        return [
            s if short.count(s) == 1 and s not in aliases and (is_dotted(s) or not f.containers) else _marked(f, taken)
            for s, f in zip(short, folded, strict=True)
        ]

    def template(self, f: Folded, indices: tuple[str, ...]) -> str:
        if _is_literal(f.sample):
            return "{name}"
        numbers = iter(indices)
        return ".".join(f"{{{next(numbers)}}}" if p is None else p for p in f.pattern)

    def cut(self, f: Folded, dims: tuple[str, ...]) -> tuple[nodes.Axis, ...] | None:
        """The pattern with the cut that the class's plan states for the tensor's module, if it states one."""
        module, _, leaf = _joined(f.pattern, "*").rpartition(".")
        whole = f"{module}.{leaf}"
        style = self.facts.cuts.get(module, self.facts.cuts.get(whole))
        if style is None:
            return None
        axis = _TP.get(style)
        if axis is None:
            self.said.append(
                f"{whole}: the class's plan says `{style}`, which tensor_parallel leaves whole: write its parts."
            )
            return None
        if axis >= len(dims):
            return None  # the bias of a rowwise module is held by every rank
        split = nodes.Split("tp", "chunk")
        return tuple(nodes.Cut(nodes.Dim(d), (split,)) if i == axis else nodes.Dim(d) for i, d in enumerate(dims))


def _config_sizes(config: Config, prefix: str = "") -> dict[int, list[str]]:
    """Sizes that a config states, with the keys that state them: those that the language can name."""
    out: dict[int, list[str]] = {}
    for key, value in config.items():
        if not (key.isascii() and key.isidentifier()):
            continue
        if isinstance(value, dict) and prefix.count(".") < _DEPTH_MAX:
            for size, keys in _config_sizes(value, f"{prefix}{key}.").items():
                out.setdefault(size, []).extend(keys)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
            out.setdefault(value, []).append(prefix + key)
    return out


def _identifier(text: str) -> str:
    made = re.sub(r"\W", "_", text, flags=re.ASCII)
    return made if made and not made[0].isdigit() else f"_{made}"


def _marked(f: Folded, taken: set[str]) -> str:
    """A name that keeps a mark where numbers were, so that it is no other's."""
    mark = "#"
    while f.containers and _joined(f.pattern, mark) in taken:
        mark += "#"
    name = _joined(f.pattern, mark)
    taken.add(name)
    return name


def _joined(pattern: tuple[str | None, ...], mark: str) -> str:
    """The name of a pattern, with a mark where numbers are folded."""
    return ".".join(mark if p is None else p for p in pattern)
