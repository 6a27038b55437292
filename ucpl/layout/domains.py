"""Failure domains: `domain node = "{pp}.{dp - dp % 4}"`, a template as of files.

Ranks with the same text are in one domain. A mesh axis that it leaves out is inside a domain. `node` is a machine,
`process` a part of one that a vault keeps apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from ucpl.errors import fail
from ucpl.language import nodes
from ucpl.layout.layout import DomainRule, Layout
from ucpl.layout.scope import Scope, at
from ucpl.layout.templates import PLACE_WORDS, closed, columns, evaluate

__all__ = ["domain_rules", "domains_of"]

Column = NDArray[np.int64]


def domain_rules(items: Iterable[nodes.LayoutItem], scope: Scope) -> dict[str, DomainRule]:
    """`domain` statements by kind.

    Raises: UcplError E122, and errors of templates that cannot be read.
    """
    found: dict[str, DomainRule] = {}
    for item in items:
        if not isinstance(item, nodes.Domain):
            continue
        path = closed(item.template, item.span, scope, frozenset(scope.mesh_axes) | {"rank"})
        odd = sorted(path.names & (PLACE_WORDS - {"rank"}) - set(scope.mesh_axes))
        odd = odd or sorted(path.names - PLACE_WORDS - set(scope.mesh_axes) - {n for n, _ in path.sizes})
        if odd:
            axes = ", ".join(f"{{{axis}}}" for axis in scope.mesh_axes) or "{rank}"
            what = f'"{item.template}" names `{odd[0]}`, which a rank does not have'
            fail("E122", what, at(item.span), remedy=f"a domain is given by places of the mesh: {axes}")
        found[item.kind] = DomainRule(item.kind, path, item.span)
    return found


def domains_of(layout: Layout, kind: str) -> tuple[tuple[int, ...], ...]:
    """Ranks of each domain, in the order of their first ranks.

    There are none for a kind that the layout does not have.
    """
    rule = layout.domains.get(kind)
    if rule is None:
        return ()
    ranks = np.arange(max(1, layout.ranks))
    told: dict[str, Column] = {"rank": ranks}
    for mesh in layout.meshes:
        step = 1
        for axis, degree in zip(reversed(mesh.axes), reversed(mesh.degrees), strict=True):
            told[axis] = ranks // step % degree
            step *= degree
    return _grouped(rule, told, len(ranks))


def _grouped(rule: DomainRule, told: Mapping[str, Column], count: int) -> tuple[tuple[int, ...], ...]:
    values = {**dict(rule.path.sizes), **told}
    _, holes = columns(rule.path)
    marks = np.zeros(count, np.int64)
    for hole in holes:
        column = np.broadcast_to(np.asarray(evaluate(hole.expr, values)), count)
        _, inner = np.unique(column, return_inverse=True)
        _, marks = np.unique(np.stack([marks, inner]), axis=1, return_inverse=True)
    _, first, which = np.unique(marks, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    found: list[list[int]] = [[] for _ in order]
    for rank, one in enumerate(place[which.reshape(-1)]):
        found[one].append(rank)
    return tuple(map(tuple, found))
