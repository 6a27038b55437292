"""Files that no input changes are read once: of a folder of seventy files, one is damaged at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

from ucpl.extents import Extent
from ucpl.stores import registry, torch_files
from ucpl.stores.megatron import legacy_ranks, reading
from ucpl.stores.torch_files import TorchFile, read_torch_file

# Whoever reads such files, wherever that is done: a folder that is read past this one would be read as it was.
READERS = [
    module
    for name, module in sorted(sys.modules.items())
    if name.startswith("ucpl.stores.") and module is not torch_files and hasattr(module, "read_torch_file")
]
EXTENTS = TorchFile.extents
assert registry.FRAMEWORKS and len(READERS) > 4  # they came with the registry
assert {legacy_ranks, reading} <= {*READERS}  # and these by themselves


@define(eq=False)
class Remembered:
    """What `read_torch_file` gave for files that are as they were, and what it is to give for one that is damaged in memory."""

    known: dict[tuple[Path, str], TorchFile] = field(factory=dict)
    changed: set[Path] = field(factory=set)
    instead: dict[Path, TorchFile] = field(factory=dict)
    extents: dict[int, tuple[Extent, ...]] = field(factory=dict)  # by the id of a known file

    def read(self, folder: Path, name: str, start: int = 0, size: int | None = None) -> TorchFile:
        path = folder / name
        if start or size is not None:  # one of several archives
            return read_torch_file(folder, name, start, size)
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
