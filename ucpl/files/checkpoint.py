"""An opened checkpoint, and the interface of each framework's store.

Stores map (file, key) to extents; they never cut or join. Not here: the meaning of tensors (layout), and the bytes of
containers (torch_files, safetensors_files).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key, StoredTensor, Structure, TrainState
from ucpl.extents.account import NotRead
from ucpl.extents.containers import Container
from ucpl.files.demands import Demands
from ucpl.files.header_watch import Identity
from ucpl.records import frozen
from ucpl.texts import Json


class Own:
    """Facts of one format's files; only its own code reads subclasses."""

    __slots__ = ()

    def renamed(self) -> Own | None:
        """The facts that hold after tensors got other names."""
        return self


@frozen
class Order:
    """The parameters of an optimizer's numbers, for files without names.

    The caller gives them. `names`: by pipeline stage, in the optimizer's order; if empty, the groups follow each other
    in the model's order. `config`: a config.json in place of names, whose class has an order.
    """

    names: tuple[tuple[str, ...], ...]
    origin: str  # 'order = "names.json"'
    config: Mapping[str, Json] | None = None
    used: list[bool] = field(factory=list, eq=False, repr=False)  # not empty after a reader took the names

    def take(self) -> Order:
        """The order, for a reader that has numbers.

        Raises: UcplError E466 for a config.json: its class orders numbers of folders alone.
        """
        if self.config is not None:
            fail(
                "E466",
                f"{self.origin} is a config.json, and the files have an order of their own",
                Label(self.origin),
                remedy="write a file with the names of the optimizer's parameters, one a line",
            )
        self.used.append(True)
        return self

    def take_config(self) -> Mapping[str, Json] | None:
        """The config.json, if that is the order."""
        if self.config is not None:
            self.used.append(True)
        return self.config

    def at(self, stage: int) -> tuple[str, ...] | None:
        """The names of a stage; None if none are given."""
        return self.names[stage] if stage < len(self.names) else None


@frozen(eq=False)
class Checkpoint:
    """A checkpoint whose headers were read. No payload is in memory.

    `extents` holds every tensor that is payload (weights, optimizer state): a layout must cover each.
    `carried_extents` holds tensors inside carried values of the TrainState (client_state), which layouts do not cover.
    """

    top: Path  # the path that the user named: the save folder, a step's folder, or a file
    root: Path  # the folder that `Extent.file` is relative to: one step's folder
    tag: str | None  # "global_step3"
    format: str  # name of its format
    version: str
    extents: dict[tuple[str, Key], Extent]
    carried_extents: dict[tuple[str, Key], Extent]
    state: TrainState
    files: tuple[str, ...] = ()  # every file that belongs to it, relative to root
    # Of files with several archives of torch.save, one behind the other: where each begins, and its bytes. Storages of their
    # tensors are called "BEGIN:NAME".
    archives: dict[str, Sequence[tuple[int, int]]] = field(factory=dict)
    remarks: tuple[str, ...] = ()  # odd findings, for `inspect`
    notes: tuple[str, ...] = ()  # choices of the reader (masters, one of several files), for plans and `verify`
    missing_tensors: tuple[str, ...] = ()  # tensors of the model without data, for `inspect` and plans
    missing_files: tuple[str, ...] = ()  # the optimizer's files that other files name, if all of them are missing
    not_read: tuple[NotRead, ...] = ()  # data that the reader skips, always reported
    scalar_extents: dict[str, dict[str, Extent]] = field(factory=dict)  # state -> parameter -> where its number lies
    # Keeps the files of a checkpoint in a store readable.
    standing: object = field(default=None, eq=False, repr=False)
    own: Own | None = None  # facts of the format; only its own code looks into them
    container: Container | None = None  # the folder around it, where a training framework keeps files of its own there
    opened: dict[str, Identity] = field(factory=dict)  # path -> the file as it was when its header was read

    @cached_property
    def by_texts(self) -> dict[tuple[str, tuple[str, ...]], Extent]:
        """The extents by file and by the texts of their keys.

        A step is a dict key or a list index: layouts know the text of both.
        """
        if all(type(step) is str for _, key in self.extents for step in key):
            return self.extents  # type: ignore[return-value]
        return {(file, tuple(map(str, key))): extent for (file, key), extent in self.extents.items()}

    def dtype_of(self, file: str, key: Key) -> str | None:
        """The dtype of a stored tensor, by its header."""
        extent = self.by_texts.get((file, tuple(map(str, key))))
        return None if extent is None else extent.dtype


@frozen(eq=False)
class Carried:
    """Bytes that go over as they are: a tensor inside client_state, say."""

    extent: Extent  # where they are in the source
    storage: str  # the complete, contiguous storage of the target file that they fill
    is_made: bool = False  # of a file that was made for this target, and is made again if a run resumes


@frozen(eq=False)
class Archive:
    """One of several archives of torch.save in a file.

    Its storages are called "N:NAME" there, N the archive's number.
    """

    value: object
    known: dict[str, bytes] = field(factory=dict)  # bytes of storages, by NAME, that are known before data moves


@frozen(eq=False)
class SkeletonFile:
    """One target file before its payload: a value tree with named storages.

    Its TensorRefs point to storages "0", "1", ...
    """

    path: str  # relative to the step's folder of the target
    # for torch files; for safetensors files a dict name -> TensorRef; the size of a complete one; bytes; a tuple of
    # Archive; (bytes, size of the storage)
    value: Any
    # or "safetensors", `whole`: one run of bytes, carried, "bytes": known ones, "archives", "headed": bytes, then a
    # storage "0"
    form: str = "torch"
    metadata: dict[str, str] | None = None  # of a safetensors header
    storage_of: dict[int, str] = field(factory=dict)  # index into the plan's targets -> storage name
    carried: tuple[Carried, ...] = ()
    beside: bool = False  # it is next to the step's folder, not in it


@frozen(eq=False)
class Skeleton:
    """A target before its payload.

    `folder` is the step's folder inside the target ("" or the tag).
    """

    folder: str
    files: tuple[SkeletonFile, ...]
    texts: dict[str, str] = field(factory=dict)  # small files relative to the target's top: {"latest": "global_step3"}
    unsafe_globals: tuple[str, ...] = ()  # classes that its pickles name and that no framework of ours is known to need


class Framework(Protocol):
    """One framework's files."""

    name: str
    demands: Demands  # of its loader

    def recognises(self, path: Path) -> bool:
        """Test quickly whether `path` looks like this framework's checkpoint.

        Names of files decide, perhaps one header.
        """
        ...

    def open(self, path: Path) -> Checkpoint:
        """Read all headers.

        Raises: UcplError (E45x-E49x, exit 3) for missing, doubled, damaged or contradictory files.
        """
        ...

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """Files of a target: metadata from `structure`, the rest from `source.state`."""
        ...
