"""A full run of `make interop` is compared with docs/capabilities.toml.

Every test that is named there must be collected, run and passed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.docs.capabilities import names, read_capabilities

HERE = "tests/interop"


# Files of few tests and minutes of work: they start first, so that no process works on alone at the end.
LONG: tuple[str, ...] = (
    "test_vault.py",
    "test_node_died.py",
    "test_deepspeed_autotp.py",
    "test_resume.py",
    "test_strategies.py",
)
LONG += ("test_megatron.py", "test_megatron_fsdp.py", "test_deepspeed_grid.py", "test_dcp.py", "test_filled.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


class Ran:
    """The passed tests of this folder, and the summary at the end."""

    def __init__(self) -> None:
        self.collected: set[str] = set()  # by processes of pytest-xdist, which share the tests out
        self.passed: set[str] = set()
        self.lines: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected |= {*ids}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput") or not is_whole(session):
            return
        self.lines = unproved(self.collected or {item.nodeid for item in session.items}, self.passed)
        if self.lines and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines:
            terminalreporter.write_line(line, red=True)


def is_whole(session: pytest.Session) -> bool:
    """Test whether the complete folder was requested, without a filter."""
    config = session.config
    asked = [Path(arg) == Path(HERE) for arg in config.args]
    return asked == [True] and not (config.option.keyword or config.option.markexpr or config.option.collectonly)


def unproved(tests: set[str], passed: set[str]) -> list[str]:
    """Differences between the list of capabilities and this run, one line each."""
    named = sorted(name for name in read_capabilities().named() if name.startswith(HERE))
    lines = [
        f"docs/capabilities.toml names {n}, and no test is it" for n in named if not any(names(n, t) for t in tests)
    ]
    for test in sorted(tests):
        if not any(names(n, test) for n in named):
            lines.append(f"docs/capabilities.toml does not name {test}")
        elif test not in passed:
            lines.append(f"docs/capabilities.toml rests on {test}, which did not pass")
    return lines


def pytest_configure(config: pytest.Config) -> None:
    """Set the folder of DeepSpeed's compiled extensions, and remove stale locks.

    A process that was killed during a build leaves a lock that blocks all others.
    """
    built = Path(sys.prefix) / "torch_extensions"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(built)
    if not hasattr(config, "workerinput"):
        for lock in built.glob("**/lock"):
            lock.unlink(missing_ok=True)
    config.pluginmanager.register(Ran(), "capabilities")
