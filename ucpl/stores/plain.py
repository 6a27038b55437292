"""plain(): a whole checkpoint in one torch file that anyone can read, `torch.load(path, weights_only=True)`.

    {"params": {name: {"weight": tensor, "fp32": tensor, "exp_avg": tensor, "step": tensor or number, ...}},
     "buffers": {name: tensor}, "aliases": {name: owner},
     "groups": [{"lr": 0.1, ..., "params": [names, in the optimizer's order]}],
     "scalars": {"global_steps": 3, ...},
     "envelope": {...}}                 # what else a framework needs to go on; may be left out

A parameter in no group is frozen; where there is no `groups`, all parameters that have a state are one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from attrs import field, frozen

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import (
    Envelope,
    Extent,
    Key,
    NamedTensor,
    ParameterGroup,
    Scalar,
    Setting,
    StoredTensor,
    Structure,
    TensorRef,
    key_text,
)
from ucpl.stores.carrying import Storages, by_place, lifted
from ucpl.stores.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.stores.pickles import unsafe_globals
from ucpl.stores.plain_values import decode, encode
from ucpl.stores.scalars import number_of
from ucpl.stores.torch_files import TorchFile, read_torch_file

FILE = "plain.pt"
VERSION = 1
# What a run has counted: in sight under `scalars`, whatever framework it came from.
COUNTED = ("global_steps", "global_samples", "skipped_steps")
# Facts of files and meshes, which a plain file has of its own or not at all.
_OWN = frozenset(
    {"stage", "dp", "tp", "pp", "ep", "masters", "has_masters", "file", "frozen_fragments", "parameter_order"}
)


class Plain:
    name = "plain"
    known_globals: frozenset[str] = frozenset()

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            return (path / FILE).is_file()
        if not path.is_file() or path.suffix in (".safetensors", ".json", ".plan", ".ucpl"):
            return False
        try:
            value = read_torch_file(path.parent, path.name).value
        except UcplError:
            return False
        return isinstance(value, dict) and isinstance(value.get("params"), dict)

    def open(self, path: Path) -> Checkpoint:
        """Read the headers of a plain file, or of the folder's plain.pt. Raises: UcplError E400-E427, E480, E481."""
        file = path / FILE if path.is_dir() else path
        return _Opened.of(read_torch_file(file.parent, file.name)).checkpoint(path)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """The one file of a target. Raises: UcplError E471."""
        return _skeleton(structure, targets, source)


# ---- reading ---------------------------------------------------------------------------------------------------------


@frozen
class _Opened:
    part: TorchFile
    value: dict[str, Any]
    payload: dict[tuple[str, Key], Extent] = field(factory=dict)
    scalars: dict[str, dict[str, Any]] = field(factory=dict)
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)
    states: dict[str, tuple[str, ...]] = field(factory=dict)

    @classmethod
    def of(cls, part: TorchFile) -> _Opened:
        if not isinstance(part.value, dict) or not isinstance(part.value.get("params"), dict):
            fail("E480", f'{part.file} has no dict "params"', Label(str(part.path), where="params"))
        return cls(part, part.value)

    def wrong(self, key: Key, expected: str) -> NoReturn:
        fail("E481", f"{key_text(key)} is not {expected}", Label(str(self.part.path), where=key_text(key)))

    def section(self, name: str, kind: type[Any]) -> Any:
        found = self.value.get(name)
        if found is None:
            return kind()
        return found if isinstance(found, kind) else self.wrong((name,), f"a {kind.__name__}")

    def keep(self, key: Key, tensor: TensorRef) -> None:
        if (extent := self.part.extent(key, tensor)).numel:
            self.payload[self.part.file, key] = extent

    def checkpoint(self, top: Path) -> Checkpoint:
        part = self.part
        shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, states in self.value["params"].items():
            shapes[name] = self.parameter(name, states)
        groups = self.groups(shapes)
        trained = {name for group in groups for name in group.members} or set(shapes)
        buffers = self.section("buffers", dict)
        for name, tensor in buffers.items():
            if not isinstance(name, str) or not isinstance(tensor, TensorRef):
                self.wrong(("buffers", name), "a tensor")
            self.keep(("buffers", name), tensor)
        aliases = self.section("aliases", dict)
        for alias, owner in aliases.items():
            if owner not in shapes or not isinstance(alias, str) or alias in shapes:
                self.wrong(("aliases", alias), "a second name of a parameter")
        envelope = self.envelope(groups)
        tensors = {
            name: NamedTensor(name, shape, dtype, "parameter" if name in trained else "frozen", self.states[name])
            for name, (shape, dtype) in shapes.items()
        } | {name: NamedTensor(name, t.shape, t.storage.dtype, "buffer") for name, t in buffers.items()}
        order = [name for name in envelope.blobs.get("module_names") or () if name in tensors]
        known = {extent.key for per in self.scalar_extents.values() for extent in per.values()}
        return Checkpoint(
            top=top,
            root=part.root,
            tag=None,
            framework="plain",
            version=str(VERSION),
            extents=self.payload,
            carried_extents={
                (part.file, extent.key): extent
                for extent in part.extents()
                if (part.file, extent.key) not in self.payload and extent.key not in known
            },
            envelope=envelope,
            tensors=tuple(tensors[name] for name in dict.fromkeys((*order, *tensors)) if _numel(tensors[name].shape)),
            aliases=dict(aliases),
            files=(part.file,),
            remarks=() if self.value.get("groups") else ("no parameter groups are stated: no lr, no weight decay",),
            scalar_extents=self.scalar_extents,
        )

    def parameter(self, name: Any, states: Any) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a parameter; its states are kept."""
        key: Key = ("params", name)
        if not isinstance(name, str) or not isinstance(states, dict) or not states:
            self.wrong(key, 'a dict {"weight": tensor, ...}')
        whole = next((states[s] for s in ("weight", "fp32", *states) if isinstance(states.get(s), TensorRef)), None)
        if whole is None or "weight" not in states:
            self.wrong(key, 'a dict {"weight": tensor, ...}')
        found = []
        for state, value in states.items():
            here = (*key, state)
            if not isinstance(state, str):
                self.wrong(here, "a state with a name")
            if isinstance(value, TensorRef) and value.shape == whole.shape and (value.shape or state != "step"):
                self.keep(here, value)
                if state != "weight":
                    found.append(state)
            elif isinstance(value, TensorRef) and value.shape == ():
                self.scalars.setdefault(state, {})[name] = self.part.read_scalar(value)
                self.scalar_extents.setdefault(state, {})[name] = self.part.extent(here, value)
            elif isinstance(value, (int, float, bool, str)) or value is None:
                self.scalars.setdefault(state, {})[name] = value
            else:
                self.wrong(here, f"a tensor of shape {list(whole.shape)}, or a number")
        self.states[name] = tuple(found)
        return whole.shape, states["weight"].storage.dtype if isinstance(states["weight"], TensorRef) else ""

    def groups(self, shapes: Mapping[str, Any]) -> tuple[ParameterGroup, ...]:
        stated = self.section("groups", list)
        if not stated:
            members = tuple(
                name for name in shapes if self.states[name] or any(name in per for per in self.scalars.values())
            )
            return (ParameterGroup("0", members, {}),) if members else ()
        out, seen = [], set[str]()
        for g, group in enumerate(stated):
            names = group.get("params") if isinstance(group, dict) else None
            if not isinstance(names, (list, tuple)) or any(name not in shapes or name in seen for name in names):
                self.wrong(("groups", g, "params"), "a list of parameters, each in one group")
            seen.update(names)
            hyper = {str(key): decode(lifted(value, self.part.file)) for key, value in group.items() if key != "params"}
            out.append(ParameterGroup(str(g), tuple(names), hyper))
        return tuple(out)

    def envelope(self, groups: tuple[ParameterGroup, ...]) -> Envelope:
        part = self.part
        kept = self.section("envelope", dict)
        blobs = decode(lifted(kept.get("blobs") or {}, part.file))
        carried = decode(lifted(kept.get("carried") or {}, part.file))
        if not isinstance(blobs, dict) or not isinstance(carried, dict):
            self.wrong(("envelope",), "what ucpl writes there")
        blobs |= {key: value for key, value in self.section("scalars", dict).items() if isinstance(key, str)}
        settings = {}
        for name, pair in (kept.get("settings") or {}).items():
            if isinstance(pair, (list, tuple)) and len(pair) == 2 and name not in _OWN:
                settings[name] = Setting(pair[0], f"{part.file}, from {pair[1]}")
        masters = int(any("fp32" in states for states in self.states.values()))
        settings["has_masters"] = Setting(masters, f"params of {part.file}")
        settings["file"] = Setting(part.file, "its name")
        empty = {name for name, t in self.section("buffers", dict).items() if _numel(t.shape) == 0}
        if empty and "empty_tensors" not in blobs:
            blobs["empty_tensors"] = {
                name: {"dtype": t.storage.dtype, "shape": list(t.shape), "buffer": True}
                for name, t in self.value["buffers"].items()
                if name in empty
            }
        return Envelope(
            framework=str(kept.get("framework", "plain")),
            version=str(kept.get("version", "")),
            settings=settings,
            groups=groups,
            scalars=self.scalars,
            blobs=blobs,
            carried=carried,
        )


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


# ---- writing -----------------------------------------------------------------------------------------------------------


def _skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint) -> Skeleton:
    file = str(structure.settings.get("file") or FILE)
    storages = Storages(by_place(source.carried_extents.values()))
    storage_of: dict[int, str] = {}
    envelope = source.envelope
    params: dict[str, dict[str, Any]] = {t.name: {} for t in structure.tensors if t.kind != "buffer"}
    buffers: dict[str, Any] = {}
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
    for state, values in envelope.scalars.items():
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
    blobs = {key: value for key, value in envelope.blobs.items() if key not in COUNTED}
    hypers = {group.name: group.hyper for group in envelope.groups}
    groups = []
    for g, (name, members) in enumerate(structure.groups):
        same = [group.hyper for group in envelope.groups if group.members == members]
        hyper = same[0] if same else hypers.get(name, envelope.groups[g].hyper if g < len(envelope.groups) else {})
        groups.append({**encode(storages.value(hyper)), "params": list(members)})
    value = {
        "params": ordered,
        "buffers": buffers,
        "aliases": dict(structure.aliases),
        "groups": groups,
        "scalars": {key: envelope.blobs[key] for key in COUNTED if key in envelope.blobs},
        "envelope": {
            "ucpl": VERSION,
            "framework": envelope.framework,
            "version": envelope.version,
            "settings": {
                name: [setting.value, setting.origin] for name, setting in envelope.settings.items() if name not in _OWN
            },
            "blobs": encode(storages.value(blobs)),
            "carried": encode(storages.value(envelope.carried)),
        },
    }
    made_file = SkeletonFile(path=file, value=value, storage_of=storage_of, carried=tuple(storages.carried))
    return Skeleton(folder="", files=(made_file,), unsafe_globals=tuple(unsafe_globals(value)))


__all__ = ["FILE", "Plain"]
