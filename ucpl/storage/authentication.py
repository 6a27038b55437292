"""Authenticated connections: the peer is known before its bytes are parsed.

Between hosts it is mutual TLS 1.3; on one host it is a check of the peer's user.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from abc import ABC, abstractmethod
from typing import TypeAlias

from ucpl.records import frozen
from ucpl.storage.keys import Keys, Names, names_in

__all__ = [
    "Address",
    "Listener",
    "AccessDenied",
    "TlsListener",
    "TlsConnector",
    "UnixListener",
    "UnixConnector",
    "Connector",
]

Address: TypeAlias = tuple[str, int]
BACKLOG = 512
SAME_USER: Names = frozenset(("user",))
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class AccessDenied(OSError):
    """The peer has no access."""

    def __init__(self, why: str) -> None:
        super().__init__(13, why)


class Listener(ABC):
    """The listening side of a connection."""

    @abstractmethod
    def listener(self) -> socket.socket:
        """Raises: OSError."""

    @abstractmethod
    def wrap(self, caller: socket.socket) -> socket.socket:
        """The connection for `greet`. Sends nothing. Raises: OSError."""

    @abstractmethod
    def greet(self, caller: socket.socket) -> Names:
        """Authenticate a caller, within the connection's timeout.

        Returns its names. Raises: OSError, if it has no access.
        """


class Connector(ABC):
    """The connecting side."""

    @property
    @abstractmethod
    def where(self) -> str:
        """For messages."""

    @abstractmethod
    def open(self, seconds: float) -> socket.socket:
        """Raises: OSError."""


@frozen(eq=False)
class TlsListener(Listener):
    """A door for hosts with a certificate of one of these names.

    The authority must have signed it.
    """

    address: Address
    keys: Keys
    names: Names | None  # None: any name that begins with `ucpl:`

    def listener(self) -> socket.socket:
        return socket.create_server(self.address, backlog=BACKLOG)

    def wrap(self, caller: socket.socket) -> socket.socket:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a dead host sends nothing
        return self.keys.context(serves=True).wrap_socket(caller, server_side=True, do_handshake_on_connect=False)

    def greet(self, caller: socket.socket) -> Names:
        assert isinstance(caller, ssl.SSLSocket)
        caller.do_handshake()  # the timeout is that of the complete handshake
        found = names_in(caller.getpeercert())
        if not found if self.names is None else not found & self.names:
            raise AccessDenied("its certificate has no name of this vault")
        return found


@frozen(eq=False)
class TlsConnector(Connector):
    """Connect to a peer whose certificate has one of these names."""

    address: Address
    keys: Keys
    names: Names | None  # None: any name that begins with `ucpl:`

    @property
    def where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def open(self, seconds: float) -> socket.socket:
        plain = socket.create_connection(self.address, timeout=seconds)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context = self.keys.context(serves=False)
            channel = context.wrap_socket(plain, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise
        try:
            channel.do_handshake()
            found = names_in(channel.getpeercert())
            if not found if self.names is None else not found & self.names:
                raise AccessDenied(f"its certificate is of {', '.join(sorted(found)) or 'nobody'}")
        except BaseException:
            channel.close()
            raise
        return channel


@frozen(eq=False)
class UnixListener(Listener):
    """A door for processes of the same user on this host.

    The socket is abstract: it has no path that another user could take.
    """

    name: str

    def listener(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind(f"\0{self.name}")
            made.listen(BACKLOG)
        except BaseException:
            made.close()
            raise
        return made

    def wrap(self, caller: socket.socket) -> socket.socket:
        return caller

    def greet(self, caller: socket.socket) -> Names:
        return _same_user(caller)


@frozen(eq=False)
class UnixConnector(Connector):
    name: str

    @property
    def where(self) -> str:
        return "this host"

    def open(self, seconds: float) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.settimeout(seconds)
            channel.connect(f"\0{self.name}")
            _same_user(channel)
        except BaseException:
            channel.close()
            raise
        return channel


def _same_user(channel: socket.socket) -> Names:
    """Ask the kernel for the user at the other end. Raises: AccessDenied."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = _CREDENTIALS.unpack(credentials)[1]
    if user != os.geteuid():
        raise AccessDenied(f"it is a process of user {user}")
    return SAME_USER
