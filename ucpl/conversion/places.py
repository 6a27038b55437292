"""The place of a target, the folders above it, and staged files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.storage.resolve_url import get_upload_target

if TYPE_CHECKING:
    from ucpl.conversion.companion_checks import DecidedCompanions
    from ucpl.conversion.companion_writing import RewrittenFiles
    from ucpl.conversion.keywords import How
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.planning.plan import Plan
    from ucpl.storage.upload_target import UploadTarget

__all__ = ["refuse_existing", "refuse_file_name", "with_parents", "clear_made", "with_made"]

_NAME_MAX = 255 - len(
    "..ucpl-work"
)  # bytes of a target's name: the hidden folder next to it has this name, with a mark


def refuse_existing(target: Path, how: How, source: object = None) -> None:
    """Refuse a target that exists, before any work.

    Raises: UcplError E500, E507 for the source, E186 for an impossible name, E400 if the place cannot be read.
    """
    from ucpl.files.header_watch import reading

    if (there := get_upload_target(target)) is not None:
        return _refuse_in_store(there, how)
    if target.name in ("", ".."):
        fail("E507", f"{target} cannot be the name of a target", Label(str(target)))
    name = os.fsencode(target.name)
    if len(name) > _NAME_MAX or b"\0" in os.fsencode(target):
        fail("E186", f"no target can be called so: {len(name)} bytes, {_NAME_MAX} at most", Label(str(target)[:80]))
    if not os.path.lexists(target):
        return
    if not (how.get("force") or how.get("resume")):
        if isinstance(source, str | Path) and os.path.realpath(source) == os.path.realpath(target):
            fail(
                "E507", f"{target} is the source, too", Label(str(target)), remedy="choose a DST outside of the source"
            )
        fail("E500", f"{target} exists", Label(str(target)))
    with reading(target):
        is_known = target.is_file() or target.is_dir()
    if not is_known:
        fail("E500", f"{target} is no file and no folder", Label(str(target)), remedy="choose another place")


def refuse_file_name(target: Path, plan: Plan) -> None:
    """Refuse a folder with the name of a file.

    Raises: UcplError E510.
    """
    from ucpl.registry import format_named
    from ucpl.runtime.execute import SINGLE, is_single

    if target.suffix not in (*SINGLE, ".safetensors"):
        return
    files = list(dict.fromkeys(stored.file for stored in plan.targets))
    of = format_named(plan.target.framework)
    is_file = is_single(target, files) and not (of.has_engine or of.has_chunks)
    if not files or is_file or target.is_dir():
        return
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    remedy = f"write {target.with_suffix('')}" + (
        "; one torch file is --to torch_file" if target.suffix in SINGLE else ""
    )
    fail(
        "E510",
        f"{target.name} is a file's name, and the target is a folder with {files[0]}{more}",
        Label(str(target)),
        remedy=remedy,
    )


def _refuse_in_store(there: UploadTarget, how: How) -> None:
    """Refuse a place in a store that has objects.

    Raises: UcplError E500, E503.
    """
    found = there.entries()
    if not found or how.get("force"):
        return
    if there.is_unfinished:
        if how.get("resume"):
            return  # the present objects are removed, and written again
        what = f"{there.url} is incomplete: a run still writes it, or ended early"
        remedy = "if it ended: --resume removes these objects and starts again"
        fail("E500", what, Label(there.url), remedy=remedy)
    if how.get("resume"):
        return  # it may be the result of this run
    what = f"{there.url} exists, {len(found)} object{'s' * (len(found) > 1)}"
    remedy = "Choose another DST, or give --force: the old objects are removed before the new ones go up."
    fail("E500", what, Label(there.url), remedy=remedy)


@contextmanager
def with_parents(target: Path) -> Iterator[None]:
    """Make the missing folders above a target; empty ones go again.

    Raises: UcplError E503, E507.
    """
    from ucpl.runtime.targets import cannot_write

    made: list[Path] = []
    if get_upload_target(target) is None:
        folder = target.absolute().parent
        missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
        for one in reversed(missing):
            try:
                one.mkdir()
            except FileExistsError:  # another rank made it
                continue
            except NotADirectoryError:
                _remove_empty(made)
                fail("E507", f"{one.parent} is no folder", Label(str(target)))
            except OSError as error:
                _remove_empty(made)
                cannot_write(one, error, resumable=False)
            made.append(one)
    try:
        yield
    except BaseException:
        _remove_empty(made)
        raise


def _remove_empty(made: list[Path]) -> None:
    with suppress(OSError):  # an interrupted run keeps finished parts there
        for one in reversed(made):
            one.rmdir()


# ---- files made before a target is written ---------------------------------------------------------------------------


@contextmanager
def with_made(known: DecidedCompanions, target: Path, how: How) -> Iterator[Checkpoint]:
    """The source, with files made for this target in its container.

    Raises: UcplError E500-E508, E610-E614.
    """
    if not known.rewritten:
        clear_made(target)
        yield known.source
        return
    from ucpl.runtime.disk import check_own, disk
    from ucpl.runtime.publish import Lock
    from ucpl.runtime.targets import cannot_write

    folder = _folder(target)
    try:
        if folder.is_symlink():
            disk().remove(folder)
        disk().make_folder(folder)
        check_own(folder)
    except OSError as error:
        cannot_write(folder, error, resumable=False)
    try:
        with Lock(folder / "all"):
            _empty(folder)
            paths = {
                name: path
                for n, one in enumerate(known.rewritten)
                for name, path in _made(one, known, folder / str(n), how)
            }
            yield _with_paths(known.source, paths)
    finally:
        try:
            disk().remove_tree(folder)
        except OSError as error:
            cannot_write(folder, error, resumable=False)


def _empty(folder: Path) -> None:
    """Raises: UcplError E503."""
    from ucpl.runtime.disk import disk
    from ucpl.runtime.targets import cannot_write

    try:
        for old in sorted(folder.iterdir()):
            if old.is_dir() and not old.is_symlink():
                disk().remove_tree(old)
    except OSError as error:
        cannot_write(folder, error, resumable=False)


def clear_made(target: Path) -> None:
    """Remove the files of a killed run.

    Raises: UcplError E502 if a running one uses them, E503 if they cannot be removed.
    """
    folder = _folder(target)
    if not os.path.lexists(folder):
        return
    from ucpl.runtime.disk import disk
    from ucpl.runtime.publish import Lock
    from ucpl.runtime.targets import cannot_write

    try:
        if folder.is_symlink() or not folder.is_dir():
            disk().remove(folder)
            return
        with Lock(folder / "all"):
            pass  # nobody makes anything there
        disk().remove_tree(folder)
    except OSError as error:
        cannot_write(folder, error, resumable=False)


def _folder(target: Path) -> Path:
    place = Path(os.path.realpath(target.absolute().parent), target.name)
    return place.with_name(f".{place.name}.ucpl-made")


def _made(one: RewrittenFiles, known: DecidedCompanions, folder: Path, how: How) -> Iterator[tuple[str, Path]]:
    from ucpl.conversion.keywords import options_from
    from ucpl.formats.opening import framework
    from ucpl.runtime.disk import make_file, make_folders
    from ucpl.runtime.execute import execute
    from ucpl.runtime.targets import cannot_write

    own = evolve(options_from(how), resume=False, force=False, progress=None, tag=None)
    execute(one.plan, known.source, framework(one.plan.target.framework), folder, own)
    texts = folder.with_name(f"{folder.name}.texts")
    for name, text in one.texts.items():
        try:
            make_folders(folder.parent, (texts / name).parent)
            make_file(texts / name, text.encode())
        except OSError as error:
            cannot_write(texts / name, error, resumable=False)
        yield name, texts / name
    yield from ((file, folder / file) for file in dict.fromkeys(line.file for line in one.wish.lines))


def _with_paths(source: Checkpoint, paths: dict[str, Path]) -> Checkpoint:
    from ucpl.files.header_watch import reading

    container = source.container
    assert container is not None
    with reading(container.top):
        sizes = {name: os.path.getsize(path) for name, path in paths.items()}
    files = (
        evolve(f, path=paths[f.name], size=sizes[f.name]) if f.name in paths else f
        for f in container.files
        if f.name in paths or not f.anew  # a shard without remaining tensors
    )
    return evolve(source, container=evolve(container, files=tuple(files)))
