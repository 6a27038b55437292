"""Run `ucpl` as a user does, in this process or another."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from attrs import frozen

from ucpl.cli import main

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "deepspeed"
CHECKPOINTS = sorted(
    path.name for path in FIXTURES.glob("z*")
)  # the dense ones; tests of parallel ones stand elsewhere


@frozen
class Done:
    """The result of a command: exit status, standard output, standard error."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def ucpl(*argv: object) -> Done:
    """The command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(a) for a in argv])
    return Done(status, out.getvalue(), err.getvalue())


def good(*argv: object) -> Done:
    """The command, which must succeed."""
    done = ucpl(*argv)
    assert done.status == 0, (argv, done.out, done.err)
    return done


def alone(*argv: object, code: str = "from ucpl.cli import main; import sys; sys.exit(main())") -> Done:
    """The command in a process of its own, after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    return Done(done.returncode, done.stdout, done.stderr)


def digest(folder: Path) -> str:
    """SHA-256 over every file's path, size and bytes."""
    found = hashlib.sha256()
    files = [folder] if folder.is_file() else [Path(top, name) for top, _, names in os.walk(folder) for name in names]
    for path in sorted(path for path in files if path.is_file()):
        data = path.read_bytes()
        found.update(f"{path.relative_to(folder)}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()
