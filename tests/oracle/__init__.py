"""The meaning of a text, by the slowest possible rule.

Every element is visited in Python.

Nothing here is fast, and nothing here is shared with the compiler but the reading of text (ucpl.language). The compiler is
compared with it; only tests import it.
"""

from tests.oracle.filling import filled
from tests.oracle.homes import Home, Padding, homes
from tests.oracle.names import Meaning, mean, scale_of

__all__ = ["Home", "Meaning", "Padding", "filled", "homes", "mean", "scale_of"]
