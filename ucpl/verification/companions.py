"""Compare weights in a model's companion files with the shards.

Not here: opening those files, and the names of the model's tensors in them (`conversion.beside`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from attrs import evolve, field

from ucpl.extents import Seen, together
from ucpl.files.checkpoint import Checkpoint
from ucpl.graph import build
from ucpl.layout import Derivation
from ucpl.placement import Placement
from ucpl.planning import order
from ucpl.records import define, frozen
from ucpl.runtime.compare import Unequal
from ucpl.verification.compare import reachable, stored_dtypes
from ucpl.verification.elements import Elements, Pair, counted, only, pairs_of
from ucpl.verification.target_check import compare_target

__all__ = ["Agreement", "agreement"]


@define
class _Asked:
    """The weights of a model's files, by the kind of comparison."""

    here: Placement  # of the shards
    ours: Mapping[Pair, str]  # dtypes that they store
    stored: set[Pair] = field(factory=set)  # the shards' own
    rounded: set[Pair] = field(factory=set)  # their masters, in the dtype of the file
    differs: list[str] = field(factory=list)
    uncompared: list[str] = field(factory=list)

    def add(self, pair: Pair, dtype: str, there: Placement) -> None:
        path, here, ours = pair[0], self.here, self.ours
        if path not in here.layout.tensors:
            self.uncompared.append(f"{path} is no tensor of the shards")
        elif here.layout.tensors[path].counts != there.layout.tensors[path].counts:
            mine, yours = (list(x.layout.tensors[path].counts) for x in (here, there))
            self.differs.append(f"{path} is {mine} in the shards, {yours} in the companion files")
        elif ours.get(pair, dtype) == dtype:
            self.stored.add(pair)
        elif (path, "fp32") in ours:
            self.rounded.add(pair)
        else:
            self.uncompared.append(f"{path} is {ours[pair]} in the shards, {dtype} in the companion files")


@frozen
class Agreement:
    """The comparison of some files' weights with the shards.

    `differs`: the first element of each that is not equal.
    """

    tensors: int = 0  # that were compared
    elements: int = 0
    differs: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()  # tensors that could not be compared, with the reason
    seen: Seen = field(factory=Seen)  # the values that were compared

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.tensors + other.tensors,
            self.elements + other.elements,
            self.differs + other.differs,
            self.uncompared + other.uncompared,
            together((self.seen, other.seen)),
        )


def agreement(
    shards: Checkpoint, here: Placement, model: Checkpoint, there: Placement, *, memory: int, workers: int
) -> Agreement:
    """Compare each weight of `model` with that of the shards.

    The shard's weight is stored or derived; in another dtype it is its master, rounded.

    Raises: UcplError E610, E611.
    """
    asked = _Asked(here, stored_dtypes(shards, here))
    for pair, dtype in stored_dtypes(model, there).items():
        asked.add(pair, dtype, there)
    reach, origins, lost = reachable(here, asked.stored)
    asked.uncompared += [f"the shards store no weight of {path}" for path, _ in sorted(lost)]
    rounded = evolve(here, layout=evolve(here.layout, derived=(Derivation("weight", "fp32"),)))
    masters = {(path, "fp32") for path, _ in asked.rounded}
    elements, seen = 0, Seen()
    for source, pairs, origin in ((here, reach, (reach & pairs_of(here)) | origins), (rounded, asked.rounded, masters)):
        if not pairs:
            continue
        target = counted(only(there, pairs))
        graph = build(only(source, origin, {path for path, _ in pairs}), target, dtype_of=shards.dtype_of)
        compared = compare_target(order(graph, name="beside"), shards, model, memory=memory, workers=workers)
        elements += compared.elements
        seen = together((seen, *compared.seen.values()))
        asked.differs += _texts_of(compared, target)
    return Agreement(len(reach) + len(asked.rounded), elements, tuple(asked.differs), tuple(asked.uncompared), seen)


def _texts_of(compared: Iterable[Unequal], target: Placement) -> Iterator[str]:
    elements = Elements(target)
    for u in compared:
        _, element = elements.wrong(u)
        yield f"{element} is {u.wanted} in the shards, {u.value} in {u.file}"
