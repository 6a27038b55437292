"""Parts of names that wrappers add in only one dict: one parameter."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from tests.files.refusals import refusal
from tests.gathered import plain_of
from ucpl.files.wrappers import bare
from ucpl.formats.opening import open_checkpoint

SHAPES = {"emb.weight": (7, 4), "layers.0.w.weight": (4, 4), "layers.0.n.bias": (4,), "out.weight": (3, 4)}
NAMES = tuple(SHAPES)


def wrapped(word: str, *parts: str) -> dict[str, str]:
    """Names with a wrap behind these parts."""
    out = {}
    for name in NAMES:
        said = name
        for part in parts:
            said = said.replace(f"{part}.", f"{part}.{word}.", 1) if f"{part}." in said else said
        out[name] = said
    return out


SPELLINGS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "compiled": (wrapped("_orig_mod", "layers.0"), {}),
    "compiled_optimizer": ({}, wrapped("_orig_mod", "layers.0")),
    "checkpointed": (wrapped("_checkpoint_wrapped_module", "layers.0", "emb"), {}),
    "both": (wrapped("_checkpoint_wrapped_module", "layers.0"), wrapped("_orig_mod", "out")),
    "fsdp": ({n: f"_fsdp_wrapped_module.{s}" for n, s in wrapped("_fsdp_wrapped_module", "layers.0").items()}, {}),
    "compiled_in_both": (wrapped("_orig_mod", "layers.0"), wrapped("_orig_mod", "layers.0")),
    "ddp": (wrapped("module", "layers.0"), {}),
    "ddp_optimizer": (wrapped("_orig_mod", "layers"), wrapped("module", "layers.0.w")),
}


def run(spelling: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A state dict, and its model by names without wraps."""
    torch.manual_seed(0)
    model, optimizer = ({**{n: n for n in NAMES}, **said} for said in SPELLINGS[spelling])
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    states = {
        optimizer[n]: {"step": torch.tensor(3.0), "exp_avg": torch.randn(s), "exp_avg_sq": torch.rand(s)}
        for n, s in SHAPES.items()
    }
    members = [[optimizer[n] for n in some] for some in (NAMES[:2], NAMES[2:])]
    groups = [{"lr": 0.1 * (g + 1), "weight_decay": 0.0, "params": some} for g, some in enumerate(members)]
    return {
        "model": {model[n]: w for n, w in weights.items()},
        "optimizer": {"state": states, "param_groups": groups},
    }, weights


def blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank(one) for key, one in value.items()}
    if isinstance(value, list):
        return [blank(one) for one in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, one in items for leaf in (key, *flat(one))]
    return [value.tolist() if isinstance(value, torch.Tensor) else value]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_are_without_wraps_and_a_dcp_target_has_them_again(spelling: str, tmp_path: Path) -> None:
    state, weights = run(spelling)
    save(state, checkpoint_id=tmp_path / "in")
    made = plain_of(tmp_path / "in")
    assert made["params"].keys() == weights.keys()
    assert all(torch.equal(made["params"][n]["weight"], w) for n, w in weights.items())
    assert [g["params"] for g in made["groups"]] == [list(NAMES[:2]), list(NAMES[2:])]
    ucpl.convert(tmp_path / "in", tmp_path / "out", "dcp(fsdp=2)")
    loaded = blank(state)
    load(loaded, checkpoint_id=tmp_path / "out")
    assert flat(loaded) == flat(state)
    keys = [set(pickle.loads((tmp_path / n / ".metadata").read_bytes()).state_dict_metadata) for n in ("in", "out")]
    assert keys[0] <= keys[1] and all(".param_groups." in name for name in keys[1] - keys[0])
    ucpl.convert(tmp_path / "in", tmp_path / "zero", "zero1(dp=2)")
    assert {t.name for t in open_checkpoint(tmp_path / "zero").state.tensors} == weights.keys()
    assert ucpl.compare(tmp_path / "in", tmp_path / "zero")


def test_two_names_that_differ_in_wraps_only_stay_two(tmp_path: Path) -> None:
    state, _ = run("compiled")
    state["model"]["layers.0.w.weight"] = torch.zeros(4, 4)
    save(state, checkpoint_id=tmp_path / "in")
    said = refusal(lambda: open_checkpoint(tmp_path / "in"), "E524")
    assert said.message.endswith(
        "`layers.0.n.bias`, and no tensor of a model is called so; the nearest is `model.layers.0._orig_mod.n.bias`"
    )


# States that are neither one value per element nor a number: SOAP's matrices, factors of Adafactor, which has other states
# for a parameter of one dim, a history as LBFGS has it, and a text.
OTHERS: dict[str, dict[str, Any]] = {
    "lists of matrices": {"GG": [torch.eye(3), torch.eye(4) * 2], "Q": [torch.eye(3), []]},
    "codes of 8 bits": {"quant": {"state1": torch.ones(3, 4, dtype=torch.uint8), "absmax1": torch.ones(1)}},
    "factors": {"row": torch.arange(3.0), "column": torch.arange(4.0)},
    "a history": {"old_dirs": [torch.arange(5.0)], "al": [None, 2.5], "note": "f32"},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_states_of_another_form_are_carried(kind: str, tmp_path: Path) -> None:
    state, _ = run("compiled")
    held = state["optimizer"]["state"]["out.weight"]
    held |= OTHERS[kind]
    del held["exp_avg_sq"]  # and its own state is no value per element of all parameters in the group
    save(state, checkpoint_id=tmp_path / "in")
    found = open_checkpoint(tmp_path / "in").state
    assert found.blobs["optimizer_values"].keys() == {"out.weight", "layers.0.n.bias"}  # type: ignore[attr-defined]
    assert {t.name: t.states for t in found.tensors}["out.weight"] == ("exp_avg",)
    ucpl.convert(tmp_path / "in", tmp_path / "out", "dcp(fsdp=2)")
    loaded = blank(state)
    load(loaded, checkpoint_id=tmp_path / "out")
    assert flat(loaded) == flat(state)
    assert ucpl.compare(tmp_path / "in", tmp_path / "out")
    ucpl.convert(tmp_path / "in", tmp_path / "all.pt", "plain()")
    assert ucpl.compare(tmp_path / "all.pt", tmp_path / "out")


def test_a_dropped_state_means_its_list(tmp_path: Path) -> None:
    state, _ = run("compiled")
    state["optimizer"]["state"]["out.weight"]["GG"] = [torch.eye(3), torch.eye(4)]
    save(state, checkpoint_id=tmp_path / "in")
    ucpl.convert(tmp_path / "in", tmp_path / "out", "dcp(fsdp=2)", drop=["GG"])
    assert "optimizer_values" not in open_checkpoint(tmp_path / "out").state.blobs


def numbered(spelling: str) -> dict[str, Any]:
    """As `model.state_dict()` and `optimizer.state_dict()` have it: the optimizer has numbers."""
    state, _ = run(spelling)
    named = state["optimizer"]
    members = [name for group in named["param_groups"] for name in group["params"]]
    number = {name: n for n, name in enumerate(members)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in named["param_groups"]]
    states = {number[name]: held for name, held in named["state"].items()}
    return {"model": state["model"], "optimizer": {"state": states, "param_groups": groups}}


@pytest.mark.parametrize("spelling", ["compiled", "checkpointed"])
def test_numbers_of_an_optimizer_get_names_by_shape_and_order(spelling: str, tmp_path: Path) -> None:
    state = numbered(spelling)
    state["model"]["frozen"] = torch.ones(5, 4)
    save(state, checkpoint_id=tmp_path / "in")
    opened = open_checkpoint(tmp_path / "in").state
    assert [group.members for group in opened.groups] == [NAMES[:2], NAMES[2:]]
    assert [t.name for t in opened.tensors if t.kind == "frozen"] == ["frozen"]
    held = plain_of(tmp_path / "in")
    for name, states in zip(NAMES, state["optimizer"]["state"].values(), strict=True):
        assert torch.equal(held["params"][name]["exp_avg"], states["exp_avg"])
    ucpl.convert(tmp_path / "in", tmp_path / "out", "dcp(fsdp=2)")
    loaded = blank(state)
    load(loaded, checkpoint_id=tmp_path / "out")
    assert flat(loaded) == flat(state)
    assert loaded["optimizer"]["param_groups"][1]["params"] == [2, 3]
    ucpl.convert(tmp_path / "in", tmp_path / "zero", "zero1(dp=2)")
    assert ucpl.compare(tmp_path / "in", tmp_path / "zero")


def test_numbers_that_fit_several_parameters_are_refused(tmp_path: Path) -> None:
    state = numbered("compiled")
    state["model"]["frozen"] = torch.ones(3, 4)
    save(state, checkpoint_id=tmp_path / "in")
    said = refusal(lambda: open_checkpoint(tmp_path / "in"), "E446")
    assert "several assignments fit" in said.message
    ucpl.convert(tmp_path / "in", tmp_path / "weights.pt", "plain()", weights_alone=True)


def test_wraps_are_parts_of_names() -> None:
    assert bare("_orig_mod.a._fsdp_wrapped_module.b.my_orig_mod") == "a.b.my_orig_mod"
