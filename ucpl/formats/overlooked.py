"""Files of a checkpoint's folder that its reader skips, with reasons.

If one is an optimizer's, the checkpoint is not weights alone. Not here: files that training frameworks keep around
shards (formats.folders), and the error (conversion.accounting).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ucpl.extents import key_text
from ucpl.extents.account import NotRead
from ucpl.files.carrying import by_place, origin_of
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.header_watch import reading
from ucpl.files.pickles import tensors_of
from ucpl.formats.folders.reading import OWN, POINTERS

__all__ = ["is_of_an_optimizer", "is_of_training", "not_read_of", "optimizers_next_to"]

FILES_MAX = 10_000  # that are named
_OPTIMIZER = re.compile(r"(?:^|[_.-])optim(?:izer|izers|s)?(?=[_.\-0-9]|$)", re.IGNORECASE)
_TEXTS = (".json", ".txt", ".md", ".py", ".yaml", ".yml", ".toml", ".jinja", ".log", ".csv", ".sh", ".ipynb")
_TRACKERS = (*POINTERS, "latest_checkpointed_iteration.txt", "latest_checkpointed_iteration")
_WHY = "it is no part of the checkpoint that is read"
_STATE = "its optimizer state is in a form that is not read"
_OF_TRAINING = re.compile(r"train(?:ing|er)?(?:[_-]?states?)?", re.IGNORECASE)  # folders that hold an optimizer's
_NEXT_TO_IT = "an optimizer's state is next to these weights, and is not read: MODEL+OPTIMIZER names both"


def is_of_training(name: str) -> bool:
    """Test whether a folder's name is that of a training state."""
    return is_of_an_optimizer(name) or _OF_TRAINING.fullmatch(name) is not None


def is_of_an_optimizer(name: str) -> bool:
    """Test whether a name is one of frameworks' names of optimizer states."""
    last = PurePosixPath(name.rstrip("/")).name
    return not last.endswith(_TEXTS) and _OPTIMIZER.search(last) is not None


def not_read_of(checkpoint: Checkpoint) -> tuple[NotRead, ...]:
    """Values and files that were not read.

    They are those that the reader states, then all other files of its folder. Around weights alone, only files with an
    optimizer's name count. Raises: UcplError E400.
    """
    said = {one.name for one in checkpoint.not_read}
    with reading(checkpoint.top):
        others = () if checkpoint.top.is_file() else _others(checkpoint)
        found = (*checkpoint.not_read, *(one for one in others if one.name not in said))
        return (*found, *_tensors(checkpoint, tuple(said)), *_next_to(checkpoint))


def _next_to(checkpoint: Checkpoint) -> Iterator[NotRead]:
    """An optimizer next to a folder or file of weights alone.

    `model/` and `optimizer/` may be of one run.
    """
    if checkpoint.state.scalars or any(t.states for t in checkpoint.state.tensors):
        return
    top = checkpoint.top.resolve()
    lead = "" if top.is_file() else "../"
    for name in optimizers_next_to(top):
        yield NotRead(f"{lead}{name}{'/' * (top.parent / name).is_dir()}", _NEXT_TO_IT)


def optimizers_next_to(path: Path) -> list[str]:
    """List files and folders of optimizers next to a path.

    Folders of a training state are searched, too.
    """
    top = path.resolve()
    try:
        beside = sorted(entry.name for entry in os.scandir(top.parent) if entry.name != top.name)
        inside = [name for name in beside if _OF_TRAINING.fullmatch(name) and (top.parent / name).is_dir()]
        beside += [f"{name}/{entry}" for name in inside for entry in sorted(os.listdir(top.parent / name))]
    except OSError:  # the folder around it may be another user's
        return []
    return [*filter(is_of_an_optimizer, beside)]


def _tensors(checkpoint: Checkpoint, said: tuple[str, ...]) -> Iterator[NotRead]:
    """Tensors that are neither payload nor in a carried value."""
    train_state = checkpoint.state
    values = [
        train_state.carried,
        train_state.blobs,
        [g.hyper for g in train_state.groups],
        checkpoint.state.parallel.carried_by_rank.of,
    ]
    held = set()
    for value in values:
        for _, ref in tensors_of(value, ""):
            held.add((*origin_of(ref.storage.name), ref.offset, ref.shape, ref.stride, ref.storage.dtype))
    for place, extent in by_place(checkpoint.carried_extents.values()).items():
        name = f"{extent.file}: {key_text(extent.key)}"
        if extent.numel and place not in held and not any(name.startswith(f"{one}/") or name == one for one in said):
            yield NotRead(name, "it is no tensor of the model, and in no value of the run", kind="value")


def _others(checkpoint: Checkpoint) -> Iterator[NotRead]:
    top, root = checkpoint.top, checkpoint.root
    is_below = top.resolve() != root.resolve() and top.is_dir()
    lead = os.path.relpath(root.resolve(), top.resolve()).replace(os.sep, "/") + "/" if is_below else ""
    known = {PurePosixPath(lead + file).as_posix() for file in checkpoint.files}
    known |= {name for one in checkpoint.not_read for name in (one.name, PurePosixPath(lead + one.name).as_posix())}
    container = checkpoint.container
    if container is not None:
        known |= {file.name for file in container.files} | {name.rstrip("/") for name in container.skipped}
    inside = {parent.as_posix() for name in known for parent in PurePosixPath(name).parents}
    for count, name in enumerate(_named(top, "", known, inside | {lead.rstrip("/")}, is_below)):
        if count == FILES_MAX:
            yield NotRead(f"and more than {FILES_MAX:,} files", _WHY)
            return
        is_state = is_of_an_optimizer(name)
        yield NotRead(name, _STATE if is_state else _WHY, is_state)


def _named(top: Path, under: str, known: set[str], inside: set[str], is_below: bool) -> Iterator[str]:
    """Files, and folders without files of the checkpoint, which are not searched."""
    for entry in sorted(os.scandir(top / under), key=lambda entry: entry.name):
        name = f"{under}{entry.name}"
        if name in known or (not under and entry.name in (*OWN, *_TRACKERS)):
            continue
        if not entry.is_dir():
            yield name
        elif name in inside and not entry.is_symlink():
            if name.split("/")[-1] in OWN:
                continue
            yield from _named(top, f"{name}/", known, inside, is_below)
        elif not (is_below and not under):  # other steps of a save folder are checkpoints of their own
            if entry.name not in OWN and any(os.scandir(entry.path)):
                yield f"{name}/"
