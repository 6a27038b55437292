"""Check the project's English: forbidden words and forms, with a replacement each.

    python -m tests.english                 compare each room's count with counts.json; exit 1 if one rose
    python -m tests.english PATH ...        list the findings of files or folders
    python -m tests.english --write         write counts.json anew; the total may only fall

A file that counts.json does not name has to be free of findings. After a move of files, use `--write`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tests.english.passages import Place, check_file, tracked_files

COUNTS = Path(__file__).parent / "counts.json"
LINES, LINE = 20, 200  # of a report
Counts = dict[str, dict[str, int]]


def room_of(path: str) -> str:
    """The room of a file: its first two folders."""
    return "/".join(PurePosixPath(path).parent.parts[:2]) or "."


def count(places: list[Place]) -> Counts:
    """Findings per room and file; a clean file is absent."""
    found: Counts = {}
    for path, number in sorted(Counter(place.path for place in places).items()):
        found.setdefault(room_of(path), {})[path] = number
    return found


def total(counts: Counts) -> int:
    return sum(sum(files.values()) for files in counts.values())


def compare(before: Counts, after: Counts) -> list[str]:
    """One line per room whose count rose, and per new file with findings."""
    problems = []
    for room, files in after.items():
        had = before.get(room, {})
        if sum(files.values()) > sum(had.values()):
            rose = [f"{path} {had.get(path, 0)} -> {n}" for path, n in files.items() if n > had.get(path, 0)]
            problems.append(f"{room}: {sum(files.values())} findings, at most {sum(had.values())}: {', '.join(rose)}")
        problems += [
            f"{path}: a new file has no findings, this one has {n}" for path, n in files.items() if path not in had
        ]
    return problems


def read_counts() -> Counts:
    return json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}


def write_counts(counts: Mapping[str, Mapping[str, int]]) -> None:
    """Write one line per file, so that a merge conflict is one of files."""
    rooms = [
        f"{json.dumps(room)}: {{\n" + ",\n".join(f"  {json.dumps(p)}: {n}" for p, n in sorted(files.items())) + "\n}"
        for room, files in sorted(counts.items())
    ]
    COUNTS.write_text("{\n" + ",\n".join(rooms) + "\n}\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "tests.english", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", metavar="PATH")
    parser.add_argument("--write", action="store_true", help="write counts.json anew")
    asked = parser.parse_args(argv)
    names = [
        n for n in tracked_files() if not asked.paths or any(PurePosixPath(n).is_relative_to(p) for p in asked.paths)
    ]
    places = [place for name in names for place in check_file(name)]
    if asked.paths:
        print(*(f"{p.path}:{p.line}: `{p.found}`: write {p.instead}" for p in places), sep="\n")
        print(f"{len(places)} findings in {len(names)} files")
        return int(bool(places))
    before, after = read_counts(), count(places)
    if asked.write:
        if before and total(after) > total(before):
            print(f"not written: {total(after)} findings, and {total(before)} before")
            print(*compare(before, after), sep="\n")
            return 1
        write_counts(after)
        print(f"{total(after)} findings")
        return 0
    if problems := compare(before, after):
        print(*(line if len(line) <= LINE else f"{line[:LINE]} ..." for line in problems[:LINES]), sep="\n")
        print(
            f"... and {len(problems) - LINES} more lines" if len(problems) > LINES else "",
            end="\n" * (len(problems) > LINES),
        )
        print("python -m tests.english PATH lists them; after a move of files: python -m tests.english --write")
        return 1
    fewer = total(before) - total(after)
    print(
        f"{total(after)} findings"
        + (f", {fewer} fewer than counts.json: python -m tests.english --write" if fewer else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
