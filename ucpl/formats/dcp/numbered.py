"""Names for the numbers of an optimizer's state dict in DCP.

`optimizer.state_dict()` numbers the parameters, and `get_optimizer_state_dict` names them. The names follow from the
shapes of the states and from the model's order, as for files of torch.save (torch_optimizer).
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from ucpl.extents import StorageRef, TensorRef
from ucpl.files.carrying import strides
from ucpl.files.checkpoint import Order
from ucpl.files.torch_files import crc_of
from ucpl.files.values import Value
from ucpl.formats.dcp.chunks import Chunks
from ucpl.formats.dcp.metadata import METADATA, ChunkedTensor, Metadata, Step
from ucpl.formats.torch_dicts import NamedTensors
from ucpl.formats.torch_optimizer import NamedOptimizer, named_optimizers

__all__ = ["with_names"]

_STATE, _GROUPS, _PARAMS, _NAMES = "state", "param_groups", "params", "param_names"
_LEAST = 2  # equal bytes of a tensor with fewer elements are no evidence
Place = tuple[Step, ...]


def with_names(
    metadata: Metadata, root: Path, prefix: str, order: Order | None = None
) -> tuple[Metadata, dict[str, int]] | None:
    """The metadata with names for numbers, and the number of each name.

    None if no optimizer has numbers alone. prefix: of the model's tensors. order: the caller's. Raises: UcplError E446 if
    the shapes leave more than one assignment, E466.
    """
    found = _optimizer(metadata, root)
    if found is None:
        return None
    top, states, groups = found
    chunks = Chunks(root, metadata.described)
    others = {
        name: one
        for name, one in metadata.tensors.items()
        if name.startswith(prefix) and metadata.paths[name][: len(top)] != top
    }
    refs = {name.removeprefix(prefix): _ref(name, one, chunks) for name, one in others.items()}
    first: dict[object, str] = {}
    aliases = {
        name: first[t.storage.name] for name, t in refs.items() if first.setdefault(t.storage.name, name) != name
    }
    model = NamedTensors(
        refs, {name: prefix + name for name in refs}, aliases, {}, by_stored={name: name for name in refs}
    )
    held = {n: {key: _shape_of(metadata, entry) for key, entry in one.items()} for n, one in states.items()}
    value = Value(root / METADATA, METADATA, (*top,), {_STATE: held, _GROUPS: groups})
    (named,) = named_optimizers([value], model, order)
    return _renamed(metadata, top, named, groups)


def _optimizer(
    metadata: Metadata, root: Path
) -> tuple[Place, dict[int, dict[str, str]], list[dict[str, object]]] | None:
    """The place of a numbered optimizer, its states' entries, and its groups."""
    chunks = Chunks(root, metadata.described)
    groups: dict[Place, dict[int, dict[str, object]]] = {}
    for name, steps in metadata.paths.items():
        if len(steps) > 2 and steps[-3] == _GROUPS and steps[-1] in (_PARAMS, _NAMES) and name in metadata.objects:
            value = chunks.archive(metadata.objects[name]).value
            groups.setdefault(steps[:-3], {}).setdefault(int(steps[-2]), {})[str(steps[-1])] = value
        elif steps[-1] == _GROUPS and name in metadata.objects:  # all in one, as torch before 2.4 has them
            every = Value(root / METADATA, name, (name,), chunks.archive(metadata.objects[name]).value)
            groups[steps[:-1]] = {
                n: {str(key): one for key, one in row.mapping().items()} for n, row in enumerate(every.items())
            }
    for top, rows in groups.items():
        listed = [rows[n] for n in sorted(rows)]
        members = [one for row in listed for one in _numbers(row.get(_PARAMS))]
        states: dict[int, dict[str, str]] = {}
        for name, steps in metadata.paths.items():
            if steps[: len(top) + 1] == (*top, _STATE) and len(steps) > len(top) + 2:
                number = str(steps[len(top) + 1])
                if not number.isdecimal():
                    break
                states.setdefault(int(number), {})[".".join(map(str, steps[len(top) + 2 :]))] = name
        else:
            if states and members and states.keys() <= {*members}:
                return top, states, listed
    return None


def _numbers(value: object) -> list[int]:
    return [one for one in value if isinstance(one, int)] if isinstance(value, list) else []


def _ref(name: str, stored: ChunkedTensor, chunks: Chunks) -> TensorRef:
    """A tensor by its bytes.

    Tied tensors have one storage, as far as their CRCs show it.
    """
    mark: object = name
    if prod(stored.shape) >= _LEAST and stored.chunks:
        found = chunks.extents(name, stored)
        crcs = [
            (e.key[1:], e.offset, e.shape, e.stride, e.storage_bytes, crc_of(chunks.root, e)) for e in found.values()
        ]
        mark = name if any(crc[-1] is None for crc in crcs) else (stored.dtype, stored.shape, crcs)
    return TensorRef(StorageRef(repr(mark), stored.dtype, prod(stored.shape)), 0, stored.shape, strides(stored.shape))


def _shape_of(metadata: Metadata, entry: str) -> object:
    stored = metadata.tensors.get(entry)
    if stored is None:
        return 0
    return TensorRef(StorageRef(entry, stored.dtype, prod(stored.shape)), 0, stored.shape, strides(stored.shape))


def _renamed(
    metadata: Metadata, top: Place, named: NamedOptimizer, groups: list[dict[str, object]]
) -> tuple[Metadata, dict[str, int]]:
    numbers = {
        name: number
        for names, row in zip(named.groups, groups, strict=True)
        for name, number in zip(names, _numbers(row.get(_PARAMS)), strict=True)
    }
    names = {str(number): name for name, number in numbers.items()}
    paths: dict[str, Place] = {}
    for name, steps in metadata.paths.items():
        is_state = steps[: len(top) + 1] == (*top, _STATE)
        at = len(top) + 1
        paths[name] = (*steps[:at], names[str(steps[at])], *steps[at + 1 :]) if is_state else steps
    return metadata.renamed(paths), numbers
