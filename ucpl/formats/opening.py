"""The known frameworks, and the one of a folder."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path

from attrs import evolve

from ucpl.errors import Label, UcplError, fail
from ucpl.extents.containers import Container
from ucpl.files.checkpoint import Checkpoint, Framework, Order
from ucpl.files.header_watch import watched
from ucpl.formats.folders.reading import RunFacts, container_of
from ucpl.formats.overlooked import is_of_an_optimizer, is_of_training, optimizers_next_to
from ucpl.formats.run_steps import optimizer_steps, steps_of
from ucpl.registry import format_named, formats

_LOOKED_AT_MAX = 1000  # names of a folder that a missing path is compared with


@cache
def framework(name: str) -> Framework:
    """The reader and writer of a format, by its `framework` statement's name.

    Raises: UcplError E436.
    """
    if name in formats():
        return format_named(name).store()
    fail(
        "E436",
        f"no framework is called `{name}`" if name else "the layout names no framework",
        Label("<layout>", where=f"framework {name}".rstrip()),
        remedy=f"one of {', '.join(formats())}",
    )


@cache
def known_globals() -> frozenset[str]:
    """Classes that formats need; the user is not asked about them."""
    return frozenset(name for one in formats().values() for name in one.known_globals())


def _near(path: Path) -> Path | None:
    """An existing path that is one wrong name or one folder away."""
    from difflib import get_close_matches

    with suppress(OSError, ValueError):
        there = next(one for one in path.parents if one.is_dir())
        first, *rest = path.relative_to(there).parts
        names = [one.name for one in islice(there.iterdir(), _LOOKED_AT_MAX)]
        found = (there.joinpath(name, *rest) for name in get_close_matches(first, names, 3))
        deeper = (there.joinpath(name, first, *rest) for name in sorted(names))
        return next((one for one in (*found, *deeper) if one.exists()), None)
    return None


@watched
def open_checkpoint(
    path: Path, order: Order | None = None, arguments: Mapping[str, object] | None = None, first: str = ""
) -> Checkpoint:
    """Read the headers of a checkpoint of any known framework.

    order: the parameters of an optimizer's numbers, if files lack them. arguments: those of the source's call, for its
    reader. first: the framework that looks first, if others know such files, too. Raises: UcplError E435, E438 (exit 3)
    if no format reads the path.
    """
    try:
        mode = path.stat().st_mode
    except PermissionError as error:
        fail("E400", f"{path} cannot be read: {error.strerror}", Label(str(path)))
    except (OSError, ValueError):  # a ValueError: a path that no file can have
        text = str(path)
        remedy = f"a checkpoint is a folder or a file; if {text} describes it, put it behind --from"
        if not (".ucpl:" in text or "(" in text):
            near = _near(path)
            remedy = f"check the path: did you mean {near}?" if near is not None else ""
        fail("E437", f"{path} does not exist", Label(text), remedy=remedy)
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        fail("E400", f"{path} is neither a folder nor a regular file", Label(str(path)))
    for one in sorted(formats().values(), key=lambda one: one.name != first):
        if framework(one.name).recognises(path):
            opened = one.open(path, order, arguments or {})
            if format_named(opened.format).has_model_files:
                return opened
            if lines := _of_another_iteration(opened):
                opened = evolve(opened, notes=(*opened.notes, *lines), remarks=(*opened.remarks, *lines))
            around = _container_of(opened)
            if around is not None and around.kind.strategies and opened.tag is None and around.kind.tag:
                opened = evolve(opened, tag=around.kind.tag)  # of an engine's folder, if that is the target
            return evolve(opened, container=around)
    if stat.S_ISREG(mode) and (folder := _folder_of(path)) is not None:
        fail("E435", f"{path} is one file of a checkpoint", Label(str(path)), remedy=f"name the checkpoint: {folder}")
    from ucpl.files.described import found_at, reject_stranger

    reject_stranger(path)
    below = _below(path) or _of_language(path)
    found = found_at(path) if not below else None
    fail(
        "E435",
        f"{path} is no known checkpoint" + (f": {found.what}" if found is not None else ""),
        Label(str(path)),
        remedy=below
        or (found.remedy if found is not None else "")
        or "give the save folder, one step's folder, or a file; `ucpl formats` lists all",
    )


def _container_of(opened: Checkpoint) -> Container | None:
    of = format_named(opened.format)
    own, keys = of.companions_of(opened.root), opened.state.carried.keys()
    return container_of(opened.top, opened.root, keys, own, is_chunked=of.has_chunks and bool(own), run=_run_of(opened))


def _of_another_iteration(opened: Checkpoint) -> tuple[str, ...]:
    """A note on a folder named after another iteration.

    Megatron's folders are called by the iteration that their files count.
    """
    said = opened.state.carried.get("iteration")
    name = re.fullmatch(r"iter_0*(\d+)", opened.tag or opened.root.name)
    if (
        not format_named(opened.format).is_of_iterations
        or name is None
        or type(said) is not int
        or int(name[1]) == said
    ):
        return ()
    return (f"{opened.root.name} has files of iteration {said}",)


def _run_of(opened: Checkpoint) -> RunFacts:
    """Facts of the run, to compare with files next to the shards."""
    train_state = opened.state
    ranks = 1
    for axis in ("dp", "fsdp", "tp", "pp"):
        degree = train_state.settings.get(axis)
        ranks *= degree.value if degree is not None and isinstance(degree.value, int) else 1
    skipped = train_state.blobs.get("skipped_steps")
    # Those of the Trainer's own folder are in a file next to its optimizer, and are compared with it.
    own = optimizer_steps(train_state)[-1:] if format_named(opened.format).container else []
    return RunFacts(
        own[0] if own else steps_of(train_state),
        skipped if isinstance(skipped, int) else 0,
        0 if format_named(opened.format).is_of_any_ranks else ranks,
        train_state.carried,
    )


def _of_language(path: Path) -> str:
    """Of a text that describes checkpoints, and is none."""
    if path.suffix != ".ucpl":
        return ""
    return f"{path} is a text: its layouts are called, as in '{path}:NAME()'; `ucpl check {path}` reads it"


def _folder_of(file: Path) -> Path | None:
    """The folder of a checkpoint with this file, or None."""
    for folder in list(file.parents)[:_UP]:
        for one in formats().values():
            try:
                if framework(one.name).recognises(folder):
                    opened = framework(one.name).open(folder)
                    return folder if any(opened.root / name == file for name in opened.files) else None
            except (UcplError, OSError):  # another file of it is damaged
                return None
    return None


_UP = 2  # folders around a file
_DEPTH = 3  # folders below one that is no checkpoint, in which checkpoints are looked for
_FOLDERS = 200  # that are looked at, of each depth
_SHOWN = 6  # of them that an error names
_FILES = 20  # that are looked at
_PART = re.compile(r"-of-[0-9]|rank_?[0-9]|_states?[.]")  # of the name of a file that is one of several


def _below(path: Path) -> str:
    """A remedy that names the newest checkpoint below: `checkpoint-500`, or `iter_3/model`."""
    if not path.is_dir():
        return ""
    level = [path]
    for depth in range(_DEPTH):
        files = _files_in(path) if not depth else []
        level = [c for one in level for c in _folders_in(one)][:_FOLDERS]
        found = [c for c in (*files, *level) if _is_known(c)]
        if found:
            found = [c for c in found if not is_of_training(c.name)] or found
            found = list({c.resolve(): c for c in sorted(found, reverse=True)}.values())  # `last` is a link to a step
            found.sort(key=lambda c: (*_number_of(c, path), str(c)))
            if len(runs := {re.sub("[0-9]+", "#", str(c.relative_to(path))): c for c in found}) > 1:  # the newest step
                shown = ", ".join(sorted(map(str, runs.values()))[:_SHOWN])
                return f"name one of the {len(runs)} in it: {shown}" + ", ..." * (len(runs) > _SHOWN)
            newest = found[-1]
            if near := optimizers_next_to(newest):
                from ucpl.formats.dcp.folders import joined_by  # an error alone needs it

                other = newest.parent / near[0]
                return f"its model, {newest}, and its optimizer, {other}, are apart: " + (
                    "name the model's path, and convert its weights with --weights-alone"
                    if other.suffix == ".safetensors"
                    else f"{joined_by(newest, other)}; --weights-alone converts the model alone"
                )
            return f"name one checkpoint in it, such as {newest}"
    return ""


def _is_known(path: Path) -> bool:
    try:
        return any(framework(one).recognises(path) for one in formats())
    except UcplError:  # it is damaged
        return False


def _files_in(path: Path) -> list[Path]:
    """Files of a folder that may be a checkpoint each.

    Not those whose names differ in a number alone: they may be parts of one.
    """
    files = sorted(c for c in path.iterdir() if c.is_file() and not is_of_an_optimizer(c.name))
    alike = Counter(re.sub("[0-9]+", "#", c.name) for c in files)
    files = [c for c in files if alike[re.sub("[0-9]+", "#", c.name)] == 1]
    return [c for c in files if not _PART.search(c.name)][:_FILES]


def _folders_in(path: Path) -> list[Path]:
    """Folders of a folder. One that cannot be looked into has none."""
    try:
        return [c for c in path.iterdir() if c.is_dir() and os.access(c, os.R_OK | os.X_OK)]
    except OSError:
        return []


def _number_of(path: Path, top: Path) -> tuple[bool, int]:
    """A flag and the last number in a path below `top`."""
    found = re.findall("[0-9]{1,18}", str(path.relative_to(top)))
    return bool(found), int(found[-1]) if found else 0
