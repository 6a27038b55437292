"""Pickled modules and flattened optimizers, as state dicts.

    torch.save(model), {"model": model}
    {"state.NAME.exp_avg": tensor, ..., "param_groups.NAME.lr": 0.1, ...}     of flatten_optimizer_state_dict=True

A pickle of a module is an object of its class with parameters, buffers and parts by name. No class is imported: the names
and tensors are those of the module's state dict. A flattened optimizer has a group for parameters with equal
hyper-parameters. Sources: torch 2.13, nn/modules/module.py, distributed/checkpoint/state_dict.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from attrs import field

from ucpl.extents import Global, Key, PickledCall, TensorRef
from ucpl.extents.account import NotRead
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.records import frozen

__all__ = ["not_read_in", "read"]

_PARTS, _PARAMETERS, _BUFFERS, _PASSING = "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"
_DEPTH = 4  # of dicts around a module
_STATE, _GROUPS, _NAMES = "state", "param_groups", "param_names"


@frozen
class Unpacked(TorchFile):
    """A file with state dicts in place of their other forms.

    `classes`: the class of each module by place.
    """

    classes: dict[Key, str] = field(factory=dict)


def read(root: Path, file: str) -> TorchFile:
    """A torch file, with state dicts in place of other forms."""
    part = read_torch_file(root, file)
    classes: dict[Key, str] = {}
    value = _unpacked(part.value, (), classes)
    if value is part.value:
        return part
    return Unpacked(part.root, part.file, part.archive, value, part.storages, part.version, classes)


def not_read_in(part: TorchFile) -> Iterator[NotRead]:
    """The classes of modules of a file: only their tensors are read."""
    for place, name in part.classes.items() if isinstance(part, Unpacked) else ():
        shown = "/".join(map(str, place)) or part.file
        yield NotRead(f"{shown}: class {name}", "the tensors of a pickled module are read, and no class", kind="value")


def _unpacked(value: object, place: Key, classes: dict[Key, str]) -> object:
    if isinstance(value, PickledCall) and _is_module(value):
        classes[place] = _name(value)
        return OrderedDict(_tensors(value, "", frozenset()))
    if isinstance(value, dict) and _is_flattened(value):
        return _nested(value)
    if type(value) is dict and len(place) < _DEPTH:
        made = {key: _unpacked(one, (*place, str(key)), classes) for key, one in value.items()}
        return made if any(made[key] is not value[key] for key in value) else value
    return value


def _is_flattened(held: dict[object, object]) -> bool:
    """Test for a flattened optimizer."""
    words = {key.partition(".")[0] if type(key) is str and key.count(".") > 1 else "" for key in held}
    return _GROUPS in words and words <= {_STATE, _GROUPS}


def _nested(held: dict[object, object]) -> dict[str, object]:
    """The optimizer's state dict, by names of parameters."""
    hypers: dict[str, dict[str, object]] = {}
    states: dict[str, dict[str, object]] = {}
    for key, one in held.items():
        word, _, rest = str(key).partition(".")
        name, _, last = rest.rpartition(".")
        (states if word == _STATE else hypers).setdefault(name, {})[last] = one
    rows: dict[str, tuple[dict[str, object], list[str]]] = {}
    for name in dict.fromkeys((*hypers, *states)):
        hyper = hypers.get(name, {})
        rows.setdefault(repr(sorted(hyper.items())), (hyper, []))[1].append(name)
    groups = []
    for hyper, names in rows.values():
        said = hyper.get(_NAMES)
        is_order = isinstance(said, list) and sorted(map(str, said)) == sorted(names)
        groups.append({**hyper, "params": said if is_order else names})
    return {_STATE: states, _GROUPS: groups}


def _name(module: PickledCall) -> str:
    of = module.function
    return f"{of.module}.{of.name}" if isinstance(of, Global) else "of no name"


def _is_module(value: PickledCall) -> bool:
    held = value.state
    return (
        isinstance(value.function, Global)
        and isinstance(held, dict)
        and all(isinstance(held.get(key), dict) for key in (_PARAMETERS, _BUFFERS, _PARTS))
    )


def _tensors(module: PickledCall, lead: str, above: frozenset[int]) -> Iterator[tuple[str, TensorRef]]:
    """The state dict of a module. above: the modules around it."""
    held = module.state
    assert isinstance(held, dict)
    passing = held.get(_PASSING)
    for kind in (_PARAMETERS, _BUFFERS):
        for name, one in held[kind].items():
            is_kept = kind == _PARAMETERS or not (isinstance(passing, set | frozenset) and name in passing)
            if isinstance(one, TensorRef) and is_kept:
                yield f"{lead}{name}", one
    for name, part in held[_PARTS].items():
        if isinstance(part, PickledCall) and _is_module(part) and id(part) not in above:
            yield from _tensors(part, f"{lead}{name}.", above | {id(module)})
