"""What to write instead of a name that nothing defines: the nearest name, a word of another tool, or what is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = ["for_axis", "for_name", "for_place", "nearest"]


def for_name(name: str, names: Iterable[str], otherwise: str) -> str:
    """What is written for a word of another tool, else the nearest name, else what the caller knows."""
    from ucpl.syntax.habits import foreign  # most commands end without an error

    close = nearest(name, names)
    return (f"did you mean `{close}`?" if close else "") or foreign(name) or otherwise


def for_axis(name: str, axes: Sequence[str], sign: str = "@") -> str:
    """Of a mesh axis that there is not. `sign`: what stands in front of one there."""
    if not axes:
        return f"this layout has no mesh: add the line `mesh {name}`, and `{name}` to the parameters of the layout"
    from ucpl.syntax.habits import foreign  # most commands end without an error

    close = nearest(name, axes)
    if close:
        return f"did you mean `{sign}{close}`?"
    if sign == "@" and name in ("size", "shard", "equal", "even", "cut", "rank"):
        return f"a cut names the mesh axis alone: `{sign}{axes[-1]}`, `@chunk({axes[-1]})` or `@spread({axes[-1]})`"
    return (
        foreign(name) if sign == "@" else ""
    ) or f"the mesh axes are {', '.join(axes)}; another one is added to the line `mesh {' '.join(axes)}`"


def for_place(name: str, axes: Sequence[str], *, is_number: bool) -> str:
    """Of what stands behind `at` and is no mesh axis. `is_number`: it is the name of a dim, or of another number."""
    if axes and name in ("rank", "world", "ranks", "global_rank"):
        return f"a rank has a coordinate on each axis: the first one is `{' '.join(f'at {axis}[0]' for axis in axes)}`"
    if axes and is_number and nearest(name, axes) is None:
        return (
            f"`{name}` is a number. Some indices of a dim stand in brackets on the left, `w[{name}[0]] = ...`; what some"
            f" ranks have stands at a coordinate of an axis, `at {axes[0]}[0]`"
        )
    return for_axis(name, axes, "at ")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name that is spelled most like this one, if any is close."""
    return _nearest(name, tuple(names))


@lru_cache(maxsize=256)  # templates ask the same of the same names again and again
def _nearest(name: str, names: tuple[str, ...]) -> str | None:
    import difflib

    found = _of_other_case(name, names) or difflib.get_close_matches(name, names, 1, 0.75) or _one_off(name, names)
    return found[0] if found else None


def _of_other_case(name: str, names: tuple[str, ...]) -> list[str]:
    """The one name that is written with other capitals."""
    found = [n for n in dict.fromkeys(names) if n != name and n.casefold() == name.casefold()]
    return found if len(found) == 1 else []


def _one_off(name: str, names: tuple[str, ...]) -> list[str]:
    """The one short name of the same letters (`pd`, `dp`), or that begins alike and has one more, less or another."""
    turned = [n for n in dict.fromkeys(names) if len(n) > 1 and sorted(n) == sorted(name)]
    if turned:
        return turned if len(turned) == 1 else []
    near = [n for n in dict.fromkeys(names) if len(n) < 4 and n[:1] == name[:1] and _differ_by_one(name, n)]
    return near if len(near) == 1 else []


def _differ_by_one(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    if len(short) == len(long):
        return len(long) > 1 and sum(a != b for a, b in zip(short, long, strict=True)) == 1
    return len(long) == len(short) + 1 and any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
