"""Plant faults in a copy of the tree.

A test must fail for each.

    python -m tests.mutants [--room NAME ...] [--share 10] [--seed N] [--jobs 2]

`tests/mutants/ROOM.toml` lists them:

    [[mutant]]
    file = "ucpl/runtime/targets.py"
    before = "exact text, once in the file"
    after = "the text in its place"
    test = "tests/runtime/test_crashes.py::test_short_reads_and_writes_change_nothing"
    nth = 2                       # optional: which of several places, from 1
    why = "the effect of the fault"   # optional

`test` may be several tests, separated by blanks; one of them must fail. `--share` takes that many, chosen by the seed, which is
printed. The tests are run once without a fault first: a test that is red already proves nothing. Ends 1 where a mutant
survives, or an entry does not fit its file.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = (
    "ucpl",
    "grammar",
    "specs",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "editors",
    "mkdocs.yml",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
SECONDS = 300  # a mutant that hangs is killed, too


@frozen
class Mutant:
    room: str
    number: int  # within its file, from 1
    file: str
    before: str
    after: str
    test: str
    nth: int = 0
    why: str = ""

    @property
    def tests(self) -> list[str]:
        """Names of tests may have blanks of their own."""
        return re.split(r"\s+(?=tests/)", self.test.strip())

    def __str__(self) -> str:
        first = next((line.strip() for line in self.before.splitlines() if line.strip()), "")
        return f"{self.room} {self.number} {self.file}: {first[:70]}"


def read_mutants(folder: Path = HERE, rooms: Sequence[str] = ()) -> list[Mutant]:
    found = []
    for path in sorted(folder.glob("*.toml")):
        if rooms and path.stem not in rooms:
            continue
        entries = tomllib.loads(path.read_text())["mutant"]
        found += [Mutant(path.stem, i, **entry) for i, entry in enumerate(entries, 1)]
    return found


def planted(text: str, mutant: Mutant) -> str:
    """The file with the fault.

    Raises: ValueError if the entry does not fit it.
    """
    count = text.count(mutant.before)
    if mutant.before == mutant.after or not mutant.before:
        raise ValueError("it changes nothing")
    if not mutant.nth:
        if count != 1:
            raise ValueError(f"`before` occurs {count} times")
        return text.replace(mutant.before, mutant.after)
    if not 1 <= mutant.nth <= count:
        raise ValueError(f"`before` occurs {count} times, nth is {mutant.nth}")
    at = -1
    for _ in range(mutant.nth):
        at = text.index(mutant.before, at + 1)
    return text[:at] + mutant.after + text[at + len(mutant.before) :]


class Copy:
    """A copy of the tree that holds one fault at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, root / part)

    def passes(self, tests: Iterable[str]) -> bool:
        """Return True if all of these are green.

        A run that ends late counts as red.
        """
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests,
        ]  # fmt: skip
        # Two edits within a second, of one size, would leave the compiled file of the first.
        env = {
            "HYPOTHESIS_PROFILE": "mutants",
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "mutants",
        }
        try:
            done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode not in (0, 1, 2):  # 4 and 5: no such test
            raise ValueError(done.stdout.decode()[-300:].strip() or f"pytest ends with {done.returncode}")
        return done.returncode == 0

    def survives(self, mutant: Mutant) -> bool:
        path = self.root / mutant.file
        text = path.read_text()
        fault = planted(text, mutant)
        if path.suffix == ".py":
            ast.parse(fault)
        path.write_text(fault)
        try:
            return self.passes(mutant.tests)
        finally:
            path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--room", action="append", default=[], help="runtime, graph, ...: a file of tests/mutants")
    parser.add_argument("--share", type=int, help="only so many, chosen by the seed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("JOBS", "2")))
    parser.add_argument("--number", type=int, action="append", help="only these numbers of the room")
    given = parser.parse_args()
    mutants = [m for m in read_mutants(rooms=given.room) if not given.number or m.number in given.number]
    if given.share is not None:
        mutants = random.Random(given.seed).sample(mutants, min(given.share, len(mutants)))
    print(f"{len(mutants)} mutants, seed {given.seed}", flush=True)
    local, lock = threading.local(), threading.Lock()
    green: dict[str, bool] = {}
    bad: list[str] = []

    with tempfile.TemporaryDirectory() as scratch:

        def one(mutant: Mutant) -> None:
            if not hasattr(local, "copy"):
                local.copy = Copy(Path(tempfile.mkdtemp(dir=scratch)))
            try:
                with lock:
                    known = green.get(mutant.test)
                if known is None:
                    known = local.copy.passes(mutant.tests)
                    with lock:
                        green[mutant.test] = known
                if not known:
                    said = "UNFIT: its test is red without it"
                elif local.copy.survives(mutant):
                    said = "SURVIVED"
                else:
                    said = "killed"
            except (ValueError, OSError, SyntaxError) as error:
                said = f"UNFIT: {error}"
            with lock:
                print(f"{said:<9} {mutant}", flush=True)
                if said != "killed":
                    bad.append(f"{said} {mutant}\n    {mutant.test}\n    {mutant.why}".rstrip())

        with ThreadPoolExecutor(max(1, given.jobs)) as pool:
            list(pool.map(one, mutants))
    print(f"{len(mutants) - len(bad)} of {len(mutants)} mutants were killed, seed {given.seed}")
    for text in bad:
        print(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
