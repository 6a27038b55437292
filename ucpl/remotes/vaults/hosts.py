"""A vault whose domains lie on several hosts: where the server of each domain is.

ROOT/JOB/hosts.json is there on every host, and says the same but for what was not heard yet. Who serves a domain takes its
*seat*, and says so to all others; a later seat is that of who replaced a lost host, and whoever has an earlier one is told
nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.remotes.doors import Address
from ucpl.remotes.vaults.sealed import Told, opened, read_sealed, seal, write_whole

__all__ = ["FILE", "LOCK", "Hosts", "addresses_of", "hosts_at", "table_of"]

FILE = "hosts.json"
LOCK = "hosts.lock"  # held by who changes it
PORT_MAX = 65_535


def addresses_of(text: str) -> tuple[Address, ...]:
    """HOST:PORT,HOST:PORT, one for each domain. Raises: UcplError E690."""
    return tuple(map(_address, text.split(",")))


def _address(text: str) -> Address:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) <= PORT_MAX:
        remedy = "one for each domain: node0:7070,node1:7070"
        fail("E690", f"`{text.strip()}` is no HOST:PORT", Label("--hosts"), remedy=remedy)
    return host.removeprefix("[").removesuffix("]"), int(port)


@frozen
class Hosts:
    """Where the server of each domain is."""

    keys: str  # the folder of this host's keys
    at: tuple[Address, ...]  # by domain
    seats: tuple[int, ...]  # by domain, the time in ns at which it was taken; 0: nobody has said
    job: bytes = field(repr=False)  # the sealed text of which vault this is, for hosts without a domain

    def seated(self, number: int, address: Address, seat: int) -> Hosts:
        """With who serves a domain now: what is earlier than what is known changes nothing."""
        if seat <= self.seats[number]:
            return self
        at, seats = list(self.at), list(self.seats)
        at[number], seats[number] = address, seat
        return evolve(self, at=tuple(at), seats=tuple(seats))

    def with_all(self, at: Sequence[Address], seats: Sequence[int]) -> Hosts:
        """With what another host has heard."""
        found = self
        for number, one in enumerate(zip(at, seats, strict=False)):
            if number < len(self.at):
                found = found.seated(number, *one)
        return found

    def told(self) -> Told:
        """What hosts tell each other."""
        return {"at": [list(one) for one in self.at], "seats": list(self.seats)}

    def write(self, home: Path) -> None:
        """Raises: OSError."""
        write_whole(home / FILE, seal({**self.told(), "keys": self.keys, "job": self.job.decode()}))


def table_of(told: Told) -> tuple[tuple[Address, ...], tuple[int, ...]]:
    """What `Hosts.told` told. Raises: ValueError."""
    at, seats = told.get("at"), told.get("seats")
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
    """Where the domains of a vault are; None: all are here. What was read before is not read again.

    Raises: OSError, of a list that is damaged, too: without it nobody knows whom to ask.
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
    told = opened(data) if data is not None else None
    if told is None:
        return None
    keys, job = told.get("keys"), told.get("job")
    try:
        at, seats = table_of(told)
    except ValueError:
        return None
    if not isinstance(keys, str) or not isinstance(job, str):
        return None
    return Hosts(keys, at, seats, job.encode())
