"""State dicts in a value that torch.save wrote, found by their structure.

A dict of named tensors is a model. A dict with `state` and `param_groups` is an optimizer of torch. Names of keys decide
only between several models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from attrs import field

from ucpl.extents import Global, Key, PickledCall, Size, TensorRef
from ucpl.files.inert import HOLDERS
from ucpl.files.values import Value
from ucpl.files.wrappers import LOOSE, are_kept, bare
from ucpl.records import frozen
from ucpl.texts import is_text

__all__ = [
    "Dicts",
    "NamedTensors",
    "VALUES",
    "dicts_of",
    "is_average",
    "is_model",
    "is_of_module",
    "is_optimizer",
    "is_schedule",
    "is_wrapped",
    "joined",
    "named_tensors",
]

_DEPTH = 4  # dicts around a state dict
_ITEMS = 64  # entries of a list that are looked at
_STATE, _GROUPS = "state", "param_groups"
_EXTRA = "_extra_state"  # values of modules among tensors
_REBUILT = "torch._utils"
_FORMS = ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor", "_rebuild_nested_tensor", "_rebuild_wrapper_subclass")
_SCHEDULE = "last_epoch"  # of every schedule of torch, with one of these
_SCHEDULED = frozenset(("base_lrs", "_step_count", "_last_lr", "num_bad_epochs", "_schedulers"))
_AVERAGE = re.compile(
    r"(?:^|_)(?:ema|swa|avg|averaged?|averaging|shadow)(?=_|$)|average_model|model_?ema", re.IGNORECASE
)
# Classes of values that training scripts save next to state dicts.
VALUES = (
    HOLDERS
    # torchao's states, which torchao itself allows in files (add_safe_globals)
    | frozenset(f"torchao.optim.subclass_{kind.lower()}.OptimState{kind}" for kind in ("8bit", "4bit", "Fp8"))
)
COUNTED = "n_averaged"  # a buffer of torch.optim.swa_utils.AveragedModel, outside the wrapped module


@frozen(eq=False)
class Dicts:
    """State dicts of a value by place, without those inside others.

    `models` and `optimizers` are in the order of the file. An empty place is the value itself.
    """

    models: dict[Key, Value] = field(factory=dict)
    optimizers: dict[Key, Value] = field(factory=dict)


def dicts_of(top: Value) -> Dicts:
    """All models and optimizers in a value."""
    found = Dicts()
    _search(top, (), found, _DEPTH)
    return found


def _search(value: Value, place: Key, found: Dicts, depth: int) -> None:
    held = value.held
    if is_optimizer(held):
        found.optimizers[place] = value
    elif is_model(held):
        found.models[place] = value
    elif depth and isinstance(held, dict):
        for step, inner in value.mapping().items():
            if type(step) is str and is_text(step) and isinstance(inner, dict | list | tuple):
                _search(value.at(step), (*place, step), found, depth - 1)
    elif depth and isinstance(held, list | tuple) and len(held) <= _ITEMS and not isinstance(held, Size):
        for step, item in enumerate(held):
            if is_optimizer(item):
                found.optimizers[*place, step] = value.items()[step]
            elif not place and is_model(item):  # torch.save((model.state_dict(), optimizer.state_dict()), path)
                found.models[*place, step] = value.items()[step]


def is_model(held: object) -> bool:
    """Test for a dict of named tensors, some of them weights.

    States of random generators and counters alone are no model.
    """
    if not isinstance(held, dict) or not held:
        return False
    tensors = [one for one in held.values() if isinstance(one, TensorRef)]
    others = [name for name, one in held.items() if not isinstance(one, TensorRef)]
    if not all(type(name) is str and is_text(name) for name in held):
        return False
    if not all(is_of_module(name, held[name]) for name in others):
        return False
    return any(one.shape and one.storage.dtype.startswith(("f", "bf", "c")) for one in tensors)


def is_of_module(name: object, held: object) -> bool:
    """Test for a value of a module next to its weights.

    It is an extra state, or a tensor of another form, such as a sparse one.
    """
    made = held.function if isinstance(held, PickledCall) else None
    is_tensor = isinstance(made, Global) and made.module == _REBUILT and made.name in _FORMS
    return is_tensor or (isinstance(name, str) and name.endswith(_EXTRA))


def is_optimizer(held: object) -> bool:
    """Test for the state dict of a torch optimizer."""
    if not isinstance(held, dict) or not isinstance(held.get(_STATE), dict):
        return False
    groups = held.get(_GROUPS)
    return isinstance(groups, list) and all(isinstance(one, dict) and "params" in one for one in groups)


def is_schedule(held: object) -> bool:
    """Test for the state dict of a learning rate's schedule of torch."""
    return isinstance(held, dict) and _SCHEDULE in held and not _SCHEDULED.isdisjoint(held)


def is_average(place: Key) -> bool:
    """Test for a place of averaged weights, such as `model_ema`."""
    return any(isinstance(step, str) and _AVERAGE.search(step) is not None for step in place)


# ---- tensors of a model ----------------------------------------------------------------------------------------------


@frozen(eq=False)
class NamedTensors:
    """A state dict's tensors under the model's own names.

    `stored`: the name in the file of each. `lead`: the steps before all names that are no part of the model.
    """

    tensors: dict[str, TensorRef]
    stored: dict[str, str]
    aliases: dict[str, str]
    extra: dict[str, object]
    lead: str = ""
    by_stored: dict[str, str] = field(factory=dict)

    def find(self, name: str) -> str | None:
        """The tensor of an optimizer's or a user's name, or None.

        A second name gives its owner.
        """
        for one in (name, self.by_stored.get(name, ""), bare(name, LOOSE), bare(name.removeprefix(self.lead), LOOSE)):
            if one in self.tensors:
                return self.aliases.get(one, one)
        return None

    def find_all(self, names: Sequence[str]) -> list[str | None]:
        """The tensors of all names of an optimizer.

        They may lack a first step: an optimizer can be made from a part of the saved module.
        """
        found = [self.find(name) for name in names]
        if names and None in found:
            end = f".{names[found.index(None)]}"
            leads = [name.removesuffix(end) + "." for name in self.tensors if name.endswith(end)]
            for lead in leads:
                if None not in (longer := [self.find(lead + name) for name in names]):
                    return longer
        return found


def named_tensors(model: Value, lead: str | None = None, *, any_lead: bool = False) -> NamedTensors:
    """The tensors of a state dict, without the steps of wrappers.

    lead: the steps to remove before all names; None: those of wrappers, and a common step `model`. any_lead: also another
    common step, the attribute of a module that holds the network.
    """
    held = {name: one.held for name, one in model.named()}
    tensors = {name: one for name, one in held.items() if isinstance(one, TensorRef)}
    names, found = _bare_names([*tensors], lead, any_lead=any_lead)
    extra = {name: one for name, one in held.items() if not isinstance(one, TensorRef)}
    out = {names[name]: one for name, one in tensors.items()}
    return NamedTensors(out, {names[name]: name for name in tensors}, _ties(out), extra, found, names)


def joined(models: Mapping[Key, NamedTensors]) -> NamedTensors:
    """The tensors of several models as one.

    Names begin with the places of the models.
    """
    ways = {place: ".".join(map(str, place)) + "." for place in models}
    tensors = {way + name: one for place, way in ways.items() for name, one in models[place].tensors.items()}
    return NamedTensors(
        tensors,
        {way + name: way + one for place, way in ways.items() for name, one in models[place].stored.items()},
        _ties(tensors),
        {way + name: one for place, way in ways.items() for name, one in models[place].extra.items()},
        by_stored={
            way + one: way + name for place, way in ways.items() for one, name in models[place].by_stored.items()
        },
    )


def _bare_names(stored: list[str], lead: str | None, *, any_lead: bool) -> tuple[dict[str, str], str]:
    """Each name without wrappers, and the steps before all names."""
    own = [name for name in stored if name != COUNTED]
    removed = lead if lead is not None and all(name.startswith(lead) for name in own) else ""
    if lead is None:
        removed = "".join(_leads(own, any_lead=any_lead))
    made = {name: bare(name.removeprefix(removed)) for name in stored}
    if len(set(made.values())) < len(made) or not all(made.values()):
        return {name: name for name in stored}, ""
    return made, removed


def is_wrapped(names: Collection[str]) -> bool:
    """Test for a first step of names that reads as a wrapper's."""
    return any(_leads([*names], any_lead=False))


def _leads(names: list[str], *, any_lead: bool) -> Iterator[str]:
    """First steps that all names share, if they are those of wrappers."""
    words = LOOSE | {"model"}
    while names and not are_kept():
        first = names[0].partition(".")[0] + "."
        if not all(name.startswith(first) and name != first for name in names):
            return
        if first[:-1] not in words:
            inner = {name.removeprefix(first).partition(".")[0] for name in names}
            if not any_lead or any(step.isdecimal() for step in inner):
                return
            any_lead = False
        yield first
        names = [name.removeprefix(first) for name in names]


def _ties(tensors: Mapping[str, TensorRef]) -> dict[str, str]:
    """Second names of tensors that are one view of one storage."""
    seen: dict[object, str] = {}
    out = {}
    for name, one in tensors.items():
        if not prod(one.shape):
            continue
        owner = seen.setdefault((one.storage.name, one.storage.dtype, one.offset, one.shape, one.stride), name)
        if owner != name:
            out[name] = owner
    return out
