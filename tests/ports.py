"""Ports of this machine that nobody listens at now."""

from __future__ import annotations

import socket
from contextlib import ExitStack

__all__ = ["free_port", "free_ports"]


def free_ports(count: int) -> list[int]:
    with ExitStack() as ends:
        some = [ends.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in some]


def free_port() -> int:
    return free_ports(1)[0]
