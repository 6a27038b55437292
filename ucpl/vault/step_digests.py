"""Digests of the state after a step.

They cover all bytes, and are computed before the next step begins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import torch
from attrs import field

from ucpl.errors import Label, fail
from ucpl.live.tensors import memory_of, part_of, place_of
from ucpl.records import define
from ucpl.storage.vaults.state_digests import digest_of_sum, state_digest, weighted_sum

__all__ = ["StepDigests", "Stamp", "is_far", "stamp_of"]

_PATIENCE = 600.0  # seconds that a step waits for marks
Stamp = tuple[object, ...]  # of a tensor: changes if the tensor is written to, or replaced


def stamp_of(tensor: torch.Tensor) -> Stamp:
    """The stamp of a tensor.

    Raises: RuntimeError for tensors of torch.inference_mode, which have no version counter.
    """
    mine = part_of(tensor)
    return id(tensor), tensor._version, id(mine), mine._version, place_of(mine)


def is_far(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


@define(eq=False)
class StepDigests:
    """Digests of the contiguous tensors of one save.

    The code that records the save calls `take` once, or `drop`.
    """

    tensors: Iterable[tuple[str, torch.Tensor, list[str]]]  # name, and the destination of the digest
    _left: list[tuple[str, torch.Tensor, list[str], Stamp]] = field(factory=list)
    # Sums, with their positions in the list.
    _far: list[tuple[torch.Tensor, list[str], int]] = field(factory=list)
    _process: int = field(factory=os.getpid)
    _is_wanted: threading.Event = field(factory=threading.Event)
    _is_done: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        """Start the digests of device tensors.

        They are computed before all work that the trainer queues on the device later.
        """
        for name, tensor, to in self.tensors:
            mine = part_of(tensor)
            to.append("")
            if is_far(mine):
                self._far.append((weighted_sum(mine), to, len(to) - 1))
            else:
                self._left.append((name, tensor, to, stamp_of(tensor)))
        self.tensors = ()

    def fetch(self) -> None:
        """Fetch the digests of devices at once.

        Later, a step would wait for all work queued on them.
        """
        for device in {found.device for found, _, _ in self._far}:
            some = [one for one in self._far if one[0].device == device]
            for value, (_, to, at) in zip(torch.stack([one[0] for one in some]).cpu(), some, strict=True):
                to[at] = digest_of_sum(value)
        self._far = []

    def pause(self, seconds: float) -> None:
        """Let others work first, unless somebody waits."""
        self._is_wanted.wait(seconds)

    def take(self) -> None:
        """Compute all digests.

        Raises: UcplError E693, if a tensor was written to before: its digest would belong to no step.
        """
        try:
            if self._is_done.is_set():
                fail("E693", "the save was withdrawn before its digest", Label("the saved state"))
            self.fetch()
            for _, tensor, to, _ in self._left:
                at = to.index("")
                to[at] = state_digest(memory_of(tensor))
            for name, tensor, _, known in self._left:
                if stamp_of(tensor) != known:
                    what = f"{name} was written to before the result of its step was digested"
                    remedy = "write to it only in the next step, or make the writer with `beside=False`"
                    fail("E693", what, Label(name), remedy=remedy)
        finally:
            self.drop()

    def drop(self) -> None:
        self._left, self._far = [], []
        self._is_done.set()

    def settled(self) -> None:
        """Wait until all digests are taken; called before tensors are written to.

        A forked child has no digest thread and no part in the save.
        """
        if os.getpid() == self._process:
            self._is_wanted.set()
            self._is_done.wait(_PATIENCE)
