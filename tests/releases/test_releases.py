"""Checkpoints of many releases, read exactly, and docs/RELEASES.md."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.releases import __main__ as command
from tests.releases import page
from tests.releases.environments import Limit, Missing, releases
from tests.releases.fixtures import FOLDER, stated, unpacked
from tests.releases.trials import PLANS

# names in torch_dist of norms that are modules of their own without Transformer Engine
NORM_OF = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
NORMS = re.compile("|".join(map(re.escape, NORM_OF)))
ARCHIVES = sorted(FOLDER.glob("*.tar.xz"))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_checkpoints_of_a_release_are_read_exactly(archive: Path, tmp_path: Path) -> None:
    """All weights and states equal digests of the run's own values."""
    truths = unpacked(archive, tmp_path)
    assert truths
    for name, truth in truths.items():
        ucpl.convert(tmp_path / name, tmp_path / f"{name}.pt", to="plain()")
        plain = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        mine = stated(apart(plain["params"]))
        buffers = stated({k: {"buffer": v} for k, v in plain["buffers"].items()})
        for one, states in truth.items():
            found = buffers.get(one) or mine[one]
            if "buffer" in states:  # no file of older releases with experts names the buffers
                found = {"buffer": found.get("buffer", found.get("weight", ""))}
            wrong = {k: (v, found.get(k)) for k, v in states.items() if found.get(k) != v}
            assert wrong == {}, (name, one)


def apart(params: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tensors of all layers, as Megatron stacks them, layer by layer."""
    out = {}
    for name, states in params.items():
        if ".layers." not in name or re.search(r"\.layers\.\d", name):
            out[name] = states
            continue
        for i in range(len(states["weight"])):
            own = {k: v[i] if torch.is_tensor(v) and v.ndim else v for k, v in states.items()}
            mine = NORMS.sub(lambda found: NORM_OF[found[0]], name)
            out[mine.replace(".layers.", f".layers.{i}.", 1)] = own
    return out


def test_the_page_says_what_the_results_say() -> None:
    assert page.PAGE.read_text() == page.text(page.load())


def test_no_cell_is_claimed_that_did_not_run() -> None:
    results = page.load()
    known = {str(one): PLANS[one.framework] for one in releases()}
    assert results.keys() <= known.keys()
    for release, row in results.items():
        titles = {trial.title for trial in known[release].trials}
        assert ("missing" in row) != bool(row.get("cells")), release
        assert row.get("cells", {}).keys() <= titles, release


def test_targets_of_trials_are_layouts() -> None:
    """Also those on the way."""
    every = [trial for plan in PLANS.values() for trial in plan.trials]
    assert {call for trial in every for call in (trial.call, trial.via or trial.call) if "(" not in call} == set()


def test_another_python_is_a_row_of_its_own() -> None:
    every = releases()
    assert len({str(one) for one in every}) == len(every)
    assert {one.python for one in every} == {"", "3.12", "3.13"}
    assert all("numpy<2" in one.more for one in every if not one.python)


def test_a_cell_that_passed_must_pass_again() -> None:
    passed, failed = {"cells": {"a": ["passed", ""], "b": ["back", ""]}}, {"cells": {"a": ["failed", "why"]}}
    assert page.worse("x 1", passed, passed) == []
    assert page.worse("x 1", passed, failed) == ["x 1: a passed before: why", "x 1: b passed before: "]
    assert page.worse("x 1", failed, passed) == []
    assert page.worse("x 1", passed, {"missing": "no network"})[0] == "x 1: a passed before: no network"


@pytest.mark.parametrize(("rows", "lost"), [
    ([{"missing": "no network"}], []),
    ([{"cells": {"a": ["failed", "a port was taken"]}}, {"cells": {"a": ["passed", ""]}}], []),
    ([{"cells": {"a": ["failed", "why"]}}, {"missing": "no time is left"}], []),
    ([{"cells": {"a": ["failed", "why"]}}] * 2, ["deepspeed 0.19.8: a passed before: why"]),
])  # fmt: skip
def test_a_share_fails_by_the_product_alone(
    monkeypatch: pytest.MonkeyPatch, rows: list[page.Row], lost: list[str]
) -> None:
    left = iter(rows)
    monkeypatch.setattr(command, "trial_of", lambda *_: next(left))
    one = next(release for release in releases() if str(release) == "deepspeed 0.19.8")
    asked = Namespace(share=2, root=None, fixtures=False)
    assert command.tried_again(one, {"cells": {"a": ["passed", ""]}}, asked)[1] == lost
    assert next(left, None) is None


def test_a_release_without_time_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limit, "end", 0.0)
    with pytest.raises(Missing, match="it did not end in the minutes of the run"):
        Limit.left(600)
