"""Compare the logical state of two checkpoints, by tensor, state and index.

A plan is made from one to the other and compared with the stored values: tile by tile, within a budget, padding left
out. A state
that only one side stores is compared with the value that the other derives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

from attrs import evolve, field

from ucpl.files.checkpoint import Checkpoint
from ucpl.graph import build, in_step
from ucpl.layout import Layout, LogicalTensor
from ucpl.placement import Placement
from ucpl.placement.families import apart
from ucpl.planning import order
from ucpl.records import define, frozen
from ucpl.registry import format_named
from ucpl.verification.blobs import compare_blobs
from ucpl.verification.elements import Pair, counted, only, pairs_of
from ucpl.verification.rounding import (
    Rounded,
    compare_narrower,
    compare_rounded,
    named,
    weights_in_narrower_dtype,
    weights_in_two_dtypes,
)
from ucpl.verification.target_check import compare_target
from ucpl.verification.train_states import (
    NO_GROUPS,
    NO_KINDS,
    Difference,
    OneSidedValue,
    StateComparison,
    compare_states,
    counted_names,
)

__all__ = ["Difference", "Likeness", "OneSidedValue", "likeness", "reachable", "stored_dtypes", "types_of"]

MEMORY = 512 << 20


@frozen
class Likeness:
    """All differences, and the compared amount.

    True if nothing differs and something was compared.
    """

    differences: tuple[Difference, ...]
    tensors: int = 0
    elements: int = 0
    bytes_read: int = 0
    bytes_live_max: int = 0
    derived: tuple[str, ...] = ()  # states that one side derives instead of storing
    values: int = 0  # other than tensors: hyper-parameters, counters, client_state keys
    unsaid: tuple[OneSidedValue, ...] = ()  # values of one side alone that are no difference
    rounded: tuple[Rounded, ...] = ()  # weights in two training dtypes, and their distance
    around: tuple[str, ...] = ()  # the kinds of the folders around them: no part of the state
    seconds: dict[str, float] = field(factory=dict)
    alone: str = ""  # the side that has weights and no state of an optimizer, where the other one has some
    narrow: str = ""  # dtypes in which weights of two types were compared

    @property
    def is_empty(self) -> bool:
        """Return True if nothing was compared: neither side has a tensor."""
        return not self.differences and not self.tensors

    def __bool__(self) -> bool:
        return not self.differences and not self.is_empty


def likeness(
    a: Checkpoint,
    here: Placement,
    b: Checkpoint,
    there: Placement,
    *,
    memory: int = MEMORY,
    workers: int = 2,
    weights: bool = False,
) -> Likeness:
    """Compare two opened and located checkpoints.

    weights: compare these alone, those of two dtypes in the narrower one.
    Raises: UcplError E613 (declared copies within one of them differ), E610, E611 (it cannot be read).
    """
    here, there = _alike(a, here, b, there)
    single = _Single(there.layout)
    found = _models(here, there)
    same = (here.layout.placed.keys() & there.layout.placed.keys()) - single.placed(d.name for d in found)
    bounds = {"memory": memory, "workers": workers}
    ours, theirs = pairs_of(here), pairs_of(there)
    alone = _alone(ours, theirs)
    dtypes = _dtypes(a, here, b, there, same)
    silent: list[OneSidedValue] = []
    if weights:
        found = [d for d in found if d.name in here.layout.tensors or d.name in there.layout.tensors]
        ours, theirs = ({pair for pair in some if pair[1] == "weight"} for some in (ours, theirs))
        dtypes = [d for d in dtypes if d.state == "weight"]
        narrow = weights_in_narrower_dtype(dtypes)
        measured = compare_narrower((a, here), (b, there), dtypes, bounds)
    else:
        kinds, silent = _kinds(a, here, b, there)
        found += kinds
        trained = weights_in_two_dtypes((a, here), (b, there), dtypes)
        narrow = dict.fromkeys(trained, "")
        measured = compare_rounded((a, here), (b, there), trained, bounds)
    found += single.differences(d for d in dtypes if d.state != "weight" or d.name not in narrow)
    found += measured.differences
    wrong = {(d.name, d.state) for d in dtypes}
    forward = {p for p in theirs if p[0] in same and p not in wrong}
    backward = {p for p in ours - theirs if p[0] in same and p not in wrong}
    elements, read, live = measured.elements, measured.bytes_read, 0
    derived: list[str] = []
    for turned, wanted in ((False, forward), (True, backward)):
        x, left, y, right = (b, there, a, here) if turned else (a, here, b, there)
        reach, origins, lost = reachable(left, wanted)
        found += [
            Difference("tensor", path, state, a="stored" if turned else "nothing", b="nothing" if turned else "stored")
            for path, state in sorted(single.pairs(lost))
        ]
        if not reach:
            continue
        source = only(left, (reach & pairs_of(left)) | origins, {p for p, _ in reach})
        whole = evolve(right, layout=evolve(right.layout, fillings=()))  # elements that one side lacks are not filled
        target = counted(only(whole, reach))
        plan = order(build(source, target, dtype_of=x.dtype_of), name="compare")
        derived += plan.derived
        compared = compare_target(plan, x, y, memory=memory, workers=workers)
        elements += compared.elements
        read += compared.report.bytes_read
        live = max(live, compared.report.bytes_live_max)
        found += named(compared, target, turned)
    aside = compare_states(a, b) if not weights else StateComparison()
    blobs, values = compare_blobs(a, here, b, there) if not weights else ([], 0)
    found += [*aside.differences, *blobs]
    unsaid = (*silent, *aside.unsaid)
    return Likeness(
        tuple(found),
        sum(len(here.layout.members(path)) for path in same),
        elements,
        read,
        live,
        tuple(derived),
        aside.count + values,
        unsaid,
        rounded=measured.rounded,
        alone="" if weights else alone,
        narrow=", ".join(sorted({*narrow.values()} - {""})),
    )


def _alike(a: Checkpoint, here: Placement, b: Checkpoint, there: Placement) -> tuple[Placement, Placement]:
    """Both sides with the families that each stores in one dtype.

    Weights of two training dtypes are measured tensor by tensor.
    """
    here, there = in_step(here, there)
    families = here.layout.families
    if not families:
        return here, there
    types = types_of(a, here), types_of(b, there)
    odd = {path for of in types for (path, _), dtypes in of.items() if len(dtypes) > 1}
    trained = weights_in_two_dtypes((a, here), (b, there), _dtypes(a, here, b, there, {*families}))
    together = families.keys() - odd - trained.keys()
    return apart(here, together), apart(there, together)


@define(slots=False)
class _Single:
    """Tensors of the model behind those of a placement with families."""

    layout: Layout

    @cached_property
    def places(self) -> dict[str, int]:
        return {name: n for n, name in enumerate(self.layout.tensors)}

    def placed(self, names: Iterable[str]) -> set[str]:
        """The families of these tensors, and tensors without one."""
        known = {*names}
        return known | {path for path, one in self.layout.families.items() if not known.isdisjoint(one.names)}

    def pairs(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        return ((name, state) for path, state in pairs for name in self.layout.members(path))

    def differences(self, found: Iterable[Difference]) -> list[Difference]:
        """Those of a family, one for each of its tensors.

        They are by state, in the model's order.
        """
        if not self.layout.families:
            return [*found]
        each = [evolve(d, name=name) for d in found for name in self.layout.members(d.name)]
        states = {state: n for n, state in enumerate(dict.fromkeys(d.state for d in each))}
        return sorted(each, key=lambda d: (states[d.state], self.places[d.name]))


def _alone(ours: set[Pair], theirs: set[Pair]) -> str:
    """The side without optimizer states, if the other one has some."""
    a, b = (any(state != "weight" for _, state in some) for some in (ours, theirs))
    return "" if a == b else "A" if b else "B"


def _models(here: Placement, there: Placement) -> list[Difference]:
    ours, theirs = here.layout.tensors, there.layout.tensors
    out = []
    for path in [*ours, *(p for p in theirs if p not in ours)]:
        if path not in ours or path not in theirs:
            out.append(Difference("tensor", path, a=_has(path, ours), b=_has(path, theirs)))
        elif ours[path].counts != theirs[path].counts:
            out.append(Difference("shape", path, a=str(list(ours[path].counts)), b=str(list(theirs[path].counts))))
    mine, yours = here.layout.aliases, there.layout.aliases
    for alias in [*mine, *(x for x in yours if x not in mine)]:
        if mine.get(alias) != yours.get(alias):
            texts = [f"a second name of {x[alias]}" if alias in x else "no second name" for x in (mine, yours)]
            out.append(Difference("tensor", alias, a=texts[0], b=texts[1]))
    return out


def _kinds(
    a: Checkpoint, here: Placement, b: Checkpoint, there: Placement
) -> tuple[list[Difference], list[OneSidedValue]]:
    """Compare the kinds: trained, frozen, buffer.

    Weights alone do not have a kind; their loader decides it.
    """
    ours, theirs = here.layout.tensors, there.layout.tensors
    apart = [p for p in ours if p in theirs and ours[p].kind != theirs[p].kind]
    if a.state.groups and b.state.groups:
        guesses = [format_named(one.format).guesses_buffers for one in (a, b)]
        guessed = [p for p in apart if any(guesses) and "parameter" not in (ours[p].kind, theirs[p].kind)]
        said = [Difference("tensor", p, a=ours[p].kind, b=theirs[p].kind) for p in apart if p not in guessed]
        return said, _one_sided(guessed, *(("A", ours) if guesses[1] else ("B", theirs)), NO_KINDS)
    return [], _one_sided(apart, *(("A", ours) if a.state.groups else ("B", theirs)), NO_GROUPS)


def _one_sided(
    paths: Sequence[str], side: Literal["A", "B"], tensors: Mapping[str, LogicalTensor], why: str
) -> list[OneSidedValue]:
    """The kinds of these tensors, which the other side does not know."""
    by_kind: dict[str, list[str]] = {}
    for path in paths:
        by_kind.setdefault(tensors[path].kind, []).append(path)
    return [OneSidedValue(counted_names(names), kind, side, why) for kind, names in by_kind.items()]


def _has(path: str, tensors: Mapping[str, LogicalTensor]) -> str:
    return f"{tensors[path].kind} {list(tensors[path].counts)}" if path in tensors else "nothing"


def _dtypes(a: Checkpoint, here: Placement, b: Checkpoint, there: Placement, same: set[str]) -> list[Difference]:
    """Pairs that both sides store, in other dtypes."""
    ours, theirs = stored_dtypes(a, here), stored_dtypes(b, there)
    return [
        Difference("dtype", path, state, a=ours[path, state], b=dtype)
        for (path, state), dtype in theirs.items()
        if path in same and ours.get((path, state), dtype) != dtype
    ]


def stored_dtypes(checkpoint: Checkpoint, placement: Placement) -> dict[Pair, str]:
    """The dtype of each state of each tensor in the files."""
    return {pair: next(iter(found)) for pair, found in types_of(checkpoint, placement).items()}


def types_of(checkpoint: Checkpoint, placement: Placement) -> dict[Pair, dict[str, None]]:
    """The dtypes of each tensor's states, in the order of pieces.

    "" is for pieces in no file.
    """
    known = checkpoint.by_texts
    out: dict[Pair, dict[str, None]] = {}
    for part in placement.parts:
        found = (known.get(place) for _, places in part.homes.places() for place in places)
        dtypes = ["" if extent is None else extent.dtype for extent in found]
        if len({*dtypes}) == 1:
            seen = [(tensor, 0) for tensor in part.tensors]
        else:
            seen = sorted({*zip(part.pieces.tensor.tolist(), part.pieces.home.tolist(), strict=True)})
        for tensor, home in seen:
            out.setdefault((placement.tensors[tensor], part.state), {})[dtypes[home]] = None
    return out


def reachable(source: Placement, wanted: set[Pair]) -> tuple[set[Pair], set[Pair], set[Pair]]:
    """Split the wanted pairs: in the source, their origins, the rest.

    The source has a pair if it stores or derives it.
    """
    stored = pairs_of(source)
    origins: set[Pair] = set()
    reach: set[Pair] = set()
    for path, state in wanted:
        if (path, state) in stored:
            reach.add((path, state))
            continue
        for rule in source.layout.derived:
            if rule.state == state and (path, rule.source) in stored:
                reach.add((path, state))
                origins.add((path, rule.source))
                break
    return reach, origins, wanted - reach
