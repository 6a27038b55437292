"""What to say where a tensor's place is another one's, and what to write there: it hangs on how the two differ. E215."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ucpl.errors import fail
from ucpl.layout import Entry
from ucpl.layout import axes as ax
from ucpl.layout.scope import at
from ucpl.regions.claims import Holder, Mark, Place, Spot
from ucpl.syntax.nodes import Span

__all__ = ["Buffer", "Stored", "taken"]

_STATE = 'name the state in the key, as in "{key}.{state}"; or give each state a file of its own'
_APART = "name the index or mesh axis that tells them apart in the file's or the key's template"


class Stored(NamedTuple):
    """What an entry stores at one place: one and the same tensor is equal, whichever rank tells of it."""

    state: str
    targets: tuple[tuple[str | None, str], ...]
    shape: tuple[ax.Axis, ...]
    coordinates: tuple[tuple[str, int], ...]  # along the mesh axes that cut it
    digits: tuple[tuple[str, int], ...]


class Buffer(NamedTuple):
    """A flat buffer of a state line: of which line and state, and which of its buffers and pieces."""

    line: int
    state: str
    spot: Spot


def taken(span: Span, entry: Entry | None = None) -> Callable[[Place, Holder, Mark, Mark], NoReturn]:
    """What raises it, for a part of these lines. `entry`: whose tensor it is; None for a flat buffer."""

    def blame(place: Place, other: Holder, mine: Mark, theirs: Mark) -> NoReturn:
        fail(
            "E215",
            f"two tensors, or two pieces of one, have one place: {'/'.join(map(str, place[1]))} of {place[0]}",
            at(span, "this one"),
            at(other.span, "and this one"),
            remedy=_remedy(place, entry, mine, theirs, one_line=span == other.span),
        )

    return blame


def _remedy(place: Place, entry: Entry | None, mine: Mark, theirs: Mark, *, one_line: bool) -> str:
    key = "/".join(map(str, place[1]))
    if not place[0]:
        return 'the file has no name: file weights = torch "rank_{tp}.pt"'
    if isinstance(mine, Buffer) and isinstance(theirs, Buffer) and one_line:
        lacks = "state" if mine.state != theirs.state else "bucket"
        more = "; where ranks differ, the mesh axis in the file's name, as {dp}" if lacks == "bucket" else ""
        return f'a line of many buffers names each in its key by {{{lacks}}}, as in "{{bucket}}/{{state}}"{more}'
    if entry is None or not isinstance(mine, Stored) or not isinstance(theirs, Stored):
        return _telling_apart(key, ())
    if mine.state != theirs.state:
        return _STATE
    if mine.targets != theirs.targets:
        names = [" + ".join(path for _, path in one.targets) for one in (mine, theirs)]
        if one_line:
            word = "{key}" if mine.state != "weight" else "{name}"
            of = ": {name} is the same for all layers, {key} is not" if word == "{key}" else ""
            return f'the line stands for {names[0]} and {names[1]}: name the tensor in the key, as in "{word}"{of}'
        indices = "".join(f".{{{name}}}" for axis in entry.indices for name in list(ax.dims_of(axis))[:1])
        said = f"they are two tensors, {names[0]} and {names[1]}: give one of them another key"
        if f"{entry.path}{indices}" == key:  # its own: the other one's is to be another
            return f'{said}\nwrite: as "{names[1]}"'
        return f'{said}\nwrite: as "{entry.path}{indices}"'
    differing = [n for (n, a), (_, b) in zip(mine.digits, theirs.digits, strict=False) if a != b]
    cut = [n for (n, a), (_, b) in zip(mine.coordinates, theirs.coordinates, strict=False) if a != b]
    if mine.state != "weight" and differing and not cut:
        return f'name the tensor in the key by {{key}}, which has its {" and ".join(differing)}: "{{state}}/{{key}}"'
    return _telling_apart(key, (*differing, *cut))


def _telling_apart(key: str, by: tuple[str, ...]) -> str:
    """With the key as it should be, where it has a sign of another tool in the place of an index."""
    sign = next((s for s in ("%d", "%s", "*", "\\d+") if s in key), "")
    if sign:
        return f'{_APART}: an index stands in braces, as in "{key.replace(sign, "{l}")}"'
    return f"{_APART}: {' and '.join(f'{{{name}}}' for name in by)}" if by else f"{_APART}, as {{l}} or {{tp}}"
