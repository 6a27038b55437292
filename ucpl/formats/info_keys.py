"""Unknown keys of universal_checkpoint_info, and patterns without a tensor.

A target has its own description of the known cuts; the account names all other keys.
Read in deepspeed 0.19.8: checkpoint/constants.py, checkpoint/affine.py, module_inject/layers.py.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

from ucpl.extents import PickledCall
from ucpl.formats.deepspeed.auto_ep import LAYERS
from ucpl.formats.deepspeed.names import INFO

__all__ = ["INFO", "is_in", "unknown_info"]

Path = tuple[object, ...]

# Of each dict of universal_checkpoint_info its keys. "*" is any rank or position, "^" a pattern of names of parameters.
_ANYTHING: dict[str, object] = {}
_PIECE = dict.fromkeys(("dest", "locations", "scale", "shape", "source"), _ANYTHING)
_MAP = {
    "logical_shape": _ANYTHING,
    "ranks": {"*": {"shard_shape": _ANYTHING, "pieces": {"*": _PIECE}}},
}
_SUB_PARAMS = dict.fromkeys(("partition_dim", "patterns", "shape", "sub_params_shape"), _ANYTHING)
_KNOWN: dict[str, object] = {
    **dict.fromkeys(
        (
            LAYERS,  # auto_ep looks into it
            "original_vocab_size",
            "padded_vocab_size",
            "parameter_to_average_patterns",
            "parameter_with_2_sub_params_cat_dim_0",
            "parameter_with_row_parallelism_patterns",
            "pipeline_replicated_parameter_patterns",
            "tp_replicated_parameter_patterns",
            "universal_checkpoint_version",
            "vocabulary_parameter_patterns",
        ),
        _ANYTHING,
    ),
    "affine_map": {"params": {"^": _MAP}, "version": _ANYTHING},
    "autotp_unsupported_parameter_patterns": {"^": _ANYTHING},
    "parameter_with_sub_params": {"*": _SUB_PARAMS},
    "sub_param_shard_widths": {"^": _ANYTHING},
}


def unknown_info(info: object, names: Container[str]) -> Iterator[Path]:
    """Paths of unknown keys, for all `names` of the model's tensors."""
    yield from _unknown(info, _KNOWN, names)


def is_in(path: Path, value: object) -> bool:
    """Test whether a value has an entry at a path."""
    for step in path:
        inner = dict(_entries(value))
        if step not in inner:
            return False
        value = inner[step]
    return True


def _unknown(value: object, known: object, names: Container[str]) -> Iterator[Path]:
    if not isinstance(known, dict) or not known:
        return
    for key, held in _entries(value):
        if key in known:
            inner = known[key]
        elif "*" in known and isinstance(key, int):
            inner = known["*"]
        elif "^" in known and isinstance(key, str) and _is_of_a_tensor(key, names):
            inner = known["^"]
        else:
            yield (key,)
            continue
        yield from ((key, *rest) for rest in _unknown(held, inner, names))


def _entries(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, PickledCall):
        value = value.state
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _is_of_a_tensor(pattern: str, names: Container[str]) -> bool:
    """Test for a pattern of a known name, or of several names."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return any(sign in pattern for sign in r"\[(*+?^$|")
    name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
    return name in names or re.escape(name) != pattern[1:-1]
