# The public names and where they live: type checkers read this, and `__init__.py` finds a name by it when it is first used.
from ucpl.api import apply as apply
from ucpl.api import compare as compare
from ucpl.api import convert as convert
from ucpl.api import export as export
from ucpl.api import infer as infer
from ucpl.api import load as load
from ucpl.api import load_plan as load_plan
from ucpl.api import plan as plan
from ucpl.api import resume as resume
from ucpl.api import save_plan as save_plan
from ucpl.api import verify as verify
from ucpl.errors import UcplError as UcplError
from ucpl.graph import build as build
from ucpl.language import parse as parse
from ucpl.layout import resolve as resolve
from ucpl.placement import locate as locate
from ucpl.planning import order as order
from ucpl.ranks.reshard import reshard as reshard
from ucpl.ranks.storage_reader import StorageReader as StorageReader
from ucpl.ranks.storage_reader import load_into as load_into
from ucpl.runtime.execute import execute as execute

__version__: str
__all__: list[str]
