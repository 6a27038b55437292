"""Megatron's legacy folders as a layout that extends `megatron_legacy`.

It has a line for each place of each tensor: its cut over tp, its stage, and the number of its layer and expert there.
It has a group and a pair of state lines for each run of parameters in `distrib_optim.pt`; without that file, for the
numbers of a stage's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.extents import Sharding
from ucpl.formats.megatron.homes import Legacy, legacy_of
from ucpl.inference.parallel import STORED, Base, Extended, Note, extended, origins, pattern
from ucpl.language import nodes, parse
from ucpl.language.printer import print_axis
from ucpl.language.words import quote

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

_MOMENTS = "any @tp"  # each tp rank steps its copies by its own gradients; Megatron, too, uses the first rank's


def stored(base: Base, checkpoint: Checkpoint) -> Extended:
    """The layout of an opened folder."""
    legacy = legacy_of(checkpoint)
    assert legacy is not None
    states = {s for tensor in checkpoint.state.tensors for s in tensor.states}
    items = lines(legacy, checkpoint.state.parallel.shardings, states)
    if "fp32" not in states:
        items += (nodes.Derive("fp32", "weight"),)
    made = extended(base, STORED, (), items)
    return evolve(made, notes=(*origins(checkpoint.state.parallel.shardings), *_notes(legacy)))


def _notes(legacy: Legacy) -> tuple[Note, ...]:
    out: list[Note] = []
    if legacy.pp * legacy.vpp > 1:
        out.append(("layers of stages", "as the files have them", "numbers of layers in the state dict of each rank"))
    if legacy.optimizer == "distributed":
        text = f"{len(legacy.runs)} run{'s' * (len(legacy.runs) > 1)}"
        out.append(
            ("order of parameters", text, "the state dict's, reversed, as Megatron's gradient buffers have them")
        )
        if legacy.tp > 1:
            out.append(("moments of copies", "the first tp rank's", "as Megatron-Core's own checkpoints take them"))
    return tuple(out)


def lines(legacy: Legacy, shardings: Mapping[str, Sharding], states: Iterable[str]) -> tuple[nodes.LayoutItem, ...]:
    """The layout's lines besides the shipped ones.

    shardings: of tensors that tp may cut.
    """
    out = []
    for name, homes in legacy.homes.items():
        axes = pattern(shardings[name]) if name in shardings else (nodes.Rest(),)
        sentence = " ".join(map(print_axis, axes))
        for home in homes:
            where = at_ranks(legacy, home.stage, home.ep)
            out.append(f"  {quote(name)} = {sentence}{where} in weights as {quote('/'.join(home.key))}")
    present = set(states)
    others = sorted(present - {"fp32"})
    for number, run in enumerate(legacy.runs):
        group = f"run{number}"
        out.append(f"  group {group} = {', '.join(map(quote, run.members))}")
        where = at_ranks(legacy, run.stage, None if run.is_expert or legacy.ep == 1 else 0)
        end = "" if run.bucket is None else f"/{run.bucket}"
        flat = f"for {group} = {'like' if run.apart else 'trim(flat(pad(each, 64)))'}"
        end += "/{name}" if run.apart else ""
        key = run.keys[0]
        out.append(f"  state fp32 {flat}{where} in optim as {quote(f'{key}/param{end}')}")
        if others:
            loose = f" {_MOMENTS}" if legacy.tp > 1 else ""
            out.append(f"  state {', '.join(others)} {flat}{loose}{where} in optim as {quote(f'{key}/{{state}}{end}')}")
    for s, stage in enumerate(legacy.stages):
        out += _numbered(legacy, s, (stage.groups, stage.is_expert), present)
    text = "\n".join(("ucpl 2", "layout lines() of any {", *out, "}", ""))
    (layout,) = parse(text, "megatron_legacy").statements
    assert isinstance(layout, nodes.Layout)
    return layout.items


def _numbered(
    legacy: Legacy, stage: int, held: tuple[Sequence[Sequence[str]], Sequence[bool]], states: set[str]
) -> list[str]:
    """State lines of torch's optimizers, by their numbers, group by group."""
    groups, of_experts = held
    out = []
    where = at_ranks(legacy, stage, None)
    names = {g: f"stage{stage}.{g}" for g, members in enumerate(groups) if members}
    for g, name in names.items():
        out.append(f"  group {quote(name)} = {', '.join(map(quote, groups[g]))}")
    others = sorted(states - {"fp32"})
    for is_expert in (False, True):
        mine = [g for g in names if of_experts[g] == is_expert]
        if not mine:
            continue
        first = min(g for g, one in enumerate(of_experts) if one == is_expert)
        top = f"optimizer/{int(is_expert)}" if legacy.chained else "optimizer"
        inner = f"{top}/optimizer" if legacy.optimizer == "float16" else top
        for g in mine if legacy.optimizer == "float16" else ():
            key = f"{top}/fp32_from_fp16_params/{g - first}/{{member}}"
            out.append(f"  state fp32 for {quote(names[g])} = like{where} in weights as {quote(key)}")
        if others:
            of = ", ".join(quote(names[g]) for g in mine)
            key = f"{inner}/state/{{number}}/{{state}}"
            loose = f" {_MOMENTS}" if legacy.tp > 1 else ""
            out.append(f"  state {', '.join(others)} for {of} = like{loose}{where} in weights as {quote(key)}")
    return out


def at_ranks(legacy: Legacy, stage: int, ep: int | None) -> str:
    pp = f" at pp[{stage}]" if legacy.pp > 1 else ""
    return pp + (f" at ep[{ep}]" if legacy.ep > 1 and ep is not None else "")
