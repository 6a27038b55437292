"""A folder in which shards are only a part, as data: its kind, a table of names with fates, and the files there.

Not here: looking at a folder, and what becomes of its files (formats.folders).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Literal

from attrs import evolve, field

from ucpl.records import frozen
from ucpl.registry import Format

__all__ = ["Beside", "Container", "Fate", "Holding", "Kind", "Rule"]

# carry: as it is, byte for byte.  weights: as it is, too, and held against what the shards say; or made anew for the target.
# rank: one file a rank, dealt to the ranks of the target.  leave: not written, with the reason.
Fate = Literal["carry", "weights", "rank", "leave"]
Holding = Literal["bytes", "pickle", "unreadable"]

_PART = re.compile(r"\*\*|\*|\{rank\}")
_PATTERNS = {"**": ".+", "*": "[^/]*", "{rank}": "(?P<rank>0|[1-9][0-9]{0,8})"}


@frozen(slots=False)
class Rule:
    """Files by their names below the container, and what becomes of them.

    pattern: `*` is any text without `/`, `**` any text, `{rank}` a number. why: what a file of it is for, or why it is left.
    alone: of a file a rank, its name where there is one rank and no number. named: classes that its pickles name and that are
    known to be harmless there, though torch would refuse them. by_ranks: what is to be known of it where ranks are more or
    fewer. of_model: it describes the model, and goes into a folder of weights alone, too.
    """

    pattern: str
    fate: Fate
    why: str
    alone: str = ""
    named: frozenset[str] = frozenset()
    by_ranks: str = ""
    of_model: bool = False

    @cached_property
    def _names(self) -> re.Pattern[str]:
        parts, at = [], 0
        for found in _PART.finditer(self.pattern):
            parts += [re.escape(self.pattern[at : found.start()]), _PATTERNS[found[0]]]
            at = found.end()
        return re.compile("".join((*parts, re.escape(self.pattern[at:]))))

    def rank_of(self, name: str) -> int | None:
        """The rank that a name has by this rule; -1 where it matches and has none, None where it does not match."""
        if self.alone and name == self.alone:
            return 0
        found = self._names.fullmatch(name)
        if found is None:
            return None
        return int(found["rank"]) if "rank" in found.groupdict() else -1

    def name_of(self, rank: int, ranks: int) -> str:
        """The name of one rank's file, of so many ranks."""
        return self.alone if self.alone and ranks == 1 else self.pattern.replace("{rank}", str(rank))


@frozen
class Kind:
    """A kind of container. It is told by its marks: a file of such a name is there, and a folder of shards below it; or by the
    name that it gives that folder, `tag`, where client_state has the key `client`, if it has one.

    engines: folders of more engines, each with shards of its own; then `resumes_by` asks for each by its name. needs: files
    that `resumes_by` does not go on without. The first rule that a name fits holds; a file that fits none is carried and named.
    The shards that it can have are those of an engine, of any number of ranks too if `universal`, or FSDP's chunks (`chunks`):
    a target of another format is no container.
    """

    name: str  # "trainer": in --json
    title: str  # "transformers' Trainer": in messages
    resumes_by: str
    marks: tuple[str, ...]
    needs: tuple[str, ...]
    rules: tuple[Rule, ...]
    chunks: bool = False
    universal: bool = False
    tag: str = ""
    client: str = ""
    engines: str = ""

    @property
    def around_chunks(self) -> Kind:
        """The same around FSDP's folders of chunks, which have names of their own: no other framework's shards go there."""
        return evolve(self, chunks=True, universal=False, tag="", client="", engines="")

    def holds(self, of: Format) -> bool:
        """Whether shards of a format can be in it."""
        if self.chunks:
            return of.has_chunks and of.has_names_of_modules
        return of.has_engine and (self.universal or not of.is_of_any_ranks)

    def rule_of(self, name: str) -> tuple[Rule | None, int]:
        """The rule for a file, and the rank whose it is (-1: nobody's)."""
        for rule in self.rules:
            rank = rule.rank_of(name)
            if rank is not None:
                return rule, rank
        return None, -1

    def is_told_by(self, name: str) -> bool:
        return any(Rule(mark, "carry", "").rank_of(name) is not None for mark in self.marks)

    def is_told_by_step(self, folder: str, client: Collection[object]) -> bool:
        return bool(self.tag) and folder == self.tag and (not self.client or self.client in client)

    def is_engine(self, folder: str) -> bool:
        """Whether a folder of this name has an engine's shards."""
        return bool(self.engines) and (
            folder == self.tag or Rule(self.engines, "carry", "").rank_of(folder) is not None
        )


@frozen
class Beside:
    """One file beside the shards. `unsafe`: classes that its pickle names, harmless neither to torch nor to its rule.

    held: weights that were held against what a target's shards say, and are that, whatever else of the target is another.
    anew: how the target's file differs, where it is made for the target; `path` then is where it was made, once it is.
    """

    name: str  # below the container, "/" between parts
    size: int
    rule: Rule | None  # None: not known there
    rank: int = -1
    holds: Holding = "bytes"
    unsafe: tuple[str, ...] = ()
    reason: str = ""  # why it cannot be looked at
    held: bool = False
    anew: str = ""
    path: Path | None = None


@frozen
class Container:
    """A folder of some kind around a step's folder. `skipped`: names that are no files of it, each with the reason."""

    kind: Kind
    top: Path
    files: tuple[Beside, ...]
    skipped: dict[str, str] = field(factory=dict)
    remarks: tuple[str, ...] = ()
    odd: tuple[
        str, ...
    ] = ()  # those of them that a conversion prints, too: files of another step, files that are missing

    def without(self, names: frozenset[str] | set[str]) -> Container:
        """As if these files were not there."""
        return evolve(self, files=tuple(file for file in self.files if file.name not in names))

    def where(self, file: Beside) -> Path:
        """Where the bytes of one of its files are."""
        return file.path if file.path is not None else self.top / file.name
