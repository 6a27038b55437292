"""Remedies for unknown names.

They are the nearest name, a word of another tool, or the known names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ucpl.language.words import USUAL_AXES

__all__ = [
    "alike_names",
    "for_axis",
    "for_dropped",
    "for_name",
    "for_parameter",
    "for_place",
    "in_short",
    "may_be_new",
    "nearest",
]

_OPTIMIZER = ("optimizer", "optim", "optimizer_state", "optimizer_states")
_SHORT = 60  # characters
_OF_RANKS = ("rank", "world", "ranks", "global_rank")
_ALL = ("all", "world", "every", "mesh")
_OF_CUTS = (
    "size",
    "shard",
    "equal",
    "even",
    "cut",
    "rank",
    "split",
    "chunks",
    "slice",
    "divide",
    "uneven",
)  # words that stand behind an `@` elsewhere


def for_name(name: str, names: Iterable[str], otherwise: str) -> str:
    """Remedy for a name: another tool's word, the nearest name, or `otherwise`."""
    from ucpl.language.foreign_words import foreign  # most commands end without an error

    close = nearest(name, names)
    return (f"did you mean `{close}`?" if close else "") or foreign(name) or otherwise


def for_axis(name: str, axes: Sequence[str], sign: str = "@") -> str:
    """Remedy for an unknown mesh axis.

    `sign`: the sign in front of an axis there.
    """
    if not axes:
        return f"this layout has no mesh: the line `mesh {name}` says it, and a parameter of the layout how many ranks"
    from ucpl.language.foreign_words import foreign  # most commands end without an error

    close = nearest(name, axes)
    if close:
        return f"did you mean `{sign}{close}`?"
    if name in _ALL and sign.endswith("@") and sign != "@":
        return f"name each axis: `{sign}{' @'.join(axes)}`"
    if sign == "@" and name in _OF_CUTS:
        return f"a cut names the mesh axis alone: `{sign}{axes[-1]}`, `@chunk({axes[-1]})` or `@spread({axes[-1]})`"
    return (
        foreign(name) if sign == "@" else ""
    ) or f"the mesh axes are {', '.join(axes)}; another one is added to them"


def may_be_new(name: str, axes: Sequence[str]) -> bool:
    """True if an unknown name may be meant as a mesh axis.

    It is no word of another tool, and not like any other name.
    """
    from ucpl.language.foreign_words import foreign  # most commands end without an error

    return not axes or (
        nearest(name, axes) is None and name not in (*_OF_CUTS, *_OF_RANKS, *_ALL) and not foreign(name)
    )


def for_dropped(name: str, states: Sequence[str], tensors: Sequence[str]) -> str:
    """Remedy for an unknown name after `drop`.

    It is no tensor and no state.
    """
    close = nearest(name, [*states, *tensors])
    if close:
        return f"did you mean `{close}`?"
    if name in _OPTIMIZER:
        return "--weights-alone leaves out the optimizer; a name here is that of a tensor or a state, as in exp_avg"
    state = f"a state ({', '.join(states)}), or " if states else ""
    return f"write {state}a tensor, as in {_first(tensors[:1] if len(states) > 2 else tensors)}"


def for_parameter(name: str, parameters: Sequence[str], of_kind: Sequence[str] = ()) -> str:
    """Remedy for a frozen or trained name that is no parameter.

    of_kind: the parameters that can be named there.
    """
    stems = {one.rpartition(".")[0] for one in parameters} - {""}
    stem = name.removesuffix("*").removesuffix(".")
    part = stem if stem in stems else nearest(stem, stems) if name.endswith("*") else None
    close = f"{part}.*" if part else nearest(name, parameters)
    if close:
        return f"did you mean `{close}`?"
    return f"write a parameter of the model, as in {_first(of_kind or parameters)}"


def in_short(names: Sequence[str]) -> str:
    """Names of parameters for a message: those of two short lines."""
    shown = next((n for n in range(min(len(names), 8), 1, -1) if len(", ".join(names[:n])) <= _SHORT), 1)
    return (", ".join(names[:shown]) or "none") + ", ..." * (len(names) > shown)


def _first(names: Sequence[str]) -> str:
    """The first of some names, with a few more."""
    shown = " or ".join(f"`{name}`" for name in names[:2])
    return f"{shown} (there are {len(names):,})" if len(names) > 2 else shown


def for_place(name: str, axes: Sequence[str], *, is_number: bool) -> str:
    """Remedy for a name behind `at` that is no mesh axis.

    `is_number`: it is the name of a dim, or of another number.
    """
    if axes and name in _OF_RANKS:
        return f"a rank has a coordinate on each axis: the first one is `{' '.join(f'at {axis}[0]' for axis in axes)}`"
    if axes and is_number and name in USUAL_AXES:
        return f"`{name}` is a number, and no axis of the mesh: add it to the line, mesh {name} {' '.join(axes)}"
    if axes and is_number and nearest(name, axes) is None:
        return (
            f"`{name}` is a number. Some indices of a dim come in brackets on the left, `w[{name}[0]] = ...`; a line for"
            f" some ranks has a coordinate of an axis, `at {axes[0]}[0]`"
        )
    return for_axis(name, axes, "at ")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name that is spelled most like this one, or None."""
    return _nearest(name, tuple(names))


def alike_names(name: str, names: Iterable[str]) -> list[str]:
    """A few known names like this one, the nearest first.

    None is close enough to be meant.
    """
    import difflib

    return difflib.get_close_matches(name, list(names), 3, 0.65)


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
    """The one short name with a small change.

    It has the same letters (`pd`, `dp`), or begins alike and has one letter more, less or another.
    """
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
