"""The place of a target, and the folders above it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.errors import Label, fail
from ucpl.storage.resolve_url import get_upload_target

if TYPE_CHECKING:
    from ucpl.conversion.keywords import How
    from ucpl.planning.plan import Plan
    from ucpl.storage.upload_target import UploadTarget

__all__ = ["refuse_existing", "refuse_file_name", "with_parents"]

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
