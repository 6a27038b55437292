"""Hyper-parameters and numbers of two checkpoints by parameter, whatever their groups are."""

from __future__ import annotations

from collections.abc import Iterator

from ucpl.errors import Diagnostic, Label, catalogue
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.scalars import number_of
from ucpl.registry import format_named
from ucpl.verification.values import ValueTensors, apart, value_text

__all__ = ["unlike_hypers", "unlike_numbers"]


def unlike_hypers(known: Checkpoint, written: Checkpoint, code: str, *, every: bool = False) -> Iterator[Diagnostic]:
    """Hyper-parameters of a parameter that differ; of two groups, the first parameter.

    known: the checkpoint with the right values. every: also values and parameters that one side lacks.
    """
    ours, theirs = ValueTensors.of(known), ValueTensors.of(written)
    left = {"params", "param_names", *format_named(written.state.framework).remade_hypers}
    groups = {name: i for i, group in enumerate(known.state.groups) for name in group.members}
    there = {name: j for j, group in enumerate(written.state.groups) for name in group.members}
    met: set[tuple[int, int | None]] = set()
    for name, i in groups.items():
        j, right = there.get(name), known.state.groups[i]
        if (i, j) in met or (j is None and not every):
            continue
        met.add((i, j))
        if j is None:
            yield _unlike(code, (known, written), "the group", name, (right.name, "nothing"))
            continue
        mine = written.state.groups[j]
        for key in dict.fromkeys((*right.hyper, *mine.hyper)):
            if key in left:
                continue
            if key in right.hyper and key in mine.hyper:
                for one in apart(str(key), right.hyper[key], mine.hyper[key], ours, theirs):
                    yield _unlike(code, (known, written), one.path, name, (one.a, one.b))
            elif every and not _is_default(value := {**right.hyper, **mine.hyper}[key]):
                text = value_text(number_of(value))
                both = (text, "nothing") if key in right.hyper else ("nothing", text)
                yield _unlike(code, (known, written), str(key), name, both)


def unlike_numbers(known: Checkpoint, written: Checkpoint, code: str) -> Iterator[Diagnostic]:
    """The first parameter of each state with another number, as `step`."""
    for state in dict.fromkeys((*known.state.scalars, *written.state.scalars)):
        right, mine = known.state.scalars.get(state, {}), written.state.scalars.get(state, {})
        for name in dict.fromkeys((*right, *mine)):
            a, b = number_of(right.get(name)), number_of(mine.get(name))
            if a != b and not (a is None and b == 0) and not (b is None and a == 0):
                yield _unlike(code, (known, written), state, name, (value_text(a), value_text(b)))
                break


def _unlike(
    code: str, sides: tuple[Checkpoint, Checkpoint], what: str, name: str, values: tuple[str, str]
) -> Diagnostic:
    known, written = (str(one.top) for one in sides)
    return Diagnostic(
        code,
        f"{what} of `{name}` is {values[1]} in {written}, and {values[0]} in {known}",
        (Label(known, values[0], where=what), Label(written, values[1], where=what)),
        remedy=catalogue()[code].remedy,
    )


def _is_default(value: object) -> bool:
    """If a value is the default of an optimizer."""
    return value is None or value is False or isinstance(value, str)
