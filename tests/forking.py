"""Ranks of small jobs of tests, forked off one loaded process.

A test process forks of one such server alone, whose list of modules holds from its first rank on: so there is one list.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.fsdp  # noqa: F401

import ucpl.cli
import ucpl.ranks.load_checks
import ucpl.ranks.reshard
import ucpl.vault.persist
import ucpl.vault.server  # noqa: F401
from tests.ports import free_port


def forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def run_all(size: int, act: Callable[..., None], *args: object, meanwhile: Callable[[], None] = lambda: None) -> None:
    """A job of ranks that call `act(rank, port, *args)` and end well.

    The ranks meet at that port.
    """
    port = free_port()
    ranks = [forking().Process(target=act, args=(rank, port, *args)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    meanwhile()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * size, "a rank stands still, or died"
