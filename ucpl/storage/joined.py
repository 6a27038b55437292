"""Several paths as one source: `model.pt+optimizer.pt`, `dcp_model/+dcp_optim/`.

The first has the model, the second its optimizer. A folder of links represents them: the files of all paths under their own
names, a single file of the optimizer as `optimizer.SUFFIX`. If two folders have files of one name, those of the first are in
`model`, those of the second in `optimizer`. Readers of formats know folders of both kinds. Not here: the meaning of files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ucpl.errors import Label, calling, fail
from ucpl.storage import cache_dirs
from ucpl.storage.cache_dirs import current_scope
from ucpl.storage.urls import is_url

__all__ = ["SIGN", "is_joined", "join", "parts_of", "paths_in"]

SIGN = "+"
_MODEL, _OPTIMIZER = "model", "optimizer"  # of the paths, where two have files of one name
_FILES_MAX = 1_000_000
_JOINED: dict[Path, tuple[Path, ...]] = {}  # folder of links -> the paths that it represents


def paths_in(text: str) -> tuple[str, ...]:
    """The paths of a text with plus signs.

    None if the text is a path itself. A sign within the name of an existing path is part of it.
    """
    if SIGN not in text or os.path.lexists(text):
        return ()
    out: list[str] = []
    for piece in text.split(SIGN):
        longer = f"{out[-1]}{SIGN}{piece}" if out else ""
        is_url_with_sign = bool(out) and is_url(out[-1]) and not is_url(piece)
        if out and (is_url_with_sign or (not _exists(out[-1]) and _exists(longer))):
            out[-1] = longer
        else:
            out.append(piece)
    return tuple(out)


def is_joined(text: str | Path) -> bool:
    """True if a text names several paths, and one exists."""
    found = paths_in(str(text)) if SIGN in str(text) else ()
    return len(found) > 1 and any(map(_exists, found))


def parts_of(path: Path) -> tuple[Path, ...]:
    """The paths that a folder of links represents, else the path itself."""
    return _JOINED.get(path, (path,))


def join(text: str, parts: Sequence[Path]) -> Path:
    """A folder of links to the files of some paths.

    Raises: UcplError E400, E437.
    """
    for path in parts:
        if not path.exists():
            fail("E437", f"{path} of {text} does not exist", Label(text, where=str(path)))
    root = cache_dirs.fresh() / "joined"
    root.mkdir()
    current_scope().enter_context(calling(str(root), text))
    found = [dict(_files_of(path)) for path in parts]
    if len(parts) == 2 and parts[1].is_file():
        found[1] = {_OPTIMIZER + parts[1].suffix: parts[1].absolute()}
    names = [name for files in found for name in files]
    if len({*names}) < len(names):
        heads = (_MODEL, _OPTIMIZER, *(f"part_{n}" for n in range(2, len(parts))))
        found = [{f"{head}/{n}": p for n, p in files.items()} for head, files in zip(heads, found, strict=False)]
    for path, files in zip(parts, found, strict=True):
        for name, file in files.items():
            place = root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file)
            if path.is_file():
                current_scope().enter_context(calling(str(place), str(path)))
    _JOINED[root] = tuple(parts)
    current_scope().callback(_JOINED.pop, root, None)
    return root


def _exists(text: str) -> bool:
    return bool(text) and (os.path.lexists(text) or is_url(text))


def _files_of(path: Path) -> Iterator[tuple[str, Path]]:
    """Files by their names below a path. Raises: UcplError E400."""
    here = path.absolute()
    if not here.is_dir():
        yield here.name, here
        return
    count = 0
    for folder, below, names in os.walk(here, onerror=_reject):
        below.sort()
        for name in sorted(names):
            count += 1
            if count > _FILES_MAX:
                fail("E400", f"{path} has more than {_FILES_MAX:,} files", Label(str(path)))
            file = Path(folder, name)
            yield file.relative_to(here).as_posix(), file


def _reject(error: OSError) -> None:
    fail("E400", f"{error.filename} cannot be read: {error.strerror}", Label(str(error.filename)))
