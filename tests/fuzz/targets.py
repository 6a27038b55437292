"""The records of a target for a later run.

A finished one its manifest, an interrupted one its journal and its half-written files.

The finished part of a resumed run must equal that of an uninterrupted one.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from attrs import define, frozen

import ucpl
import ucpl.runtime.counters
from tests.fuzz.damage import damage_bytes, damage_value
from tests.fuzz.odd import ODD, clear
from tests.fuzz.plans import json_of
from tests.fuzz.small import cut, stored
from ucpl.conversion.opening import open_checkpoint, open_for
from ucpl.errors import UcplError
from ucpl.files.checkpoint import Checkpoint
from ucpl.planning.plan import Plan
from ucpl.runtime import worker_pool
from ucpl.runtime.failpoints import set_failpoints
from ucpl.runtime.verify import verify_files

Files = dict[str, bytes]  # by path, relative to a folder
STOPS = ("tile-written:2", "tile-written:9", "journal-synced:1", "synced:1", "publish-before:1")
NUMBERS = (0, 1, 2, 3, 16, 1 << 20, (1 << 31), 1 << 32, (1 << 62) - 1, 1 << 62, (1 << 64) - 1)
MANIFEST = "ucpl/manifest.json"
HEAD = b"\n"
RECORD, BODY = 48, struct.Struct("<IIQQQI")


@frozen(eq=False)
class Run:
    """A plan, its source, its target, and the remains of an interruption."""

    plan: Plan
    source: Checkpoint
    target: Path
    wanted: Files
    stopped: list[Files]

    @property
    def work(self) -> Path:
        return self.target.with_name(f".{self.target.name}.ucpl-work")

    @classmethod
    def of(cls, plan: Plan, source: Path, target: Path) -> Run:
        made = cls(plan, open_for(plan, source), target, {}, [])
        made.go()
        made.wanted.update(read(target))
        clear(target)
        for stop in STOPS:
            set_failpoints(f"{stop}:eio")
            try:
                made.go()
            except (UcplError, OSError):  # an error of the disk where none is expected goes through as it is
                left = read(made.work)
                assert "journal" in left, f"{stop} left {sorted(left)}"
                made.stopped.append(left)
            finally:
                set_failpoints("")
            clear(target, made.work)
        return made

    def go(self, **how: Any) -> ucpl.runtime.counters.Report:
        with patch.object(worker_pool, "ThreadPoolExecutor", Crew):
            return ucpl.apply(self.plan, self.source, self.target, workers=1, memory=16 << 20, **how)


def read(top: Path) -> Files:
    """All files of a folder; of a file, itself under no name."""
    if top.is_file():
        return {"": top.read_bytes()}
    return {p.relative_to(top).as_posix(): p.read_bytes() for p in sorted(top.rglob("*")) if p.is_file()}


def write(files: Files, top: Path) -> None:
    for name, data in files.items():
        path = top / name if name else top
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@define(eq=False)
class Journals:
    """Interrupted runs whose journal or files are bent, and which resume."""

    runs: list[Run]
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Journals:
        return cls(runs(folder))

    def attempt(self, rng: Random) -> str:
        run = rng.choice(self.runs)
        files = dict(rng.choice(run.stopped))
        odd: Callable[[Path], None] | None = None
        if rng.random() < 0.75:
            files["journal"], self.damage = bent_journal(rng, files["journal"])
        else:
            name = rng.choice(sorted(files))
            files[name], self.damage = damage_bytes(rng, files[name])
            self.damage = f"{name}: {self.damage}"
            if rng.random() < 0.3:
                odd = rng.choice(ODD)
                self.damage = f"{name} is {odd.__name__}"
                del files[name]
        try:
            write(files, run.work)
            if odd is not None:
                (run.work / name).parent.mkdir(parents=True, exist_ok=True)
                odd(run.work / name)
            if rng.random() < 0.05:
                write(run.wanted, run.target)
                self.damage += ", and the target is there"
            report = run.go(resume=True, force=rng.random() < 0.05)
            found = read(run.target)
            assert report.done_before or found == run.wanted, f"other bytes of {differing(found, run.wanted)}"
        finally:
            clear(run.target, run.work)
        return self.damage


@define(eq=False)
class Manifests:
    """Finished targets with bent files that are verified, opened or resumed into.

    The manifest, the layout or files are bent.
    """

    runs: list[Run]
    whole: dict[int, Checkpoint]  # of the target of each, by the run's id
    damage: str = ""

    @classmethod
    def prepare(cls, folder: Path) -> Manifests:
        found = [run for run in runs(folder) if len(run.wanted) > 1]
        whole = {}
        for run in found:
            write(run.wanted, run.target)
            whole[id(run)] = open_checkpoint(run.target)
            clear(run.target)
        return cls(found, whole)

    def attempt(self, rng: Random) -> str:
        run = rng.choice(self.runs)
        files = dict(run.wanted)
        name = MANIFEST if rng.random() < 0.75 else rng.choice(sorted(files))
        if name.endswith(".json") and rng.random() < 0.85:
            value, self.damage = damage_value(rng, json.loads(files[name]))
            files[name] = json_of(value)
        else:
            files[name], self.damage = damage_bytes(rng, files[name])
        self.damage = f"{name}: {self.damage}"
        odd = rng.choice(ODD) if rng.random() < 0.03 else None
        try:
            write(files, run.target)
            if odd is not None:
                self.damage += f", and it is {odd.__name__}"
                (run.target / name).unlink()
                odd(run.target / name)
            self._read(rng, run, name == MANIFEST and odd is None)
        finally:
            clear(run.target, run.work)
        return self.damage

    def _read(self, rng: Random, run: Run, is_manifest: bool) -> None:
        """A manifest alone is read by a resumed run and by comparisons.

        Opening does not use it.
        """
        how = rng.randrange(4)
        if how == 3:
            run.go(resume=True, force=rng.random() < 0.2)
        elif is_manifest and rng.random() < 0.9:
            for finding in verify_files(self.whole[id(run)], workers=1, memory=16 << 20).findings:
                finding.message.encode()
        elif how == 2:
            open_checkpoint(run.target)
        else:
            for finding in ucpl.verify(run.target, workers=1, memory=16 << 20).findings:
                finding.message.encode()


POOL = ThreadPoolExecutor(32, thread_name_prefix="ucpl-fuzz")


class Crew:
    """Replaces a run's own pool of threads. Its threads exist already.

    It ends as that one does.
    """

    def __init__(self, count: int, thread_name_prefix: str = "") -> None:
        self.ends: list[Future[None]] = []

    def __enter__(self) -> Crew:
        return self

    def submit(self, call: Callable[..., None], *given: Any) -> Future[None]:
        self.ends.append(POOL.submit(call, *given))
        return self.ends[-1]

    def __exit__(self, *_: object) -> None:
        wait(self.ends)


def runs(folder: Path) -> list[Run]:
    spec, parts = cut(folder)
    _, whole = stored(folder)
    sys.modules["ucpl.runtime.moving"].SYNC_BYTES = 1  # type: ignore[attr-defined]  # each tile is journalled
    return [
        Run.of(ucpl.plan(f"{spec}:whole()", f"{spec}:cut(tp = 2)"), whole, folder / "new"),
        Run.of(ucpl.plan(f"{spec}:cut(tp = 2)", f"{spec}:cut(tp = 1)"), parts, folder / "new"),
        Run.of(ucpl.plan(f"{spec}:cut(tp = 2)", f"{spec}:whole()"), parts, folder / "new.pt"),
    ]


def bent_journal(rng: Random, raw: bytes) -> tuple[bytes, str]:
    """The header as JSON, the records with right CRCs, or bytes."""
    line, _, records = raw.partition(HEAD)
    match rng.randrange(4):
        case 0:
            header, how = damage_value(rng, json.loads(line))
            return json_of(header) + HEAD + records, f"header: {how}"
        case 1 | 2:
            rows = [records[i : i + RECORD] for i in range(0, len(records) // RECORD * RECORD, RECORD)]
            done = []
            for _ in range(rng.choice((1, 1, 3))):
                at = rng.randrange(len(rows) + 1)
                old = BODY.unpack(rows[at][: BODY.size]) if at < len(rows) else (1, 0, 0, 0, 0, 0)
                rows[at : at + rng.randrange(2)] = [record(bent_record(rng, old))]
                done.append(f"record {at} of {len(rows)} from {old}")
            return line + HEAD + b"".join(rows), "; ".join(done)
        case _:
            return damage_bytes(rng, raw)


def bent_record(rng: Random, old: tuple[int, ...]) -> list[int]:
    made = list(old)
    column = rng.randrange(len(made))
    number = rng.choice(NUMBERS) if rng.random() < 0.5 else max(0, made[column] + rng.choice((-1, 1, 7, 100)))
    made[column] = number & (0xFFFFFFFF if column in (0, 1, 5) else (1 << 64) - 1)
    return made


def record(values: list[int]) -> bytes:
    body = BODY.pack(*values)
    return body + struct.pack("<IQ", zlib.crc32(body), 0)


def differing(found: Files, wanted: Files) -> list[str]:
    return [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
