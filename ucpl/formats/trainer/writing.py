"""The store of folders of the Trainer and Accelerate, and their files.

`full`: FSDP's form, one torch file of weights under all names, and names in place of numbers in the optimizer. Else weights
are in model.safetensors, or in adapter_model.safetensors under PEFT's names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import ParameterGroup, StoredTensor, Structure, TensorRef, key_text
from ucpl.files.carrying import Storages, by_place
from ucpl.files.checkpoint import Checkpoint, Order, Skeleton, SkeletonFile
from ucpl.files.demands import Demands
from ucpl.files.pickles import unsafe_globals
from ucpl.files.safetensors_files import ALIASES
from ucpl.formats.leaving import empty_tensors, with_empty_states
from ucpl.formats.optimizer_hypers import completed
from ucpl.formats.peft_names import in_file, is_of_run
from ucpl.formats.torch_optimizer import optimizers_of, put_numbers, state_dict_of
from ucpl.formats.trainer.reading import FSDP, OPTIMIZER, WEIGHTS, OwnNames, opened, recognised
from ucpl.records import define
from ucpl.registry import format_named

__all__ = ["Folders"]

_FILES = {"trainer": "optimizer.pt", "accelerate": "optimizer.bin"}
_FULL_OPTIMIZER = "optimizer.bin"
_OTHERS = {"trainer": "trainer_state.json", "accelerate": "random_states_0.pkl"}


class Folders:
    """The store of one kind of folder."""

    demands = Demands()

    def __init__(self, name: str) -> None:
        self.name = name

    def recognises(self, path: Path) -> bool:
        return recognised(self.name, path)

    def open(self, path: Path, order: Order | None = None) -> Checkpoint:
        """Read all headers."""
        return opened(self.name, path, order)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """The files of a target.

        Raises: UcplError E471, also if the source is not in a folder of this kind: its loop finds the optimizer next to
        files of its own, such as scheduler.pt of the Trainer, and trains without the optimizer if they are missing.
        """
        container = source.container
        if container is None or container.kind.name != self.name:
            fail(
                "E471",
                f"{self.name}() writes {format_named(self.name).title} again, and the source is not in one",
                Label(str(source.root), f"has no {_OTHERS[self.name]}"),
                remedy="name the run's folder, or write --to zero2 -D dp=2",
            )
        return _Writer(self.name, structure, targets, with_empty_states(source, structure)).skeleton()


@define(eq=False)
class _Optimizer:
    """The file of one of a run's optimizers."""

    storages: Storages
    groups: list[ParameterGroup] = field(factory=list)
    storage_of: dict[int, str] = field(factory=dict)

    @property
    def names(self) -> set[str]:
        return {name for group in self.groups for name in group.every}


@define(eq=False)
class _Writer:
    kind: str
    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    weights: Storages = field(init=False)
    optimizers: list[_Optimizer] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.weights = Storages({})
        carried = by_place(self.source.carried_extents.values())
        words, groups = optimizers_of(self.source), self.source.state.groups
        made = {word: _Optimizer(Storages(carried)) for word in words or [""]}
        for word, group in zip(words, groups, strict=True):
            made[word].groups.append(group)
        self.optimizers = [*made.values()]

    def of(self, name: str) -> _Optimizer:
        """The optimizer of a parameter."""
        first, *_ = self.optimizers
        return next((one for one in self.optimizers if name in one.names), first) if len(self.optimizers) > 1 else first

    def number(self, name: str) -> int:
        value = self.structure.settings.get(name)
        return value if isinstance(value, int) else 0

    @property
    def is_full(self) -> bool:
        return bool(self.number("full"))

    def skeleton(self) -> Skeleton:
        held: dict[str, TensorRef] = {}
        states: dict[str, dict[str, object]] = {}
        storage_of: dict[int, str] = {}
        for i, target in enumerate(self.targets):
            its = self.of(str(target.key[0])) if target.file == OPTIMIZER else None
            at = storage_of if its is None else its.storage_of
            made = (self.weights if its is None else its.storages).tensor(target.dtype, target.shape)
            if target.numel:
                at[i] = made.storage.name
            match target.file, tuple(map(str, target.key)):
                case (file, (name,)) if file == WEIGHTS:
                    held[name] = made
                case (file, (name, state)) if file == OPTIMIZER:
                    states.setdefault(name, {})[state] = made
                case _:
                    where = key_text(target.key)
                    fail("E471", f"a folder of {self.kind} has no place for {where}", Label(target.file, where=where))
        for name, one in empty_tensors(self.source.state, self.source.root).items():
            held.setdefault(name, self.weights.empty(one.dtype, one.shape))
            if one.states:
                storages = self.of(name).storages
                states.setdefault(name, {s: storages.empty(dtype, one.shape) for s, dtype in one.states.items()})
        files = [self.model(held, storage_of)]
        for number, mine in enumerate(self.optimizers):
            put_numbers(self.source, mine.storages, states, mine.names if len(self.optimizers) > 1 else None)
            if states or self.source.state.groups:
                files.append(self.optimizer(number, mine, states))
        unsafe = tuple(sorted({one for file in files for one in unsafe_globals(file.value)}))
        return Skeleton("", tuple(files), unsafe_globals=unsafe)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def model(self, held: dict[str, TensorRef], storage_of: dict[int, str]) -> SkeletonFile:
        aliases = {alias: owner for alias, owner in self.structure.aliases.items() if owner in held}
        if self.is_full:
            tree = held | {alias: held[owner] for alias, owner in aliases.items()}
            return SkeletonFile(FSDP, tree, storage_of=storage_of)
        file = "adapter_model.safetensors" if any(map(is_of_run, held)) else "model.safetensors"
        names = {name: self.stored(name) for name in (*held, *aliases)}
        seconds = {names[alias]: names[owner] for alias, owner in aliases.items()}
        metadata = {"format": "pt"} | ({ALIASES: json.dumps(seconds, sort_keys=True)} if seconds else {})
        value = {names[name]: one for name, one in held.items()}
        return SkeletonFile(file, value, "safetensors", metadata, storage_of)

    def stored(self, name: str) -> str:
        """The name of a tensor in the file."""
        own = self.source.own
        said = own.stored.get(name, name) if isinstance(own, OwnNames) else name
        return (in_file(name) if is_of_run(name) else said).removeprefix("module.")

    # ---- the optimizer ---------------------------------------------------------------------------------------------

    def optimizer(self, number: int, one: _Optimizer, states: Mapping[str, Mapping[str, object]]) -> SkeletonFile:
        rows = []
        for group in one.groups:
            hyper = completed(self.source, self.structure, group)
            rows.append((group.every, one.storages.value(hyper)))
        named = [(every, {**hyper, "param_names": list(every)}) for every, hyper in rows]  # as torch writes names
        made = state_dict_of(rows, states, by_name=True) if self.is_full else state_dict_of(named, states)
        file = _FULL_OPTIMIZER if self.is_full else _FILES[self.kind]
        file = file.replace(".", f"_{number}.") if number else file
        return SkeletonFile(file, made, storage_of=one.storage_of, carried=tuple(one.storages.carried))
