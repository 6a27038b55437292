"""The container of a checkpoint, and its files with rules and sizes.

Classes that files name are recorded. Pickles are read by the inert machine: no name in them is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents.containers import CompanionFile, CompanionRule, Container, Kind
from ucpl.files.header_watch import walked
from ucpl.files.inert import HOLDERS
from ucpl.files.model_texts import damaged_texts
from ucpl.files.pickles import loads, unsafe_globals
from ucpl.files.texts import read_small
from ucpl.files.torch_files import read_torch_file
from ucpl.files.zips import open_file, read_zip_directory
from ucpl.formats.folders.kinds import KINDS
from ucpl.records import frozen
from ucpl.storage.reading import pread
from ucpl.texts import is_text

__all__ = ["container_of", "RunFacts", "of_another_step"]

OWN = ("ucpl",)  # folders that a conversion writes itself
POINTERS = ("latest", "latest_universal")  # which a conversion writes itself, too
FILES_MAX = 10_000
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
PICKLE_MAX = 64 << 20  # bytes of a bare pickle
JSON_MAX = 64 << 20


def container_of(
    top: Path,
    root: Path,
    client: Collection[object],
    own: Sequence[str],
    *,
    is_chunked: bool,
    run: RunFacts | None,
) -> Container | None:
    """The container of a step's folder `root`, if its parent was named.

    client: keys of its client_state. run: facts that the shards state of the run. own: files of the checkpoint, and folders
    of FSDP's chunks, in `root`, next to a container's files. Raises: UcplError E487, E489.
    """
    if not top.is_dir() or (top.resolve() == root.resolve() and not own):
        return None
    kind = next((kind for kind in KINDS if _is(kind, top) or kind.is_marked_by_step(root.name, client)), None)
    if kind is None:
        return None
    if is_chunked:
        kind = kind.around_chunks
    _check_one_engine(kind, top)
    files: list[CompanionFile] = []
    skipped: dict[str, str] = {}
    for name in _names(kind, top, [top / name for name in own] or [root], skipped):
        rule, rank = kind.rule_of(name)
        if rule is not None and rule.fate == "leave":
            skipped[name] = rule.why
        else:
            files.append(_looked_at(top, name, rule, rank))
    facts = run or RunFacts()
    odd = (
        *_needed(kind, top, files, has_engine=not own),
        *_missing(kind, files, facts),
        *of_another_step(top, files, facts),
    )
    return Container(kind, top, tuple(files), skipped, (*_remarks(files), *odd), odd)


def _is(kind: Kind, top: Path) -> bool:
    return any(kind.is_marked_by(entry.name) and entry.is_file() for entry in sorted(top.iterdir()))


def _check_one_engine(kind: Kind, top: Path) -> None:
    """Check that the container has shards of one engine.

    A target would have those of one engine only, and the others would resume with different numbers.
    """
    there = sorted(entry.name for entry in top.iterdir() if kind.is_engine(entry.name) and entry.is_dir())
    if len(there) > 1:
        fail(
            "E487",
            f"{top} has the shards of {len(there)} engines: {', '.join(there[:5])}",
            *(Label(str(top / name)) for name in there[:5]),
            remedy=f"convert each engine by its own folder, {top / there[0]}; put the results side by side",
        )


def _names(kind: Kind, top: Path, steps: Sequence[Path], skipped: dict[str, str]) -> Iterator[str]:
    """Regular files below the container.

    Files of the step, ucpl's own files and skipped folders are excluded.
    """
    own, count = [os.path.realpath(step) for step in steps], 0
    for folder, folders, files in walked(top):
        here = Path(folder)
        listed, folders[:] = sorted(folders), []
        for name in listed:
            below = here / name
            if os.path.realpath(below) in own or (here == top and name in OWN):
                continue
            shown = f"{below.relative_to(top).as_posix()}/"
            if why := _no_folder(kind, below, shown):
                skipped[shown] = why
            else:
                folders.append(name)
        for name in sorted(files):
            count += 1
            if count > FILES_MAX:
                fail("E489", f"{top} has more than {FILES_MAX:,} files next to the shards", Label(str(top)))
            below = here / name
            shown = below.relative_to(top).as_posix()
            if shown in POINTERS or os.path.realpath(below) in own:
                continue
            if why := _no_file(below, top):
                skipped[shown] = why
            else:
                yield shown


def _no_folder(kind: Kind, path: Path, shown: str) -> str:
    """Why nothing in a folder is of the container, if so."""
    if path.is_symlink():
        return "a link to a folder"
    rule, _ = kind.rule_of(f"{shown}any")
    return rule.why if rule is not None and rule.fate == "leave" and rule.pattern.endswith("/**") else ""


def _no_file(path: Path, top: Path) -> str:
    """Why it is no file of the container, if it is none."""
    if not is_text(path.name) or not path.name.isprintable():
        return "its name is no plain text"
    if not path.is_file():
        return "no regular file"
    if path.is_symlink() and not path.resolve().is_relative_to(top.resolve()):
        return "a link that leads out of the folder"
    return ""


def _looked_at(top: Path, name: str, rule: CompanionRule | None, rank: int) -> CompanionFile:
    path = top / name
    found = CompanionFile(name, path.stat().st_size, rule, rank)
    try:
        value = _pickled(top, name)
    except UcplError as error:
        return evolve(found, holds="unreadable", reason=error.diagnostics[0].message)
    if value is None:
        return found
    known = HOLDERS | (rule.named if rule is not None else frozenset())
    return evolve(found, holds="pickle", unsafe=tuple(n for n in unsafe_globals(value) if n not in known))


def _pickled(top: Path, name: str) -> tuple[object] | None:
    """The inert value of a torch.save file or pickle; None for others.

    A file with a pickle's name must be a pickle, with any first bytes: loaders run those of protocol 0, of tar files
    and of torch before 1.6, which has several in sequence. Raises: UcplError.
    """
    fd = open_file(top / name, name)
    try:
        head = pread(fd, 4, 0)
        if head == b"PK\x03\x04":
            is_torch = any(member.endswith("/data.pkl") for member in read_zip_directory(fd, name).members)
            return (read_torch_file(top, name).value,) if is_torch else None
    finally:
        os.close(fd)
    is_bare = head[:1] == b"\x80" and len(head) > 1 and 2 <= head[1] <= 5
    if not head or not (is_bare or name.endswith(PICKLES)):
        return None
    data = read_small(top / name, PICKLE_MAX)
    if data is None:
        fail("E425", f"{name} is a pickle of more than {PICKLE_MAX} bytes", Label(str(top / name)))
    return (loads(data, name, alone=True),)


def _needed(kind: Kind, top: Path, files: list[CompanionFile], *, has_engine: bool) -> Iterator[str]:
    """Files that `resumes_by` looks for, and that are missing or damaged."""
    there = {file.name for file in files}
    for name in kind.needs:
        if name not in there:
            yield f"{name} is missing: {kind.resumes_by} needs it"
        elif name.endswith(".json") and not _is_json(top / name):
            yield f"{name} is no JSON: {kind.resumes_by} cannot read it"
    texts = (name for name in sorted(there) if name.endswith("config.json"))
    yield from damaged_texts({name: read_small(top / name, JSON_MAX) or b"" for name in texts})
    if not has_engine and kind.optimizer_with and kind.optimizer_with not in there:
        yield f"{kind.optimizer_with} is missing: {kind.resumes_by} loads no optimizer without it"


def _remarks(files: list[CompanionFile]) -> Iterator[str]:
    for file in files:
        if file.holds == "unreadable":
            yield f"{file.name} cannot be looked at: {file.reason}"
        elif file.unsafe:
            yield f"{file.name} names {', '.join(file.unsafe[:3])}: convert asks for --allow-global, or --drop {file.name}"


def _missing(kind: Kind, files: list[CompanionFile], run: RunFacts) -> Iterator[str]:
    """Missing files of ranks, up to the shards' count or last rank.

    A numbered file where one rank alone has none is of several ranks.
    """
    for rule in kind.rules:
        if rule.fate != "rank":
            continue
        mine = [file for file in files if file.rule is rule]
        ranks = sorted(file.rank for file in mine)
        least = 2 if rule.alone and any(file.name != rule.alone for file in mine) else 1
        missing = [rank for rank in range(max(run.ranks, len(ranks), least)) if rank not in ranks]
        if missing and not ranks:
            yield f"{rule.name_of(0, len(missing))} is missing: {rule.why} begin anew"
        elif missing:
            names = [rule.name_of(rank, len(ranks) + len(missing)) for rank in missing]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            of = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"
            yield (
                f"{names[0]}{more} missing: {rule.why} of {of} alone"
                if more
                else (f"{names[0]} is missing: {rule.why} of {of} alone")
            )


def _is_json(path: Path) -> bool:
    data = read_small(path, JSON_MAX)
    try:
        return data is not None and isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


# ---- files of another step -------------------------------------------------------------------------------------------


_JSON_MAX = 64 << 20
_ACCELERATE = "scheduler.bin"
_SCHEDULES = ("scheduler.pt", _ACCELERATE)
_STATES = ("trainer_state.json",)
_SCALER = "scaler.pt"


@frozen
class RunFacts:
    """Facts of a run in its shards.

    `step`: steps of the optimizer; None: unknown.
    """

    step: int | None = None
    skipped: int = 0  # steps among these that an overflow has skipped
    ranks: int = 0  # 0: they do not say it
    client: dict[object, object] = field(factory=dict)  # client_state


def of_another_step(top: Path, files: list[CompanionFile], run: RunFacts) -> Iterator[str]:
    """A line for each file with another step than the shards'."""
    if run.step is None:
        return
    for name, said in _stated(top, {file.name for file in files}, run):
        if said is not None and not run.step - run.skipped <= said <= run.step:
            yield f"{name} is of step {said}, the shards are of step {run.step}"


def _stated(top: Path, there: set[str], run: RunFacts) -> Iterator[tuple[str, int | None]]:
    for name in _STATES:
        if name in there and _SCALER not in there:  # the Trainer counts steps that an overflow has skipped, too
            yield name, _whole(_json(top / name).get("global_step"))
    for name in _SCHEDULES:
        if name in there:
            yield name, _steps_of(_torch(top, name), run, by_ranks=name == _ACCELERATE)
    yield "client_state global_step", _whole(run.client.get("global_step"))


def _steps_of(value: object, run: RunFacts, *, by_ranks: bool) -> int | None:
    """Optimizer steps that a schedule of torch has counted, or None.

    None: it counts something else. by_ranks: Accelerate steps a schedule once for each rank, in every step.
    """
    if not isinstance(value, dict) or "num_bad_epochs" in value:
        return None
    counted = _whole(value.get("last_epoch"))
    is_of_ranks = run.step is not None and by_ranks and counted == run.step * run.ranks
    return run.step if is_of_ranks else counted


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(read_small(path, _JSON_MAX) or b"")
    except (UcplError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _torch(top: Path, name: str) -> object:
    try:
        return read_torch_file(top, name).value
    except UcplError:
        return None
