"""Blobs: values that are no tensors of the model, named by a layout whose files nothing but it describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ucpl.errors import fail
from ucpl.layout.axis_lines import UnknownAxis
from ucpl.layout.layout import BlobRule, FileRule
from ucpl.layout.near import for_axis
from ucpl.layout.scope import at
from ucpl.layout.storing import Ground
from ucpl.syntax import nodes

__all__ = ["blobs_of", "demand_carried"]

_ACTING = ("in", "as", "at", "when")
_DESCRIBED = ("", "torch")  # frameworks whose files hold what a layout says, and nothing else


def blobs_of(items: Iterable[nodes.LayoutItem], ground: Ground) -> tuple[BlobRule, ...]:
    """Raises: UcplError E148 for an axis of no mesh, E190 for a clause that has nothing to act on."""
    out = []
    for item in items:
        if not isinstance(item, nodes.Blob):
            continue
        idle = next((c for c in item.clauses if c.word not in _ACTING), None)
        if idle is not None:
            fail(
                "E190",
                f"`{idle.args[0] if idle.word == 'copies' else idle.word}` speaks of tensors, and a blob is none",
                at(idle.span if idle.span.line else item.span),
                remedy="take it out; what is said of a blob are `in`, `as`, `at` and `when`",
            )
        if not all(ground.scope.holds(c.args[0]) for c in item.clauses if c.word == "when"):
            continue
        for axis in item.mesh_axes:
            if axis not in ground.mesh_axes:
                fail(
                    "E148",
                    f"`blob {item.name} @{axis}`: `{axis}` is no mesh axis",
                    at(item.span),
                    remedy=for_axis(axis, ground.scope.mesh_axes),
                    about=UnknownAxis(axis),
                )
        clauses = tuple(c for c in item.clauses if c.word != "when")
        storing = ground.storing(clauses, item.span, "meta" if "meta" in ground.files else "weights")
        key = storing.key or ground.template("{name}", item.span, ())
        out.append(BlobRule(item.name, item.mesh_axes, item.fate, storing.file, key, storing.at, item.span))
    return tuple(out)


def demand_carried(blobs: Iterable[BlobRule], framework: str, files: Mapping[str, FileRule]) -> None:
    """Somebody carries each blob: raises UcplError E237 where a framework's store does so by itself, or a file cannot."""
    for blob in blobs:
        if framework not in _DESCRIBED:
            fail(
                "E237",
                f"`blob {blob.name}` in a layout of framework {framework}(), whose store knows what is no tensor",
                at(blob.span),
                remedy="take the line out: schedules, counters, the loss scaler and client_state go over by themselves;"
                " `--drop NAME` leaves a key of client_state out",
            )
        if files[blob.file].form in ("safetensors", "memory"):
            fail(
                "E237",
                f"`blob {blob.name}` in file `{blob.file}`, and a safetensors file has tensors alone",
                at(blob.span),
                remedy='put it into a file of its own: file meta = torch "meta_{rank}.pt"',
            )
