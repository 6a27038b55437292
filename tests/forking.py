"""Ranks of small jobs of tests, forked off one process that has imported all that any of them needs.

A test process forks of one such server alone, whose list of modules holds from its first rank on: so there is one list.
"""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.context import ForkServerContext

import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.fsdp  # noqa: F401

import ucpl.cli
import ucpl.ranks.fitting
import ucpl.ranks.reshard
import ucpl.vault.persisting
import ucpl.vault.server  # noqa: F401


def forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
