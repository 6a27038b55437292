"""Values of a running job as value trees that refer to tensors.

The tree equals the one that a reader of torch.save's file would get. The value is pickled as torch.save does it, and
the pickle is read at once by our own machine: objects become inert. No tensor is copied.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import cast

import torch
from attrs import field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import DTYPES, Key, StorageRef, TensorRef
from ucpl.extents.dtypes import BY_TORCH
from ucpl.files.pickles import load_pickle
from ucpl.live.tensors import Place, is_placed, place_of, plain, unreadable
from ucpl.records import define, frozen

__all__ = ["ValueTree", "dtype_name", "to_value_tree", "nested", "one_tensor"]


Reduced = tuple[Callable[..., object], tuple[object, ...]]


@frozen(eq=False)
class ValueTree:
    """A value tree, and the tensors of its storages."""

    tree: object
    tensors: Mapping[str, torch.Tensor]  # by the storage's name


@frozen
class _Storage:
    """A stand-in for a storage during the pickling."""

    kind: object
    name: str
    numel: int


@define(eq=False)
class _Storages:
    """Tensors that were met. One that is met twice is one storage."""

    tensors: dict[str, torch.Tensor] = field(factory=dict)
    _known: dict[Place, str] = field(factory=dict)

    def name_of(self, tensor: torch.Tensor) -> str:
        # Without memory it is like nothing else.
        what = (id(tensor),) if tensor.numel() == 0 or tensor.is_meta else place_of(tensor)
        name = self._known.setdefault(what, str(len(self._known)))
        self.tensors[name] = tensor
        return name


def dtype_name(tensor: torch.Tensor, where: str) -> str:
    """A tensor's type by its name in the language. Raises: UcplError E693."""
    if not tensor.is_meta and (why := unreadable(tensor)):  # those without bytes are laid out, and never read
        fail("E693", f"{where} is {why}", Label("the saved state", where=where))
    found = BY_TORCH.get(str(tensor.dtype).removeprefix("torch."))
    if found is None:
        what = f"{where} is a tensor of {tensor.dtype} and layout {tensor.layout}, which cannot be saved"
        fail("E693", what, Label("the saved state", where=where))
    return found.name


class _Pickler(pickle.Pickler):
    """A pickler like torch.save's, with one storage per tensor.

    The storage has only the elements of its tensor.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages = _Storages()

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        return ("storage", obj.kind, obj.name, "cpu", obj.numel) if type(obj) is _Storage else None

    def reducer_override(self, obj: object) -> Reduced:
        if not isinstance(obj, torch.Tensor):
            return cast(Reduced, NotImplemented)
        if is_placed(obj):
            fail("E693", "a DTensor among values of a file cannot be saved", Label("the saved state"))
        if why := unreadable(obj):
            fail("E693", f"a tensor of a file is {why}", Label("the saved state"))
        if isinstance(obj, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (obj.data, obj.requires_grad, OrderedDict())
        bare = plain(obj)
        dtype = DTYPES[dtype_name(bare, "a tensor")]
        numel = bare.numel() if dtype.storage else bare.numel() * dtype.itemsize
        kind = getattr(torch, dtype.storage) if dtype.storage else torch.UntypedStorage
        storage = _Storage(kind, self.storages.name_of(bare), numel)
        steps = torch.empty(bare.shape, device="meta").stride()
        shape, hooks = tuple(bare.shape), OrderedDict[str, object]()
        if dtype.storage:
            return torch._utils._rebuild_tensor_v2, (storage, 0, shape, steps, obj.requires_grad, hooks)
        return torch._utils._rebuild_tensor_v3, (storage, 0, shape, steps, obj.requires_grad, hooks, bare.dtype)


def to_value_tree(value: object, where: str) -> ValueTree:
    """A value as torch.save would write it.

    where: the name of the value in errors.
    Raises: UcplError E693.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
        tree = load_pickle(file.getvalue(), where).value
    except UcplError:
        raise
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        fail("E693", f"{where} cannot be saved: {error}", Label("the saved state", where=where))
    return ValueTree(tree, pickler.storages.tensors)


def _ref(storages: _Storages, tensor: torch.Tensor, where: str) -> TensorRef:
    dtype = dtype_name(tensor, where)
    bare = plain(tensor)
    shape, steps = tuple(bare.shape), tuple(torch.empty(bare.shape, device="meta").stride())
    return TensorRef(StorageRef(storages.name_of(bare), dtype, bare.numel()), 0, shape, steps)


def one_tensor(tensor: torch.Tensor, where: str) -> ValueTree:
    """A tensor alone. Raises: UcplError E693."""
    storages = _Storages()
    return ValueTree(_ref(storages, tensor, where), storages.tensors)


def nested(tensors: Mapping[Key, torch.Tensor], where: str) -> ValueTree:
    """A dict of dicts with tensors at keys. Raises: UcplError E693."""
    storages = _Storages()
    root: dict[object, object] = {}
    for key, tensor in tensors.items():
        here = root
        for step in key[:-1]:
            inner = here.setdefault(step, {})
            if not isinstance(inner, dict):
                fail("E693", f"{where}: a key has both a tensor and other keys below it", Label(where, where=str(step)))
            here = inner
        here[key[-1]] = _ref(storages, tensor, "/".join(map(str, key)))
    return ValueTree(root, storages.tensors)
