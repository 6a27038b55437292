"""Flip one bit of a checkpoint at a time and convert it.

    python -m tests.runtime.flips FOLDER [FOLDER ...] [--bits 2] [--seed 0] [--target 'zero1(dp=2)' ...]

A FOLDER is a checkpoint, or holds some. Each storage of each torch file of it gets `--bits` flips for each target. A flip is
*found* (exit 3, naming file, storage and tensor), *named in part* (exit 3, less named), *unread* (the plan reads nothing of
that storage: the target has no such state), or *missed*. Ends 1 if one is missed or named in part.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from attrs import frozen

from ucpl import api
from ucpl.errors import UcplError
from ucpl.files.zips import read_zip_directory
from ucpl.planning.plan import Plan
from ucpl.runtime.sources import SourceFiles

TARGETS = (
    "zero0(dp=1)", "zero1(dp=3)", "zero2(dp=2)", "zero3(dp=2)", "plain()", "universal()", "safetensors()",
)  # fmt: skip


@frozen
class Storage:
    """One member `data/N` of one torch file."""

    file: Path  # relative to the checkpoint's folder
    name: str
    start: int
    size: int


@frozen
class Flip:
    storage: Storage
    bit: int  # from the start of the storage
    target: str
    verdict: str  # found, named in part, unread, missed
    message: str


def storages_of(folder: Path) -> list[Storage]:
    """Every storage of every torch file that belongs to a checkpoint."""
    found = []
    checkpoint = api.open_checkpoint(folder)
    for file in checkpoint.files:
        path = checkpoint.root / file
        with open(path, "rb") as opened:
            if opened.read(4) != b"PK\x03\x04":
                continue
            members = read_zip_directory(opened.fileno(), str(path)).members.values()
        for m in members:
            _, mark, name = m.name.rpartition("/data/")
            if mark and m.size:
                found.append(Storage(path.relative_to(folder), name, m.start, m.size))
    return found


def planned(folder: Path, target: str) -> Plan | None:
    """The plan from the unchanged checkpoint to that target, or None."""
    try:
        return api.plan(str(folder), target)
    except (UcplError, ValueError) as error:
        print(f"  {folder.name} to {target}: none: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def is_refused(folder: Path, target: str) -> bool:
    """Check that a planned conversion of the unchanged checkpoint is refused.

    Laying out the files finds problems that planning does not.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            api.convert(folder, Path(scratch) / _name(target), target)
        except (UcplError, ValueError) as error:
            print(f"  {folder.name} to {target}: none: {str(error).splitlines()[0]}", file=sys.stderr)
            return True
    return False


def _name(target: str) -> str:
    return "out.pt" if target == "plain()" else "out"


def flips(
    folder: Path, targets: tuple[str, ...] = TARGETS, bits: int = 1, seed: int = 0, most: int = 1 << 30
) -> Iterator[Flip]:
    """Convert copies of a checkpoint with one flipped bit each.

    `most` is the number of storages for each target.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        shutil.copytree(folder, copy)
        storages = storages_of(copy)
        for target in targets:
            plan = planned(copy, target)
            if plan is None:
                continue
            drawn = [s for s in rng.sample(storages, min(most, len(storages))) for _ in range(bits)]
            seen = [judged(copy, s, rng.randrange(8 * s.size), plan, target) for s in drawn]
            if all(flip.verdict != "named in part" for flip in seen) or not is_refused(folder, target):
                yield from seen


def judged(copy: Path, storage: Storage, bit: int, plan: Plan, target: str) -> Flip:
    path = copy / storage.file
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[storage.start + bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    out = copy.parent / _name(target)
    read: list[range] = []
    real = SourceFiles.read_into

    def watched(self: SourceFiles, index: int, position: int, views: list[memoryview], size: int) -> None:
        if self.path(self.files[index]).samefile(path):
            read.append(range(max(position, storage.start), min(position + size, storage.start + storage.size)))
        real(self, index, position, views, size)

    try:
        with patch.object(SourceFiles, "read_into", watched):
            # Weights are not held against masters, whose bytes the plan may not need: CRCs alone are to find it.
            api.apply(plan, api.open_checkpoint(copy), out, allow_drift=True)
        return Flip(storage, bit, target, "missed" if any(read) else "unread", "exit 0")
    except UcplError as error:
        text = "\n".join(f"{d.message} {d.labels}" for d in error.diagnostics)
        full = (storage.file.name in text and f"storage {storage.name} " in text) or f"data/{storage.name}" in text
        named = full and error.exit_status == 3
        return Flip(storage, bit, target, "found" if named else "named in part", f"exit {error.exit_status}: {text}")
    finally:
        path.write_bytes(data)
        for left in copy.parent.iterdir():
            if left != copy:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def checkpoints_in(folder: Path) -> list[Path]:
    """The folder itself, or the checkpoints one level below."""
    return [folder] if _is_one(folder) else sorted(p for p in folder.iterdir() if p.is_dir() and _is_one(p))


def _is_one(folder: Path) -> bool:
    try:
        api.open_checkpoint(folder)
    except UcplError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--bits", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append")
    given = parser.parse_args()
    total: Counter[str] = Counter()
    for folder in (c for top in given.folders for c in checkpoints_in(top)):
        here: Counter[str] = Counter()
        shown: set[tuple[str, str, str]] = set()
        for flip in flips(folder, tuple(given.target or TARGETS), given.bits, given.seed):
            here[flip.verdict] += 1
            key = (str(flip.storage.file), flip.storage.name, flip.verdict)
            if flip.verdict in ("missed", "named in part") and key not in shown:
                shown.add(key)
                where = f"{flip.storage.file} data/{flip.storage.name} bit {flip.bit}"
                print(f"  {flip.verdict}: {where} to {flip.target}: {flip.message[:300]}")
        print(f"{folder.name}: {dict(here)}", flush=True)
        total += here
    print(f"all: {dict(total)}")
    return 1 if total["missed"] or total["named in part"] else 0


if __name__ == "__main__":
    sys.exit(main())
