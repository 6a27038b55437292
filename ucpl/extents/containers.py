"""A folder around shards, as data: kind, table of names, files.

Not here: the search of a folder, and the fates of its files (formats.folders).
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

__all__ = ["CompanionFile", "Container", "Fate", "Holding", "Kind", "CompanionRule"]

# carry: as it is, byte for byte.  weights: as it is, and compared with the shards; or made for the target.
# rank: one file a rank, dealt to the ranks of the target.  leave: not written, with the reason.
Fate = Literal["carry", "weights", "rank", "leave"]
Holding = Literal["bytes", "pickle", "unreadable"]

_PART = re.compile(r"\*\*|\*|\{rank\}")
_PATTERNS = {"**": ".+", "*": "[^/]*", "{rank}": "(?P<rank>0|[1-9][0-9]{0,8})"}


@frozen(slots=False)
class CompanionRule:
    """Files by their names below the container, and their fate.

    pattern: `*` is any text without `/`, `**` any text, `{rank}` a number. why: the purpose of such a file, or the
    reason to leave it. alone: the name of a file per rank if there is one rank and no number. named: classes in its
    pickles that are known to be harmless, though torch would reject them. by_ranks: a note for targets with another
    number of ranks. of_model: it describes the model, and goes into a folder of weights alone, too.
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
        """The rank in a name, -1 without one, None without a match."""
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
    """A kind of container.

    It has one of these marks: a file of that name, with a folder of shards below it; or its own name of that folder,
    `tag`, if client_state has the key `client` (if that is set).

    engines: folders of further engines, each with its own shards; then `resumes_by` requests each by its name. needs:
    files without which `resumes_by` fails. optimizer_with: a file without which it loads the optimizer of no run, except
    that of an engine, and says nothing. The first rule that fits a name is used; files without a rule are carried
    and named. The shards can be those of an engine, of any number of ranks too if `universal`, or FSDP's chunks
    (`chunks`):
    """

    name: str  # "trainer": in --json
    title: str  # "transformers' Trainer": in messages
    resumes_by: str
    marks: tuple[str, ...]
    needs: tuple[str, ...]
    rules: tuple[CompanionRule, ...]
    chunks: bool = False
    iterations: bool = False  # Megatron's
    universal: bool = False
    tag: str = ""
    client: str = ""
    engines: str = ""
    optimizer_with: str = ""
    strategies: bool = False  # a run resumes under another strategy: DDP, FSDP, an engine

    @property
    def around_chunks(self) -> Kind:
        """The same kind around FSDP's folders of chunks.

        No other framework's shards are in such folders.
        """
        return (
            evolve(self, chunks=True) if self.strategies else evolve(self, chunks=True, tag="", client="", engines="")
        )

    def holds(self, of: Format) -> bool:
        """Test whether this kind can have shards of a format."""
        if self.iterations:
            return of.has_chunks and of.is_of_iterations
        if of.container:
            return of.container == self.name
        if of.has_chunks:
            return of.has_names_of_modules and (self.chunks or self.strategies)
        return of.has_engine and (self.universal or not of.is_of_any_ranks) and (self.strategies or not self.chunks)

    def rule_of(self, name: str) -> tuple[CompanionRule | None, int]:
        """The rule for a file, and its rank (-1: none)."""
        for rule in self.rules:
            rank = rule.rank_of(name)
            if rank is not None:
                return rule, rank
        return None, -1

    def is_marked_by(self, name: str) -> bool:
        return any(CompanionRule(mark, "carry", "").rank_of(name) is not None for mark in self.marks)

    def is_marked_by_step(self, folder: str, client: Collection[object]) -> bool:
        return bool(self.tag) and folder == self.tag and (not self.client or self.client in client)

    def is_engine(self, folder: str) -> bool:
        """Test whether a folder of this name has an engine's shards."""
        return bool(self.engines) and (
            folder == self.tag or CompanionRule(self.engines, "carry", "").rank_of(folder) is not None
        )


@frozen
class CompanionFile:
    """One file next to the shards.

    `unsafe`: classes in its pickle that are harmless neither to torch nor to its rule. held: weights that were compared
    with the target's shards, and are equal. anew: differences of the target's file, if it is made for the target;
    `path` is then its place, once it is made.
    """

    name: str  # below the container, "/" between parts
    size: int
    rule: CompanionRule | None  # None: not known there
    rank: int = -1
    holds: Holding = "bytes"
    unsafe: tuple[str, ...] = ()
    reason: str = ""  # why it cannot be looked at
    held: bool = False
    anew: str = ""
    path: Path | None = None


@frozen
class Container:
    """A folder of some kind around a step's folder.

    `skipped`: names that are no files of it, each with the reason.
    """

    kind: Kind
    top: Path
    files: tuple[CompanionFile, ...]
    skipped: dict[str, str] = field(factory=dict)
    remarks: tuple[str, ...] = ()
    odd: tuple[
        str, ...
    ] = ()  # those of them that a conversion prints, too: files of another step, files that are missing

    def without(self, names: frozenset[str] | set[str]) -> Container:
        """As if these files were not there."""
        return evolve(self, files=tuple(file for file in self.files if file.name not in names))

    def where(self, file: CompanionFile) -> Path:
        """The path of one of its files."""
        return file.path if file.path is not None else self.top / file.name
