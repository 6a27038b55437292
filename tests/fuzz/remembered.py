"""Files that no input changes are read once.

Of a folder of seventy files, one is damaged at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define, evolve, field

from ucpl.extents import Extent, Key
from ucpl.files import torch_files
from ucpl.files.pickle_runs import PickleRuns
from ucpl.files.pickles import Pickle, load_pickle
from ucpl.files.torch_files import Pickles, TorchFile, read_torch_file
from ucpl.formats import opening
from ucpl.formats.dcp import folders as dcp_folders
from ucpl.formats.dcp import metadata as described
from ucpl.formats.dcp.chunks import Chunks
from ucpl.formats.dcp.metadata import METADATA, ChunkedTensor, Metadata, read_metadata
from ucpl.formats.megatron import fsdp_reading, legacy_ranks, reading
from ucpl.registry import formats

assert all(opening.framework(name) for name in formats())
# For all readers of such files: a folder that is read past this one would be read as it was.
READERS = [
    module
    for name, module in sorted(sys.modules.items())
    if name.startswith(("ucpl.files.", "ucpl.formats."))
    and module is not torch_files
    and hasattr(module, "read_torch_file")
]
DESCRIBED = [
    module
    for name, module in sorted(sys.modules.items())
    if hasattr(module, "read_metadata") and "ucpl.formats." in name
]
EXTENTS = TorchFile.extents
CHUNKS_OF = Chunks.extents
assert len(READERS) > 4  # they come with the stores of the formats
assert {legacy_ranks, reading} <= {*READERS}  # and these alone
assert {described, dcp_folders, reading, fsdp_reading} <= {*DESCRIBED}  # others ask for it where they are called


@define(eq=False)
class Remembered:
    """Results of `read_torch_file` for unchanged files, and for a damaged one.

    The damaged one is in memory.

    The same of `.metadata` of PyTorch's distributed format, and of the archives within its files.
    """

    known: dict[tuple[Path, str, int, int | None], TorchFile] = field(factory=dict)
    metadata: dict[Path, Metadata] = field(factory=dict)  # by folder
    chunks: dict[tuple[Path, str], tuple[ChunkedTensor, dict[Key, Extent]]] = field(factory=dict)
    changed: set[Path] = field(factory=set)
    instead: dict[Path, TorchFile] = field(factory=dict)
    pickled: object = None  # the value that `.metadata` is to have in memory, where `is_pickled` is
    is_pickled: bool = False
    extents: dict[int, tuple[Extent, ...]] = field(factory=dict)  # by the id of a known file

    def read(
        self, folder: Path, name: str, start: int = 0, size: int | None = None, known: Pickles | None = None
    ) -> TorchFile:
        if (
            self.instead or self.changed
        ):  # most archives are chunks of hundreds: a path of each takes as long as all else
            path = folder / name
            if path in self.instead:
                return self.instead[path]
            if path in self.changed:
                return read_torch_file(folder, name, start, size, known)
        key = (folder, name, start, size)
        if key not in self.known:
            made = self.known[key] = read_torch_file(folder, name, start, size, known)
            self.extents[id(made)] = made.extents()
        return self.known[key]

    def read_metadata(self, root: Path) -> Metadata:
        """Results for an unchanged folder, in new dicts. Callers may change them."""
        if self.is_pickled or root / METADATA in self.changed:
            return read_metadata(root)
        if root not in self.metadata:
            self.metadata[root] = read_metadata(root)
        found = self.metadata[root]
        return evolve(
            found,
            tensors=dict(found.tensors),
            objects=dict(found.objects),
            paths=dict(found.paths),
            runs_of=dict(found.runs_of),
            archives=dict(found.archives),
            described=dict(found.described),
        )

    def chunks_of(self, chunks: Chunks, name: str, stored: ChunkedTensor) -> dict[Key, Extent]:
        """Results for tensors with unchanged entries in `.metadata` and archives."""
        if self.changed:
            return CHUNKS_OF(chunks, name, stored)
        known = self.chunks.get((chunks.root, name))
        if known is not None and (known[0] is stored or known[0] == stored):
            return dict(known[1])
        made = CHUNKS_OF(chunks, name, stored)
        if not self.is_pickled and not chunks.issues:
            self.chunks[chunks.root, name] = (stored, dict(made))
        return made

    def load(self, data: bytes, file: str, *, runs: PickleRuns | None = None) -> Pickle:
        return Pickle(self.pickled, (), ()) if self.is_pickled else load_pickle(data, file, runs=runs)

    def extents_of(self, part: TorchFile) -> tuple[Extent, ...]:
        return self.extents[id(part)] if id(part) in self.extents else EXTENTS(part)

    @contextmanager
    def but(
        self,
        changed: Iterable[Path] = (),
        instead: dict[Path, TorchFile] | None = None,
        pickled: tuple[object, ...] = (),
    ) -> Iterator[None]:
        """While these files are others, on the disk or in memory. pickled.

        The value of `.metadata`, if it is another.
        """
        self.changed, self.instead = set(changed), instead or {}
        self.is_pickled, self.pickled = bool(pickled), pickled[0] if pickled else None
        for module in READERS:
            module.read_torch_file = self.read  # type: ignore[attr-defined]
        for module in DESCRIBED:
            module.read_metadata = self.read_metadata  # type: ignore[attr-defined]
        described.load_pickle = self.load  # type: ignore[attr-defined, assignment]
        TorchFile.extents = lambda part: self.extents_of(part)  # type: ignore[method-assign, assignment]
        Chunks.extents = lambda *given: self.chunks_of(*given)  # type: ignore[method-assign]
        try:
            yield
        finally:
            Chunks.extents = CHUNKS_OF  # type: ignore[method-assign]
            TorchFile.extents = EXTENTS  # type: ignore[method-assign]
            described.load_pickle = load_pickle  # type: ignore[attr-defined]
            for module in DESCRIBED:
                module.read_metadata = read_metadata  # type: ignore[attr-defined]
            for module in READERS:
                module.read_torch_file = read_torch_file  # type: ignore[attr-defined]
