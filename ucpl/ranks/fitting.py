"""Whether a model and its optimizer have the tensors that a checkpoint has, asked of all ranks before anything is read.

Names are those of the checkpoint's index, as torch.distributed.checkpoint.state_dict calls what a job has. Not here: reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ucpl.errors import Label, fail
from ucpl.layout.near import nearest
from ucpl.records import frozen

__all__ = ["Asked", "demand_fit", "demand_one", "is_empty", "tied"]

MODEL, STATE = "model.", "optim.state."
_MASTER = ".fp32"  # a job without masters of its own takes the weights
_SHOWN = 5
Index = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]


@frozen
class Asked:
    """What this rank asks for.

    trained: parameters, as the checkpoint calls them, that its optimizer holds.
    empty:  those without elements. No checkpoint need have them, nor states of them: there is nothing to fill.
    """

    wanted: Mapping[str, object]
    trained: tuple[str, ...] = ()
    optimizer: str = ""  # its class; empty: weights are asked for
    src: str = ""
    empty: frozenset[str] = frozenset()

    def needs(self, name: str) -> bool:
        value, owner = self.wanted[name], name.removeprefix(STATE).rpartition(".")[0]
        return not is_empty(value) and owner not in self.empty


def demand_fit(asked: Asked, index: Index, strict: bool, group: dist.ProcessGroup | None) -> dict[str, object]:
    """What can be filled of what is asked for: all of it, where that is strict. All ranks raise, or none.

    What the checkpoint has and no rank asks for counts as well: of the weights all of it, of states those of parameters that
    an optimizer holds. Raises: UcplError E646.
    """
    found = {name: value for name, value in asked.wanted.items() if name in index}
    said = [_shape(name, value, index[name]) for name, value in found.items()]
    without = [name for name in asked.wanted if name not in index and asked.needs(name)]
    mine = (without, list(asked.wanted), list(asked.trained), said)
    every = [mine]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        every = [mine] * dist.get_world_size(group)
        dist.all_gather_object(every, mine, group=group)
    for text in (text for one in every for text in one[3] if text):
        _refuse(asked, text, "a tensor of another shape is another tensor: load into the model that was saved")
    if not strict:
        return found
    lacking, names, trained = (dict.fromkeys(x for one in every for x in one[i]) for i in range(3))
    if lacking:
        _lacking(asked, list(lacking), index)
    _left(asked, [name for name in index if name not in names and _is_kind(name, asked, trained, index[name])])
    return found


def _shape(name: str, value: object, entry: TensorStorageMetadata | BytesStorageMetadata) -> str:
    if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
        return ""
    here, there = tuple(value.shape), tuple(entry.size)
    return "" if here == there else f"{_called(name)} is {list(here)} in the job, and {list(there)} in the checkpoint"


def _is_kind(name: str, asked: Asked, trained: Iterable[str], entry: object) -> bool:
    """Whether a name of the checkpoint should have been asked for here: what has no elements may be left out."""
    if isinstance(entry, TensorStorageMetadata) and 0 in entry.size:
        return False
    if not asked.optimizer:
        return name.startswith(MODEL)
    owner = name.removeprefix(STATE).rpartition(".")[0]
    return name.startswith(STATE) and owner in trained and not name.endswith(_MASTER)


def _lacking(asked: Asked, names: Sequence[str], index: Index) -> NoReturn:
    first = _called(names[0])
    if not asked.optimizer:
        close = nearest(names[0], [name for name in index if name.startswith(MODEL) and name not in asked.wanted])
        what = f"the model has {first}, and the checkpoint has not"
        why = (
            f"the checkpoint has {close.removeprefix(MODEL)}: rename= says what it calls a parameter; " if close else ""
        )
        _refuse(asked, what, why + "strict=False leaves what it lacks as it is", names[1:])
    owner = names[0].removeprefix(STATE).rpartition(".")[0]
    states = [name.rpartition(".")[2] for name in index if name.startswith(f"{STATE}{owner}.")]
    what = f"{asked.optimizer} keeps {first}, and the checkpoint has {', '.join(states) or 'no state'} of {owner}"
    why = "another optimizer made it" if states else "it was not trained there, or is another name of a tensor that was"
    _refuse(asked, what, f"{why}: strict=False begins anew what it lacks, and None for the optimizer all", names[1:])


def _left(asked: Asked, names: Sequence[str]) -> None:
    if not names:
        return
    first = _called(names[0])
    if not asked.optimizer:
        remedy = "load into the model that was saved; strict=False leaves out what the model has not"
        _refuse(asked, f"the checkpoint has {first}, and the model has not", remedy, names[1:])
    what = f"the checkpoint has {first}, which {asked.optimizer} does not keep"
    remedy = "load with the optimizer that was saved; strict=False leaves it out, and None for the optimizer all"
    _refuse(asked, what, remedy, names[1:])


def _called(name: str) -> str:
    if name.startswith(MODEL):
        return name.removeprefix(MODEL)
    owner, _, state = name.removeprefix(STATE).rpartition(".")
    return f"{state} of {owner}"


def _refuse(asked: Asked, what: str, remedy: str, more: Sequence[str] = ()) -> NoReturn:
    also = ", ".join(_called(name) for name in more[:_SHOWN])
    rest = f" and {len(more) - _SHOWN} more" if len(more) > _SHOWN else ""
    fail("E646", what + (f"; so {also}{rest}" if more else ""), Label(asked.src), remedy=remedy)


def is_empty(value: object) -> bool:
    """A tensor without elements in the whole job: what a rank has of it says nothing."""
    return isinstance(value, torch.Tensor) and 0 in value.shape


def tied(weights: Mapping[str, object]) -> dict[str, str]:
    """Names of one tensor: each further one, and the first."""
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    out: dict[str, str] = {}
    for name, value in weights.items():
        if isinstance(value, torch.Tensor) and (local := _local(value)).numel():
            owner = first.setdefault((local.data_ptr(), local.shape, local.stride()), name)
            if owner != name:
                out[name] = owner
    return out


def demand_one(name: str, owner: str, values: tuple[torch.Tensor, torch.Tensor], src: str) -> None:
    """What the model has once the checkpoint has once, or twice the same, as this rank sees it. Raises: UcplError E646."""
    if not torch.equal(*map(_local, values)):
        remedy = "load into a model that does not tie them, or give rename= that calls both by the name that is meant"
        what = f"{name} and {owner} are one tensor in the model, and differ in the checkpoint"
        fail("E646", what, Label(src), remedy=remedy)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
