"""A start of numpy without docstrings: its functions are as before."""

from __future__ import annotations

import pytest

from tests.cli.command import FIXTURES, alone

SHORT = """
import os, sys
finders = len(sys.meta_path)
from ucpl.cli.short_numpy import leave_out_docstrings
leave_out_docstrings()
import numpy
assert len(sys.meta_path) == finders and numpy.ndarray.sort.__doc__ is None
"""
NAMES = """
import numpy
for path in ("numpy", "numpy.linalg", "numpy.ma", "numpy.random", "numpy.fft", "numpy.polynomial"):
    __import__(path)
    print(path, *sorted(name for name in vars(sys.modules[path]) if not name.startswith("__")))
print(type(numpy.__spec__.loader), type(numpy.__loader__), (numpy.eye(300) @ numpy.full((300, 2), 2.5)).sum())
"""


def test_names_and_results_are_those_of_a_complete_import() -> None:
    short, complete = alone(code=SHORT + NAMES), alone(code="import sys" + NAMES)
    assert (short.status, short.err, short.out) == (complete.status, "", complete.out)


@pytest.mark.parametrize("given", [None, "2"])
def test_the_environment_of_child_processes_is_unchanged(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", given)
    assert alone(code=f"{SHORT}print(os.environ.get('OPENBLAS_NUM_THREADS'))").out == f"{given}\n"


def test_a_command_starts_no_thread_of_numpy() -> None:
    code = "import os, sys\nfrom ucpl.cli import main\nstatus = main()\nassert 'numpy' in sys.modules\n"
    code += "sys.exit(status or len(os.listdir('/proc/self/task')) - 1)"
    assert alone("inspect", FIXTURES / "z1_dp4", code=code).status == 0
