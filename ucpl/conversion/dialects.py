"""One model under two sets of names: the source's and the target's.

    ucpl convert ZERO MEGATRON --from 'of llama.ucpl:hf()' --to 'megatron_core(tp=2) of llama.ucpl:torch_dist()'

A layout of weights alone, called on one rank, maps each name to boxes of logical tensors. So a layout of any model over these
names (ZeRO's flat buffers, DCP's chunks) becomes a layout over the logical tensors, for all states. With both sides over the
same logical tensors, a fused tensor of one side is made of several of the other. Moments and masters follow the weights.

Groups, numbers (`step`) and sets of states go by names. A name of the target takes those of the source's names that it is made
of, and these must agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NoReturn

from attrs import field

from ucpl.conversion.requests import Called, Config, Given, called
from ucpl.conversion.side import located
from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.placement import Home, Part, Placement
    from ucpl.placement.dialect_boxes import DialectPiece

__all__ = ["Dialect", "DialectTensor", "Names", "described_as", "dialect", "names_of", "refuse", "split_names"]

_OF = re.compile(r"(?:^|\s+)of\s+(?=\S+\.ucpl:)")
_OF_NO_FILE = r"(?:^|[\s)])of\s+(?!\S*\.ucpl:)([\w:]+\(.*)"


def split_names(text: str) -> tuple[str, str | None]:
    """Split `zero1(dp=2) of llama.ucpl:hf()` into the layout and the names' call.

    The layout is "" if the text has none.

    Raises: UcplError E335 if no file follows `of`.
    """
    found = _OF.search(text)
    if found is None and (other := re.search(_OF_NO_FILE, text)):
        refuse(other.group(1), "write a layout of a file after `of`, as in llama.ucpl:hf()")
    return (text[: found.start()], text[found.end() :]) if found else (text, None)


def described_as(text: str | None) -> tuple[Called | None, str | None]:
    """The layout and the names' call of a source's `--from`, if given."""
    layout, names = split_names(text or "")
    return called(layout) if layout else None, names


@frozen(eq=False)
class DialectTensor:
    """A tensor of one dialect: its shape and boxes of logical tensors."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[int, DialectPiece], ...]  # index into the placement's tensors


@frozen(eq=False)
class Dialect:
    """The tensors of a layout of weights alone, by name.

    The layout is on one rank. The names are in the order of its lines, layer by layer.
    """

    call: str
    placement: Placement
    named: dict[str, DialectTensor]


def dialect(text: str, config: Config | None, sizes: Mapping[str, object]) -> Dialect:
    """The dialect of a call.

    Raises: UcplError E335 if the call is of any model, on several ranks, or changes values.
    """
    one = called(text)
    if one.is_of_any:
        refuse(text, f"`{one.call.name}` is of any model: it says no names of its own")
    made = located(one, Given(config=config, sizes=dict(sizes)))  # type: ignore[arg-type]
    if made.layout.ranks != 1:
        refuse(text, f"it is on {made.layout.ranks} ranks: names need a layout on one rank")
    rows: list[tuple[tuple[int, ...], str, DialectTensor]] = []
    seen_names: dict[str, str] = {}
    of = format_named(made.placement.layout.framework)
    run, was_many = 0, False
    for number, part in enumerate(made.placement.parts):
        if part.state != "weight" or part.is_alias:
            continue
        if part.scaled or part.lossy or any(part.value_of(made.placement.tensors[t]) != (1, 0) for t in part.tensors):
            refuse(text, f"it stores `{part.label}` with other values, and moments have no such rule")
        is_many = len(part.homes) > 1
        run += not (is_many and was_many)
        was_many = is_many
        for n, (home, pieces) in enumerate(_pieces(part)):
            name = str(home.key[0] if of.stores_chunks(part.form) else home.key[-1])
            if name in seen_names:
                refuse(text, f"it calls two tensors `{name}`")
            seen_names[name] = part.label
            layer = pieces[0][1].low[0] if is_many and pieces and pieces[0][1].low else 0
            rows.append(((run, layer, number, n), name, DialectTensor(home.shape, tuple(pieces))))
    rows.sort(key=lambda row: row[0])
    return Dialect(made.layout.call, made.placement, {name: named for _, name, named in rows})


def _pieces(part: Part) -> list[tuple[Home, list[tuple[int, DialectPiece]]]]:
    from ucpl.placement.dialect_boxes import piece_of

    homes = list(part.homes)
    out: list[list[tuple[int, DialectPiece]]] = [[] for _ in homes]
    p = part.pieces
    columns = (p.tensor, p.home, p.low, p.high, p.stride, p.offset)
    for tensor, home, low, high, stride, offset in zip(*(c.tolist() for c in columns), strict=True):
        out[home].append((tensor, piece_of(homes[home].shape, tuple(low), tuple(high), offset, tuple(stride))))
    return list(zip(homes, out, strict=True))


def refuse(call: str, why: str) -> NoReturn:
    fail("E335", f"no names can be had from `{call}`: {why}", Label("<call>", where=call))


# ---- both sides' names ------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Names:
    """The names of both sides for the tensors of one model.

    made: a name of the target -> the source's names of its elements.
    """

    source: Dialect
    target: Dialect
    made: dict[str, tuple[str, ...]] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)  # second names that the target's class has, each with the first

    @property
    def said(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Notes on elements without a logical tensor.

        Padding rows of the vocabulary are such elements. The first tuple lists elements that are left out of the source, the
        second one elements that are made in the target.
        """
        gone = tuple(f"{n:,} elements of {name} that no tensor of the model has" for name, n in _beyond(self.source))
        made = tuple(
            f"{n:,} elements of {name} that no tensor of the model has: zero" for name, n in _beyond(self.target)
        )
        return gone, made


def _beyond(names: Dialect) -> list[tuple[str, int]]:
    out = []
    for name, named in names.named.items():
        held = sum(prod(b - a for a, b in zip(p.low, p.high, strict=True)) for _, p in named.pieces)
        if held < prod(named.shape):
            out.append((name, prod(named.shape) - held))
    return out


def names_of(source: Dialect, target: Dialect, checkpoint: Checkpoint) -> Names:
    """The names of both sides for a checkpoint.

    Raises: UcplError E335 if the dialects are of different models, E336 if the checkpoint has other tensors.
    """
    here, there = source.placement.layout, target.placement.layout
    if here.model_call != there.model_call:
        refuse(target.call, f"it is of {here.model_call} on one side and of {there.model_call} on the other")
    held = {t.name: t for t in checkpoint.state.tensors}
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
    holders: dict[int, list[tuple[str, DialectPiece]]] = {}
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
            refuse(target.call, f"`{name}` is made of nothing that {source.call} names")
        made[name] = tuple(mine)
    return Names(source, target, made)


def _disagree(checkpoint: Checkpoint, names: Dialect, name: str, why: str) -> None:
    fail(
        "E336",
        f"`{name}`: {why}",
        Label(str(checkpoint.top), f"{len(checkpoint.state.tensors)} tensors"),
        Label(names.call, f"{len(names.named)} names", where=name),
        about=name,
    )
