"""Values of a pickle's tree, and a walk through it without recursion.

They are plain Python values, and the records of extents.records in place of imported objects. Attributes of an
OrderedDict (torch's `_metadata` of a state_dict) are kept with it: `attributes_of`, `set_attributes`.

Not here: the bytes (pickles, pickle_writer).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import TypeGuard, TypeVar

import numpy as np

from ucpl.errors import Label, fail
from ucpl.extents import BY_STORAGE, Global, Key, PickledCall, Size, Step, StorageRef, TensorRef, TorchDType

__all__ = [
    "Bad", "attributes_of", "check_nesting", "is_dims", "is_name", "set_attributes", "tensors_of", "unsafe_globals",
    "walk", "NUMPY_MODULES", "is_plain_call",
]  # fmt: skip

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


PICKLE_BYTES_MAX = 1 << 30  # a data.pkl of a million tensors has 100 MB
NESTING_MAX = 200  # levels
WALK_VALUES_MAX = 10_000_000  # values met on all paths
DIMS_MAX = 64  # torch's own limit
NUMBER_BYTES_MAX = 1024  # of a whole number: Python itself prints none of more than 4,300 digits

K = TypeVar("K")
V = TypeVar("V")
A = TypeVar("A")
B = TypeVar("B")

_ATTRIBUTES = "ucpl_attributes"
# Python 2's names, which protocol 2 still uses. The others of pickle's table are of no use here.
MODULE_READ = {"__builtin__": "builtins", "copy_reg": "copyreg"}
MODULE_WRITTEN = {new: old for old, new in MODULE_READ.items()}


def attributes_of(mapping: OrderedDict[K, V]) -> dict[object, object] | None:
    """The attributes that a file gave to an OrderedDict, or None.

    BUILD gives them, such as `{"_metadata": ...}`.
    """
    found = vars(mapping).get(_ATTRIBUTES)
    return found if isinstance(found, dict) else None


def set_attributes(mapping: OrderedDict[K, V], attributes: dict[A, B] | None) -> None:
    """Give an OrderedDict the attributes that it is written with.

    They have one reserved name: a file cannot shadow a method.
    """
    vars(mapping).pop(_ATTRIBUTES, None)
    if attributes is not None:
        vars(mapping)[_ATTRIBUTES] = attributes


# ---- known names ---------------------------------------------------------------------------------------------------

ORDERED_DICT = Global("collections", "OrderedDict")
SIZE = Global("torch", "Size")
TENSOR = Global("torch", "Tensor")
PARAMETER = Global("torch.nn.parameter", "Parameter")
REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor")
REBUILD_TENSOR_V2 = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_TENSOR_V3 = Global("torch._utils", "_rebuild_tensor_v3")
REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
REBUILD_PARAMETER_WITH_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
REBUILD_FROM_TYPE_V2 = Global("torch._tensor", "_rebuild_from_type_v2")
ENCODE = Global("_codecs", "encode")
BYTES = Global("builtins", "bytes")
BYTEARRAY = Global("builtins", "bytearray")
SET = Global("builtins", "set")
FROZENSET = Global("builtins", "frozenset")
COMPLEX = Global("builtins", "complex")
SLICE = Global("builtins", "slice")
GETATTR = Global("builtins", "getattr")
UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")

STORAGE_DTYPES: dict[Global, str] = {
    **{Global(module, name): dtype.name for name, dtype in BY_STORAGE.items() for module in ("torch", "torch.cuda")},
    UNTYPED_STORAGE: "u8",
    Global("torch", "UntypedStorage"): "u8",
}


class Bad(Exception):
    """An error at the current instruction; the machine adds file and position."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def is_name(text: str) -> bool:
    return len(text) <= 1000 and all(part.isidentifier() for part in text.split("."))


def is_dims(value: object) -> TypeGuard[tuple[int, ...]]:
    """A shape or stride: at most 64 whole numbers of 64 bits."""
    if not (type(value) is tuple or type(value) is Size) or len(value) > DIMS_MAX:
        return False
    for n in value:  # noqa: SIM110 (a generator takes twice as long)
        if type(n) is not int or not -(1 << 63) <= n < 1 << 63:
            return False
    return True


def kind_of(value: object) -> str:
    if type(value) is Global:
        return f"the name {value.module}.{value.name}"
    return f"a {type(value).__name__}"


# ---- over values ---------------------------------------------------------------------------------------------------

LEAVES = frozenset(
    {str, int, float, bool, type(None), bytes, complex, bytearray, slice, Global, TorchDType, Size, StorageRef}
)


def parts_of(value: object) -> list[object]:
    """The values directly in a value, with keys that are not leaves."""
    found: list[object]
    if type(value) is tuple or type(value) is list or type(value) is set or type(value) is frozenset:
        return list(value)
    if type(value) is dict or type(value) is OrderedDict:
        found = list(value.values())
        found.extend(key for key in value if type(key) not in LEAVES)
        if type(value) is OrderedDict and (attributes := attributes_of(value)) is not None:
            found.append(attributes)
        return found
    if type(value) is PickledCall:
        found = [value.function, *value.args, value.state, *value.list_items]
        found.extend(value.kwargs.values())
        for pair in value.dict_items:
            found.extend(pair)
        return found
    if type(value) is TensorRef and value.attributes is not None:
        return [value.attributes]
    return []


def _holds_leaves(value: object) -> bool:
    """Test whether a container clearly holds only words and numbers."""
    if type(value) is dict:
        return LEAVES.issuperset(map(type, value.values())) and LEAVES.issuperset(map(type, value))
    if type(value) is list or type(value) is tuple:
        return LEAVES.issuperset(map(type, value))
    return False


def check_nesting(root: object, file: str, code: str = "E424") -> None:
    """Check that no path through a value is longer than NESTING_MAX.

    Callers may recurse; this check does not. A value on several paths has the height found first, and a cycle is cut at
    its end.
    """
    height: dict[int, int] = {}  # of the values below a container; 0 during its visit
    path: list[tuple[int, Iterator[object]]] = []
    highest = [0]
    todo: Iterator[object] = iter((root,))
    leaves = LEAVES
    while True:
        for child in todo:
            if type(child) in leaves:
                continue
            known = height.get(id(child))
            if known is None:
                if type(child) is TensorRef and child.attributes is None:
                    continue
                if _holds_leaves(child):  # most containers: words and numbers
                    height[id(child)] = 1
                    if not highest[-1]:
                        highest[-1] = 1
                    continue
                height[id(child)] = 0
                path.append((id(child), todo))
                todo = iter(parts_of(child))
                highest.append(0)
                break
            if known > highest[-1]:
                highest[-1] = known
        else:
            if not path:
                return
            done, todo = path.pop()
            here = highest.pop() + 1
            height[done] = here
            if here > highest[-1]:
                highest[-1] = here
        if len(path) + highest[-1] > NESTING_MAX:
            fail(code, f"{file}: its values nest more than {NESTING_MAX} deep", Label(file))


def _step(key: object, n: int) -> Step:
    """A dict's key as a step.

    Words and numbers unchanged, others as text.
    """
    if type(key) is str or type(key) is int:
        return key
    if key is None or type(key) in (bool, float, Global, TorchDType, Size, bytes):
        return repr(key)
    return f"@key{n}"


def tensors_of(root: object, file: str = "pickle") -> Iterator[tuple[Key, TensorRef]]:
    """The tensors under `root` with their paths, in the order of `walk`.

    Raises: UcplError E425, as `walk`.
    """
    for key, value in walk(root, file, _holds_leaves):
        if type(value) is TensorRef:
            yield key, value


def walk(
    root: object, file: str = "pickle", passed: Callable[[object], bool] | None = None
) -> Iterator[tuple[Key, object]]:
    """Every value under `root` with its path, containers before their parts.

    The order is the file's. Steps: a dict's key, an index of a list or tuple, and of an object `@args`, `@kwargs`,
    `@state`, `@list`, `@dict`; the attributes of an OrderedDict or tensor are under `@attributes`. A container shared
    by several paths is met on each, a cycle is entered once. Values below a value that is `passed` are skipped.

    Raises: UcplError E425 where sharing unfolds to more than WALK_VALUES_MAX values.
    """
    path: list[tuple[int, Key, Iterator[tuple[Step, object]]]] = []
    entered: set[int] = set()
    here: Key = ()
    ident = 0
    todo: Iterator[tuple[Step, object]] = iter(())
    met = 0
    pending: tuple[Key, object] | None = ((), root)
    while True:
        if pending is None:
            for step, child in todo:
                pending = (here + (step,), child)
                break
            else:
                if not path:
                    return
                entered.discard(ident)
                ident, here, todo = path.pop()
                continue
        key, value = pending
        pending = None
        met += 1
        if met > WALK_VALUES_MAX:
            fail("E425", f"{file}: its values unfold to more than {WALK_VALUES_MAX}", Label(file))
        yield key, value
        if type(value) in LEAVES or id(value) in entered or (passed is not None and passed(value)):
            continue
        steps = steps_of(value)
        if steps:
            path.append((ident, here, todo))
            ident, here, todo = id(value), key, iter(steps)
            entered.add(ident)


def steps_of(value: object) -> list[tuple[Step, object]]:
    """The values directly in a value, each with its step (see `walk`)."""
    found: list[tuple[Step, object]]
    if type(value) is tuple or type(value) is list:
        return list(enumerate(value))
    if type(value) is dict or type(value) is OrderedDict:
        found = [(_step(key, n), item) for n, (key, item) in enumerate(value.items())]
        if type(value) is OrderedDict and (attributes := attributes_of(value)) is not None:
            found.append(("@attributes", attributes))
        return found
    if type(value) is set or type(value) is frozenset:
        return [(f"@member{n}", member) for n, member in enumerate(value)]
    if type(value) is PickledCall:
        return _steps_of_call(value)
    if type(value) is TensorRef and value.attributes is not None:
        return [("@attributes", value.attributes)]
    return []


def _steps_of_call(call: PickledCall) -> list[tuple[Step, object]]:
    found: list[tuple[Step, object]] = [("@function", call.function)]
    for step, part in (
        ("@args", call.args),
        ("@kwargs", call.kwargs),
        ("@list", call.list_items),
        ("@dict", call.dict_items),
    ):
        if part:
            found.append((step, part))
    if call.state is not None:
        found.append(("@state", call.state))
    return found


# Names that torch.load(weights_only=True) of torch 2.6 to 2.13 accepts by default.
_SAFE = frozenset(
    {
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        "collections.Counter",
        "collections.OrderedDict",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch._tensor._rebuild_from_type_v2",
        *(
            f"torch._utils.{name}"
            for name in (
                "_rebuild_parameter",
                "_rebuild_parameter_with_state",
                "_rebuild_qtensor",
                "_rebuild_tensor",
                "_rebuild_tensor_v2",
                "_rebuild_tensor_v3",
                "_rebuild_sparse_tensor",
                "_rebuild_meta_tensor_no_storage",
                "_rebuild_nested_tensor",
                "_rebuild_wrapper_subclass",
                "_rebuild_device_tensor_from_numpy",
                "_rebuild_device_tensor_from_cpu_tensor",
            )
        ),
        *(f"{known.module}.{known.name}" for known in STORAGE_DTYPES if known.module == "torch"),
        "torch.storage.UntypedStorage",
    }
)


# Classes that only hold values in a run's state; each part is checked separately. torch.load(weights_only=True) rejects
# them; a framework that unpickles complete files runs no code through them.
HOLDERS = frozenset(
    {
        "argparse.Namespace",  # Megatron's arguments
        "types.SimpleNamespace",
        *(f"builtins.{name}" for name in ("bool", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")),
        "builtins.range",
        "builtins.xrange",  # its name in protocol 2
        "builtins.slice",
        "collections.defaultdict",
        "collections.deque",
        "datetime.date",
        "datetime.datetime",
        "datetime.timedelta",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        *(
            f"{module}.{name}"  # numpy 1 and 2: a random state is one of its arrays
            for module in NUMPY_MODULES
            for name in ("_reconstruct", "scalar", "ndarray", "dtype")
        ),
    }
)


def unsafe_globals(value: object) -> list[str]:
    """The names under `value` that torch.load(weights_only=True) refuses, sorted: "module.name".

    "module.name(...)" is an object of a known class with arguments or a state that its own pickle never has.
    The caller knows those that a framework needs.
    """
    found: set[str] = set()
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if type(item) is Global:
            name = f"{item.module}.{item.name}"
            if name not in _SAFE:
                found.add(name)
        elif type(item) is slice:
            found.add("builtins.slice")
        elif type(item) in LEAVES or id(item) in seen:
            continue
        else:
            if type(item) is frozenset:
                found.add("builtins.frozenset")
            seen.add(id(item))
            if type(item) is PickledCall and not is_plain_call(item):
                assert type(item.function) is Global
                found.add(f"{item.function.module}.{item.function.name}(...)")
            todo.extend(parts_of(item))
            if type(item) is dict or type(item) is OrderedDict:
                todo.extend(key for key in item if type(key) is Global)
    return sorted(found)


_CONTAINERS = frozenset({list, dict, tuple, OrderedDict, set, frozenset, PickledCall, TensorRef})


def is_foreign(value: object) -> bool:
    return type(value) not in LEAVES and type(value) not in _CONTAINERS
