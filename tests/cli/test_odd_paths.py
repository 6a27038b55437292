"""Every path that a verb takes, as none can be.

Too long, with a NUL, no UTF-8, below a folder that may not be looked into.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.command import FIXTURES, good, ucpl
from tests.cli.fuzz import SPEC, tried
from ucpl import api
from ucpl.conversion.bandwidths import Bandwidths
from ucpl.errors import UcplError

LONG = "n" * 5000  # more than any file system takes
ODD = {
    "long": LONG,
    "below long": f"{LONG}/x",
    "nul": "a\0b",
    "surrogate": "a\udcff",
    "denied": "denied/x",
    "folder": "denied",
}
FIGURES = Bandwidths("/d", "t", 2, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e-6, 1e-3, 0.1, 1 << 20)
LOOKS = ("stat", "lstat", "open", "listdir", "scandir", "mkdir", "readlink", "statvfs", "rename", "replace", "unlink")
PLAN = ["plan", "--from", "source", "--to", "zero1(dp=2)"]
LINES = {
    "inspect": ["inspect", "@"],
    "inspect --html": ["inspect", "source", "--html", "@.html"],
    "infer": ["infer", "@"],
    "infer -o": ["infer", "source", "-o", "@.ucpl"],
    "import": ["import", "hf", "@"],
    "import json": ["import", "hf", "@.json"],
    "import safetensors": ["import", "hf", "@.safetensors"],
    "import -o": ["import", "hf", "weights", "-o", "@.ucpl"],
    "check": ["check", "@.ucpl"],
    "check layout": ["check", "@.ucpl:one()"],
    "check --config": ["check", "own.ucpl", "--config", "@.json"],
    "check folder": ["check", "@"],
    "check --config folder": ["check", "own.ucpl", "--config", "@"],
    "fmt": ["fmt", "@.ucpl"],
    "fmt folder": ["fmt", "@"],
    "show": ["show", "@"],
    "show plan": ["show", "@.plan"],
    "show layout": ["show", "@.ucpl:one()"],
    "show --config": ["show", "own.ucpl:cut(tp=2)", "--config", "@.json"],
    "show --model": ["show", "plain()", "--model", "@.ucpl:own"],
    "show --to": ["show", "own.ucpl:cut(tp=2)", "--after", "build", "--to", "@.ucpl:cut()"],
    "show --svg": ["show", "source", "--svg", "@.svg"],
    "show --html": ["show", "source", "--html", "@.html"],
    "plan": ["plan", "@.ucpl"],
    "plan name": ["plan", "@.ucpl", "grow"],
    "plan --from": ["plan", "--from", "@", "--to", "zero1(dp=2)"],
    "plan --to": ["plan", "--from", "source", "--to", "@.ucpl:cut()"],
    "plan --checkpoint": ["plan", "--from", "own.ucpl:whole()", "--to", "plain()", "--checkpoint", "@"],
    "plan --config": [*PLAN, "--config", "@.json"],
    "plan --model": ["plan", "--from", "plain()", "--to", "zero1(dp=2)", "--model", "@.ucpl:own"],
    "plan --bandwidths": [*PLAN, "--bandwidths", "@.json"],
    "plan --bandwidths folder": [*PLAN, "--bandwidths", "@"],
    "plan -o": [*PLAN, "-o", "@.plan"],
    "calibrate": ["calibrate", "@"],
    "calibrate -o": ["calibrate", ".", "--size", "4M", "-o", "@.json"],
    "calibrate -o below": ["calibrate", ".", "--size", "4M", "-o", "@/y.json"],
    "apply": ["apply", "@.plan", "source", "new"],
    "apply source": ["apply", "made.plan", "@", "new"],
    "apply target": ["apply", "made.plan", "source", "@"],
    "convert": ["convert", "@", "new", "--to", "zero1(dp=2)"],
    "convert target": ["convert", "source", "@", "--to", "zero1(dp=2)"],
    "convert target file": ["convert", "source", "@.pt", "--to", "plain()"],
    "convert --from": ["convert", "source", "new", "--from", "@.ucpl:stored()", "--to", "zero1(dp=2)"],
    "convert --from order": ["convert", "source", "new", "--from", 'zero0(order="@.txt")', "--to", "zero1(dp=2)"],
    "convert --to": ["convert", "source", "new", "--to", "@.ucpl:stored()"],
    "convert --config": ["convert", "source", "new", "--to", "zero1(dp=2)", "--config", "@.json"],
    "convert --model": ["convert", "source", "new", "--to", "zero1(dp=2)", "--model", "@.ucpl:own"],
    "compare": ["compare", "@", "source"],
    "compare other": ["compare", "source", "@"],
    "compare --as": ["compare", "source", "source", "--as", "@.ucpl:one()"],
    "compare --with": ["compare", "source", "source", "--with", "@.ucpl:one()"],
    "verify": ["verify", "@"],
    "verify --from": ["verify", "source", "--from", "@.ucpl:one()"],
    "verify --against": ["verify", "source", "--against", "@"],
    "verify --reference": ["verify", "source", "--reference", "@"],
    "verify --config": ["verify", "source", "--config", "@.json"],
    "contingency": ["contingency", "--from", "@"],
    "contingency -o, nothing fits": ["contingency", "--from", "source", "--room", "1", "-o", "@"],
    "contingency layout": ["contingency", "--from", "@.ucpl:cut(tp=2)"],
    "contingency -o": ["contingency", "--from", "source", "-o", "@"],
    "contingency -o below": ["contingency", "--from", "source", "-o", "@/y"],
    "contingency --bandwidths": ["contingency", "--from", "source", "--bandwidths", "@.json"],
    "contingency --config": ["contingency", "--from", "source", "--config", "@.json"],
    "contingency --model": ["contingency", "--from", "zero1(dp=4)", "--model", "@.ucpl:own"],
    "diff": ["diff", "@.plan", "made.plan"],
    "diff other": ["diff", "made.plan", "@.plan"],
    "why": ["why", "@.plan", "a"],
    "roundtrip": ["roundtrip", "@.ucpl"],
    "roundtrip --config": ["roundtrip", "own.ucpl", "--config", "@.json"],
    "demo --keep": ["demo", "--keep", "@"],
    "vault plan": ["vault", "plan", "@", "--domains", "2"],
    "vault plan layout": ["vault", "plan", "@.ucpl:cut(tp=2)", "--domains", "2"],
    "vault plan --config": ["vault", "plan", "own.ucpl:cut(tp=2)", "--domains", "2", "--config", "@.json"],
    "vault plan --bandwidths": ["vault", "plan", "source", "--domains", "2", "--bandwidths", "@.json"],
    "vault plan --model": ["vault", "plan", "zero1(dp=4)", "--domains", "2", "--model", "@.ucpl:own"],
    "vault drill": ["vault", "drill", "@.ucpl:cut(tp=2)", "--domains", "2"],
    "vault drill --config": ["vault", "drill", "own.ucpl:cut(tp=2)", "--domains", "2", "--config", "@.json"],
    "vault status": ["vault", "status", "@"],
    "vault verify": ["vault", "verify", "@"],
    "vault scrub": ["vault", "scrub", "@"],
    "vault serve": ["vault", "serve", "@", "--ranks", "2", "--domains", "2", "--domain", "5"],
    "vault serve --layout": ["vault", "serve", "job", "--layout", "@.ucpl:cut(tp=2)", "--domain", "0"],
    "vault restore": ["vault", "restore", "@", "new", "--to", "zero1(dp=2)"],
    "vault persist": ["vault", "persist", "@", "new"],
    "vault gc": ["vault", "gc", "@"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with intact things of each kind, and unreadable `denied`."""
    here = tmp_path_factory.mktemp("odd")
    (here / "own.ucpl").write_text(SPEC.replace("config.width", "6").replace(" when config.has_norm", ""))
    shutil.copytree(FIXTURES / "z1_dp4", here / "source")
    (here / "weights").mkdir()
    save_file({"a": torch.zeros(2, 3)}, here / "weights" / "model.safetensors")
    good("plan", "--from", here / "source", "--to", "zero1(dp=2)", "-o", here / "made.plan")
    (here / "denied").mkdir()
    return here


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(made)
    with locked(made / "denied"):
        yield made


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder that may not be looked into.

    Root is denied nothing; here it gets the same error.
    """
    folder.chmod(0)
    if os.geteuid() != 0:
        yield
        folder.chmod(0o700)
        return

    def denying(call: Callable[..., Any]) -> Callable[..., Any]:
        looks_at_it = call.__name__ in ("stat", "lstat")  # which its own folder allows

        def asked(*given: Any, **more: Any) -> Any:
            for one in given[:2]:
                path = os.path.abspath(one) if isinstance(one, str | Path) else ""
                if path.startswith(f"{folder}{os.sep}") or (path == str(folder) and not looks_at_it):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(one))
            return call(*given, **more)

        return asked

    with pytest.MonkeyPatch.context() as patch:
        for name in LOOKS:
            patch.setattr(os, name, denying(getattr(os, name)))
        access = os.access
        patch.setattr(
            os, "access", lambda path, mode: not str(path).startswith(f"{folder}{os.sep}") and access(path, mode)
        )
        patch.setattr(builtins, "open", denying(open))
        patch.setattr(io, "open", builtins.open)
        yield


@pytest.mark.fault(
    "Messages", "a path with too long a name, a NUL, no UTF-8, or below a closed folder", "refused with a code"
)
@pytest.mark.parametrize("line", LINES)
def test_no_path_is_an_internal_error(line: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "-o" in line:  # the output is not measured first
        monkeypatch.setattr("ucpl.conversion.calibrating.measure", lambda *_, **__: FIGURES)
    wrong = {}
    for kind, path in ODD.items():
        if kind == "folder" and "@" not in LINES[line]:  # a file of another name
            continue
        done, said = tried([word.replace("@", path) for word in LINES[line]])
        if said or done.status == 0:
            wrong[kind] = said or done.out
        elif os.path.lexists("new"):
            wrong[kind] = "something was written"
            shutil.rmtree("new")
    assert wrong == {}


@pytest.mark.parametrize("home", ["denied", LONG])
def test_a_home_that_may_not_be_looked_into(home: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user has a home that is somebody else's.

    Nothing was measured there, and nothing is kept.
    """
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(here / home))
    monkeypatch.setattr("ucpl.conversion.calibrating.measure", lambda *_, **__: pytest.fail("what cannot be kept"))
    for verb in (PLAN, ["contingency", "--from", "source"]):
        assert "estimate" not in good(*verb).out
    done = ucpl("calibrate", ".")
    assert done.status == 4 and done.err.startswith("error[E179]") and "help: write them elsewhere with -o" in done.err


def test_no_path_of_a_caller_in_python_is_an_internal_error(here: Path) -> None:
    for code, call in (
        ("E170", lambda path: api.plan("source", "zero1(dp=2)", config=path)),
        ("E170", lambda path: api.plan("source", "zero1(dp=2)", config=Path(path))),
        ("E437", api.open_checkpoint),
        ("E437", lambda path: api.convert(path, "new", "zero1(dp=2)")),
        ("E350", api.load_plan),
    ):
        for path in (LONG, "a\0b"):
            with pytest.raises(UcplError) as caught:
                call(path)
            assert caught.value.diagnostics[0].code == code, path


@pytest.mark.parametrize(
    "line",
    [
        "show @",
        "show @/x",
        "plan --from @/x --to zero1(dp=2)",
        "contingency --from @/x",
        "import hf @",
        "import hf @/x.json",
    ],
)
def test_what_may_not_be_read_is_not_reported_to_be_missing(line: str, here: Path) -> None:
    for path in ("denied", "denied/below"):
        done = ucpl(*line.replace("@", path).split())
        assert done.status == 3 and done.err.startswith("error[E400]"), done
        assert f"{path}" in done.err and "Permission denied" in done.err
    assert ucpl("show", "nowhere/x").err.startswith("error[E110]: there is no checkpoint at")
    assert ucpl("import", "hf", "nowhere/x").err.startswith("error[E395]")
