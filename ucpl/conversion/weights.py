"""Reads the weights of a source with an unreadable optimizer.

If files are damaged, a second reading without the optimizer finds damage of the optimizer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attrs import evolve

from ucpl.conversion.dialects import split_names
from ucpl.conversion.ordering import arguments_of
from ucpl.conversion.requests import Called, Given, called
from ucpl.conversion.ties import framework_of
from ucpl.errors import UcplError
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.wrappers import has_wraps, keeping
from ucpl.registry import format_named

__all__ = ["in_names_of_both", "open_for_comparison", "open_for_inspection", "with_weights"]

T = TypeVar("T")
Both = tuple[tuple[Checkpoint, T], tuple[Checkpoint, T]]
_NUMBERED = "E446"  # an optimizer with numbers alone
_UNREAD = (_NUMBERED, "E457", "E460", "E524", "E533", "E546")  # valid files, of a kind that is not read
_WAY = "the weights can be read: --weights-alone converts them without the optimizer"
_NO_WAY = "weights are in that file, too: without it nothing of this step can be rescued; take an earlier step"
_LOST = "E452"  # a rank's file
_SAID = "E467"  # a run without a readable optimizer: its own remedy names the options
_OF_A_SOURCE = 3  # exit status: the source cannot be read, or is damaged


def with_weights(read: Callable[[Given], T], given: Given, target: Called | str) -> T:
    """Read a source; if that fails, read it without the dropped states.

    A target of tensors alone is made without the optimizer; the account has the reason. Raises: UcplError of the first reading;
    if only the optimizer is damaged, a note names the way to the weights.
    """
    try:
        return read(given)
    except UcplError as error:
        said = error.diagnostics[0].code == _SAID
        if error.exit_status != _OF_A_SOURCE or (given.weights_alone and error.diagnostics[0].code != _LOST) or said:
            raise
        found = _less(read, given, target, error) if not error.is_of_the_disk else None
        if found is None:
            raise _with_way(read, given, error) from None
        return found


def _less(read: Callable[[Given], T], given: Given, target: Called | str, error: UcplError) -> T | None:
    """Read without dropped states, then without the optimizer.

    None: both fail, or neither is possible for this request.
    """
    asked = [evolve(given, skipped=frozenset(given.drop))] if given.drop else []
    if _is_of_tensors(target):
        why = f"it cannot be read: {error.diagnostics[0].message}"
        asked.append(evolve(given, weights_alone=True, why_skipped=why))
    for one in asked:
        try:
            return read(one)
        except UcplError:
            continue
    return None


def open_for_inspection(read: Callable[[Given], T], given: Given | None = None) -> T:
    """Read a valid source, without an optimizer of an unsupported kind.

    The account names the skipped optimizer.
    """
    given = given or Given()
    try:
        return read(given)
    except UcplError as error:
        first = error.diagnostics[0]
        if first.code not in _UNREAD:
            raise
        try:
            return read(evolve(given, weights_alone=True, why_skipped=f"it cannot be read: {first.message}"))
        except UcplError:
            raise error from None


def open_for_comparison(read: Callable[[Given], T], order: str = "") -> T:
    """Read a source for a comparison.

    order: of an optimizer's numbers, if this source has numbers without names. Raises: UcplError; for an unsupported optimizer
    with the option to compare weights alone.
    """
    try:
        return read(Given())
    except UcplError as error:
        first, *rest = error.diagnostics
        if first.code == _NUMBERED and order:
            return read(Given(order=order))
        if first.code in _UNREAD:
            named = "give the order of its parameters, --order names.txt, or " * (first.code == _NUMBERED)
            raise UcplError(evolve(first, remedy=f"{named}compare the weights alone: --weights"), *rest) from None
        raise


def in_names_of_both(both: Callable[[], Both[T]]) -> Both[T]:
    """Read two checkpoints; with wraps in names, if one alone has some.

    Formats whose readers leave out wraps can hold a target with the names of another format.
    """
    found = both()
    ours, theirs = (has_wraps(t.name for t in side[0].state.tensors) for side in found)
    if ours is theirs:
        return found
    try:
        with keeping(wraps=True):
            return both()
    except UcplError:  # the optimizer's names are without wraps
        return found


def _is_of_tensors(target: Called | str) -> bool:
    """True if a target's format stores tensors alone."""
    text = target if not isinstance(target, str) else split_names(target)[0]
    if not text:
        return False
    made = called(text)
    return format_named(framework_of(made)).has_tensors_alone(arguments_of(made))


def _with_way(read: Callable[[Given], T], given: Given, error: UcplError) -> UcplError:
    """The error, with a note if the weights alone can be read."""
    note = _WAY
    try:
        read(evolve(given, weights_alone=True))
    except UcplError as other:
        if error.diagnostics[0].code != _LOST or other.diagnostics[0].labels != error.diagnostics[0].labels:
            return error
        note = _NO_WAY
    first, *rest = error.diagnostics
    return UcplError(evolve(first, notes=(*first.notes, note)), *rest)
