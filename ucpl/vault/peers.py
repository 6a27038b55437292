"""The servers of a vault's other hosts, and their addresses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field

from ucpl.errors import Label, fail
from ucpl.records import define
from ucpl.storage.keys import Keys, names_of
from ucpl.storage.vaults.domains import LocalDomain
from ucpl.storage.vaults.hosts import Hosts, hosts_at, table_of
from ucpl.storage.vaults.remote_domain import RemoteDomain
from ucpl.vault.peer_service import PeerService

if TYPE_CHECKING:
    from ucpl.storage.authentication import Address
    from ucpl.storage.vaults.records import Job

__all__ = ["Peers"]

EVERY = 2.0  # seconds between two times that the others are asked whom they know


@define(eq=False)
class Peers:
    """The peers of a server.

    Nothing is voted for until each has answered once: it may have a newer committed generation.
    """

    here: LocalDomain
    job: Job
    say: Callable[[str], None]
    seat: int = 0  # when this server took its domain; 0: it has not, yet
    _at: Address | None = None  # its address
    _giving: PeerService | None = None
    _unheard: set[int] = field(factory=set)
    _taken_up: bool = False
    _heard: float = 0.0  # time of the last answers
    _reported: str = ""

    @property
    def home(self) -> Path:
        return self.here.folder.parent

    def sit(self, at: Address | None) -> None:
        """Answer the peers from now on.

        at: the address of this server.
        Raises: OSError, UcplError E694.
        """
        hosts = self._hosts()
        number = self.here.number
        self._at = at or hosts.at[number]
        keys = Keys(Path(hosts.keys))
        keys.demand(names_of(self.home.name, f"d{number}"), f"d{number}")
        try:
            self._giving = PeerService(self.home, number, self.job, self._at[1], keys)
        except OSError as error:
            what = f"d{number} of {self.home} cannot answer at port {self._at[1]}: {error.strerror or error}"
            fail(
                "E694",
                what,
                Label(str(self.here.folder)),
                remedy="stop the process that uses the port, or name another port in --hosts",
            )
        others = {n for n in range(len(hosts.at)) if n != number}
        self._take_seat(others - {n for n in others if self._hear(n)})
        self._unheard = others

    def _take_seat(self, unheard: set[int]) -> None:
        """Serve the domain after a peer reported its current server.

        Raises: OSError, UcplError E694.

        Without an answer, this server cannot exclude that it replaces a running one.
        """
        hosts, number = self._hosts(), self.here.number
        if self.seat or (unheard and len(unheard) == len(hosts.at) - 1):
            return
        assert self._giving is not None and self._at is not None
        before = hosts.at[number], hosts.seats[number]
        if before[1] and before[0] != self._at and RemoteDomain(self.home, number, hosts).is_there():
            where = f"{before[0][0]}:{before[0][1]}"
            fail("E694", f"d{number} of {self.home} has a server already, at {where}", Label(str(self.here.folder)))
        self.seat = max(time.time_ns(), before[1] + 1)
        self._giving.hear((*hosts.at[:number], self._at), (*([0] * number), self.seat))
        # Otherwise their mutual requests with the old list are rejected until they receive the new one.
        for other in range(len(hosts.at)):
            if other not in unheard:
                self._hear(other)

    def have_answered(self, then: Callable[[], None]) -> bool:
        """True if all peers have answered and `then` has ended.

        The peers are asked in parallel. `then` runs once, after the answers.

        `then` runs once.

        Raises: OSError, UcplError E694.
        """
        if self._taken_up and time.monotonic() - self._heard < EVERY:
            return True
        self._heard = time.monotonic()
        self._unheard = {n for n in range(len(self._hosts().at)) if not self._hear(n)}
        self._take_seat(self._unheard)
        self._demand_seat()
        if self._taken_up:
            return True
        if not self._unheard:
            then()
            self._taken_up = True
            return True
        waits = ", ".join(f"d{n} at {':'.join(map(str, self._hosts().at[n]))}" for n in sorted(self._unheard))
        if waits != self._reported:
            self._reported = waits
            self.say(f"d{self.here.number}: waits for {waits}")
        return False

    def demand_all(self) -> None:
        """Raises: OSError, if a peer does not answer now."""
        silent = [number for number in range(len(self._hosts().at)) if not self._hear(number)]
        if silent:
            raise OSError(5, f"d{silent[0]} does not answer, and may have the lost data")

    def _demand_seat(self) -> None:
        hosts = self._hosts()
        if self.seat and hosts.seats[self.here.number] > self.seat:
            where = ":".join(map(str, hosts.at[self.here.number]))
            what = f"d{self.here.number} of {self.home} is now served by {where}: this server ends"
            fail("E694", what, Label(str(self.here.folder)))

    def _hear(self, number: int) -> bool:
        """Send a peer the list of hosts, and merge its answer.

        Raises: OSError of this host's own list.
        """
        assert self._giving is not None
        if number == self.here.number:
            return True
        hosts = self._hosts()
        try:
            reply = json.loads(RemoteDomain(self.home, number, hosts).ask({"op": "hosts", **hosts.to_table()}))
            table = table_of(reply)
        except (OSError, ValueError, TypeError, AttributeError):
            return False
        self._giving.hear(*table)
        return True

    def _hosts(self) -> Hosts:
        """Raises: OSError."""
        found = hosts_at(self.home)
        if found is None:
            raise FileNotFoundError(2, "the list of hosts is gone")
        return found

    def close(self) -> None:
        if self._giving is not None:
            self._giving.close()
