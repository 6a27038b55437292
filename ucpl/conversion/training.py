"""The dtype that a side trains in: a target that states another than the source's is refused.

Going from f32 to bf16 is more than another name in a settings file: weights are rounded from masters, masters are made from
weights, files have other names. Until a plan says each of these as derived, none is made in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ucpl.errors import Label, fail

if TYPE_CHECKING:
    from ucpl.conversion.given import Inherited
    from ucpl.conversion.side import Side
    from ucpl.layout import Layout

__all__ = ["demand_same_training", "training_of"]

_FLAGS = {"bf16": "bf16", "fp16": "f16"}  # a setting -> the dtype that weights have where it is 1
_WHOLE = "f32"


def demand_same_training(source: Side, target: Side) -> None:
    """Raises: UcplError E187 where the target states a training dtype that is not the source's, E188 where it states two."""
    stated = _flags(target.layout.settings)
    if stated is None:  # the target's format knows no training
        return
    if sum(stated.values()) > 1:
        fail("E188", f"`{target.layout.call}` is for bf16 and for fp16 training", _place(target.layout, "bf16"))
    wanted = _dtype(stated)
    name = next((flag for flag in stated if stated[flag]), None) or _given_as_zero(target.layout)
    known = _flags(source.layout.settings) or _flags({n: v for n, (v, _) in source.given.inherited.items()})
    if known is not None:
        if _dtype(known) != wanted:
            was = next((flag for flag in known if known[flag]), name or "bf16")
            _refuse(target, wanted, Label("<source>", f"trains in {_dtype(known)}", where=_said(source, was)))
        return
    if name is None:  # f32 by default, from weights that say nothing of training
        return
    for tensor, dtype in _weights(source):
        if dtype != wanted:
            _refuse(target, wanted, Label("<source>", f"holds {dtype}", where=f"weight of {tensor}"))


def training_of(source: Side) -> Inherited:
    """What a target takes over of how a source's layout trains, where no checkpoint says it."""
    said = {flag: source.layout.settings.get(flag) for flag in _FLAGS}
    return {flag: (1, "the source's layout") for flag, value in said.items() if value}


def _refuse(target: Side, wanted: str, other: Label) -> None:
    flag = next((flag for flag, dtype in _FLAGS.items() if dtype == wanted), None) or _given_as_zero(target.layout)
    asked = f"`{target.called.call.name}` is for training in {wanted}"
    fail("E187", f"{asked}, and the source {other.text}", _place(target.layout, flag or "bf16"), other)


def _flags(settings: Mapping[str, object]) -> dict[str, bool] | None:
    """bf16 and fp16 as a layout's framework or a checkpoint states them. None: it states neither."""
    found = {flag: bool(settings[flag]) for flag in _FLAGS if flag in settings}
    return {flag: found.get(flag, False) for flag in _FLAGS} if found else None


def _dtype(flags: dict[str, bool]) -> str:
    return next((_FLAGS[flag] for flag, on in flags.items() if on), _WHOLE)


def _given_as_zero(layout: Layout) -> str | None:
    """A flag that the caller wrote as 0."""
    return next((n for n, value, origin in layout.origins if n in _FLAGS and origin == "given" and not value), None)


def _said(side: Side, flag: str) -> str:
    """`bf16 = 1: ds_config of ...`"""
    found = next((f"{n} = {v}: {o}" for n, v, o in side.layout.origins if n == flag), None)
    if found is None and flag in side.given.inherited:
        value, origin = side.given.inherited[flag]
        found = f"{flag} = {value}: {origin}"
    return found or flag


def _place(layout: Layout, flag: str) -> Label:
    value = next((f"{n} = {v}" for n, v, _ in layout.origins if n == flag), flag)
    return Label("<call>", where=value)


def _weights(side: Side) -> Iterator[tuple[str, str]]:
    """Trained tensors with the dtype of their weights, as the spec or the files say it."""
    stored: dict[str, str] = {}
    if side.checkpoint is not None:
        stored = {t.name: t.dtype for t in side.checkpoint.tensors}
    for path, tensor in side.layout.tensors.items():
        dtype = tensor.dtype or stored.get(path)
        if tensor.kind == "parameter" and dtype is not None:
            yield path, dtype
