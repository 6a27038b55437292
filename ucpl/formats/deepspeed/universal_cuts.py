"""Cuts over tensor-parallel ranks in a universal folder.

They are next to each tensor for the loader, and in lists of patterns. Source: deepspeed 0.19.8:
checkpoint/universal_checkpoint.py (`load_hp_checkpoint_state`), checkpoint/ds_to_universal.py (`merge_tp_slices`). The
loader cuts each part of a tensor as torch.chunk does, at any degree of the engine. AutoTP's layers have their own cuts,
and none are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ucpl.extents import Global, PickledCall, Sharding
from ucpl.formats.deepspeed.affine import INFO
from ucpl.formats.deepspeed.target import StepWriter

_PARTS = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
Cuts = Mapping[str, Sharding]


def cuts_of(writer: StepWriter, stated: Cuts) -> dict[str, Sharding]:
    """The cuts of parameters in a model that cuts them itself.

    stated: by the layout of the source. Empty if AutoTP cuts them, or if no cut is known.
    """
    kept = writer.blob(INFO)
    is_autotp = isinstance(kept, dict) and bool({"affine_map", "sub_param_shard_widths"} & kept.keys())
    if is_autotp and writer.source.state.settings.get("tp_rule") is None:
        return {}
    known = {**writer.source.state.parallel.shardings, **stated}
    named = [t.name for t in writer.structure.tensors if t.kind != "buffer" and t.name in known]
    return {name: known[name] for name in named}


def keys_of_cut(cut: Sharding | None, is_vocabulary: bool) -> dict[str, object]:
    """The keys next to a tensor's `param`.

    cut: None if nothing is known; then rows are assumed.
    """
    out: dict[str, object] = {}
    if cut is None:
        out["cat_dim"] = 0
    elif cut.dim is not None:
        sizes = [section.size for section in cut.sections]
        if len(set(sizes)) == 1:
            out["cat_dim"] = cut.dim
        if len(sizes) > 1 and len(set(sizes)) == 1:
            out["param_n_sub_params"] = len(sizes)
        elif len(sizes) > 1:
            out["sub_param_shape"] = _parts(cut, "")
    if is_vocabulary:
        out["vocab_tensor"] = True
    return out


def _parts(cut: Sharding, pattern: str) -> PickledCall:
    fields = {"patterns": [pattern] if pattern else [], **_shape(cut)}
    return PickledCall(_PARTS, new=True, state=fields)


def _shape(cut: Sharding) -> dict[str, object]:
    shape: list[object] = list(cut.shape)
    assert cut.dim is not None
    shape[cut.dim] = tuple(section.size for section in cut.sections)
    return {"shape": tuple(shape), "partition_dim": cut.dim}


def lists_of(cuts: Cuts) -> dict[str, object]:
    """universal_checkpoint_info of models that cut their tensors themselves.

    Tensors outside all lists are cut by rows.
    """
    replicated: list[str] = []
    rows: list[str] = []
    halves: list[str] = []
    several: list[object] = []
    for name, cut in cuts.items():
        pattern = f"^{re.escape(name)}$"
        sizes = [section.size for section in cut.sections]
        if cut.dim is None:
            replicated.append(pattern)
        elif len(sizes) == 2 and sizes[0] == sizes[1] and cut.dim == 0:
            halves.append(pattern)
        elif len(sizes) > 1:
            several.append({"patterns": [pattern], **_shape(cut)})
        elif cut.dim == 1:
            rows.append(pattern)
    return {
        "universal_checkpoint_version": 0.2,  # later versions also have the widths of parts at one degree
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": rows,
        "parameter_with_2_sub_params_cat_dim_0": halves,
        "parameter_with_sub_params": several,
    }
