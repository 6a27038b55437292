"""Remedies for unknown dims and tensors, with a line to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from attrs import evolve

from ucpl.errors import Diagnostic
from ucpl.language import nodes, print_axis, print_item, worded
from ucpl.language.printer import opening
from ucpl.language.walk import rewritten, walk
from ucpl.language.words import CLAUSE_WORDS, ELEMENT_TYPES
from ucpl.layout.axes import UnevenCut, mesh_axes_of
from ucpl.layout.layout import Layout, LogicalTensor
from ucpl.layout.name_remedies import for_name, may_be_new, nearest
from ucpl.records import frozen

__all__ = [
    "for_buffer", "for_cut", "for_dealt", "for_dim", "for_entry", "for_extent", "for_hole", "for_open_dim",
    "for_parts", "for_rest", "for_tensor", "for_unread_dim", "UnknownAxis", "with_lines",
]  # fmt: skip

_SIZES_SHOWN = 16
_GROUPS = 'the parameter groups of the model are `group * = model`; a line for all tensors is `* = ... as "{name}"`'
_OF_MODULES = ("weight", "bias", "data", "kernel")  # behind the name of a module
_ANNOTATIONS = ("Tensor", "Float", "Array", "Int", "Param", "Parameter", "tensor", "array")
# Keys of configs that authors take for dims.
CONFIG_KEYS = frozenset(
    [
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_hidden_layers",
        "num_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "num_heads",
        "head_dim",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "d_model",
        "d_ff",
        "d_kv",
        "n_embd",
        "n_head",
        "n_layer",
        "n_layers",
        "n_heads",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "max_position_embeddings",
        "state_size",
        "conv_kernel",
        "patch_size",
        "image_size",
        "num_channels",
        "embed_dim",
        "q_lora_rank",
        "kv_lora_rank",
        "encoder_layers",
        "decoder_layers",
        "type_vocab_size",
    ]
)
_EVERY_SECOND = ("even", "odd")
_ORDERS = ("T", "mT", "t", "transpose")  # of torch: the other order of two dims
_NUMBER_IN_A_NAME = r"\\?\*|\(?(?:\\d|\[0-9\])[+*]?\)?|%d|\$\{?\w*\}?|\{[\w,]*\}|\?|\[\w+\]"


def for_dim(
    item: nodes.Entry, name: str, of: Sequence[LogicalTensor], close: str | None, mesh_axes: Sequence[str]
) -> str:
    """Remedy for a name in an entry's pattern that is no dim.

    It has the line to write, if that can be known.
    """
    from ucpl.language.foreign_words import foreign, words

    if item.path == "*" and name == "model":
        return _GROUPS
    if name.lower() != name and name.lower() in CLAUSE_WORDS:
        return f"words of the language are small: write `{name.lower()}`"
    entry = item.path.rpartition(".")[2]
    said = (foreign(entry) if entry in words().always else "") or foreign(name)
    last = name.rpartition(".")[2]
    if name in _EVERY_SECOND and len(item.indices) == 1 and len(of) == 1 and of[0].dims:
        return _every_second(item, name, of)
    if name == "config" or name.startswith("config."):
        return _of_config(item, name, [one for t in of for one in t.dims if "#" not in one])
    if name in ("x", "by", "times") and item.shape is not None:
        bare = rewritten(item, lambda node: _without_word(node, name))
        return _with_line("dims stand side by side, with a space between them", bare)
    if last in ("chunk", "split", "tensor_split") and name != last:
        cut = "chunk({axis})" if last != "tensor_split" else "spread({axis})"
        dim, axis = name.rpartition(".")[0], next(iter(mesh_axes), "tp")
        return f"a cut comes after its dim, as in `{dim}@{cut.format(axis=axis)}`"
    placed = _as_placed(item, of, mesh_axes)
    if placed is not None and last in ("None", *mesh_axes):
        return _with_line("the mesh axis comes after the dim that it cuts, and an uncut dim has no word", placed)
    if last in ("None", "null", "nil", "NULL"):
        return _with_line(said, evolve(item, shape=None))
    if last in _ORDERS and len(of) == 1 and not item.indices:
        return _with_line(said, evolve(item, shape=tuple(nodes.Dim(d) for d in reversed(of[0].dims))))
    bracketed = [axis.name for axis in item.indices if isinstance(axis, nodes.Dim)]
    if name in bracketed and not close and not said:
        rest = ", ".join(one for one in bracketed if one != name)
        line = f": `{item.path}[{rest}] = ...`" if rest else ""
        return f"take `{name}` out: an index in brackets is a dim of the tensor, and means all of its values{line}"
    kind = name if name in ELEMENT_TYPES else words().dtypes.get(last, "") if len(name) > 3 else ""
    if name in ("to", "cast", "astype"):
        kind = next((n for n in _dims_of(item) if n in ELEMENT_TYPES), "")
    if kind and item.shape is not None and all(c.word != "dtype" for c in item.clauses):
        shape = tuple(a for a in item.shape if not (isinstance(a, nodes.Dim) and a.name in (name, kind)))
        typed = evolve(item, shape=shape, clauses=(nodes.Clause("dtype", (kind,)), *item.clauses))
        return _with_line("the element type comes after the dims, after `dtype`", typed)
    if (close and len(name) < 3) or not said:
        word = nearest(name, CLAUSE_WORDS) if not close and len(name) > 1 else None
        if close:
            return _with_line(f"did you mean `{close}`?", rewritten(item, lambda node: _renamed(node, name, close)))
        if word:
            return f"did you mean the clause `{word}`?"
    return said or "a dim without a name is written `_`, all that are left `...`"


def _without_word(node: nodes.Record, name: str) -> nodes.Record | None:
    """An entry or a term without one word of its axes."""
    if isinstance(node, nodes.Term) and nodes.Dim(name) in node.axes:
        return evolve(node, axes=tuple(a for a in node.axes if a != nodes.Dim(name)))
    if isinstance(node, nodes.Entry) and node.shape and nodes.Dim(name) in node.shape:
        return evolve(node, shape=tuple(a for a in node.shape if a != nodes.Dim(name)))
    return None


def _every_second(item: nodes.Entry, name: str, of: Sequence[LogicalTensor]) -> str:
    """`ln[even]`: a part of the first dim, which the axes lack."""
    shaped = {n.name for n in walk(*(item.shape or ())) if isinstance(n, nodes.Dim)}
    dim = next((d for d in of[0].dims if d not in shaped and "#" not in d), of[0].dims[0])
    start = nodes.Number(1) if name == "odd" else None
    every = nodes.Among((nodes.Range(start, None, nodes.Number(2)),))
    return _with_line("some indices of a dim stand in brackets", evolve(item, indices=(nodes.Dim(dim, every),)))


def _as_placed(item: nodes.Entry, of: Sequence[LogicalTensor], mesh_axes: Sequence[str]) -> nodes.Entry | None:
    """Line for `w = tp None`, as in a PartitionSpec.

    It has an axis or None for each dim.
    """
    bracketed = {n.name for n in walk(*item.indices) if isinstance(n, nodes.Dim)}
    dims = [d for d in of[0].dims if d not in bracketed] if len(of) == 1 else []
    words = [a.name for a in item.shape or () if isinstance(a, nodes.Dim)]
    if (
        len(words) != len(dims)
        or len(words) != len(item.shape or ())
        or not {*words} <= {"None", *mesh_axes}
        or {*words} <= {"None"}
    ):
        return None
    axes = [
        nodes.Dim(d) if w == "None" else nodes.Cut(nodes.Dim(d), (nodes.Split(w),))
        for d, w in zip(dims, words, strict=True)
    ]
    return evolve(item, shape=tuple(axes))


def _of_config(item: nodes.Entry, name: str, dims: Sequence[str]) -> str:
    """Remedy for a key of the config in a pattern.

    It is the dim of that size, if only one is left.
    """
    text = "a pattern has dims of the model by their names, and the model has their sizes: `dim h = config.hidden_size`"
    named = {n.name for n in walk(*item.indices, *(item.shape or ())) if isinstance(n, nodes.Dim)}
    left = [one for one in dict.fromkeys(dims) if one not in named]
    if len(left) != 1:
        return f"{text}. They are {' '.join(dict.fromkeys(dims))}" if dims else text
    return _with_line(text, rewritten(item, lambda n: nodes.Dim(left[0]) if _is_dim(n, name) else None))


def _is_dim(node: nodes.Record, name: str) -> bool:
    return isinstance(node, nodes.Dim) and node.name == name


def _dims_of(item: nodes.Entry) -> list[str]:
    return [a.name for a in item.shape or () if isinstance(a, nodes.Dim)]


def for_unread_dim(item: nodes.Record, name: str, names: Iterable[str]) -> str:
    """The same of a line that speaks of no tensor."""
    if isinstance(item, nodes.Entry) and item.path == "*" and name == "model":
        return _GROUPS
    return for_name(name, names, f"define it: `dim {name} = ...`")


def _renamed(node: nodes.Record, name: str, close: str) -> nodes.Record | None:
    if isinstance(node, nodes.Clause) and node.word == "as":
        return evolve(
            node, args=tuple(re.sub(rf"\{{{re.escape(name)}(?=[}}.:])", f"{{{close}", one) for one in node.args)
        )
    return evolve(node, name=close) if isinstance(node, nodes.Dim) and node.name == name else None


def for_extent(item: nodes.Tensor, position: int, tensors: Collection[str]) -> str:
    """Remedy for a word among a tensor's dims that is probably none.

    Empty if it may be one.
    """
    from ucpl.language.foreign_words import foreign, words

    name = item.dims[position].name or ""
    if name == "config" and item.dims[position].range is None:
        return "a value of the config has a name here: dim x = config.hidden_size, then `x` among the dims"
    bare = evolve(item, dims=item.dims[:position] + item.dims[position + 1 :])
    kind = name if name in ELEMENT_TYPES else words().dtypes.get(name, "") if len(name) > 3 else ""
    if item.dims[position].range is not None and (kind or name in _ANNOTATIONS):
        inner = [n.path for n in walk(item.dims[position].range) if isinstance(n, nodes.Name)]  # type: ignore[arg-type]
        dims = tuple(nodes.Dimension(one) for one in inner)
        why = "the dims stand side by side behind the `:`, and the element type behind them"
        return _with_line(why, evolve(item, dims=dims, dtype=kind or item.dtype))
    said = _misplaced_word(item, position, tensors)
    if said:
        return said
    if kind:
        return _with_line(
            foreign(name) or f"the element type comes after the dims: `dtype {kind}`", evolve(bare, dtype=kind)
        )
    if " " in name:
        dims = tuple(nodes.Dimension(one) for one in name.split())
        whole = evolve(item, dims=item.dims[:position] + dims + item.dims[position + 1 :])
        return _with_line("dims stand side by side, without quotes", whole)
    if name == "frozen":
        return _with_line("write `is frozen`", evolve(bare, kind="frozen"))
    if name == "buffer":
        return _with_line("write `is buffer`", evolve(bare, kind="buffer"))
    if name in ("x", "by", "times") and bare.dims:
        return _with_line("dims stand side by side, with a space between them", bare)
    return ""


def for_open_dim(name: str, names: Iterable[str], left: Sequence[str]) -> str:
    """Remedy for a dim without a size.

    `left`: all of the model that have none.
    """
    given = " ".join(f"-D {one}=..." for one in left or (name,))
    others = [f"`{one}`" for one in left if one != name]
    too = f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} none either" if others else ""
    return for_name(
        name,
        names,
        f"give it a size: `dim {name} = ...` in the model, or {given} on the command line{too}. When a checkpoint is"
        " converted, its shapes give them",
    )


def _misplaced_word(item: nodes.Tensor, position: int, tensors: Collection[str]) -> str:
    """Remedy for words among the dims that belong elsewhere.

    Another line or clause has them. Empty for a name that may be a dim.
    """
    name, behind = item.dims[position].name or "", [d.name for d in item.dims[position + 1 :]]
    said = next((i for i, dim in enumerate(item.dims) if dim.name in ("if", "unless") and i), 0)
    is_not = bool(said) and [d.name for d in item.dims[said:-1]] in (["if", "not"], ["unless"])
    if said and len(item.dims) == said + 2 + (is_not and item.dims[said].name == "if") and item.when is None:
        key = nodes.Name(item.dims[-1].name or "")
        when = nodes.Unary("not", key) if is_not else key
        return _with_line("a condition comes after `when`", evolve(item, dims=item.dims[:said], when=when))
    if name == "_":
        return "a model names every dim of a tensor, or says its size; `_` and `...` stand in layouts"
    if name in ("as", "in", "at"):
        return f'a model has no ranks, files or keys: a layout of it has them, as in `{item.path} = ...  as "key"`'
    if name == "extends":
        return "the base of a model comes in its first line, before the brace: model big extends gpt() {"
    if name == "scalar" and len(item.dims) == 1:
        return _with_line("one tensor without dims has `()`", evolve(item, dims=()))
    if name in ("or", "optional", "maybe") and (name != "or" or behind == ["none"]):
        return f"a tensor of some configs only has a condition at its end: {item.path} : ...  when config.use_bias"
    if name in ("scale", "scales") and behind[:1] == ["of"]:
        line = worded(item.span, "is scale of w by 128, 128", "is scale(w, 128, 128)")
        return f"a scale says so behind `is`, and how many elements a block has along each dim: {line}"
    if name in ("alias", "tied", "same") and behind:
        return f"a second name of a tensor is an alias\nwrite: alias {item.path} = {behind[-1]}"
    if len(item.dims) == 1 and name in tensors:
        return f"a second name of a tensor is an alias\nwrite: alias {item.path} = {name}"
    item = evolve(item, dims=tuple(map(_subscripted, item.dims)))
    name = item.dims[position].name or ""
    keys = [d.name for d in item.dims if d.name and (d.name.startswith("config.") or d.name in CONFIG_KEYS)]
    if name not in keys:
        return ""
    short = {key: key.removeprefix("config.").replace(".", "_") for key in dict.fromkeys(keys)}
    dims = ", ".join(f"{one} = {key if key != one else f'config.{one}'}" for key, one in short.items())
    bare = evolve(item, dims=tuple(evolve(d, name=short.get(d.name or "", d.name)) for d in item.dims))
    return f"a dim has a name, and its size a line: a key of the config, perhaps\nwrite: dim {dims}\n       {print_item(bare)}"


def _subscripted(dim: nodes.Dimension) -> nodes.Dimension:
    """`config["hidden_size"]` as a key: a name with one text in brackets."""
    match dim:
        case nodes.Dimension(name="config", range=nodes.Among(items=(nodes.Text(value=key) | nodes.Name(path=key),))):
            return nodes.Dimension(f"config.{key}")
    return dim


def _with_line(why: str, item: nodes.Record) -> str:
    assert isinstance(item, nodes.Entry | nodes.Tensor)
    return f"{why}\nwrite: {print_item(item)}"


def for_tensor(name: str, tensors: Iterable[str], otherwise: str = "add it to the model, or take this line out") -> str:
    """Of a tensor that the model does not have."""
    known = list(tensors)
    over = [k for k in known if k.startswith(f"{name}.") and k.rpartition(".")[2] in _OF_MODULES]
    if over:
        return f"did you mean `{over[0]}`? The model has it by that name"
    part = [k for k in known if name.startswith(f"{k}.") or name.endswith(f".{k}")]
    if part and name.rpartition(".")[2] in (*_OF_MODULES, part[-1].rpartition(".")[2]):
        return f"did you mean `{max(part, key=len)}`? Names are those of the model of this text; a file's stand behind `as`"
    head, _, tail = name.rpartition(".")
    if head in known and tail.isidentifier() and len(tail) <= 2:
        return f"an index comes in brackets: `{head}[{tail}]`"
    if re.search(_NUMBER_IN_A_NAME, name):
        key = re.sub(_NUMBER_IN_A_NAME, "{l}", name)
        return (
            "a tensor's name is no pattern; one line covers all layers with an index in brackets, as in "
            f'`w[l] = h  as "{key}"`. In a layout of any model a star is the only wildcard: "{key.replace("{l}", "*")}"'
        )
    under = [k for k in known if k.endswith(f".{name}")]
    if len(under) == 1:
        return f"did you mean `{under[0]}`? A label is looked up near its entry, as that of `{under[0].rpartition('.')[0]}.x`"
    return for_name(name, known, otherwise)


def for_entry(item: nodes.Entry, tensors: Iterable[str], numbers: Collection[str]) -> str:
    """Of an entry of a tensor that the model does not have."""
    cut = next((n for n in walk(*(item.shape or ())) if isinstance(n, nodes.Cut)), None)
    if item.path in numbers and cut is not None and item.shape == (cut,) and cut.axis == nodes.Dim(item.path):
        return f"how an index is dealt to ranks is a line of its own\nwrite: index {item.path} = {print_axis(cut)}"
    axes = [*item.indices, *(item.shape or ())]
    dims = [n.name for n in walk(*axes) if isinstance(n, nodes.Dim)]
    plain = item.shape is not None and all(isinstance(n, nodes.Dim | nodes.Cut | nodes.Split) for n in walk(*axes))
    if not plain or len(set(dims)) != len(dims) or not {*dims} <= {*numbers}:
        return ""
    return for_tensor(
        item.path, tensors, f"add it to the model, `{item.path} : {' '.join(dims) or '()'}`, or take this line out"
    )


def for_parts(item: nodes.Entry) -> str:
    """Remedy for parts without labels, packed into an unknown tensor.

    Empty if the line packs none.
    """
    stacks = [node for node in walk(*(item.shape or ())) if isinstance(node, nodes.Stack)]
    if not stacks or any(term.label for stack in stacks for term in stack.terms):
        return ""
    return (
        "each part has a label, the name of a tensor next to the entry, and then its axes: (q: n d + k: g d + v: g d) h"
    )


def for_hole(span: nodes.Span, items: Sequence[nodes.Record], layout: Layout) -> str:
    """Reason of a tensor that is stored in part, if visible.

    It is visible if the pattern shows it.
    """
    item = next((i for i in items if isinstance(i, nodes.Entry) and i.span == span), None)
    axes = {axis for mesh in layout.meshes for axis in mesh.axes}
    if item is None or item.shape is None:
        return ""
    cuts = [s.mesh_axis for node in walk(*item.shape) if isinstance(node, nodes.Cut) for s in node.splits]
    sums = any(isinstance(node, nodes.Stack) and len(node.terms) > 1 for node in walk(*item.shape))
    twice = next((axis for axis in cuts if cuts.count(axis) > 1), None)
    packed = next((n for n in walk(*item.shape) if isinstance(n, nodes.Cut) and _cut_twice(n)), None)
    if twice is not None and not sums and packed is None:
        return f"a rank has one coordinate of {twice}, so that it has one piece along both: cut one dim by `@{twice}`"
    if packed is not None:
        return f"a rank has one coordinate of {_cut_twice(packed)}, and one piece along it: write `@{_cut_twice(packed)}` once"
    dealt = _dealt_twice(item, items, cuts, [axis for mesh in layout.meshes for axis in mesh.axes])
    if dealt:
        return dealt
    unnamed = _open_end(item)
    if unnamed is not None:
        return _with_line("no part has the rest of the dim: the last one goes on to its end", unnamed)
    dims = [node for node in walk(*item.shape) if isinstance(node, nodes.Dim) and node.range is not None]
    for dim in dims:
        among = dim.range.items if dim.range is not None else ()
        axis = next((p.path for p in walk(*among) if isinstance(p, nodes.Name) and p.path in axes), None)
        if axis is not None:
            whole = rewritten(item, partial(_cut_instead, axis, dim))
            why = f"some indices of {dim.name} stand in its brackets, and a cut behind `@`"
            if any(not isinstance(part, nodes.Name) for part in among):
                why = f"`{axis}` is how many ranks there are, and no rank's place: `@{axis}` gives each its piece"
            return _with_line(why, whole)
    return _for_some(item, [i for i in items if isinstance(i, nodes.Entry) and i.path == item.path and i.shape], layout)


def _cut_twice(cut: nodes.Cut) -> str:
    """The axis that is twice behind an axis, or a sum."""
    axes = [split.mesh_axis for split in cut.splits]
    return next((axis for axis in axes if axes.count(axis) > 1), "")


def _open_end(item: nodes.Entry) -> nodes.Entry | None:
    """Parts of a dim without a name, `_[..12] + _[12..24]`.

    The last one has no end.
    """
    parts = [n for n in walk(*(item.shape or ())) if isinstance(n, nodes.Any_) and n.range is not None]
    match parts:
        case [*_, nodes.Any_(range=nodes.Among(items=(nodes.Range() as part,))) as last]:
            if part.stop is not None and any(isinstance(n, nodes.Stack) for n in walk(*(item.shape or ()))):
                longer = evolve(last, range=nodes.Among((evolve(part, stop=None),)))
                return rewritten(item, lambda n: longer if n is last else None)
    return None


def for_buffer(layout: Layout, path: str, state: str) -> tuple[str, nodes.Span] | None:
    """Reason and line for a state in part in a flat buffer.

    The buffer is cut by an axis that cuts its members.
    """
    entry = next((e for e in layout.entries if path in e.targets.values()), None)
    for line in layout.state_lines if entry is not None else ():
        cut = mesh_axes_of(*line.shape) if isinstance(line.shape, tuple) else ()
        both = [axis for axis in cut if entry is not None and axis in {a for x in entry.shape for a in mesh_axes_of(x)}]
        if both and (line.names is None or state in line.names):
            dealt = mesh_axes_of(*layout.indices.values())
            free = next((a for m in layout.meshes for a in m.axes if a not in (*cut, *both, *dealt)), "")
            where = f"over another axis, `@{free}`" if free else "over another axis of the mesh, which has none yet"
            return (
                f"`{entry.path if entry is not None else path}` is cut over {both[0]} by its own line, and the buffer is cut"
                f" over {both[0]}, too: a rank has one piece of both. Cut the buffer {where}",
                line.span,
            )
    return None


def _dealt_twice(item: nodes.Entry, items: Sequence[nodes.Record], cuts: Sequence[str], axes: Sequence[str]) -> str:
    """Remedy for an index that is dealt over a cutting axis.

    The axis cuts the entry, too. Empty if there is none.
    """
    named = {n.name for n in walk(*item.indices) if isinstance(n, nodes.Dim)}
    for rule in items:
        if not isinstance(rule, nodes.Index) or rule.name not in named:
            continue
        over = [s.mesh_axis for n in walk(rule.axis) if isinstance(n, nodes.Cut) for s in n.splits]
        both = next((axis for axis in over if axis in cuts), None)
        if both is None:
            continue
        why = (
            f"{rule.name} is dealt over {both} (line {rule.span.line}), and the entry is cut over {both}, too:"
            " a rank has one piece of both"
        )
        others = {axis for one in items if isinstance(one, nodes.Index) for axis in _axes_in(one.axis)}
        free = next((axis for axis in axes if axis not in cuts and axis not in over and axis not in others), None)
        if free is None:
            return f"{why}\nwrite: {print_item(rewritten(item, partial(_without_cut, both)))}"
        of = [e for e in items if isinstance(e, nodes.Entry) and rule.name in _named_in(*e.indices)]
        if [e for e in of if both in _axes_in(*(e.shape or ()))] == [item] and len(of) > 1:
            return _with_line(why, rewritten(item, partial(_over_another, both, free)))
        return f"{why}\nwrite: {print_item(rewritten(rule, partial(_over_another, both, free)))}"
    return ""


def _named_in(*axes: nodes.Record) -> set[str]:
    return {n.name for n in walk(*axes) if isinstance(n, nodes.Dim)}


def _axes_in(*axes: nodes.Record) -> set[str]:
    return {s.mesh_axis for n in walk(*axes) if isinstance(n, nodes.Cut) for s in n.splits}


def _without_cut(axis: str, node: nodes.Record) -> nodes.Record | None:
    """The axis of a cut that cuts over this one alone."""
    if isinstance(node, nodes.Cut) and [split.mesh_axis for split in node.splits] == [axis]:
        return node.axis
    return None


def _over_another(axis: str, other: str, node: nodes.Record) -> nodes.Record | None:
    return evolve(node, mesh_axis=other) if isinstance(node, nodes.Split) and node.mesh_axis == axis else None


def _for_some(item: nodes.Entry, lines: Sequence[nodes.Entry], layout: Layout) -> str:
    """Remedy for lines of one tensor with some indices, written as ranges.

    Empty if they have all.
    """
    ranged = {one: [n for n in walk(*one.indices, *(one.shape or ())) if _is_part(n)] for one in (item, *lines)}
    if not ranged[item]:
        return ""
    part = ranged[item][0]
    assert isinstance(part, nodes.Dim)
    size = layout.sizes.get(part.name)
    said, whole = print_axis(part), rewritten(item, lambda n: nodes.Dim(part.name) if n is part else None)
    if isinstance(size, int) and (low := _first_of(part)) is not None and low >= size:
        return _with_line(f"`{said}` holds nothing: {part.name} is {size}, and its indices are 0 to {size - 1}", whole)
    others = [print_axis(n) for one in lines for n in ranged[one] if isinstance(n, nodes.Dim) and n.name == part.name]
    if len(dict.fromkeys(others)) > 1:
        them = " and ".join(f"`{one}`" for one in dict.fromkeys(others))
        joined = _without_gap(item, ranged[item])
        if joined is not None:
            return _with_line(
                f"no line has the rest of {part.name}: let each part begin where the one before ends", joined
            )
        return f"no line has the rest of {part.name}: of {them}, let each begin where the one before ends"
    return _with_line(f"`{said}` is a part of {part.name}, and no line has the rest. All of it is `{part.name}`", whole)


def _without_gap(item: nodes.Entry, parts: Sequence[nodes.Record]) -> nodes.Entry | None:
    """Two parts of one line, `r[..1] + r[2..]`, joined without the gap.

    The second begins at the end of the first; None for other ones.
    """
    match parts:
        case [
            nodes.Dim(
                name=name, range=nodes.Among(items=(nodes.Range(stop=nodes.Number() as end, step=None),), others=False)
            ),
            nodes.Dim(
                range=nodes.Among(
                    items=(nodes.Range(start=nodes.Number() as begin, step=None) as second,), others=False
                )
            ) as later,
        ] if later.name == name and end.value < begin.value:
            closer = evolve(later, range=nodes.Among((evolve(second, start=end),)))
            return rewritten(item, lambda n: closer if n is later else None)
    return None


def _is_part(node: nodes.Record) -> bool:
    return isinstance(node, nodes.Dim) and node.range is not None


def _first_of(part: nodes.Dim) -> int | None:
    """The first index of one range, if it is a plain number."""
    match part.range:
        case nodes.Among(items=(nodes.Range(start=nodes.Number(value=low)),), others=False):
            return low
    return None


def _cut_instead(axis: str, dim: nodes.Dim, node: nodes.Record) -> nodes.Record | None:
    return nodes.Cut(nodes.Dim(dim.name), (nodes.Split(axis),)) if node is dim else None


def for_rest(group: str, name: str, tensors: Iterable[str]) -> str:
    """Remedy for a group that is subtracted from `all`.

    Only groups above can be subtracted, by their names.
    """
    if "*" in name or name in tensors:
        members = "norm.weight, bias" if "*" in name else name
        return f"`all` is less groups that stand above\nwrite: group others = {members}\n       group {group} = all - others"
    return f"define it above: `group {name} = ...`, and its members; or correct the name"


def for_dealt(name: str, found: UnevenCut) -> str:
    """Remedy for an index that is dealt unevenly."""
    axis, ways = found.split.mesh_axis, max(1, found.ways, len(found.split.sizes))
    if found.split.kind == "spread":
        return f"deal complete units, or without them: {name}@spread({axis})"
    each = [found.length // ways + (i < found.length % ways) for i in range(min(ways, _SIZES_SHOWN))]
    shown = ", ".join(map(str, each)) + (", ..." if ways > _SIZES_SHOWN else "")
    return f"give the sizes, {name}@{axis}[{shown}], or deal unevenly: {name}@spread({axis})"


def for_cut(found: UnevenCut) -> str:
    """Remedy for an uneven cut."""
    axis, grain = found.split.mesh_axis, found.split.grain
    if found.split.kind == "spread":
        return (
            f"pad it to complete units, pad(n, {grain})@spread({axis}, {grain}), or let the last piece be short:"
            f" @chunk({axis}, {grain})"
        )
    ways = found.ways if found.ways > 1 else max(2, len(found.split.sizes))
    each = [found.length // ways + (i < found.length % ways) for i in range(ways)]
    shown = ", ".join(map(str, each)) if ways <= _SIZES_SHOWN else f"{each[0]}, {each[1]}, ..."
    if found.split.kind == "sizes" and len(found.split.sizes) != found.ways and sum(found.split.sizes) == found.length:
        return (
            f"{axis} is {found.ways} here, and the list is for {len(found.split.sizes)} ranks: a list that is a parameter fits"
            f" each degree, @{axis}[sizes], as @spread({axis}) does"
        )
    if found.split.kind == "sizes":
        return f"give one size for each coordinate, which add up to the dim: @{axis}[{shown}]"
    return f"pad it, cut by @chunk or @spread, or give the sizes: @{axis}[{shown}]"


# ---- lines for an unknown mesh axis ----------------------------------------------------------------------------------


@frozen
class UnknownAxis:
    """Axis of a diagnostic: of no mesh, or one without sizes."""

    name: str
    is_of_mesh: bool = False


def with_lines(
    found: Diagnostic, axis: UnknownAxis, node: nodes.Layout, items: Sequence[nodes.LayoutItem]
) -> Diagnostic:
    """The diagnostic, its remedy with the lines.

    `items`: statements of the layout and of its bases.
    """
    meshes = [i for i in items if isinstance(i, nodes.Mesh)]
    axes = tuple(dict.fromkeys(name for mesh in meshes for name in mesh.axes))
    if axis.is_of_mesh:
        lines = [_head(node, axis.name)] if nearest(axis.name, {p.name for p in node.parameters}) is None else []
    elif (close := nearest(axis.name, axes)) is not None:
        lines = [line for item in items if (line := _with_axis(item, axis.name, close))][:1]
    elif may_be_new(axis.name, axes):
        first = next((m for m in meshes if not m.name), nodes.Mesh("", ()))
        lines = [_head(node, axis.name), "  " + print_item(evolve(first, axes=(*first.axes, axis.name)))]
        lines = lines[axis.name in {p.name for p in node.parameters} :]
    else:
        lines = []
    return (
        evolve(found, remedy="\n       ".join([f"{found.remedy}\nwrite: {lines[0]}", *lines[1:]])) if lines else found
    )


def _head(node: nodes.Layout, name: str) -> str:
    """First line of a layout that has the axis as a parameter."""
    known = {p.name for p in node.parameters}
    parameters = node.parameters if name in known else (*node.parameters, nodes.Parameter(name))
    return f"{opening(evolve(node, parameters=parameters))} {{"


def _with_axis(item: nodes.LayoutItem, name: str, other: str) -> str:
    """The statement with one axis replaced by another.

    Empty if it does not name the axis.
    """
    made = rewritten(item, _to(name, other))
    return print_item(made) if made is not item and isinstance(made, nodes.Entry | nodes.States | nodes.Index) else ""


def _to(name: str, other: str) -> Callable[[nodes.Record], nodes.Record | None]:
    def change(node: nodes.Record) -> nodes.Record | None:
        match node:
            case nodes.Split(mesh_axis=axis) if axis == name:
                return evolve(node, mesh_axis=other)
            case nodes.Clause(word="at", args=(axis, place)) if axis == name:
                return evolve(node, args=(other, place))
            case nodes.Clause(word="copies", args=(how, axes)) if name in axes:
                return evolve(node, args=(how, tuple(other if a == name else a for a in axes)))
        return None

    return change
