"""The installed frameworks have the releases that the documentation names."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
INTEROP = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["interop"]


@pytest.mark.parametrize("requirement", [Requirement(line) for line in INTEROP], ids=str)
def test_the_installed_release_is_the_documented_one(requirement: Requirement) -> None:
    assert requirement.specifier.contains(version(requirement.name))


def test_deepspeed_runs_on_the_cpu() -> None:
    from deepspeed.accelerator import get_accelerator

    assert get_accelerator()._name == "cpu"
