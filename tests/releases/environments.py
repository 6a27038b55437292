"""The environment of one release.

Its packages come before those of this environment, which has torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from pathlib import Path
from typing import Any

from attrs import field, frozen

from tests.releases import cuda_libraries

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 600  # of one call of pip
OVER = "it did not end in the minutes of the run"
PURE = (
    "attrs",
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "packaging",
    "psutil",
    "safetensors",
    "setuptools<81",
    "sympy",
    "typing-extensions",
)
OF_LINUX = re.compile(r'^Requires-Dist: .*platform_system == "Linux"')  # CUDA's libraries
OWN = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
QUIET = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1")


class Missing(Exception):
    """A release that is not installed, or is over time.

    Its text is the reason.
    """


class Limit:
    """The seconds that are left for all releases of a run."""

    end = math.inf

    @classmethod
    def set(cls, minutes: float) -> None:
        cls.end = time.monotonic() + 60 * minutes

    @classmethod
    def left(cls, most: float) -> float:
        """The seconds for one command. Raises: Missing."""
        left = min(most, cls.end - time.monotonic())
        if left <= 0:
            raise Missing(OVER)
        return left

    @classmethod
    def is_over(cls) -> bool:
        return time.monotonic() >= cls.end


@frozen
class Release:
    framework: str
    version: str
    packages: tuple[str, ...]
    more: tuple[str, ...]  # installed before the release
    pip: tuple[str, ...]
    environment: dict[str, str] = field(factory=dict, eq=False)
    stand_ins: tuple[str, ...] = ()
    runs: dict[str, dict[str, Any]] = field(factory=dict, eq=False)  # differences of a trial's run
    model: dict[str, Any] = field(factory=dict, eq=False)  # differences of all runs
    # reasons why a trial cannot pass, or passes in part, by the trial's title
    limits: dict[str, str] = field(factory=dict, eq=False)
    python: str = ""  # as 3.13, where it is not the Python of this process

    @property
    def title(self) -> str:
        return self.version + (f" on Python {self.python}" if self.python else "")

    def __str__(self) -> str:
        return f"{self.framework} {self.title}"


def table() -> dict[str, Any]:
    return tomllib.loads((HERE / "releases.toml").read_text())


def releases() -> list[Release]:
    """All releases of releases.toml, in its order."""
    out = []
    for framework, held in table().items():
        for one in held["releases"]:
            packages = (f"{held['package']}=={one['version']}",)
            python = one.get("python", "")
            numpy = "numpy" if python else "numpy<2"  # which most releases were made for
            more = (numpy, *held.get("with", ()), *one.get("with", ()))
            pip = (*held.get("pip", ()), *one.get("pip", ()))
            stand_ins = (*held.get("stand_ins", ()), *one.get("stand_ins", ()))
            limits = {**held.get("limits", {}), **one.get("limits", {})}
            made = Release(
                framework,
                one["version"],
                packages,
                more,
                pip,
                environment=held.get("environment", {}),
                stand_ins=stand_ins,
                runs=one.get("runs", {}),
                model=one.get("model", {}),
                limits=limits,
                python=python,
            )
            out.append(made)
    return out


def build(release: Release, folder: Path) -> Path:
    """Its Python. Raises: Missing."""
    python = folder / "bin" / "python"
    if release.python:
        _made_by(f"python{release.python}", folder)
    else:
        venv.create(folder, with_pip=False, symlinks=True)
    own = Path(_of(python, OWN))
    if release.python:
        _install_torch(release, python)
    else:
        base = sysconfig.get_paths()["purelib"]
        (own / "a_base.pth").write_text(f"{base}\n")  # a line is a folder; its own .pth files are not read
    if release.stand_ins:
        (own / "b_stand_ins.pth").write_text(f"{ROOT}\nimport tests.releases.stand_ins\n")
    for packages, options in ((release.more, ()), (release.packages, release.pip)):
        if packages:
            _install(release, python, packages, options)
    if "libcuda" in release.stand_ins:
        cuda_libraries.make(own / "torch" / "lib")
    return python


def _made_by(python: str, folder: Path) -> None:
    """Make an environment by another Python of the path. Raises: Missing."""
    try:
        subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise Missing(f"{python} is not on the path") from None


def _install_torch(release: Release, python: Path) -> None:
    """Install the same torch for another Python, with its requirements.

    A framework's requirement of torch would install the libraries of CUDA, some 4 GB.
    """
    _install(release, python, PURE, ())
    if release.framework != "torch":
        same = importlib.metadata.version("torch").partition("+")[0]
        _install(release, python, (f"torch=={same}",), ("--no-deps", "--only-binary=:all:"))
        (metadata,) = Path(_of(python, OWN)).glob("torch-*.dist-info/METADATA")
        lines = metadata.read_text().splitlines(keepends=True)
        metadata.write_text("".join(line for line in lines if not OF_LINUX.search(line)))


def _install(release: Release, python: Path, packages: tuple[str, ...], options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *QUIET, *options, *packages]
    if "--python-version" in options:  # pip wants a folder for another Python's wheels
        command += ["--target", _of(python, OWN), "--upgrade"]
    seconds = Limit.left(SECONDS)
    try:
        done = subprocess.run(command, env=variables(release), capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Missing(OVER if Limit.is_over() else f"pip did not end within {SECONDS} seconds") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("ERROR:") or "Error:" in line), "pip failed")
        raise Missing(said.removeprefix("ERROR:").strip()[:160])


def variables(release: Release) -> dict[str, str]:
    """The environment variables of its processes."""
    out = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    one_core = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    return out | one_core | {"HF_HUB_OFFLINE": "1", "UCPL_STAND_INS": ",".join(release.stand_ins)} | release.environment


def versions(python: Path, release: Release) -> dict[str, str]:
    """The releases that its processes import."""
    code = (
        "import importlib.metadata as m, json, platform; "
        "print(json.dumps({'python': platform.python_version()} | {n: m.version(n).split('+')[0] for n in ('torch', 'numpy')}))"
    )
    found: dict[str, str] = json.loads(_of(python, code, variables(release)).splitlines()[-1])
    return found


def _of(python: Path, code: str, env: dict[str, str] | None = None) -> str:
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True, env=env).stdout.strip()
