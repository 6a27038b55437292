"""The fate of each file next to the shards.

Carried, dealt or left out.
Each fate is reported. Files are copied completely, like the shards' own: in tiles, with journal, digests and read-back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.extents import Extent, Structure
from ucpl.extents.containers import CompanionFile, CompanionRule, Container
from ucpl.files.checkpoint import Carried, Checkpoint, Skeleton, SkeletonFile
from ucpl.files.header_watch import reading
from ucpl.records import frozen
from ucpl.registry import format_named

__all__ = ["PlacedFile", "Sorted", "sorted_into", "with_companions"]

WHOLE = "0"  # the storage of a file that is carried as it is


@frozen
class PlacedFile:
    """A file of the target, and the source's file with its bytes."""

    name: str
    of: CompanionFile


@frozen
class Sorted:
    """A container's files in a target. `said`: a line for each fate."""

    placed: tuple[PlacedFile, ...] = ()
    left: dict[str, str] = field(factory=dict)  # name -> why
    said: tuple[str, ...] = ()


def ranks_of(structure: Structure, source: int) -> int:
    """The number of processes that load a target.

    A target for any number of processes has files of the source's ranks.
    """
    if format_named(structure.framework).is_of_any_ranks:
        return source
    made = 1
    for axis in ("dp", "fsdp", "tp", "pp"):
        degree = structure.settings.get(axis)
        made *= degree if isinstance(degree, int) and degree > 0 else 1
    return made


def sorted_into(container: Container, structure: Structure, source: Checkpoint) -> Sorted:
    """Every file of the container, with its fate in a target.

    If the container cannot hold the target's framework, the target has none of it.
    """
    if not container.kind.holds(format_named(structure.framework)):
        return _of_model_alone(container, structure)
    ranks = ranks_of(structure, 1 + max((file.rank for file in container.files), default=0))
    changed = _other_model(structure, source)
    placed: list[PlacedFile] = []
    left = dict(container.skipped)
    said: list[str] = []
    for rule in container.kind.rules:
        mine = sorted((f for f in container.files if f.rule is rule), key=lambda f: f.rank)
        if rule.fate == "weights" and format_named(structure.framework).container:
            left |= dict.fromkeys((file.name for file in mine), "the target has its own files of these weights")
            continue
        if mine and rule.fate == "rank":
            made = _dealt(rule, mine, ranks)
            placed += made
            said.append(_dealt_text(rule, mine, made, ranks))
            kept = {one.of.name for one in made}
            left |= {f.name: f"rank {f.rank} is not there any more" for f in mine if f.name not in kept}
        else:
            bad = [f for f in mine if rule.fate == "weights" and changed and not (f.held or f.anew)]
            left |= dict.fromkeys((file.name for file in bad), changed)
            placed += [PlacedFile(file.name, file) for file in mine if file not in bad]
        said += _by_ranks_text(rule, mine, _ranks_before(container), ranks)
    unknown = [file for file in container.files if file.rule is None]
    placed += [PlacedFile(file.name, file) for file in unknown]
    return Sorted(tuple(placed), left, (*_carried_text(placed, unknown), *said, *_left_text(left)))


def _of_model_alone(container: Container, structure: Structure) -> Sorted:
    """Files of the model itself, in a target of another kind.

    They are kept if the target is a model's own folder.
    """
    of_model = [f for f in container.files if f.rule is not None and f.rule.of_model]
    placed = [PlacedFile(f.name, f) for f in of_model] if format_named(structure.framework).has_model_files else []
    kept = {one.name for one in placed}
    why = f"a target of {structure.framework} is no folder of {container.kind.title}"
    left = dict.fromkeys((f.name for f in container.files if f.name not in kept), why)
    said = (f"{len(left)} files next to the shards are left out: {why}",) if left else ()
    return Sorted(tuple(placed), left, (*_carried_text(placed, []), *said))


def _other_model(structure: Structure, source: Checkpoint) -> str:
    """The reason if weights next to the shards differ from the target's."""
    ours = {t.name: (t.shape, t.dtype) for t in source.state.tensors} | dict.fromkeys(source.state.aliases, ((), ""))
    theirs = {t.name: (t.shape, t.dtype) for t in structure.tensors} | dict.fromkeys(structure.aliases, ((), ""))
    apart = next((name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name)), None)
    if apart is None:
        return ""
    here, there = ours.get(apart), theirs.get(apart)
    is_dtype = here is not None and there is not None and here[0] == there[0]
    what = f"the target has {apart} in {there[1]}" if is_dtype and there else f"the target is another model ({apart})"
    return f"{what}: `ucpl convert TARGET HERE --to 'safetensors()'` writes its weights"


def _dealt(rule: CompanionRule, mine: list[CompanionFile], ranks: int) -> list[PlacedFile]:
    """A file for each rank of the target.

    A rank that had a file keeps it; a new one gets that of the rank at the same position in the source's round.
    """
    of = {file.rank: file for file in mine}
    there = sorted(of)
    return [PlacedFile(rule.name_of(r, ranks), of.get(r, of[there[r % len(there)]])) for r in range(ranks)]


def _dealt_text(rule: CompanionRule, mine: list[CompanionFile], made: list[PlacedFile], ranks: int) -> str:
    had = {file.rank for file in mine}
    new = [r for r in range(ranks) if r not in had]
    text = f"{rule.why} of {len(mine)} ranks for {ranks}: "
    text += "each rank keeps its own" if had >= set(range(ranks)) else "ranks that remain keep their own"
    begun = ", ".join(f"rank {r} begins with that of rank {made[r].of.rank}" for r in new[:8])
    return text + (f"; {begun}" if new else "") + (f", and so on to rank {new[-1]}" if len(new) > 8 else "")


def _ranks_before(container: Container) -> int:
    """Ranks that had a file of their own; 0 where none had."""
    return len({file.rank for file in container.files if file.rank >= 0})


def _by_ranks_text(rule: CompanionRule, mine: list[CompanionFile], before: int, ranks: int) -> list[str]:
    """A note on a carried file if the number of ranks changes."""
    if not mine or not rule.by_ranks or before in (0, ranks):
        return []
    return [f"{_listed([file.name for file in mine])}, of {before} ranks for {ranks}: {rule.by_ranks}"]


def _carried_text(placed: list[PlacedFile], unknown: list[CompanionFile]) -> list[str]:
    anew: dict[str, list[str]] = {}
    for one in placed:
        if one.of.anew:
            anew.setdefault(one.of.anew, []).append(one.name)
    placed = [one for one in placed if not one.of.anew]
    known = [one.name for one in placed if one.of.rule is not None and one.of.rule.fate == "carry"]
    weights = [one.name for one in placed if one.of.rule is not None and one.of.rule.fate == "weights"]
    out = [f"written anew: {_listed(names)}: {why}" for why, names in anew.items()]
    out += [f"as they are: {_listed(known)}"] if known else []
    out += [f"weights next to the shards, bit for bit: {_listed(weights)}"] if weights else []
    out += [f"not known here, and carried as they are: {_listed([f.name for f in unknown])}"] if unknown else []
    return out


def _left_text(left: dict[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, why in left.items():
        by_reason.setdefault(why, []).append(name)
    return [f"left out: {_listed(names)}: {why}" for why, names in by_reason.items()]


def _listed(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def with_companions(skeleton: Skeleton, source: Checkpoint, structure: Structure) -> Skeleton:
    """A target's files with those next to the source's shards.

    Raises: UcplError E471, E486, E488.
    """
    container = source.container
    if container is None:
        return skeleton
    made = sorted_into(container, structure, source).placed
    if container.kind.holds(format_named(structure.framework)):
        _check_name(container, skeleton, source)
        _check_optimizer(container, structure, {one.name for one in made})
    bad = [one.of for one in made if one.of.holds == "unreadable"]
    if bad:
        raise UcplError(*(_unseen(container, file) for file in dict.fromkeys(bad)))
    _check_unchanged(container, made)
    root = source.root.resolve()
    files = tuple(_whole(one, os.path.relpath(_real(container, one.of), root), skeleton.folder) for one in made)
    unsafe = {name for one in made for name in one.of.unsafe}
    return evolve(
        skeleton, files=(*skeleton.files, *files), unsafe_globals=tuple(sorted({*skeleton.unsafe_globals, *unsafe}))
    )


def _check_name(container: Container, skeleton: Skeleton, source: Checkpoint) -> None:
    """Check the name of the shards' folder, which a loader may require.

    Raises: UcplError E486.
    """
    kind = container.kind
    if kind.engines and skeleton.folder and not kind.is_engine(skeleton.folder):
        is_kept = skeleton.folder == source.root.name
        renaming = f"call the source's {skeleton.folder} {kind.tag}, and say so in `latest`: it was renamed"
        fail(
            "E486",
            f"{kind.resumes_by} looks for the shards in {kind.tag}, not in {skeleton.folder}",
            Label(str(container.top / skeleton.folder if is_kept else container.top)),
            remedy=renaming if is_kept else f"leave the tag out, or say {kind.tag}",
        )


def _check_optimizer(container: Container, structure: Structure, there: set[str]) -> None:
    """Check for the file without which a loader ignores the optimizer.

    A file that `--drop` leaves out is put there by the user: E482. Raises: UcplError E471.
    """
    needed = container.kind.optimizer_with
    if (
        format_named(structure.framework).has_engine
        or not needed
        or needed in there
        or (container.top / needed).exists()
    ):
        return
    if any(tensor.states for tensor in structure.tensors):
        fail(
            "E471",
            f"{container.kind.resumes_by} loads no optimizer without {needed}, and the source has none",
            Label(str(container.top / needed), "not there"),
            remedy=f"save the schedule of the script as {needed} in {container.top}; or write --to 'torch_file()' or"
            " 'zero2(dp=...)'; or --weights-alone",
        )


def _check_unchanged(container: Container, made: Iterable[PlacedFile]) -> None:
    """Check that no file has grown since it was opened.

    It would be carried only in part. Raises: UcplError E611.
    """
    for one in made:
        path = container.where(one.of)
        with reading(path):
            now = path.stat().st_size if path.is_file() else 0
        if now != one.of.size:
            fail("E611", f"{one.of.name} changed while it was read: size {one.of.size}, now {now}", Label(str(path)))


def _real(container: Container, file: CompanionFile) -> Path:
    """The real path of a file, with links to the folder resolved."""
    path = container.where(file)
    return container.top.resolve() / file.name if file.path is None else path.parent.resolve() / path.name


def _whole(one: PlacedFile, where: str, folder: str) -> SkeletonFile:
    """A file as one run of bytes, next to the target's shards.

    where: its path relative to the source's step.
    """
    extent = Extent(
        file=where,
        key=(one.of.name,),
        dtype="u8",
        shape=(one.of.size,),
        stride=(1,),
        offset=0,
        storage=WHOLE,
        storage_start=0,
        storage_bytes=one.of.size,
    )
    carried = (Carried(extent, WHOLE, one.of.path is not None),)
    return SkeletonFile(one.name, one.of.size, form="whole", carried=carried, beside=bool(folder))


def _unseen(container: Container, file: CompanionFile) -> Diagnostic:
    return Diagnostic(
        "E488",
        f"{file.name} cannot be looked at: {file.reason}",
        (Label(str(container.top / file.name)),),
        remedy=f"--drop {file.name} leaves it out; or copy it again from the original run",
    )
