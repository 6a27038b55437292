"""plain(): a complete checkpoint in one torch file for `torch.load(path, weights_only=True)`.

    {"params": {name: {"weight": tensor, "fp32": tensor, "exp_avg": tensor, "step": tensor or number, ...}},
     "buffers": {name: tensor}, "aliases": {name: owner},
     "groups": [{"lr": 0.1, ..., "params": [names, in the optimizer's order]}],
     "scalars": {"global_steps": 3, ...},
     "envelope": {...}}                 # other values that a framework needs to resume; may be left out

A parameter in no group is frozen; where there is no `groups`, all parameters that have a state are one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from math import prod
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import (
    Counted,
    Extent,
    Key,
    NamedTensor,
    ParameterGroup,
    Scalar,
    Setting,
    StoredTensor,
    Structure,
    TensorRef,
    TrainState,
    in_elements,
    key_text,
)
from ucpl.extents.account import NotRead
from ucpl.files.carrying import Storages, by_place, lifted
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.demands import Demands
from ucpl.files.header_watch import Identity
from ucpl.files.masters import SETTING, renamed
from ucpl.files.pickles import tensors_of, unsafe_globals
from ucpl.files.plain_values import decode, encode
from ucpl.files.scalars import counted_states, is_counted, number_of
from ucpl.files.skipping import skips, skips_optimizer
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.files.unknown import unknown_keys
from ucpl.files.values import Value
from ucpl.formats.leaving import EMPTY, empty_tensors
from ucpl.records import frozen

FILE = "plain.pt"
_KEYS = frozenset(("params", "buffers", "aliases", "groups", "scalars", "envelope"))
_ENVELOPE = frozenset(("ucpl", "framework", "version", "settings", "blobs", "carried", "in_groups"))
VERSION = 1
LISTED = "in_groups"  # the section of the envelope that has frozen parameters of groups
# Counters of a run, under `scalars`, from any framework.
COUNTED = ("global_steps", "global_samples", "skipped_steps")
# Facts of files and meshes, which a plain file has of its own or not at all.
_OWN = frozenset(
    {"stage", "dp", "tp", "pp", "ep", "masters", "has_masters", "file", "frozen_fragments", "parameter_order", "fused"}
)


class Plain:
    name = "plain"
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            return (path / FILE).is_file()
        if not path.is_file() or path.suffix in (".safetensors", ".json", ".plan", ".ucpl"):
            return False
        try:
            part = read_torch_file(path.parent, path.name)
        except UcplError as error:
            if error.is_of_the_disk:
                raise
            return False
        if not isinstance(part.value, dict) or not _is_plain(part.value.get("params")):
            return False
        _RECOGNISED.set((path, Identity.of(path.stat()), part))
        return True

    def open(self, path: Path) -> Checkpoint:
        """Read the headers of a plain file, or of the folder's plain.pt.

        Raises: UcplError E400-E427, E480, E481.
        """
        file = path / FILE if path.is_dir() else path
        return _Opened.of(_recognised(file) or read_torch_file(file.parent, file.name)).checkpoint(path)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """The one file of a target. Raises: UcplError E471."""
        return _skeleton(structure, targets, source)


# A file that `recognises` has just read, for `open`: its pickle names each tensor, and takes long.
_RECOGNISED: ContextVar[tuple[Path, Identity, TorchFile] | None] = ContextVar("recognised", default=None)


def _recognised(file: Path) -> TorchFile | None:
    """The headers of this file, if it was recognised just now."""
    known = _RECOGNISED.get()
    _RECOGNISED.set(None)
    is_same = known is not None and known[0] == file and known[1] == Identity.of(file.stat())
    return known[2] if known is not None and is_same else None


def _is_plain(params: object) -> bool:
    """Test for parameters with states, each a dict.

    A state dict of a script has tensors under this key, and a tree of Flax dicts of other names.
    """
    states = [one for one in params.values() if isinstance(one, dict)] if isinstance(params, dict) else []
    return params == {} or any("weight" in one or "fp32" in one for one in states)


# ---- reading ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class _Opened:
    part: TorchFile
    value: Value
    payload: dict[tuple[str, Key], Extent] = field(factory=dict)
    scalars: dict[str, dict[str, Counted]] = field(factory=dict)
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    states: dict[str, tuple[str, ...]] = field(factory=dict)
    counted: set[str] = field(factory=set)

    @classmethod
    def of(cls, part: TorchFile) -> _Opened:
        if not isinstance(part.value, dict) or not isinstance(part.value.get("params"), dict):
            fail("E480", f'{part.file} has no dict "params"', Label(str(part.path), where="params"))
        return cls(part, Value.of(part, "E481"))

    def unknown(self) -> Iterator[NotRead]:
        """Keys that the format has not."""
        top = self.value.mapping()
        yield from unknown_keys(self.part.file, top, _KEYS, by="ucpl")
        yield from unknown_keys(self.part.file, top.get("envelope"), _ENVELOPE, "envelope/", by="ucpl")

    def named(self, *steps: str) -> dict[str, Value]:
        """The entries of a dict of the file, or {}."""
        here: Value | None = self.value
        for step in steps:
            here = here.find(step) if here is not None else None
        return dict(here.named()) if here is not None else {}

    def keep(self, key: Key, tensor: TensorRef) -> None:
        if (extent := self.part.extent(key, tensor)).numel:
            self.payload[self.part.file, key] = extent

    def checkpoint(self, top: Path) -> Checkpoint:
        part = self.part
        params = self.named("params")
        rows = [states.mapping() for states in params.values()]
        weights = [(states.get("weight"), states) for states in rows]
        several = ((one.shape, states) for one, states in weights if isinstance(one, TensorRef))
        self.counted.update(
            counted_states((shape, {str(k): v for k, v in states.items()}) for shape, states in several)
        )
        shapes = {name: self.parameter(name, states) for name, states in params.items()}
        groups = self.groups(shapes)
        trained = {name for group in groups for name in group.members} or set(shapes)
        buffers = {name: value.tensor() for name, value in self.named("buffers").items()}
        for name, tensor in buffers.items():
            if name in shapes:
                self.value.at("buffers", name).wrong("a buffer, which no parameter is")
            self.keep(("buffers", name), tensor)
        state = self.state(groups, buffers)
        tensors = {
            name: NamedTensor(
                name, in_elements(dtype, shape), dtype, "parameter" if name in trained else "frozen", self.states[name]
            )
            for name, (shape, dtype) in shapes.items()
        } | {name: NamedTensor(name, t.shape, t.storage.dtype, "buffer") for name, t in buffers.items()}
        stated = state.blobs.get("module_names")
        order = [name for name in stated if type(name) is str and name in tensors] if isinstance(stated, list) else []
        known = {extent.key for per in self.scalar_extents.values() for extent in per.values()}
        made = Checkpoint(
            top=top,
            root=part.root,
            tag=None,
            format="plain",
            version=str(VERSION),
            extents=self.payload,
            carried_extents={
                (part.file, key): part.extent(key, tensor)
                for key, tensor in tensors_of(part.value, part.file)
                if (part.file, key) not in self.payload and key not in known
            },
            state=evolve(
                state,
                tensors=tuple(tensors[name] for name in dict.fromkeys((*order, *tensors)) if prod(tensors[name].shape)),
                aliases=self.aliases(
                    {name: shape for name, (shape, _) in shapes.items()} | {n: t.shape for n, t in buffers.items()}
                ),
            ),
            files=(part.file,),
            remarks=() if self.value.find("groups") else ("no parameter groups are stated: no lr, no weight decay",),
            not_read=tuple(self.unknown()),
            scalar_extents=self.scalar_extents,
        )
        called = self.settings().get(SETTING)
        is_other = called is not None and any(called.value in t.states for t in made.state.tensors)
        return renamed(made, str(called.value), called.origin) if called is not None and is_other else made

    def aliases(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Second names, except those of empty tensors.

        Empty tensors are in no plan; each of their names is noted separately.
        """
        out = {}
        for alias, owner in self.named("aliases").items():
            if owner.text() not in shapes or alias in shapes:
                owner.wrong("a parameter or buffer, and its key a second name of it")
            if prod(shapes[owner.text()]):
                out[alias] = owner.text()
        return out

    def parameter(self, name: str, states: Value) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a parameter; its states are kept."""
        held = states.mapping()
        whole = next((t for s in ("weight", "fp32", *held) if isinstance(t := held.get(s), TensorRef)), None)
        if whole is None or "weight" not in held:
            states.wrong('a dict {"weight": tensor, ...}')
        found = []
        for state, value in states.named():
            if state != "weight" and skips(state, needed="weight" not in held):
                continue
            one = value.held
            is_number = state in self.counted or (state == "step" and isinstance(one, TensorRef) and one.shape == ())
            if isinstance(one, TensorRef) and one.shape == whole.shape and not is_number:
                self.keep(value.key, one)
                if state != "weight":
                    found.append(state)
            elif isinstance(one, TensorRef) and prod(one.shape) == 1:
                self.scalars.setdefault(state, {})[name] = self.part.read_scalar(value.key, one)
                self.scalar_extents.setdefault(state, {})[name] = self.part.extent(value.key, one)
            elif is_counted(one):
                self.scalars.setdefault(state, {})[name] = one
            else:
                value.wrong(f"a tensor of shape {list(whole.shape)}, or a number")
        self.states[name] = tuple(found)
        weight = held["weight"]
        return whole.shape, weight.storage.dtype if isinstance(weight, TensorRef) else ""

    def groups(self, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[ParameterGroup, ...]:
        stated = self.value.find("groups") if not skips_optimizer() else None
        rows = stated.items() if stated is not None else []
        if not rows:
            members = tuple(
                name
                for name, (shape, _) in shapes.items()
                if prod(shape) and (self.states[name] or any(name in per for per in self.scalars.values()))
            )
            return (ParameterGroup("0", members, {}),) if members else ()
        out, seen = [], set[str]()
        for g, group in enumerate(rows):
            params = group.at("params")
            names = params.texts()
            if any(name not in shapes for name in names) or len({*names, *seen}) < len(names) + len(seen):
                params.wrong("a list of parameters, each in one group")
            seen.update(names)
            hyper = {key: decode(lifted(value.held, self.part.file)) for key, value in group.named() if key != "params"}
            members = tuple(name for name in names if prod(shapes[name][0]))
            every = tuple(self.listed(g, names, shapes))
            out.append(ParameterGroup(str(g), members, hyper, every if every != members else ()))
        return tuple(out)

    def listed(self, group: int, names: Sequence[str], shapes: Mapping[str, object]) -> Sequence[str]:
        """All names of a group of the optimizer.

        These include frozen parameters if the envelope names them.
        """
        stated = self.named("envelope", LISTED).get(str(group))
        if stated is None:
            return names
        every = stated.texts()
        if not set(names) <= set(every) <= shapes.keys():
            stated.wrong("a list of parameters, those of the group among them")
        return every

    def decoded(self, name: str) -> dict[object, object]:
        """A section of the envelope, as it was before it was encoded."""
        section = self.value.find("envelope")
        kept = section.find(name) if section is not None else None
        if kept is None:
            return {}
        made = decode(lifted(kept.held, self.part.file))
        if not isinstance(made, dict):
            kept.wrong("a dict as ucpl writes it there")
        return made

    def decoded_by_name(self, name: str) -> dict[str, object]:
        """The same of a section whose keys are names."""
        found = self.decoded(name)
        by_name = {key: value for key, value in found.items() if isinstance(key, str)}
        if len(by_name) != len(found):
            self.value.at("envelope", name).wrong("a dict whose keys are texts")
        return by_name

    def state(self, groups: tuple[ParameterGroup, ...], buffers: dict[str, TensorRef]) -> TrainState:
        part = self.part
        blobs, carried = self.decoded_by_name("blobs"), self.decoded("carried")
        blobs |= {name: lifted(value.held, part.file) for name, value in self.named("scalars").items()}
        settings = self.settings()
        masters = int(any("fp32" in states for states in self.states.values()))
        settings["has_masters"] = Setting(masters, f"params of {part.file}")
        settings["file"] = Setting(part.file, "its name")
        settings.pop(SETTING, None)  # the name of masters is known once all states are read
        if empty := self.without_elements(buffers):
            blobs[EMPTY] = empty
        said = self.named("envelope")
        return TrainState(
            framework=said["framework"].text() if "framework" in said else "plain",
            version=said["version"].text() if "version" in said else "",
            settings=settings,
            groups=groups,
            scalars=self.scalars,
            blobs=blobs,
            carried=carried,
        )

    def without_elements(self, buffers: dict[str, TensorRef]) -> dict[str, object]:
        """Tensors that no plan names, as every reader notes them."""
        # Each is a dict by now. Most files have none of these tensors.
        params = self.value.at("params").mapping().items()
        weights = {str(name): one["weight"] for name, one in params if isinstance(one, dict) and "weight" in one}
        found = [(name, one, False) for name, one in weights.items() if isinstance(one, TensorRef)]
        second = {alias: weights.get(owner.text()) for alias, owner in self.named("aliases").items()}
        found += [(alias, one, False) for alias, one in second.items() if isinstance(one, TensorRef)]
        found += [(name, one, True) for name, one in buffers.items()]
        of_buffers = {alias: buffers.get(owner.text()) for alias, owner in self.named("aliases").items()}
        found += [(alias, one, True) for alias, one in of_buffers.items() if one is not None]
        return {name: self.empty(name, one, is_buffer) for name, one, is_buffer in found if prod(one.shape) == 0}

    def empty(self, name: str, weight: TensorRef, is_buffer: bool) -> dict[str, object]:
        """A tensor without elements, and its optimizer states."""
        noted: dict[str, object] = {"dtype": weight.storage.dtype, "shape": list(weight.shape), "buffer": is_buffer}
        states = dict(self.named("params", name)) if not is_buffer else {}
        held = {state: value.held for state, value in states.items() if state not in ("weight", "fp32")}
        tensors = {
            s: one.storage.dtype for s, one in held.items() if isinstance(one, TensorRef) and not prod(one.shape)
        }
        numbers = {s: number_of(self.scalars[s].pop(name)) for s in held if name in self.scalars.get(s, {})}
        for state in numbers:
            self.scalar_extents.get(state, {}).pop(name, None)
        return noted | ({"states": tensors} if tensors else {}) | ({"numbers": numbers} if numbers else {})

    def settings(self) -> dict[str, Setting]:
        """The source's settings, each a value and its origin."""
        out = {}
        for name, pair in self.named("envelope", "settings").items():
            if name in _OWN:
                continue
            parts = pair.items()
            if len(parts) != 2 or not isinstance(value := parts[0].held, int | float | str | bool | None):
                pair.wrong("a number or text, and its origin")
            out[name] = Setting(value, f"{self.part.file}, from {parts[1].text()}")
        return out


# ---- writing -----------------------------------------------------------------------------------------------------------


def _skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint) -> Skeleton:
    file = str(structure.settings.get("file") or FILE)
    storages = Storages(by_place(source.carried_extents.values()))
    storage_of: dict[int, str] = {}
    train_state = source.state
    params: dict[str, dict[str, object]] = {t.name: {} for t in structure.tensors if t.kind != "buffer"}
    buffers: dict[str, object] = {}
    for i, target in enumerate(targets):
        made = storages.tensor(target.dtype, target.shape)
        if target.numel:
            storage_of[i] = made.storage.name
        match tuple(map(str, target.key)):
            case ("params", name, state) if name in params:
                params[name][state] = made
            case ("buffers", name):
                buffers[name] = made
            case _:
                fail(
                    "E471", f"plain() has no place for {key_text(target.key)}", Label(file, where=key_text(target.key))
                )
    for name, one in empty_tensors(train_state, source.root).items():
        made = storages.empty(one.dtype, one.shape)
        if one.buffer:
            buffers.setdefault(name, made)
        else:
            states = {state: storages.empty(dtype, one.shape) for state, dtype in one.states.items()}
            params.setdefault(name, {"weight": made, **states, **one.numbers})
    for state, values in train_state.scalars.items():
        for name, value in values.items():
            if name in params:
                extent = source.scalar_extents.get(state, {}).get(name)
                is_tensor = isinstance(value, Scalar) and extent is not None
                params[name][state] = storages.extent(extent) if is_tensor and extent else number_of(value)
    first = ("weight", "fp32")
    ordered = {
        name: {state: states[state] for state in dict.fromkeys((*(s for s in first if s in states), *states))}
        for name, states in params.items()
    }
    blobs = {key: value for key, value in train_state.blobs.items() if key not in (*COUNTED, EMPTY)}
    frozen = {t.name for t in structure.tensors if t.kind != "parameter"}
    groups = [
        {**encode(storages.value(group.hyper)), "params": [name for name in group.every if name not in frozen]}
        for group in train_state.groups
    ]
    listed = {
        str(g): list(group.listed) for g, group in enumerate(train_state.groups) if not frozen.isdisjoint(group.listed)
    }
    tree: dict[str, object] = {
        "params": ordered,
        "buffers": buffers,
        "aliases": dict(structure.aliases),
        "groups": groups,
        "scalars": {key: train_state.blobs[key] for key in COUNTED if key in train_state.blobs},
        "envelope": {
            "ucpl": VERSION,
            "framework": train_state.framework,
            "version": train_state.version,
            "settings": {
                name: [setting.value, setting.origin]
                for name, setting in train_state.settings.items()
                if name not in _OWN
            },
            "blobs": encode(storages.value(blobs)),
            "carried": encode(storages.value(train_state.carried)),
            **({LISTED: listed} if listed else {}),
        },
    }
    made_file = SkeletonFile(path=file, value=tree, storage_of=storage_of, carried=tuple(storages.carried))
    return Skeleton(folder="", files=(made_file,), unsafe_globals=tuple(unsafe_globals(tree)))


__all__ = ["FILE", "Plain"]
