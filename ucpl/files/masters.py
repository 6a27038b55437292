"""An fp32 master that an optimizer keeps under another name: `master`, `fp32_param`.

ucpl's name is the state `fp32`. The name in the files is the setting `master_state` of `dcp` and `plain`.
"""

from __future__ import annotations

from attrs import evolve

from ucpl.extents import Setting
from ucpl.files.checkpoint import Checkpoint

__all__ = ["FP32", "SETTING", "renamed"]

FP32 = "fp32"
SETTING = "master_state"
_FLAGS = ("masters", "has_masters")  # of dcp, and of plain


def renamed(checkpoint: Checkpoint, state: str, origin: str) -> Checkpoint:
    """The same checkpoint with its state `state` as the master.

    A former master gets its own name again. state: `fp32` if no other state is the master. A name that no parameter has
    leaves the checkpoint without masters.
    """
    settings = checkpoint.state.settings
    before = str(settings[SETTING].value) if SETTING in settings else FP32
    own = {FP32: before}
    names = {name: own.get(name, name) for t in checkpoint.state.tensors for name in t.states}
    if state in names.values():
        names = {name: FP32 if said == state else said for name, said in names.items()}
    tensors = tuple(evolve(t, states=tuple(names[s] for s in t.states)) for t in checkpoint.state.tensors)
    has = int(any(FP32 in t.states for t in tensors))
    flags = {flag: Setting(has, origin) for flag in _FLAGS if flag in settings and settings[flag].value != has}
    made = {**settings, **flags, SETTING: Setting(state, origin)}
    return evolve(checkpoint, state=evolve(checkpoint.state, tensors=tensors, settings=made))
