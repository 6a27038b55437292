"""The training dtype of a side, and conversions to another one.

A call that names another dtype (`zero1(dp=8, bf16=1)` of an fp32 run) requests it. In the language this is a target over a
model of other dtypes, and a source without the weights that have masters: `derive weight from fp32`, as ZeRO-3 does. So
weights are masters rounded once, whatever their dtype was before; masters and moments are copied bit for bit. Tensors without
a master (frozen parameters, weights alone) are cast themselves. All changes are reported as derived.

Buffers keep their types: DeepSpeed casts parameters, and leaves buffers as the model has them.

This is no pass of the target (module `target_passes`): passes change metadata and have no graph. A change of dtype changes
the model of the target and the origin of its weights, which the graph proves and the plan has as casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import DTYPES
from ucpl.records import frozen
from ucpl.registry import Format, format_named, formats

if TYPE_CHECKING:
    from ucpl.conversion.requests import Called, Given, Inherited
    from ucpl.conversion.side import Side
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.language import nodes
    from ucpl.layout import Layout, LogicalTensor
    from ucpl.placement import Placement

__all__ = [
    "Change",
    "change_of",
    "in_other_dtype",
    "leaves_engine",
    "placements_in_dtype",
    "stored_dtypes",
    "training_of",
    "with_stored_dtypes",
    "with_called_dtype",
    "with_masters",
    "without_weights",
]

_FLAGS = {"bf16": "bf16", "fp16": "f16"}  # a setting -> the dtype of weights if it is 1
_DTYPE = "dtype"  # the setting of a target of weights alone
_WORDS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "fp16": "f16", "fp32": "f32"}  # of other tools
_WHOLE = "f32"
_TRAINED_IN = ("f32", "bf16", "f16")
_MASTER = "fp32"
_ALIGNED = 16  # bytes of the trained dtype that parameter_alignment grows each parameter to
_NAMES_SHOWN = 3
_UNSEEN = (
    "weights are not in a ZeRO-3 target: DeepSpeed rounds its masters to f16, and one beyond 65504 is infinite there; of"
    " zero1 and zero2 it is refused here (E607)"
)


@frozen
class Change:
    """Another training dtype than the source's.

    was: None if the source has no training dtype (weights alone). of: the tensors that change; None: all of such a dtype.
    """

    was: str | None
    now: str
    of: frozenset[str] | None = None

    def concerns(self, path: str, dtype: str | None) -> bool:
        """True if a parameter of this type changes its dtype.

        Parameters that a model keeps in another type stay in it.
        """
        if self.of is not None and path not in self.of:
            return False
        return dtype is not None and dtype != self.now and (dtype == self.was or not self.was) and dtype in _TRAINED_IN


def training_of(source: Side, framework: str) -> Inherited:
    """Training settings that a target inherits from a source's layout.

    They are used if no checkpoint states them. framework: the target's. DeepSpeed's files have the dtype in their names, and an
    engine that does not find them continues without its optimizer; so it also inherits the dtype of the weights with masters.
    """
    if leaves_engine(source, framework):
        return {}
    said = {flag: source.layout.settings.get(flag) for flag in _FLAGS}
    stated: Inherited = {flag: (1, "the source's layout") for flag, value in said.items() if value}
    if stated or not format_named(framework).has_engine or _stated_by(source) is not None:
        return stated
    dtype = _of_dtypes(source)
    return {flag: (1, "dtypes of the weights") for flag, of in _FLAGS.items() if of == dtype}


# ---- the wish ---------------------------------------------------------------------------------------------------------------


def change_of(source: Side, layout: Layout) -> Change | None:
    """The change of dtype that a target's layout requests, if any.

    Raises: UcplError E188 if the layout states two dtypes.
    """
    stated = _flags(layout.settings) or _flags({n: v for n, v, origin in layout.origins if origin == "given"})
    if stated is None:  # the target's format knows no training, and its call names none
        return _of_masters(source, layout)
    if sum(stated.values()) > 1:
        fail("E188", f"`{layout.call}` is for bf16 and for fp16 training", _place(layout, "bf16"))
    now, was = _dtype(stated), _trains_in(source)
    if layout.settings.get(_DTYPE):
        return Change(None, now)
    if was is None and now == _WHOLE and _given_as_zero(layout) is None:
        return None  # f32 by default, from weights without a training dtype
    if was is None and now == _of_dtypes(source):
        return None
    return Change(was, now) if was != now else None


def _of_masters(source: Side, layout: Layout) -> Change | None:
    """The change to f32 masters as weights.

    It is for a run that leaves its engine, or for a format whose weights are masters.
    DDP and FSDP train f32 weights, cast in each forward pass. A model in 16 bits rounds them as it loads them, to the weights
    of the source.
    """
    from ucpl.layout.layout import Derivation

    is_wide = format_named(layout.framework).masters_are_weights or leaves_engine(source, layout.framework)
    if not is_wide or Derivation(_MASTER, "weight") not in layout.derived:
        return None
    stored = stored_dtypes(source)
    found = frozenset(path for path in with_masters(source.placement) if stored.get(path) in _FLAGS.values())
    return Change(None, _WHOLE, found) if found else None


def leaves_engine(source: Side, framework: str) -> bool:
    """Test for a training framework's run that leaves its engine."""
    checkpoint, target = source.checkpoint, format_named(framework)
    if checkpoint is None or checkpoint.container is None or target.has_engine:
        return False
    return format_named(checkpoint.format).has_engine and checkpoint.container.kind.holds(target)


def with_called_dtype(one: Called, source: Side, given: Given) -> Given:
    """Settings that a target inherits if its call names another dtype.

    Settings that depend on the source's dtype are not inherited.
    """
    flags = _called_flags(one, given)
    was = _trains_in(source)
    if not flags or sum(flags.values()) > 1:
        return given
    now = next((_FLAGS[flag] for flag, on in flags.items() if on), None)
    if now is None:  # `bf16=0`: the source's dtype, if it is another one
        now = was if was is not None and was not in {_FLAGS[flag] for flag in flags} else _WHOLE
    if now == was:
        return given
    why = f"{', '.join(f'{flag} = {int(on)}' for flag, on in flags.items())} is asked for"
    inherited = {name: v for name, v in given.inherited.items() if name not in ("bf16_optimizer", "masters")}
    inherited |= {flag: (int(dtype == now), why) for flag, dtype in _FLAGS.items()}
    if given.inherited.get("parameter_alignment", (0, ""))[0]:
        inherited["alignment"] = (_ALIGNED // DTYPES[now].itemsize, f"parameter_alignment, and {why}")
    if now == "bf16" and source.checkpoint is not None and _accumulates_wide(source.checkpoint):
        inherited["bf16_optimizer"] = (1, f"grad_accum_dtype of ds_config, and {why}")
    return evolve(given, inherited=inherited)


def _accumulates_wide(checkpoint: Checkpoint) -> bool:
    """True if this configuration with bf16 uses BF16_Optimizer at stage 1."""
    return any(one.accumulates_wide(checkpoint) for one in formats().values())


def in_other_dtype(given: Given, source: Side, change: Change) -> Given:
    """The source's model with parameters in the new dtype.

    Masters and states are in f32.
    """
    if given.model is None:
        return given
    stored = stored_dtypes(source)
    items = tuple(_retyped(item, change, stored) for item in given.model.items)
    return evolve(given, model=evolve(given.model, items=items))


def _retyped(item: nodes.ModelItem, change: Change, stored: Mapping[str, str]) -> nodes.ModelItem:
    from ucpl.language import nodes

    match item:
        case nodes.Tensor(kind="parameter" | "frozen", scaling=None):
            if change.concerns(item.path, item.dtype or stored.get(item.path)):
                return evolve(item, dtype=change.now)
        case nodes.State(scalar=False) if change.of is None and _is_narrow(item):
            return evolve(item, dtype=_WHOLE, typed=())  # 16-bit masters are an option of one dtype
        case _:
            pass
    return item


def _is_narrow(state: nodes.State) -> bool:
    return not {state.dtype, *(t.dtype for t in state.typed)}.isdisjoint(_FLAGS.values())


def _called_flags(one: Called, given: Given) -> dict[str, bool]:
    """bf16 and fp16 as the call itself names them."""
    from ucpl.layout.scope import Scope

    scope = Scope(given=dict(given.sizes), config=given.config or {})
    names = [p.name for p in one.layout.parameters]
    out: dict[str, bool] = {}
    for position, argument in enumerate(one.call.arguments):
        name = argument.name or (names[position] if position < len(names) else "")
        if name in _FLAGS:
            try:
                out[name] = bool(scope.evaluate(argument.value))
            except UcplError:  # reported with its place when the layout is resolved
                return {}
    return out


# ---- the source and the target of such a plan --------------------------------------------------------------------------------


def placements_in_dtype(source: Side, target: Side) -> tuple[Placement, Placement, tuple[str, ...]]:
    """Both placements after the change of dtype, and the notes on it.

    Raises: UcplError E187, E188.
    """
    from ucpl.placement.families import apart

    change = change_of(source, target.layout)
    if change is None:
        return source.placement, target.placement, ()
    stored = stored_dtypes(source)
    trained = (path for path, tensor in target.layout.tensors.items() if tensor.kind != "buffer")
    changed = {path: stored[path] for path in trained if change.concerns(path, stored.get(path))}
    for path in changed:
        _demand_dtype(target, target.layout.tensors[path], change)
    masters = with_masters(source.placement) & changed.keys()
    here, there = source.placement, target.placement
    if changed:
        here = without_weights(apart(here), masters)
        there = _cast(apart(there), changed.keys() - masters)
    return here, there, _notes(source, target, change, {p: d for p, d in changed.items() if p not in masters})


def _demand_dtype(target: Side, tensor: LogicalTensor, change: Change) -> None:
    """Check the dtype in a model of the target's own.

    Raises: UcplError E187.
    """
    if tensor.dtype == change.now:
        return
    what = f"says nothing of its dtype, and the source has {change.was}" if tensor.dtype is None else "is another"
    fail(
        "E187",
        f"`{target.called.call.name}` is for training in {change.now}, and `{tensor.path}` of its model {what}",
        _place(target.layout, next((flag for flag, dtype in _FLAGS.items() if dtype == change.now), "bf16")),
        Label(target.layout.model_name or "<model>", tensor.dtype or "", where=tensor.path),
        remedy=f"write `dtype {change.now}` in the model, for all its tensors or this one",
    )


def with_masters(placement: Placement) -> set[str]:
    """Tensors whose weight can be made from a master."""
    held = {placement.tensors[t] for part in placement.parts if part.state == _MASTER for t in part.tensors}
    return {name for path in held for name in placement.layout.members(path)}


def without_weights(source: Placement, masters: set[str]) -> Placement:
    """The source with these weights derived from masters, not stored."""
    from ucpl.layout.layout import Derivation
    from ucpl.verification.elements import only, pairs_of

    if not masters:
        return source
    kept = {(path, state) for path, state in pairs_of(source) if state != "weight" or path not in masters}
    made = only(source, kept, set(source.layout.tensors))
    derived = dict.fromkeys((*made.layout.derived, Derivation("weight", _MASTER)))
    return evolve(made, layout=evolve(made.layout, derived=tuple(derived)))


def _cast(target: Placement, paths: set[str]) -> Placement:
    """The target with casts of tensors without a master.

    Entries with `exact` are not cast.
    """
    wanted = {i for i, path in enumerate(target.tensors) if path in paths}
    parts = tuple(
        evolve(p, lossy=True) if p.state == "weight" and not p.exact and wanted & {*p.tensors} else p
        for p in target.parts
    )
    return evolve(target, parts=parts)


# ---- notes ------------------------------------------------------------------------------------------------------------------


def _notes(source: Side, target: Side, change: Change, alone: dict[str, str]) -> tuple[str, ...]:
    out = [
        f"training in {change.now}: the source trains in {change.was}" if change.was else f"training in {change.now}"
    ]
    if target.layout.settings.get(_DTYPE):
        out = [f"weights in {change.now}"]
    if change.of is not None:
        title = format_named(target.layout.framework).title
        out = [
            f"weights are the masters in {change.now}, on which a job without the engine trains: {title} has no others"
        ]
    by_dtype: dict[str, list[str]] = {}
    for path, dtype in alone.items():
        by_dtype.setdefault(dtype, []).append(path)
    for dtype, paths in by_dtype.items():
        first = ", ".join(f"`{p}`" for p in paths[:_NAMES_SHOWN])
        more = f" and {len(paths) - _NAMES_SHOWN} more" if len(paths) > _NAMES_SHOWN else ""
        how = "is widened" if change.now == _WHOLE else "is rounded to nearest even"
        out.append(f"weight of {first}{more} {how}, {dtype} to {change.now}: no master of it is read")
    if source.checkpoint is not None and format_named(target.layout.framework).has_engine:
        out += _scaling(format_named(target.layout.framework), source.checkpoint, change)
    if change.now == "f16" and target.layout.settings.get("stage") == 3:
        out.append(_UNSEEN)
    return tuple(out)


def _scaling(target: Format, checkpoint: Checkpoint, change: Change) -> list[str]:
    if "f16" not in (change.was, change.now):
        return []
    note = target.scaling_note(checkpoint, is_fp16=change.now == "f16")
    return [note] if note else []


# ---- dtypes of a side ----------------------------------------------------------------------------------------------


def _trains_in(source: Side) -> str | None:
    known = _stated_by(source)
    return _dtype(known) if known is not None else None


def _stated_by(source: Side) -> dict[str, bool] | None:
    return _flags(source.layout.settings) or _flags({n: v for n, (v, _) in source.given.inherited.items()})


def _of_dtypes(source: Side) -> str | None:
    """The one 16-bit type of weights with masters.

    None: they have none, or both.
    """
    if source.checkpoint is None or not format_named(source.checkpoint.format).has_training_dtype:
        return None
    stored = stored_dtypes(source)
    found = {stored.get(path) for path in with_masters(source.placement)} & set(_FLAGS.values())
    return found.pop() if len(found) == 1 else None


def _flags(settings: Mapping[str, object]) -> dict[str, bool] | None:
    """bf16 and fp16 in the settings of a layout or checkpoint.

    None: neither is set. Raises: UcplError E220 for a `dtype` of no training.
    """
    if said := settings.get(_DTYPE):
        now = _WORDS.get(str(said), str(said))
        if now not in _TRAINED_IN:
            fail("E220", f"`{said}` is no dtype of weights", Label("<call>", where=_DTYPE))
        return {flag: dtype == now for flag, dtype in _FLAGS.items()}
    found = {flag: bool(settings[flag]) for flag in _FLAGS if flag in settings}
    return {flag: found.get(flag, False) for flag in _FLAGS} if found else None


def _dtype(flags: dict[str, bool]) -> str:
    return next((_FLAGS[flag] for flag, on in flags.items() if on), _WHOLE)


def _given_as_zero(layout: Layout) -> str | None:
    """A flag that the caller wrote as 0."""
    return next((n for n, value, origin in layout.origins if n in _FLAGS and origin == "given" and not value), None)


def _place(layout: Layout, flag: str) -> Label:
    value = next((f"{n} = {v}" for n, v, _ in layout.origins if n == flag), flag)
    return Label("<call>", where=value)


def stored_dtypes(side: Side) -> dict[str, str]:
    """The dtype of each tensor's weight, from the spec or the files."""
    if side.checkpoint is None:
        stored = {}
    elif side.called.is_of_any:
        stored = {t.name: t.dtype for t in side.checkpoint.state.tensors}
    else:
        stored = _of_named(side.checkpoint, side.placement)
    return stored | {path: t.dtype for path, t in side.layout.tensors.items() if t.dtype is not None}


def _of_named(checkpoint: Checkpoint, placement: Placement) -> dict[str, str]:
    """The same for a named model.

    Tensors that are stored in several types are omitted.
    """
    from ucpl.verification.compare import types_of

    found = types_of(checkpoint, placement)
    alike = {path: list(of) for (path, state), of in found.items() if state == "weight" and len(of) == 1}
    return {path: dtype for path, (dtype,) in alike.items() if dtype}


def with_stored_dtypes(model: nodes.Model, source: Side) -> nodes.Model:
    """The model of a source's spec, with missing dtypes from the files.

    A target of any model is called over it.
    """
    from ucpl.language import nodes

    stored = stored_dtypes(source)

    def one(item: nodes.ModelItem) -> nodes.ModelItem:
        if isinstance(item, nodes.Tensor) and item.dtype is None and item.scaling is None and item.path in stored:
            return evolve(item, dtype=stored[item.path])
        return item

    return evolve(model, items=tuple(one(item) for item in model.items))
