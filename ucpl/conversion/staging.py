"""Files made for a target before it is written.

They are in a hidden folder next to the target, which is removed when the target is complete:

.NAME.ucpl-made/      a folder of weights for each file that is made anew, and texts/

An interrupted run keeps its files. A resumed run makes them again with the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

if TYPE_CHECKING:
    from ucpl.conversion.companion_checks import DecidedCompanions
    from ucpl.conversion.companion_writing import RewrittenFiles
    from ucpl.conversion.keywords import How
    from ucpl.files.checkpoint import Checkpoint

__all__ = ["clear_made", "with_made"]


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
