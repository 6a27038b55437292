"""Do two checkpoints hold the same logical state, whatever their layouts? What differs, by tensor, state and index.

A plan is made from one to the other and held against what is there: tile by tile, within a budget, padding left out. A state
that only one side stores is compared with what the other derives it to be.
"""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen

from ucpl.extents import ParameterGroup, key_text
from ucpl.graph import build
from ucpl.proofs.values import Beside, apart
from ucpl.proofs.where import Pair, counted, element_at, only, pairs_of
from ucpl.regions import Placement
from ucpl.runtime.compare import Unequal
from ucpl.runtime.compare import compare as hold_against
from ucpl.schedule import order
from ucpl.stores.checkpoint import Checkpoint

__all__ = ["Difference", "Likeness", "likeness"]

MEMORY = 512 << 20

# What continues a run, whatever the framework's files look like. The rest of an envelope's blobs is made anew for each target.
CONTINUES = (
    "lr_scheduler",
    "global_steps",
    "global_samples",
    "skipped_steps",
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
)
_EVERYWHERE = CONTINUES[:4]  # every form has a place for these: one that is absent on one side is lost


@frozen
class Difference:
    """One thing in which A and B differ. `kind` is tensor, dtype, shape, value, group, scalar or carried."""

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
class Likeness:
    """All that differs, and how much was compared. True where nothing differs."""

    differences: tuple[Difference, ...]
    tensors: int = 0
    elements: int = 0
    bytes_read: int = 0
    bytes_live_max: int = 0
    derived: tuple[str, ...] = ()  # states that one side does not store: compared with what it derives
    values: int = 0  # beside tensors: hyper-parameters, counters, client_state keys
    seconds: dict[str, float] = field(factory=dict)

    def __bool__(self) -> bool:
        return not self.differences


def likeness(
    a: Checkpoint,
    here: Placement,
    b: Checkpoint,
    there: Placement,
    *,
    memory: int = MEMORY,
    workers: int = 2,
) -> Likeness:
    """Compare two opened and located checkpoints.

    Raises: UcplError E613 (declared copies within one of them differ), E610, E611 (it cannot be read).
    """
    found = list(_models(here, there))
    same = {path for path in here.layout.tensors if path in there.layout.tensors}
    same -= {d.name for d in found}
    ours, theirs = pairs_of(here), pairs_of(there)
    dtypes = list(_dtypes(a, here, b, there, same))
    found += dtypes
    wrong = {(d.name, d.state) for d in dtypes}
    forward = {p for p in theirs if p[0] in same and p not in wrong}
    backward = {p for p in ours - theirs if p[0] in same and p not in wrong}
    elements = read = live = 0
    derived: list[str] = []
    for turned, wanted in ((False, forward), (True, backward)):
        x, left, y, right = (b, there, a, here) if turned else (a, here, b, there)
        reach, origins, lost = _reachable(left, wanted)
        found += [
            Difference("tensor", path, state, a="stored" if turned else "nothing", b="nothing" if turned else "stored")
            for path, state in sorted(lost)
        ]
        if not reach:
            continue
        source = only(left, {p for p in reach if p in pairs_of(left)} | origins, {p for p, _ in reach})
        target = counted(only(right, reach))
        known = {(f, tuple(map(str, k))): e.dtype for (f, k), e in x.extents.items()}
        plan = order(build(source, target, dtype_of=_dtype_of(known)), name="compare")
        derived += plan.derived
        compared = hold_against(plan, x, y, memory=memory, workers=workers)
        elements += compared.elements
        read += compared.report.bytes_read
        live = max(live, compared.report.bytes_live_max)
        found += [_named(u, target, y, turned) for u in compared]
    beside, values = _beside(a, b)
    found += beside
    return Likeness(tuple(found), len(same), elements, read, live, tuple(derived), values)


def _dtype_of(known: dict[tuple[str, tuple[str, ...]], str]) -> Any:
    return lambda file, key: known.get((file, tuple(map(str, key))))


def _models(here: Placement, there: Placement) -> list[Difference]:
    ours, theirs = here.layout.tensors, there.layout.tensors
    out = []
    for path in [*ours, *(p for p in theirs if p not in ours)]:
        if path not in ours or path not in theirs:
            out.append(Difference("tensor", path, a=_has(path, ours), b=_has(path, theirs)))
        elif ours[path].counts != theirs[path].counts:
            out.append(Difference("shape", path, a=str(list(ours[path].counts)), b=str(list(theirs[path].counts))))
        elif ours[path].kind != theirs[path].kind:
            out.append(Difference("tensor", path, a=ours[path].kind, b=theirs[path].kind))
    mine, yours = here.layout.aliases, there.layout.aliases
    for alias in [*mine, *(x for x in yours if x not in mine)]:
        if mine.get(alias) != yours.get(alias):
            said = [f"a second name of {x[alias]}" if alias in x else "no second name" for x in (mine, yours)]
            out.append(Difference("tensor", alias, a=said[0], b=said[1]))
    return out


def _has(path: str, tensors: dict[str, Any]) -> str:
    return f"{tensors[path].kind} {list(tensors[path].counts)}" if path in tensors else "nothing"


def _dtypes(a: Checkpoint, here: Placement, b: Checkpoint, there: Placement, same: set[str]) -> list[Difference]:
    """Pairs that both sides store, in other dtypes."""
    ours, theirs = _stored_dtypes(a, here), _stored_dtypes(b, there)
    return [
        Difference("dtype", path, state, a=ours[path, state], b=dtype)
        for (path, state), dtype in theirs.items()
        if path in same and ours.get((path, state), dtype) != dtype
    ]


def _stored_dtypes(checkpoint: Checkpoint, placement: Placement) -> dict[Pair, str]:
    known = {(f, tuple(map(str, k))): e.dtype for (f, k), e in checkpoint.extents.items()}
    out: dict[Pair, str] = {}
    for part in placement.parts:
        dtypes = [known.get((h.file, tuple(map(str, h.key))), "") for h in part.homes]
        seen = sorted({(t, h) for t, h in zip(part.pieces.tensor.tolist(), part.pieces.home.tolist(), strict=True)})
        for tensor, home in seen:
            out.setdefault((placement.tensors[tensor], part.state), dtypes[home])
    return out


def _reachable(source: Placement, wanted: set[Pair]) -> tuple[set[Pair], set[Pair], set[Pair]]:
    """Of the pairs wanted: those that the source stores or derives, the pairs they derive from, and those it lacks."""
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


def _named(u: Unequal, placement: Placement, target: Checkpoint, turned: bool) -> Difference:
    home = [h for p in placement.parts for h in p.homes][u.target]
    position = 0
    for n, i in zip(home.shape, u.element, strict=True):
        position = position * n + i
    state, element = element_at(placement, u.target, position)
    there = f"{u.file}: {u.key}{list(u.element)}"
    here = f"{u.source_file}: {u.source_key}{list(u.source_element)}" if u.source_file else ""
    found = Difference("value", element.partition("[")[0], state, element, u.wanted, u.value, here, there)
    return evolve(found, a=u.value, b=u.wanted, a_place=there, b_place=here) if turned else found


# ---- what stands beside tensors --------------------------------------------------------------------------------------


def _beside(a: Checkpoint, b: Checkpoint) -> tuple[list[Difference], int]:
    ours, theirs = Beside(a), Beside(b)
    x, y = a.envelope, b.envelope
    out: list[Difference] = []
    count = 0

    def hold(kind: str, name: str, left: Any, right: Any) -> None:
        nonlocal count
        count += 1
        out.extend(Difference(kind, d.path, a=d.a, b=d.b) for d in apart(name, left, right, ours, theirs))

    for mine, yours, name in _groups(x.groups, y.groups):
        if mine is None or yours is None:
            one = mine or yours
            assert one is not None
            text = f"{len(one.members)} parameters, the first {one.members[0] if one.members else 'none'}"
            out.append(Difference("group", name, a=text if mine else "nothing", b=text if yours else "nothing"))
        else:
            for key in dict.fromkeys([*mine.hyper, *yours.hyper]):
                if key in mine.hyper and key in yours.hyper:
                    hold("group", f"{name}.{key}", mine.hyper[key], yours.hyper[key])
                elif key in ("lr", "weight_decay"):
                    hold(
                        "group",
                        name,
                        {k: v for k, v in mine.hyper.items() if k == key},
                        {k: v for k, v in yours.hyper.items() if k == key},
                    )
    for state in dict.fromkeys([*x.scalars, *y.scalars]):
        hold("scalar", state, x.scalars.get(state, {}), y.scalars.get(state, {}))
    for key in CONTINUES:
        if key in x.blobs and key in y.blobs:
            hold("carried", key, x.blobs[key], y.blobs[key])
        elif key in _EVERYWHERE and (key in x.blobs or key in y.blobs):
            hold(
                "carried",
                "",
                {k: v for k, v in x.blobs.items() if k == key},
                {k: v for k, v in y.blobs.items() if k == key},
            )
    for key in dict.fromkeys([*x.carried, *y.carried]):
        hold("carried", "client_state", *({key: e.carried[key]} if key in e.carried else {} for e in (x, y)))
    return out, count


def _groups(
    ours: tuple[ParameterGroup, ...], theirs: tuple[ParameterGroup, ...]
) -> list[tuple[ParameterGroup | None, ParameterGroup | None, str]]:
    """Groups with the same members, side by side; those without a counterpart alone."""
    left = {frozenset(g.members): g for g in theirs}
    out: list[tuple[ParameterGroup | None, ParameterGroup | None, str]] = []
    for i, group in enumerate(ours):
        out.append((group, left.pop(frozenset(group.members), None), f"group {i}"))
    out += [(None, group, f"group {theirs.index(group)}") for group in left.values()]
    return out


def place_text(file: str, key: tuple[Any, ...]) -> str:
    """A stored tensor as people write it."""
    return f"{file}: {key_text(key)}"
