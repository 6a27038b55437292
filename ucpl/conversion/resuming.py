"""Resume a run from its newest complete checkpoint.

It is converted only if the ranks need it.

Each process of a job may call it at once: a target appears by one rename, and its lock lets one process write it.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.conversion.engine import Engine, asked_of
from ucpl.conversion.opening import infer, open_checkpoint
from ucpl.conversion.requests import Given, called
from ucpl.errors import Label, UcplError, fail
from ucpl.inference.infer import layout_name
from ucpl.language import parse_call
from ucpl.layout.scope import Scope
from ucpl.owned import stranger
from ucpl.records import frozen
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.conversion.keywords import ToApply
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.inference.infer import Inferred

__all__ = ["Resumed", "ranks_here", "resume"]

WAIT = 24 * 3600.0  # seconds, for another process that converts
_PAUSE = 0.2
_STEP = re.compile(
    r"(?:^|[-_=.])(?:checkpoint|ckpt|global_?step|step|iter|iteration|epoch|batch)[-_=]?([0-9]{1,15})(?![0-9])", re.I
)
_BELOW = ("checkpoints", "checkpoint")  # of Accelerate, Lightning, torchtitan
_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")  # of DeepSpeed, Megatron: a loader opens their folder
_RANKS = ("WORLD_SIZE", "SLURM_NTASKS")
_OTHER_WRITES, _IS_MADE = "E502", "E500"
_DEGREES = ("dp", "fsdp")


@frozen
class Resumed:
    """The path for a loader, its source, and notes."""

    path: Path
    source: Path
    layout: str = ""  # of the target; empty: the source itself fits
    notes: tuple[str, ...] = ()


@frozen(eq=False)
class _Newest:
    step: Path
    loaded: Path | None  # the path for a loader of the source; None: only a conversion gives it one
    inferred: Inferred
    notes: tuple[str, ...]


def ranks_here() -> int | None:
    """The number of ranks that torchrun or Slurm sets, or None."""
    for name in _RANKS:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31:
            return int(text)
    return None


def resume(
    run: Path, how: ToApply, *, ranks: int | None = None, to: str = "", say: Callable[[str], None] = lambda _: None
) -> Resumed:
    """Find the newest checkpoint of a run; convert it if needed.

    say: gets a line before a conversion. Raises: UcplError E223 if the number of ranks is unknown or does not divide, E224
    without a checkpoint, E686 if other users made it, and errors of a conversion.
    """
    ranks = ranks if ranks is not None else ranks_here()
    found = _newest(run)
    layout = _wanted(found, ranks, to)
    if not layout and found.loaded is not None:
        return Resumed(found.loaded, found.step, "", found.notes)
    layout = layout or _filled(layout_name(found.inferred.checkpoint), found.inferred.layout.ranks, found)
    target = _place(run, found.step, layout)
    _convert(found.step, target, layout, how, say)
    return Resumed(target, found.step, layout, found.notes)


# ---- the newest complete checkpoint ---------------------------------------------------------------------------------------


def _newest(run: Path) -> _Newest:
    """Open checkpoints from the newest on.

    Raises: UcplError E224 without any; the error of the newest one if none can be read, so that no run begins anew by mistake.
    """
    notes: list[str] = []
    strangers: list[str] = []
    first: UcplError | None = None
    steps = list(_steps(run))
    tracked = next((run / name for name in _TRACKERS if (run / name).is_file()), None)
    for step in steps or [run]:
        if step != run and (who := stranger(step)):
            strangers.append(f"{step}: {who}")
            notes.append(f"passed over  {strangers[-1]}")
            continue
        try:
            inferred = infer(open_checkpoint(step))
        except UcplError as error:
            first = first or error
            notes.append(f"passed over  {step}: {error.diagnostics[0].message}")
            continue
        loaded: Path | None = step
        if tracked is not None and step != run:
            top = _opened(run)
            is_tracked = top is not None and top.root.resolve() == inferred.checkpoint.root.resolve()
            loaded = run if is_tracked else None
            if top is not None and is_tracked and top.container is not None:
                step, inferred = run, infer(top)  # the folder of a Trainer itself
        if loaded == step and (file := _only_file(inferred.checkpoint)) is not None:
            step = loaded = file  # a script loads it by its name
        return _Newest(step, loaded, inferred, tuple(notes))
    if first is not None and (steps or tracked is not None or run.is_file()):
        raise first
    if strangers:
        remedy = "move the run into a folder that is yours alone"
        fail("E686", f"{run} has checkpoints of other users only", Label(str(run), strangers[0]), remedy=remedy)
    fail("E224", f"{run} has no checkpoint", Label(str(run)))


def _only_file(checkpoint: Checkpoint) -> Path | None:
    """The only file of a folder, for a format of single files."""
    kind, files = format_named(checkpoint.format), [*checkpoint.files]
    if kind.has_model_files or checkpoint.container is not None or len(files) != 1 or not checkpoint.top.is_dir():
        return None
    file = checkpoint.root / files[0]
    return file if kind.store().recognises(file) else None


def _opened(path: Path) -> Checkpoint | None:
    try:
        return open_checkpoint(path)
    except UcplError:
        return None


def _steps(run: Path) -> Iterator[Path]:
    """Checkpoints of a run by their names, the latest step first.

    One that the job saved comes before one made of it, as `global_step3` before `global_step3_universal`.
    """
    found: list[tuple[int, bool, int, Path]] = []
    for folder in (run, *(run / name for name in _BELOW)):
        if folder.is_dir():
            for path in folder.iterdir():
                numbers = _STEP.findall(path.name)
                if numbers and not path.name.startswith("."):
                    is_saved = path.stem.endswith(numbers[-1])
                    with suppress(FileNotFoundError):  # a job removes its old steps
                        found.append((int(numbers[-1]), is_saved, path.stat().st_mtime_ns, path))
    return (path for *_, path in sorted(found, reverse=True))


# ---- the layout ------------------------------------------------------------------------------------------------------


def _wanted(found: _Newest, ranks: int | None, to: str) -> str:
    """The layout to convert to; empty if the source fits."""
    inferred = found.inferred
    kind = format_named(inferred.checkpoint.format)
    if not to:
        if not kind.has_engine or kind.is_of_any_ranks:
            return ""
        ranks = _demand_ranks(ranks, found)
        return "" if inferred.layout.ranks == ranks else _filled(layout_name(inferred.checkpoint), ranks, found)
    if "(" not in to:
        to = _filled(to, ranks, found)
    if ".ucpl:" in to or called(to).call.name != layout_name(inferred.checkpoint):
        return to
    return "" if _values(to).items() <= _known(inferred).items() else to


def _filled(name: str, ranks: int | None, found: _Newest) -> str:
    """The call of a layout; its data-parallel degree fits these ranks."""
    names = {p.name for p in called(f"{name}()").layout.parameters if p.default is None}
    degree = next((one for one in _DEGREES if one in names), "")
    return f"{name}({degree} = {_share(_demand_ranks(ranks, found), found)})" if degree else f"{name}()"


def _demand_ranks(ranks: int | None, found: _Newest) -> int:
    if ranks is None:
        remedy = f"write --ranks N; {' or '.join(_RANKS)} gives it to the processes of a job"
        fail("E223", f"{found.step} is of {found.inferred.layout.ranks} ranks, and the number of ranks now is unknown",
             Label(str(found.step)), remedy=remedy)  # fmt: skip
    return ranks


def _share(ranks: int, found: _Newest) -> int:
    """The data-parallel degree of so many ranks."""
    values = _known(found.inferred)
    others = 1
    for name in ("tp", "pp"):
        value = values.get(name)
        others *= value if isinstance(value, int) else 1
    if ranks % others:
        remedy = f"use a multiple of {others} ranks, or name the degrees: "
        remedy += f"--to '{layout_name(found.inferred.checkpoint)}(dp=..., tp=..., pp=...)'"
        fail(
            "E223",
            f"{ranks} ranks do not divide by tp * pp = {others} of {found.step}",
            Label(str(found.step)),
            remedy=remedy,
        )
    return ranks // others


def _known(inferred: Inferred) -> dict[str, object]:
    """Values of a checkpoint's layout by name."""
    return {name: one.value for name, one in inferred.checkpoint.state.settings.items()}


def _values(call: str) -> dict[str, object]:
    """Arguments of a call by name."""
    return {a.name: Scope().evaluate(a.value) for a in parse_call(call).arguments if a.name is not None}


# ---- the target ------------------------------------------------------------------------------------------------------


def _place(run: Path, step: Path, layout: str) -> Path:
    """The target's path: from the source's files and the layout."""
    digest = hashlib.sha256(layout.encode())
    files = [step] if step.is_file() else sorted(path for path in step.rglob("*") if path.is_file())
    for file in files:
        about = file.stat()
        digest.update(f"\0{file.relative_to(step.parent)}\0{about.st_size}\0{about.st_mtime_ns}".encode())
    plain = re.sub("[^a-zA-Z0-9]+", "-", layout).strip("-")[:60]
    here = run.absolute()
    return here.parent / f"{here.name}.resume" / f"{step.stem[:60]}-{plain}-{digest.hexdigest()[:12]}"


def _convert(step: Path, target: Path, layout: str, how: ToApply, say: Callable[[str], None]) -> None:
    """Convert once, whichever process is first; the others wait."""
    from ucpl.runtime.targets import cannot_write

    end = time.monotonic() + WAIT
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cannot_write(target.parent, error, resumable=False)
    for place in (target.parent, target):
        if who := stranger(place):
            remedy = "move the run into a folder that is yours alone"
            fail("E686", f"{place} is not safe from other users: {who}", Label(str(place)), remedy=remedy)
    is_announced = False
    while not target.exists():
        if not is_announced:
            say(f"converts     {step} to {layout}")
            is_announced = True
        try:
            Engine(target, {**how, "resume": True}).convert(asked_of(step, layout, None), Given())
        except UcplError as error:
            code = error.diagnostics[0].code
            if code not in (_OTHER_WRITES, _IS_MADE) or time.monotonic() > end:
                raise
            time.sleep(_PAUSE)
