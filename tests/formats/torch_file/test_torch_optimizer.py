"""Names for the numbers of torch's optimizers.

The truth is the identity of each parameter in the job.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.formats.torch_file.tiny import Tiny, built, groups, train, trained
from ucpl.errors import UcplError
from ucpl.files.checkpoint import Order
from ucpl.files.torch_files import read_torch_file
from ucpl.files.values import Value
from ucpl.formats.torch_dicts import dicts_of, named_tensors
from ucpl.formats.torch_optimizer import EXTRA, named_optimizers, read_facts, state_dict_of

Make = Callable[[Tiny], list[torch.optim.Optimizer]]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: [torch.optim.AdamW(groups(m))],
    "adamw of all": lambda m: [torch.optim.AdamW(m.parameters())],
    "adamw, named": lambda m: [torch.optim.AdamW(groups(m, named=True))],
    "amsgrad": lambda m: [torch.optim.Adam(groups(m), amsgrad=True)],
    "sgd": lambda m: [torch.optim.SGD(groups(m), momentum=0.9, nesterov=True)],
    "nadam": lambda m: [torch.optim.NAdam(groups(m))],
    "radam": lambda m: [torch.optim.RAdam(groups(m))],
    "adagrad": lambda m: [torch.optim.Adagrad(groups(m))],
    "adafactor": lambda m: [torch.optim.Adafactor(groups(m))],
    "lbfgs": lambda m: [torch.optim.LBFGS([p for _, p in trained(m)], history_size=2, max_iter=2)],
    "muon and adamw": lambda m: [
        torch.optim.Muon([p for n, p in trained(m) if p.ndim == 2 and "layers" in n]),
        torch.optim.AdamW([p for n, p in trained(m) if p.ndim != 2 or "layers" not in n]),
    ],
}


def opened(path: Path, value: object) -> Value:
    torch.save(value, path)
    return Value.of(read_torch_file(path.parent, path.name))


def truth(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = {id(one): name for name, one in model.named_parameters()}
    return [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_numbers_have_the_names_of_their_parameters(kind: str, tmp_path: Path) -> None:
    model = built()
    optimizers = OPTIMIZERS[kind](model)
    train(model, optimizers, 0, 2)
    held = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers], "step": 2}
    found = dicts_of(opened(tmp_path / "one.pt", held))
    assert [*found.models] == [("model",)]
    assert [*found.optimizers] == [("optimizers", n) for n in range(len(optimizers))]
    named = named_tensors(found.models["model",])
    assert named.aliases == {"head.weight": "token.weight"}
    made = named_optimizers([*found.optimizers.values()], named)
    assert [[[*names] for names in one.groups] for one in made] == [truth(model, one) for one in optimizers]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_state_is_sorted_and_written_under_its_number(kind: str, tmp_path: Path) -> None:
    model = built()
    optimizers = OPTIMIZERS[kind](model)
    train(model, optimizers, 0, 2)
    torch.save({"model": model.state_dict(), "o": [one.state_dict() for one in optimizers]}, tmp_path / "one.pt")
    part = read_torch_file(tmp_path, "one.pt")
    found = dicts_of(Value.of(part))
    named = named_tensors(found.models["model",])
    shapes = {name: one.shape for name, one in named.tensors.items()}
    made = named_optimizers([*found.optimizers.values()], named)
    facts = read_facts(part, {str(n): one for n, one in enumerate(made)}, shapes, ("optimizer",))
    for n, optimizer in enumerate(optimizers):
        known = optimizer.state_dict()
        names = [name for group in facts.groups if group.name.startswith(f"{n}/") for name in group.every]
        states: dict[str, dict[str, Any]] = {}
        for name in names:
            mine: dict[str, Any] = {s: facts.payload["optimizer", name, s] for s in facts.states.get(name, ())}
            mine |= {s: per[name] for s, per in facts.scalars.items() if name in per}
            states[name] = mine | facts.extra.get(name, {})
        groups_ = [(group.every, group.hyper) for group in facts.groups if group.name.startswith(f"{n}/")]
        made_dict = state_dict_of(groups_, states)
        numbers: Any = made_dict["state"]
        assert {i: {*mine} for i, mine in numbers.items()} == {i: {*mine} for i, mine in known["state"].items()}
        rows: Any = made_dict["param_groups"]
        assert [row["params"] for row in rows] == [row["params"] for row in known["param_groups"]]
        assert [row["lr"] for row in rows] == [row["lr"] for row in known["param_groups"]]


def test_several_assignments_are_refused_with_their_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW([dict(model.named_parameters())[name] for name in ("0.weight", "2.weight")])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    top = opened(tmp_path / "one.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    found = dicts_of(top)
    named = named_tensors(found.models["model",])
    with pytest.raises(UcplError) as caught:
        named_optimizers([found.optimizers["optimizer",]], named)
    (one,) = caught.value.diagnostics
    assert one.code == "E446" and "weight" in one.message and "--order" in (one.remedy or "")
    order = Order((("0.weight", "2.weight"),), "said")
    (made,) = named_optimizers([found.optimizers["optimizer",]], named, order)
    assert made.groups == (("0.weight", "2.weight"),) and [*made.states] == ["0.weight", "2.weight"]


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (("0.weight", "none"), "no tensor"),
        (("0.weight", "0.weight"), "twice"),
        (("0.weight",), "1 name"),
        (("0.weight", "0.bias"), "shape"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(names: tuple[str, ...], word: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW([dict(model.named_parameters())[name] for name in ("0.weight", "1.weight")])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = dicts_of(opened(tmp_path / "one.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    with pytest.raises(UcplError) as caught:
        named_optimizers(
            [found.optimizers["optimizer",]], named_tensors(found.models["model",]), Order((names,), "said")
        )
    assert caught.value.diagnostics[0].code == "E466" and word in caught.value.diagnostics[0].message


def test_an_order_of_the_model_that_is_unclear_is_refused_with_its_groups(tmp_path: Path) -> None:
    """The numbers were those of one long group."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    mine = [*model.parameters()]
    optimizer = torch.optim.AdamW([{"params": mine[:2]}, {"params": mine[3:]}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = dicts_of(opened(tmp_path / "one.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
    with pytest.raises(UcplError) as caught:
        named_optimizers([found.optimizers["optimizer",]], named_tensors(found.models["model",]), Order((), "said"))
    (one,) = caught.value.diagnostics
    assert one.labels[0].text == "groups of [2, 1] parameters"
    assert "`3.weight` may have no number, or number 0 of group 1" in one.message


@pytest.mark.parametrize(
    ("wrap", "lead"),
    [
        ("module.", "module."),
        ("_orig_mod.", "_orig_mod."),
        ("module._orig_mod.", "module._orig_mod."),
        ("model.", "model."),
    ],
)
def test_wrappers_are_no_part_of_names(wrap: str, lead: str, tmp_path: Path) -> None:
    state = built().state_dict()
    found = dicts_of(opened(tmp_path / "one.pt", {f"{wrap}{name}": one for name, one in state.items()}))
    named = named_tensors(found.models[()])
    assert [*named.tensors] == [*state] and named.lead == lead
    assert named.stored["token.weight"] == f"{wrap}token.weight"


def test_wrappers_within_names_are_no_part_of_them(tmp_path: Path) -> None:
    state = built().state_dict()
    inner = {
        name.replace("layers.0.", "layers.0._orig_mod.").replace(
            "layers.1.", "layers.1._checkpoint_wrapped_module."
        ): one
        for name, one in state.items()
    }
    named = named_tensors(dicts_of(opened(tmp_path / "one.pt", {"net": inner})).models["net",])
    assert [*named.tensors] == [*state]


def test_random_states_and_averages_are_no_models(tmp_path: Path) -> None:
    value = {"rng": {"cpu": torch.get_rng_state()}, "metrics": {"loss": torch.tensor(1.0)}, "w": torch.ones(2)}
    assert not dicts_of(opened(tmp_path / "one.pt", value)).models
    assert EXTRA


def test_means_of_a_square_matrix_are_not_the_state_of_a_vector(tmp_path: Path) -> None:
    """Adafactor of transformers, fairseq and timm: rows and columns of one length."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 6, bias=False))
    mean = {"step": 1, "RMS": 1.0}
    states = {
        0: {"exp_avg_sq_row": torch.ones(4), "exp_avg_sq_col": torch.ones(4), **mean},
        1: {"exp_avg_sq": torch.ones(4), **mean},
        2: {"exp_avg_sq": torch.ones(4), **mean},
        3: {"exp_avg_sq_row": torch.ones(6), "exp_avg_sq_col": torch.ones(4), **mean},
    }
    held = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}
    found = opened(tmp_path / "one.pt", {"model": model.state_dict(), "optimizer": held})
    (made,) = named_optimizers([found.at("optimizer")], named_tensors(found.at("model")))
    assert made.groups == (tuple(name for name, _ in model.named_parameters()),)
