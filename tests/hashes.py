"""Write the lists of `requirements/`.

Every release that `make` installs, with the digests that the package index gives.

    python -m tests.hashes OUT REPORT... < NAMES

REPORT: the output of `pip install --dry-run --report`, for each Python that is supported; NAMES: `pip freeze` of an
environment.
Releases without wheels go into OUT with `-built` at the end of its name: they need torch to be built. torch is in neither:
its CPU and CUDA builds are different files of one release, and some are on no index.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from packaging.utils import canonicalize_name

HEAD = """\
# Digests of all that `make` installs, written by `make pins`; torch and what it alone needs (nvidia, triton) are not here.
# Files for CPython 3.11 to 3.13 on Linux, x86-64; pip refuses any other file.
"""


def written(out: Path, reports: list[Path], names: set[str]) -> None:
    found: dict[str, set[str]] = defaultdict(set)
    built = set()
    for report in reports:
        for one in json.loads(report.read_text())["install"]:
            name, version = canonicalize_name(one["metadata"]["name"]), one["metadata"]["version"]
            if name not in names:
                continue
            line = f"{name}=={version}"
            found[line].add(one["download_info"]["archive_info"]["hashes"]["sha256"])
            if not one["download_info"]["url"].endswith(".whl"):
                built.add(line)
    lacking = names - {line.partition("==")[0] for line in found}
    if lacking:
        sys.exit(f"no digest of {', '.join(sorted(lacking))}")
    for path, some in ((out, set(found) - built), (out.with_stem(f"{out.stem}-built"), built)):
        if some:
            lines = (
                " \\\n    ".join([line, *(f"--hash=sha256:{h}" for h in sorted(found[line]))]) for line in sorted(some)
            )
            path.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    frozen: set[str] = {canonicalize_name(line.partition("==")[0]) for line in sys.stdin if "==" in line}
    apart = {name for name in frozen if name == "torch" or name.startswith(("nvidia", "cuda", "triton"))}
    written(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]], frozen - apart)
