"""A folder of Megatron-FSDP as a target.

Chunks have the names of its modules, and each parameter has its hyper-parameters. Megatron-FSDP finds tensors by name
and by box, so that chunks may be cut anywhere. The plan cuts the halves of a gated linear_fc1; here they get their
names.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NoReturn

from ucpl.errors import Label, fail
from ucpl.extents import StoredTensor, Structure
from ucpl.files.checkpoint import Archive, Checkpoint, Skeleton, SkeletonFile
from ucpl.files.pickles import unsafe_globals
from ucpl.formats.dcp.metadata import METADATA, Step
from ucpl.formats.dcp.writing import RankFile, leaves
from ucpl.formats.megatron import fsdp_names as names
from ucpl.formats.megatron.classes import KNOWN_GLOBALS
from ucpl.formats.megatron.fsdp_reading import RNG
from ucpl.formats.megatron.legacy_arguments import values_of
from ucpl.formats.megatron.reading import VERSION
from ucpl.formats.megatron.roles import MASTER
from ucpl.formats.megatron.writing import CoreWriter
from ucpl.formats.run_steps import ITERATION, iteration_of
from ucpl.formats.torch_dicts import VALUES
from ucpl.records import define

__all__ = ["skeleton"]

Shape = tuple[int, ...]
_STATE = re.compile(r"optimizer\.state\.(?P<state>[A-Za-z0-9_]+)\.(?P<name>.+)", re.DOTALL)
_KNOWN_STATES = frozenset({"exp_avg", "exp_avg_sq"})  # the states of a gated linear_fc1 that Megatron-FSDP splits
_RANDOM = "rng_state"


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    """The files of a target.

    Raises: UcplError E471 for values that have no place in the format.
    """
    return _Writer(structure, targets, source).folder(tag)


@define(eq=False)
class _Writer(CoreWriter):
    @property
    def owner(self) -> str:
        return str(self.structure.settings.get("owner") or "")

    @cached_property
    def gated(self) -> frozenset[str]:
        shapes = {tensor.name: tensor.shape for tensor in self.structure.tensors}
        return names.gated(shapes, shapes, METADATA)

    @property
    def halves(self) -> int:
        """Ranks of the mesh for halves of a gated linear_fc1."""
        value = self.structure.settings.get("halves")
        return value if type(value) is int and value > 0 else 1

    def file(self, rank: int, name: str) -> tuple[str, RankFile]:
        return super().file(rank // self.halves, name)

    def folder(self, tag: str | None) -> Skeleton:
        self.tensors()
        self.empty()
        self.other_states()
        self.metas()
        for steps, value in leaves((), self.carried()):
            self.value(steps, value)
        self.values_of_run()
        files = (*self.of_ranks(), SkeletonFile(METADATA, self.metadata(), "bytes"))
        held = [one.value for file in self.files.values() for one in file.archives]
        unsafe = {name for value in held for name in unsafe_globals(value)} - VALUES - KNOWN_GLOBALS
        return self.in_step(tag, files, tuple(sorted(unsafe)))

    def planner(self) -> dict[str, tuple[Step, ...]] | None:
        return dict(self.paths)

    # ---- tensors ---------------------------------------------------------------------------------------------------

    def chunk(self, rank: int, name: str, offset: Shape, archive: Archive, whole: Shape) -> int:
        """Add a chunk under its name in a module of Megatron-FSDP.

        A gated linear_fc1 is written as its halves. Raises: UcplError E471.
        """
        match = _STATE.fullmatch(name)
        tensor, state = (match["name"], match["state"]) if match is not None else (name, MASTER)
        if state != MASTER and state not in _KNOWN_STATES:
            _reject(state, tensor)
        made = self.named(tensor)
        if tensor in self.gated:
            rows = whole[0] // 2
            half = offset[0] // rows
            made += names.HALVES[half]
            offset, whole = (offset[0] - half * rows, *offset[1:]), (rows, *whole[1:])
        steps = ("model", made) if state == MASTER else ("optimizer", "state", self.owned(made), state)
        return super().chunk(rank, ".".join(steps), offset, archive, whole)

    def path_of(self, name: str) -> tuple[Step, ...]:
        """The path of a name in nested dicts.

        A tensor's name is one key.
        """
        if not name.startswith(names.STATES):
            return ("model", name.removeprefix(names.MODEL))
        owner, _, state = name.removeprefix(names.STATES).rpartition(".")
        return ("optimizer", "state", owner, state)

    def named(self, tensor: str) -> str:
        """A tensor's name in the model's state dict, halves left out."""
        grouped = bool(self.structure.settings.get("grouped"))
        return names.LEAD + names.in_folder(tensor, grouped=grouped)

    def owned(self, named: str) -> str:
        """The optimizer's name of it."""
        return self.owner + named.removeprefix(names.LEAD)

    # ---- values that are no tensors of the model
    # -----------------------------------------------------------------------

    def other_states(self) -> None:
        """Raises: UcplError E471."""
        for name, states in self.others.items():
            for state in states:
                _reject(str(state), name)

    def metas(self) -> None:
        """Write the hyper-parameters of each parameter, with its steps.

        Megatron-FSDP has one optimizer, of experts, too. Raises: UcplError E471.
        """
        if not any(tensor.states for tensor in self.structure.tensors):
            return  # weights alone
        self.check_steps()
        for group in self.grouped():
            said = {**group.hyper, "is_expert_parallel": False, **self.step_of(group)}
            for member in group.members:
                owner = self.owned(self.named(member))
                for key, value in said.items():
                    self.value(("optimizer", "param_to_group_meta", owner, key), value)

    def carried(self) -> dict[object, object]:
        """The run's values besides its model.

        Raises: UcplError E471.
        """
        out = values_of(self.source)
        clash = next((key for key in ("model", "optimizer", _RANDOM) if key in out), None)
        if clash is not None:
            fail(
                "E471",
                f"the run has a value called `{clash}`, which is Megatron's own in the state dict",
                Label(METADATA, where=clash),
            )
        out[ITERATION] = iteration_of(self.source.state)
        out[VERSION] = 3.0  # earlier versions have q, k and v in another order
        random = self.source.state.blobs.get(RNG)
        return out if random is None else {**out, _RANDOM: random}

    def values_of_run(self) -> None:
        self.keep({key: one for key, one in self.source.state.blobs.items() if key != RNG})


def _reject(state: str, name: str) -> NoReturn:
    """Raises: UcplError E471."""
    fail(
        "E471",
        f"`{state}` of `{name}`: Megatron-FSDP saves the states of Adam",
        Label(METADATA, where=name),
        remedy=f"--drop {state} leaves it out",
    )
