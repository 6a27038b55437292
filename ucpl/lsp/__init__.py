"""A language server: diagnostics, meanings and sizes of names, completion, formatting.

`serve` is the verb of this room. Only `server` and `protocol` know pygls; all else is about texts and places in them, whatever
state they are in.
"""

from ucpl.lsp.service import Service

__all__ = ["Service"]
