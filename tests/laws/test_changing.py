"""A law of parameters by name.

For all dropped, frozen and trained parameters, the others keep their values.

Every element of every state is its own number. Degree and stage change with the parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucpl

STATES = ("weight", "exp_avg", "exp_avg_sq")
STAGES = st.sampled_from([1, 2, 3])
KINDS = st.sampled_from(["stays", "is dropped", "is frozen", "is thawed", "stays frozen"])


@st.composite
def changes(draw: Any) -> tuple[list[tuple[tuple[int, ...], str]], tuple[int, int], tuple[int, int]]:
    """Parameters, each with its shape and its change.

    The stages and the degrees of both sides.
    """
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple), min_size=2, max_size=7))
    fates = ["stays", *(draw(KINDS) for _ in shapes[1:])]
    first, second = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda two: two[0] != two[1]))
    return [*zip(shapes, fates, strict=True)], (draw(STAGES), draw(STAGES)), (first, second)


def written(file: Path, parameters: list[tuple[tuple[int, ...], str]]) -> dict[str, dict[str, torch.Tensor]]:
    """A plain file of them, in groups by their dims.

    Those that are frozen have a weight alone.
    """
    found: dict[str, dict[str, Any]] = {}
    number = 1
    for i, (shape, fate) in enumerate(parameters):
        states = STATES if fate not in ("is thawed", "stays frozen") else STATES[:1]
        for state in states:
            count = int(torch.tensor(shape).prod())
            found.setdefault(f"p{i}", {})[state] = torch.arange(number, number + count, dtype=torch.float32).reshape(
                shape
            )
            number += count
    trained = {n: p for n, p in found.items() if len(p) > 1}
    groups = [[n for n, p in trained.items() if (p["weight"].ndim > 1) == wide] for wide in (True, False)]
    params = {n: {**p, "step": 5} if n in trained else p for n, p in found.items()}
    torch.save({"params": params, "groups": [{"lr": 0.1, "params": group} for group in groups if group]}, file)
    return found


@settings(max_examples=8, deadline=None)
@given(changes())
def test_what_stays_is_what_it_was(
    tmp_path_factory: pytest.TempPathFactory, one: tuple[Any, tuple[int, int], tuple[int, int]]
) -> None:
    parameters, stages, degrees = one
    folder = tmp_path_factory.mktemp("law")
    truth = written(folder / "a.pt", parameters)
    fates = {f"p{i}": fate for i, (_, fate) in enumerate(parameters)}
    by = {fate: [name for name, mine in fates.items() if mine == fate] for fate in set(fates.values())}
    ucpl.convert(folder / "a.pt", folder / "old", f"zero{stages[0]}(dp = {degrees[0]})")
    how: dict[str, Any] = {"drop": by.get("is dropped", []), "freeze": by.get("is frozen", [])}
    train = [f"{name}=0" for name in by.get("is thawed", [])]
    ucpl.convert(folder / "old", folder / "new", f"zero{stages[1]}(dp = {degrees[1]})", train=train, **how)
    ucpl.convert(folder / "new", folder / "b.pt", "plain()")
    found = torch.load(folder / "b.pt", weights_only=True)
    assert set(found["params"]) == {name for name, fate in fates.items() if fate != "is dropped"}
    in_groups = [name for group in found["groups"] for name in group["params"]]
    assert sorted(in_groups) == sorted(by["stays"] + by.get("is thawed", []))
    for name, states in found["params"].items():
        assert torch.equal(states["weight"], truth[name]["weight"]), (name, fates[name])
        for state in STATES[1:] if name in in_groups else ():
            wanted = truth[name].get(state, torch.zeros_like(truth[name]["weight"]))
            assert torch.equal(states[state], wanted), (name, state, fates[name])
        assert float(states["step"]) == 5 if name in in_groups else len(states) == 1, (name, fates[name])
