"""Files beside the shards of a container: weights held against the shards, and the folders of two checkpoints side by side.

A conversion carries weights bit for bit where they agree with the shards, and leaves them out, by name, where they do not: who
takes the folder for a model must get the one that goes on training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ucpl.errors import Diagnostic, Label, UcplError, catalogue

if TYPE_CHECKING:
    from ucpl.conversion.keywords import DataPlane
    from ucpl.conversion.planning import Prepared
    from ucpl.extents import Extent, Key
    from ucpl.extents.containers import Container
    from ucpl.proofs.beside import Agreement
    from ucpl.regions import Placement
    from ucpl.stores.checkpoint import Checkpoint

__all__ = ["HeldWeights", "checked", "findings_of", "held_weights", "own_names", "side_by_side", "told"]

_SAFETENSORS = re.compile(r"(?P<stem>.+?)(?:-[0-9]+-of-[0-9]+)?\.safetensors(?:\.index\.json)?")
_ADAPTER = "adapter_model.safetensors"
MEMORY, WORKERS = 512 << 20, 2
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
        out = f"{self.name} is what the shards say: {self.found.tensors} tensors, {self.found.elements:,} elements, bit for bit"
        if self.found.unheld:
            out += f"; {len(self.found.unheld)} tensors are not held against them: {self.found.unheld[0]}"
        return out


def held_weights(checkpoint: Checkpoint, placement: Placement, bounds: DataPlane) -> tuple[HeldWeights, ...]:
    """Every file of weights beside the shards, held against them. What cannot be is said."""
    if checkpoint.container is None:
        return ()
    out = []
    for name, files in _weights_of(checkpoint.container).items():
        if _SAFETENSORS.fullmatch(files[0]) is None:
            out.append(HeldWeights(name, files, None, "it is no safetensors file"))
            continue
        try:
            out.append(HeldWeights(name, files, _agreement(checkpoint, placement, name, bounds)))
        except UcplError as error:
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
    from ucpl.conversion.opening import infer
    from ucpl.proofs.beside import Agreement, agreement
    from ucpl.stores.huggingface import HuggingFace

    assert checkpoint.container is not None
    there = HuggingFace().open_named(checkpoint.container.top, [name])
    own = own_names(checkpoint, name)
    seconds = {alias: checkpoint.aliases[alias] for t in there.tensors if (alias := t.name) in checkpoint.aliases}
    plane = {"memory": bounds.get("memory", MEMORY), "workers": bounds.get("workers", WORKERS)}
    found = Agreement()
    # A second name that is stored beside its first is a tensor like others there: it is held against its owner by itself.
    firsts = {t.name: own.get(t.name, t.name) for t in there.tensors if t.name not in seconds}
    for names in (firsts, *({alias: owner} for alias, owner in seconds.items())):
        if names:
            model = _called(there, names)
            one = agreement(checkpoint, placement, model, infer(model).placement, **plane)
            found = Agreement(
                found.tensors + one.tensors,
                found.elements + one.elements,
                found.differs + one.differs,
                found.unheld + one.unheld,
            )
    return found


def own_names(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """PEFT's files leave out the adapter's name, which the module's tensors have: file's name -> tensor."""
    path = PurePosixPath(name)
    if path.name != _ADAPTER:
        return {}
    adapter = re.escape(path.parent.name or "default")
    left_out = re.compile(rf"(\.modules_to_save)?\.{adapter}(?=\.|\Z)")
    return {left_out.sub("", t.name): t.name for t in checkpoint.tensors}


def _called(model: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """These tensors of a model's files alone, under other names, no two of which are one, as `infer` looks for them."""
    from ucpl.stores.huggingface import FILE

    extents: dict[tuple[str, Key], Extent] = {}
    for (_, key), extent in model.extents.items():
        if (name := names.get(str(key[0]))) is not None:
            extents[FILE, (name,)] = evolve(extent, key=(name,))
    tensors = tuple(evolve(t, name=names[t.name]) for t in model.tensors if t.name in names)
    return evolve(model, extents=extents, tensors=tensors, aliases={}, container=None)


def checked(made: Prepared, bounds: DataPlane) -> tuple[Checkpoint, tuple[HeldWeights, ...]]:
    """The source of a conversion without the weights beside its shards that are not what the shards say, and what was found."""
    from ucpl.stores.containers import sorted_into

    source = made.checkpoint
    assert source is not None
    container = source.container
    if container is None:
        return source, ()
    dropped = {name for name, fate in made.plan.carry.items() if fate == "drop"}
    goes = {p.of.name for p in sorted_into(container.without(dropped), made.plan.target, source).placed}
    asked = evolve(source, container=evolve(container, files=tuple(f for f in container.files if f.name in goes)))
    held = held_weights(asked, made.source.placement, bounds)
    unlike = {file: str(one) for one in held if one.differs for file in one.files}
    if not unlike:
        return source, held
    kept = evolve(container.without(set(unlike)), skipped={**container.skipped, **unlike})
    return evolve(source, container=kept), held


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
        f"in a folder of {container.kind.title}: {len(container.files)} files beside the shards",
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
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while part := left.read(CHUNK):
            if part != right.read(CHUNK):
                return False
    return True
