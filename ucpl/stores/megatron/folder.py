"""Where a checkpoint of Megatron's lies: the folder of a run with its tracker, or one iteration's."""

from __future__ import annotations

from pathlib import Path

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.stores.texts import read_small

__all__ = ["TRACKER", "Step", "step_of"]

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_DIGITS_MAX = 12


@frozen
class Step:
    """`top`: what the user named; `root`: the iteration's folder; `tag`: its name, where a tracker leads to it."""

    top: Path
    root: Path
    tag: str | None = None


def step_of(path: Path) -> Step:
    """Raises: UcplError E532 where the tracker leads nowhere."""
    tracker = path / TRACKER
    if not tracker.is_file():
        return Step(path, path)
    raw = read_small(tracker, _DIGITS_MAX)
    text = raw.decode("ascii", "replace").strip() if raw is not None else ""
    tag = text if text == _RELEASE else f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else ""
    if not tag or not (path / tag).is_dir():
        fail(
            "E532",
            f"{TRACKER} says {text or '(more than a number)'!r:.40}, and there is no folder "
            + (f"{tag} beside it" if tag else "of that iteration"),
            Label(str(tracker), text[:40]),
            remedy="name an iteration's folder (iter_0000100)",
        )
    return Step(path, path / tag, tag)
