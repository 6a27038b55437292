"""A verb whose process is one of several.

The first rank prints the result, the others only errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ucpl.errors import Label, fail

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.runtime.process_group import ProcessGroup

__all__ = ["is_one_of_several", "member", "refuse_several", "seen_by_all"]


def is_one_of_several() -> bool:
    """True if this process was started as a rank of a job."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    from ucpl.ranks.job import is_asked

    return is_asked()


def refuse_several(verb: str) -> None:
    """Raises: UcplError E624, where several processes would do one thing."""
    if is_one_of_several():
        fail("E624", f"ucpl {verb} was started as rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
             Label("<environment>", where="RANK, WORLD_SIZE"))  # fmt: skip


@contextmanager
def member(console: Console, wait: int) -> Iterator[ProcessGroup | None]:
    """The job of this rank; None for a process alone.

    Without a job, torch.distributed is not imported. wait: seconds to wait for ranks that have not started.
    """
    if not is_one_of_several():
        yield None
        return
    from ucpl.ranks.job import Patience
    from ucpl.ranks.job import member as joined

    with joined(Patience(wait, console.note)) as team:
        console.quiet = console.quiet or team.rank > 0
        yield team


@contextmanager
def seen_by_all(team: ProcessGroup | None, source: str, keys: str | None) -> Iterator[Path]:
    """A source that each rank can read, wherever its files are.

    Raises: UcplError E400, E621, E625, E628, E687.
    """
    path = Path(source)
    if team is None:
        yield path
        return
    from ucpl.files.header_watch import reading
    from ucpl.ranks.job import StoreGroup
    from ucpl.ranks.scattered_files import one_folder

    assert isinstance(team, StoreGroup)
    with reading(path), one_folder(team, team, path, Path(keys) if keys else None) as folder:
        yield folder
