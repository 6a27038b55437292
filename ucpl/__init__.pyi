from ucpl.api import apply, compare, convert, infer, load, load_plan, plan, save_plan, verify
from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.layout import resolve
from ucpl.regions import locate
from ucpl.runtime.execute import execute
from ucpl.schedule import order
from ucpl.syntax import parse

__version__: str

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
