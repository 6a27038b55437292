"""Lines about tensors that the model has under a condition only.

If the condition does not hold, a line that names no other tensor is skipped: it gets a condition that never holds.
Groups lose such members.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from attrs import evolve

from ucpl.language import nodes
from ucpl.language.walk import walk
from ucpl.layout.axes import tensor_of_label
from ucpl.layout.scope import Scope

__all__ = ["without_absent"]

Item = TypeVar("Item", bound=nodes.Record)

_NEVER = nodes.Clause("when", (nodes.Number(0),))


def without_absent(
    model_items: Sequence[nodes.ModelItem], items: Iterable[nodes.LayoutItem], scope: Scope
) -> tuple[list[nodes.ModelItem], list[nodes.LayoutItem]]:
    """Statements with those of absent tensors under a condition that never holds.

    A tensor whose condition needs a config, and there is none, is not absent: its line asks for the config.
    """
    said = [i for i in model_items if isinstance(i, nodes.Tensor | nodes.Alias)]
    if all(i.when is None for i in said):
        return [*model_items], [*items]
    names = {i.path for i in said}
    absent = names - {i.path for i in said if scope.holds(i.when) or _is_open(i.when, scope)}
    if not absent:
        return [*model_items], [*items]
    named = [(i, _is_skipped(i, names, absent)) for i in items]
    lines = {i.path for i, is_skipped in named if isinstance(i, nodes.Entry) and is_skipped}
    lines -= {
        i.path for i, is_skipped in named if isinstance(i, nodes.Entry) and not is_skipped and i.shape is not None
    }
    of_groups = absent | lines
    made = [_skipped(i) if is_skipped else _without(i, of_groups) for i, is_skipped in named]
    return [_without(i, absent) for i in model_items], made


def _is_open(condition: nodes.Expr | None, scope: Scope) -> bool:
    return condition is not None and not scope.config and scope.lacks_config(condition)


def _is_skipped(item: nodes.LayoutItem, names: set[str], absent: set[str]) -> bool:
    """True if a line names absent tensors and no other."""
    if isinstance(item, nodes.Fill):
        return item.path in absent
    if not isinstance(item, nodes.Entry) or item.shape is None:
        return False
    labels = [t.label for s in walk(*item.shape) if isinstance(s, nodes.Stack) for t in s.terms if t.label is not None]
    return all(p in absent for p in ([tensor_of_label(item.path, label, names) for label in labels] or [item.path]))


def _skipped(item: nodes.LayoutItem) -> nodes.LayoutItem:
    if isinstance(item, nodes.Entry):
        return evolve(item, clauses=(*item.clauses, _NEVER))
    assert isinstance(item, nodes.Fill)
    return evolve(item, when=nodes.Number(0))


def _without(item: Item, absent: set[str]) -> Item:
    """A group without absent members."""
    if isinstance(item, nodes.Group) and absent.intersection(item.members or ()):
        return evolve(item, members=tuple(m for m in item.members or () if m not in absent))
    return item
