"""The list of hosts of a vault: addresses of the servers.

Every host has ROOT/JOB/hosts.json, equal on all except for news that has not arrived. A server that serves a domain
takes its *seat* and informs all others. A later seat replaces an earlier one: it belongs to the replacement of a lost
host, and the server with the earlier one gets no more answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.storage.authentication import Address
from ucpl.storage.vaults.checksummed_text import JsonObject, read_sealed, seal, unseal, write_whole

__all__ = ["FILE", "LOCK", "Hosts", "addresses_of", "hosts_at", "table_of"]

FILE = "hosts.json"
LOCK = "hosts.lock"  # held during a change
PORT_MAX = 65_535


def addresses_of(text: str) -> tuple[Address, ...]:
    """HOST:PORT,HOST:PORT, one for each domain. Raises: UcplError E690."""
    return tuple(map(_address, text.split(",")))


def _address(text: str) -> Address:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) <= PORT_MAX:
        remedy = "one for each domain: node0:7070,node1:7070"
        fail("E690", f"`{text.strip()}` is not HOST:PORT", Label("--hosts"), remedy=remedy)
    return host.removeprefix("[").removesuffix("]"), int(port)


@frozen
class Hosts:
    """The address of each domain's server."""

    keys: str  # the folder of this host's keys
    at: tuple[Address, ...]  # by domain
    seats: tuple[int, ...]  # per domain, the time in ns at which it was taken; 0: unknown
    job: bytes = field(repr=False)  # the checksummed identity record of the vault, for hosts without a domain

    def seated(self, number: int, address: Address, seat: int) -> Hosts:
        """The list with the current server of a domain.

        An earlier seat changes nothing.
        """
        if seat <= self.seats[number]:
            return self
        at, seats = list(self.at), list(self.seats)
        at[number], seats[number] = address, seat
        return evolve(self, at=tuple(at), seats=tuple(seats))

    def with_all(self, at: Sequence[Address], seats: Sequence[int]) -> Hosts:
        """The list merged with that of another host."""
        found = self
        for number, one in enumerate(zip(at, seats, strict=False)):
            if number < len(self.at):
                found = found.seated(number, *one)
        return found

    def to_table(self) -> JsonObject:
        """The table that hosts exchange."""
        return {"at": [list(one) for one in self.at], "seats": list(self.seats)}

    def write(self, home: Path) -> None:
        """Raises: OSError."""
        write_whole(home / FILE, seal({**self.to_table(), "keys": self.keys, "job": self.job.decode()}))


def table_of(parsed: JsonObject) -> tuple[tuple[Address, ...], tuple[int, ...]]:
    """The addresses and seats of a table. Raises: ValueError."""
    at, seats = parsed.get("at"), parsed.get("seats")
    if not isinstance(at, list) or not isinstance(seats, list) or len(at) != len(seats):
        raise ValueError("a table of hosts")
    found: list[Address] = []
    for one, seat in zip(at, seats, strict=True):
        is_address = isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and type(one[1]) is int
        if not is_address or type(seat) is not int or not 0 < one[1] <= PORT_MAX or seat < 0:
            raise ValueError("a table of hosts")
        found.append((one[0], one[1]))
    return tuple(found), tuple(seats)


_known: dict[Path, tuple[tuple[int, int, int], Hosts | None]] = {}


def hosts_at(home: Path) -> Hosts | None:
    """The hosts of a vault; None: all domains are local. Cached.

    Raises: OSError, also for a damaged list, because the servers cannot be found without it.
    """
    try:
        state = (home / FILE).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    stamp = (state.st_ino, state.st_mtime_ns, state.st_size)
    known = _known.get(home)
    if known is None or known[0] != stamp:
        known = _known[home] = (stamp, _parsed(read_sealed(home / FILE)))
    if known[1] is None:
        raise OSError(5, "the list of hosts is damaged: remove it, and start the server with --hosts", str(home / FILE))
    return known[1]


def _parsed(data: bytes | None) -> Hosts | None:
    parsed = unseal(data) if data is not None else None
    if parsed is None:
        return None
    keys, job = parsed.get("keys"), parsed.get("job")
    try:
        at, seats = table_of(parsed)
    except ValueError:
        return None
    if not isinstance(keys, str) or not isinstance(job, str):
        return None
    return Hosts(keys, at, seats, job.encode())
