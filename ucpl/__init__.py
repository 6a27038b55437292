"""ucpl, the universal checkpoint language: training checkpoints, converted between parallel layouts, proved bit for bit.

    import ucpl
    report = ucpl.convert("run/", "run-on-8/", to="zero1(dp=8)")
    assert ucpl.compare("run/", "run-on-8/")

A room's verb each: `parse, resolve, locate, build, order, execute`; short cuts: `load, plan, apply, convert, compare, verify,
infer`. A name is imported when it is first used, so that `import ucpl` costs nothing
(`__init__.pyi` says to type checkers what they are).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "parse": "ucpl.syntax",
    "resolve": "ucpl.layout",
    "locate": "ucpl.regions",
    "build": "ucpl.graph",
    "order": "ucpl.schedule",
    "execute": "ucpl.runtime.execute",
    "UcplError": "ucpl.errors",
    **dict.fromkeys(
        ("apply", "compare", "convert", "infer", "load", "load_plan", "plan", "save_plan", "verify"), "ucpl.api"
    ),
}

__all__ = [
    "UcplError",
    "__version__",
    "apply",
    "build",
    "compare",
    "convert",
    "execute",
    "infer",
    "load",
    "load_plan",
    "locate",
    "order",
    "parse",
    "plan",
    "resolve",
    "save_plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ucpl' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
