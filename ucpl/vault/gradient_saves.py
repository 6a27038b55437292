"""Saves of gradients alone.

The state is computed by replaying the optimizer's step.

A replay starts from the previous generation. It is valid only if that one step was the only change. The changes that
can be detected are checked for every tensor: its version and its address. A write past autograd (`tensor.data`) cannot
be detected. So the complete result of the step is digested (`marking`), and a replay is compared with this digest.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeGuard

import torch
from attrs import field
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ucpl.errors import UcplError
from ucpl.live.tensors import is_placed, part_of, place_of
from ucpl.records import define
from ucpl.storage.vaults.adamw import MOMENTS, NUMBERS, environment, flushes_denormals
from ucpl.storage.vaults.replay import GRADIENT, Replay
from ucpl.vault.framework_writer import (
    Distributions,
    SaveInput,
    collect_input,
    compare_input,
    of_state,
    ranks,
    sizes_of,
)
from ucpl.vault.step_digests import Stamp, StepDigests, stamp_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ucpl.storage.vaults.checksummed_text import JsonObject
    from ucpl.storage.vaults.memory import Memory
    from ucpl.storage.vaults.records import Commit
    from ucpl.vault.files import ToSave

__all__ = ["GradientSaves", "is_replayable"]

_log = logging.getLogger("ucpl")
METADATA = ".metadata"  # of DCP
Pair = tuple[torch.nn.Module, torch.optim.Optimizer]


def is_replayable(what: object) -> TypeGuard[Pair]:
    """True if the value's optimizer has steps that can be replayed."""
    if not (isinstance(what, tuple) and len(what) == 2):
        return False
    return isinstance(what[0], torch.nn.Module) and type(what[1]) is torch.optim.AdamW


@define(eq=False)
class _Watch:
    """Hooks that record an optimizer's steps since the last save."""

    optimizer: torch.optim.Optimizer
    steps: int = 0  # started steps
    ended: int = 0
    is_plain: bool = True  # no other detectable change, and all numbers can be saved
    groups: list[JsonObject] = field(factory=list)
    # By id of the parameter, which may be deleted before the next save.
    grads: dict[int, tuple[weakref.ref[torch.Tensor], Stamp]] = field(factory=dict)
    stamps: list[Stamp] = field(factory=list)  # after the last save, then after the step
    hooks: list[RemovableHandle] = field(factory=list)
    marks: StepDigests | None = None  # of the last save: a step waits until they are taken

    def begin(self) -> None:
        def before(_: object, args: tuple[object, ...], named: dict[str, object]) -> None:
            self._look(lambda: self._before(args[1:] or named))  # the first is the optimizer

        self.hooks.append(self.optimizer.register_step_pre_hook(before))
        self.hooks.append(self.optimizer.register_step_post_hook(lambda *_: self._look(self._after)))

    def _look(self, act: Callable[[], None]) -> None:
        """Run `act`.

        An error in it ends neither the step nor the save.

        After an error the complete state is saved.
        """
        try:
            act()
        except Exception as error:
            self.is_plain = False
            _log.debug("a step was not recorded: %r", error)

    def parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of its group, parameter)."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                yield number, parameter

    def all_stamps(self) -> list[Stamp]:
        found = []
        for _, parameter in self.parameters():
            state = self.optimizer.state.get(parameter, {})
            found += [stamp_of(parameter), *(stamp_of(t) for t in state.values() if isinstance(t, torch.Tensor))]
        return found

    def saved(self) -> None:
        self.steps, self.ended, self.is_plain, self.grads = 0, 0, True, {}
        self._look(self._stamp)

    def _stamp(self) -> None:
        self.stamps = self.all_stamps()

    def _before(self, closure: object) -> None:
        """The hook before a step.

        closure: code that the step calls, which may change anything.
        """
        if self.marks is not None:
            self.marks.settled()
            self.marks = None
        self.steps += 1
        groups = [_numbers(group) for group in self.optimizer.param_groups] if self._may_be() else []
        scaled = any(getattr(self.optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        self.is_plain = (
            self._may_be()
            and not (closure or scaled or flushes_denormals() or torch.compiler.is_compiling())
            and None not in groups
            and self.all_stamps() == self.stamps
            and self._is_alone()
        )
        self.groups = [group for group in groups if group is not None]
        if not self.is_plain:  # a script that saves every tenth step does not wait at the others
            self.grads = {}
            return
        self.grads = {
            id(p): (weakref.ref(p.grad), stamp_of(p.grad)) for _, p in self.parameters() if p.grad is not None
        }

    def _may_be(self) -> bool:
        return self.is_plain and self.steps == 1

    def _is_alone(self) -> bool:
        """True if the step has no other hooks.

        Changes that another hook makes between ours would not be detected.
        """
        own = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks
        of_all = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
        return all(len(hooks) == 1 for hooks in own) and not any(of_all)

    def _after(self) -> None:
        self.ended += 1
        if self._may_be():
            self.is_plain = [_numbers(group) for group in self.optimizer.param_groups] == self.groups
            self.stamps = self.all_stamps()

    def one_step(self) -> bool:
        """True if one step is the only detectable change since the save.

        Its gradients are available.
        """
        return (
            self.steps == self.ended == 1
            and self.is_plain
            and self.all_stamps() == self.stamps
            and all(
                p.grad is not None and self._is_as_it_was(p.grad, self.grads.get(id(p)))
                for _, p in self.parameters()
                if p.grad is not None or id(p) in self.grads
            )
        )

    @staticmethod
    def _is_as_it_was(grad: torch.Tensor, before: tuple[weakref.ref[torch.Tensor], Stamp] | None) -> bool:
        return before is not None and before[0]() is grad and stamp_of(grad) == before[1]

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()


def _numbers(group: Mapping[str, object]) -> JsonObject | None:
    """The numbers of a parameter group that a step needs, as JSON.

    None: a value does not survive JSON unchanged.
    """
    fields: JsonObject = {}
    for name in NUMBERS:
        if name not in group:
            continue
        value = group[name]
        some = value if isinstance(value, tuple | list) else (value,)
        for one in some:
            if not (one is None or type(one) in (bool, int) or (type(one) is float and math.isfinite(one))):
                return None
        fields[name] = list(some) if isinstance(value, tuple | list) else value
    return fields


class GradientSaves:
    """One rank's, of one optimizer."""

    def __init__(self) -> None:
        self._watch: _Watch | None = None
        self.asked: int | None = None  # the generation of the last call of `files`
        # The digests of its gradients. The code that records the save takes or drops them.
        self.marks: StepDigests | None = None
        self._last: int | None = None  # the generation that was saved last
        self._tried = False  # whether a step came out as it was trained, of one parameter
        self.is_refused = False  # the test of a replay failed: all saves are complete
        self._whole, self._light = Distributions(are_named=True), Distributions(are_named=True)
        self._sizes: dict[str, int] = {}  # of values that are no tensors, of the last save of all

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the steps of an optimizer from now on."""
        if self._watch is None or self._watch.optimizer is not optimizer:
            self.close()
            self._watch, self._tried, self.is_refused = _Watch(optimizer), False, False
            self._watch.begin()

    def files(self, one: SaveInput, generation: int, *, may: bool) -> tuple[list[ToSave], JsonObject | None]:
        """The files to save; for gradients alone, also the step's record.

        Collective.
        one: the values, with the watched optimizer.
        may: the previous generation is committed, and a replay can start from it.
        Raises: UcplError E693.
        """
        assert self._watch is not None
        self.asked, self.marks = generation, None
        sizes, made = None, None
        with suppress(Exception):  # all ranks get the error from DCP below
            flat, is_as_before = compare_input(one, self._whole)
            sizes = sizes_of(flat)
            # New values of non-tensors replace the old ones in place.
            if may and is_as_before and not self.is_refused and sizes == self._sizes and self._last == generation - 1:
                if self._watch.one_step() and (found := self._gradients(flat)) is not None:
                    made = collect_input(found[0]), found[1]
        if ranks().all_agree(made is not None) and made is not None:
            light, units = made
            files = [file for file in of_state(light, self._light) if file.name != METADATA]  # unused
            return files, self._step_record(files, units)
        self._sizes = sizes or {}
        return of_state(one, self._whole), None

    def attempt(self, newest: Commit, memory: Callable[[], Memory], rank: int) -> None:
        """Test the replay of a parameter's step with the first committed gradients.

        If the result differs from the trained value (for example with a compiled step), no gradients are saved from
        then on. Raises: UcplError E691, E692, E698.
        """
        if self._tried or self.is_refused or not newest.depth:
            return
        found = memory()
        try:
            Replay(found).attempt(rank)
            self._tried = True
        except UcplError as error:
            self.is_refused = error.diagnostics[0].code == "E698"
            raise
        finally:
            found.close()

    def saved(self, generation: int) -> None:
        """Steps are counted from here on."""
        self._last = generation
        if self._watch is not None:
            self._watch.saved()

    def _gradients(self, flat: dict[str, object]) -> tuple[dict[str, object], list[_Unit]] | None:
        """The values to save by name, and the parameters to replay.

        None: some values cannot be replayed.
        """
        assert self._watch is not None
        by_place: dict[tuple[object, ...], list[str]] = {}
        for name, value in flat.items():
            if isinstance(value, torch.Tensor) and part_of(value).numel():
                by_place.setdefault(place_of(value), []).append(name)
        # A rank saves nothing for values that it does not have.
        light = {n: v for n, v in flat.items() if not isinstance(v, torch.Tensor) or part_of(v).numel()}
        units = []
        for number, parameter in self._watch.parameters():
            if parameter.grad is None or not part_of(parameter).numel():
                continue
            unit = _Unit.of(number, parameter, self._watch.optimizer.state.get(parameter, {}), by_place)
            if unit is None:
                return None
            units.append(unit)
            for name in (*unit.weights, *unit.moments.values()):
                if light.pop(name, None) is None:  # two parameters are one tensor
                    return None
            light[GRADIENT + unit.name] = parameter.grad
        return light, units

    def _step_record(self, files: list[ToSave], units: list[_Unit]) -> JsonObject:
        """The record of the parameters whose gradients this rank saves.

        Their digests are taken later.
        """
        assert self._watch is not None
        mine = {one.name.rpartition("@")[0] for file in files for one in file.named}
        some = [unit for unit in units if GRADIENT + unit.name in mine]
        device = part_of(units[0].parameter).device.type if units else "cpu"
        fields: JsonObject = {unit.name: unit.to_json() for unit in some}
        self.marks = self._watch.marks = StepDigests([one for unit in some for one in unit.marked()])
        return {"optimizer": "AdamW", "by": environment(device), "groups": self._watch.groups, "units": fields}

    def drop(self) -> None:
        """Drop the last save; no step waits for its digests."""
        if self.marks is not None:
            self.marks.drop()

    def close(self) -> None:
        self.drop()
        if self._watch is not None:
            self._watch.end()
            self._watch = None


@define(eq=False)
class _Unit:
    """A parameter that the optimizer updates, with its names."""

    name: str  # its first weight's
    group: int
    parameter: torch.Tensor
    weights: list[str]  # one, and its second names
    moments: dict[str, str]
    tensors: list[torch.Tensor]  # the parameter and its moments after the step
    marks: list[str] = field(factory=list)  # of these

    @classmethod
    def of(
        cls, group: int, parameter: torch.Tensor, state: Mapping[str, object], by_place: Mapping[tuple[object, ...], list[str]]
    ) -> _Unit | None:  # fmt: skip
        """The unit of a parameter.

        None: it is not saved completely or not separately.
        """
        grad = parameter.grad
        assert grad is not None
        placed = parameter.placements if is_placed(parameter) else None
        if (grad.placements if is_placed(grad) else None) != placed:
            return None
        moments = {name: state[name] for name in MOMENTS if name in state}
        tensors = [parameter, *(t for t in moments.values() if isinstance(t, torch.Tensor))]
        if len(tensors) != len(moments) + 1 or state.keys() != {"step", *moments}:
            return None
        if not all(
            part_of(t).is_contiguous() and part_of(t).shape == part_of(parameter).shape for t in (*tensors, grad)
        ):
            return None
        weights = by_place.get(place_of(parameter), [])
        names = [by_place.get(place_of(t), []) for t in tensors[1:]]
        if not weights or any(len(some) != 1 for some in names):
            return None
        return cls(
            weights[0], group, parameter, weights, {n: some[0] for n, some in zip(moments, names, strict=True)}, tensors
        )

    def to_json(self) -> JsonObject:
        step = next(iter(self.moments.values())).rpartition(".")[0] + ".step"
        return {
            "group": self.group,
            "weights": self.weights,
            "moments": self.moments,
            "step": step,
            "marks": self.marks,
        }

    def marked(self) -> Iterator[tuple[str, torch.Tensor, list[str]]]:
        """The tensors to digest, by name, with the destination of each digest."""
        names = (self.name, *self.moments.values())
        return ((name, tensor, self.marks) for name, tensor in zip(names, self.tensors, strict=True))
