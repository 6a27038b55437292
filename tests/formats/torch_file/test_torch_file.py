"""Files of training scripts, which torch loads and trains on."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_chunks
from torch.distributed.checkpoint.state_dict_saver import save as save_chunks
from torch.utils._pytree import tree_leaves_with_path

import ucpl
from tests.cli.command import ucpl as command
from tests.formats.torch_file.test_torch_optimizer import OPTIMIZERS
from tests.formats.torch_file.tiny import Tiny, adamw, built, train
from ucpl.cli import main
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint
from ucpl.registry import format_named

State = dict[str, Any]


def save(path: Path, kind: str = "adamw") -> tuple[State, list[float]]:
    """A file after two steps, and the losses of the next two."""
    model = built()
    optimizers = OPTIMIZERS[kind](model)
    train(model, optimizers, 0, 2)
    made: State = {"model": model.state_dict(), "epoch": 3, "best": torch.tensor([0.5, 0.25])}
    made |= {"optimizer": optimizers[0].state_dict()} if len(optimizers) == 1 else {}
    made |= {"optimizers": [one.state_dict() for one in optimizers]} if len(optimizers) > 1 else {}
    torch.save(made, path)
    saved: State = torch.load(path, weights_only=True)
    return saved, train(model, optimizers, 2, 2)


def resumed(held: State, kind: str = "adamw") -> list[float]:
    """The next losses of a job that loads a file."""
    model = built(seed=8)
    optimizers = OPTIMIZERS[kind](model)
    model.load_state_dict(held["model"], strict=True)
    for one, state in zip(optimizers, held.get("optimizers") or [held["optimizer"]], strict=True):
        one.load_state_dict(state)
    return train(model, optimizers, 2, 2)


def loaded(folder: Path, name: str = "checkpoint.pt") -> State:
    with torch.serialization.safe_globals([Namespace]):
        made: State = torch.load(folder / name, weights_only=True)
    return made


def refused(*args: Any, **kwargs: Any) -> Any:
    with pytest.raises(UcplError) as caught:
        ucpl.convert(*args, **kwargs)
    return caught.value.diagnostics[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_target_is_loaded_by_torch_and_trains_on(kind: str, tmp_path: Path) -> None:
    _, losses = save(tmp_path / "one.pt", kind)
    ucpl.convert(tmp_path / "one.pt", tmp_path / "out", "torch_file()")
    held = loaded(tmp_path / "out")
    assert resumed(held, kind) == losses
    assert held["epoch"] == 3 and held["best"].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("via", ["dcp(fsdp=2)", "zero1(dp=2)", "zero3(dp=3)", "plain()"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon and adamw"])
def test_a_run_goes_to_another_framework_and_back(kind: str, via: str, tmp_path: Path) -> None:
    _, losses = save(tmp_path / "one.pt", kind)
    if kind == "muon and adamw" and via.startswith("zero"):  # ZeRO's groups are those of one optimizer
        with pytest.raises(ucpl.UcplError, match="E448: the run has optimizers of 2 kinds"):
            ucpl.convert(tmp_path / "one.pt", tmp_path / "there", via)
        return
    ucpl.convert(tmp_path / "one.pt", tmp_path / "there", via)
    ucpl.convert(tmp_path / "there", tmp_path / "back", "torch_file()")
    held = loaded(tmp_path / "back")
    assert resumed(held, kind) == losses
    assert held["epoch"] == 3


FORMS: dict[str, Callable[[State], State]] = {
    "other keys": lambda s: {"state_dict": s["model"], "optimizer_state_dict": s["optimizer"], "args": Namespace(lr=1)},
    "ddp": lambda s: {**s, "model": {f"module.{name}": one for name, one in s["model"].items()}},
    "compiled": lambda s: {**s, "model": {f"_orig_mod.{name}": one for name, one in s["model"].items()}},
    "ema": lambda s: {**s, "model_ema": {name: one.clone() for name, one in s["model"].items()}},
    "deep": lambda s: {"state": {"model": s["model"], "optim": s["optimizer"]}, "step": 2},
    "schedule": lambda s: {**s, "sched": {"last_epoch": 2, "_step_count": 3, "base_lrs": [0.1]}},
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_state_of_the_plain_one(form: str, legacy: bool, tmp_path: Path) -> None:
    made, losses = save(tmp_path / "plain.pt")
    torch.save(FORMS[form](made), tmp_path / "one.pt", _use_new_zipfile_serialization=not legacy)
    ucpl.convert(tmp_path / "plain.pt", tmp_path / "a", "plain()")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "b", "plain()")
    a, b = (torch.load(tmp_path / name / "plain.pt", weights_only=True) for name in "ab")
    assert a["params"].keys() == b["params"].keys() and a["aliases"] == b["aliases"]
    for name, states in a["params"].items():
        assert all(
            torch.equal(torch.as_tensor(one), torch.as_tensor(b["params"][name][s])) for s, one in states.items()
        )
    ucpl.convert(tmp_path / "one.pt", tmp_path / "out", 'torch_file(model="model", optimizer="optimizer")')
    assert resumed(loaded(tmp_path / "out")) == losses


def test_a_schedule_and_averages_keep_their_keys(tmp_path: Path) -> None:
    made, _ = save(tmp_path / "plain.pt")
    whole = FORMS["schedule"](FORMS["ema"](made))
    torch.save(whole, tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "z", "zero1(dp=2)")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "out", "torch_file()")
    held = loaded(tmp_path / "out")
    assert held["sched"] == whole["sched"]
    assert all(torch.equal(one, held["model_ema"][name]) for name, one in whole["model_ema"].items())
    opened = open_checkpoint(tmp_path / "z")
    assert opened.state.blobs["lr_scheduler"] == whole["sched"]


def test_two_files_are_one_run(tmp_path: Path) -> None:
    made, losses = save(tmp_path / "plain.pt")
    (tmp_path / "save").mkdir()
    torch.save(made["model"], tmp_path / "save" / "model.pt")
    torch.save(made["optimizer"], tmp_path / "save" / "optimizer.pt")
    ucpl.convert(tmp_path / "save", tmp_path / "z", "zero1(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "out", "torch_file()")
    assert resumed(loaded(tmp_path / "out")) == losses
    to = 'torch_file(file="model.pt", model="", optimizer_file="opt.pt", optimizer="")'
    ucpl.convert(tmp_path / "z", tmp_path / "two", to)
    parts = {"model": loaded(tmp_path / "two", "model.pt"), "optimizer": loaded(tmp_path / "two", "opt.pt")}
    assert resumed(parts) == losses


def test_an_optimizer_in_another_folder_is_of_the_same_run(tmp_path: Path) -> None:
    made, losses = save(tmp_path / "plain.pt")
    for name in ("model", "optimizer"):
        (tmp_path / name).mkdir()
        torch.save(made[name], tmp_path / name / f"{name}.pt")
    source = f"{tmp_path}/model/model.pt+{tmp_path}/optimizer/optimizer.pt"
    ucpl.convert(source, tmp_path / "two", 'torch_file(file = "model.pt")')
    parts = {name: loaded(tmp_path / "two", f"{name}.pt") for name in ("model", "optimizer")}
    assert resumed(parts) == losses
    ucpl.convert(source, tmp_path / "z", "zero1(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "out", "torch_file()")
    assert resumed(loaded(tmp_path / "out")) == losses
    assert refused(f"{tmp_path}/model/model.pt+{tmp_path}/none.pt", tmp_path / "no", "plain()").code == "E437"


def test_a_state_dict_alone_stays_one(tmp_path: Path) -> None:
    state = built().state_dict()
    torch.save(state, tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "out", "torch_file()")
    held = loaded(tmp_path / "out")
    assert [*held] == [*state]
    Tiny().load_state_dict(held, strict=True)
    ucpl.convert(tmp_path / "one.pt", tmp_path / "wrapped", 'torch_file(wrap="module.")')
    assert [*loaded(tmp_path / "wrapped")] == [f"module.{name}" for name in state]


def test_one_of_several_models_is_chosen_by_its_key(tmp_path: Path) -> None:
    models = {"generator": built(1), "discriminator": built(2)}
    held: State = {name: one.state_dict() for name, one in models.items()}
    for name, one in models.items():
        optimizer = adamw(one)
        train(one, [optimizer], 0, 1)
        held[f"opt_{name[0]}"] = optimizer.state_dict()
    torch.save(held, tmp_path / "one.pt")
    one = refused(tmp_path / "one.pt", tmp_path / "no", "zero1(dp=2)")
    assert one.code == "E447" and "generator" in one.message and 'optimizer="opt_g"' in one.remedy
    layout = 'torch_file(model="discriminator", optimizer="opt_d")'
    assert main(["inspect", str(tmp_path / "one.pt"), "--from", layout]) == 0
    plan = ucpl.plan(layout, "torch_file()", checkpoint=tmp_path / "one.pt")
    ucpl.save_plan(plan, tmp_path / "one.plan")
    ucpl.apply(tmp_path / "one.plan", tmp_path / "one.pt", tmp_path / "out")
    found = loaded(tmp_path / "out")
    assert {*found} - {"ucpl"} == {*held}
    for name in models:
        assert all(torch.equal(one, found[name][key]) for key, one in held[name].items())
    assert refused(tmp_path / "one.pt", tmp_path / "no", "plain()", layout='torch_file(model="none")').code == "E447"
    torch.save({f"model_{i}": built(1).state_dict() for i in range(20)}, tmp_path / "many.pt")
    assert "`, and 14 more" in refused(tmp_path / "many.pt", tmp_path / "no", "plain()").message


def test_an_order_names_the_numbers_that_shapes_leave_open(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    names = ["2.weight", "0.weight"]
    optimizer = torch.optim.AdamW([dict(model.named_parameters())[name] for name in names])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    (tmp_path / "names.json").write_text(json.dumps([names]))
    assert refused(tmp_path / "one.pt", tmp_path / "no", "plain()").code == "E446"
    ucpl.convert(tmp_path / "one.pt", tmp_path / "weights", "plain()", weights_alone=True)
    layout = f'torch_file(order="{tmp_path}/names.json")'
    ucpl.convert(tmp_path / "one.pt", tmp_path / "out", "torch_file()", layout=layout)
    sides = (str(tmp_path / "one.pt"), str(tmp_path / "out"))
    assert "--order" in command("compare", *sides).err
    assert command("compare", *sides, "--order", str(tmp_path / "names.json")).status == 0
    assert command("compare", *sides[1:], *sides[1:], "--order", "model").status == 3  # it is not needed
    held = loaded(tmp_path / "out")
    assert held["optimizer"]["ucpl_names"] == [names]
    assert torch.equal(held["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    (tmp_path / "names.txt").write_text("".join(f"{name}\n" for name in names))
    save_chunks(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "d", no_dist=True
    )
    for source in ("one.pt", "d"):
        assert "--order names.txt" in refused(tmp_path / source, tmp_path / "no", "plain()").remedy
        made = tmp_path / f"{source}.p.pt"
        done = command("convert", tmp_path / source, made, "--to", "plain()", "--order", tmp_path / "names.txt")
        assert done.status == 0, done.err
        params = loaded(tmp_path, made.name)["params"]
        first = {name: one["exp_avg"] for name, one in params.items() if "exp_avg" in one}
        assert first.keys() == {*names}
        assert all(torch.equal(first[n], optimizer.state_dict()["state"][i]["exp_avg"]) for i, n in enumerate(names))
    ucpl.apply(
        ucpl.plan(str(tmp_path / "d"), "plain()", order=tmp_path / "names.txt"), tmp_path / "d", tmp_path / "a.pt"
    )
    assert refused(tmp_path / "weights", tmp_path / "no", "plain()", order=tmp_path / "names.txt").code == "E466"
    optimizer.load_state_dict(held["optimizer"])
    ucpl.convert(tmp_path / "out", tmp_path / "again", "plain()")  # its names are stated


def test_states_of_other_forms_are_not_lost_in_silence(tmp_path: Path) -> None:
    save(tmp_path / "one.pt", "adafactor")
    one = refused(tmp_path / "one.pt", tmp_path / "no", "zero1(dp=2)")
    assert one.code == "E448" and "--drop row_var" in one.remedy
    ucpl.convert(tmp_path / "one.pt", tmp_path / "out", "zero1(dp=2)", drop=["row_var", "col_var"])
    ucpl.convert(tmp_path / "one.pt", tmp_path / "weights", "zero1(dp=2)", weights_alone=True)
    save(tmp_path / "two.pt", "lbfgs")  # its `func_evals` is a number
    assert "keeps `d` of" in str(refused(tmp_path / "two.pt", tmp_path / "no", "zero1(dp=2)"))


def test_an_optimizer_alone_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save(adamw(built()).state_dict(), tmp_path / "optimizer.pt")
    assert refused(tmp_path / "optimizer.pt", tmp_path / "no", "plain()").code == "E439"


def test_tensors_without_elements_keep_their_places(tmp_path: Path) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2, 3)), "b": nn.Parameter(torch.ones(0, 3))})
    optimizer = torch.optim.AdamW(model.parameters())
    (model["a"].sum() + model["b"].sum()).backward()
    optimizer.step()
    of_empty = optimizer.state[model["b"]]
    of_empty["exp_avg"] = of_empty["exp_avg"].bfloat16()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "there", "dcp(fsdp=2)")
    ucpl.convert(tmp_path / "there", tmp_path / "out", "torch_file()")
    held = loaded(tmp_path / "out")
    assert [held["optimizer"]["state"][1][s].dtype for s in ("exp_avg", "exp_avg_sq")] == [
        torch.bfloat16,
        torch.float32,
    ]
    model.load_state_dict(held["model"], strict=True)
    optimizer.load_state_dict(held["optimizer"])
    assert optimizer.state_dict()["state"].keys() == {0, 1}


def test_the_history_of_lbfgs_stays_with_a_first_parameter_without_dims(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(2, 3))])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model[0] * model[1] - 2).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "there", "dcp(fsdp=2)")
    assert {t.kind for t in open_checkpoint(tmp_path / "there").state.tensors} == {"parameter"}
    ucpl.convert(tmp_path / "there", tmp_path / "out", "torch_file()")
    found, wanted = (
        tree_leaves_with_path(one) for one in (loaded(tmp_path / "out")["optimizer"], optimizer.state_dict())
    )
    assert sorted(map(str, found)) == sorted(map(str, wanted))
    flat = refused(tmp_path / "one.pt", tmp_path / "no", "dcp(fsdp=2, flat=1)")
    assert flat.code == "E471" and flat.remedy.startswith("leave them out: --drop al --drop old_dirs")


def test_a_file_of_lightning_keeps_its_form(tmp_path: Path) -> None:
    made, losses = save(tmp_path / "plain.pt")
    whole: dict[str, Any] = {
        "pytorch-lightning_version": "2.6.6",
        "global_step": 2,
        "state_dict": {f"net.{name}": one for name, one in made["model"].items()},
        "optimizer_states": [made["optimizer"]],
        "lr_schedulers": [{"last_epoch": 2, "_step_count": 3, "base_lrs": [0.1]}],
        "loops": {"fit_loop": {"state_dict": {}}},
    }
    torch.save(whole, tmp_path / "one.ckpt")
    ucpl.convert(tmp_path / "one.ckpt", tmp_path / "z", "zero1(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "model", "torch_file()")
    assert resumed(loaded(tmp_path / "model")) == losses
    ucpl.convert(tmp_path / "one.ckpt", tmp_path / "out", "torch_file()")
    held = loaded(tmp_path / "out")
    assert {*held} == {*whole} and [*held["state_dict"]] == [*whole["state_dict"]]
    assert all(held[key] == whole[key] for key in ("global_step", "lr_schedulers", "loops"))
    model = {name.removeprefix("net."): one for name, one in held["state_dict"].items()}
    assert resumed({"model": model, "optimizer": held["optimizer_states"][0]}) == losses
    averaged = {**whole, "current_model_state": whole["state_dict"], "averaging_state": {"n": torch.tensor(1)}}
    averaged["state_dict"] = {name: torch.zeros_like(one) for name, one in whole["state_dict"].items()}
    torch.save(averaged, tmp_path / "ema.ckpt")
    ucpl.convert(tmp_path / "ema.ckpt", tmp_path / "trained", "plain()")
    found = torch.load(tmp_path / "trained" / "plain.pt", weights_only=True)
    assert torch.equal(found["params"]["token.weight"]["weight"], made["model"]["token.weight"])


@pytest.mark.parametrize("via", ["dcp(fsdp=2)", "dcp(fsdp=2, flat=1)", "zero1(dp=2)"])
def test_an_average_keeps_its_own_names(via: str, tmp_path: Path) -> None:
    """AveragedModel calls its parameters `module.NAME`; these are no names of the model."""
    made, _ = save(tmp_path / "one.pt")
    ema = {"n_averaged": torch.tensor(2), **{f"module.{n}": one + 1 for n, one in made["model"].items()}}
    torch.save({**made, "ema": ema}, tmp_path / "ema.pt")
    ucpl.convert(tmp_path / "ema.pt", tmp_path / "there", via)
    ucpl.convert(tmp_path / "there", tmp_path / "back", "torch_file()")
    held = loaded(tmp_path / "back")["ema"]
    assert held.keys() == ema.keys() and all(torch.equal(torch.as_tensor(held[n]), one) for n, one in ema.items())


def test_a_flat_buffer_of_two_dtypes_is_compared_with_its_parts(tmp_path: Path) -> None:
    wide, narrow = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7).bfloat16())
    optimizer = torch.optim.AdamW([wide, narrow], lr=0.1)
    wide.grad, narrow.grad = torch.ones_like(wide), torch.ones_like(narrow)
    optimizer.step()
    model = {"a.weight": wide.detach(), "b.weight": narrow.detach()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "z", "zero3(dp=2)")
    found = ucpl.compare(tmp_path / "one.pt", tmp_path / "z")
    assert {(d.name, d.state, d.a, d.b) for d in found.differences if d.state.startswith("exp_avg")} == {
        ("b.weight", state, "bf16", "f32") for state in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("call", ['torch_file(model="")', "safetensors_shards(fsdp=2)"])
def test_a_target_of_tensors_alone_names_everything_of_the_run_as_left_out(call: str, tmp_path: Path) -> None:
    held, _ = save(tmp_path / "run.pt")
    made = ucpl.convert(tmp_path / "run.pt", tmp_path / "t", call)
    assert made.plan.account is not None
    left = {(one.kind, name) for one in made.plan.account.entries if one.fate == "dropped" for name in one.names}
    kinds = {kind for kind, _ in left}
    assert {"group", "client_state", "step"} <= kinds
    assert {name for kind, name in left if kind == "client_state"} >= {
        key for key in held if key not in ("model", "optimizer")
    }


def test_a_state_dict_in_a_file_with_the_name_of_a_model_is_read_again(tmp_path: Path) -> None:
    held, _ = save(tmp_path / "run.pt")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "t", 'torch_file(file="pytorch_model.bin", model="", wrap="")')
    made = loaded(tmp_path / "t", "pytorch_model.bin")
    assert all(torch.equal(made[name], held["model"][name]) for name in made)
    assert made.keys() == held["model"].keys()


def test_names_of_an_optimizer_may_lack_the_step_of_the_module(tmp_path: Path) -> None:
    """A LightningModule holds a net whose modules have numbers as names."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    named = dict(net.named_parameters())
    chosen = torch.optim.AdamW([(name, p) for name, p in reversed(named.items())])
    net(torch.ones(2, 3)).sum().backward()
    chosen.step()
    weights = {f"net.{name}": p.detach() for name, p in named.items()}
    lightning = {"pytorch-lightning_version": "2.6.6", "state_dict": weights, "optimizer_states": [chosen.state_dict()]}
    torch.save(lightning, tmp_path / "last.ckpt")
    ucpl.convert(tmp_path / "last.ckpt", tmp_path / "p", "plain()")
    found = torch.load(tmp_path / "p" / "plain.pt", weights_only=True)["params"]
    for name, p in named.items():
        assert torch.equal(found[f"net.{name}"]["exp_avg"], chosen.state[p]["exp_avg"])


def test_a_first_step_of_the_models_own_names_is_kept(tmp_path: Path) -> None:
    """transformers leaves out a tied head: all names begin with `model.`."""
    weights = {"model.embed_tokens.weight": torch.randn(5, 3), "model.norm.weight": torch.randn(3)}
    save_file(weights, tmp_path / "model.safetensors")
    ucpl.convert(tmp_path / "model.safetensors", tmp_path / "t", "torch_file()")
    assert [*loaded(tmp_path / "t")["model"]] == [*weights]
    ucpl.convert(tmp_path / "t", tmp_path / "back", "safetensors()")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == weights.keys()


def test_pickled_modules_give_their_state_dicts(tmp_path: Path) -> None:
    """`torch.save(model)`, and files that have a module and its average (ultralytics)."""
    model = built()
    model.register_buffer("passing", torch.ones(2), persistent=False)
    optimizers = OPTIMIZERS["adamw"](model)
    train(model, optimizers, 0, 2)
    torch.save(model, tmp_path / "model.pt")
    held: State = {"model": model, "ema": deepcopy(model).half(), "optimizer": optimizers[0].state_dict(), "epoch": 3}
    torch.save(held, tmp_path / "last.pt")
    for name, call in (("model.pt", 'torch_file(model="")'), ("last.pt", "torch_file()")):
        made = ucpl.convert(tmp_path / name, tmp_path / f"{name}.out", call)
        assert made.plan.account is not None
        classes = [n for one in made.plan.account.entries if one.fate == "not read" for n in one.names]
        assert any("tiny.Tiny" in one for one in classes)
    Tiny().load_state_dict(loaded(tmp_path / "model.pt.out"), strict=True)
    found = loaded(tmp_path / "last.pt.out")
    assert all(torch.equal(found["model"][name], one) for name, one in model.state_dict().items())
    assert all(torch.equal(found["ema"][name], one) for name, one in held["ema"].state_dict().items())
    assert resumed(found) == train(model, optimizers, 2, 2)


@pytest.mark.parametrize("by_group", [False, True], ids=["one list", "a list for each group"])
def test_a_list_of_masters_is_of_their_parameters(by_group: bool, tmp_path: Path) -> None:
    """Loops of 16-bit weights, and Apex: the optimizer trains fp32 copies."""
    model = built().to(torch.bfloat16)
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    groups = [[p for p in names if (p.ndim > 1) == is_wide] for is_wide in (True, False)]
    masters = [[p.detach().float() + 1e-4 for p in group] for group in groups]
    chosen = torch.optim.AdamW([{"params": group} for group in masters])
    for one in (m for group in masters for m in group):
        one.grad = torch.ones_like(one)
    chosen.step()
    flat = [m.detach() for group in masters for m in group]
    inner: State = {"optimizer": chosen.state_dict(), "fp32_from_fp16_params": masters if by_group else flat}
    average = [torch.zeros_like(m) for m in flat]  # of torch_ema
    held: State = {"model": model.state_dict(), "optimizer": inner, "ema": {"shadow_params": average}}
    torch.save(held, tmp_path / "run.pt")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "z", "zero3(dp=2)")
    ucpl.convert(tmp_path / "z", tmp_path / "p", "plain()")
    found = torch.load(tmp_path / "p" / "plain.pt", weights_only=True)["params"]
    for p, master in zip((p for group in groups for p in group), flat, strict=True):
        assert torch.equal(found[names[p]]["fp32"], master)
    ucpl.convert(tmp_path / "run.pt", tmp_path / "t", "torch_file()")
    made = loaded(tmp_path / "t")["optimizer"]
    kept = made["fp32_from_fp16_params"]
    assert all(torch.equal(a, b) for a, b in zip(chain(*kept) if by_group else kept, flat, strict=True))
    chosen.load_state_dict(made["optimizer"])
    assert {*made["optimizer"]["state"][0]} == {"step", "exp_avg", "exp_avg_sq"}


def test_values_of_the_run_stay_around_a_nested_optimizer(tmp_path: Path) -> None:
    """detectron2 has the optimizer within the trainer's state."""
    held, _ = save(tmp_path / "one.pt")
    nested = {
        "model": held["model"],
        "trainer": {"iteration": 3, "_trainer": {"optimizer": held["optimizer"], "more": 1}},
    }
    torch.save(nested, tmp_path / "run.pt")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "t", "torch_file()")
    made = loaded(tmp_path / "t")["trainer"]
    assert made["iteration"] == 3 and made["_trainer"]["more"] == 1
    assert made["_trainer"]["optimizer"]["state"].keys() == held["optimizer"]["state"].keys()


def test_classes_of_harmless_values_need_no_permission(tmp_path: Path) -> None:
    held, _ = save(tmp_path / "one.pt")
    torch.save(held | {"config": defaultdict(dict, {"a": {"b": 1}})}, tmp_path / "run.pt")
    for call in ("torch_file()", "dcp(fsdp=2)"):
        ucpl.convert(tmp_path / "run.pt", tmp_path / call, call)
    made = torch.load(tmp_path / "torch_file()" / "checkpoint.pt", weights_only=False)
    assert made["config"] == {"a": {"b": 1}} and made["config"]["c"] == {}
    for source, is_said in (("run.pt", True), ("one.pt", False)):
        target = ucpl.plan(str(tmp_path / source), "torch_file()").target
        (said,) = (*format_named("torch_file").advice(open_checkpoint(tmp_path / source), target), "")[:1]
        assert ("collections.defaultdict: torch.load takes this file with weights_only=False" in said) == is_said


def test_counters_of_an_engine_are_compared_where_a_script_has_them(tmp_path: Path) -> None:
    zero = Path(__file__).parents[2] / "fixtures" / "deepspeed" / "z2_dp3_frozen"
    ucpl.convert(zero, tmp_path / "made", "torch_file()")
    assert torch.load(tmp_path / "made" / "checkpoint.pt", weights_only=True)["global_steps"] > 0
    assert ucpl.compare(zero, tmp_path / "made") and ucpl.compare(tmp_path / "made", zero)
    ucpl.convert(tmp_path / "made", tmp_path / "back", "zero2(dp = 2)")
    assert ucpl.compare(zero, tmp_path / "back")
    assert (tmp_path / "back" / "latest").read_text() == (zero / "latest").read_text()


def test_containers_of_a_script_s_values_go_into_a_run_of_deepspeed(tmp_path: Path) -> None:
    """Values of client_state, which its loader unpickles without weights_only."""
    made, _ = save(tmp_path / "one.pt")
    torch.save(made | {"history": defaultdict(list, {"loss": [1.5]}), "seen": {"a"}}, tmp_path / "two.pt")
    ucpl.convert(tmp_path / "two.pt", tmp_path / "z", "zero3(dp=2)")
    file = next((tmp_path / "z").rglob("*model_states.pt"))
    held = torch.load(file, weights_only=False)
    assert held["history"] == {"loss": [1.5]} and held["history"]["new"] == [] and held["seen"] == {"a"}


def test_a_number_that_differs_in_a_flat_buffer_names_its_own_way_out(tmp_path: Path) -> None:
    """As LAMB keeps its coefficient for each parameter."""
    made, _ = save(tmp_path / "one.pt")
    for number, states in made["optimizer"]["state"].items():
        states["lamb_coeff"] = torch.tensor(0.5 + number)
    torch.save(made, tmp_path / "two.pt")
    one = refused(tmp_path / "two.pt", tmp_path / "z", "zero3(dp=2)")
    assert one.code == "E470" and "--drop lamb_coeff" in one.remedy
    ucpl.convert(tmp_path / "two.pt", tmp_path / "z", "zero3(dp=2)", drop=["lamb_coeff"])


@pytest.mark.parametrize("target", ["zero1(dp=2)", "zero3(dp=2)", "universal()"])
def test_a_member_without_gradients_is_named(target: str, tmp_path: Path) -> None:
    """torch makes states at the first gradient, engines at the start."""
    torch.manual_seed(2)
    model = nn.ModuleDict({"a": nn.Linear(4, 5), "unused": nn.Linear(3, 2), "b": nn.Linear(5, 3)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model["b"](model["a"](torch.randn(2, 4))).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    text = "unused.weight, unused.bias: in groups of the source's optimizer, without states"
    line = ("convert", tmp_path / "one.pt", tmp_path / "out", "--to", target, "--force")
    done = command(*line)
    assert done.status == 0 and text in done.out, done
    done = command(*line, "--train", "unused.weight", "--train", "unused.bias")
    assert done.status == 0 and "without states" not in done.out, done
    assert "unused.bias" in open_checkpoint(tmp_path / "out").state.groups[0].members
    again = command("convert", tmp_path / "one.pt", tmp_path / "two.pt", "--to", "torch_file()")
    assert again.status == 0 and "without states" not in again.out
    held = torch.load(tmp_path / "two.pt", weights_only=True)["optimizer"]
    assert held["param_groups"][0]["params"] == [*range(6)] and set(held["state"]) == {0, 1, 4, 5}


# ---- odd optimizers, as torch itself loads them -----------------------------------------------------------------------


class Odd(nn.Module):
    """A module with parameters of its own, one of them without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.z = nn.Linear(5, 7), nn.Linear(7, 3)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.z(self.a(x)) * self.gain + self.none.sum()
        return made


Makes = Callable[[nn.Module], list[torch.optim.Optimizer]]


def odd_job(make: Makes) -> tuple[Odd, list[torch.optim.Optimizer]]:
    torch.manual_seed(5)
    model = Odd()
    made = make(model)
    odd_steps(model, made)
    return model, made


def odd_steps(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> float:
    for seed in range(2):
        torch.manual_seed(seed)
        loss: torch.Tensor = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return loss.item()


@pytest.mark.parametrize("way", [("torch_file()",), ("dcp(fsdp=2)", "torch_file()"), ("plain()", "torch_file()")])
def test_steps_of_tensors_without_elements_have_the_form_of_the_others(tmp_path: Path, way: tuple[str, ...]) -> None:
    """torch adds 1 to all steps in one call, of tensors."""
    model, (adam,) = odd_job(lambda m: [torch.optim.AdamW(m.parameters(), foreach=True)])
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "0.pt")
    here = tmp_path / "0.pt"
    for n, call in enumerate(way, 1):
        there = tmp_path / (f"{n}.pt" if "file" in call or "plain" in call else str(n))
        ucpl.convert(here, there, call)
        here = there
    held = torch.load(here, weights_only=True)
    other, (again,) = odd_job(lambda m: [torch.optim.AdamW(m.parameters(), foreach=True)])
    other.load_state_dict(held["model"])
    again.load_state_dict(held["optimizer"])
    assert odd_steps(other, [again]) == odd_steps(model, [adam])


@pytest.mark.parametrize("flat", [False, True])
def test_names_in_groups_are_those_that_a_job_with_named_parameters_loads(tmp_path: Path, flat: bool) -> None:
    """torch's loader of chunks requests `param_names` of each group."""
    named: Makes = lambda m: [torch.optim.AdamW(m.named_parameters())]  # noqa: E731
    model, (adam,) = odd_job(named)
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "a.pt")
    ucpl.convert(tmp_path / "a.pt", tmp_path / "chunks", f"dcp(fsdp=2, flat={int(flat)})")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    other, (again,) = odd_job(named)
    held: State = dict(zip(("model", "optim"), get_state_dict(other, again, options=options), strict=True))
    load_chunks(held, checkpoint_id=tmp_path / "chunks")
    set_state_dict(other, again, model_state_dict=held["model"], optim_state_dict=held["optim"], options=options)
    assert again.state_dict()["param_groups"] == adam.state_dict()["param_groups"]
    ucpl.convert(tmp_path / "chunks", tmp_path / "b.pt", "torch_file()")
    found = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["param_names"] for group in found] == [[name for name, _ in model.named_parameters()]]


def two(model: Any) -> list[torch.optim.Optimizer]:
    """Two optimizers, the second not in the model's order."""
    return [
        torch.optim.AdamW(model.a.parameters()),
        torch.optim.SGD([{"params": [*model.z.parameters(), model.gain]}, {"params": [model.none]}], momentum=0.9),
    ]


def test_each_optimizer_of_a_list_is_read_or_the_file_is_refused(tmp_path: Path) -> None:
    model, made = odd_job(two)
    names = ["a.weight", "a.bias", "z.weight", "z.bias", "gain", "none"]
    (tmp_path / "names.txt").write_text("\n".join(names))
    held = {"model": model.state_dict(), "opts": [one.state_dict() for one in made]}
    held["schedule"] = torch.optim.lr_scheduler.StepLR(made[1], 3).state_dict()
    torch.save(held, tmp_path / "a.pt")
    for call in ("torch_file()", "dcp(fsdp=2)", "zero1(dp=2)"):
        found = refused(tmp_path / "a.pt", tmp_path / "no", call)
        assert found.code == "E447" and "opts/0" in found.message and "--order" in found.remedy
    order: State = {"order": str(tmp_path / "names.txt")}
    found = refused(tmp_path / "a.pt", tmp_path / "no", "zero1(dp=2)", **order)
    assert found.code == "E448" and "(momentum_buffer)" in found.message
    ucpl.convert(tmp_path / "a.pt", tmp_path / "b.pt", 'torch_file(optimizer="opts")', **order)
    other, again = odd_job(two)
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    other.load_state_dict(back["model"])
    for one, state in zip(again, back["opts"], strict=True):
        one.load_state_dict(state)
    assert odd_steps(other, again) == odd_steps(model, made)


OF_TWO: dict[str, Callable[[State, State], State]] = {
    "keys": lambda one, other: {"opt_a": one, "opt_b": other},
    "a dict": lambda one, other: {"optimizers": {"a": one, "b": other}},
    "alike keys": lambda one, other: {"gen": {"optimizer": one, "x": 1}, "disc": {"optimizer": other, "y": 2}},
    "a list": lambda one, other: {"optimizers": [one, other]},
}


@pytest.mark.parametrize("form", OF_TWO)
@pytest.mark.parametrize("via", ["", "dcp(fsdp=2)", "plain()"])
def test_several_optimizers_stay_where_the_script_has_them(via: str, form: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    both = [torch.optim.AdamW(one.parameters(), lr=lr) for one, lr in zip(model, (0.5, 0.25), strict=True)]
    model(torch.ones(1, 2)).sum().backward()
    for one in both:
        one.step()
    made = {"model": model.state_dict(), **OF_TWO[form](*(one.state_dict() for one in both))}
    torch.save(made, tmp_path / "one.pt")
    source = tmp_path / "one.pt"
    if via:
        ucpl.convert(source, tmp_path / "there", via)
        source = tmp_path / "there"
    ucpl.convert(source, tmp_path / "out", "torch_file()")
    found, wanted = (tree_leaves_with_path(dict(one)) for one in (loaded(tmp_path / "out"), made))
    assert sorted(map(str, found)) == sorted(map(str, wanted))


def test_schedules_of_one_of_several_optimizers_are_not_for_other_groups(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
    made = [
        torch.optim.AdamW(model[0].parameters()),
        torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[2].parameters()}]),
    ]
    model(torch.ones(2, 3)).sum().backward()
    for one in made:
        one.step()
    held = {"model": model.state_dict(), "opts": [one.state_dict() for one in made]}
    held["schedules"] = [torch.optim.lr_scheduler.StepLR(one, 3).state_dict() for one in made]
    torch.save(held, tmp_path / "a.pt")
    gone = ("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "dcp(fsdp=2)", "--drop", "2.*")
    printed = command(*gone).err
    assert "E482" in printed and "schedules/0/base_lrs" in printed and "--drop 'schedules'" in printed
    assert command(*gone, "--drop", "schedules").status == 0


def test_numbers_of_a_flattened_optimizer_are_in_the_models_order(tmp_path: Path) -> None:
    """Parameters without elements and frozen ones have their numbers between the others."""

    def make(model: Any) -> list[torch.optim.Optimizer]:
        model.a.requires_grad_(False)
        return [torch.optim.AdamW(model.parameters())]

    def job() -> tuple[Odd, list[torch.optim.Optimizer]]:
        return odd_job(make)

    model, (adam,) = job()
    held = get_state_dict(model, adam, options=StateDictOptions(flatten_optimizer_state_dict=True))
    save_chunks(dict(zip(("model", "optim"), held, strict=True)), checkpoint_id=tmp_path / "chunks")
    ucpl.convert(tmp_path / "chunks", tmp_path / "a.pt", "torch_file()")
    back = torch.load(tmp_path / "a.pt", weights_only=True)
    other, (again,) = job()
    other.load_state_dict(back["model"])
    again.load_state_dict(back["optimizer"])
    assert odd_steps(other, [again]) == odd_steps(model, [adam])


def test_steps_in_tensors_of_one_dim_reach_a_universal_folder_of_stage_3(tmp_path: Path) -> None:
    model, (adam,) = odd_job(lambda m: [torch.optim.AdamW(m.parameters())])
    held = {"model": model.state_dict(), "optimizer": adam.state_dict()}
    for states in held["optimizer"]["state"].values():
        states["step"] = states["step"].reshape(1)
    torch.save(held, tmp_path / "a.pt")
    for source, target, call in (
        ("a.pt", "3", "zero3(dp=2)"),
        ("3", "u", "universal()"),
        ("u", "b.pt", "torch_file()"),
    ):
        ucpl.convert(tmp_path / source, tmp_path / target, call)
    found = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["state"]
    assert {tuple(states["step"].tolist()) for states in found.values()} == {(2.0,)}


def test_an_optimizer_with_its_scaler_gets_the_place_that_the_message_names(tmp_path: Path) -> None:
    """Apex's FP16_Optimizer keeps its loss scale around torch's state dict."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    inside = {"optimizer": optimizer.state_dict(), "loss_scaler": {"scale": 1024.0}}
    torch.save({"model": model.state_dict(), "optimizer": inside}, tmp_path / "run.pt")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "dcp", "dcp(fsdp=2)")
    with pytest.raises(UcplError, match="E471: two values of the target have the key `optimizer`") as refused:
        ucpl.convert(tmp_path / "dcp", tmp_path / "a.pt", "torch_file()")
    call = 'torch_file(optimizer = "optimizer/optimizer")'
    assert f"or {call} gives the optimizer another key" in refused.value.diagnostics[0].remedy
    ucpl.convert(tmp_path / "dcp", tmp_path / "b.pt", call)
    made = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]
    assert made["loss_scaler"] == {"scale": 1024.0}
    optimizer.load_state_dict(made["optimizer"])
