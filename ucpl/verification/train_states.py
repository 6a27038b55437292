"""Compare the values that are not tensors: groups, counters, schedules, client_state.

Two checkpoints are alike if training resumes from both in the same way. One may lack a value that the other has: that
is
no difference if the missing value has a default (a counter at 0), or if the format has no place for it and the loader
has its own (an elastic checkpoint and the optimizer's arguments). It is reported all the same. Any other missing value
is a
difference, in all formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field

from ucpl.extents import ParameterGroup, PickledCall, TrainState
from ucpl.extents.parallel_facts import CarriedByRank
from ucpl.files.carrying import unlike_callers
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.scalars import number_of
from ucpl.formats.leaving import run_values
from ucpl.formats.run_steps import STEPS, optimizer_steps, steps_of
from ucpl.records import define, frozen
from ucpl.verification.values import ValueTensors, apart, value_text

__all__ = ["NO_GROUPS", "NO_KINDS", "Difference", "StateComparison", "OneSidedValue", "compare_states", "counted_names"]

# Values that continue a run in the engine; the other blobs are made anew for each target.
COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # a run begins at 0
LOST = ("lr_scheduler", "module_extra")  # there is no value that silence could mean
OF_LOSSES = ("dynamic_loss_scale", "overflow")  # ignored between two dtypes if one is fp16
WHERE_KEPT = ("dynamic_loss_scale", "overflow", "clip_grad")  # some forms make them anew: compared where both keep them

Side = Literal["A", "B"]

_BEGINS = "a run begins there"
NO_GROUPS = "the other says nothing of training"
NO_KINDS = "a buffer and a frozen parameter look the same in these files"
_OTHER_DTYPE = "the other trains in another dtype, whose losses are not scaled"
_OF_THE_JOB = "an elastic checkpoint leaves the optimizer's arguments to the job"
_OF_THE_FORM = "an elastic checkpoint keeps a step for any optimizer"
_LEFT_OUT = "frozen parameters were left out when the checkpoint was saved"
_NOT_SAID = "the choice between Adam and AdamW: releases of torch before 2.7 do not record it in a group"
_DEFAULT = "the default of an optimizer"
_OF_OPTIMIZER = "the steps of the optimizer"
_OF_ITERATION = "the iteration of the run"
_OTHER_RANKS = "the other has files of another number of ranks"


@frozen
class Difference:
    """One difference between A and B.

    `kind` is tensor, dtype, shape, value, group, scalar or carried.
    """

    kind: str
    name: str  # tensor, group or key
    state: str = ""
    element: str = ""  # the first that differs, in full: `wte.weight[3, 17]`
    a: str = ""
    b: str = ""
    a_place: str = ""  # file: key[index]
    b_place: str = ""

    def __str__(self) -> str:
        what = f"{self.state} of {self.element or self.name}" if self.state else self.element or self.name
        ours = f"{self.a} in A" + (f" ({self.a_place})" if self.a_place else "")
        theirs = f"{self.b} in B" + (f" ({self.b_place})" if self.b_place else "")
        return f"{what}: {ours}, {theirs}"


@frozen
class OneSidedValue:
    """A value of one side alone, and the reason to allow it."""

    name: str
    value: str
    side: Side  # the one that says it
    why: str

    def __str__(self) -> str:
        other = "B" if self.side == "A" else "A"
        return f"{self.name}: {self.value} in {self.side}, nothing in {other} ({self.why})"


@define
class StateComparison:
    """The differences of two train states, and one side's own values.

    The count is of compared values.
    """

    differences: list[Difference] = field(factory=list)
    unsaid: list[OneSidedValue] = field(factory=list)
    count: int = 0


def compare_states(a: Checkpoint, b: Checkpoint) -> StateComparison:
    """Compare everything that is not a tensor of the model."""
    pair = _Pair(a.state, b.state, ValueTensors.of(a), ValueTensors.of(b), StateComparison())
    pair.groups()
    pair.counters()
    pair.schedules()
    pair.second_names()
    pair.loss_scale()
    pair.client_state()
    pair.further_ranks(a, b)
    return pair.found


@frozen
class _Pair:
    a: TrainState
    b: TrainState
    ours: ValueTensors
    theirs: ValueTensors
    found: StateComparison

    def hold(self, kind: str, name: str, left: object, right: object) -> None:
        """Two values, place by place."""
        self.found.count += 1
        said = apart(name, left, right, self.ours, self.theirs)
        self.found.differences += [Difference(kind, d.path, a=d.a, b=d.b) for d in said]

    def alone(self, kind: str, name: str, value: object, side: Side, why: str = "") -> None:
        """Record a value of one side.

        `why` gives the reason if that is no difference; without it, the value is lost.
        """
        self.found.count += 1
        text = value_text(number_of(value))
        if why:
            self.found.unsaid.append(OneSidedValue(name, text, side, why))
        else:
            a, b = (text, "nothing") if side == "A" else ("nothing", text)
            self.found.differences.append(Difference(kind, name, a=a, b=b))

    @property
    def is_scaled_in_one(self) -> bool:
        """Return True if one side alone trains in fp16."""
        ours, theirs = _flag(self.a, "fp16"), _flag(self.b, "fp16")
        return ours is not None and theirs is not None and ours != theirs

    # ---- groups ------------------------------------------------------------------------------------------------------

    def groups(self) -> None:
        """Groups by their members; and their order, by which schedules find them."""
        ours, theirs = self.a.groups, self.b.groups
        pairs = _paired(ours, theirs)
        for i, group in enumerate(ours):
            if i in pairs:
                self.hyper(group, theirs[pairs[i]], f"group {i}")
            else:
                self.lone_group(f"group {i}", group, "A", self.a, self.b)
        for j, group in enumerate(theirs):
            if j not in pairs.values():
                self.lone_group(f"group {j}", group, "B", self.b, self.a)
        order = [*pairs.values()]
        if order != sorted(order):
            a, b = (", ".join(map(str, x)) for x in (pairs, order))
            self.found.differences.append(Difference("group", "order of groups", a=a, b=b))

    def lone_group(self, name: str, group: ParameterGroup, side: Side, own: TrainState, other: TrainState) -> None:
        """A group that the other side lacks.

        It is no difference if it has all parameters and no settings.
        """
        text = f"{len(group.members)} parameters, the first {group.members[0] if group.members else 'none'}"
        self.found.count += 1
        if not other.groups and len(own.groups) == 1 and not group.hyper:
            self.found.unsaid.append(OneSidedValue(name, text, side, NO_GROUPS))
        else:
            a, b = (text, "nothing") if side == "A" else ("nothing", text)
            self.found.differences.append(Difference("group", name, a=a, b=b))

    def hyper(self, mine: ParameterGroup, yours: ParameterGroup, name: str) -> None:
        for key in dict.fromkeys([*mine.hyper, *yours.hyper]):
            where = f"{name}.{key}"
            if key in mine.hyper and key in yours.hyper:
                self.hold("group", where, mine.hyper[key], yours.hyper[key])
            elif key in mine.hyper:
                self.alone("group", where, mine.hyper[key], "A", _silence_of_hyper(key, mine, self.a, self.b))
            else:
                self.alone("group", where, yours.hyper[key], "B", _silence_of_hyper(key, yours, self.b, self.a))

    # ---- counters and schedules of a run
    # ---------------------------------------------------------------------------------

    def counters(self) -> None:
        for key in COUNTERS:
            if key in self.a.blobs and key in self.b.blobs:
                self.hold("carried", key, self.a.blobs[key], self.b.blobs[key])
            elif key in self.moved:
                self.hold_moved(key)
            else:
                self.counted("carried", key, self.a.blobs, self.b.blobs, key)
        for state in dict.fromkeys([*self.a.scalars, *self.b.scalars]):
            left, right = self.a.scalars.get(state, {}), self.b.scalars.get(state, {})
            for name in dict.fromkeys([*left, *right]):
                if name in left and name in right:
                    self.hold("scalar", f"{state}.{name}", left[name], right[name])
                elif not _is_zero({**left, **right}[name]):
                    self.counted("scalar", f"{state}.{name}", left, right, name)
            sides: tuple[tuple[Side, Mapping[str, object]], ...] = (("A", left), ("B", right))
            for side, some in sides:
                zeros = [n for n in some if (n not in left or n not in right) and _is_zero(some[n])]
                if zeros:
                    self.alone("scalar", f"{state} of {counted_names(zeros)}", 0, side, _BEGINS)

    def counted(self, kind: str, name: str, left: Mapping[str, object], right: Mapping[str, object], key: str) -> None:
        """A number that one side may lack.

        It is no difference if it is a run's first value.
        """
        side: Side = "A" if key in left else "B"
        values = left if side == "A" else right
        if key in values:
            other = self.b if side == "A" else self.a
            is_first = _is_zero(values[key])
            self.alone(kind, name, values[key], side, _BEGINS if is_first else _why_silent(name, values[key], other))

    def schedules(self) -> None:
        for key in (*LOST, *WHERE_KEPT):
            if key in OF_LOSSES and self.is_scaled_in_one:
                continue
            if key in self.a.blobs and key in self.b.blobs:
                self.hold("carried", key, self.a.blobs[key], self.b.blobs[key])
            elif key in self.moved:
                self.hold_moved(key)
            elif key in LOST and key in self.a.blobs:
                self.alone("carried", key, self.a.blobs[key], "A")
            elif key in LOST and key in self.b.blobs:
                self.alone("carried", key, self.b.blobs[key], "B")

    def second_names(self) -> None:
        """Values of frozen parameters that only a second name keeps.

        Stage 3 has no place for them.
        """
        ours, theirs = _second_names(self.a.blobs), _second_names(self.b.blobs)
        for name in dict.fromkeys([*ours, *theirs]):
            if name in ours and name in theirs:
                self.hold("carried", name, ours[name], theirs[name])
            else:
                side: Side = "A" if name in ours else "B"
                self.alone("carried", name, {**ours, **theirs}[name], side, _LEFT_OUT)

    def loss_scale(self) -> None:
        """The loss scale: an object or numbers, by form.

        Not compared without fp16.
        """
        if self.is_scaled_in_one:
            side: Side = "A" if _flag(self.a, "fp16") else "B"
            held = _scaling((self.a if side == "A" else self.b).blobs)
            text = f"{'dynamic' if held['dynamic'] else 'fixed'}, at {held['cur_scale']}"
            self.found.count += 1
            self.found.unsaid.append(OneSidedValue("loss_scaler", text, side, _OTHER_DTYPE))
            return
        if "loss_scaler" in self.a.blobs and "loss_scaler" in self.b.blobs:
            self.hold("carried", "loss_scaler", self.a.blobs["loss_scaler"], self.b.blobs["loss_scaler"])
            return
        left, right = _scaling(self.a.blobs), _scaling(self.b.blobs)
        if left["dynamic"] != right["dynamic"]:
            a, b = (f"{'dynamic' if x['dynamic'] else 'fixed'}, at {x['cur_scale']}" for x in (left, right))
            self.found.differences.append(Difference("carried", "loss_scaler", a=a, b=b))
            return
        keys = [key for key in left if key in right]
        self.hold("carried", "loss_scaler", {k: left[k] for k in keys}, {k: right[k] for k in keys})

    @property
    def moved(self) -> frozenset[str]:
        """Values that one form stores, and the other in client_state."""
        sides = (self.a, self.b), (self.b, self.a)
        keys = (*COUNTERS, *LOST)
        return frozenset(
            key for key in keys for x, y in sides if key in x.blobs and key in y.carried and key not in y.blobs
        )

    def hold_moved(self, key: str) -> None:
        """A value that one side has in client_state."""
        self.hold("carried", key, *(one.blobs.get(key, one.carried.get(key)) for one in (self.a, self.b)))

    def client_state(self) -> None:
        ours, theirs = run_values(self.a.carried), run_values(self.b.carried)
        for key in dict.fromkeys([*ours, *theirs]):
            if key in self.moved:
                continue
            held = ({key: one[key]} if key in one else {} for one in (ours, theirs))
            self.hold("carried", "client_state", *held)

    def further_ranks(self, a: Checkpoint, b: Checkpoint) -> None:
        """client_state of ranks whose values differ from those of the first rank."""
        of_a, of_b = unlike_callers(a), unlike_callers(b)
        ours, theirs = a.state.parallel.carried_by_rank, b.state.parallel.carried_by_rank
        if (ours.pp, ours.tp, ours.files) == (theirs.pp, theirs.tp, theirs.files):
            for rank in sorted({*of_a, *of_b}):
                left, right = ours.of[rank], theirs.of[rank]
                for key in dict.fromkeys((*of_a.get(rank, ()), *of_b.get(rank, ()))):
                    held = ({key: one[key]} if key in one else {} for one in (left, right))
                    self.hold("carried", f"client_state of rank {rank}", *held)
            return
        sides: tuple[tuple[Side, CarriedByRank, dict[int, tuple[object, ...]]], ...] = (
            ("A", ours, of_a),
            ("B", theirs, of_b),
        )
        for side, states, unlike in sides:
            for rank, keys in unlike.items():
                for key in keys:
                    name = f"client_state of rank {rank}.{key}"
                    self.alone("carried", name, states.of[rank][key], side, _OTHER_RANKS)


def _paired(ours: tuple[ParameterGroup, ...], theirs: tuple[ParameterGroup, ...]) -> dict[int, int]:
    """Pair the groups of A and B with the same members."""
    left: dict[frozenset[str], list[int]] = {}
    for j, group in enumerate(theirs):
        left.setdefault(frozenset(group.members), []).append(j)
    out = {}
    for i, group in enumerate(ours):
        same = left.get(frozenset(group.members))
        if same:
            out[i] = same.pop(0)
    return out


def counted_names(names: list[str]) -> str:
    """One name, or the first and how many more."""
    return names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


def _why_silent(name: str, value: object, other: TrainState) -> str:
    """The reason to lack a number that a side has."""
    if name != STEPS or value != steps_of(other):
        return ""
    return _OF_OPTIMIZER if value in optimizer_steps(other) else _OF_ITERATION


def _silence_of_hyper(key: str, group: ParameterGroup, own: TrainState, silent: TrainState) -> str:
    """The reason why the other side's group may lack a hyper-parameter.

    Empty if it is lost.
    """
    value = group.hyper[key]
    if _is_elastic(silent):
        return _OF_THE_JOB
    if _is_elastic(own) and key == "step" and "step" not in silent.scalars:
        return _OF_THE_FORM
    if key == "decoupled_weight_decay":
        return _NOT_SAID
    return _DEFAULT if value is None or value is False or isinstance(value, str) else ""


def _second_names(blobs: Mapping[str, object]) -> dict[str, object]:
    noted = blobs.get("left_out")
    found = noted.items() if isinstance(noted, dict) else ()
    return {str(name): one["value"] for name, one in found if isinstance(one, dict) and one.get("value") is not None}


def _flag(train_state: TrainState, name: str) -> bool | None:
    known = train_state.settings.get(name)
    return None if known is None else bool(known.value)


def _is_elastic(train_state: TrainState) -> bool:
    elastic = train_state.settings.get("elastic")
    return elastic is not None and bool(elastic.value)


def _is_zero(value: object) -> bool:
    number = number_of(value)
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number == 0


def _scaling(blobs: dict[str, object]) -> dict[str, object]:
    """The loss scaling of either form.

    `dynamic`, the scale, and the settings of a dynamic one.
    """
    kept = blobs.get("loss_scaler")
    if isinstance(kept, PickledCall):
        state: dict[str, object] = kept.state if isinstance(kept.state, dict) else {}
        dynamic = bool(state.get("dynamic", False))
    else:
        numbers = blobs.get("loss_scale_config")
        state = numbers if isinstance(numbers, dict) else {}
        dynamic = bool(state.get("dynamic_loss_scale", False))
    out: dict[str, object] = {"dynamic": dynamic, "cur_scale": state.get("cur_scale", 1.0)}
    if dynamic:
        moves = ("cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        out |= {key: state[key] for key in moves if key in state}
    return out
