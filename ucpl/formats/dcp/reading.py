"""Open a DCP folder: chunks, numbers, groups, and other values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import prod
from pathlib import Path
from typing import ClassVar

from attrs import Factory, evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import (
    Counted,
    Extent,
    Key,
    NamedTensor,
    ParameterGroup,
    Setting,
    StorageRef,
    TensorRef,
    TrainState,
    can_train,
)
from ucpl.files.carrying import joined, lifted, mapped
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.pickles import tensors_of
from ucpl.files.plain_values import decode
from ucpl.files.scalars import is_counted, number_of
from ucpl.files.skipping import skipped_states, skips, skips_optimizer
from ucpl.files.torch_files import crc_of
from ucpl.files.values import Value, kind_text
from ucpl.formats.dcp.cells import CELLS_MAX, boxes_of_runs, edges_of, in_cells, is_grid
from ucpl.formats.dcp.chunks import NO_TENSOR, Chunks, address
from ucpl.formats.dcp.mesh import mesh_settings
from ucpl.formats.dcp.metadata import ENVELOPE, METADATA, ByteRange, ChunkedTensor, Metadata
from ucpl.formats.dcp.roles import ANY, NamedRoles, Roles
from ucpl.formats.dcp.wrapped import Wrapped, found_in
from ucpl.formats.leaving import EMPTY, META
from ucpl.formats.torch_optimizer import EXTRA as OTHERS
from ucpl.records import define

__all__ = ["Opened", "opened"]

_STEP = "step"  # of torch's optimizers: a number, never a tensor of a parameter
Shape = tuple[int, ...]
_LEAST = 2  # equal bytes of a tensor with fewer elements are no evidence


def opened(path: Path, metadata: Metadata, asked: NamedRoles = ANY) -> Checkpoint:
    """Read the headers of all archives.

    asked: the model and the optimizer among several. Raises: UcplError E455, E457, E460, E521, E522, E524.
    """
    metadata, roles, wrapped = found_in(metadata, path, asked)
    return Opened(path, metadata, roles, Chunks(path, metadata.described), wrapped=wrapped).checkpoint()


class _Node(dict[object, object]):
    """A dict or list of the state dict; list keys are numbers."""


@define(eq=False)
class Opened:
    """A folder with the headers of its archives.

    Subclasses override methods for frameworks that save in this format.
    """

    framework: ClassVar[str] = "dcp"

    root: Path
    metadata: Metadata
    roles: Roles
    chunks: Chunks
    wrapped: Wrapped = field(factory=Wrapped, kw_only=True)
    extents: dict[tuple[str, Key], Extent] = field(factory=dict)
    carried: dict[tuple[str, Key], Extent] = field(factory=dict)
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    states: dict[str, tuple[str, ...]] = field(factory=dict)
    # Parameters with states, or those listed in groups if the optimizer keeps none.
    trained: dict[str, None] = field(default=Factory(lambda self: dict.fromkeys(self.roles.states), takes_self=True))
    empty: dict[str, object] = field(factory=dict)
    held: dict[str, list[tuple[Key, ...]]] = field(factory=dict)  # tensor -> chunks of its weight, of each state
    others: dict[str, _Node] = field(factory=dict)  # parameter -> states of no value per element

    def checkpoint(self) -> Checkpoint:
        self.chunks.ahead(self.metadata)
        for name, entry in self.roles.weights.items():
            self.payload(name, entry)
        for name, states in self.roles.states.items():
            if name not in self.empty:  # no plan names it, and no group may
                self.read_states(name, self.wanted(states))
        self.more_states()
        groups = self.groups()
        self.set_apart(groups)
        self.align()
        self.read_states_of_empty(groups)
        aliases = self.aliases()
        tensors = tuple(
            self.named(name) for name in self.roles.weights if name not in aliases and name not in self.empty
        )
        settings = self.settings(tensors, aliases)
        carried = self.rest()
        framework, version, blobs = self.kept(carried)
        if self.others:
            blobs[OTHERS] = {name: _listed(states) for name, states in self.others.items()}
        if (self.root / META).is_file():
            blobs[META] = self.carry(ByteRange(META, 0, None), (META,))
        return Checkpoint(
            top=self.root,
            root=self.root,
            tag=None,
            format=self.framework,
            version=version,
            extents=self.extents,
            carried_extents=self.carried,
            state=TrainState(
                framework,
                version,
                tensors=tensors,
                aliases=aliases,
                settings=settings,
                groups=groups,
                scalars=self.scalars,
                blobs={**blobs, EMPTY: self.empty} if self.empty else blobs,
                carried=carried,
                issues=tuple(self.chunks.issues),
            ),
            files=(*self.metadata.files, *((META,) if META in blobs else ())),
            archives=self.metadata.archives,
            remarks=tuple(one.message for one in self.chunks.issues),
            scalar_extents=self.scalar_extents,
            notes=self.wrapped.notes(),
            own=self.wrapped,
        )

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def payload(self, name: str, entry: str) -> None:
        stored = self.metadata.tensors[entry]
        if 0 in stored.shape:
            self.empty[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "buffer": True}
            return
        found = self.chunks.extents(entry, stored)
        if entry in self.metadata.runs_of:
            found = boxes_of_runs(found, entry, stored.shape[:-1], self.metadata.runs_of[entry])
            found = self.as_weight(entry, found)
        for key, extent in found.items():
            self.extents[METADATA, key] = extent
        self.held.setdefault(name, []).append(tuple(found))

    def more_states(self) -> None:
        """Read states that a framework stores in a form of its own."""

    def as_weight(self, entry: str, found: dict[Key, Extent]) -> dict[Key, Extent]:
        """The boxes of a state in the form of its weight."""
        return found

    def whole(self, entry: str) -> Shape:
        return self.metadata.runs_of.get(entry) or self.metadata.tensors[entry].shape

    def align(self) -> None:
        """Turn differently cut weights and states into cells of one grid.

        Raises: UcplError E523.
        """
        for name, keys in self.held.items():
            shape = self.shape(name)
            boxes = [[(_begin(key, shape), self.extents[METADATA, key].shape) for key in some] for some in keys]
            edges = edges_of(shape, (box for some in boxes for box in some))
            if all(is_grid(edges, some) for some in boxes):
                continue
            cells = prod(len(edge) - 1 for edge in edges)
            if cells * len(keys) > CELLS_MAX:
                fail(
                    "E523",
                    f"`{name}` and its states are cut at so many places that they fall into {cells} cells",
                    Label(str(self.root / METADATA), where=self.roles.weights[name]),
                )
            for some in keys:
                old = {key: self.extents.pop((METADATA, key)) for key in some}
                self.extents |= {(METADATA, key): one for key, one in in_cells(old, edges).items()}

    def read_states(self, name: str, states: dict[str, str]) -> None:
        """Read a parameter's states: tensors of its shape, and numbers."""
        weight = self.metadata.tensors[self.roles.weights[name]]
        has_elements = not self.is_of_all(name)
        found = []
        for state, entry in states.items():
            stored = self.metadata.tensors.get(entry)
            if "." in state and self.metadata.paths[entry][-1] != state:
                # in a dict or list of states: codes of 8 bits need the scales next to them
                self.keep_other(name, state, entry, self.value(entry) if stored is None else self.other(entry, stored))
            elif stored is None:
                self.keep_number(state, name, self.value(entry))
            elif has_elements and self.whole(entry) == weight.shape and not self.is_number(state):
                if self.state(name, state, entry):
                    found.append(state)
            elif prod(stored.shape) == 1 and len(stored.chunks) == 1:
                part, tensor = self.chunks.tensor(stored.chunks[0].place, entry)
                extent = self.chunks.extent(entry, stored.chunks[0], part, tensor)
                self.scalars.setdefault(state, {})[name] = part.read_scalar(extent.key, tensor)
                self.scalar_extents.setdefault(state, {})[name] = extent
            else:
                self.keep_other(name, state, entry, self.other(entry, stored))
        self.states[name] = tuple(found)

    def wanted(self, states: dict[str, str]) -> dict[str, str]:
        """The states that are read.

        A dropped name also means a list or dict of states.
        """
        heads = {state: state.partition(".")[0] for state in states}
        return {state: entry for state, entry in skipped_states(states).items() if not skips(heads[state])}

    def keep_other(self, name: str, state: str, entry: str, value: object) -> None:
        """Keep a state that is neither elementwise nor a number.

        A matrix of SOAP is one.
        """
        steps = self.metadata.paths[entry]
        of_state = state.count(".") + 1
        if len(steps) > of_state and ".".join(map(str, steps[-of_state:])) == state:
            *inner, last = steps[-of_state:]
        else:
            inner, last = [], state
        here: _Node = self.others.setdefault(name, _Node())
        for step in inner:
            here = here.setdefault(step, _Node())  # type: ignore[assignment]
        here[last] = value

    def set_apart(self, groups: tuple[ParameterGroup, ...]) -> None:
        """Keep states that are elementwise for only part of a group.

        Such a state is kept as it is for all of the group's parameters.
        """
        for group in groups:
            states = {state for name in group.members for state in self.states.get(name, ())}
            for state in states:
                owners = [name for name in group.members if state in self.states.get(name, ())]
                if len(owners) < len(group.members):
                    for name in owners:
                        self.set_one_apart(name, state)

    def set_one_apart(self, name: str, state: str) -> None:
        entry = self.roles.states.get(name, {}).get(state)
        if entry is None:  # of buckets, which name no entry
            return
        for keys in [some for some in self.held[name] if some and some[0][0] == entry]:
            self.held[name].remove(keys)
            for key in keys:
                del self.extents[METADATA, key]
        self.keep_other(name, state, entry, self.other(entry, self.metadata.tensors[entry]))
        self.states[name] = tuple(one for one in self.states[name] if one != state)

    def state(self, name: str, state: str, entry: str) -> bool:
        """Read one state, and test whether it is one value per element.

        Raises: UcplError E460 for chunks of a library's own tensor class.
        """
        try:
            self.payload(name, entry)
            return True
        except UcplError as error:
            stored = self.metadata.tensors[entry]
            if error.diagnostics[0].code != NO_TENSOR:
                raise
            place = stored.chunks[0].place
            if len(stored.chunks) == 1 and stored.chunks[0].shape == stored.shape:
                self.keep_other(name, state, entry, self.carry(place, (entry,)))
                return False
            fail(
                "E460",
                f"`{state}` of `{name}` is {kind_text(self.chunks.archive(place).value)}, whose parts no layout describes",
                Label(str(self.root / place.file), where=entry),
                remedy=f"{' '.join(f'--drop {one}' for one in _objects(self, name))} leaves out the states that cannot be read",
            )

    def is_number(self, state: str) -> bool:
        """Test whether a state is a number, not a tensor.

        If it is a number for one parameter of several elements, it is a number for all. If no parameter has several
        elements, the name decides: torch calls its own `step`.
        """
        return state in self.counted

    def is_of_all(self, name: str) -> bool:
        """Test for states over all parameters, as those of LBFGS."""
        entries = self.roles.states.get(name, {}).values()
        shapes = {self.metadata.tensors[e].shape for e in entries if e in self.metadata.tensors} - {()}
        size = prod(self.shape(name))
        return bool(shapes) and all(len(shape) == 1 and prod(shape) > size for shape in shapes)

    @cached_property
    def counted(self) -> frozenset[str]:
        tensors = self.metadata.tensors
        return frozenset(
            state
            for name, states in self.roles.states.items()
            if prod(shape := tensors[self.roles.weights[name]].shape) != 1
            for state, entry in states.items()
            if entry not in tensors or self.whole(entry) != shape
        ) | {_STEP}

    def keep_number(self, state: str, name: str, value: object) -> None:
        if is_counted(value):
            self.scalars.setdefault(state, {})[name] = value
        else:
            self.keep_other(name, state, self.roles.states[name][state], value)

    def named(self, name: str) -> NamedTensor:
        stored = self.metadata.tensors[self.roles.weights[name]]
        return NamedTensor(name, self.shape(name), stored.dtype, self.kind(name), self.states.get(name, ()))

    def kind(self, name: str) -> str:
        """The kind of a tensor.

        If there is an optimizer, an untrained tensor is a buffer if FSDP cuts others and not this one; otherwise it is
        frozen.
        """
        stored = self.metadata.tensors[self.roles.weights[name]]
        is_float = can_train(stored.dtype)
        if name in self.trained or (is_float and not self.trained):
            return "parameter"
        could_be_cut = bool(stored.shape) and stored.shape[0] > 1
        return "buffer" if not is_float or (self.is_cut and could_be_cut and len(stored.chunks) == 1) else "frozen"

    @cached_property
    def is_cut(self) -> bool:
        """True if some trained tensor has several chunks."""
        return any(len(self.metadata.tensors[self.roles.weights[n]].chunks) > 1 for n in self.trained)

    def aliases(self) -> dict[str, str]:
        """Second names of tied tensors, whose states are stored under one name.

        The CRCs of all their chunks are equal.
        """
        if not self.trained:
            return {}
        bare = [n for n in self.roles.weights if n not in self.trained and n not in self.empty]
        bare = [n for n in bare if prod(self.shape(n)) >= _LEAST]
        alike = {self.form(n) for n in bare}
        owners: dict[object, list[str]] = {}
        for name in (n for n in self.trained if n not in self.empty and self.form(n) in alike):
            owners.setdefault(self.mark(name), []).append(name)
        found = {name: owners.get(self.mark(name), []) for name in bare}
        return {name: those[0] for name, those in found.items() if len(those) == 1}

    def form(self, name: str) -> object:
        stored = self.metadata.tensors[self.roles.weights[name]]
        return stored.dtype, stored.shape

    def mark(self, name: str) -> object:
        entry = self.roles.weights[name]
        stored = self.metadata.tensors[entry]
        found = [self.extents.get((METADATA, address(entry, c.offset))) for c in stored.chunks]
        crcs = tuple(e and (e.offset, e.shape, e.stride, e.storage_bytes, crc_of(self.root, e)) for e in found)
        return self.form(name), crcs

    def shape(self, name: str) -> tuple[int, ...]:
        return self.whole(self.roles.weights[name])

    def settings(self, tensors: tuple[NamedTensor, ...], aliases: dict[str, str]) -> dict[str, Setting]:
        """Prefixes of names, and the mesh of the chunks, if known."""
        origin = f"names in {METADATA}"
        out = {"prefix": Setting(self.roles.prefix, origin), "states": Setting(self.roles.states_prefix, origin)}
        out["file"] = Setting(METADATA, "its name")
        out["masters"] = Setting(int(any("fp32" in states for states in self.states.values())), origin)
        out["flat"] = Setting(int(bool(self.roles.hypers) and not self.roles.groups), origin)
        shapes = {self.roles.weights[n]: self.shape(n) for n in (*(t.name for t in tensors), *aliases)}
        return out | mesh_settings(shapes, self.extents.values(), f"chunks in {METADATA}")

    # ---- values that are no tensors of the model
    # -----------------------------------------------------------------------

    def value(self, entry: str) -> object:
        """A value other than a tensor, and the tensors in it."""
        place = self.metadata.objects[entry]
        return self.carry(place, (entry,))

    def carry(self, place: ByteRange, key: Key) -> object:
        part = self.chunks.archive(place)
        for step, tensor in tensors_of(part.value, place.file):
            made = part.extent((*key, *step), tensor)
            self.carried[place.file, made.key] = evolve(made, storage=f"{place.start}:{made.storage}")
        own = mapped(part.value, lambda t: evolve(t, storage=evolve(t.storage, name=f"{place.start}:{t.storage.name}")))
        return lifted(own, place.file)

    def groups(self) -> tuple[ParameterGroup, ...]:
        """Raises: UcplError E455."""
        if skips_optimizer():
            return ()
        out = []
        for number, hyper, said in self.rows():
            params = hyper.pop("params", None)
            members = [self.wrapped.plain(name) for name in params] if isinstance(params, list) else []
            file = self.metadata.describes(said)
            where = Value(self.root / file, file, (said,), params)
            if params is None or any(not isinstance(name, str) or name not in self.roles.weights for name in members):
                where.wrong("a list of parameters of the model")
            listed = tuple(map(str, members))
            # of an optimizer that keeps nothing of a parameter, or all with the first one
            if not self.roles.states or any(map(self.is_of_all, listed)):
                self.trained |= dict.fromkeys(listed)
            held = tuple(name for name in listed if name in self.trained and name not in self.empty)
            out.append(ParameterGroup(str(number), held, hyper, listed if listed != held else ()))
        return tuple(out) if out else self.flat_groups()

    def rows(self) -> Iterator[tuple[int, dict[str, object], str]]:
        """Number, hyper-parameters and entry of each group."""
        for number, entries in sorted(self.roles.groups.items()):
            hyper = {key: self.hyper(entry) for key, entry in entries.items()}
            yield number, hyper, entries.get("params", f"param_groups {number}")
        if entry := self.roles.list_of_groups:
            said = Value(self.root / METADATA, self.metadata.describes(entry), (entry,), self.value(entry))
            for number, row in enumerate(said.items()):
                yield number, {str(key): value for key, value in row.mapping().items()}, entry

    def hyper(self, entry: str) -> object:
        stored = self.metadata.tensors.get(entry)
        if stored is None:
            return self.value(entry)
        if len(stored.chunks) != 1:
            where = Label(str(self.root / self.metadata.describes(entry)), where=entry)
            fail("E460", f"`{entry}` is a tensor in chunks", where)
        return self.carry(stored.chunks[0].place, (entry,))

    def flat_groups(self) -> tuple[ParameterGroup, ...]:
        """Groups of an optimizer that was flattened: parameters with equal hyper-parameters.

        Their order is that of `param_names`, or else of the hyper-parameters, which torch writes in the group's order.
        """
        found: dict[str, tuple[dict[str, object], list[str]]] = {}
        if not self.roles.states:
            self.trained |= dict.fromkeys(self.roles.hypers)
        trained = [name for name in self.trained if name not in self.empty]
        for name in dict.fromkeys((*self.roles.hypers, *trained)):
            hyper = {key: self.hyper(entry) for key, entry in self.roles.hypers.get(name, {}).items()}
            found.setdefault(repr(sorted(hyper.items())), (hyper, []))[1].append(name)
        out = []
        for number, (hyper, names) in enumerate(found.values()):
            said = hyper.get("param_names")
            stated = [str(self.wrapped.plain(name)) for name in said] if isinstance(said, list) else []
            names = stated if sorted(stated) == sorted(names) else names
            held = tuple(name for name in names if name in trained)
            out.append(ParameterGroup(str(number), held, hyper, tuple(names) if len(names) > len(held) else ()))
        return tuple(out)

    def read_states_of_empty(self, groups: tuple[ParameterGroup, ...]) -> None:
        """Read the optimizer's states of empty tensors, which loaders request."""
        listed = {name for group in groups for name in group.every}
        for name, noted in self.empty.items():
            if name not in listed and name not in self.roles.states:
                continue
            assert isinstance(noted, dict)
            noted["buffer"] = False
            for state, entry in skipped_states(self.roles.states.get(name, {})).items():
                stored = self.metadata.tensors.get(entry)
                if stored is None:
                    noted.setdefault("numbers", {})[state] = self.value(entry)
                elif prod(stored.shape) == 0:
                    noted.setdefault("states", {})[state] = stored.dtype
                elif prod(stored.shape) == 1 and len(stored.chunks) == 1:
                    part, tensor = self.chunks.tensor(stored.chunks[0].place, entry)
                    extent = self.chunks.extent(entry, stored.chunks[0], part, tensor)
                    noted.setdefault("numbers", {})[state] = number_of(part.read_scalar(extent.key, tensor))

    def kept(self, carried: dict[object, object]) -> tuple[str, str, dict[str, object]]:
        """Framework, version and values of a run that a conversion kept.

        They are removed from the carried values.
        """
        top, last = ENVELOPE
        held = carried.get(top)
        if not isinstance(held, dict) or last not in held:
            return "dcp", "", {}
        said = Value(self.root / METADATA, METADATA, ENVELOPE, held.pop(last))
        if not held:
            del carried[top]
        blobs = decode(said.at("blobs").held)
        if not isinstance(blobs, dict) or not all(isinstance(key, str) for key in blobs):
            said.at("blobs").wrong("a dict whose keys are texts")
        return said.at("framework").text(), said.at("version").text(), {str(key): one for key, one in blobs.items()}

    def rest(self) -> dict[object, object]:
        """Values outside model and optimizer, in their dicts and lists."""
        out = _Node()
        for entry in self.roles.rest:
            stored = self.metadata.tensors.get(entry)
            made = self.carry(self.metadata.objects[entry], (entry,)) if stored is None else self.other(entry, stored)
            *steps, last = self.wrapped.values.get(entry, self.metadata.paths[entry])
            here = out
            for step in steps:
                inner = here.setdefault(step, _Node())
                assert isinstance(inner, _Node)  # `.metadata` is checked: no value has the path of a dict
                here = inner
            here[last] = made
        return {key: _listed(value) for key, value in out.items()}

    def other(self, entry: str, stored: ChunkedTensor) -> object:
        """A tensor outside model and optimizer, such as one of an average.

        Its chunks are joined.
        """
        if len(stored.chunks) == 1 and stored.chunks[0].shape == stored.shape:
            return self.carry(stored.chunks[0].place, (entry,))
        file = self.metadata.describes(entry)
        found = {} if 0 in stored.shape else self.chunks.extents(entry, stored)
        pieces = tuple((_begin(key, stored.shape), extent) for key, extent in found.items())
        made = joined(file, (entry,), stored.dtype, stored.shape, pieces)
        self.carried[file, made.key] = made
        ref = TensorRef(StorageRef(made.storage, made.dtype, made.numel), 0, made.shape, made.stride)
        return lifted(ref, file)


def _begin(key: Key, shape: Shape) -> Shape:
    return tuple(int(step) for step in key[len(key) - len(shape) :])


def _objects(opened: Opened, name: str) -> list[str]:
    """States of a parameter that are objects of other classes than tensors."""
    out = []
    for state, entry in opened.roles.states[name].items():
        stored = opened.metadata.tensors.get(entry)
        try:
            if stored is not None and stored.chunks:
                opened.chunks.tensor(stored.chunks[0].place, entry)
        except UcplError as error:
            if error.diagnostics[0].code != NO_TENSOR:
                raise
            out.append(state)
    return out


def _listed(value: object) -> object:
    """Plain dicts, and lists where keys count from 0."""
    if not isinstance(value, _Node):
        return value
    made = {key: _listed(inner) for key, inner in value.items()}
    return [made[n] for n in range(len(made))] if made and set(made) == set(range(len(made))) else made
