"""ucpl, the universal checkpoint language: proved conversions between parallel layouts.

    import ucpl
    report = ucpl.convert("run/", "run-on-8/", to="zero1(dp=8)")
    assert ucpl.compare("run/", "run-on-8/")

A room's verb each: `parse, resolve, locate, build, order, execute`; short cuts: `load, plan, apply, convert, compare, verify,
infer`. A name is imported when it is first used, so that `import ucpl` costs nothing. `__init__.pyi` is the list of names.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

__version__ = "0.9.0"


@cache
def _homes() -> dict[str, str]:
    """Public name -> its module, from the stub file."""
    with open(__file__.removesuffix(".py") + ".pyi", encoding="utf-8") as stub:
        lines = [line.split() for line in stub]
    return {words[-1]: words[1] for words in lines if words[:1] == ["from"]}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return ["__version__", *sorted(_homes())]
    if name not in _homes():
        raise AttributeError(f"module 'ucpl' has no attribute {name!r}")
    value: object = getattr(import_module(_homes()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
