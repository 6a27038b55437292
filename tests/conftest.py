"""The setup of every test.

Hypothesis's profile, one thread a process, and no trace of the user's terminal.
"""

import gc
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

# Tests run in several processes: torch and BLAS must not each take all cores. Set before anything imports them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# If the user's shell keeps Python from writing compiled modules, this process would compile all tests anew, and every verb that
# a test starts as a process all of ours, which takes longer than most of their work. They are kept apart from the tree, as the
# user wants it. `tests.mutants` edits files faster than their times change: nothing is kept for it. Everybody else has them
# where Python puts them, those of installed packages too, which are there from the beginning.
if os.environ.get("PYTHONDONTWRITEBYTECODE", "mutants") != "mutants":
    del os.environ["PYTHONDONTWRITEBYTECODE"]
    kept = os.environ.setdefault("PYTHONPYCACHEPREFIX", f"{tempfile.gettempdir()}/ucpl-tests-{os.getuid()}")
    sys.dont_write_bytecode, sys.pycache_prefix = False, kept
# Checkpoints that tests write are small, and gone with the test: where memory has a folder with room, none waits for a disk.
MEMORY, ROOM = Path("/dev/shm"), 2 << 30
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ["TMPDIR"] = str(MEMORY)
    tempfile.tempdir = None  # asked for above
# A shell's background job ignores Ctrl-C, and so would all that it starts: tests of interrupts must not depend on it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Imports and the collecting of tests make millions of objects and no garbage: looking for it takes half of that time.
gc.disable()

import pytest  # noqa: E402
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings  # noqa: E402

from tests import collecting, thorough  # noqa: E402

_users = count()

# No deadline: the first example of a law pays for imports. A failure prints the blob that repeats it. The same examples in
# every run, so that a change is judged by its own effect; new ones are looked for with `hunt`.
settings.register_profile(
    "laws",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# A long hunt by hand: `HYPOTHESIS_PROFILE=hunt make test TESTS=tests/laws` looks at other examples in every run, and at HUNT
# (10) times as many.
settings.register_profile("hunt", settings.get_profile("laws"), derandomize=False)
# For `tests.mutants`: the same examples, but a failure is not made small, since nobody reads it.
settings.register_profile(
    "mutants", settings.get_profile("laws"), phases=[Phase.explicit, Phase.generate, Phase.target]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "laws"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", choices=("leave", "only", "all"), default="all", help="the cases that `make test` leaves out"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests, and how many examples each law looks at.

    A hunt looks at more than the law asks for, `make test` at a share of them, and `make thorough` at all.
    """
    collecting.keep(config, items)
    which = config.getoption("--thorough")
    if which != "all":
        further = thorough.thorough([item.nodeid for item in items], thorough.entries())
        laws = {item.nodeid for item in items if is_hypothesis_test(getattr(item, "obj", None))}
        chosen = {item.nodeid for item in items} - further if which == "leave" else further | laws
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]
    if os.environ.get("HYPOTHESIS_PROFILE") == "hunt":
        _scale_examples(items, float(os.environ.get("HUNT", "10")))
    elif which == "leave":
        _scale_examples(items, 1 / thorough.KEEP)


def _scale_examples(items: list[pytest.Item], times: float) -> None:
    laws = {id(law): law for item in items if (law := getattr(item, "obj", None)) is not None}
    for law in laws.values():
        asked = getattr(law, "_hypothesis_internal_use_settings", None)
        if asked is not None:
            some = settings(asked, max_examples=math.ceil(times * asked.max_examples))
            getattr(law, "__func__", law)._hypothesis_internal_use_settings = some


def pytest_collection_finish() -> None:
    """Imported objects stay.

    A garbage collection before a count looks only at newer objects.

    It is not looked through for garbage first: that takes a second of each process, for little.
    """
    gc.freeze()
    # Most objects of a test go with it, and are no garbage before: each look costs time.
    gc.set_threshold(500_000, 20, 50)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def patient_disk() -> Iterator[None]:
    """Files of a test need not survive a power cut.

    No test waits for the disk, each of them for all that others wrote.

    That syncs happen, and when, is for the recorder of tests/runtime, which is above these calls and replays crashes;
    processes that tests start sync truly. A descriptor that is none is refused as usual.
    """

    def seen(fd: int) -> None:
        os.fstat(fd)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                patch.setattr(os, name, seen)
        yield


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are compared: no colour, one width, whatever terminal runs the tests."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The results of `ucpl calibrate` on this machine change verbs' output.

    A test has an empty folder of a user's own.
    """
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.getbasetemp() / f"data-{next(_users)}"))
