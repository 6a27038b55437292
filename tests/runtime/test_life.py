"""The life of one target: interrupted runs, full disks, damage, changed sources.

Runs are killed and resumed; sources change or rot; other plans follow. After any sequence of these, the target's place holds
its earlier content, or the complete new target. A run that reports success has written the bytes of an undisturbed run.
"""

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.runtime.test_crashes import content, each_tile_is_journalled  # noqa: F401
from tests.runtime.world import Stored, Torch, bits_of, copies, write_source
from ucpl.errors import UcplError
from ucpl.files.checkpoint import Checkpoint
from ucpl.runtime import execute
from ucpl.runtime.buffers import MEMORY_MIN
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.options import RunOptions

# An early end of a run still leaves work to resume.
pytestmark = pytest.mark.usefixtures("each_tile_is_journalled")

SIZES = {"a": 20_000, "b": 900, "c": 17_001}  # seven tiles
NAMES = st.sampled_from(sorted(SIZES))
PLANS = {"apart": None, "joined": lambda tensor: "all.pt"}
PLAN = st.sampled_from(sorted(PLANS))
CALLS = ("source-read", "target-write", "target-sync")  # of the disk, which may fail
MOMENTS = ("tile-written", "journal-before", "journal-synced")
ONCE = ("created", "synced", "publish-before", "publish-after")
FAULTS = st.one_of(
    st.builds("{}:{}:{}".format, st.sampled_from(CALLS), st.integers(3, 9), st.sampled_from(("kill", "enospc", "eio"))),
    st.builds("{}:{}:{}".format, st.sampled_from(MOMENTS), st.integers(3, 9), st.sampled_from(("kill", "interrupt"))),
    st.builds("{}:1:{}".format, st.sampled_from(ONCE), st.sampled_from(("kill", "interrupt"))),
)
BIT = st.integers(0, 7)
DONE, KILLED = "done", "killed"
REFUSALS = {"E500", "E501", "E503", "E505", "E506", "E602", "E610", "E611", "E612", "E620"}


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="life-"))
        self.out = self.top / "here" / "out"
        self.out.parent.mkdir()
        self.version = 0
        self.standing: Any = None  # content at the target's place
        self.left: tuple[str, int] | None = None  # (plan, version of the source) of work that an earlier run left
        self._renew()

    def teardown(self) -> None:
        self.anew("apart")
        shutil.rmtree(self.top)

    def _renew(self) -> None:
        """Write a source of other values and compute its expected target."""
        folder = self.top / f"source-{self.version}"
        tensors = [Stored(f, (f,), "f32", bits_of("f32", (n,), n + self.version)) for f, n in SIZES.items()]
        made = write_source(folder, tensors)
        if self.version:  # in the place of the first: the same names, other files
            for name in SIZES:
                os.replace(folder / name, self.source.root / name)
            made = evolve(made, root=self.source.root, top=self.source.top)
        self.source: Checkpoint = made
        self.plans = {name: copies(made, file_of) for name, file_of in PLANS.items()}
        self.wanted = {}
        for name in PLANS:
            assert self._outcome(name, self.top / f"wanted-{self.version}-{name}") == DONE
            self.wanted[name] = content(self.top / f"wanted-{self.version}-{name}")

    def _ended(self, plan: str, out: Path, **how: Any) -> str:
        """One run in this process: how it ended."""
        try:
            execute(self.plans[plan], self.source, Torch(), out, RunOptions(memory=MEMORY_MIN, workers=1, **how))
        except UcplError as error:
            return error.diagnostics[0].code
        return DONE

    def _outcome(self, plan: str, out: Path, fault: str = "", **how: Any) -> str:
        """The outcome of one run.

        A run that may be killed has its own process.
        """
        if not fault:
            return self._ended(plan, out, **how)
        text = self.top / "told"
        text.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            try:
                set_failpoints(fault)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                text.write_text(self._ended(plan, out, **how))
            except BaseException as error:
                text.write_text(repr(error))
            finally:
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL)
        return KILLED if status else text.read_text()

    def _run(self, plan: str, fault: str = "", **how: Any) -> str:
        journal = self._journal()
        outcome = self._outcome(plan, self.out, fault, **how)
        found, new = content(self.out), self.wanted[plan]
        if outcome == DONE:
            assert found == new, "it says it is done"
        else:
            assert outcome == KILLED or outcome in REFUSALS, outcome
            assert found in (self.standing, new), f"{outcome}: neither the old one nor the new"
            assert outcome == KILLED or "publish-after" in fault or found == self.standing, (
                f"{outcome}, and it is there"
            )
        if not self.work():
            self.left = None
        elif outcome not in ("E602", "E500") and (journal is None or self._journal() != journal):
            # Those two, and a refusal before a run begins, leave the work of another run.
            self.left = (plan, self.version) if found != new else None
        self.standing = found
        return outcome

    def _journal(self) -> bytes | None:
        path = self.folder / "journal"
        return path.read_bytes() if path.is_file() else None

    @rule(plan=PLAN, fault=FAULTS)
    def ends_early(self, plan, fault):
        self._run(plan, fault, force=True)

    @precondition(lambda self: self.work())
    @rule(fault=st.one_of(st.just(""), st.just(""), FAULTS), other=st.integers(0, 4), force=st.booleans())
    def goes_on(self, fault, other, force):
        """Mostly resume the last run.

        An existing target is only replaced on request.
        """
        last = self.left[0] if self.left else "apart"
        plan = last if other else next(name for name in PLANS if name != last)
        before, left = self.standing, self.left
        outcome = self._run(plan, fault, resume=True, force=force)
        if outcome == DONE:
            assert force or before in (None, self.wanted[plan])
        if left not in (None, (plan, self.version)) and not fault and (force or before is None):
            assert outcome == "E602", f"{left} went on as {plan} of {self.version}: {outcome}"

    @rule(plan=PLAN)
    def what_stands_is_not_replaced_unasked(self, plan):
        if self.standing is not None:
            assert self._run(plan) == "E500"

    @rule(plan=PLAN)
    def anew(self, plan):
        """There is always a way on."""
        assert self._run(plan, force=True) == DONE

    @precondition(lambda self: self.work())
    @rule(data=st.data())
    def damage(self, data):
        """Damage the files of an earlier run.

        One byte is changed, or the end is cut off.
        """
        journal = [p for p in self.work() if p.name == "journal"]
        path = data.draw(st.sampled_from(journal * 3 + self.work()))
        size = path.stat().st_size
        self.left = None if path in journal else self.left  # it need not say any more whose it is
        at = data.draw(st.integers(0, max(0, size - 1)))
        if data.draw(st.booleans()) or not size:
            os.truncate(path, at)
            return
        flip(path, at, data.draw(BIT))

    @rule(plan=PLAN, records=st.integers(3, 6), end=st.booleans(), data=st.data())
    def damaged_records_are_no_records(self, plan, records, end, data):
        """A damaged record and all records behind it count as missing.

        Their work is done again. Everything else is unchanged.
        """
        assert self._run(plan, f"journal-synced:{records}:kill", force=True) == KILLED
        journal = self.folder / "journal"
        first, size = journal.read_bytes().index(b"\n") + 1, journal.stat().st_size
        at = data.draw(st.integers(first, size - 1))
        os.truncate(journal, at) if end else flip(journal, at, data.draw(BIT))
        assert self._run(plan, resume=True, force=True) == DONE

    @rule(plan=PLAN, records=st.integers(3, 6), data=st.data())
    def damaged_tiles_are_not_published(self, plan, records, data):
        """Tiles are read back a second time.

        A resumed run may refuse damaged tiles.
        """
        assert self._run(plan, f"journal-synced:{records}:kill", force=True) == KILLED
        path = data.draw(st.sampled_from([p for p in self.work() if p.name != "journal"]))
        flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(BIT))
        assert self._run(plan, resume=True, force=True) in (DONE, "E505")

    @property
    def folder(self) -> Path:
        return self.out.with_name(".out.ucpl-work")

    def work(self) -> list[Path]:
        return sorted(p for p in self.folder.rglob("*") if p.is_file())

    @precondition(lambda self: self.work())
    @rule()
    def the_source_is_written_anew(self):
        self.version += 1
        self._renew()

    @rule(plan=PLAN, name=NAMES, resume=st.booleans(), fault=st.one_of(st.just(""), FAULTS))
    def the_source_rots(self, plan, name, resume, fault):
        """One bit of the source differs during one run.

        The file times do not change.
        """
        plan = self.left[0] if resume and self.left else plan
        path = self.source.root / name
        was, times = path.read_bytes(), path.stat()
        with path.open("r+b") as file:
            file.seek(len(was) // 2)
            file.write(bytes([was[len(was) // 2] ^ 4]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        self._run(plan, fault, resume=resume, force=True)
        with path.open("r+b") as file:
            file.write(was)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    @rule(plan=PLAN, name=NAMES, resume=st.booleans())
    def a_file_of_the_source_is_gone(self, plan, name, resume):
        path = self.source.root / name
        path.rename(self.top / "aside")
        assert self._run(plan, resume=resume, force=True) != DONE or resume
        (self.top / "aside").rename(path)


TestLife = Life.TestCase
# A failing story is reported unshortened: shrinking takes minutes.
TestLife.settings = settings(
    settings.get_profile("laws"), max_examples=9, stateful_step_count=12, phases=[Phase.explicit, Phase.generate]
)
