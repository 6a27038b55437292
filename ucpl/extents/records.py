"""The place of a stored tensor, and values next to tensors.

This module imports neither plans nor layouts. Not here: reading or writing (stores), and the meaning of tensors
(layout).
"""

from __future__ import annotations

from math import prod

from attrs import field

from ucpl.records import frozen, mutable

Step = str | int
Key = tuple[Step, ...]  # steps into nested dicts and lists: ("module", "wte.weight"), ("fp32_flat_groups", 0)


def key_text(key: Key) -> str:
    """The key as people write it, steps joined by `/`."""
    return "/".join(map(str, key))


@frozen
class Extent:
    """One stored tensor.

    Dtype, geometry in elements, and the bytes of its storage.
    """

    file: str  # path relative to the checkpoint's folder, "/" between parts
    key: Key
    dtype: str  # a name of extents.dtypes
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # elements, from the start of the storage to element (0, ..., 0)
    storage: str  # identity of the storage within the file: aliases share it
    storage_start: int  # byte position of the storage in the file
    storage_bytes: int  # its length in bytes
    crc: int | None = None  # CRC-32 of the complete storage, if the container states one
    # Its bytes are computed when they are read (a vault's gradients): `crc` identifies it, but is not a CRC of its
    # bytes.
    made: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """True for row-major without gaps: the tensor is one run of bytes.

        This includes tensors without elements.
        """
        if not self.numel:
            return True
        expected = 1
        for n, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and step != expected:
                return False
            expected *= n
        return True


@frozen
class Joined(Extent):
    """A tensor that several stored pieces make up; only they have bytes.

    Each piece has the place of its first element in the tensor.
    """

    pieces: tuple[tuple[tuple[int, ...], Extent], ...] = ()


def pieces_of(extent: Extent) -> tuple[tuple[tuple[int, ...], Extent], ...]:
    """The stored pieces of a tensor with their begins; most have one."""
    return extent.pieces if isinstance(extent, Joined) else (((0,) * len(extent.shape), extent),)


# ---- values of a pickle, inert -------------------------------------------------------------------------------------
# A pickle is read into plain Python values (dict, list, tuple, set, str, int, float, bool, bytes, None) and the records below.
# Nothing of the checkpoint's choosing is imported or called. The same values are written back.


@frozen
class StorageRef:
    """A tensor storage of a file.

    `name` is its identity within that file (the member data/NAME of a torch zip).
    """

    name: str
    dtype: str
    numel: int
    location: str = "cpu"  # where it lived: torch's location tag


@frozen
class TensorRef:
    """A tensor in a value tree: geometry in elements over a storage.

    `parameter` marks a torch.nn.Parameter.
    """

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False
    # Python attributes of the tensor (DeepSpeed's ds_id): kept and written back, but not compared
    attributes: object = field(default=None, eq=False)


@frozen
class Global:
    """A name that a pickle refers to, never imported: `module.name`."""

    module: str
    name: str


@mutable(eq=False)
class PickledCall:
    """An object that a pickle builds by calling `function`, kept inert.

    `new` distinguishes `cls.__new__(cls, *args)` (opcode NEWOBJ) from a plain call (REDUCE). `state` is the argument of
    BUILD (a dict of attributes, usually); `items` are the arguments of APPENDS or SETITEMS.
    """

    function: Global | PickledCall
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(factory=dict)
    new: bool = False
    state: object = None
    list_items: list[object] = field(factory=list)
    dict_items: list[tuple[object, object]] = field(factory=list)


class Size(tuple[int, ...]):
    """torch.Size without torch."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({list(self)})"


@frozen
class TorchDType:
    """A torch dtype as a value (`torch.bfloat16`), by its name in extents.dtypes."""

    name: str
