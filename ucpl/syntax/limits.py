"""How large a text may be. Each limit has its own code; none is near what a real checkpoint needs.

A file can come from anybody, and a short one can ask for much: every count below is one that some later stage pays
for in memory, in time, or in depth of recursion.
"""

from __future__ import annotations

__all__ = [
    "DEPTH_MAX",
    "INDICES_MAX",
    "INTEGER_MAX",
    "NAME_CHARACTERS_MAX",
    "STATEMENTS_MAX",
    "TEXT_CHARACTERS_MAX",
]

TEXT_CHARACTERS_MAX = 8 * 1024 * 1024  # infer writes about 60 characters a tensor: 130,000 tensors
STATEMENTS_MAX = 200_000
DEPTH_MAX = 64  # of brackets, and of operators in one expression; a walker spends up to six frames a level
INDICES_MAX = 16  # of one entry: each multiplies the tensors that it names
NAME_CHARACTERS_MAX = 1024
INTEGER_MAX = 2**63 - 1  # what an index column holds
