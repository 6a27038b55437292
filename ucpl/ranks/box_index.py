"""The tensors of a checkpoint under a job's names, as boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import evolve, field
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, Extent, Scalar, TensorRef, key_text
from ucpl.formats.leaving import OPTIMIZER_VALUES, empty_tensors
from ucpl.formats.optimizer_hypers import counts_in_tensors
from ucpl.layout.layout import Policy
from ucpl.live.tensors import tensor_of
from ucpl.placement.placement import LOOSE
from ucpl.ranks.exchange import dtype_of
from ucpl.records import frozen
from ucpl.runtime.reading import packed
from ucpl.verification.values import ValueTensors

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.placement import Part, Placement

__all__ = [
    "GROUPS",
    "MODEL",
    "STATES",
    "Chunk",
    "CheckpointIndex",
    "chunk_at",
    "index_checkpoint",
    "number_as_tensor",
    "with_tensors",
]

Ints = tuple[int, ...]
REDUCED = (Policy.MEAN, Policy.SUM, Policy.MAX)
FIRM = (Policy.SAME, *REDUCED, Policy.LEAD, Policy.ANY)  # whose copy is taken first
MODEL, STATES, GROUPS = "model.{name}", "optim.state.{name}.{state}", "optim.param_groups.{group}.{key}"
MASTER = "fp32"  # if no line gives the state from which weights derive


@frozen(eq=False)
class Chunk:
    """A box of a tensor and its place in a file.

    Its first element, and the step of each dim, in elements of the file's tensor.
    """

    extent: Extent
    offset: int
    stride: Ints


@frozen(eq=False)
class CheckpointIndex:
    """The content of a checkpoint under the names of a job."""

    metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(factory=dict)
    chunks: dict[MetadataIndex, Chunk] = field(factory=dict)
    values: dict[str, object] = field(factory=dict)  # values that are no tensors, or have no dims


def index_checkpoint(
    checkpoint: Checkpoint, placement: Placement, names: tuple[str, str, str], wide: frozenset[str] = frozenset()
) -> CheckpointIndex:
    """Everything that a checkpoint has, under a job's names.

    wide: names of weights that are their masters, if these are stored. Raises: UcplError E642 for a tensor that is no
    copy of a box.
    """
    model, states, groups = names
    found = CheckpointIndex()
    held: dict[tuple[str, str], list[tuple[Part, int]]] = {}
    for part in placement.parts:
        if not part.is_alias:
            for row, tensor in enumerate(part.pieces.tensor.tolist()):
                held.setdefault((part.state, placement.tensors[tensor]), []).append((part, row))
    derived = {d.state: d.source for d in placement.layout.derived}
    origin = derived.get("weight", MASTER)
    # ZeRO-3 stores masters alone: requested weights are rounded from them.
    of_master = {
        path
        for state, path in held
        if (state == derived.get("weight") and ("weight", path) not in held)
        or (state == origin and model.format(name=path) in wide)
    }
    for (state, path), rows in held.items():
        name = model.format(name=path) if state == "weight" else states.format(name=path, state=state)
        if state != "weight" or path not in of_master:
            _add(found, name, placement.layout.tensors[path].of(state).counts, _boxes(checkpoint, rows))
        if state == origin and path in of_master:
            counts = placement.layout.tensors[path].counts
            _add(found, model.format(name=path), counts, _boxes(checkpoint, rows))
    for alias, owner in checkpoint.state.aliases.items():
        if model.format(name=owner) in found.metadata:
            counts = placement.layout.tensors[owner].counts
            state = origin if owner in of_master else "weight"
            _add(found, model.format(name=alias), counts, _boxes(checkpoint, held[state, owner]))
    _add_empty(found, checkpoint, model)
    _add_values(found, checkpoint, states, groups)
    _add_others(found, checkpoint, states)
    return found


Boxes = list[tuple[Ints, Ints, Chunk]]


def _boxes(checkpoint: Checkpoint, rows: Sequence[tuple[Part, int]]) -> Boxes:
    """Boxes of one tensor: offset, shape and place of each.

    DCP identifies a box by its offset. Copies may be cut at other places: of boxes with one offset, the one that
    contains all others is taken. A copy that may differ is skipped if one that may not has its elements. Raises:
    UcplError E642.
    """
    out: dict[Ints, tuple[Ints, Chunk]] = {}
    firm: list[tuple[Policy, Ints, Ints]] = []  # the policy, low and high of the boxes that were taken
    for part, row in sorted(rows, key=lambda one: FIRM.index(_policy(one))):
        pieces = part.pieces
        home = part.homes.each[int(pieces.home[row])]
        extent = checkpoint.extents[home.file, home.key]
        place = Label(home.file, where=key_text(home.key))
        low, high = (tuple(a[row].tolist()) for a in (pieces.low, pieces.high))
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        chunk = chunk_at(extent, shape, int(pieces.offset[row]), tuple(pieces.stride[row].tolist()))
        if part.value != (1.0, 0.0) or part.values or part.scaled or chunk is None or extent.dtype not in DTYPES:
            what = "is stored by a value of its own, by scales, or in an order that is not its own"
            fail("E642", f"{key_text(home.key)} of {home.file} {what}", place)
        policy = _policy((part, row))
        others = [one for one in firm if _meet((low, high), one[1:])] if policy != FIRM[0] else []
        if policy in REDUCED and others:
            fail("E642", f"{key_text(home.key)} of {home.file} is a {policy.word} of copies", place)
        tighter = [one for one in others if one[0] != policy]
        if policy in LOOSE and tighter:
            if any(_has(one[1:], (low, high)) for one in tighter):
                continue
            what = "is a copy that may differ, and overlaps a part of others"
            fail("E642", f"{key_text(home.key)} of {home.file} {what}", place)
        firm.append((policy, low, high))
        known = out[low][0] if low in out else None
        if known is None or all(a <= b for a, b in zip(known, shape, strict=True)):
            if known != shape:
                out[low] = shape, chunk
        elif not all(b <= a for a, b in zip(known, shape, strict=True)):
            what = "are cut so that two parts begin together and neither has the other"
            fail("E642", f"copies of {key_text(home.key)} of {home.file} {what}", place)
    return [(low, shape, chunk) for low, (shape, chunk) in out.items()]


def chunk_at(extent: Extent, shape: Ints, offset: int, stride: Ints) -> Chunk | None:
    """A box by the facts about the file's tensor.

    None if no box of it has the order of the elements. A tensor that was transposed when it was saved keeps its
    order: its own strides are taken, if dims of the box are its dims.
    """
    if extent.is_contiguous:
        return Chunk(extent, offset, stride)
    rows, more = packed(extent.shape, 1), len(shape) - len(extent.shape)
    own = zip(shape, stride, (*rows, *(0,) * more), strict=True) if more >= 0 else ()
    if more < 0 or any(n != 1 and step != row for n, step, row in own):
        return None
    begin = sum(offset // row % n * step for row, n, step in zip(rows, extent.shape, extent.stride, strict=True))
    return Chunk(extent, begin, (*extent.stride, *(0,) * more))


def _policy(one: tuple[Part, int]) -> Policy:
    part, row = one
    return Policy(int(part.pieces.policy[row]))


def _meet(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> bool:
    return all(max(a, c) < min(b, d) for a, b, c, d in zip(*one, *other, strict=True))


def _has(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> bool:
    return all(a <= c and d <= b for a, b, c, d in zip(*one, *other, strict=True))


def _add(found: CheckpointIndex, name: str, counts: Ints, boxes: Boxes) -> None:
    """Add a tensor under its name.

    After its own dims, boxes have dims of 1.
    """
    width = len(counts)
    chunks = [ChunkStorageMetadata(torch.Size(low[:width]), torch.Size(shape[:width])) for low, shape, _ in boxes]
    dtype = dtype_of(boxes[0][2].extent.dtype)
    found.metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(counts), chunks)
    for i, (low, _, chunk) in enumerate(boxes):
        own = Chunk(chunk.extent, chunk.offset, chunk.stride[:width])
        found.chunks[MetadataIndex(name, torch.Size(low[:width]), i)] = own


def _add_empty(found: CheckpointIndex, checkpoint: Checkpoint, model: str) -> None:
    """Add tensors without elements, which no placement has.

    A dtype and a shape, and no boxes, so that nothing is read.
    """
    for path, one in empty_tensors(checkpoint.state, checkpoint.root).items():
        properties = TensorProperties(dtype=dtype_of(one.dtype))
        known = TensorStorageMetadata(properties, torch.Size(one.shape), [])
        found.metadata.setdefault(model.format(name=path), known)


def _add_values(found: CheckpointIndex, checkpoint: Checkpoint, states: str, groups: str) -> None:
    """Steps, and hyper-parameters of groups."""
    group_of = {name: group for group in checkpoint.state.groups for name in group.every}
    for state, each in checkpoint.state.scalars.items():
        for path, value in each.items():
            name = states.format(name=path, state=state)
            tensor = number_as_tensor(value)
            if type(value) is int and not counts_in_tensors(group_of.get(path)):
                found.values[name], found.metadata[name] = value, BytesStorageMetadata()
            elif tensor is not None:
                chunk = ChunkStorageMetadata(torch.Size(()), torch.Size(()))
                found.metadata[name] = TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype), torch.Size(()), [chunk]
                )
                found.values[name] = tensor
    for number, group in enumerate(checkpoint.state.groups):
        for key, hyper in {**group.hyper, "params": list(group.members)}.items():
            name = groups.format(group=number, key=key)
            found.values[name] = hyper
            found.metadata[name] = BytesStorageMetadata()
            if isinstance(hyper, torch.Tensor):
                box = ChunkStorageMetadata(torch.Size([0] * hyper.dim()), hyper.shape)
                found.metadata[name] = TensorStorageMetadata(TensorProperties(dtype=hyper.dtype), hyper.shape, [box])


def _add_others(found: CheckpointIndex, checkpoint: Checkpoint, states: str) -> None:
    """Add states that are neither elementwise nor numbers.

    Each is one box, such as the factors of Adafactor.
    """
    held, beside = checkpoint.state.blobs.get(OPTIMIZER_VALUES), ValueTensors.of(checkpoint)
    for path, each in held.items() if isinstance(held, dict) else ():
        for state, value in each.items():
            name = states.format(name=path, state=state)
            extent = beside.extent(value) if isinstance(value, TensorRef) else None
            shape = extent.shape if extent is not None else ()
            chunk = chunk_at(extent, shape, 0, packed(shape, 1)) if extent is not None else None
            if chunk is not None and chunk.extent.dtype in DTYPES:
                _add(found, name, shape, [((0,) * len(shape), shape, chunk)])
            else:
                found.values[name], found.metadata[name] = value, BytesStorageMetadata()


def with_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """Read hyper-parameters that are tensors, such as a rate.

    They are stored by name. Raises: UcplError E610, E611.
    """
    beside = ValueTensors.of(checkpoint)

    def held(value: object) -> object:
        if isinstance(value, list | tuple):
            return [*map(held, value)] if isinstance(value, list) else tuple(map(held, value))
        extent = beside.extent(value) if isinstance(value, TensorRef) else None
        if extent is None or extent.dtype not in DTYPES:
            return value
        data = bytearray(b"".join(beside.chunks(extent)))
        return tensor_of(data, dtype_of(extent.dtype), extent.shape)

    groups = (evolve(g, hyper={key: held(value) for key, value in g.hyper.items()}) for g in checkpoint.state.groups)
    return evolve(checkpoint, state=evolve(checkpoint.state, groups=tuple(groups)))


def number_as_tensor(value: object) -> torch.Tensor | None:
    """A number of a parameter as a tensor without dims, or None."""
    if isinstance(value, Scalar):
        return tensor_of(bytearray(value.data), dtype_of(value.dtype), ()) if not value.shape else None
    return torch.tensor(float(value), device="cpu") if isinstance(value, int | float) else None
