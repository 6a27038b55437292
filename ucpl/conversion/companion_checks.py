"""Companion files of a checkpoint, compared with shards or another folder.

If companion weights equal the target's shards, a conversion copies them bit for bit. Otherwise it makes them anew (module
`companion_writing`) or leaves them out by name. A user who loads the folder as a model must get the same weights as the
resumed training.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field

from ucpl.errors import Diagnostic, Label, UcplError, catalogue, plural
from ucpl.extents import doubt
from ucpl.records import define, frozen
from ucpl.registry import format_named, format_of_models
from ucpl.storage.reading import fetch_all

if TYPE_CHECKING:
    from ucpl.conversion.companion_writing import RewrittenFiles
    from ucpl.conversion.keywords import MoveBounds
    from ucpl.conversion.planning import Prepared
    from ucpl.extents import Extent, Key
    from ucpl.extents.containers import Container
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.placement import Placement
    from ucpl.verification.companions import Agreement

__all__ = [
    "DecidedCompanions",
    "HeldWeights",
    "decide_companions",
    "findings_of",
    "held_weights",
    "compare_companions",
    "companion_notes",
]

_SAFETENSORS = re.compile(r"(?P<stem>.+?)(?:-[0-9]+-of-[0-9]+)?\.safetensors(?:\.index\.json)?")
CHUNK = 1 << 20


@frozen
class HeldWeights:
    """One file of weights, and its comparison with the shards.

    The file can also be several shards and their index.
    """

    name: str  # "model.safetensors", below the container
    files: tuple[str, ...]
    found: Agreement | None  # None: it could not be compared
    why: str = ""

    @property
    def differs(self) -> bool:
        return self.found is not None and bool(self.found.differs)

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.name} is not compared with the shards: {self.why}"
        if self.found.differs:
            more = f" (and {len(self.found.differs) - 1} tensors more)" if len(self.found.differs) > 1 else ""
            return f"{self.name} differs from the shards: {self.found.differs[0]}{more}"
        if not self.found.tensors:
            why = self.found.uncompared[0] if self.found.uncompared else "it is empty"
            return f"{self.name} is not compared with the shards: {why}"
        if why := doubt(self.found.seen, "elements"):
            return f"{self.name} is not witnessed by the shards: {why} in both"
        out = f"{self.name} equals the shards: {self.found.tensors} tensors, {self.found.elements:,} elements, bit for bit"
        if self.found.uncompared:
            out += f"; {len(self.found.uncompared)} tensors are not compared: {self.found.uncompared[0]}"
        return out


def held_weights(
    checkpoint: Checkpoint, placement: Placement, bounds: MoveBounds, *, only: str = ""
) -> tuple[HeldWeights, ...]:
    """Compare each companion file of weights (or one) with the shards.

    A file that cannot be compared is listed with the reason.
    """
    if checkpoint.container is None:
        return ()
    out = []
    for name, files in _weights_of(checkpoint.container).items():
        if only not in ("", name):
            continue
        if _SAFETENSORS.fullmatch(files[0]) is None:
            out.append(HeldWeights(name, files, None, "it is no safetensors file"))
            continue
        try:
            out.append(HeldWeights(name, files, _agreement(checkpoint, placement, name, bounds)))
        except UcplError as error:
            if error.is_of_the_disk:
                raise
            out.append(HeldWeights(name, files, None, error.diagnostics[0].message))
    return tuple(out)


def _weights_of(container: Container) -> dict[str, tuple[str, ...]]:
    """Files of weights by the name of their model.

    Shards and their index have one name.
    """
    out: dict[str, list[str]] = {}
    for file in container.files:
        if file.rule is not None and file.rule.fate == "weights":
            found = _SAFETENSORS.fullmatch(file.name)
            out.setdefault(f"{found['stem']}.safetensors" if found is not None else file.name, []).append(file.name)
    return {name: tuple(files) for name, files in out.items()}


def _agreement(checkpoint: Checkpoint, placement: Placement, name: str, bounds: MoveBounds) -> Agreement:
    from ucpl.conversion.companion_writing import own_names
    from ucpl.conversion.keywords import options_from
    from ucpl.conversion.opening import infer
    from ucpl.verification.companions import Agreement, agreement

    assert checkpoint.container is not None
    there = format_of_models().open_named(checkpoint.container.top, [name])
    own = own_names(checkpoint, name)
    seconds = {
        alias: checkpoint.state.aliases[alias]
        for t in there.state.tensors
        if (alias := t.name) in checkpoint.state.aliases
    }
    bound = options_from(bounds)
    plane = {"memory": bound.memory, "workers": bound.workers}
    found = Agreement()
    # A file that stores a second name and its first name has two tensors. Each is compared with the owner.
    firsts = {t.name: own.get(t.name, t.name) for t in there.state.tensors if t.name not in seconds}
    for names in (firsts, *({alias: owner} for alias, owner in seconds.items())):
        if names:
            model = _called(there, names)
            one = agreement(checkpoint, placement, model, infer(model).placement, **plane)
            found += one
    return found


def _called(model: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Only these tensors of a model's files, under new names.

    Aliases are removed, as `infer` needs it.
    """
    extents: dict[tuple[str, Key], Extent] = {}
    for (_, key), extent in model.extents.items():
        if (name := names.get(str(key[0]))) is not None:
            extents[format_of_models().weights_file, (name,)] = evolve(extent, key=(name,))
    tensors = tuple(evolve(t, name=names[t.name]) for t in model.state.tensors if t.name in names)
    state = evolve(model.state, tensors=tensors, aliases={})
    return evolve(model, extents=extents, state=state, container=None)


@frozen(eq=False)
class DecidedCompanions:
    """The source of a conversion with decided companion weights."""

    source: Checkpoint
    held: tuple[HeldWeights, ...] = ()  # the files that are copied
    rewritten: tuple[RewrittenFiles, ...] = ()
    said: tuple[str, ...] = ()


def decide_companions(made: Prepared, bounds: MoveBounds, *, look: bool) -> DecidedCompanions:
    """Decide on companion weights: copy, make anew, or leave out by name.

    They are copied if they equal the target's shards.

    look: compare their elements with the shards, which reads them.
    """
    source = made.checkpoint
    assert source is not None
    container = source.container
    target = format_named(made.plan.target.framework)
    if container is None or target.container or not container.kind.holds(target):
        return DecidedCompanions(source)
    from ucpl.conversion.companion_writing import with_dtype

    dropped = {name for name, fate in made.plan.carry.items() if fate == "drop"}
    known = _Decided(container.without(dropped))
    for name, files in _weights_of(known.container).items():
        known.decide(made, name, files, bounds if look else None)
    known.texts(with_dtype(known.container, tuple(known.rewritten)))
    gone = tuple(file for file in container.files if file.name in dropped)
    kept = evolve(known.container, files=(*known.container.files, *gone))
    return DecidedCompanions(
        evolve(source, container=kept), tuple(known.held), tuple(known.rewritten), tuple(known.said)
    )


@define
class _Decided:
    """A container during the decisions on its weights."""

    container: Container
    held: list[HeldWeights] = field(factory=list)
    rewritten: list[RewrittenFiles] = field(factory=list)
    said: list[str] = field(factory=list)

    def decide(self, made: Prepared, name: str, files: tuple[str, ...], bounds: MoveBounds | None) -> None:
        """Decide on one file by its headers, then by its elements.

        bounds: None: elements are not compared.
        """
        from ucpl.conversion.companion_writing import CannotRewrite, rewritten_files, wanted_files

        assert made.checkpoint is not None
        try:
            wish = wanted_files(made, self.container, name, files)
        except UcplError as error:
            if error.is_of_the_disk:
                raise
            wish = None  # the comparison with the shards reports the error
        why = wish.why if wish is not None else ""
        if not why and bounds is not None:
            found = held_weights(made.checkpoint, made.source.placement, bounds, only=name)
            self.held += [one for one in found if not one.differs]
            self.said += [str(one) for one in found if not one.differs]
            why = next((str(one) for one in found if one.differs), "")
        if wish is None or not why:
            self._mark(files, held=True)
            return
        try:
            self.rewritten.append(rewritten_files(made, self.container, wish))
            there = {line.file for line in wish.lines} | {*self.rewritten[-1].texts}
            empty = {name: f"nothing is left of it: {why}" for name in files if name not in there}
            self.container = evolve(self.container.without({*empty}), skipped={**self.container.skipped, **empty})
            self._mark(files, anew=why)
            self.said.append(f"{name} is written anew: {why}")
        except CannotRewrite as error:
            left = dict.fromkeys(files, f"{why}; {error}")
            self.said.append(f"{name} is left out: {left[files[0]]}")
            self.container = evolve(self.container.without({*files}), skipped={**self.container.skipped, **left})

    def texts(self, found: dict[str, str]) -> None:
        if found:
            self.rewritten = [
                evolve(self.rewritten[0], texts={**self.rewritten[0].texts, **found}),
                *self.rewritten[1:],
            ]
            self._mark(tuple(found), anew="as the weights are now")

    def _mark(self, names: tuple[str, ...], *, held: bool = False, anew: str = "") -> None:
        files = (evolve(f, held=held, anew=anew) if f.name in names else f for f in self.container.files)
        self.container = evolve(self.container, files=tuple(files))


def findings_of(checkpoint: Checkpoint, held: tuple[HeldWeights, ...]) -> tuple[Diagnostic, ...]:
    """The faults of companion weights."""
    return tuple(
        Diagnostic("E708", str(one), (Label(str(checkpoint.top / one.name)),), remedy=catalogue()["E708"].remedy)
        for one in held
        if one.differs
    )


def companion_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The kind of the folder around the shards, and its suspicious files."""
    container = checkpoint.container
    if container is None:
        return ()
    return (
        f"in a folder of {container.kind.title}: {plural(len(container.files), 'file')} next to the shards",
        *(text for text in container.remarks if text not in checkpoint.notes),
    )


# ---- two folders -----------------------------------------------------------------------------------------------------


def compare_companions(a: Checkpoint, b: Checkpoint) -> tuple[str, ...]:
    """Compare the folders around two checkpoints.

    The lines name the kinds of the folders and their equal files. None of this is part of the state.
    """
    ours, theirs = a.container, b.container
    if ours is None or theirs is None:
        said = (("A", ours), ("B", theirs))
        return tuple(
            f"{side} is in a folder of {c.kind.title}, the other is in none" for side, c in said if c is not None
        )
    out = [f"both in folders of {ours.kind.title}" if ours.kind is theirs.kind else _kinds(ours, theirs)]
    here, there = _by_part(ours), _by_part(theirs)
    same = [part for part in here if part in there and _is_same(ours.top / here[part], theirs.top / there[part])]
    unlike = [here[part] for part in here if part in there and part not in same]
    out += [f"the same, byte by byte: {', '.join(here[part] for part in same)}"] if same else []
    out += [f"another in B: {', '.join(unlike)}"] if unlike else []
    for side, mine, other in (("A", here, there), ("B", there, here)):
        alone = [name for part, name in mine.items() if part not in other]
        out += [f"in {side} alone: {', '.join(alone)}"] if alone else []
    return tuple(out)


def _kinds(ours: Container, theirs: Container) -> str:
    return f"A in a folder of {ours.kind.title}, B in one of {theirs.kind.title}"


def _by_part(container: Container) -> dict[tuple[str, int], str]:
    """Files by role and rank.

    The name of a rank's file depends on the number of ranks, so the pattern of its rule replaces it.
    """
    return {(f.rule.pattern if f.rule is not None and f.rank >= 0 else f.name, f.rank): f.name for f in container.files}


def _is_same(one: Path, other: Path) -> bool:
    """Raises: UcplError E400."""
    return all(a == b for a, b in zip_longest(_parts(one), _parts(other)))


def _parts(path: Path) -> Iterator[int | bytes]:
    """The size of a file, then its bytes. Raises: UcplError E400."""
    from ucpl.files.header_watch import reading

    with reading(path), path.open("rb") as file:
        yield os.fstat(file.fileno()).st_size
        fetch_all(file.fileno())
        while part := file.read(CHUNK):
            yield part
