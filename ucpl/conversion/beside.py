"""Files beside the shards of a container: weights held against the shards, and the folders of two checkpoints side by side.

A conversion carries weights bit for bit where they are what the target's shards say, and else makes them anew (anew) or leaves
them out, by name: who takes the folder for a model must get the one that goes on training.
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
    from ucpl.conversion.anew import Anew
    from ucpl.conversion.keywords import DataPlane
    from ucpl.conversion.planning import Prepared
    from ucpl.extents import Extent, Key
    from ucpl.extents.containers import Container
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.placement import Placement
    from ucpl.verification.companions import Agreement

__all__ = ["Checked", "HeldWeights", "checked", "findings_of", "held_weights", "side_by_side", "told"]

_SAFETENSORS = re.compile(r"(?P<stem>.+?)(?:-[0-9]+-of-[0-9]+)?\.safetensors(?:\.index\.json)?")
CHUNK = 1 << 20


@frozen
class HeldWeights:
    """One file of weights (or its shards and their index), and how far it is what the shards say."""

    name: str  # "model.safetensors", below the container
    files: tuple[str, ...]
    found: Agreement | None  # None: it could not be held against anything
    why: str = ""

    @property
    def differs(self) -> bool:
        return self.found is not None and bool(self.found.differs)

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.name} is not held against the shards: {self.why}"
        if self.found.differs:
            more = f" (and {len(self.found.differs) - 1} tensors more)" if len(self.found.differs) > 1 else ""
            return f"{self.name} is not what the shards say: {self.found.differs[0]}{more}"
        if not self.found.tensors:
            return f"{self.name} is not held against the shards: {self.found.unheld[0] if self.found.unheld else 'it is empty'}"
        if why := doubt(self.found.seen, "elements"):
            return f"{self.name} is not witnessed by the shards: {why} in both"
        out = f"{self.name} is what the shards say: {self.found.tensors} tensors, {self.found.elements:,} elements, bit for bit"
        if self.found.unheld:
            out += f"; {len(self.found.unheld)} tensors are not held against them: {self.found.unheld[0]}"
        return out


def held_weights(
    checkpoint: Checkpoint, placement: Placement, bounds: DataPlane, *, only: str = ""
) -> tuple[HeldWeights, ...]:
    """Every file of weights beside the shards (or one), held against them. What cannot be is said."""
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
    """Files of weights by the name of the whole: shards and their index are one."""
    out: dict[str, list[str]] = {}
    for file in container.files:
        if file.rule is not None and file.rule.fate == "weights":
            found = _SAFETENSORS.fullmatch(file.name)
            out.setdefault(f"{found['stem']}.safetensors" if found is not None else file.name, []).append(file.name)
    return {name: tuple(files) for name, files in out.items()}


def _agreement(checkpoint: Checkpoint, placement: Placement, name: str, bounds: DataPlane) -> Agreement:
    from ucpl.conversion.anew import own_names
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
    # A second name that is stored beside its first is a tensor like others there: it is held against its owner by itself.
    firsts = {t.name: own.get(t.name, t.name) for t in there.state.tensors if t.name not in seconds}
    for names in (firsts, *({alias: owner} for alias, owner in seconds.items())):
        if names:
            model = _called(there, names)
            one = agreement(checkpoint, placement, model, infer(model).placement, **plane)
            found += one
    return found


def _called(model: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """These tensors of a model's files alone, under other names, no two of which are one, as `infer` looks for them."""
    extents: dict[tuple[str, Key], Extent] = {}
    for (_, key), extent in model.extents.items():
        if (name := names.get(str(key[0]))) is not None:
            extents[format_of_models().weights_file, (name,)] = evolve(extent, key=(name,))
    tensors = tuple(evolve(t, name=names[t.name]) for t in model.state.tensors if t.name in names)
    state = evolve(model.state, tensors=tensors, aliases={})
    return evolve(model, extents=extents, state=state, container=None)


@frozen(eq=False)
class Checked:
    """The source of a conversion with each file of weights beside its shards decided on."""

    source: Checkpoint
    held: tuple[HeldWeights, ...] = ()  # what is carried
    anew: tuple[Anew, ...] = ()
    said: tuple[str, ...] = ()


def checked(made: Prepared, bounds: DataPlane, *, look: bool = True) -> Checked:
    """Weights beside the shards: carried where they are what the target's shards say, else made anew, or left out by name.

    look: whether their numbers are held against the shards, which reads them.
    """
    from ucpl.conversion.anew import with_dtype

    source = made.checkpoint
    assert source is not None
    container = source.container
    if container is None or not container.kind.holds(format_named(made.plan.target.framework)):
        return Checked(source)
    dropped = {name for name, fate in made.plan.carry.items() if fate == "drop"}
    known = _Decided(container.without(dropped))
    for name, files in _weights_of(known.container).items():
        known.decide(made, name, files, bounds if look else None)
    known.texts(with_dtype(known.container, tuple(known.anew)))
    gone = tuple(file for file in container.files if file.name in dropped)
    kept = evolve(known.container, files=(*known.container.files, *gone))
    return Checked(evolve(source, container=kept), tuple(known.held), tuple(known.anew), tuple(known.said))


@define
class _Decided:
    """A container whose weights are decided on, one after another."""

    container: Container
    held: list[HeldWeights] = field(factory=list)
    anew: list[Anew] = field(factory=list)
    said: list[str] = field(factory=list)

    def decide(self, made: Prepared, name: str, files: tuple[str, ...], bounds: DataPlane | None) -> None:
        """By what the headers say; then, where that is as it should be, by the numbers. bounds: None, not by these."""
        from ucpl.conversion.anew import Impossible, anew, wished

        assert made.checkpoint is not None
        try:
            wish = wished(made, self.container, name, files)
        except UcplError as error:
            if error.is_of_the_disk:
                raise
            wish = None  # as who holds it against the shards says
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
            self.anew.append(anew(made, self.container, wish))
            there = {line.file for line in wish.lines} | {*self.anew[-1].texts}
            empty = {name: f"nothing is left of it: {why}" for name in files if name not in there}
            self.container = evolve(self.container.without({*empty}), skipped={**self.container.skipped, **empty})
            self._mark(files, anew=why)
            self.said.append(f"{name} is written anew: {why}")
        except Impossible as error:
            left = dict.fromkeys(files, f"{why}; {error}")
            self.said.append(f"{name} is left out: {left[files[0]]}")
            self.container = evolve(self.container.without({*files}), skipped={**self.container.skipped, **left})

    def texts(self, found: dict[str, str]) -> None:
        if found:
            self.anew = [evolve(self.anew[0], texts={**self.anew[0].texts, **found}), *self.anew[1:]]
            self._mark(tuple(found), anew="as the weights are now")

    def _mark(self, names: tuple[str, ...], *, held: bool = False, anew: str = "") -> None:
        files = (evolve(f, held=held, anew=anew) if f.name in names else f for f in self.container.files)
        self.container = evolve(self.container, files=tuple(files))


def findings_of(checkpoint: Checkpoint, held: tuple[HeldWeights, ...]) -> tuple[Diagnostic, ...]:
    """What of them is wrong."""
    return tuple(
        Diagnostic("E708", str(one), (Label(str(checkpoint.top / one.name)),), remedy=catalogue()["E708"].remedy)
        for one in held
        if one.differs
    )


def told(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What the folder around the shards is, and what looks wrong in it."""
    container = checkpoint.container
    if container is None:
        return ()
    return (
        f"in a folder of {container.kind.title}: {plural(len(container.files), 'file')} beside the shards",
        *container.remarks,
    )


# ---- two folders -----------------------------------------------------------------------------------------------------


def side_by_side(a: Checkpoint, b: Checkpoint) -> tuple[str, ...]:
    """What the folders around two checkpoints are, and which of their files are the same. It is no part of the state."""
    ours, theirs = a.container, b.container
    if ours is None or theirs is None:
        said = (("A", ours), ("B", theirs))
        return tuple(
            f"{side} lies in a folder of {c.kind.title}, the other by itself" for side, c in said if c is not None
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
    """Files by what they are: those of ranks by their rank, whatever the number of ranks makes of their names."""
    return {(f.rule.pattern if f.rule is not None and f.rank >= 0 else f.name, f.rank): f.name for f in container.files}


def _is_same(one: Path, other: Path) -> bool:
    """Raises: UcplError E400."""
    return all(a == b for a, b in zip_longest(_parts(one), _parts(other)))


def _parts(path: Path) -> Iterator[int | bytes]:
    """How long a file is, and what is in it. Raises: UcplError E400."""
    from ucpl.files.watching import reading

    with reading(path), path.open("rb") as file:
        yield os.fstat(file.fileno()).st_size
        fetch_all(file.fileno())
        while part := file.read(CHUNK):
            yield part
