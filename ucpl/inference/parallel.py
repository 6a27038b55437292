"""Model-parallel tensors as a layout that extends a shipped one.

For a source the widths are those found. For a target at another tensor-parallel degree they are DeepSpeed's own
(module_inject/ tp_shard.py of release 0.19.8, `get_shard_size`), which depend on a number that its checkpoints lack:
the model's key-value heads. `kv_heads` gives it. If all numbers that the source's widths allow lead to one cut, it is
not needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.extents import Section, Sharding
from ucpl.language import nodes, parse, print_file
from ucpl.language.printer import print_axis
from ucpl.language.walk import lowest_version
from ucpl.language.words import quote
from ucpl.layout import Library
from ucpl.layout.expand import wildcards_of
from ucpl.layout.scope import Config, Scope, Value
from ucpl.placement.sharding import TP
from ucpl.records import frozen
from ucpl.resources import VERSION

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

Inherited = dict[str, tuple[Value, str]]
Cuts = Mapping[str, Sharding]  # of tensors over tensor-parallel ranks: those that are known
Note = tuple[str, object, str]  # (name, value, origin), as a plan prints them
KV_HEADS = "kv_heads"
GRAIN = "tp_grain_size"
RULE, CHUNK = "tp_rule", "chunk"  # the cut of a source's tensors, if it is not AutoTP's
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a step of a name that is a number
_LINES_SHOWN = 16
_WORDS = "where `_@tp ...` cuts rows, `_ _@tp ...` columns, and `...` is a copy on every rank"
_SAY_CUTS = "for a transformers class add --config config.json; else --to 'FILE.ucpl:NAME(tp=2)'"

STORED, TARGET = "stored", "target"  # names of the layouts that are made
LAYERED = "layered"  # of one that another is made from: stages and cuts, before experts

# Configs name the number of key-value heads so; the later ones say "as many as query heads".
_CONFIG_KEYS: tuple[str, ...] = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
    "kv_n_heads",
)
_CONFIG_KEYS += ("num_attention_heads", "n_heads", "attention_heads")


@frozen(eq=False)
class Base:
    """A layout of any model that is extended, and its model."""

    library: Library
    call: nodes.Call
    model: nodes.Model
    inherited: Inherited = field(factory=dict)  # values for arguments that the call leaves open
    config: Config | None = None

    @property
    def layout(self) -> nodes.Layout:
        return _layout(self.library, self.call.name)

    def asked(self, axis: str, default: int = 1) -> int:
        """The degree of an axis in the call.

        Its argument, an inherited one, or 1.
        """
        for position, argument in enumerate(self.call.arguments):
            name = argument.name
            if name is None and position < len(self.layout.parameters):
                name = self.layout.parameters[position].name
            if name == axis:
                return Scope().integer(argument.value)
        value = self.inherited.get(axis, (default, ""))[0]
        return value if isinstance(value, int) else default


@frozen(eq=False)
class Extended:
    """A library with the new layout, its call, and its origins."""

    library: Library
    call: nodes.Call
    notes: tuple[Note, ...] = ()
    model: nodes.Model | None = None  # where it has more names than the one that was given


# ---- whether there is anything to do -----------------------------------------------------------------------------------


def _layout(library: Library, name: str) -> nodes.Layout:
    node = library.layout(name).node
    assert isinstance(node, nodes.Layout)
    return node


def is_open(library: Library, call: nodes.Call) -> bool:
    """Test for a tensor-parallel layout of any model without cuts."""
    known = _layout(library, call.name)
    if known.of != "any" or TP not in {p.name for p in known.parameters}:
        return False
    lines = [i for link in library.chain(call.name) for i in link.node.items]
    return not any(isinstance(i, nodes.Entry) and i.path != "*" for i in lines)


def says_cuts_alone(library: Library, call: nodes.Call) -> bool:
    """Test for a layout of any model with only cuts over tp.

    Places are those on ranks and in files.
    """
    known = _layout(library, call.name)
    lines = [
        i for link in library.chain(call.name) for i in link.node.items if isinstance(i, nodes.Entry) and i.path != "*"
    ]
    placed = {"at", "in"}
    return (
        known.of == "any"
        and TP in {p.name for p in known.parameters}
        and bool(lines)
        and not any(c.word in placed for line in lines for c in line.clauses)
    )


def is_cut(checkpoint: Checkpoint) -> bool:
    """Test whether tensor-parallel ranks hold parts."""
    setting = checkpoint.state.settings.get(TP)
    return setting is not None and setting.value != 1


def demand(shardings: Mapping[str, Sharding], checkpoint: Checkpoint) -> None:
    """Check that the cut of each tensor is known.

    Raises: UcplError E464.
    """
    if not is_cut(checkpoint):
        return
    unknown = [tensor.name for tensor in checkpoint.state.tensors if tensor.name not in shardings]
    if unknown:
        shown = ", ".join(str(list(shape)) for shape in checkpoint.state.parallel.local_shapes.get(unknown[0], ())[:4])
        more = f"; so with {len(unknown) - 1} more" if len(unknown) > 1 else ""
        fail(
            "E464",
            f"`{unknown[0]}` is {shown} on tensor-parallel ranks, and their places in the full tensor are unknown{more}",
            Label(str(checkpoint.root), where=unknown[0]),
            notes=(_to_start_from(unknown, checkpoint),),
        )


def _to_start_from(unknown: Sequence[str], checkpoint: Checkpoint) -> str:
    """A layout to start from, with copy lines for open tensors.

    The user changes the lines of tensors that are no copies.
    """
    lines = _open_lines(unknown, checkpoint)
    more = [f"  # and {len(lines) - _LINES_SHOWN} more"] if len(lines) > _LINES_SHOWN else []
    return "\n".join((f"to start from, {_WORDS}:", _opening(checkpoint), *lines[:_LINES_SHOWN], *more, "}"))


def started(checkpoint: Checkpoint) -> str:
    """A .ucpl to start from, with open lines marked."""
    unknown = [
        tensor.name for tensor in checkpoint.state.tensors if tensor.name not in checkpoint.state.parallel.shardings
    ]
    known = [
        f'  {quote(name)} = {" ".join(map(print_axis, pattern(s)))}  as "{{name}}"  # {s.origin}'
        for name, s in checkpoint.state.parallel.shardings.items()
        if s.dim is not None
    ]
    text = f"# The cuts of tensors with lines marked as open are unknown: {_WORDS}."
    lines = [f"{line}: open" for line in _open_lines(unknown, checkpoint)]
    return "\n".join((f"ucpl {VERSION}", "", text, _opening(checkpoint), *known, *lines, "}", ""))


def _opening(checkpoint: Checkpoint) -> str:
    stage = checkpoint.state.settings.get("stage")
    base = f"zero{stage.value if stage is not None else 1}"
    return f"layout mine(dp, tp, pp = 1) of any extends {base}(dp = dp, tp = tp, pp = pp) {{"


def _open_lines(unknown: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in unknown:
        shapes.setdefault(_NUMBER.sub("*", name), checkpoint.state.parallel.local_shapes.get(name, ((),))[0])
    return [f'  {quote(glob)} = ...  as "{{name}}"  # {list(shape)} on a rank' for glob, shape in shapes.items()]


# ---- a source ------------------------------------------------------------------------------------------------------------


def origins(shardings: Mapping[str, Sharding]) -> tuple[Note, ...]:
    counts: dict[str, int] = {}
    for s in shardings.values():
        if s.dim is not None:
            counts[s.origin] = counts.get(s.origin, 0) + 1
    return tuple(("cuts over tp", f"{n} tensor{'s' * (n > 1)}", origin) for origin, n in counts.items())


# ---- a target ------------------------------------------------------------------------------------------------------------


def names_a_class(base: Base) -> bool:
    """Test whether a tensor-parallel target has a config.json with its class."""
    return base.config is not None and "model_type" in base.config and base.asked(TP) > 1


def dealt(base: Base, shardings: Cuts) -> tuple[Base, Cuts, tuple[Note, ...]]:
    """Cuts at the call's tensor-parallel degree, and the base without their arguments.

    Raises: UcplError E472 if the cuts at that degree are unknown, E473 if they contradict the source's.
    """
    call = base.call
    given = [a for a in call.arguments if a.name == KV_HEADS]
    plain = evolve(base, call=evolve(call, arguments=tuple(a for a in call.arguments if a.name != KV_HEADS)))
    degree = plain.asked(TP)
    here = next((len(x.widths) for s in shardings.values() for x in s.sections if x.widths is not None), 1)
    if degree <= 1:  # less is no mesh's degree, and the mesh says so
        return (plain if shardings or degree < 1 else base), {}, ()
    if not shardings:
        fail(
            "E472",
            f"`{call.name}` at tp = {degree}: the source is not tensor parallel, so its cuts are unknown",
            Label("<call>", where=f"tp = {degree}"),
            remedy=_SAY_CUTS,
        )
    if degree == here:
        return plain, shardings, (("cuts over tp", f"{_cut(shardings)} tensors", "as the source's"),)
    if base.inherited.get(RULE, ("", ""))[0] == CHUNK:
        return plain, *_chunked(shardings, degree, base.inherited[RULE][1])
    heads: tuple[int, str] | None = None
    if given:
        heads = Scope().integer(given[0].value), "given"
    elif base.config is not None:
        heads = heads_of(base.config)
    grain, origin = base.inherited.get(GRAIN, (0, ""))
    said = (grain, origin) if isinstance(grain, int) and grain > 0 else (1, "DeepSpeed's default")
    return plain, *recut(shardings, degree, heads, said)


def _chunked(shardings: Cuts, degree: int, origin: str) -> tuple[Cuts, tuple[Note, ...]]:
    """Cut each section as torch.chunk does: equal parts, the last one shorter.

    Models that are written for tensor parallelism do so, and DeepSpeed's own loader of universal checkpoints (0.19.8,
    checkpoint/universal_checkpoint.py). Raises: UcplError E473 where a rank would hold nothing.
    """
    out: dict[str, Sharding] = {}
    uneven: list[str] = []
    for name, s in shardings.items():
        sections = tuple(x if x.widths is None else Section(x.size, chunked(x.size, degree)) for x in s.sections)
        for x in sections:
            if x.widths is not None and 0 in x.widths:
                fail(
                    "E473",
                    f"{x.size} positions of dim {s.dim} of `{name}` leave a rank of tp = {degree} without any",
                    Label("<call>", where=f"tp = {degree}"),
                    Label("<source>", where=origin),
                    remedy=f"tp = {next(n for n in range(degree, 0, -1) if 0 not in chunked(x.size, n))}, the next that"
                    " leaves each rank some; or a layout of your own that extends zero1, which cuts it otherwise",
                )
            if x.widths is not None and len(set(x.widths)) > 1:
                uneven.append(f"{name} {list(x.widths)}")
        out[name] = evolve(s, sections=sections, origin=origin)
    notes: list[Note] = [("cuts over tp", f"{_cut(shardings)} tensors", f"as torch.chunk cuts the tensors in {origin}")]
    if uneven:
        notes.append(("unequal parts", ", ".join(uneven[:3]) + (", ..." if len(uneven) > 3 else ""), "torch.chunk"))
    return out, tuple(notes)


def chunked(size: int, degree: int) -> tuple[int, ...]:
    """Widths as torch.chunk makes them, of ranks without any too."""
    each = -(-size // degree)
    return tuple(max(0, min(each, size - rank * each)) for rank in range(degree))


def _cut(shardings: Mapping[str, Sharding]) -> int:
    return sum(s.dim is not None for s in shardings.values())


def heads_of(config: Mapping[str, object]) -> tuple[int, str] | None:
    """(key-value heads, key) of a Hugging Face config, in DeepSpeed's order."""
    inner = config.get("text_config")
    said = inner if isinstance(inner, Mapping) else config
    for key in _CONFIG_KEYS:
        heads = said.get(key)
        if isinstance(heads, int) and not isinstance(heads, bool):
            return heads, f"{key} of the config"
    return None


def rule(size: int, degree: int, kv_heads: int, grain: int, module: str) -> tuple[int, ...]:
    """DeepSpeed's widths of `size` positions over `degree` ranks.

    kv_heads 0: the model's config names none.
    """
    by_heads = "mlp" not in module and module not in ("lm_head", "embed_out")
    by_heads &= not any(s in module for s in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"))
    if kv_heads and size % kv_heads == 0 and by_heads:
        return tuple(n * (size // kv_heads) for n in _spread(kv_heads, degree))
    if size < grain:
        return _spread(size, degree)
    *first, last = (n * grain for n in _spread(size // grain, degree))
    return (*first, last + size % grain)


def _spread(count: int, ways: int) -> tuple[int, ...]:
    return tuple(count // ways + (i < count % ways) for i in range(ways))


def recut(
    shardings: Mapping[str, Sharding],
    degree: int,
    heads: tuple[int, str] | None,
    grain_said: tuple[int, str] = (1, "DeepSpeed's default"),
) -> tuple[dict[str, Sharding], tuple[Note, ...]]:
    """The same tensors, cut over another number of ranks by DeepSpeed's rule.

    Raises: UcplError E472, E473.
    """
    grain, grain_origin = grain_said
    if degree == 1:
        return {name: evolve(s, dim=None, sections=()) for name, s in shardings.items()}, ()
    _check_positions(shardings, degree)
    sections = [
        _Cut(name, x.size, x.widths) for name, s in shardings.items() for x in s.sections if x.widths is not None
    ]
    divisors = {n for size in {c.size for c in sections} for n in range(1, size + 1) if size % n == 0}
    fitting = [n for n in (0, *sorted(divisors)) if all(c.over(len(c.widths), n, grain) == c.widths for c in sections)]
    kv_heads, origin = heads if heads is not None else _only_heads(sections, fitting, degree, grain)
    for c in sections:
        expected = c.over(len(c.widths), kv_heads, grain)
        if expected != c.widths:
            fail(
                "E473",
                f"with kv_heads = {kv_heads} DeepSpeed cuts {c.size} positions of `{c.name}` into {list(expected)},"
                f" the source holds {list(c.widths)}",
                Label("<call>" if origin == "given" else origin, where=f"kv_heads = {kv_heads}"),
                remedy=f"numbers that the source's widths allow: {', '.join(map(str, fitting)) or 'none'}",
            )
    out = {name: _over(name, s, degree, kv_heads, grain) for name, s in shardings.items()}
    return out, ((KV_HEADS, kv_heads, origin), (GRAIN, grain, grain_origin), *origins(out))


@frozen
class _Cut:
    """A section of a tensor, and its widths on the source's ranks."""

    name: str
    size: int
    widths: tuple[int, ...]

    def over(self, degree: int, kv_heads: int, grain: int) -> tuple[int, ...]:
        """Its widths by DeepSpeed's rule."""
        return rule(self.size, degree, kv_heads, grain, self.name.rpartition(".")[0])


def _only_heads(sections: Sequence[_Cut], fitting: Sequence[int], degree: int, grain: int) -> tuple[int, str]:
    """(key-value heads, reason) if the source's widths leave one cut.

    Raises: UcplError E472 if they leave several.
    """
    found: dict[tuple[tuple[int, ...], ...], int] = {}
    for n in fitting:
        found.setdefault(tuple(c.over(degree, n, grain) for c in sections), n)
    if not found:
        _unruly(sections, grain)
    if len(found) > 1 and 0 not in fitting:
        (one, a), (other, b) = list(found.items())[:2]
        i = next(i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y)
        fail(
            "E472",
            f"{sections[i].size} positions of `{sections[i].name}` over tp = {degree} are {list(one[i])} with kv_heads = {a}"
            f" and {list(other[i])} with {b}, and the source does not determine it",
            Label("<call>", where=f"tp = {degree}"),
        )
    if len(found) > 1:  # another number would be a contradiction of shapes when DeepSpeed loads, never a silent one
        text = "default of a config without heads; give kv_heads=N if the model's config has N, which changes the cut"
        return 0, text
    return fitting[0], "the only cut that the source's widths allow"


def _over(name: str, sharding: Sharding, degree: int, kv_heads: int, grain: int) -> Sharding:
    """A tensor's sections over another number of ranks.

    Raises: UcplError E473 if a rank would have none of it.
    """
    module = name.rpartition(".")[0]
    new = tuple(
        x if x.widths is None else Section(x.size, rule(x.size, degree, kv_heads, grain, module))
        for x in sharding.sections
    )
    made = evolve(sharding, sections=new, origin="DeepSpeed's rule")
    if new and (empty := [r for r in range(degree) if not made.width(r)]):
        fail(
            "E473",
            f"tp rank {empty[0]} of {degree} would hold nothing of `{name}`,"
            f" whose dim {sharding.dim} is {sharding.shape[sharding.dim or 0]}",
            Label("<call>", where=f"tp = {degree}, kv_heads = {kv_heads}"),
        )
    return made


def _check_positions(shardings: Mapping[str, Sharding], degree: int) -> None:
    """Check that each rank has a position, before widths are computed.

    Raises: UcplError E473.
    """
    for name, s in shardings.items():
        if s.dim is not None and s.shape[s.dim] < degree:
            fail(
                "E473",
                f"{degree} tp ranks cannot each hold some of `{name}`, whose dim {s.dim} is {s.shape[s.dim]}",
                Label("<call>", where=f"tp = {degree}"),
            )


def _unruly(sections: Sequence[_Cut], grain: int) -> NoReturn:
    alone = (c for c in sections if all(c.over(len(c.widths), n, grain) != c.widths for n in range(c.size + 1)))
    c = next(alone, sections[0])  # else each alone has a number, and all together have none
    fail(
        "E473",
        f"the source holds {list(c.widths)} of {c.size} positions of `{c.name}`, which DeepSpeed's rule makes for no kv_heads",
        Label("<source>", where=c.name),
        remedy="write a layout of your own that extends zero1 for the target, and say the widths there",
    )


# ---- patterns --------------------------------------------------------------------------------------------------------------


def pattern(sharding: Sharding) -> tuple[nodes.Axis, ...]:
    """A tensor's cut as the axes of its entry: `(_[..24]@tp + _[24..]@tp) ...`."""
    if sharding.dim is None:
        return (nodes.Rest(),)
    terms: list[nodes.Axis] = []
    low = 0
    several = len(sharding.sections) > 1
    for i, section in enumerate(sharding.sections):
        high = low + section.size
        first = None if low == 0 else nodes.Number(low)
        last = None if i + 1 == len(sharding.sections) else nodes.Number(high)
        axis: nodes.Axis = nodes.Any_(nodes.Among((nodes.Range(first, last),)) if several else None)
        if not several and section.size > sharding.shape[sharding.dim]:
            axis = nodes.Pad(axis, nodes.Number(section.size), "live")
        if section.widths is not None:
            axis = nodes.Cut(axis, (split(section.widths),))
        terms.append(axis)
        low = high
    cut = nodes.Stack(tuple(nodes.Term(None, (axis,)) for axis in terms)) if several else terms[0]
    before = (nodes.Any_(),) * sharding.dim
    after = (nodes.Rest(),) if sharding.dim + 1 < len(sharding.shape) else ()
    return (*before, cut, *after)


def split(widths: tuple[int, ...]) -> nodes.Split:
    """The shortest exact text of widths.

    It is equal widths, `@spread(tp)`, `@spread(tp, unit)`, or one by one.
    """
    sizes = sorted(set(widths), reverse=True)
    if len(sizes) == 1:
        return nodes.Split(TP)
    unit = sizes[0] - sizes[1]
    larger_first = all(a >= b for a, b in pairwise(widths))
    if len(sizes) == 2 and larger_first and sizes[1] % unit == 0:
        return nodes.Split(TP, "spread", grain=None if unit == 1 else nodes.Number(unit))
    return nodes.Split(TP, "sizes", tuple(nodes.Number(w) for w in widths))


def cut(base: Base, shardings: Cuts, name: str) -> Extended:
    """A layout that adds an entry per cut tensor."""
    entries: list[nodes.Entry] = []
    aliases: dict[str, list[str]] = {}
    for item in base.model.items:
        if isinstance(item, nodes.Alias):
            aliases.setdefault(item.owner, []).append(item.path)
    lines = wildcards_of(base.library, base.call, base.model, inherited=base.inherited)
    for path, sharding in shardings.items():
        if sharding.dim is None:
            continue
        axes = pattern(sharding)
        for place in (path, *aliases.get(path, ())):
            entries += [evolve(e, shape=_filled(e.shape or (), axes)) for e in lines.get(place, ())]
    return extended(base, name, (), entries)


def extended(base: Base, name: str, extra: tuple[nodes.Parameter, ...], items: Sequence[nodes.LayoutItem]) -> Extended:
    """A layout of these items that extends the called one.

    It has its parameters and some more, in a library that has both.
    """
    known = base.layout
    inner = nodes.Call(known.name, tuple(nodes.Argument(p.name, nodes.Name(p.name)) for p in known.parameters))
    made = nodes.Layout(name, (*known.parameters, *extra), "any", inner, tuple(items))
    file = f"{name}.ucpl"
    larger = evolve(base.library, known=dict(base.library.known), files=dict(base.library.files))
    larger.add(parse(print_file(nodes.File(file, lowest_version(made), (made,))), file))
    return Extended(larger, evolve(base.call, name=name))


def _filled(shape: tuple[nodes.Axis, ...], axes: tuple[nodes.Axis, ...]) -> tuple[nodes.Axis, ...]:
    """A pattern of any tensor with this one's axes for `...`."""
    out: list[nodes.Axis] = []
    for axis in shape:
        match axis:
            case nodes.Rest():
                out += axes
            case nodes.Stack(terms=terms):
                out.append(evolve(axis, terms=tuple(evolve(t, axes=_filled(t.axes, axes)) for t in terms)))
            case nodes.Cut(axis=inner) | nodes.Pad(axis=inner) | nodes.Trim(axis=inner) | nodes.Flat(axis=inner):
                (only,) = _filled((inner,), axes)
                out.append(evolve(axis, axis=only))
            case _:
                out.append(axis)
    return tuple(out)
