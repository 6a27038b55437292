"""An account of a source: the fate of each of its items.

It counts all items, and names those that are left behind. Not here: the rules that decide a fate
(conversion.accounting).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypedDict

from attrs import field

from ucpl.records import frozen

__all__ = ["CLIENT_STATE", "FATES", "Account", "AccountFacts", "AccountEntry", "Fate", "NotRead", "entries_of"]

Fate = Literal["moved", "derived", "dropped", "not read"]
FATES: tuple[Fate, ...] = ("moved", "derived", "dropped", "not read")
CLIENT_STATE = "client_state"  # the kind of a caller's value
_SHOWN = 6  # names in a line


@frozen
class NotRead:
    """A file or value of a checkpoint that its reader skips.

    `is_optimizer`: it holds training state.
    """

    name: str
    why: str
    is_optimizer: bool = False
    kind: str = "file"

    def __str__(self) -> str:
        return f"{self.name} is not read: {self.why}"


@frozen
class AccountEntry:
    """Items of one kind with one fate, for one reason.

    `names`: of all items that are dropped or not read.
    """

    fate: Fate
    kind: str  # "exp_avg", "client_state", "value", "group", "file": as `--drop` and messages call it
    count: int
    names: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        shown = ", ".join(self.names[:_SHOWN]) + (f" and {self.count - _SHOWN} more" if self.count > _SHOWN else "")
        if self.kind in ("file", "value"):
            return f"{shown}: {self.why}"
        return f"{self.kind} of {shown}: {self.why}"


class EntryFacts(TypedDict):
    fate: Fate
    kind: str
    count: int
    names: list[str]
    why: str


class AccountFacts(TypedDict):
    """The account for scripts: `items` is the sum of the four."""

    items: int
    moved: int
    derived: int
    dropped: int
    not_read: int
    entries: list[EntryFacts]


@frozen
class Account:
    """All items of a source: their number, and entries by fate."""

    items: int
    entries: tuple[AccountEntry, ...] = field(factory=tuple)

    def count(self, *fates: Fate) -> int:
        return sum(e.count for e in self.entries if e.fate in fates)

    def of(self, *fates: Fate) -> tuple[AccountEntry, ...]:
        return tuple(e for e in self.entries if e.fate in fates)

    def check_sum(self) -> Account:
        """Check that each item has one fate.

        Raises: AssertionError for an item with none or two, which is a fault of ucpl.
        """
        total = self.count(*FATES)
        if total != self.items:
            raise AssertionError(f"the source has {self.items} items, and its account {total}")
        return self

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count(fate):,} {fate}" for fate in FATES if self.count(fate))
        return f"{self.items:,} items of the source: {counts or 'none'}"

    def facts(self) -> AccountFacts:
        return {
            "items": self.items,
            "moved": self.count("moved"),
            "derived": self.count("derived"),
            "dropped": self.count("dropped"),
            "not_read": self.count("not read"),
            "entries": [
                {"fate": e.fate, "kind": e.kind, "count": e.count, "names": list(e.names), "why": e.why}
                for e in self.entries
            ],
        }


def entries_of(items: Iterable[tuple[Fate, str, str, str]]) -> tuple[AccountEntry, ...]:
    """Entries of items (fate, kind, name, reason), joined over names."""
    found: dict[tuple[Fate, str, str], list[str]] = {}
    for fate, kind, name, why in items:
        found.setdefault((fate, kind, why), []).append(name)
    return tuple(
        AccountEntry(fate, kind, len(names), tuple(names) if fate in ("dropped", "not read") else (), why)
        for (fate, kind, why), names in found.items()
    )
