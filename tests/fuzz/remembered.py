"""Files that no input changes are read once: of a folder of seventy files, one is damaged at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

from ucpl.extents import Extent
from ucpl.stores import generic, plain
from ucpl.stores.deepspeed import experts, pipeline, topology, universal
from ucpl.stores.torch_files import TorchFile, read_torch_file

READERS = (generic, plain, experts, pipeline, topology, universal)
EXTENTS = TorchFile.extents


@define(eq=False)
class Remembered:
    """What `read_torch_file` gave for files that are as they were, and what it is to give for one that is damaged in memory."""

    known: dict[tuple[Path, str], TorchFile] = field(factory=dict)
    changed: set[Path] = field(factory=set)
    instead: dict[Path, TorchFile] = field(factory=dict)
    extents: dict[int, tuple[Extent, ...]] = field(factory=dict)  # by the id of a known file

    def read(self, folder: Path, name: str) -> TorchFile:
        path = folder / name
        if path in self.instead:
            return self.instead[path]
        if path in self.changed:
            return read_torch_file(folder, name)
        if (folder, name) not in self.known:
            made = self.known[folder, name] = read_torch_file(folder, name)
            self.extents[id(made)] = made.extents()
        return self.known[folder, name]

    def extents_of(self, part: TorchFile) -> tuple[Extent, ...]:
        return self.extents[id(part)] if id(part) in self.extents else EXTENTS(part)

    @contextmanager
    def but(self, changed: Iterable[Path] = (), instead: dict[Path, TorchFile] | None = None) -> Iterator[None]:
        """While these files are others, on the disk or in memory."""
        self.changed, self.instead = set(changed), instead or {}
        for module in READERS:
            module.read_torch_file = self.read  # type: ignore[attr-defined]
        TorchFile.extents = lambda part: self.extents_of(part)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            TorchFile.extents = EXTENTS  # type: ignore[method-assign]
            for module in READERS:
                module.read_torch_file = read_torch_file  # type: ignore[attr-defined]
