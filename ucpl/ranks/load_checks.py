"""Check that a model and its optimizer fit a checkpoint.

All ranks compare their tensors before anything is read. Names are those of the checkpoint's index, as
torch.distributed.checkpoint.state_dict names tensors of a job. Not here: reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, cast

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from ucpl.errors import Label, fail
from ucpl.files.scalars import is_counted
from ucpl.layout.name_remedies import nearest
from ucpl.live.agreement import JobRanks
from ucpl.live.tensors import Place, flat_bytes, is_nested, overlap, parts_of, place_of, unreadable, unwritable
from ucpl.records import frozen

__all__ = ["BY_TORCH_FILE", "LoadRequest", "check_fit", "check_tied", "is_empty", "tied"]

MODEL, STATE = "model.", "optim.state."
BY_TORCH_FILE = "`ucpl convert SRC ckpt.pt --to torch_file`, and the optimizer's load_state_dict takes it"
_MASTER = ".fp32"  # a job without masters takes the weights
_SHOWN = 5
Index = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]


@frozen
class LoadRequest:
    """The request of this rank.

    trained: parameters, as the checkpoint calls them, that its optimizer holds.
    empty:  those without elements. A checkpoint may lack them and their states: there is nothing to fill.
    """

    wanted: Mapping[str, object]
    trained: tuple[str, ...] = ()
    optimizer: str = ""  # its class; empty: weights are asked for
    src: str = ""
    empty: frozenset[str] = frozenset()
    has_shapes_alone: bool = False  # its tensors have no memory, and none is filled

    def needs(self, name: str) -> bool:
        value, owner = self.wanted[name], name.removeprefix(STATE).rpartition(".")[0]
        return not is_empty(value) and owner not in self.empty


def check_fit(asked: LoadRequest, index: Index, strict: bool, ranks: JobRanks) -> dict[str, object]:
    """The parts of the request that can be filled; all, if strict.

    All ranks raise, or none. Everything in the checkpoint that no rank requests counts as well: of the weights all of
    it, of states those of parameters that an optimizer holds. Raises: UcplError E646.
    """
    with ranks.agreeing():
        _demand_writable(asked)
        found = {name: value for name, value in asked.wanted.items() if name in index}
        said = [_shape(name, value, index[name]) for name, value in found.items()]
        without = [name for name in asked.wanted if name not in index and asked.needs(name)]
    dtypes = {name: str(value.dtype) for name, value in found.items() if isinstance(value, torch.Tensor)}
    mine = (without, list(asked.wanted), list(asked.trained), said, dtypes)
    every = cast("list[tuple[list[str], list[str], list[str], list[str], dict[str, str]]]", ranks.all(mine))
    for rank, text in ((rank, text) for rank, one in enumerate(every) for text in one[3] if text):
        _refuse(
            asked,
            text,
            "a tensor of another shape is another tensor: load into the model that was saved",
            where=_on(rank, every),
        )
    known: dict[str, tuple[int, str]] = {}
    for rank, one in enumerate(every):
        for name, dtype in one[4].items():
            first, there = known.setdefault(name, (rank, dtype))
            if there != dtype:
                what = f"{_called(name)} is {there} on rank {first}, and {dtype} on rank {rank}"
                _refuse(asked, what, "give it one type on all ranks")
    if not strict:
        return found
    lacking, names, trained = (dict.fromkeys(x for one in every for x in one[i]) for i in range(3))
    if lacking:
        some = [rank for rank, one in enumerate(every) if one[0]]
        _lacking(asked, list(lacking), index, _on(some[0], every) if len(some) < len(every) else "")
    _left(asked, [name for name in index if name not in names and _is_kind(name, asked, trained, index[name])])
    return found


def _on(rank: int, every: Sequence[object]) -> str:
    return f" (rank {rank})" if len(every) > 1 else ""


def _demand_writable(asked: LoadRequest) -> None:
    """Check that each tensor can be filled, and shares no memory.

    Two names of one tensor may share it. Raises: UcplError E646.
    """
    one_each: dict[Place, tuple[str, torch.Tensor]] = {}
    for name, value in asked.wanted.items():
        if isinstance(value, list | tuple | dict) and not is_counted(value):
            _refuse(asked, f"{_called(name)} has tensors in a {type(value).__name__}", BY_TORCH_FILE)
        if not isinstance(value, torch.Tensor) or asked.has_shapes_alone:
            continue
        if why := unwritable(value):
            remedy = "give a model and an optimizer whose tensors are in memory"
            _refuse(asked, f"{_called(name)} of the job is {why}", remedy)
        for part in parts_of(value):
            one_each.setdefault(place_of(part), (_called(name), part))
    if (pair := overlap(one_each.values())) is not None:
        _refuse(asked, f"{pair[0]} and {pair[1]} share memory in the job, and are not one tensor", "clone one of them")


def _shape(name: str, value: object, entry: TensorStorageMetadata | BytesStorageMetadata) -> str:
    if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
        return ""
    here, there = tuple(value.shape), tuple(entry.size)
    return "" if here == there else f"{_called(name)} is {list(here)} in the job, and {list(there)} in the checkpoint"


def _is_kind(name: str, asked: LoadRequest, trained: Iterable[str], entry: object) -> bool:
    """True if the request should have a name of the checkpoint.

    A tensor without elements may be absent.
    """
    if isinstance(entry, TensorStorageMetadata) and 0 in entry.size:
        return False
    if not asked.optimizer:
        return name.startswith(MODEL)
    owner = name.removeprefix(STATE).rpartition(".")[0]
    return name.startswith(STATE) and owner in trained and not name.endswith(_MASTER)


def _lacking(asked: LoadRequest, names: Sequence[str], index: Index, where: str) -> NoReturn:
    first = _called(names[0])
    if not asked.optimizer:
        close = nearest(names[0], [name for name in index if name.startswith(MODEL) and name not in asked.wanted])
        what = f"the model has {first}, and the checkpoint has not"
        why = (
            f"the checkpoint has {close.removeprefix(MODEL)}: rename= gives its name of a parameter; " if close else ""
        )
        _refuse(asked, what, why + "strict=False leaves the missing ones as they are", names[1:], where)
    owner = names[0].removeprefix(STATE).rpartition(".")[0]
    states = [name.rpartition(".")[2] for name in index if name.startswith(f"{STATE}{owner}.")]
    what = f"{asked.optimizer} keeps {first}, and the checkpoint has {', '.join(states) or 'no state'} of {owner}"
    why = "another optimizer made it" if states else "it was not trained there, or is another name of a tensor that was"
    _refuse(
        asked,
        what,
        f"{why}: strict=False starts the missing ones anew, and None for the optimizer all",
        names[1:],
        where,
    )


def _left(asked: LoadRequest, names: Sequence[str]) -> None:
    if not names:
        return
    first = _called(names[0])
    if not asked.optimizer:
        remedy = "load into the model that was saved; strict=False skips the tensors that the model lacks"
        _refuse(asked, f"the checkpoint has {first}, and the model has not", remedy, names[1:])
    what = f"the checkpoint has {first}, which {asked.optimizer} does not keep"
    remedy = "load with the optimizer that was saved; strict=False leaves it out, and None for the optimizer all"
    _refuse(asked, what, remedy, names[1:])


def _called(name: str) -> str:
    if name.startswith(MODEL):
        return name.removeprefix(MODEL)
    owner, _, state = name.removeprefix(STATE).rpartition(".")
    return f"{state} of {owner}"


def _refuse(asked: LoadRequest, what: str, remedy: str, more: Sequence[str] = (), where: str = "") -> NoReturn:
    also = ", ".join(_called(name) for name in more[:_SHOWN])
    rest = f" and {len(more) - _SHOWN} more" if len(more) > _SHOWN else ""
    fail("E646", what + (f"; so {also}{rest}" if more else "") + where, Label(asked.src), remedy=remedy)


def is_empty(value: object) -> bool:
    """True for a tensor without elements in the entire job.

    The part of one rank does not show it.
    """
    return isinstance(value, torch.Tensor) and not is_nested(value) and 0 in value.shape


def tied(weights: Mapping[str, object]) -> dict[str, str]:
    """Names of one tensor: each further one, and the first."""
    first: dict[tuple[Place, ...], str] = {}
    out: dict[str, str] = {}
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or unreadable(value):
            continue
        if places := tuple(place_of(part) for part in parts_of(value) if part.numel()):
            owner = first.setdefault(places, name)
            if owner != name:
                out[name] = owner
    return out


def check_tied(name: str, owner: str, values: tuple[torch.Tensor, torch.Tensor], src: str) -> None:
    """Check that two values of one tensor in the checkpoint are equal.

    The model has it once. As this rank sees it. Raises: UcplError E646.
    """
    if not torch.equal(*map(flat_bytes, values)):
        remedy = "load into a model that does not tie them, or give rename= that calls both by the name that is meant"
        what = f"{name} and {owner} are one tensor in the model, and differ in the checkpoint"
        fail("E646", what, Label(src), remedy=remedy)
