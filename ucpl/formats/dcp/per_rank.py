"""State dicts of DTensors, one per rank: `model_world_size_8_rank_3.pt`, as verl names them.

The optimizer's files are `optim_world_size_...`. A DTensor's pickle has the rank's part, the complete shape, the
placements and the rank's coordinates on the mesh. If a mesh dim replicates, the first copy is read, and the CRCs of the
others are compared with it. A ShardedTensor has the rank's shards and their begins. An optimizer numbers its
parameters: the numbers follow the order of the model's parameters, if shapes leave one way. FSDP1's states are flat,
and their lengths take the place of shapes.

torch_checkpointing saves each item of a rank in a file, `model_3.pt` and `optimizer_3.pt`, and `metadata.pkl` once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, fail, plural
from ucpl.extents import (
    Counted,
    Extent,
    Global,
    Key,
    NamedTensor,
    ParameterGroup,
    PickledCall,
    Setting,
    TensorRef,
    TrainState,
    key_text,
)
from ucpl.extents.account import NotRead
from ucpl.files.carrying import lifted, marks_among
from ucpl.files.checkpoint import Checkpoint, Order
from ucpl.files.header_watch import ahead
from ucpl.files.model_texts import TEXTS, read_texts
from ucpl.files.pickles import loads, tensors_of, walk
from ucpl.files.scalars import is_counted, number_of
from ucpl.files.skipping import skips, skips_optimizer
from ucpl.files.texts import names_like, read_small
from ucpl.files.torch_files import TorchFile, check_same_bytes, crc_of, read_torch_file
from ucpl.files.unknown import hypers_of, unknown_keys, unlike
from ucpl.files.values import Value
from ucpl.formats.as_written import read_rank
from ucpl.formats.dcp.cells import on_one_grid, placed
from ucpl.formats.dcp.chunks import address, demand_whole
from ucpl.formats.dcp.mesh import mesh_settings
from ucpl.formats.dcp.metadata import ByteRange, ChunkedTensor, StoredChunk
from ucpl.formats.dcp.per_rank_flats import FlatMember, Named, Number, members_of
from ucpl.formats.leaving import EMPTY
from ucpl.formats.matching import Slots, Unclear, match
from ucpl.formats.torch_optimizer import PARAM_NAMES, STATED
from ucpl.records import define, frozen

__all__ = ["FILE", "has_ranks", "opened_ranks"]

FILE = "model.pt"  # the file's name in layouts, for any number of ranks
STATES = "optim.state."
_WEIGHTS, _OPTIM = "model", "optim"
_RANK = re.compile(r"(?P<what>model|optim|extra_state)_world_size_(?P<ranks>[0-9]+)_rank_(?P<rank>[0-9]+)\.pt")

# torch_checkpointing: the file with the number of ranks, a file of a rank's item, the item of the optimizer
_METADATA = "metadata.pkl"
_METADATA_MAX = 1 << 28  # bytes
_ITEM = re.compile(r"(?P<what>.+)_(?P<rank>[0-9]{1,9})\.pt", re.DOTALL)
_OPTIMIZER = "optimizer"

# verl: the schedule in the file of other values, the folder of the model's own files, and the file with the ranks
_SCHEDULE = "lr_scheduler"
_OF_RANK = "random numbers and schedules of the rank"
_TEXTS_OF_VERL, _CONFIG = "huggingface", "fsdp_config.json"

_SHARDED = "ShardedTensor"
_LEAST = 2  # equal bytes of a tensor with fewer elements are no evidence

Shape = tuple[int, ...]
_Rank = tuple[Value, TorchFile]  # the contents of an optimizer's file, and the file


def has_ranks(path: Path) -> bool:
    """Test for state dicts that each rank saves alone."""
    return bool(_ranks_in(path)) or _has_items(path)


def _has_items(path: Path) -> bool:
    """Test for a folder of torch_checkpointing."""
    return (path / _METADATA).is_file() and any(
        match["what"] == _WEIGHTS for name in names_like(path, ".pt") if (match := _ITEM.fullmatch(name))
    )


def _ranks_in(path: Path, what: str = _WEIGHTS) -> list[str]:
    """Files of ranks with this prefix: weights, optimizers or other values."""
    found = ((name, _RANK.fullmatch(name)) for name in names_like(path, ".pt"))
    return [name for name, match in found if match is not None and match["what"] == what]


def _read(root: Path, name: str) -> TorchFile:
    return read_rank(root, name, _RANK if _RANK.fullmatch(name) else _ITEM)


@frozen
class _Part:
    """A rank's part of a tensor."""

    extent: Extent
    shape: Shape  # of the tensor
    placements: tuple[
        tuple[str, int], ...
    ] = ()  # of each mesh dim: the class of its placement, and the dim that it cuts
    at: Shape = ()  # coordinates on the mesh
    begin: Shape | None = None  # of a ShardedTensor, which says it

    def __str__(self) -> str:
        placed = ", ".join(cut if dim < 0 else f"{cut}({dim})" for cut, dim in self.placements)
        return f"{list(self.shape)} {self.extent.dtype}" + (f" over {placed}" if placed else "")


@define(eq=False)
class _Ranks:
    root: Path
    order: Order | None = None  # of the optimizer's numbers
    parts: dict[str, list[_Part]] = field(factory=dict)
    extents: dict[tuple[str, Key], Extent] = field(factory=dict)
    empty: dict[str, object] = field(factory=dict)
    of_empty: dict[str, dict[str, object]] = field(factory=dict)  # facts of empty tensors that groups list
    states: dict[str, tuple[str, ...]] = field(factory=dict)
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    carried: dict[tuple[str, Key], Extent] = field(factory=dict)
    not_read: list[NotRead] = field(factory=list)
    along: list[Shape] = field(factory=list)  # of each rank, its coordinates on the mesh dims that cut tensors
    aliases: dict[str, str] = field(factory=dict)
    runs: dict[str, list[dict[Key, Extent]]] = field(factory=dict)  # of a parameter's flat states, boxes

    def read(self, name: str) -> None:
        part = _read(self.root, name)
        along: Shape | None = None
        for tensor, value in Value.of(part).named():
            found = _parts(value, part)
            self.parts.setdefault(tensor, []).extend(found)
            if along is None and found and found[0].placements:
                cuts = [i for i, (cut, dim) in enumerate(found[0].placements) if dim >= 0 or cut == _SHARDED]
                along = tuple(found[0].at[i] for i in cuts)
        self.along.append(along or ())

    def settle(self, name: str) -> NamedTensor | None:
        """Combine the parts of a tensor: one chunk per box.

        Raises: UcplError E521, E522.
        """
        parts = self.parts[name]
        first = parts[0]
        for one in parts:
            alike = (one.shape, one.extent.dtype, one.placements) == (first.shape, first.extent.dtype, first.placements)
            if not alike:
                self.unlike(name, first, one)
        sizes = [max(p.at[i] for p in parts) + 1 for i in range(len(first.placements))]
        chunks: dict[Shape, tuple[StoredChunk, Extent]] = {}
        for one in parts:
            begin, shape = (one.begin, one.extent.shape) if one.begin is not None else _box(one, sizes)
            if shape != one.extent.shape:
                fail(
                    "E522",
                    f"`{name}` of {one.extent.file} is {list(one.extent.shape)}, and its placements make {list(shape)} of it",
                    Label(str(self.root / one.extent.file), where=name),
                )
            if 0 in shape:
                continue
            chunk = StoredChunk(begin, shape, ByteRange(one.extent.file, one.extent.storage_start, None))
            known = chunks.setdefault(begin, (chunk, evolve(one.extent, key=address(name, begin))))
            check_same_bytes(self.root, name, known[1], one.extent)
        if 0 in first.shape:
            noted = {"buffer": True} | self.of_empty.get(name, {})
            self.empty[name] = {"dtype": first.extent.dtype, "shape": list(first.shape), **noted}
            return None
        held = tuple(chunk for chunk, _ in chunks.values())
        demand_whole(name, ChunkedTensor(first.extent.dtype, first.shape, held), self.root / first.extent.file)
        self.extents |= {(FILE, extent.key): extent for _, extent in chunks.values()}
        kind = (
            "buffer"
            if not first.placements and any(p and p[0].placements for p in self.parts.values())
            else "parameter"
        )
        return NamedTensor(name, first.shape, first.extent.dtype, kind)

    # ---- the optimizer -------------------------------------------------------------------------------------------------

    def optimizer(self, files: list[str]) -> tuple[ParameterGroup, ...]:
        """Read states by parameter, and groups.

        If numbers cannot be matched to parameters, they are left out with a note. Raises: UcplError E455.
        """
        ranks = [(Value.of(part), part) for part in (_read(self.root, name) for name in files)]
        self.order = self.order or self.stated_order(ranks[0][0])
        groups = [
            (g, [_number(n, self.parts) for n in g.at("params").items()])
            for g in ranks[0][0].at("param_groups").items()
        ]
        numbers = [number for _, some in groups for number in some]
        for top, part in ranks:
            self.not_read += unknown_keys(part.file, top.held, ("state", "param_groups", STATED), by="torch")
            states = top.at("state").held
            self.not_read += unknown_keys(part.file, states, {*numbers}, "state/", by="torch")
        mark = marks_among(extent for _, part in ranks for extent in part.extents())
        self.not_read += unlike(((part, "param_groups/", hypers_of(part.value)) for _, part in ranks), mark)
        is_named = any(isinstance(number, str) for number in numbers)
        is_flat = not is_named and any(self.numbered(top, n, part) == () for top, part in ranks for n in numbers)
        if is_flat and not self.is_alone and {len(along) for along in self.along} != {1}:
            return self.unreadable(files, "its states are flat, over several dims of the mesh")
        sharing = [ranks[rank] for rank in self.sharing()] if is_flat else ranks
        of_groups = [some for _, some in groups]
        is_said = not is_named and self.order is not None and bool(self.order.names)
        found: list[list[list[FlatMember]]] | Unclear = (
            self.in_order(of_groups, sharing, is_flat)
            if is_said
            else self.named(of_groups)
            if is_named
            else self.matched(of_groups, sharing, is_flat)
        )
        if self.is_alone and not is_named and not is_said:
            is_flat, found = self.matched_alone(of_groups, ranks, found)
        if isinstance(found, Unclear):
            which = f"`{found.name}` may have more than one" if found.name else "more than one order does"
            which = which if found.is_several else "no order of the model fits"
            of = "its states are flat and number" if is_flat else "it numbers"
            return self.unreadable(files, f"{of} its parameters, and {which}: --order FILE names them")
        out = []
        stateful = {n for n in numbers if any(_has_states(top, n) for top, _ in ranks)} or {*numbers}
        for g, ((group, some), each) in enumerate(zip(groups, found, strict=True)):
            for number, held in zip(some, each, strict=True):
                if is_flat:
                    self.keep_runs(number, held, sharing)
                else:
                    self.keep_states(held[0].name, number, ranks)
            hyper = {key: self.carry(value, ranks[0][1]) for key, value in group.named() if key != "params"}
            listed = tuple(one.name for held in each for one in held)
            names = tuple(
                one.name
                for number, held in zip(some, each, strict=True)
                for one in held
                if 0 not in one.shape and number in stateful
            )
            out.append(ParameterGroup(str(g), names, hyper, listed if listed != names else ()))
        return tuple(out)

    def named(self, groups: list[list[Number]]) -> list[list[list[FlatMember]]]:
        """Parameters of an optimizer's state dict that has their names.

        A tied tensor has its states under one name.
        """
        listed = {str(name) for some in groups for name in some}
        names = [name for name, held in self.parts.items() if held]
        ties = self.ties(sorted(names, key=lambda name: name not in listed))
        self.aliases = {name: owner for name, owner in ties.items() if owner in listed and name not in listed}
        return [[[FlatMember(str(name), self.parts[str(name)][0].shape, 0)] for name in some] for some in groups]

    def stated_order(self, top: Value) -> Order | None:
        """Find names in the optimizer's file.

        torch has `param_names`, and a conversion writes names, too.
        """
        named = top.find(STATED)
        groups = [group.find(PARAM_NAMES) for group in top.at("param_groups").items()]
        found = named.items() if named is not None else [one for one in groups if one is not None]
        names = tuple(name for one in found for name in one.texts())
        count = sum(len(group.at("params").items()) for group in top.at("param_groups").items())
        is_known = len({*names}) == len(names) == count and all(self.parts.get(name) for name in names)
        return (
            Order((names,), f"{STATED if named is not None else PARAM_NAMES} of its groups")
            if is_known and names
            else None
        )

    def in_order(self, groups: list[list[Number]], ranks: list[_Rank], is_flat: bool) -> list[list[list[FlatMember]]]:
        """Parameters of numbers in the caller's order. Raises: UcplError E466."""
        assert self.order is not None
        names, origin = [*(self.order.take().at(0) or ())], self.order.origin
        numbers = [number for some in groups for number in some]
        top, part = ranks[0]
        label = Label(str(part.path), where="param_groups")
        if len(names) != len(numbers) or len({*names}) != len(names):
            fail(
                "E466", f"{origin} has {plural(len({*names}), 'name')}, and the optimizer {len(numbers)} numbers", label
            )
        for name, number in zip(names, numbers, strict=True):
            if not self.parts.get(name):
                fail("E466", f"{origin} names {name}, which is no tensor of the model", label)
            shape = self.parts[name][0].shape
            known = self.numbered(top, number, part) if not is_flat else None
            length = sum(self.length(number, one) for one in ranks) if is_flat else 0
            if known not in (None, shape) or length not in (0, prod(shape)):
                fail(
                    "E466", f"{origin} has {name} of shape {list(shape)} as number {number}, whose states differ", label
                )
        listed = {*names}
        ties = self.ties(
            sorted((name for name, held in self.parts.items() if held), key=lambda name: name not in listed)
        )
        self.aliases = {name: owner for name, owner in ties.items() if owner in listed and name not in listed}
        rest = iter(names)
        return [[[FlatMember(name := next(rest), self.parts[name][0].shape, 0)] for _ in some] for some in groups]

    @property
    def is_alone(self) -> bool:
        """True for one rank of plain tensors, which FSDP does not cut."""
        return len(self.along) == 1 and all(not p.placements for parts in self.parts.values() for p in parts)

    def matched_alone(
        self, groups: list[list[Number]], ranks: list[_Rank], by_shape: list[list[list[FlatMember]]] | Unclear
    ) -> tuple[bool, list[list[list[FlatMember]]] | Unclear]:
        """Find the form of one rank's states, and its parameters.

        The states have the shapes of parameters, or are FSDP1's flat ones. States of one dim may be either.
        """
        (top, part), numbers = ranks[0], [number for some in groups for number in some]
        if any(len(shape) != 1 for n in numbers if (shape := self.numbered(top, n, part)) is not None):
            return False, by_shape
        flat = self.matched(groups, ranks, True)
        if isinstance(by_shape, Unclear):
            return True, flat
        return False, by_shape if isinstance(flat, Unclear) or flat == by_shape else Unclear(True)

    def unreadable(self, files: list[str], why: str) -> tuple[ParameterGroup, ...]:
        self.not_read += [NotRead(name, why, is_optimizer=True) for name in files]
        return ()

    def matched(
        self, groups: list[list[Number]], ranks: list[_Rank], is_flat: bool
    ) -> list[list[list[FlatMember]]] | Unclear:
        """Match numbers to parameters, for each group.

        All names are tried first, then names without the second names of tied tensors.
        """
        known = [
            (n, held[0].shape)
            for n, held in self.parts.items()
            if held and (held[0].placements or (self.is_alone and held[0].extent.dtype.startswith(("f", "bf"))))
        ]
        numbers = [number for some in groups for number in some]
        top, part = ranks[0]
        shapes = {} if is_flat else {n: self.numbered(top, n, part) for n in numbers}
        lengths = {n: sum(self.length(n, one) for one in ranks) or None for n in numbers} if is_flat else {}

        def of(names: list[Named]) -> list[list[list[FlatMember]]] | Unclear:
            if is_flat:
                return members_of(names, groups, lengths, len(ranks))
            ordered = match(names, [Slots.of([shapes[n] for n in some]) for some in groups])
            whole = dict(names)
            if isinstance(ordered, Unclear):
                return ordered
            return [[[FlatMember(name, whole[name], 0)] for name in some] for some in ordered]

        first, ties = of(known), self.ties([name for name, _ in known])
        second = of([one for one in known if one[0] not in ties]) if ties and isinstance(first, Unclear) else first
        if isinstance(second, Unclear):
            return first
        trained = {one.name for some in second for held in some for one in held}
        self.aliases = {name: owner for name, owner in ties.items() if owner in trained and name not in trained}
        return second

    def ties(self, names: list[str]) -> dict[str, str]:
        """Names of tensors that equal an earlier one on every rank."""
        first: dict[object, str] = {}
        out = {}
        for name in names:
            parts = self.parts[name]
            if prod(parts[0].shape) < _LEAST:
                continue
            each = ((p.at, p.extent) for p in parts)
            crcs = tuple((at, e.offset, e.shape, e.stride, crc_of(self.root, e)) for at, e in each)
            owner = first.setdefault((parts[0].shape, parts[0].extent.dtype, crcs), name)
            if owner != name:
                out[name] = owner
        return out

    def sharing(self) -> list[int]:
        """One rank per place on the dim that cuts tensors."""
        first: dict[Shape, int] = {}
        for rank, along in enumerate(self.along):
            first.setdefault(along, rank)
        return [first[along] for along in sorted(first)]

    def length(self, number: Number, rank: _Rank) -> int:
        """The number of elements of a rank's flat states.

        Raises: UcplError E455.
        """
        held = rank[0].at("state").find(number)
        each = [value for _, value in held.named() if _is_run(value)] if held is not None else []
        sizes = {value.tensor().shape for value in each}
        if len(sizes) > 1:
            each[-1].wrong(f"as many elements as the others of parameter {number}")
        return prod(sizes.pop()) if sizes else 0

    def keep_runs(self, number: Number, members: list[FlatMember], ranks: list[_Rank]) -> None:
        """Cut the ranks' flat states into boxes of their parameters."""
        boxes: dict[str, dict[str, dict[Key, Extent]]] = {one.name: {} for one in members if 0 not in one.shape}
        low = 0
        for top, part in ranks:
            held = top.at("state").find(number)
            high = low + self.length(number, (top, part))
            for state, value in held.named() if held is not None else ():
                if skips(state):
                    continue
                for one in members:
                    if one.name not in boxes:
                        continue
                    if not _is_run(value):
                        self.keep_number(one.name, state, value, part)
                        continue
                    first, last = max(low, one.begin), min(high, one.begin + prod(one.shape))
                    of_state = boxes[one.name].setdefault(state, {})
                    if first < last:
                        run = part.extent(value.key, value.tensor())
                        at = run.offset + (first - low) * (run.stride or (1,))[0]
                        mine = evolve(run, shape=(last - first,), offset=at)
                        entry = f"{STATES}{one.name}.{state}"
                        of_state |= placed(mine, entry, (0,) * len(one.shape), one.shape, first - one.begin)
            low = high
        for name, states in boxes.items():
            self.states[name] = tuple(states)
            self.runs[name] = list(states.values())

    def align(self, name: str, shape: Shape) -> None:
        """Turn a weight and its flat states into cells of one grid.

        Raises: UcplError E523.
        """
        mine = [key for _, key in self.extents if key[0] == name and len(key) == len(shape) + 1]
        weight = {key: self.extents.pop((FILE, key)) for key in mine}
        for some in on_one_grid(self.root, name, shape, [weight, *self.runs[name]]):
            self.extents |= {(FILE, key): one for key, one in some.items()}

    def numbered(self, top: Value, number: Number, part: TorchFile) -> Shape | None:
        """The shape of a number's states.

        None: it has no states. (): they are flat, and no DTensors of several ranks.
        """
        held = top.at("state").find(number)
        for _, value in held.named() if held is not None else ():
            if isinstance(value.held, TensorRef) and value.held.shape:
                return value.held.shape if self.is_alone else ()
            if isinstance(value.held, PickledCall):
                one = _dtensor(value, part)
                return one.shape if one is not None else None
        return None

    def keep_states(self, name: str, number: Number, ranks: list[tuple[Value, TorchFile]]) -> None:
        """Keep a number's states: DTensors, and numbers that all ranks have."""
        if 0 in self.parts[name][0].shape:
            self.keep_states_of_empty(name, number, *ranks[0])
            return
        found = []
        for rank, (top, part) in enumerate(ranks):
            held = top.at("state").find(number)
            for state, value in held.named() if held is not None else ():
                if skips(state):
                    continue
                if isinstance(value.held, PickledCall) or ((self.is_alone or number == name) and _has_dims(value)):
                    one = _dtensor(value, part)
                    assert one is not None
                    if one.shape != self.parts[name][0].shape:
                        value.wrong(f"{list(self.parts[name][0].shape)}, as `{name}` is")
                    self.parts.setdefault(f"{STATES}{name}.{state}", []).append(one)
                    found += [state] if rank == 0 else []
                else:
                    self.keep_number(name, state, value, part)
        self.states[name] = tuple(found)

    def keep_states_of_empty(self, name: str, number: Number, top: Value, part: TorchFile) -> None:
        """Keep the keys of an empty tensor's states, which loaders request."""
        states: dict[str, object] = {}
        numbers: dict[str, object] = {}
        self.of_empty[name] = {"buffer": False, "states": states, "numbers": numbers}
        held = top.at("state").find(number)
        for state, value in held.named() if held is not None else ():
            if skips(state):
                continue
            if isinstance(value.held, PickledCall) or _has_dims(value):
                one = _dtensor(value, part)
                assert one is not None
                states[state] = one.extent.dtype
            elif isinstance(value.held, TensorRef):
                numbers[state] = number_of(part.read_scalar(value.key, value.held))
            else:
                numbers[state] = self.carry(value, part)

    def keep_number(self, name: str, state: str, value: Value, part: TorchFile) -> None:
        """Raises: UcplError E455, E456 if ranks have different numbers."""
        if not isinstance(value.held, TensorRef) and not is_counted(value.held):
            value.wrong("a number or a DTensor")
        made = part.read_scalar(value.key, value.held) if isinstance(value.held, TensorRef) else value.held
        if self.scalars.setdefault(state, {}).setdefault(name, made) != made:
            fail(
                "E456",
                f"{part.file}: ranks do not agree on `{state}` of `{name}`",
                Label(str(part.path), where=key_text(value.key)),
                remedy="The files are of different steps: copy all files of one step again. If the optimizer has such a number"
                " on each rank, --weights-alone converts the weights",
            )
        if isinstance(value.held, TensorRef):
            self.scalar_extents.setdefault(state, {}).setdefault(name, part.extent(value.key, value.held))

    def item(self, what: str, files: list[str]) -> Iterator[object]:
        """The value of an item outside model and optimizer: the first rank's.

        Other values of further ranks, and tensors that ranks cut, are not read.
        """
        ranks = [_read(self.root, name) for name in files]
        if any(_has_parts(part.value) for part in ranks):
            why = "an item outside model and optimizer with tensors that ranks cut"
            self.not_read += [NotRead(name, why) for name in files]
            return
        mark = marks_among(extent for part in ranks for extent in part.extents())
        self.not_read += unlike(((part, f"{what}/", part.value) for part in ranks), mark)
        yield self.carry(Value.of(ranks[0]), ranks[0])

    def schedule(self, files: list[str]) -> tuple[dict[str, object], list[NotRead]]:
        """The first rank's schedule, and values that are not read.

        Each rank has random numbers of its own.
        """
        parts = [read_torch_file(self.root, name) for name in files]
        held = [(part, one) for part in parts if (one := Value.of(part).find(_SCHEDULE)) is not None and one.held]
        others = [] if held else [NotRead(name, _OF_RANK) for name in files]
        for part in parts:
            keys = [key for key in Value.of(part).mapping() if not held or key != _SCHEDULE]
            others += [NotRead(f"{part.file}: {key}", _OF_RANK, kind="value") for key in keys]
        if not held:
            return {}, others
        mark = marks_among(extent for part in parts for extent in part.extents())
        others += unlike(((part, f"{_SCHEDULE}/", one.held) for part, one in held), mark)
        return {_SCHEDULE: self.carry(held[0][1], held[0][0])}, others

    def carry(self, value: Value, part: TorchFile) -> object:
        for step, tensor in tensors_of(value.held, part.file):
            made = part.extent((*value.key, *step), tensor)
            self.carried[part.file, made.key] = made
        return lifted(value.held, part.file)

    def unlike(self, name: str, a: _Part, b: _Part) -> None:
        fail(
            "E456",
            f"`{name}` is {a} in one file, and {b} in another",
            Label(str(self.root / a.extent.file), str(a), where=name),
            Label(str(self.root / b.extent.file), str(b), where=name),
        )


def opened_ranks(root: Path, order: Order | None = None) -> Checkpoint:
    """Read all headers.

    order: of the optimizer's numbers. Raises: UcplError E452, E455, E456, E465, E466, E521, E522, and errors of reading files
    (E400-E427).
    """
    items = _items_in(root) if _has_items(root) else {}
    names = items[_WEIGHTS] if items else _all_ranks(root, _ranks_in(root))
    ranks = _Ranks(root, order)
    optims = items.get(_OPTIMIZER, []) if items else _ranks_in(root, _OPTIM)
    optims = [] if skips_optimizer(*optims, kind="file") else optims
    ahead(root / names[0], [partial(_read, root, name) for name in (*names, *optims)])
    for name in names:
        ranks.read(name)
    weights = [*ranks.parts]
    bare = (
        NotRead(f"{names[0]}: {name}", "no rank has a tensor there", kind="value")
        for name in weights
        if not ranks.parts[name]
    )
    ranks.not_read += bare
    if optims and not items:
        optims = _all_ranks(root, optims, _OPTIM, len(names))
    groups = ranks.optimizer(optims) if optims else ()
    settled = {name: ranks.settle(name) for name, parts in ranks.parts.items() if parts}
    mesh = {name: t.shape for name, t in settled.items() if t is not None and name in weights}
    degrees = mesh_settings(mesh, ranks.extents.values(), f"state dicts of {len(names)} ranks")
    for name in ranks.runs:
        ranks.align(name, mesh[name])
    trained = {name for group in groups for name in group.members} if groups else settled.keys()
    listed = {name for group in groups for name in group.every}
    tensors = tuple(
        evolve(t, states=ranks.states.get(name, ()), kind=_kind(t, name in trained, name in listed))
        for name in weights
        if (t := settled.get(name)) is not None and name not in ranks.aliases
    )
    origin = f"state dicts of {len(names)} ranks"
    settings = {"prefix": Setting("", origin), "states": Setting(STATES if groups else "", origin)}
    settings |= {"masters": Setting(0, origin), "flat": Setting(0, origin), "file": Setting(FILE, origin)}
    settings |= degrees
    extra = _ranks_in(root, "extra_state")
    schedule, others = ranks.schedule(extra)
    texts, unread = read_texts(root / _TEXTS_OF_VERL) if (root / _TEXTS_OF_VERL).is_dir() else ({}, [])
    others += [evolve(one, name=f"{_TEXTS_OF_VERL}/{one.name}") for one in unread]
    besides = {what: files for what, files in items.items() if what not in (_WEIGHTS, _OPTIMIZER)}
    values: dict[object, object] = {what: value for what, files in besides.items() for value in ranks.item(what, files)}
    return Checkpoint(
        top=root,
        root=root,
        tag=None,
        format="dcp",
        version="",
        extents=ranks.extents,
        carried_extents=ranks.carried,
        state=TrainState(
            "dcp",
            tensors=tensors,
            aliases=ranks.aliases,
            settings=settings,
            groups=groups,
            scalars=ranks.scalars,
            blobs=schedule | ({EMPTY: ranks.empty} if ranks.empty else {}) | ({TEXTS: texts} if texts else {}),
            carried=values,
        ),
        files=(
            *names,
            *(optims if groups else ()),
            *(name for what in values for name in items[str(what)]),
            *(extra if schedule else ()),
            *(f"{_TEXTS_OF_VERL}/{name}" for name in texts),
            *((_CONFIG,) if names and not items and (root / _CONFIG).is_file() else ()),
            *((_METADATA,) if items else ()),
        ),
        not_read=(*ranks.not_read, *others),
        notes=(*_missing(extra, len(names)), *_of_another_step(root, extra, ranks.scalars)),
        scalar_extents=ranks.scalar_extents,
    )


def _items_in(root: Path) -> dict[str, list[str]]:
    """Files of each item of torch_checkpointing, in the order of their ranks.

    Raises: UcplError E452, E454, E455.
    """
    raw = read_small(root / _METADATA, _METADATA_MAX)
    value = None if raw is None else loads(raw, _METADATA, alone=True)
    ranks = Value(root / _METADATA, _METADATA, (), value).at("world_size").whole(1)
    found: dict[str, dict[int, str]] = {}
    for name in names_like(root, ".pt"):
        if (match := _ITEM.fullmatch(name)) is not None:
            found.setdefault(match["what"], {})[int(match["rank"])] = name
    for what, files in found.items():
        if (most := max(files) + 1) > ranks:
            fail("E454", f"{root} has files of runs of {ranks} and of {most} ranks", Label(str(root / files[most - 1])))
        missing = next((rank for rank in range(ranks) if rank not in files), None)
        if missing is not None and what in (_WEIGHTS, _OPTIMIZER):
            name = f"{what}_{missing}.pt"
            fail("E452", f"{name} is missing: {ranks} ranks have saved", Label(str(root / name), "not there"))
    return {what: [name for _, name in sorted(files.items())] for what, files in found.items()}


def _has_parts(value: object) -> bool:
    """Test whether a value has tensors that ranks cut."""
    return any(isinstance(one, Global) and one.name in ("DTensor", _SHARDED) for _, one in walk(value))


def _missing(extra: list[str], ranks: int) -> Iterator[str]:
    """Notes on files of random numbers and schedules with missing ranks."""
    there = {int(found["rank"]) for name in extra if (found := _RANK.fullmatch(name)) is not None}
    missing = [rank for rank in range(ranks) if rank not in there]
    if there and missing:
        yield f"extra_state_world_size_{ranks}_rank_{missing[0]}.pt is missing, of {len(missing)} of {ranks} ranks"


def _of_another_step(root: Path, extra: list[str], scalars: dict[str, dict[str, Counted]]) -> Iterator[str]:
    """A schedule steps at most as often as the optimizer."""
    steps = [n for value in scalars.get("step", {}).values() if isinstance(n := number_of(value), int | float)]
    for name in extra if steps else ():
        schedule = Value.of(read_torch_file(root, name)).find(_SCHEDULE)
        counted = schedule.find("last_epoch") if schedule is not None else None
        if counted is not None and isinstance(counted.held, int) and counted.held > max(steps):
            yield f"{name} is of step {counted.held}, the optimizer is of step {max(steps):g}"


def _kind(tensor: NamedTensor, is_trained: bool, is_listed: bool) -> str:
    """The kind of a tensor: a parameter without training is frozen."""
    return "frozen" if (tensor.kind == "parameter" or is_listed) and not is_trained else tensor.kind


def _all_ranks(root: Path, names: list[str], what: str = _WEIGHTS, ranks: int | None = None) -> list[str]:
    """Files in the order of their ranks.

    There are as many as each file states, or as there are files of weights. Raises: UcplError E452, E454.
    """
    found = {int(m["rank"]): (name, int(m["ranks"])) for name in names if (m := _RANK.fullmatch(name)) is not None}
    said = sorted({*(n for _, n in found.values()), *([] if ranks is None else [ranks])})
    if len(said) > 1:
        fail("E454", f"{root} has files of runs of {' and of '.join(map(str, said))} ranks", Label(str(root)))
    missing = next((rank for rank in range(said[0]) if rank not in found), None)
    if missing is not None:
        name = f"{what}_world_size_{said[0]}_rank_{missing}.pt"
        fail("E452", f"{name} is missing: {said[0]} ranks have saved", Label(str(root / name), "not there"))
    return [name for _, (name, _) in sorted(found.items())]


def _number(value: Value, parts: Mapping[str, list[_Part]]) -> Number:
    """A parameter's number, or its name."""
    if isinstance(value.held, str) and not parts.get(value.held):
        value.wrong("a parameter of the model")
    return value.held if isinstance(value.held, str) else value.whole()


def _has_states(top: Value, number: Number) -> bool:
    """Test whether a number has optimizer states: frozen parameters have none."""
    held = top.at("state").find(number)
    return held is not None and any(True for _ in held.named())


def _is_run(value: Value) -> bool:
    """Test whether a value is a part of a flat state."""
    return isinstance(value.held, TensorRef) and len(value.held.shape) == 1


def _has_dims(value: Value) -> bool:
    return isinstance(value.held, TensorRef) and bool(value.held.shape)


def _parts(value: Value, part: TorchFile) -> list[_Part]:
    """A rank's parts of a tensor: shards, one part, or none.

    Raises: UcplError E455.
    """
    held = value.held
    names = [one.name for one in held.args if isinstance(one, Global)] if isinstance(held, PickledCall) else []
    if not isinstance(held, PickledCall) or _SHARDED not in names:
        found = _dtensor(value, part)
        return [] if found is None else [found]
    told = Value(value.path, value.file, value.key, held.args[-1]).items()
    if len(told) < len(("shards", "metadata", "group")):
        value.wrong("a ShardedTensor's state: its shards, its metadata, its process group")
    shards, metadata, group = told[:3]
    shape, at = _state(metadata).at("size").shape(), (_state(group).at("local_rank").whole(),)
    out = []
    for shard in shards.items():
        mine = _slots(shard)
        begin = _slots(mine.at("metadata")).at("shard_offsets").shape()
        extent = part.extent(value.key, mine.at("tensor").tensor())
        if len(begin) != len(shape) or len(extent.shape) != len(shape):
            shard.wrong(f"a shard of {len(shape)} dims")
        out.append(_Part(extent, shape, ((_SHARDED, -1),), at, begin))
    return out


def _slots(value: Value) -> Value:
    """The attributes of an object of dataclass's slots: the second of two."""
    state = _state(value)
    held = state.held[1] if isinstance(state.held, tuple) and len(state.held) > 1 else state.held
    return Value(value.path, value.file, value.key, held)


def _dtensor(value: Value, part: TorchFile) -> _Part | None:
    """The part of a DTensor or of a replicated tensor.

    None: no value at all. Raises: UcplError E455.
    """
    held = value.held
    if isinstance(held, TensorRef):
        return _Part(part.extent(value.key, held), held.shape)
    if held is None:
        return None
    names = [one.name for one in held.args if isinstance(one, Global)] if isinstance(held, PickledCall) else []
    if not isinstance(held, PickledCall) or "DTensor" not in names:  # its module is another one with each release
        value.wrong("a tensor or a DTensor")
    state = held.args[-1]
    slots = state[1] if isinstance(state, tuple) and len(state) > 1 else state
    told = Value(value.path, value.file, value.key, slots)
    local, spec = told.at("_local_tensor").tensor(), _state(told.at("_spec"))
    meta = spec.at("tensor_meta")
    size = meta.held.args[0] if isinstance(meta.held, PickledCall) and meta.held.args else None
    shape = Value(meta.path, meta.file, meta.key, size)
    at = _state(spec.at("mesh")).at("_coordinate_on_dim")
    placements = tuple(_placement(one) for one in spec.at("placements").items())
    if len(at.shape()) != len(placements):
        at.wrong(f"coordinates on {len(placements)} dims")
    return _Part(part.extent(value.key, local), shape.shape(), placements, at.shape())


def _placement(value: Value) -> tuple[str, int]:
    held = value.held
    if not isinstance(held, PickledCall) or not isinstance(held.function, Global):
        value.wrong("a placement")
    name = held.function.name
    if name == "Replicate":
        return name, -1
    if name not in ("Shard", "_StridedShard"):
        value.wrong("Shard or Replicate")
    return name, _state(value).at("dim").whole()


def _state(value: Value) -> Value:
    """The attributes of an object."""
    state = value.held.state if isinstance(value.held, PickledCall) else None
    return Value(value.path, value.file, value.key, state)


def _box(part: _Part, sizes: list[int]) -> tuple[Shape, Shape]:
    """Begin and shape of a rank's part: strided placements cut last."""
    begin, shape = [0] * len(part.shape), list(part.shape)
    order = sorted(range(len(part.placements)), key=lambda i: part.placements[i][0] == "_StridedShard")
    for i in order:
        dim = part.placements[i][1]
        if 0 <= dim < len(shape):
            each = -(-shape[dim] // sizes[i])
            low = min(shape[dim], part.at[i] * each)
            begin[dim], shape[dim] = begin[dim] + low, min(each, shape[dim] - low)
    return tuple(begin), tuple(shape)
