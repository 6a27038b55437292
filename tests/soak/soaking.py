"""One case of the soak.

A checkpoint, a conversion of it at random, and disturbances while it runs.

The law: a run that ends with 0 wrote the bytes that an undisturbed run writes. Any other ends with a status of ours and a code,
and the old target is still in its place. No run changes a byte of the source. And a run can always be resumed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

from attrs import define, field, frozen

from tests.walk.starts import HOME, STARTS, Here, Start, dense
from tests.walk.walking import after, home_of
from ucpl.cli import main
from ucpl.runtime.failpoints import set_failpoints

FIXTURES = Path(__file__).parents[1] / "fixtures"
SECONDS = 120  # of one run: more is taken for a hang
PLACES = ("created", "source-read", "target-write", "tile-written", "target-sync", "journal-before", "journal-synced")
ENDS = ("synced", "publish-before", "publish-between", "publish-after")
STATUSES = {1, 2, 3, 4, 5}
CRASHED = re.compile(r"Traceback|internal error")
CODE = re.compile(r"error\[(E\d{3})\]")
# Files whose bytes have CRCs, or whose headers are read: damage in them cannot pass. Unchanged data that is carried has none.
READ = re.compile(r"(states|_layer.*|layer_.*|plain)\.pt$")

Content = dict[str, int] | None


def whole(rng: Random, here: Here) -> str:
    """Target layouts for every folder with unsplit tensors."""
    return rng.choice(["plain()", "safetensors()", dense(False)(rng, here)])


def formless(rng: Random, here: Here) -> str:
    """Weights alone: no optimizer's states are made of them."""
    return rng.choice(["plain()", "safetensors()", 'safetensors(shard = "4KB")'])


@frozen
class Other(Start):
    """A container or a form that walks do not begin with."""

    folder: str = ""

    @property
    def path(self) -> Path:
        return FIXTURES / self.folder


OTHERS = (
    Other("trainer", whole, folder="trainer/checkpoint-3"),
    Other("accelerate", whole, folder="accelerate/state"),
    Other("universal 1", whole, folder="universal/z1_dp4"),
    Other("universal 3", whole, folder="universal/z3_dp4"),
    Other("names 1", whole, folder="odd/names_z1"),
    Other("names 3", whole, folder="odd/names_z3"),
    Other("lora 3", whole, folder="odd/gpt2_lora_z3"),
    Other("toggled 2", whole, folder="odd/toggled_z2"),
)
BEGINNINGS: tuple[Start, ...] = (*STARTS, *OTHERS)


class Broken(AssertionError):
    """The law does not hold."""


@frozen
class End:
    """The end of one run.

    Its exit status, -9 if it was killed, and its output.
    """

    status: int
    said: str

    @property
    def code(self) -> str:
        found = CODE.search(self.said)
        return found[1] if found else ""


def content(path: Path) -> Content:
    """CRC-32 of every file, by its name; None where nothing is there."""
    if path.is_file():
        return {"": zlib.crc32(path.read_bytes())}
    if not path.is_dir():
        return None
    return {str(p.relative_to(path)): zlib.crc32(_told(p)) for p in sorted(path.rglob("*")) if p.is_file()}


def _told(path: Path) -> bytes:
    """The bytes of a file.

    Of a manifest without the digest of the source, which a bit that no plan reads changes, too.
    """
    raw = path.read_bytes()
    if (path.parent.name, path.name) != ("ucpl", "manifest.json"):
        return raw
    with suppress(ValueError):
        held = json.loads(raw)
        plan = held.get("plan") if isinstance(held, dict) else None
        if isinstance(plan, dict) and plan.pop("content", None) is not None:
            return json.dumps(held).encode()
    return raw


def run(arguments: list[str], told: Path, fault: str = "", kill_after: float | None = None) -> End:
    """A verb in a process, killed at a failpoint or time."""
    pid = os.fork()
    if not pid:
        status = 70
        try:
            out = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (of the process)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            set_failpoints(fault)
            status = main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(_ended(pid, kill_after))
    return End(ended, told.read_text(errors="replace") if told.exists() else "")


def _ended(pid: int, kill_after: float | None) -> int:
    begin = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        passed = time.monotonic() - begin
        if (kill_after is not None and passed > kill_after) or passed > SECONDS:
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            if passed > SECONDS:
                raise Broken(f"it had not ended after {SECONDS} s")
            return status
        time.sleep(0.002)


@define
class Case:
    """A source and a target in a folder of their own."""

    rng: Random
    top: Path
    start: Start
    most: int = 3  # conversions
    lines: list[str] = field(factory=list)  # the actions, for the report of a failure
    counts: dict[str, int] = field(factory=dict)
    source: Path = field(init=False)
    out: Path = field(init=False)
    call: str = ""
    spec: str | None = None
    wanted: Content = None
    standing: Content = None
    seconds: float = 0.0  # of an undisturbed run

    def __attrs_post_init__(self) -> None:
        self.source = self.top / "source"
        (shutil.copytree if self.start.path.is_dir() else shutil.copy)(self.start.path, self.source)
        (self.top / "here").mkdir()
        self.out = self.top / "here" / "out"
        self.spec = self.start.spec

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def arguments(self, out: Path, *more: str) -> list[str]:
        made = ["convert", str(self.source), str(out), "--to", self.call, "--workers", "1", "--memory", "64M", *more]
        return [*made, "--from", self.spec] if self.spec else made

    def go(self) -> None:
        """Some conversions, each of the last one's target."""
        here = self.start.here
        for step in range(self.rng.randint(1, self.most)):
            draw = self.start.draw if not self.call.startswith("safetensors") else formless
            self.call = draw(self.rng, here)
            here_next = after(self.call, here, self.start) if not isinstance(self.start, Other) else here
            if HOME in self.call:
                self.call = self.call.replace(HOME, home_of(self.start, self.top))
            if not self._undisturbed(step):
                continue
            self._disturbed()
            self._spoiled()
            (shutil.rmtree if self.source.is_dir() else Path.unlink)(self.source)
            self.source = self.top / f"source-{step}{self.out.suffix}"
            os.rename(self.out, self.source)
            self.standing, here = None, here_next
            self.spec = here.spec

    def _undisturbed(self, step: int) -> bool:
        """The files of an undisturbed run, if there are any."""
        self.out = self.top / "here" / ("out.pt" if self.call.startswith("plain") else "out")
        clean = self.top / f"clean-{step}{self.out.suffix}"
        before, begin = content(self.source), time.monotonic()
        end = run(self.arguments(clean), self.top / "told")
        self.seconds = time.monotonic() - begin
        self.lines.append(f"{self.call} by itself: {end.status} {end.code}")
        self._hold(end, before, None, clean)
        self.wanted = content(clean)
        if end.status:
            self.count(f"refused {end.code}")
            return False
        (shutil.rmtree if clean.is_dir() else Path.unlink)(clean)
        self.count("conversions")
        return True

    def _disturbed(self) -> None:
        """Runs that are killed, and damage between them.

        In the end one that is left in peace.
        """
        if self.rng.random() < 0.4:
            self._stand()
        for _ in range(self.rng.randint(1, 4)):
            resume = self.rng.random() < 0.7 and any(self._left())
            mend = self._damage()
            fault, after_ = self._moment()
            self._attempt(["--resume"] if resume else [], fault, after_)
            mend()
        if any(self._left()) and self.rng.random() < 0.7:
            self._attempt(["--resume"], "", None)
        if self.standing != self.wanted:
            end = self._attempt([], "", None)
            if end.status:
                raise Broken(f"there is no way on: {end.status} {end.said[-1500:]}")

    def _stand(self) -> None:
        """Something of before, at the target's place."""
        if self.out.suffix:
            self.out.write_bytes(b"of before")
        else:
            self.out.mkdir()
            (self.out / "kept").write_bytes(b"of before")
        self.standing = content(self.out)

    def _moment(self) -> tuple[str, float | None]:
        """When the next run is killed.

        At a place, after a time, or not at all.
        """
        how = self.rng.random()
        if how < 0.45:
            place = self.rng.choice(PLACES)
            number = 1 if place == "created" else self.rng.choice([1, 2, 3, 5, 8, 13, 30])
            return f"{place}:{number}:{self.rng.choice(['kill', 'kill', 'eio', 'enospc', 'interrupt'])}", None
        if how < 0.6:
            return f"{self.rng.choice(ENDS)}:1:{self.rng.choice(['kill', 'interrupt'])}", None
        return "", self.rng.random() * self.seconds * 1.2 if how < 0.9 else None

    def _attempt(self, more: list[str], fault: str, kill_after: float | None) -> End:
        before = content(self.source)
        end = run(self.arguments(self.out, "--force", *more), self.top / "told", fault, kill_after)
        text = f"{' '.join(more)} {fault or kill_after or 'in peace'}"
        self.lines.append(f"  {text}: {end.status} {end.code}")
        self.count("killed" if end.status == -9 else f"ended {end.status}")
        self._hold(end, before, self.standing, self.out)
        self.standing = content(self.out)
        return end

    def _hold(self, end: End, before: Content, standing: Content, out: Path) -> None:
        """The law, of one run."""
        found = content(out)
        if content(self.source) != before:
            raise Broken("the source was changed")
        if CRASHED.search(end.said):
            raise Broken(f"no error of ours: {end.said[-3000:]}")
        if end.status == 0:
            if out == self.out and self.wanted is not None and found != self.wanted:
                raise Broken(f"it says that it is done, and wrote other bytes: {_apart(found, self.wanted)}")
        elif end.status not in (-9, 130) and (end.status not in STATUSES or not end.code):
            raise Broken(f"status {end.status} without a code: {end.said[-1500:]}")
        elif found != standing and found != self.wanted:
            raise Broken(f"neither what stood there nor the new one: {_apart(found, standing)}")

    # ---- damage ----

    def _left(self) -> list[Path]:
        """Files that an earlier run left next to the target."""
        return sorted(p for p in (self.top / "here").rglob("*") if p.is_file() and ".ucpl-" in str(p))

    def _damage(self) -> Callable[[], None]:
        """Damage something, or nothing; return the repair."""
        how = self.rng.random()
        if how < 0.25 and self._left():
            path = self.rng.choice(self._left())
            self._spoil(path, "staging")
        elif how < 0.5:
            paths = [p for p in _files(self.source) if READ.search(p.name)]
            if paths:
                path = self.rng.choice(paths)
                kept = self.top / "kept"
                kept.unlink(missing_ok=True)
                os.link(path, kept)
                raw, status = path.read_bytes(), path.stat()
                self._spoil(path, "source")
                return lambda: _put_back(path, kept, raw, status)
        return lambda: None

    def _spoil(self, path: Path, of: str) -> None:
        """A bit flipped, the end cut off, or the file gone."""
        how, size = self.rng.choice(["flip", "flip", "cut", "gone"]), path.stat().st_size
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, self.rng.randrange(size) if size else 0)
        elif size:
            flip(path, self.rng.randrange(8 * size))
        self.count(f"{of} {how}")
        self.lines.append(f"  {of} {path.name}: {how}")

    def _spoiled(self) -> None:
        """One bit of the written files: `verify` sees it, by the manifest."""
        if self.out.suffix or self.rng.random() < 0.5:
            return
        path = self.rng.choice([p for p in _files(self.out) if p.stat().st_size and p.parent != self.out / "ucpl"])
        bit = self.rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        end = run(["verify", str(self.out)], self.top / "told")
        flip(path, bit)
        self.count("target flip")
        if end.status not in STATUSES or CRASHED.search(end.said):
            raise Broken(f"{path}: bit {bit} of the target: verify ended {end.status}: {end.said[-1000:]}")


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def _put_back(path: Path, kept: Path, raw: bytes, status: os.stat_result) -> None:
    """The very file, with its bytes and its time.

    A resumed run takes it for its first one.
    """
    if not path.exists():
        os.link(kept, path)
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _apart(a: Content, b: Content) -> str:
    if a is None or b is None:
        return f"{'nothing' if a is None else 'something'} and {'nothing' if b is None else 'something'}"
    return ", ".join(sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))[:8])


def one_case(seed: int, number: int, top: Path, most: int = 3) -> Iterator[Case]:
    """The case of that number.

    Given once before it is run, so that a reader sees the actions when it breaks.
    """
    rng = Random(f"{seed} {number}")
    start = BEGINNINGS[number % len(BEGINNINGS)] if number < len(BEGINNINGS) else rng.choice(BEGINNINGS)
    case = Case(rng, top, start, most)
    yield case
    case.go()
