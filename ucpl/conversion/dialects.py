"""One model under two sets of names: what a source calls its tensors, and what a target calls them.

    ucpl convert ZERO MEGATRON --from 'of llama.ucpl:hf()' --to 'megatron_core(tp=2) of llama.ucpl:torch_dist()'

A layout of weights alone, called on one rank, says which box of which logical tensor each name has. So a layout of any model
over these names (ZeRO's flat buffers, DCP's chunks) is one over the logical tensors, all its states alike: joined there, a
fused tensor of the one side is made of those of the other, moments and masters as the weights.

What is not a tensor goes by names: a target's name has the group, the numbers (`step`) and the states of those of the source
that it is made of, which must agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from attrs import evolve, field

from ucpl.conversion.given import Called, Config, Given, called
from ucpl.conversion.side import Side, located
from ucpl.conversion.sides import source_side, target_side
from ucpl.conversion.ties import framework_of
from ucpl.conversion.training import change_of
from ucpl.errors import Label, fail
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.extents import Counted, NamedTensor
    from ucpl.layout import Layout, LogicalTensor
    from ucpl.regions import Home, Part, Pieces, Placement
    from ucpl.regions.through import Piece
    from ucpl.stores.checkpoint import Checkpoint

__all__ = ["Dialect", "Names", "described_as", "dialect", "named_sides", "names_of", "renamed", "seen", "split_names"]

_OF = re.compile(r"(?:^|\s+)of\s+(?=\S+\.ucpl:)")
_OF_NO_FILE = re.compile(r"(?:^|[\s)])of\s+(?!\S*\.ucpl:)([\w:]+\(.*)")
_OF_MEGATRON = frozenset({"megatron_core", "megatron_legacy", "megatron_fsdp"})
_LAYER = re.compile(r"\.layers\.\d+\.")
# How a source cut what it called by its own names says nothing of tensors that have others.
_OF_RANKS = frozenset({"tp", "pp", "ep", "vpp", "optimizer", "shaped", "tp_rule"})


def split_names(text: str) -> tuple[str, str | None]:
    """`zero1(dp=2) of llama.ucpl:hf()`: the layout, "" where none is said, and the call that says the names.

    Raises: UcplError E335 where no file is named behind `of`.
    """
    found = _OF.search(text)
    if found is None and (other := _OF_NO_FILE.search(text)):
        _refuse(other.group(1), "behind `of` stands a layout of a file, as in llama.ucpl:hf()")
    return (text[: found.start()], text[found.end() :]) if found else (text, None)


def described_as(text: str | None) -> tuple[Called | None, str | None]:
    """A source's `--from`: the layout, if one is said, and the call that says its names, if one is."""
    layout, names = split_names(text or "")
    return called(layout) if layout else None, names


@frozen(eq=False)
class Named:
    """A tensor as one dialect calls it: its shape, and which logical tensors have which boxes in it."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[int, Piece], ...]  # index into the placement's tensors


@frozen(eq=False)
class Dialect:
    """A layout of weights alone on one rank: names of its tensors, in the order of its lines, layer by layer."""

    call: str
    placement: Placement
    named: dict[str, Named]


def dialect(text: str, config: Config | None, sizes: Mapping[str, object]) -> Dialect:
    """Raises: UcplError E335 where the call is no dialect: of any model, on several ranks, of values that are changed."""
    one = called(text)
    if one.is_of_any:
        _refuse(text, f"`{one.call.name}` is of any model: it says no names of its own")
    made = located(one, Given(config=config, sizes=dict(sizes)))  # type: ignore[arg-type]
    if made.layout.ranks != 1:
        _refuse(text, f"it is on {made.layout.ranks} ranks: tensors are called by their names where they are whole")
    rows: list[tuple[tuple[int, ...], str, Named]] = []
    seen_names: dict[str, str] = {}
    run, was_many = 0, False
    for number, part in enumerate(made.placement.parts):
        if part.state != "weight" or part.is_alias:
            continue
        if part.scaled or part.lossy or any(part.value_of(made.placement.tensors[t]) != (1, 0) for t in part.tensors):
            _refuse(text, f"it stores `{part.label}` with other values, and moments have no such rule")
        is_many = len(part.homes) > 1
        run += not (is_many and was_many)
        was_many = is_many
        for n, (home, pieces) in enumerate(_pieces(part)):
            name = str(home.key[0] if part.form == "dcp" else home.key[-1])
            if name in seen_names:
                _refuse(text, f"it calls two tensors `{name}`")
            seen_names[name] = part.label
            layer = pieces[0][1].low[0] if is_many and pieces and pieces[0][1].low else 0
            rows.append(((run, layer, number, n), name, Named(home.shape, tuple(pieces))))
    rows.sort(key=lambda row: row[0])
    return Dialect(made.layout.call, made.placement, {name: named for _, name, named in rows})


def _pieces(part: Part) -> list[tuple[Home, list[tuple[int, Piece]]]]:
    from ucpl.regions.through import piece_of

    homes = list(part.homes)
    out: list[list[tuple[int, Piece]]] = [[] for _ in homes]
    p = part.pieces
    columns = (p.tensor, p.home, p.low, p.high, p.stride, p.offset)
    for tensor, home, low, high, stride, offset in zip(*(c.tolist() for c in columns), strict=True):
        out[home].append((tensor, piece_of(homes[home].shape, tuple(low), tuple(high), offset, tuple(stride))))
    return list(zip(homes, out, strict=True))


def _refuse(call: str, why: str) -> NoReturn:
    fail("E335", f"no names can be had from `{call}`: {why}", Label("<call>", where=call))


# ---- both sides' names ------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Names:
    """What both sides call the tensors of one model. `made`: a name of the target's -> those of the source's it is made of."""

    source: Dialect
    target: Dialect
    made: dict[str, tuple[str, ...]] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)  # second names that the target's class has, each with the first

    @property
    def said(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is left out of the source and made in the target of no logical tensor: rows behind the vocabulary."""
        gone = tuple(f"{n:,} elements of {name} that no tensor of the model has" for name, n in _beyond(self.source))
        made = tuple(
            f"{n:,} elements of {name} that no tensor of the model has: zero" for name, n in _beyond(self.target)
        )
        return gone, made

    def placements(self, source: Side, target: Side) -> tuple[Placement, Placement]:
        """Both as they are joined."""
        return seen(source.placement, self.source), seen(target.placement, self.target)


def _beyond(names: Dialect) -> list[tuple[str, int]]:
    out = []
    for name, named in names.named.items():
        held = sum(prod(b - a for a, b in zip(p.low, p.high, strict=True)) for _, p in named.pieces)
        if held < prod(named.shape):
            out.append((name, prod(named.shape) - held))
    return out


def names_of(source: Dialect, target: Dialect, checkpoint: Checkpoint) -> Names:
    """Raises: UcplError E335 where the two are of several models, E336 where the checkpoint has other tensors."""
    here, there = source.placement.layout, target.placement.layout
    if here.model_call != there.model_call:
        _refuse(target.call, f"it is of {here.model_call} on one side and of {there.model_call} on the other")
    held = {t.name: t for t in checkpoint.tensors}
    for name, tensor in held.items():
        known = source.named.get(name)
        if known is None:
            _disagree(checkpoint, source, name, "the checkpoint has it, and these names do not")
        elif known.shape != tensor.shape:
            _disagree(
                checkpoint,
                source,
                name,
                f"it is {list(tensor.shape)} in the checkpoint, and {list(known.shape)} by these",
            )
    for name in source.named:
        if name not in held:
            _disagree(checkpoint, source, name, "it is one of these names, and the checkpoint has no such tensor")
    numbers = {path: i for i, path in enumerate(source.placement.tensors)}
    holders: dict[int, list[tuple[str, Piece]]] = {}
    for name, named in source.named.items():
        for number, piece in named.pieces:
            holders.setdefault(number, []).append((name, piece))
    made: dict[str, tuple[str, ...]] = {}
    for name, named in target.named.items():
        mine: dict[str, None] = {}
        for number, piece in named.pieces:
            path = target.placement.tensors[number]
            for other, box in holders.get(numbers.get(path, -1), ()):
                if all(a < d and c < b for a, b, c, d in zip(piece.low, piece.high, box.low, box.high, strict=False)):
                    mine[other] = None
        if not mine:
            _refuse(target.call, f"`{name}` is made of nothing that {source.call} names")
        made[name] = tuple(mine)
    return Names(source, target, made)


def _disagree(checkpoint: Checkpoint, names: Dialect, name: str, why: str) -> None:
    fail(
        "E336",
        f"`{name}`: {why}",
        Label(str(checkpoint.top), f"{len(checkpoint.tensors)} tensors"),
        Label(names.call, f"{len(names.named)} names", where=name),
        about=name,
    )


def renamed(
    checkpoint: Checkpoint,
    made: Mapping[str, Sequence[str]],
    tensors: Sequence[NamedTensor],
    aliases: Mapping[str, str],
) -> Checkpoint:
    """The checkpoint as if it had the target's names: groups, numbers, states of these tensors.

    Raises: UcplError E337 where tensors that become one are of several groups, dtypes, kinds or numbers.
    """
    envelope = checkpoint.envelope
    groups = {member: g.name for g in envelope.groups for member in g.members}
    held = {t.name: t for t in checkpoint.tensors}

    def agreed(name: str, what: str, of: Callable[[str], object]) -> object:
        first, *others = made[name]
        for other in others:
            if of(other) != of(first):
                fail(
                    "E337",
                    f"`{name}` is made of `{first}` and `{other}`, and they are of other {what}",
                    Label(str(checkpoint.top), str(of(first)), where=first),
                    Label(str(checkpoint.top), str(of(other)), where=other),
                )
        return of(first)

    for name in made:
        agreed(name, "groups", groups.get)
        for what, of in (("dtypes", lambda t: held[t].dtype), ("kinds", lambda t: held[t].kind)):
            agreed(name, what, of)
        agreed(name, "states", lambda t: sorted(held[t].states))
        for state, values in envelope.scalars.items():
            agreed(name, f"numbers of `{state}`", _numbers(values))
    first = {name: of[0] for name, of in made.items()}
    scalars = {
        state: {name: values[one] for name, one in first.items() if one in values}
        for state, values in envelope.scalars.items()
    }
    known = evolve(
        envelope,
        groups=tuple(
            evolve(g, members=tuple(n for n in made if groups.get(first[n]) == g.name)) for g in envelope.groups
        ),
        scalars=scalars,
    )
    extents = {
        state: {name: mine[one] for name, one in first.items() if one in mine}
        for state, mine in checkpoint.scalar_extents.items()
    }
    return evolve(
        checkpoint,
        envelope=known,
        tensors=tuple(tensors),
        aliases=dict(aliases),
        scalar_extents=extents,
        stated=(),
        local_shapes={},
        shardings={},
        vocabulary={},
        pipeline=None,
        experts=None,
        legacy=None,
    )


def _numbers(values: Mapping[str, Counted]) -> Callable[[str], object]:
    from ucpl.stores.scalars import number_of

    return lambda name: number_of(values[name]) if name in values else None


def tensors_of(checkpoint: Checkpoint, names: Names) -> tuple[NamedTensor, ...]:
    """The target's tensors: shapes of its dialect, dtypes, kinds and states of those of the source that they are made of."""
    held = {t.name: t for t in checkpoint.tensors}
    return tuple(
        evolve(held[names.made[name][0]], name=name, shape=named.shape) for name, named in names.target.named.items()
    )


# ---- placements -------------------------------------------------------------------------------------------------------------


def seen(placement: Placement, names: Dialect) -> Placement:
    """A placement over names as one over the logical tensors, part by part. Elements of names alone are padding of it."""
    logical, layout = names.placement, names.placement.layout
    known = [names.named.get(path) for path in placement.tensors]
    width = max((len(t.counts) for t in layout.tensors.values()), default=1)
    made: dict[int, tuple[Pieces, Part]] = {}

    def rows(part: Part) -> Pieces:
        if id(part.folded) not in made:
            made[id(part.folded)] = (_through(part, known, width), part)
        return made[id(part.folded)][0]

    parts = tuple(_padded(evolve(part, folded=rows(part), live=None)) for part in placement.parts)
    return evolve(
        placement,
        layout=_layout(placement.layout, layout, _kinds(placement.layout, names)),
        tensors=logical.tensors,
        parts=parts,
        own=placement,
    )


def _through(part: Part, known: Sequence[Named | None], width: int) -> Pieces:
    from ucpl.regions import Pieces
    from ucpl.regions.through import through

    p = part.pieces
    out: list[tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, int]] = []
    columns = (p.tensor, p.home, p.low, p.high, p.stride, p.offset, p.policy, p.over)
    for tensor, home, low, high, stride, offset, policy, over in zip(*(c.tolist() for c in columns), strict=True):
        named = known[tensor]
        if named is None:
            continue
        dims = len(named.shape)
        for logical, piece in named.pieces:
            for box in through(piece, tuple(low[:dims]), tuple(high[:dims]), offset, tuple(stride[:dims])):
                more = width - len(box.low)
                zeros = (0,) * more
                out.append(
                    (
                        logical,
                        home,
                        box.low + zeros,
                        box.high + (1,) * more,
                        box.stride + zeros,
                        box.offset,
                        policy,
                        over,
                    )
                )
    n = len(out)
    tensors, homes, lows, highs, strides, offsets, policies, overs = zip(*out, strict=True) if out else ((),) * 8

    def block(values: Sequence[object]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64).reshape(n, width)

    def column(values: Sequence[object]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64)

    return Pieces(
        tensor=column(tensors),
        home=column(homes),
        low=block(lows),
        high=block(highs),
        stride=block(strides),
        home_stride=np.zeros((n, width), dtype=np.int64),
        offset=column(offsets),
        policy=column(policies),
        over=column(overs),
    )


def _padded(part: Part) -> Part:
    """The part whose stored tensors have all that is of no logical tensor as padding, which may hold anything."""
    filled = np.zeros(len(part.homes), dtype=np.int64)
    np.add.at(filled, part.folded.home, part.folded.volume)
    blocks = []
    at = 0
    for block in part.homes.blocks:
        mine = filled[at : at + len(block)].reshape(-1, block.choices)
        at += len(block)
        cells = block.shape.prod(axis=1)
        assert (mine == mine[:, :1]).all(), "stored tensors that are cut alike have padding alike"
        padding = cells - mine[:, 0]
        grown = padding > block.padding
        blocks.append(evolve(block, padding=padding, live=block.live | grown))
    return evolve(part, homes=type(part.homes)(tuple(blocks)))


def _kinds(layout: Layout, names: Dialect) -> dict[str, LogicalTensor]:
    """Logical tensors with the dtype and kind that the named ones have. Raises: UcplError E337 where these differ."""
    logical = names.placement
    out = dict(names.placement.layout.tensors)
    said: dict[str, str] = {}
    for name, named in names.named.items():
        tensor = layout.tensors.get(name)
        if tensor is None:
            continue
        for number, _ in named.pieces:
            path = logical.tensors[number]
            first = said.setdefault(path, name)
            other = layout.tensors[first]
            if (other.dtype, other.kind) != (tensor.dtype, tensor.kind):
                fail(
                    "E337",
                    f"`{path}` is `{first}` and `{name}`, and they are of other dtypes or kinds",
                    Label(layout.call, f"{other.dtype} {other.kind}", where=first),
                    Label(layout.call, f"{tensor.dtype} {tensor.kind}", where=name),
                    remedy=f"the model has one `{path}` of all layers: freeze or train all of them first, or none",
                )
            out[path] = evolve(out[path], dtype=tensor.dtype, kind=tensor.kind)
    return out


def _layout(own: Layout, logical: Layout, tensors: dict[str, LogicalTensor]) -> Layout:
    return evolve(
        own,
        tensors=tensors,
        sizes={**own.sizes, **logical.sizes},
        indices=logical.indices,
        aliases={},
        model_groups=(),
        model_name=logical.model_name,
        model_arguments=logical.model_arguments,
    )


# ---- sides ------------------------------------------------------------------------------------------------------------------


def as_named(source: Side, names: Names) -> Side:
    """The source as a target's layout is made of it: whole tensors under the target's names."""
    from ucpl.frontends.infer import model_of, state_dtypes

    assert source.checkpoint is not None
    made = renamed(source.checkpoint, names.made, tensors_of(source.checkpoint, names), names.aliases)
    model = model_of(made, state_dtypes(source.checkpoint, source.placement))
    inherited = {n: v for n, v in source.given.inherited.items() if n not in _OF_RANKS}
    given = evolve(source.given, model=model, inherited=inherited)
    there = located(called("plain()"), evolve(given, inherited={}))
    return evolve(there, given=given, checkpoint=made)


def _as_megatron_has_it(names: Names, target: Called) -> Names:
    """In the order of Megatron-Core's modules, which its buffers follow. Raises: UcplError E335 for stacks in buckets."""
    from ucpl.frontends.megatron_core import is_in_buckets
    from ucpl.stores.megatron.orders import registered

    named = names.target.named
    is_numbered = any(_LAYER.search(name) for name in named)
    if not is_numbered and is_in_buckets(target.layout, target.call):
        _refuse(names.target.call, "buckets are of modules: say their names, as llama.ucpl:megatron(tp = 1) has them")
    order = registered(tuple(named), fused=any("linear_qkv.layer_norm_" in name for name in named))
    return evolve(
        names,
        target=evolve(names.target, named={name: named[name] for name in order}),
        made={name: names.made[name] for name in order},
    )


def _as_registered(names: Names, target: Called, config: Config | None, checkpoint: Checkpoint) -> Names:
    """The target's names in the order in which its class registers parameters, with second names, where that matters.

    Raises: UcplError E335 where no class says it, E396 where the class cannot be asked.
    """
    from ucpl.frontends.hf.networks import network_of

    framework = framework_of(target)
    if framework in _OF_MEGATRON:
        return _as_megatron_has_it(names, target)
    if framework not in ("deepspeed", "universal"):
        return names
    if names.target.placement.layout.framework != "huggingface" or not config:
        _refuse(
            names.target.call,
            f"{framework} holds parameters in the order in which modules register them: it is known of transformers' classes",
        )
    network = network_of(dict(config or {}))
    held = {t.name for t in checkpoint.tensors if t.kind == "buffer"}
    buffers = {name for name, made in names.made.items() if made[0] in held}
    order = {name: i for i, name in enumerate(network.shapes)}
    unknown = next((name for name in names.target.named if name not in order and name not in buffers), None)
    if unknown is not None:
        _refuse(
            names.target.call,
            f"{network.root.class_name} has no parameter `{unknown}`: `architectures` of the config names the class",
        )
    named = dict(sorted(names.target.named.items(), key=lambda item: order.get(item[0], len(order))))
    aliases = {alias: owner for alias, owner in network.owners.items() if owner in named and alias not in named}
    made = {name: names.made[name] for name in named}
    return evolve(names, target=evolve(names.target, named=named), made=made, aliases=aliases)


def named_sides(
    checkpoint: Checkpoint | None,
    described: Called | None,
    target: Called,
    said: tuple[str | None, str | None],
    given: Given,
) -> tuple[Side, Side, Names]:
    """Both sides of a plan whose names are said. Raises: UcplError E335 to E337."""
    mine, other = said
    if mine is None or other is None or checkpoint is None:
        there = "the source" if mine is None else "the target"
        why = f"{there} says none" if checkpoint is not None else "the source is no checkpoint"
        _refuse(mine or other or "", f"both sides say what they call the tensors of one model, and {why}")
    for word, texts in (("fill", given.fill), ("drop", given.drop), ("freeze", given.freeze), ("train", given.train)):
        if texts:
            _refuse(other, f"--{word} speaks of names of one side: convert first, then {word}")
    for one, call in ((described, mine), (target, other)):
        if one is not None and not one.is_of_any:
            _refuse(
                call,
                f"`{one.call.name}` before `of` is of a model of its own, and a layout of any model stands there",
            )
    sizes = given.sizes  # of the model that both sides name: the layouts of any model have none of it
    given = evolve(given, sizes={})
    here = source_side(checkpoint, described, evolve(given, model=None))
    config = here.given.config
    names = names_of(dialect(mine, config, sizes), dialect(other, config, sizes), checkpoint)
    names = _as_registered(names, target, config, checkpoint)
    aimed = target_side(target, as_named(here, names), given)
    change = change_of(here, aimed.layout)
    if change is not None and any(t.kind != "buffer" and change.concerns(t.dtype) for t in checkpoint.tensors):
        _refuse(other, f"the target trains in {change.now}, the source in {change.was}: convert that first")
    return here, aimed, names
