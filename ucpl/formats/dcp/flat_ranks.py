"""FSDP1's flat parameters of each rank (LOCAL_STATE_DICT), with their handles: `rank_3.pt`.

    {"state": {"layers.0._flat_param": ..., "a_buffer": ...},
     "flat_meta": {"_fsdp_wrapped_module.layers.0": {"fqns", "shapes", "numels_with_padding", "is_padding_mask", ...}},
     "optim": optimizer.state_dict()}  # or not

The state dict itself does not name the parameters inside a flat parameter; `flat_meta` does, by fields of
FlatParameter. Each rank has one run of a flat parameter, all of equal length except at the end. So each tensor is cut
into runs of its elements, which are stored as boxes. The optimizer's numbers count the flat parameters in the order of
`flat_meta`, which is the module's order. With `use_orig_params` they count something else, and only the weights are
read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import Counted, Extent, Key, NamedTensor, ParameterGroup, Setting, TensorRef, TrainState
from ucpl.extents.account import NotRead
from ucpl.files.carrying import lifted, marks_among
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import ahead
from ucpl.files.pickles import tensors_of
from ucpl.files.scalars import is_counted
from ucpl.files.skipping import skips, skips_optimizer
from ucpl.files.texts import names_like
from ucpl.files.torch_files import TorchFile, check_same_bytes, read_torch_file
from ucpl.files.unknown import hypers_of, unknown_keys, unlike
from ucpl.files.values import Value
from ucpl.files.wrappers import bare
from ucpl.formats.as_written import read_rank
from ucpl.formats.dcp.cells import on_one_grid, placed
from ucpl.formats.dcp.chunks import address
from ucpl.formats.leaving import EMPTY
from ucpl.records import define, frozen

__all__ = ["flats_in", "opened_flats"]

FILE = "model.pt"  # the file's name in layouts, for any number of ranks
PREFIX, STATES = "model.", "optim.state."
_STATE, _META, _OPTIM = "state", "flat_meta", "optim"
_FLAT = "_flat_param"
_HANDLE = frozenset(
    (
        "fqns",
        "is_padding_mask",
        "numels_with_padding",
        "shapes",
        "shard_numel_padded",
        "sharded_size",
        "unpadded_unsharded_size",
    )
)
_RANK = re.compile(r"rank_(?P<rank>[0-9]+)\.pt")

Shape = tuple[int, ...]


def flats_in(path: Path) -> list[str]:
    """Names of the ranks' files, if the first one has handles."""
    names = sorted((n for n in names_like(path, ".pt") if _RANK.fullmatch(n)), key=_rank)
    try:
        is_so = bool(names) and {_STATE, _META} <= Value.of(read_torch_file(path, names[0])).mapping().keys()
    except UcplError as error:
        if error.is_of_the_disk:
            raise
        return []
    return names if is_so else []


def _rank(name: str) -> int:
    match = _RANK.fullmatch(name)
    return int(match["rank"]) if match is not None else -1


@frozen
class _Member:
    """A parameter inside a flat one.

    begin: its first element in the flat one.
    """

    name: str
    shape: Shape
    begin: int


@frozen
class _Flat:
    """A flat parameter. numel: of all ranks together, alignment included."""

    key: str
    members: tuple[_Member, ...]
    numel: int

    def run(self, rank: int, ranks: int) -> tuple[int, int]:
        """A rank's elements: as many as the others', or the rest."""
        each = -(-self.numel // ranks)
        low = min(self.numel, rank * each)
        return low, min(self.numel, low + each)


@define(eq=False)
class _Ranks:
    root: Path
    parts: list[TorchFile]
    flats: tuple[_Flat, ...]
    extents: dict[Key, Extent] = field(factory=dict)
    held: dict[str, list[list[Key]]] = field(factory=dict)  # parameter -> of its weight and of each state, the boxes
    dtypes: dict[str, str] = field(factory=dict)
    empty: dict[str, object] = field(factory=dict)
    states: dict[str, tuple[str, ...]] = field(factory=dict)
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    carried: dict[tuple[str, Key], Extent] = field(factory=dict)

    def tops(self) -> list[Value]:
        return [Value.of(part) for part in self.parts]

    def runs(self, flat: _Flat, found: list[Value | None], stored: str) -> None:
        """Cut the runs of a flat tensor into boxes of its members.

        stored: names, with `{}` for the member.
        """
        keys: dict[str, list[Key]] = {one.name: [] for one in flat.members}
        for rank, value in enumerate(found):
            low, high = flat.run(rank, len(found))
            if value is None and low == high:
                continue
            if value is None:
                part = self.parts[rank]
                fail(
                    "E456",
                    f"{part.file} lacks elements {low} to {high} of `{flat.key}`",
                    Label(str(part.path), where=f"{_STATE}/{flat.key}"),
                )
            tensor = value.tensor()
            whole = -(-flat.numel // len(found))  # with padding that makes ranks equal
            if len(tensor.shape) != 1 or prod(tensor.shape) not in (high - low, whole):
                value.wrong(f"{high - low} elements of a flat parameter of {flat.numel}")
            run = self.parts[rank].extent(value.key, tensor)
            for one in flat.members:
                first, last = max(low, one.begin), min(high, one.begin + prod(one.shape))
                if first >= last:
                    continue
                mine = evolve(run, shape=(last - first,), offset=run.offset + (first - low) * (run.stride or (1,))[0])
                name = stored.format(one.name)
                made = placed(mine, name, (0,) * len(one.shape), one.shape, first - one.begin)
                self.extents |= made
                keys[one.name] += made
                if self.dtypes.setdefault(name, run.dtype) != run.dtype:
                    value.wrong(f"of {self.dtypes[name]}, as it is on other ranks")
        for one in flat.members:
            if 0 in one.shape:
                self.empty[one.name] = {"dtype": self.dtypes.get(stored.format(one.name), "f32"), "shape": [*one.shape]}
            else:
                self.held.setdefault(one.name, []).append(keys[one.name])

    def align(self) -> None:
        """Turn runs into cells of one grid per tensor.

        Raises: UcplError E523.
        """
        shapes = {one.name: one.shape for flat in self.flats for one in flat.members}
        for name, each in self.held.items():
            found = [{key: self.extents.pop(key) for key in keys} for keys in each]
            for some in on_one_grid(self.root, name, shapes[name], found):
                self.extents |= some

    @property
    def names(self) -> set[str]:
        return {one.name for flat in self.flats for one in flat.members}

    @property
    def has_views(self) -> bool:
        """True if ranks also store their parts by parameter (`use_orig_params`)."""
        return not self.names.isdisjoint(self.tops()[0].at(_STATE).mapping())

    # ---- the rest of the model, and the optimizer ----------------------------------------------------------------------

    def buffers(self) -> list[NamedTensor]:
        """Tensors that every rank has completely.

        Raises: UcplError E456, E700.
        """
        flat = {one.key for one in self.flats} | self.names
        out = []
        for key, value in self.tops()[0].at(_STATE).named():
            if key in flat:
                continue
            first = self.parts[0].extent((_STATE, key), value.tensor())
            for part, top in zip(self.parts[1:], self.tops()[1:], strict=True):
                other = part.extent((_STATE, key), top.at(_STATE, key).tensor())
                self.check_copy(key, first, other)
            if 0 in first.shape:
                self.empty[key] = {"dtype": first.dtype, "shape": list(first.shape), "buffer": True}
                continue
            self.extents[address(PREFIX + key, (0,) * len(first.shape))] = first
            out.append(NamedTensor(key, first.shape, first.dtype, "buffer"))
        return out

    def check_copy(self, key: str, first: Extent, other: Extent) -> None:
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            fail(
                "E456",
                f"`{key}` is {list(first.shape)} {first.dtype} in one file, and {list(other.shape)} {other.dtype} in another",
                Label(str(self.root / first.file), where=key),
                Label(str(self.root / other.file), where=key),
            )
        check_same_bytes(self.root, key, first, other)

    def optimizer(self) -> tuple[ParameterGroup, ...]:
        """Read states of the flat parameters by number, and the parameter groups.

        A group lists all parameters in its flat ones. Raises: UcplError E455, E456.
        """
        tops = [top.find(_OPTIM) for top in self.tops()]
        if tops[0] is None or self.has_views or skips_optimizer(_OPTIM):
            return ()
        each = [top.at(_STATE) if top is not None else top for top in tops]
        groups = []
        for g, group in enumerate(tops[0].at("param_groups").items()):
            members = []
            for number in group.at("params").items():
                if number.whole() >= len(self.flats):
                    number.wrong(f"the number of one of {len(self.flats)} flat parameters")
                flat = self.flats[number.whole()]
                self.numbered(flat, number.whole(), each)
                members += [one.name for one in flat.members if 0 not in one.shape]
            hyper = {key: self.carry(value) for key, value in group.named() if key != "params"}
            groups.append(ParameterGroup(str(g), tuple(members), hyper))
        return tuple(groups)

    def not_read(self) -> tuple[NotRead, ...]:
        if self.tops()[0].find(_OPTIM) is None or not self.has_views:
            return ()
        why = (
            "with use_orig_params its numbers count the module's parameters, and flat parameters do not keep their order;"
            " SHARDED_STATE_DICT names them"
        )
        return (NotRead(_OPTIM, why, is_optimizer=True, kind="value"),)

    def unlike(self) -> Iterator[NotRead]:
        """Values of other ranks' files that differ from the first rank's."""
        mark = marks_among(extent for part in self.parts for extent in part.extents())
        tops = [(part, part.value if isinstance(part.value, dict) else {}) for part in self.parts]
        own = (_STATE, _META, _OPTIM)
        yield from unlike(((part, "", {k: v for k, v in top.items() if k not in own}) for part, top in tops), mark)
        groups = ((part, f"{_OPTIM}/param_groups/", hypers_of(top.get(_OPTIM))) for part, top in tops)
        yield from unlike(groups, mark)
        first = tops[0][1].get(_STATE)
        stated = {*(one.key for one in self.flats), *self.names, *(first if isinstance(first, dict) else ())}
        numbers = (*range(len(self.flats)),) if not self.has_views else None
        for part, top in tops:
            yield from unknown_keys(part.file, top.get(_OPTIM), ("state", "param_groups"), f"{_OPTIM}/", "torch")
            yield from unknown_keys(part.file, top.get(_STATE), stated, f"{_STATE}/", "torch")
            metas, optim = top.get(_META), top.get(_OPTIM)
            for name, held in metas.items() if isinstance(metas, dict) else ():
                yield from unknown_keys(part.file, held, _HANDLE, f"{_META}/{name}/", "torch")
            states = optim.get("state") if isinstance(optim, dict) else None
            if numbers is not None:
                yield from unknown_keys(part.file, states, numbers, f"{_OPTIM}/state/", "torch")
            for number in numbers or ():
                known, lead = _of_optim(tops[0][1], number), f"{_OPTIM}/state/{number}/"
                yield from unknown_keys(part.file, _of_optim(top, number), known, lead, "torch")

    def numbered(self, flat: _Flat, number: int, each: list[Value | None]) -> None:
        held = each[0].find(number) if each[0] is not None else None
        if held is None:
            return
        names = [one.name for one in flat.members if 0 not in one.shape]
        found = []
        for state, value in held.named():
            if skips(state):
                continue
            if isinstance(value.held, TensorRef) and len(value.held.shape) == 1:
                of_ranks = [one.at(number).find(state) if one is not None else None for one in each]
                self.runs(flat, of_ranks, f"{STATES}{{}}.{state}")
                found.append(state)
            elif isinstance(value.held, TensorRef):
                extent = self.parts[0].extent(value.key, value.held)
                scalar = self.parts[0].read_scalar(value.key, value.held)
                self.scalars.setdefault(state, {}).update(dict.fromkeys(names, scalar))
                self.scalar_extents.setdefault(state, {}).update(dict.fromkeys(names, extent))
            elif is_counted(value.held):
                self.scalars.setdefault(state, {}).update(dict.fromkeys(names, value.held))
            else:
                value.wrong("a number or a tensor")
        self.states |= dict.fromkeys(names, tuple(found))

    def carry(self, value: Value) -> object:
        """A value of the first rank, with its tensors."""
        part = self.parts[0]
        for step, tensor in tensors_of(value.held, part.file):
            made = part.extent((*value.key, *step), tensor)
            self.carried[part.file, made.key] = made
        return lifted(value.held, part.file)


def _of_optim(top: dict[object, object], number: int) -> dict[object, object]:
    """States of a flat parameter in one rank's file."""
    optim = top.get(_OPTIM)
    states = optim.get("state") if isinstance(optim, dict) else None
    held = states.get(number) if isinstance(states, dict) else None
    return held if isinstance(held, dict) else {}


def opened_flats(root: Path) -> Checkpoint:
    """Read all headers.

    Raises: UcplError E452, E455, E456, E465, E523, E700, and errors of reading files (E400-E427).
    """
    names = flats_in(root)
    missing = next((n for n, name in enumerate(names) if _rank(name) != n), None)
    if missing is not None:
        file = f"rank_{missing}.pt"
        fail("E452", f"{file} is missing: there is {names[missing]}", Label(str(root / file), "not there"))
    ahead(root / names[0], [partial(read_rank, root, name, _RANK) for name in names])
    parts = [read_rank(root, name, _RANK) for name in names]
    flats = _flats(Value.of(parts[0]))
    for part in parts[1:]:
        if _flats(Value.of(part)) != flats:
            fail(
                "E456",
                f"{part.file} has other flat parameters than {parts[0].file}",
                Label(str(parts[0].path), where=_META),
                Label(str(part.path), where=_META),
            )
    ranks = _Ranks(root, parts, flats)
    for flat in flats:
        ranks.runs(flat, [top.at(_STATE).find(flat.key) for top in ranks.tops()], f"{PREFIX}{{}}")
    groups = ranks.optimizer()
    ranks.align()
    tensors = [
        NamedTensor(one.name, one.shape, ranks.dtypes[PREFIX + one.name], "parameter", ranks.states.get(one.name, ()))
        for flat in flats
        for one in flat.members
        if 0 not in one.shape
    ]
    tensors += ranks.buffers()
    origin = f"flat parameters of {len(parts)} ranks"
    said: dict[str, str | int] = {
        "prefix": PREFIX,
        "states": STATES,
        "masters": 0,
        "flat": 0,
        "file": FILE,
        "fsdp": len(parts),
    }
    rest = {key: value for key, value in ranks.tops()[0].named() if key not in (_STATE, _META, _OPTIM)}
    return Checkpoint(
        top=root,
        root=root,
        tag=None,
        format="dcp",
        version="",
        extents={(FILE, key): evolve(extent, key=key) for key, extent in ranks.extents.items()},
        carried_extents=ranks.carried,
        state=TrainState(
            "dcp",
            tensors=tuple(tensors),
            settings={name: Setting(value, origin) for name, value in said.items()},
            groups=groups,
            scalars=ranks.scalars,
            blobs={EMPTY: ranks.empty} if ranks.empty else {},
            carried={key: ranks.carry(value) for key, value in rest.items()},
        ),
        files=tuple(names),
        notes=("flat parameters do not have the second names of tied tensors",),
        not_read=(*ranks.not_read(), *ranks.unlike()),
        scalar_extents=ranks.scalar_extents,
    )


def _flats(top: Value) -> tuple[_Flat, ...]:
    """Flat parameters, from the fields of their handles.

    Raises: UcplError E455.
    """
    out = []
    for module, said in top.at(_META).named():
        owner = bare(module).strip(".")
        prefix = f"{owner}." if owner else ""
        names, shapes = said.at("fqns").texts(), [one.shape() for one in said.at("shapes").items()]
        lengths = [one.whole() for one in said.at("numels_with_padding").items()]
        pads = [one.held is True for one in said.at("is_padding_mask").items()]
        if len(pads) != len(lengths) or len(names) != len(shapes) or pads.count(False) != len(names):
            said.wrong("as many names, shapes and lengths as there are parameters")
        members, begin = [], 0
        own = iter(zip(names, shapes, strict=True))
        for length, is_padding in zip(lengths, pads, strict=True):
            if not is_padding:
                name, shape = next(own)
                if prod(shape) != length:
                    said.at("numels_with_padding").wrong(f"{prod(shape)} for `{name}`, which is {list(shape)}")
                members.append(_Member(prefix + name, shape, begin))
            begin += length
        out.append(_Flat(f"{prefix}{_FLAT}", tuple(members), begin))
    found = [one.name for flat in out for one in flat.members]
    if len(found) != len(set(found)):
        top.at(_META).wrong("each parameter in one flat parameter")
    return tuple(out)
