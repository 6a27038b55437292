"""Agreement of the ranks of a job.

All begin a common step, or none, and each gets the reason. Every step of a rank on its own, between steps of all, is
within `agreeing`. Not here: ranks of a plan, which talk over a store (ranks.job).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ucpl.errors import Label, UcplError, fail
from ucpl.records import frozen

__all__ = ["JobRanks", "text_of"]

SAID_MAX = 500  # characters of an error that ranks send each other


def text_of(error: BaseException) -> str:
    """The text of an error, also of one that has none."""
    if isinstance(error, UcplError):
        return error.diagnostics[0].message
    try:
        return f"{type(error).__name__}: {str(error)[:200]}"
    except Exception:
        return type(error).__name__


def _code_of(error: BaseException) -> str:
    return error.diagnostics[0].code if isinstance(error, UcplError) else type(error).__name__


@frozen(eq=False)
class JobRanks:
    """The ranks of a process group; without a group, the process itself.

    code, words: the error of the other ranks, and their text about the rank that failed.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    code: str
    words: str

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None, code: str = "E644", words: str = "failed") -> JobRanks:
        """Raises: UcplError E622 of a process that is not in the group."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1, code, words)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            fail("E622", f"rank {dist.get_rank()} of the job is not in the group", Label("group"))
        return cls(group, rank, size, code, words)

    def all(self, mine: object) -> list[object]:
        """The objects of all ranks, by rank. Raises: UcplError."""
        if self.size == 1:
            return [mine]
        told: list[object] = [None] * self.size
        with self.together():
            dist.all_gather_object(told, mine, group=self.group)
        return told

    def all_agree(self, mine: bool) -> bool:
        """True if `mine` is true on all ranks.

        Raises: UcplError.
        """
        if self.size == 1:
            return mine
        if "gloo" not in dist.get_backend(self.group):
            return all(self.all(mine))
        told = torch.tensor(int(mine), device="cpu")  # gloo has tensors on the CPU, which are cheaper than objects
        with self.together():
            dist.all_reduce(told, dist.ReduceOp.MIN, group=self.group)
        return bool(told)

    def agree(self, error: Exception | None) -> None:
        """Return if no rank has an error.

        Raises: `error`; UcplError of `code` if another rank has one.
        """
        said = (
            None if error is None else (_code_of(error), text_of(error)[:SAID_MAX])
        )  # before ranks wait for each other
        if self.all_agree(error is None):
            return
        every = self.all(said)
        if error is not None:
            raise error
        for rank, one in enumerate(every):
            if isinstance(one, tuple):
                self._failed(rank, *one)

    @contextmanager
    def agreeing(self, *, in_words: bool = False) -> Iterator[None]:
        """A step that each rank does alone.

        Raises: its own error; UcplError of `code` if another rank has one, and of several ranks `in_words` also for an
        own error that has no code.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        try:
            self.agree(error)
        except Exception as raised:
            if not in_words or raised is not error or self.size == 1 or isinstance(raised, UcplError):
                raise
            try:
                self._failed(self.rank, _code_of(raised), text_of(raised)[:SAID_MAX])
            except UcplError as coded:
                raise coded from raised

    def demand_same(self, marks: Mapping[str, object], call: str) -> None:
        """Raises: UcplError E622 if ranks were given different things."""
        every = cast("list[tuple[str, dict[str, object]]]", self.all((call, dict(marks))))
        first = every[0]
        for rank, one in enumerate(every):
            if one[0] != first[0]:
                fail("E622", f"rank {rank} calls {one[0]}, and rank 0 {first[0]}", Label(f"rank {rank}"))
        for rank, one in enumerate(every):
            for name in marks:
                if one[1][name] != first[1][name]:
                    what = f"rank {rank} was given another {name} than rank 0"
                    labels = (Label(f"rank {r}", str(told[1][name])[:60]) for r, told in ((0, first), (rank, one)))
                    fail("E622", what, *labels, remedy=f"give all ranks the same {name}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """A step that ranks do together by torch.

        Raises: UcplError of the rank that failed, or `code`.
        """
        try:
            yield
        except CheckpointException as error:  # a BaseException
            failures = {rank: failed for rank, (failed, _) in sorted(error.failures.items())}
            mine = failures.get(self.rank)
            if isinstance(mine, UcplError) or (mine is not None and self.size == 1):
                raise mine from error
            rank, failed = next(iter(failures.items()))
            try:
                self._failed(rank, _code_of(failed), text_of(failed)[:SAID_MAX])
            except UcplError as told:
                raise told from failed
        except RuntimeError as error:
            if self.size == 1:
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            what = f"a rank is dead or does not answer: {lines[0][:200]}"
            try:
                fail(self.code, what, Label(f"rank {self.rank}", f"one of {self.size}"))
            except UcplError as told:
                raise told from error

    def _failed(self, rank: int, code: str, said: str) -> NoReturn:
        fail(self.code, f"rank {rank} {self.words}: {said}", Label(f"rank {rank}", f"it ended with {code}"))
