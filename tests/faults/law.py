"""The law for every failure of the machine.

An error in our own words, the source as it was, the target old or new and complete,
and a way on that ends in the bytes of a run that nothing happened to.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from tests.cli.command import Done, ucpl
from tests.faults.jobs import ONE, Job
from tests.faults.layer import KINDS, Fault, Layer

__all__ = ["Bench", "Outcome", "digest_of"]

KILLED = -signal.SIGKILL
OURS = (0, 1, 2, 3, 4, 5, 130)


def digest_of(path: Path) -> object:
    """Everything below a path, names, bytes and modes, and times of files.

    None where there is nothing.
    """
    if not os.path.lexists(path):
        return None
    if path.is_dir():
        return {child.name: digest_of(child) for child in sorted(path.iterdir())}
    return path.read_bytes(), path.stat().st_mode


@frozen
class Outcome:
    """The end of a run under a fault, and its breach.

    `call` is the one that failed.
    """

    fault: Fault
    call: str
    status: int
    err: str
    broken: tuple[str, ...]

    def __str__(self) -> str:
        where = self.call.replace("\n", " ")
        return f"{self.fault} {where}: status {self.status}: {'; '.join(self.broken)}\n{self.err}"


class Bench:
    """One job in a folder, run repeatedly from the same beginning."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.top = self.folder / "top"
        self.job.lay_out(self.top)
        self.place = self.top / "place"
        self.kept = self.folder / "kept"
        shutil.copytree(self.place, self.kept)
        self.before = digest_of(self.place / self.job.writes) if self.job.writes else None
        self.source = self._source()
        ucpl(*self.job.argv(self.top))  # fill the process's caches
        self._again()
        layer = Layer((self.top,))
        with layer.put_in():
            done = ucpl(*self.job.argv(self.top))
        assert done.status == 0, (self.job, done)
        self.counted = layer.calls
        self.wanted = digest_of(self.place)

    def _source(self) -> object:
        times = {str(p): p.stat().st_mtime_ns for p in sorted((self.top / ONE).rglob("*"))}
        return digest_of(self.top / ONE), times

    def _again(self) -> None:
        """As it was before any run."""
        shutil.rmtree(self.place)
        shutil.copytree(self.kept, self.place)

    def faults(self, actions: tuple[str, ...], kinds: tuple[str, ...] = KINDS) -> Iterator[Fault]:
        """Every call of a run, with every action that means something there."""
        for kind in kinds:
            for hit in range(1, len(self.counted[kind]) + 1):
                for action in actions:
                    changes = kind in ("write", "sync", "size", "rename", "swap", "folder", "remove", "mode")
                    if action in ("eio",) or changes or (kind == "open" and action != "half"):
                        yield Fault(kind, hit, action)

    def under(self, fault: Fault) -> Outcome:
        """One run with this fault, and one more without."""
        self._again()
        done, call = self._forked(fault)
        call = call or self.counted[fault.kind][fault.hit - 1]
        broken = [*self._told(fault, call, done), *self._states(done)]
        if not broken:
            broken += self._goes_on()
        return Outcome(fault, call, done.status, done.err, tuple(broken))

    def _forked(self, fault: Fault) -> tuple[Done, str]:
        """The end of the run, and the call that failed.

        Threads that sync files side by side make theirs in any order.
        """
        text = self.folder / "told"
        text.write_text("")
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                layer = Layer((self.top,), fault)
                with layer.put_in():
                    done = ucpl(*self.job.argv(self.top))
                calls = layer.calls[fault.kind][fault.hit - 1 : fault.hit]
                text.write_text("\n".join([str(done.status), *(calls or [""]), done.err]))
            except BaseException:
                text.write_text("99\n\n" + traceback.format_exc())
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            return Done(status, "", ""), ""
        first, call, rest = text.read_text().split("\n", 2)
        return Done(int(first), "", rest), call

    def _told(self, fault: Fault, call: str, done: Done) -> Iterator[str]:
        if done.status == KILLED:
            if fault.action not in ("kill", "half"):
                yield "it was killed"
            return
        if done.status not in OURS or "internal error" in done.err or "Traceback" in done.err:
            yield "no error of ours"
        elif done.status != 0 and "error[" not in done.err:
            yield "nothing is said"
        elif done.status != 0 and not self._names(call.partition(" ")[2], done.err):
            yield "neither the file nor its folder is named"

    def _names(self, path: str, err: str) -> bool:
        """Return True if a message names the file or its folder."""
        parts = Path(path).relative_to(self.top).parts
        if not parts:  # the folder of source and target, whose name is in each path
            return re.search(re.escape(path) + r"(?!/)", err) is not None
        return any(part in err or (part[0] == "." and part.split(".")[1] in err) for part in parts)

    def _states(self, done: Done) -> Iterator[str]:
        if self._source() != self.source:
            yield "the source was changed"
        if not self.job.writes:
            return
        found = digest_of(self.place / self.job.writes)
        new = self._new()
        if found not in (self.before, new):
            yield "what stands there is neither the old one nor the new"
        if done.status == 0 and found != new:
            yield "it says that it is done"
        if (
            done.status not in (0, KILLED)
            and not self.job.resumes
            and digest_of(self.place) not in (digest_of(self.kept), self.wanted)
        ):
            yield f"left beside it: {os.listdir(self.place)}"

    def _new(self) -> object:
        return self.wanted.get(self.job.writes) if isinstance(self.wanted, dict) else None

    def _goes_on(self) -> Iterator[str]:
        done = ucpl(*self.job.argv(self.top, resume=True))
        if done.status != 0:
            yield f"it does not go on: {done.err}"
        elif not self.job.writes:
            return
        elif digest_of(self.place / self.job.writes) != self._new():
            yield "other bytes in the end"
        elif self.job.resumes and digest_of(self.place) != self.wanted:
            yield f"left in the end: {os.listdir(self.place)}"
