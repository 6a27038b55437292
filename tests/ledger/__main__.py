"""Compare the results of many cases with the ledger (CONTRIBUTING.md).

    python -m tests.ledger [--only GLOB ...] [--share K/N] [-n JOBS] [--keep FOLDER] [--write bytes|texts|new]

`bytes.json` has exit statuses, codes, and digests of targets and plans: no redesign changes it. `texts.json` has digests of
printed texts: it changes only in commits that change nothing else. Each case that differs is printed with both values; the exit
status is 1 then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from itertools import chain, groupby
from pathlib import Path

from tests.ledger.cases import Case, Found, every_case, run_all, settle

HERE = Path(__file__).parent
HALVES = {"bytes": "a target changed", "texts": "a text changed"}
Lines = tuple[str, ...]
Ledger = dict[str, Lines]


def read(half: str) -> Ledger:
    path = HERE / f"{half}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: tuple(lines) for name, lines in found.items()}


def write(half: str, ledger: Mapping[str, Lines]) -> None:
    """One line per case, so a difference is one of cases."""
    rows = (f"{json.dumps(name)}: {json.dumps(ledger[name])}" for name in sorted(ledger))
    (HERE / f"{half}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def share_of(cases: list[Case], share: str) -> list[Case]:
    """Share K of N.

    Each case is in one of them, whatever other cases there are.
    """
    number, count = map(int, share.split("/"))
    return [c for c in cases if int(hashlib.sha256(c.name.encode()).hexdigest(), 16) % count == number - 1]


def found_of(cases: list[Case], jobs: int) -> Iterator[Found]:
    """The results of the cases, in their order.

    Each process is started anew and runs many of them; those of one checkpoint together.
    """
    together = [list(some) for _, some in groupby(cases, key=lambda case: case.source or case.name)]
    if jobs == 1:
        settle()
        yield from chain.from_iterable(map(run_all, together))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=settle) as pool:
        yield from chain.from_iterable(pool.map(run_all, together, chunksize=1))


def differences(half: str, ledger: Ledger, found: Ledger, gone: Iterable[str]) -> list[str]:
    """The report for each case that differs."""
    out = []
    for name, lines in found.items():
        if name not in ledger:
            out.append(f"{half}: {name}\n  a case that the ledger lacks: python -m tests.ledger --write new")
        elif ledger[name] != lines:
            out.append("\n".join([f"{half}: {name}: {HALVES[half]}", *differing(ledger[name], lines)]))
    return out + [
        f"{half}: {name}\n  a case that is there no more: python -m tests.ledger --write new" for name in gone
    ]


def differing(before: Lines, after: Lines) -> Iterator[str]:
    for i in range(max(len(before), len(after))):
        one, other = (lines[i] if i < len(lines) else "(nothing)" for lines in (before, after))
        if one != other:
            yield f"  - {one}\n  + {other}"


def keep(found: Found, folder: Path) -> None:
    """Write the texts of a case as files, for `diff -r`."""
    name = re.sub(r"[^\w.=-]+", "_", found.name)[:120] + "-" + hashlib.sha256(found.name.encode()).hexdigest()[:6]
    parts = [f"==> bytes\n{line}" for line in found.bytes] + [f"==> {what}\n{text}" for what, text in found.kept]
    (folder / f"{name}.txt").write_text("\n".join([found.name, *parts]) + "\n", encoding="utf-8")


def chosen(given: argparse.Namespace) -> list[Case]:
    cases = every_case()
    if given.write == ["new"]:
        known = read("bytes").keys() & read("texts").keys()
        cases = [case for case in cases if case.name not in known]
    if given.only:
        cases = [case for case in cases if any(fnmatchcase(case.name, glob) for glob in given.only)]
    return share_of(cases, given.share) if given.share else cases


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tests.ledger", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="GLOB", help="cases of this name; may repeat")
    parser.add_argument("--share", metavar="K/N", help="share K of N, from 1")
    how = "write this half anew; new: cases that are new or gone; may repeat"
    parser.add_argument("--write", action="append", default=[], choices=(*HALVES, "new"), help=how)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the texts of each case here")
    parser.add_argument("-n", "--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    cases = chosen(given)
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
    found: dict[str, Ledger] = {"bytes": {}, "texts": {}}
    with tempfile.TemporaryDirectory(prefix="ledger-cache-") as cache:
        os.environ["UCPL_CACHE"] = cache
        for one in found_of(cases, given.jobs):
            found["bytes"][one.name], found["texts"][one.name] = one.bytes, one.texts
            if given.keep:
                keep(one, given.keep)
    is_all = not given.only and not given.share
    there = {case.name for case in every_case()} if is_all else set()
    print(f"{len(cases)} cases in {time.monotonic() - begun:.0f} s")
    if given.write:
        for half in HALVES if "new" in given.write else given.write:
            kept = {name: lines for name, lines in read(half).items() if not is_all or name in there}
            write(half, kept | found[half])
        return 0
    wrong = []
    for half in HALVES:
        ledger = read(half)
        wrong += differences(half, ledger, found[half], sorted(ledger.keys() - there) if is_all else ())
    print("\n".join([*wrong, f"{len(wrong)} differences from the ledger" if wrong else "all is as the ledger says"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
