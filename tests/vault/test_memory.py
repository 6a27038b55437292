"""Saves in memory are restored bit for bit.

This holds for the loss of any domain, and for another layout.
"""

from __future__ import annotations

import shutil

import pytest

import ucpl
from tests.vault.states import Truth, call, memory

DEGREES = "dp=2, tp=2"


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), DEGREES, (1, 2, 3))


@pytest.mark.parametrize(
    ("domains", "protect"), [(2, "raim5"), (2, "mirror"), (4, "raim5"), (4, "mirror"), (4, "rs(2, 2)")]
)
def test_any_one_domain_can_be_lost(tmp_path, truth, domains, protect):
    with memory(tmp_path / "job", truth, domains=domains, protect=protect) as here:
        for step in (1, 2, 3):
            assert all(here.save(truth, step))
            here.turn()
            assert here.writers[0].committed() == (step, step)
        assert truth.step_of(here.url) == 3
        for lost in range(domains):
            away = tmp_path / "away"
            shutil.move(here.vault.home / f"d{lost}", away)
            assert truth.step_of(here.url) == 3
            shutil.move(away, here.vault.home / f"d{lost}")


@pytest.mark.fault(
    "Vaults", "restore into another layout after a loss (F15)", "the bytes of a conversion of the true state"
)
def test_a_lost_domain_comes_back_in_another_layout(tmp_path, truth):
    with memory(tmp_path / "job", truth, domains=4, protect="raim5") as here:
        here.save(truth, 1)
        here.turn()
        shutil.rmtree(here.vault.home / "d2")
        ucpl.convert(here.url, tmp_path / "out", call("dp=3, pp=2"))
        ucpl.convert(truth.folders[1], tmp_path / "wanted", call("dp=3, pp=2"), layout=call(""))
        names = sorted(p.name for p in (tmp_path / "wanted").glob("*.pt"))
        assert names
        for name in names:
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()


@pytest.mark.parametrize("protect", ["none", "raim5", "mirror"])
def test_what_cannot_be_rebuilt_is_refused_by_its_domains(tmp_path, truth, protect):
    with memory(tmp_path / "job", truth, domains=4, protect=protect) as here:
        here.save(truth, 1)
        here.turn()
        for lost in (0, 1):
            shutil.rmtree(here.vault.home / f"d{lost}")
        with pytest.raises(ucpl.UcplError, match=r"E691: .*d0.*lost or damaged"):
            truth.step_of(here.url)
