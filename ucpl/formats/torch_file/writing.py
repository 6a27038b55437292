"""The value tree of a target's file: state dicts and other values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path, PurePosixPath

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import StoredTensor, Structure, key_text
from ucpl.files.carrying import Storages, by_place
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.groups import has_groups_alone
from ucpl.files.pickles import set_attributes, unsafe_globals
from ucpl.files.plain_values import encode
from ucpl.files.values import Value
from ucpl.formats.leaving import EMPTY, OPTIMIZERS, empty_tensors, with_empty_states
from ucpl.formats.leaving import EXTRA as MODULE_EXTRA
from ucpl.formats.optimizer_hypers import completed
from ucpl.formats.torch_dicts import VALUES, dicts_of, is_average, is_optimizer, is_wrapped
from ucpl.formats.torch_file.masters import BY_GROUP, list_of
from ucpl.formats.torch_optimizer import EXTRA, are_determined, optimizers_of, put_numbers, state_dict_of
from ucpl.records import define

__all__ = ["ENVELOPE", "MODEL", "NAME", "OPTIMIZER", "OTHERS", "skeleton_of"]

NAME = "torch_file"
FILE = "checkpoint.pt"
MODEL, OPTIMIZER = "model", "optimizer"  # first steps of keys in a layout, whatever the keys in the file are
ENVELOPE = "ucpl"  # a key of the file: values of the run that training scripts do not have
# Keys of files that belong to a folder of another format, if the file has no envelope.
OTHERS = frozenset(("ds_config", "ds_version", "param_shapes", "checkpoint_version"))
_SCHEDULE = "lr_scheduler"
MASTER = "fp32"
# Values that are written in other places, or describe the source's own files.
_APART = frozenset((EMPTY, EXTRA, OPTIMIZERS, MODULE_EXTRA, _SCHEDULE, "module_names", "module_attributes"))
# Counters of a run that training scripts keep, too.
_COUNTED = ("global_steps", "global_samples", "skipped_steps")


def skeleton_of(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint) -> Skeleton:
    """The file of a target, or its two files. Raises: UcplError E471."""
    writer = _Writer(structure, targets, with_empty_states(source, structure))
    return writer.skeleton()


@define(eq=False)
class _File:
    """One file under construction."""

    storages: Storages
    tree: dict[object, object] = field(factory=dict)
    storage_of: dict[int, str] = field(factory=dict)


@define(eq=False)
class _Writer:
    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    files: dict[str, _File] = field(factory=dict)
    weights: dict[str, object] = field(factory=dict)
    states: dict[str, dict[str, object]] = field(factory=dict)

    def text(self, name: str, default: str) -> str:
        value = self.structure.settings.get(name)
        return default if value is None else str(value)

    @property
    def name(self) -> str:
        return self.text("file", FILE)

    @property
    def optimizer_name(self) -> str:
        return self.text("optimizer_file", "") or self.name

    @property
    def is_bare(self) -> bool:
        """True for a state dict alone, without a place for an optimizer."""
        return not self.text("model", MODEL)

    def file(self, name: str) -> _File:
        if name not in self.files:
            self.files[name] = _File(Storages(by_place(self.source.carried_extents.values())))
        return self.files[name]

    def skeleton(self) -> Skeleton:
        self.tensors()
        self.empty()
        main = self.file(self.name)
        model = self.model(main)
        self.attributes(main, model)
        if self.is_bare:
            main.tree = model
        else:
            keys = self.text("model", MODEL).split(",")
            for key, one in self.by_model(model, keys).items() if len(keys) > 1 else [(keys[0], model)]:
                self.put(main, key, one)
        if not self.is_bare or self.optimizer_name != self.name:
            self.optimizers(self.file(self.optimizer_name), model)
        self.values(main)
        made = tuple(
            SkeletonFile(
                path=name,
                value=file.tree,
                storage_of=file.storage_of,
                carried=tuple(file.storages.carried),
            )
            for name, file in self.files.items()
        )
        unsafe = tuple(sorted({one for file in made for one in unsafe_globals(file.value)} - VALUES))
        return Skeleton("", made, unsafe_globals=unsafe)

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def tensors(self) -> None:
        for i, target in enumerate(self.targets):
            file = self.file(target.file)
            made = file.storages.tensor(target.dtype, target.shape)
            if target.numel:
                file.storage_of[i] = made.storage.name
            match tuple(map(str, target.key)):
                case ("model", name):
                    self.weights[name] = made
                case ("optimizer", name, state):
                    self.states.setdefault(name, {})[state] = made
                case _:
                    where = key_text(target.key)
                    fail("E471", f"{NAME}() has no place for {where}", Label(target.file, where=where))

    def empty(self) -> None:
        """Tensors without elements, and the optimizer's states of them."""
        main, optim = self.file(self.name).storages, self.file(self.optimizer_name).storages
        for name, one in empty_tensors(self.source.state, self.source.root).items():
            self.weights.setdefault(name, main.empty(one.dtype, one.shape))
            if one.states:
                held = {state: optim.empty(dtype, one.shape) for state, dtype in one.states.items()}
                self.states.setdefault(name, {**held})

    def model(self, file: _File) -> OrderedDict[object, object]:
        """The model's state dict in its order, with second names."""
        blobs, aliases = self.source.state.blobs, self.structure.aliases
        extra = blobs.get(MODULE_EXTRA)
        held = dict(self.weights)
        held |= {alias: held[owner] for alias, owner in aliases.items() if owner in held}
        if isinstance(extra, dict):
            held |= {str(name): file.storages.value(one) for name, one in extra.items()}
        stated = blobs.get("module_names")
        order = [name for name in stated if name in held] if isinstance(stated, list) else []
        wrap = self.text("wrap", "")
        return OrderedDict((wrap + name, held[name]) for name in dict.fromkeys((*order, *held)))

    def by_model(self, model: Mapping[object, object], keys: list[str]) -> dict[str, OrderedDict[object, object]]:
        """The state dicts of several models, read as one.

        Raises: UcplError E471.
        """
        made: dict[str, OrderedDict[object, object]] = {key: OrderedDict() for key in keys}
        ways = {key.replace("/", ".") + ".": key for key in keys}
        for name, one in model.items():
            way = max((way for way in ways if str(name).startswith(way)), key=len, default=None)
            if way is None:
                fail(
                    "E471",
                    f'{name} is in none of the models of {NAME}(model="{",".join(keys)}")',
                    Label(self.name, where=str(name)),
                    remedy=f'{NAME}(model="{MODEL}") writes one state dict of all',
                )
            made[ways[way]][str(name).removeprefix(way)] = one
        return made

    def attributes(self, file: _File, model: OrderedDict[object, object]) -> None:
        """Attributes of the state dict: versions of its modules."""
        held = self.source.state.blobs.get("module_attributes")
        if isinstance(held, dict) and not self.text("wrap", ""):
            set_attributes(model, file.storages.value(held))

    # ---- optimizers ------------------------------------------------------------------------------------------------

    @property
    def has_optimizer(self) -> bool:
        state = self.source.state
        return bool(self.states or state.scalars or state.blobs.get(EXTRA)) or has_groups_alone(self.source)

    def optimizers(self, file: _File, model: object) -> None:
        """The state dict of an optimizer, or of several."""
        if not self.has_optimizer:
            return
        put_numbers(self.source, file.storages, self.states)
        masters = self.masters()
        rows: dict[str, list[tuple[tuple[str, ...], Mapping[str, object]]]] = {}
        for word, group in zip(optimizers_of(self.source), self.source.state.groups, strict=True):
            hyper = completed(self.source, self.structure, group)
            rows.setdefault(word, []).append((group.every, file.storages.value(hyper)))
        key = self.text("optimizer", OPTIMIZER if self.optimizer_name == self.name else "")
        by_name = bool(self.structure.settings.get("named"))
        made = {word: state_dict_of(mine, self.states, by_name=by_name) for word, mine in rows.items()}
        if not by_name and not are_determined(model, made, [names for mine in rows.values() for names, _ in mine]):
            made = {word: state_dict_of(mine, self.states, is_named=True) for word, mine in rows.items()}
        if len(made) < 2 and not key:
            self.put_all(file, next(iter(made.values()), {}).items())
        elif len(made) < 2:
            one: object = next(iter(made.values()), {})
            whole, slash, place = key.rpartition("/")
            self.put(file, whole if slash and place == "0" else key, [one] if slash and place == "0" else one)
        elif all(word.isdecimal() for word in made):
            self.put(file, "optimizers" if key in ("", OPTIMIZER) else key, [made[w] for w in sorted(made, key=int)])
        else:
            for word, one in made.items():
                self.put(file, word or key or OPTIMIZER, one)
        if masters:
            place = self.text("master_list", "")
            names = [group.every for group in self.source.state.groups]
            made_list = list_of(names, masters, is_by_group=place.endswith(BY_GROUP))
            self.put(file, place.removesuffix(BY_GROUP), made_list)

    def masters(self) -> dict[str, object]:
        """The masters for a target's list, taken out of the states.

        The list has each parameter of the optimizer; else masters are states.
        """
        names = [name for group in self.source.state.groups for name in group.every]
        for name, one in empty_tensors(self.source.state, self.source.root).items():
            if name in names and self.text("master_list", ""):
                empty = self.file(self.optimizer_name).storages.empty("f32", one.shape)
                self.states.setdefault(name, {}).setdefault(MASTER, empty)
        if not self.text("master_list", "") or not all(MASTER in self.states.get(name, {}) for name in names):
            return {}
        return {name: self.states[name].pop(MASTER) for name in names}

    # ---- values of the run -----------------------------------------------------------------------------------------

    def values(self, main: _File) -> None:
        state = self.source.state
        top: dict[object, object] = dict(state.carried)
        if _SCHEDULE in state.blobs:
            top[self.text("scheduler", _SCHEDULE)] = state.blobs[_SCHEDULE]
        top |= {key: state.blobs[key] for key in _COUNTED if key in state.blobs and key not in top}
        rest = {key: value for key, value in state.blobs.items() if key not in (*_APART, *_COUNTED)}
        envelope: dict[str, object] = {"blobs": encode(rest)} if rest else {}
        others = dicts_of(Value(Path(self.name), self.name, (), state.carried))
        is_joined = "," in self.text("model", MODEL)
        if is_joined or others.optimizers or not all(map(is_average, others.models)) or not OTHERS.isdisjoint(top):
            places = dicts_of(Value(Path(self.name), self.name, (), main.tree)).optimizers
            envelope |= {"model": self.text("model", MODEL), "optimizer": ",".join(map(key_text, places))}
        if not self.text("wrap", "") and is_wrapped(self.weights):
            envelope["wrap"] = ""  # `model.` of all names is a part of the model
        if envelope:
            top[ENVELOPE] = envelope
        for key, value in top.items():
            if not self.is_bare:
                self.put(main, key, main.storages.value(value))
            elif self.optimizer_name != self.name:
                name = f"{key}{PurePosixPath(self.name).suffix or '.pt'}"
                file = self.file(name)
                self.put_all(file, [("value", file.storages.value(value))])

    def put_all(self, file: _File, items: Iterable[tuple[object, object]]) -> None:
        for key, value in items:
            self.put(file, key, value, is_path=False)

    def renamed(self, key: str) -> str:
        """A remedy's call, whose state dict has another key than a value."""
        if key == self.text("optimizer", OPTIMIZER):
            return f'{NAME}(optimizer = "{key}/{OPTIMIZER}") gives the optimizer'
        return f"{NAME}(model = ...) gives the model"

    def put(self, file: _File, key: object, value: object, *, is_path: bool = True) -> None:
        """Raises: UcplError E471 if two values have one key."""
        steps: list[object] = [*key.split("/")] if isinstance(key, str) and is_path else [key]
        here: object = file.tree
        for step in steps[:-1]:
            if isinstance(here, MutableMapping):
                here = here.setdefault(step, {})
        if not isinstance(here, MutableMapping) or not _is_put(here, steps[-1], value):
            fail(
                "E471",
                f"two values of the target have the key `{key}`",
                Label(self.name, where=str(key)),
                remedy=f"--drop '{key}' leaves out the value of the run, or {self.renamed(str(key))} another key",
            )


def _is_put(here: MutableMapping[object, object], step: object, value: object) -> bool:
    """Put a value, or the keys of a dict, next to others.

    The dict around an optimizer has other values of the run, too.
    """
    there = here.setdefault(step, value)
    if there is value:
        return True
    if not (isinstance(there, MutableMapping) and isinstance(value, dict)) or is_optimizer(there):
        return False
    return all(_is_put(there, key, one) for key, one in value.items())
