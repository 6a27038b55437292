"""Names of ZeRO-0's numbers by evidence, and errors without any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.cli.command import FIXTURES, good
from ucpl import api
from ucpl.errors import UcplError
from ucpl.files.checkpoint import Checkpoint
from ucpl.formats.deepspeed import numbered

Groups = list[list[str]]
WEIGHTS = {"a.weight": (2, 3), "a.bias": (3,), "b.weight": (2, 3), "b.bias": (3,), "c.weight": (2, 3)}
EACH: Groups = [["b.weight", "a.weight"], ["b.bias", "a.bias"]]  # backwards, and c.weight is frozen
LAYERS: Groups = [["a.weight", "a.bias"], ["b.weight", "b.bias"]]


def value(name: str, state: int) -> torch.Tensor:
    """Numbers that no other tensor has, and that bf16 rounds."""
    shape = WEIGHTS[name]
    count = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return count / 3 + 100 * list(WEIGHTS).index(name) + 1000 * state


def optimizer(groups: Groups, form: str) -> dict[str, Any]:
    """The states of AdamW, FP16_UnfusedOptimizer ("each") or FP16_Optimizer ("flat")."""
    slots = [[group] if form == "flat" else [[name] for name in group] for group in groups]
    number, listed, state = 0, [], {}
    for group in slots:
        listed.append({"lr": 0.1, "params": list(range(number, number + len(group)))})
        for names in group:
            whole = {
                s: torch.cat([value(n, i).flatten() for n in names]) for i, s in ((1, "exp_avg"), (2, "exp_avg_sq"))
            }
            shape = (-1,) if form == "flat" else WEIGHTS[names[0]]
            state[number] = {"step": torch.tensor(3.0), **{s: v.reshape(shape) for s, v in whole.items()}}
            number += 1
    base = {"state": state, "param_groups": listed}
    if form == "plain":
        return base
    if form == "each":
        return {"optimizer_state_dict": base, "fp32_groups": [[value(n, 0) for n in group] for group in groups]}
    flats = [torch.cat([value(n, 0).flatten() for n in group]) for group in groups]
    return {"optimizer_state_dict": base, "fp32_groups_flat": flats, "clip_grad": 1.0}


def saved(path: Path, groups: Groups, form: str, **more: Any) -> Path:
    """A checkpoint without ZeRO, as DeepSpeed saves it."""
    dtype = torch.float32 if form == "plain" else torch.bfloat16
    held = {
        "module": {name: value(name, 0).to(dtype) for name in WEIGHTS},
        "buffer_names": [],
        "optimizer": optimizer(groups, form),
        "param_shapes": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": 3,
        "ds_config": {"bf16": {"enabled": form != "plain"}},
        "ds_version": "0.19.8",
        **more,
    }
    (path / "global_step3").mkdir(parents=True)
    torch.save(held, path / "global_step3" / "mp_rank_00_model_states.pt")
    (path / "latest").write_text("global_step3")
    return path


def listed(path: Path, names: object) -> str:
    path.write_text(names if isinstance(names, str) else json.dumps(names))
    return f'zero0(order="{path}")'


def members(checkpoint: Checkpoint) -> Groups:
    return [list(group.members) for group in checkpoint.state.groups]


def told_by(checkpoint: Checkpoint) -> str:
    """The evidence for the names of numbers."""
    return str(checkpoint.state.settings["parameter_order"].value)


def refusal(path: Path, layout: str | None = None) -> tuple[str, str]:
    with pytest.raises(UcplError) as caught:
        api.open_checkpoint(path, layout)
    return caught.value.diagnostics[0].code, caught.value.diagnostics[0].message


def check_moments(checkpoint: Path, folder: Path, groups: Groups, layout: str | None = None) -> None:
    """Each parameter has the moments of its own number."""
    ucpl.convert(checkpoint, folder / "plain.pt", "plain()", layout=layout)
    found = torch.load(folder / "plain.pt", weights_only=True)["params"]
    trained = {name for group in groups for name in group}
    for name in WEIGHTS:
        assert torch.equal(found[name]["weight"].float(), value(name, 0).to(found[name]["weight"].dtype).float())
        assert ("exp_avg" in found[name]) == (name in trained)
        if name in trained:
            assert torch.equal(found[name]["exp_avg"], value(name, 1)) and torch.equal(
                found[name]["exp_avg_sq"], value(name, 2)
            )


@pytest.mark.parametrize("form", ["plain", "each", "flat"])
@pytest.mark.parametrize("text", ["groups", "names", "lines"])
def test_an_order_that_is_given_is_followed(form: str, text: str, tmp_path: Path) -> None:
    flat = [name for group in EACH for name in group]
    said: object = {"groups": EACH, "names": flat, "lines": "\n".join(flat)}[text]
    source = saved(tmp_path / "s", EACH, form)
    call = listed(tmp_path / "names", said)
    opened = api.open_checkpoint(source, call)
    assert members(opened) == EACH
    assert [t.kind for t in opened.state.tensors] == ["parameter"] * 4 + ["frozen"]
    check_moments(source, tmp_path, EACH, call)


def test_layers_of_one_shape_are_distinguished_by_the_model_order(tmp_path: Path) -> None:
    groups = [*LAYERS, ["c.weight"]]
    source = saved(tmp_path / "s", groups, "plain")
    code, message = refusal(source)
    assert (code, "several orders fit" in message) == ("E461", True)
    check_moments(source, tmp_path, groups, 'zero0(order = "model")')
    less = saved(tmp_path / "t", [["a.weight", "a.bias"], ["b.weight"]], "plain")  # or c.weight
    assert refusal(less, 'zero0(order = "model")')[0] == "E461"


@pytest.mark.parametrize("groups", [LAYERS, EACH, [["b.weight", "a.weight", "c.weight"], ["b.bias", "a.bias"]]])
@pytest.mark.parametrize("form", ["each", "flat"])
def test_masters_identify_any_order(form: str, groups: Groups, tmp_path: Path) -> None:
    source = saved(tmp_path / "s", groups, form)
    opened = api.open_checkpoint(source)
    assert members(opened) == groups
    assert told_by(opened) == "shapes and values of the masters"
    check_moments(source, tmp_path, groups)


def test_weights_and_masters_are_read_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of n parameters, 2 n tensors are read, not n * n."""
    reads = []
    read = numbered._Contents._read

    def counted(self: Any, part: Any, tensor: Any) -> bytes:
        reads.append(tensor)
        return read(self, part, tensor)

    monkeypatch.setattr(numbered._Contents, "_read", counted)
    opened = api.open_checkpoint(FIXTURES / "z0_dp2_bf16")
    assert told_by(opened) == "shapes and values of the masters"
    assert len(opened.state.tensors) <= len(reads) <= 2 * len(opened.state.tensors)


@pytest.mark.parametrize("form", ["each", "flat"])
def test_masters_that_are_alike_stand_in_the_model_order(form: str, tmp_path: Path) -> None:
    """Before the first step, biases or norms are alike."""
    source = saved(tmp_path / "s", [["a.weight", "b.weight"], ["a.bias", "b.bias"]], form)
    file = source / "global_step3" / "mp_rank_00_model_states.pt"
    held = torch.load(file, weights_only=False)
    held["module"] |= {name: torch.zeros(3).bfloat16() for name in ("a.bias", "b.bias")}
    if form == "flat":
        held["optimizer"]["fp32_groups_flat"][1].zero_()
    else:
        held["optimizer"]["fp32_groups"][1] = [torch.zeros(3), torch.zeros(3)]
    torch.save(held, file)
    opened = api.open_checkpoint(source)
    assert members(opened) == [["a.weight", "b.weight"], ["a.bias", "b.bias"]]
    assert told_by(opened).endswith("in the module's order")
    assert refusal(source, 'zero0(order = "model")')[0] == "E461"  # they do not lie one behind another


def test_weights_that_are_views_of_flat_buffers_identify_any_order(tmp_path: Path) -> None:
    """FP16_Optimizer makes them so, and torch saves them so."""
    source = saved(tmp_path / "s", EACH, "flat")
    file = source / "global_step3" / "mp_rank_00_model_states.pt"
    held = torch.load(file, weights_only=False)
    for group in EACH:
        flat, start = torch.cat([held["module"][name].flatten() for name in group]), 0
        for name in group:
            shape = torch.Size(WEIGHTS[name])
            held["module"][name] = flat[start : start + shape.numel()].view(shape)
            start += shape.numel()
    torch.save(held, file)
    opened = api.open_checkpoint(source)
    assert members(opened) == EACH
    assert told_by(opened) == "weights are views of the groups' flat buffers"  # values of masters would find the same
    check_moments(source, tmp_path, EACH)


@pytest.mark.parametrize("form", ["plain", "each", "flat"])
def test_names_that_torch_keeps_identify_any_order(form: str, tmp_path: Path) -> None:
    """named_parameters() went into the optimizer, a frozen parameter with them."""
    source = saved(tmp_path / "s", EACH, form)
    file = source / "global_step3" / "mp_rank_00_model_states.pt"
    held = torch.load(file, weights_only=False)
    base = held["optimizer"] if form == "plain" else held["optimizer"]["optimizer_state_dict"]
    for group, names in zip(base["param_groups"], EACH, strict=True):
        group["param_names"] = names if form == "plain" else [*names, *["c.weight"] * ("b.weight" in names)]
    torch.save(held, file)
    opened = api.open_checkpoint(source)
    assert members(opened) == EACH
    assert told_by(opened) == "param_names of the optimizer's groups"
    ucpl.convert(source, tmp_path / "new", "zero0(dp=2)", freeze=["a.bias"])
    made = torch.load(next((tmp_path / "new").glob("*/mp_rank*")), weights_only=False)["optimizer"]
    kept = made.get("optimizer_state_dict", made)["param_groups"]
    assert [group["param_names"] for group in kept] == [["b.weight", "a.weight"], ["b.bias"]]


def test_wrappers_are_no_part_of_names_that_torch_keeps(tmp_path: Path) -> None:
    """Shapes alone gave two layers each other's states."""
    order = [["b.weight", "a.weight", "c.weight", "b.bias", "a.bias"]]
    source = saved(tmp_path / "s", order, "plain")
    file = source / "global_step3" / "mp_rank_00_model_states.pt"
    held = torch.load(file, weights_only=False)
    held["optimizer"]["param_groups"][0]["param_names"] = [f"module.{name}" for name in order[0]]
    torch.save(held, file)
    assert members(api.open_checkpoint(source)) == order
    check_moments(source, tmp_path, order)


@pytest.mark.parametrize("fused", [0, 1])
def test_what_is_written_names_its_numbers(fused: int, tmp_path: Path) -> None:
    source = saved(tmp_path / "s", EACH, "each")
    call = listed(tmp_path / "names", EACH)
    ucpl.convert(source, tmp_path / "new", f"zero0(dp = 2, fused = {fused})", layout=call)
    opened = api.open_checkpoint(tmp_path / "new")
    assert members(opened) == EACH
    assert told_by(opened).startswith("param_shapes of ")  # values of masters would find the same
    assert opened.state.settings["fused"].value == fused
    check_moments(tmp_path / "new", tmp_path, EACH)


@pytest.mark.parametrize("form", ["each", "flat"])
def test_an_order_may_name_frozen_parameters_in_16_bits(form: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "s", EACH, form)
    call = listed(tmp_path / "names", [["c.weight", "b.weight", "a.weight"], ["b.bias", "a.bias"]])
    assert members(api.open_checkpoint(source, call)) == EACH


@pytest.mark.parametrize("say", ["is a second name of wte.weight", "has no elements"])
def test_shapes_of_what_is_no_parameter_of_its_own_are_refused(say: str, tmp_path: Path) -> None:
    """Only ucpl writes param_shapes at stage 0.

    A second name, or an empty parameter, caused an internal error.
    """
    made = tmp_path / "z0"
    ucpl.convert(FIXTURES / "z0_dp2_bf16", made, "zero0(dp=1)", workers=1)
    file = next(made.rglob("*model_states.pt"))
    held = torch.load(file, weights_only=False)
    group, name = next((group, name) for group in held["param_shapes"] for name in group if name.endswith("ln1.weight"))
    if "second" in say:
        held["module"][name] = held["module"]["wte.weight"]
    else:
        held["module"][name], group[name] = torch.zeros(0, dtype=torch.bfloat16), torch.Size([0])
    torch.save(held, file)
    code, message = refusal(made)
    assert code == "E456"
    assert f"param_shapes names {name}, which {say}" in message


def test_groups_of_a_spec_say_the_order(tmp_path: Path) -> None:
    groups = [["b.weight", "c.weight"], ["a.weight"], ["b.bias", "a.bias"]]
    source = saved(tmp_path / "s", groups, "plain")
    call = listed(tmp_path / "names", groups)
    ucpl.convert(source, tmp_path / "new", "zero0(dp = 1)", layout=call)
    (tmp_path / "own.ucpl").write_text(api.infer(tmp_path / "new").text())
    assert refusal(source)[0] == "E461"
    spec = f"{tmp_path / 'own.ucpl'}:stored()"
    assert members(api.open_checkpoint(source, spec)) == groups
    check_moments(source, tmp_path, groups, spec)


WRONG = {
    "unknown": ([["b.weight", "a.weights"], ["b.bias", "a.bias"]], "names a.weights, which is no parameter"),
    "twice": ([["b.weight", "b.weight"], ["b.bias", "a.bias"]], "names b.weight twice"),
    "shape": ([["b.weight", "b.bias"], ["a.weight", "a.bias"]], "has b.bias of shape [3] as number 1 of group 0"),
    "few": ([["b.weight", "a.weight"], ["b.bias"]], "ends in group 1"),
    "many": ([["b.weight", "a.weight"], ["b.bias", "a.bias", "c.weight"]], "ends before c.weight"),
    "numbers": ([[1, 2], [3, 4]], "is no order"),
    "mixed": (["b.weight", ["a.weight"]], "is no order"),
    "object": ('[{"a": 1}', "is no order"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_order_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    names, said = WRONG[name]
    source = saved(tmp_path / "s", EACH, "plain")
    code, message = refusal(source, listed(tmp_path / "names", names))
    assert (code, said in message) == ("E466", True), message


def test_an_order_where_files_name_the_parameters_is_refused(tmp_path: Path) -> None:
    call = listed(tmp_path / "names", EACH)
    code, message = refusal(FIXTURES / "z1_dp4", call)
    assert (code, "files of ZeRO-1 name them" in message) == ("E466", True)
    assert refusal(FIXTURES / "z1_dp4", "zero0(order = 3)")[0] == "E466"
    with pytest.raises(UcplError) as caught:  # of a target it would say nothing
        ucpl.plan(str(FIXTURES / "z1_dp4"), 'zero0(dp = 1, order = "model")')
    assert caught.value.diagnostics[0].code == "E117"


class Mixed:
    """A frozen matrix next to trained ones in one torch group."""

    def __init__(self, lr: float) -> None:
        torch.manual_seed(int(lr * 1000))
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
        self.model[1].weight.requires_grad_(False)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2 * lr}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).pow(2).mean().backward()
        self.optimizer.step()

    def saved(self, path: Path) -> Path:
        path = saved(path, EACH, "plain", module=self.model.state_dict(), optimizer=self.optimizer.state_dict())
        return path

    def loaded(self, path: Path) -> dict[str, Any]:
        """Its state after torch's own load of a target."""
        held = torch.load(path / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)
        self.model.load_state_dict(held["module"])
        self.optimizer.load_state_dict(held["optimizer"])
        state: dict[str, Any] = self.optimizer.state_dict()
        return state


@pytest.mark.parametrize("way", [(), ("dcp(fsdp=2)",), ("plain()",), ("zero0(dp=3)", "dcp(fsdp=1)")])
def test_frozen_parameters_in_groups_keep_their_numbers(tmp_path: Path, way: tuple[str, ...]) -> None:
    """torch numbers frozen parameters, too, without states for them."""
    one, other = Mixed(0.01), Mixed(0.3)
    one.step()
    source = at = one.saved(tmp_path / "source")
    opened = api.open_checkpoint(source)
    assert [t.name for t in opened.state.tensors if t.kind == "frozen"] == ["1.weight"]
    assert [group.every for group in opened.state.groups] == [
        ("0.weight", "1.weight", "2.weight"),
        ("0.bias", "1.bias", "2.bias"),
    ]
    for n, to in enumerate((*way, "zero0(dp=2)")):
        ucpl.convert(at, tmp_path / f"{n}", to)
        at = tmp_path / f"{n}"
        assert ucpl.compare(source, at)
    mine, yours = one.loaded(source), other.loaded(at)
    assert mine["param_groups"] == yours["param_groups"] and [*mine["state"]] == [*yours["state"]] == [0, 2, 3, 4, 5]
    one.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_a_source_without_groups_of_frozen_parameters_is_reported(tmp_path: Path) -> None:
    """ZeRO's files state no group of a frozen parameter."""
    out = good("convert", FIXTURES / "z2_dp3_frozen", tmp_path / "target", "--to", "zero0(dp=2)").out
    (said,) = [line for line in out.splitlines() if "no file of the source states the groups" in line]
    assert "doesn't match the size of optimizer's group" in said
