"""Makes a faster start of numpy, for commands.

It leaves out docstrings of compiled functions, which take an eighth of an import, and threads for products of matrices,
which no command computes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ucpl.cli.short_networkx import EmptyLoader, Loader

__all__ = ["leave_out_docstrings"]

_PACKAGE = "numpy"
_DOCSTRINGS = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")
_THREADS = "OPENBLAS_NUM_THREADS"


def leave_out_docstrings() -> None:
    """Let the next `import numpy` of this process be short."""
    if _PACKAGE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finder of numpy, and of its modules that only add docstrings."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _DOCSTRINGS:
            return ModuleSpec(fullname, EmptyLoader())
        if fullname != _PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Shortened(self, spec.loader)
        return spec


class _Shortened(Loader):
    """The loader of numpy. Its library of matrices starts no threads."""

    def __init__(self, finder: _Finder, loader: Loader) -> None:
        self.finder, self.loader = finder, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        is_open = _THREADS not in os.environ
        os.environ.setdefault(_THREADS, "1")
        try:
            self.loader.exec_module(module)
        finally:
            sys.meta_path.remove(self.finder)
            if is_open:  # processes that this one starts are not limited
                del os.environ[_THREADS]
