"""Files that no input changes are read once: of a folder of seventy files, one is damaged at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define, field

from ucpl.stores import generic, plain
from ucpl.stores.deepspeed import experts, pipeline, topology, universal
from ucpl.stores.torch_files import TorchFile, read_torch_file

READERS = (generic, plain, experts, pipeline, topology, universal)


@define(eq=False)
class Remembered:
    """What `read_torch_file` gave for files that are as they were."""

    known: dict[tuple[Path, str], TorchFile] = field(factory=dict)
    changed: set[Path] = field(factory=set)

    def read(self, folder: Path, name: str) -> TorchFile:
        if folder / name in self.changed:
            return read_torch_file(folder, name)
        if (folder, name) not in self.known:
            self.known[folder, name] = read_torch_file(folder, name)
        return self.known[folder, name]

    @contextmanager
    def but(self, changed: set[Path]) -> Iterator[None]:
        """While these files are others."""
        self.changed = changed
        for module in READERS:
            module.read_torch_file = self.read  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module in READERS:
                module.read_torch_file = read_torch_file  # type: ignore[attr-defined]
