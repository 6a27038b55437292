"""A check of objects of known classes.

Arguments and state of their own pickles.
Classes that only hold values are carried by name. Forged arguments could still harm a loader: a numpy dtype
whose state says that raw bytes are objects crashes Python, and `deque(range(10**12))` fills memory, as `list` of it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import prod

import numpy as np

from ucpl.extents import Global, PickledCall, TensorRef

__all__ = ["NUMPY_MODULES", "is_plain_call"]

NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy")  # of numpy 1 and 2

_CODE = re.compile(
    r"[?bBhHiIlLqQpPefdgFDG]|b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32)|O8?|[SU](?:0|[1-9][0-9]{0,7})"
)
_ORDERS = "<>|="


def is_plain_call(call: PickledCall) -> bool:
    """Test a call; unknown classes pass, since their names decide."""
    if type(call.function) is not Global:
        return True
    rule = _rules().get(f"{call.function.module}.{call.function.name}")
    return rule is None or rule(call)


def _is_bare(call: PickledCall) -> bool:
    """Nothing but arguments."""
    return not (call.kwargs or call.list_items or call.dict_items) and call.state is None


def _only(*kinds: type) -> Callable[[PickledCall], bool]:
    return lambda call: _is_bare(call) and all(type(one) in kinds for one in call.args)


def _never(call: PickledCall) -> bool:
    return False


def _is_namespace(call: PickledCall) -> bool:
    state = call.state
    is_state = state is None or (type(state) is dict and all(type(key) is str for key in state))
    return not (call.args or call.kwargs or call.list_items or call.dict_items) and is_state


def _is_deque(call: PickledCall) -> bool:
    is_first = not call.args or type(call.args[0]) in (list, tuple)
    is_rest = all(one is None or type(one) is int for one in call.args[1:])
    return is_first and is_rest and not (call.kwargs or call.dict_items) and call.state is None


def _is_defaultdict(call: PickledCall) -> bool:
    is_first = not call.args or call.args[0] is None or type(call.args[0]) is Global
    is_rest = len(call.args) < 3 and all(type(one) is dict for one in call.args[1:])
    return is_first and is_rest and not (call.kwargs or call.list_items) and call.state is None


@cache
def _states(code: str) -> frozenset[object]:
    return frozenset(np.dtype(code).newbyteorder(order).__reduce__()[2] for order in _ORDERS)  # type: ignore[arg-type]


def _dtype_of(value: object) -> np.dtype[np.generic] | None:
    """The dtype of a call, or None if numpy never wrote it.

    Dtypes with fields or metadata are None, too.
    """
    if type(value) is not PickledCall or not _is_numpy(value.function, "dtype") or not 1 <= len(value.args) <= 3:
        return None
    code, *flags = value.args
    if type(code) is not str or not _CODE.fullmatch(code) or flags not in ([], [False, True]):
        return None
    if value.kwargs or value.list_items or value.dict_items:
        return None
    state = value.state
    if state is not None:
        if type(state) is not tuple or not all(one is None or type(one) in (int, str) for one in state):
            return None
        if state not in _states(code):
            return None
    return np.dtype(code)


def _is_numpy(function: object, name: str) -> bool:
    return type(function) is Global and function.module in NUMPY_MODULES and function.name == name


def _is_dtype(call: PickledCall) -> bool:
    return _dtype_of(call) is not None


def _is_array(call: PickledCall) -> bool:
    """`_reconstruct(ndarray, (0,), b"b")`, and the array itself as its state."""
    if len(call.args) != 3 or not _is_numpy(call.args[0], "ndarray") or call.args[1:] != ((0,), b"b"):
        return False
    if call.kwargs or call.list_items or call.dict_items:
        return False
    if call.state is None:
        return True
    if type(call.state) is not tuple or len(call.state) != 5:
        return False
    version, shape, kind, is_fortran, data = call.state
    dtype = _dtype_of(kind)
    if version != 1 or type(shape) is not tuple or dtype is None or type(is_fortran) not in (bool, int):
        return False
    if not all(type(size) is int and size >= 0 for size in shape):
        return False
    if dtype.hasobject:
        return type(data) is list and len(data) == prod(shape)
    return type(data) is bytes and len(data) == prod(shape) * dtype.itemsize


def _is_scalar(call: PickledCall) -> bool:
    if not _is_bare(call) or len(call.args) != 2:
        return False
    dtype = _dtype_of(call.args[0])
    data = call.args[1]
    return dtype is not None and not dtype.hasobject and type(data) is bytes and len(data) == dtype.itemsize


@cache
def _rules() -> dict[str, Callable[[PickledCall], bool]]:
    rules: dict[str, Callable[[PickledCall], bool]] = {
        "argparse.Namespace": _is_namespace,
        "types.SimpleNamespace": _is_namespace,
        "builtins.range": _only(int),
        "builtins.xrange": _only(int),
        "builtins.bytes": _never,
        "builtins.bytearray": _never,
        "collections.deque": _is_deque,
        "collections.defaultdict": _is_defaultdict,
        "collections.Counter": _only(dict),
        "datetime.date": _only(int, bytes, str),
        "datetime.datetime": _only(int, bytes, str),
        "datetime.timedelta": _only(int),
        "pathlib.Path": _only(str),
        "pathlib.PosixPath": _only(str),
        "torch.device": _only(str, int),
        "torch.serialization._get_layout": _only(str),
        "torch.Tensor": _only(TensorRef),
        "torch._utils._rebuild_nested_tensor": _never,  # its sizes and offsets are not held against its buffer
    }
    rules |= {f"builtins.{name}": _only(list, tuple, dict) for name in ("dict", "list", "tuple")}
    for module in NUMPY_MODULES:
        for name, rule in (
            ("dtype", _is_dtype),
            ("_reconstruct", _is_array),
            ("scalar", _is_scalar),
            ("ndarray", _never),
        ):
            rules[f"{module}.{name}"] = rule
    return rules
