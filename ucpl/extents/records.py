"""Where a stored tensor lies, and the values that stand beside tensors in a file. A leaf room: it knows no plan, no layout.

Not here: reading or writing (stores), and what a tensor means (layout).
"""

from __future__ import annotations

from attrs import field

from ucpl.records import frozen, mutable

Step = str | int
Key = tuple[Step, ...]  # steps into nested dicts and lists: ("module", "wte.weight"), ("fp32_flat_groups", 0)


def key_text(key: Key) -> str:
    """The key as people write it, steps joined by `/`."""
    return "/".join(map(str, key))


@frozen
class Extent:
    """One stored tensor: dtype, geometry in elements, and the bytes of the storage (archive member) it views."""

    file: str  # path relative to the checkpoint's folder, "/" between parts
    key: Key
    dtype: str  # a name of extents.dtypes
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # elements, from the start of the storage to element (0, ..., 0)
    storage: str  # identity of the storage within the file: aliases share it
    storage_start: int  # byte position of the storage in the file
    storage_bytes: int  # its length in bytes
    crc: int | None = None  # CRC-32 of the whole storage, where the container states one
    # Its bytes are made as they are read (of a vault's gradients): `crc` tells it from others, and is not of its bytes.
    made: bool = False

    @property
    def numel(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def is_contiguous(self) -> bool:
        """Row-major without gaps, so that the tensor is one run of bytes (a tensor of no elements is one, too)."""
        if not self.numel:
            return True
        expected = 1
        for n, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and step != expected:
                return False
            expected *= n
        return True


# ---- values of a pickle, inert -------------------------------------------------------------------------------------
# A pickle is read into plain Python values (dict, list, tuple, set, str, int, float, bool, bytes, None) and the records below.
# Nothing of the checkpoint's choosing is imported or called. The same values are written back.


@frozen
class StorageRef:
    """A tensor storage of a file: `name` is its identity within that file (the member data/NAME of a torch zip)."""

    name: str
    dtype: str
    numel: int
    location: str = "cpu"  # where it lived: torch's location tag


@frozen
class TensorRef:
    """A tensor in a value tree: geometry in elements over a storage. `parameter` marks a torch.nn.Parameter."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False
    # Python attributes that the tensor carried (DeepSpeed's ds_id): kept and written back, no part of what it is equal to
    attributes: object = field(default=None, eq=False)


@frozen
class Global:
    """A name that a pickle refers to, never imported: `module.name`."""

    module: str
    name: str


@mutable(eq=False)
class Call:
    """An object that a pickle builds by calling `function`: kept inert and written back as it was.

    `new` tells `cls.__new__(cls, *args)` (opcode NEWOBJ) from a plain call (REDUCE). `state` is what BUILD gives (a
    dict of attributes, usually); `items` are what APPENDS or SETITEMS add.
    """

    function: Global | Call
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
