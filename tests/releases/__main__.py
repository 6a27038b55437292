"""`python -m tests.releases`: try releases of frameworks, and write docs/RELEASES.md.

Each release gets an environment of its own, which is deleted after its trials. The results are kept in results.json;
the page is written from them. With --share and --seed some releases are tried, and nothing is written: the exit status
is 1 if a cell that passed fails twice. --minutes ends a share in time: the other releases did not run.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.releases import fixtures, page
from tests.releases.environments import Limit, Missing, Release, build, releases, versions
from tests.releases.trials import PLANS, tried


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=__doc__)
    parser.add_argument("--only", default="", help="releases with these words in `framework version`")
    parser.add_argument("--share", type=int, help="so many releases, by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="the folder of environments and checkpoints, kept afterwards")
    parser.add_argument("--fixtures", action="store_true", help="keep the checkpoints in tests/fixtures/releases")
    parser.add_argument("--page", action="store_true", help="write the page from results.json, and try nothing")
    parser.add_argument("--minutes", type=float, help="for all releases: the rest did not run")
    asked = parser.parse_args()
    if asked.minutes:
        Limit.set(asked.minutes)
    if asked.page:
        page.write(page.load())
        return 0
    chosen = [one for one in releases() if asked.only in str(one)]
    if asked.share:
        known = page.load()
        able = [one for one in chosen if not one.python and "missing" not in known.get(str(one), {"missing": ""})]
        chosen = random.Random(asked.seed).sample(able, min(asked.share, len(able)))
    worse = []
    for one in chosen:
        before = page.load().get(str(one), {})
        found, lost = tried_again(one, before, asked)
        worse += lost
        if not asked.share:
            page.write(page.load() | {str(one): found})
    for line in worse:
        print(line)
    return int(bool(worse))


def tried_again(release: Release, before: page.Row, asked: argparse.Namespace) -> tuple[page.Row, list[str]]:
    """A release's row, and cells that passed and fail twice.

    A share reports a release that could not be installed, and one that did not end in time: its line says so.
    """
    found: page.Row = {}
    for _ in range(1 + bool(asked.share)):
        found = trial_of(release, asked.root, asked.fixtures)
        lost = [] if asked.share and "missing" in found else page.worse(str(release), before, found)
        if not lost:
            return found, []
    return found, lost


def trial_of(release: Release, root: Path | None, keeps: bool) -> page.Row:
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="ucpl-releases-")) if root is None else root / str(release).replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        row: page.Row = {}
        try:
            python, made = started(release, folder / "environment")
            row = {**made, "cells": page.rows(tried(release, python, folder / "work"))}
            if keeps and not release.python:  # one archive of a release
                fixtures.keep(release, folder / "work", [*PLANS[release.framework].sources])
        except Missing as reason:
            row = {"missing": str(reason)}
        print(f"{release}: {page.short(row)}, {time.monotonic() - began:.0f} s", flush=True)
        return row
    finally:
        if root is None:
            shutil.rmtree(folder, ignore_errors=True)


def started(release: Release, folder: Path) -> tuple[Path, dict[str, str]]:
    """The Python of a release, and its versions. Raises: Missing."""
    try:
        python = build(release, folder)
        return python, versions(python, release)
    except subprocess.CalledProcessError as error:
        raise Missing(f"its environment does not start: exit status {error.returncode}") from None


if __name__ == "__main__":
    sys.exit(main())
