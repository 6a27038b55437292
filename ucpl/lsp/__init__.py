"""A language server: diagnostics while one types, what names mean and how large they are, completion, formatting.

`serve` is the verb of this room. Only `server` and `protocol` know pygls; all else is about texts and places in them, whatever
state they are in.
"""

from ucpl.lsp.service import Service

__all__ = ["Service"]
