"""networkx without its algorithms until one is used, for a fast start.

Plans use its directed graph, 30 of the 285 modules that `import networkx` reads. Empty modules take the places of packages
while networkx is imported. A later use of an absent name, or an import of such a package, imports all of them in networkx's
own order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # the import of that module would take a part of the time that is won

__all__ = ["put_off_algorithms"]

_PACKAGE = "networkx"
_LATER = ["convert_matrix", "generators", "readwrite", "algorithms", "linalg", "drawing"]


def put_off_algorithms() -> None:
    """Let the next `import networkx` of this process leave out algorithms."""
    if _PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finder of networkx, and of the packages that are put off."""

    is_started = False  # networkx is imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or (name and name not in _LATER):
            return None
        if self.is_started:
            self.complete()
            known = sys.modules[fullname].__spec__
            if known is not None and known.loader is not None:
                known.loader = _Known(known.loader)
            return known
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        if not name:
            spec.loader = _Shortened(self, spec.loader)
            return spec
        empty = ModuleSpec(fullname, _Empty())
        empty.submodule_search_locations = spec.submodule_search_locations
        return empty

    def complete(self) -> None:
        """Import the packages, and give networkx their names."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        for name in _LATER:
            found = import_module(f"{_PACKAGE}.{name}")
            names = getattr(found, "__all__", [one for one in vars(found) if not one.startswith("_")])
            sys.modules[_PACKAGE].__dict__.update((one, getattr(found, one)) for one in names)


class _Shortened(Loader):
    """The loader of networkx. Names of the packages are found on use."""

    def __init__(self, finder: _Finder, loader: Loader) -> None:
        self.finder, self.loader = finder, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        names = module.__dict__
        for name in _LATER:
            sys.modules.pop(f"{_PACKAGE}.{name}", None)
            names.pop(name, None)
        self.finder.is_started = True
        last = names.get("__getattr__")

        def found(name: str) -> object:
            self.finder.complete()
            if name not in names and last is not None:
                return last(name)
            if name not in names:
                raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
            return names[name]

        names["__getattr__"] = found


class _Empty(Loader):
    """The loader of a module without names."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__all__"] = []


class _Known(Loader):
    """The loader of a module that its own search imported."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
