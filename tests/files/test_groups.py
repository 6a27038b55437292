"""Parameters of a target keep their hyper-parameters in any grouping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import ucpl
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint
from ucpl.registry import format_named

SHAPES = {"a": (6, 4), "b": (6,), "c": (5,), "d": (3, 2)}
RATES = {"a": 0.1, "b": 0.02, "c": 0.02, "d": 0.003}
DECAYS = {"a": 0.3, "b": 0.0, "c": 0.0, "d": 0.3}
GROUPS = (("a",), ("b", "c"), ("d",))
TARGETS = (
    "zero1(dp = 2)", "zero0(dp = 1)", "zero2(dp = 2)", "zero3(dp = 2)", "universal()", "dcp(fsdp = 2)",
    "dcp(fsdp = 2, flat = 1)", "plain()", "torch_file()",
)  # fmt: skip

# Groups of a target: each name with its members, and the options that its parameters need.
REGROUPED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "renamed and in another order": ({"last": "d", "norms": "b, c", "first": "a"}, {}),
    "called as others were": ({"1": "a", "2": "c, b", "0": "d"}, {}),
    "split": ({"x": "b", "y": "a", "z": "c", "w": "d"}, {}),
    "new beside old": ({"0": "a", "1": "b, n, c", "2": "d"}, {"fill": ["n=0"], "train": ["n"]}),
    "new in a group of its own": (
        {"0": "a", "new": "n", "1": "b, c", "2": "d"},
        {"fill": ["n=0"], "train": ["n=new:2"]},
    ),
    "one dropped": ({"2": "d", "1": "c, b"}, {"drop": ["a"]}),
}


def source(folder: Path, rates: dict[str, float] | None = None) -> Path:
    """A plain file of three groups, with a schedule of each."""
    rates = RATES if rates is None else rates
    state: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in SHAPES.items():
        weight = torch.randn(shape)
        moments = {"exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        state[name] = {"weight": weight, "fp32": weight.clone(), **moments, "step": torch.tensor(3.0)}
    groups = [
        {"lr": rates[g[0]], "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": DECAYS[g[0]], "params": list(g)}
        for g in GROUPS
    ]
    schedule = {"base_lrs": [rates[g[0]] for g in GROUPS], "last_epoch": 3}
    torch.save({"params": state, "groups": groups, "scalars": {"lr_scheduler": schedule}}, folder / "source.pt")
    return folder / "source.pt"


def model(folder: Path, groups: dict[str, str]) -> str:
    """A text with the groups of a target."""
    shapes = {**SHAPES, "n": (2, 2)}
    named = [name.strip() for members in groups.values() for name in members.split(",")] or list(SHAPES)
    lines = [f"  {name} : {' '.join(map(str, shapes[name]))} dtype f32" for name in shapes if name in named]
    lines += [f'  group "{name}" = {members}' for name, members in groups.items()]
    lines += ["  state fp32, exp_avg, exp_avg_sq : f32", "  state step : f32 scalar"]
    text = "ucpl 1\nmodel m {\n" + "\n".join(lines) + "\n}\n"
    (folder / "m.ucpl").write_text(text)
    return f"{folder / 'm.ucpl'}:m"


def told(checkpoint: Path, folder: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Hyper-parameters of each parameter, groups, and scalars of one plain file."""
    ucpl.convert(checkpoint, folder / "back.pt", "plain()")
    found = torch.load(folder / "back.pt", weights_only=True)
    return {name: group for group in found["groups"] for name in group["params"]}, found["groups"], found


@pytest.mark.parametrize("case", REGROUPED)
@pytest.mark.parametrize("target", TARGETS)
def test_each_parameter_keeps_its_hyper_parameters(target: str, case: str, tmp_path: Path) -> None:
    groups, options = REGROUPED[case]
    made = ucpl.convert(source(tmp_path), tmp_path / "made", target, model=model(tmp_path, groups), **options)
    assert made is not None
    of, held, _ = told(tmp_path / "made", tmp_path)
    rates, decays = ({**known, "n": known["d" if "new" in groups else "b"]} for known in (RATES, DECAYS))
    names = {name.strip() for members in groups.values() for name in members.split(",")}
    assert {name: (one["lr"], one["weight_decay"]) for name, one in of.items()} == {
        name: (rates[name], decays[name]) for name in names
    }
    if "flat" not in target:  # where equal hyper-parameters make a group
        assert [one["params"] for one in held] == [members.split(", ") for members in groups.values()]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("groups", "first", "second"),
    [({"x": "a, b", "y": "c, d"}, "a", "b"), ({}, "a", "b"), ({"0": "d, a", "1": "b, c"}, "d", "a")],
)
def test_members_that_disagree_are_refused(
    target: str, groups: dict[str, str], first: str, second: str, tmp_path: Path
) -> None:
    with pytest.raises(UcplError) as caught:
        ucpl.convert(source(tmp_path), tmp_path / "made", target, model=model(tmp_path, groups))
    (error,) = caught.value.diagnostics
    assert error.code == "E482"
    assert f"`{first}`, whose lr is {RATES[first]}, and `{second}`, whose lr is {RATES[second]}" in error.message
    assert "weight_decay" in error.message or DECAYS[first] == DECAYS[second]
    assert f"= {first}`" in error.remedy
    assert not (tmp_path / "made").exists()


def test_groups_that_agree_may_be_joined(tmp_path: Path) -> None:
    made = source(tmp_path, {**RATES, "d": 0.1})  # as that of a, and its decay is the same
    for n, target in enumerate(TARGETS):
        ucpl.convert(made, tmp_path / str(n), target, model=model(tmp_path, {"norms": "b, c", "rest": "d, a"}))
        of, _, _ = told(tmp_path / str(n), tmp_path)
        (tmp_path / "back.pt").unlink()
        assert {name: one["lr"] for name, one in of.items()} == {"a": 0.1, "b": 0.02, "c": 0.02, "d": 0.1}


def test_a_group_of_new_parameters_is_refused_without_values(tmp_path: Path) -> None:
    grown = model(tmp_path, {"0": "a", "2": "n", "1": "b, c", "3": "d"})
    for target in TARGETS:
        with pytest.raises(UcplError) as caught:
            ucpl.convert(source(tmp_path), tmp_path / "made", target, model=grown, fill=["n=0"], train=["n"])
        (error,) = caught.value.diagnostics
        assert (error.code, "--train 'n=2:0'" in error.remedy) == ("E483", True)
    ucpl.convert(source(tmp_path), tmp_path / "made", "plain()", model=grown, fill=["n=0"], train=["n=2:1"])
    of, _, _ = told(tmp_path / "made", tmp_path)
    assert (of["n"]["lr"], of["n"]["weight_decay"]) == (0.02, 0.0)


@pytest.mark.parametrize(("target", "how"), [(target, ("drop", "freeze")[n % 2]) for n, target in enumerate(TARGETS)])
def test_a_group_that_a_parameter_joins_keeps_its_values_whoever_leaves(target: str, how: str, tmp_path: Path) -> None:
    value = torch.load(source(tmp_path), weights_only=True)
    value["params"] |= {name: {"weight": torch.ones(5, 2)} for name in ("f", "g", "idle")}
    value["envelope"] = {"in_groups": {"1": ["b", "c", "idle"]}}
    torch.save(value, tmp_path / "frozen.pt")
    leaves: dict[str, Any] = {how: ["a"]}
    ucpl.save_plan(
        ucpl.plan(str(tmp_path / "frozen.pt"), target, train=["f=0", "g=3:1"], **leaves), tmp_path / "one.plan"
    )
    ucpl.apply(tmp_path / "one.plan", tmp_path / "frozen.pt", tmp_path / "made")
    of, _, found = told(tmp_path / "made", tmp_path)
    assert {name: (one["lr"], one["weight_decay"]) for name, one in of.items()} == {
        "f": (0.1, 0.3), "b": (0.02, 0.0), "c": (0.02, 0.0), "d": (0.003, 0.3), "g": (0.02, 0.0)
    }  # fmt: skip
    if "dcp" not in target:
        kept = {**found["scalars"], **found["envelope"]["blobs"]}["lr_scheduler"]
        assert kept["base_lrs"] == [0.1, 0.02, 0.003, 0.02]
    if target == "plain()":
        assert found["envelope"]["in_groups"] == {"1": ["b", "c", "idle"]}, "and not in the group that is like it"


def test_a_schedule_has_the_places_of_the_target(tmp_path: Path) -> None:
    groups = {"norms": "c, b", "last": "d", "first": "a"}
    made = ucpl.plan(str(source(tmp_path)), "zero1(dp = 2)", model=model(tmp_path, groups))
    assert made.changed == (
        "group 0 (norms) has the hyper-parameters of the source's group 1",
        "group 1 (last) has the hyper-parameters of the source's group 2",
        "group 2 (first) has the hyper-parameters of the source's group 0",
    )
    ucpl.convert(source(tmp_path), tmp_path / "made", "plain()", model=model(tmp_path, groups))
    _, _, found = told(tmp_path / "made", tmp_path)
    kept = {**found["scalars"], **found["envelope"]["blobs"]}["lr_scheduler"]
    assert kept["base_lrs"] == [0.02, 0.003, 0.1]


def idle(folder: Path) -> Path:
    """The same with groups without trained parameters.

    One has a frozen parameter, as in DCP's optimizers, and one is empty.
    """
    value = torch.load(source(folder), weights_only=True)
    value["params"]["frozen"] = {"weight": torch.ones(3)}
    value["params"]["void"] = {"weight": torch.zeros(0), "exp_avg": torch.zeros(0), "step": torch.tensor(3.0)}
    value["groups"][0]["params"] = ["a", "void"]
    value["groups"].insert(0, {"lr": 5.0, "weight_decay": 0.5, "params": []})
    value["groups"].insert(2, {"lr": 6.0, "weight_decay": 0.6, "params": []})
    value["envelope"] = {"in_groups": {"0": ["frozen"]}}
    torch.save(value, folder / "idle.pt")
    return folder / "idle.pt"


@pytest.mark.parametrize("target", ["plain()", "dcp(fsdp = 2)"])
def test_groups_that_train_nothing_are_kept(target: str, tmp_path: Path) -> None:
    made = idle(tmp_path)
    ucpl.convert(made, tmp_path / "made", target)
    assert ucpl.compare(made, tmp_path / "made")
    _, held, found = told(tmp_path / "made", tmp_path)
    assert [one["lr"] for one in held] == [5.0, 0.1, 6.0, 0.02, 0.003]
    assert [[n for n in one["params"] if n != "void"] for one in held] == [[], ["a"], [], ["b", "c"], ["d"]]
    assert found["envelope"]["in_groups"] == {"0": ["frozen"]}
    assert held[1]["params"] == ["a", "void"] and set(found["params"]["void"]) == {"weight", "exp_avg", "step"}
    assert "frozen" not in {name for one in held for name in one["params"]}


def test_stage_3_keeps_groups_of_frozen_parameters(tmp_path: Path) -> None:
    """DeepSpeed takes groups without parameters out of the caller's optimizer."""
    (said,) = (text for text in ucpl.plan(str(idle(tmp_path)), "zero3(dp = 2)").dropped if "trains no" in text)
    assert said.startswith("group of 2: it trains no parameter")
    for via in ("zero3(dp = 2)", "dcp(fsdp = 2)", "plain()", "zero3(dp = 1)"):
        source, made = tmp_path / "idle.pt", tmp_path / via
        source = max((p for p in tmp_path.iterdir() if "(" in p.name), key=lambda p: p.stat().st_mtime, default=source)
        ucpl.convert(source, made, via)
    _, held, _ = told(tmp_path / "zero3(dp = 1)", tmp_path)
    assert [one["lr"] for one in held] == [5.0, 0.1, 0.02, 0.003]


def test_torch_numbers_a_group_of_frozen_parameters_without_zero(tmp_path: Path) -> None:
    (said,) = (text for text in ucpl.plan(str(idle(tmp_path)), "zero0(dp = 1)").dropped if "trains no" in text)
    assert said.startswith("group of 2: it trains no parameter")
    ucpl.convert(idle(tmp_path), tmp_path / "made", "zero0(dp = 1)")
    (file,) = (tmp_path / "made").glob("*/mp_rank_00_model_states.pt")
    groups = torch.load(file, weights_only=False)["optimizer"]["param_groups"]
    assert [(group["lr"], len(group["params"])) for group in groups] == [(5.0, 1), (0.1, 2), (0.02, 2), (0.003, 1)]


@pytest.mark.parametrize("target", ["zero1(dp = 2)", "zero2(dp = 2)", "universal()"])
def test_groups_that_train_nothing_are_named_where_no_loader_has_them(target: str, tmp_path: Path) -> None:
    made = idle(tmp_path)
    said = ucpl.plan(str(made), target).dropped
    assert sum("trains no parameter" in text for text in said) == 2
    ucpl.convert(made, tmp_path / "made", target)
    of, held, _ = told(tmp_path / "made", tmp_path)
    assert len(held) == 3 and {name: one["lr"] for name, one in of.items()} == RATES


def test_frozen_members_of_a_group_get_a_number_without_zero(tmp_path: Path) -> None:
    value = torch.load(source(tmp_path), weights_only=True)
    value["params"]["frozen"] = {"weight": torch.ones(3)}
    value["envelope"] = {"in_groups": {"1": ["b", "frozen", "c"]}}
    torch.save(value, tmp_path / "mixed.pt")
    for target in ("zero0(dp = 1)", "zero1(dp = 2)", "plain()"):
        done = ucpl.convert(tmp_path / "mixed.pt", tmp_path / target, target)
        goal = done.plan.target
        said = format_named(goal.framework).advice(open_checkpoint(tmp_path / "mixed.pt"), goal)
        assert not any("has no number for them" in text for text in said)  # the source states their group
    ucpl.convert(tmp_path / "zero1(dp = 2)", tmp_path / "back", "zero0(dp = 1)")
    of, _, _ = told(tmp_path / "zero0(dp = 1)", tmp_path)
    assert {name: one["lr"] for name, one in of.items()} == RATES


def test_frozen_parameters_of_unknown_groups_are_named() -> None:
    """Files of ZeRO name no group of a frozen parameter."""
    frozen = Path(__file__).parents[1] / "fixtures" / "deepspeed" / "z2_dp3_frozen"
    for target, is_named in (("zero0(dp = 1)", True), ("zero1(dp = 2)", False)):
        goal = ucpl.plan(str(frozen), target).target
        notes = format_named(goal.framework).advice(open_checkpoint(frozen), goal)
        assert any("has no number for them" in text for text in notes) == is_named


def test_a_job_loads_a_folder_with_frozen_and_empty_groups(tmp_path: Path) -> None:
    """As torch's own loader says it, whatever the folder was in between."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    def job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        module = torch.nn.Module()
        for name, size in (("still", 3), ("w", 5), ("void", 0)):
            module.register_parameter(name, torch.nn.Parameter(torch.ones(size), requires_grad=name != "still"))
        groups = [
            {"params": [module.still], "lr": 0.1}, {"params": [module.w, module.void], "lr": 0.2}, {"params": [], "lr": 0.3}
        ]  # fmt: skip
        optimizer = torch.optim.AdamW(groups)
        (module.w.sum() + module.void.sum()).backward()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        return module, optimizer

    weights, states = get_state_dict(*job())
    save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "source")
    ucpl.convert(tmp_path / "source", tmp_path / "a.pt", "plain()")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["groups"][1]["params"] == ["w", "void"]
    for n, via in enumerate((tmp_path / "source", tmp_path / "a.pt")):
        ucpl.convert(via, tmp_path / str(n), "dcp(fsdp = 2)")
        module, optimizer = job()
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        held: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))
        load(held, checkpoint_id=tmp_path / str(n))
        set_state_dict(module, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"])
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.3]


def named_groups(folder: Path) -> Path:
    """A run with torch's `param_names`, a frozen group and a frozen member."""
    value = torch.load(source(folder), weights_only=True)
    value["params"] |= {name: {"weight": torch.ones(3)} for name in ("still", "bias")}
    value["groups"].insert(0, {"lr": 5.0, "weight_decay": 0.5, "params": []})
    listed = {"0": ["still"], "1": ["bias", "a"], "2": ["b", "c"], "3": ["d"]}
    for group, names in zip(value["groups"], listed.values(), strict=True):
        group["param_names"] = names
    value["envelope"] = {"in_groups": {g: names for g, names in listed.items() if g in "01"}}
    torch.save(value, folder / "named.pt")
    return folder / "named.pt"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_names_of_torch_state_the_frozen_members_of_shards(stage: int, tmp_path: Path) -> None:
    """DeepSpeed keeps `param_names` in shards whose groups number buffers."""
    ucpl.convert(named_groups(tmp_path), tmp_path / "made", f"zero{stage}(dp = {max(stage, 1)})")
    groups = open_checkpoint(tmp_path / "made").state.groups
    expected = [("still",), ("bias", "a"), ("b", "c"), ("d",)][0 if stage in (0, 3) else 1 :]
    assert [group.every for group in groups] == expected
    assert [group.hyper["param_names"] for group in groups] == [list(names) for names in expected]
    ucpl.convert(tmp_path / "made", tmp_path / "run", "torch_file()")
    optimizer = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["optimizer"]
    ids = [one["params"] for one in optimizer["param_groups"]]
    assert [len(some) for some in ids] == [len(names) for names in expected]
    for target in ("dcp(fsdp = 2, flat = 1)", "torch_file()"):
        is_named = any("states the groups of frozen" in text for text in noted(tmp_path / "made", target))
        assert is_named == (stage in (1, 2)), "which have no group of `still`"


@pytest.mark.parametrize("target", ["dcp(fsdp = 2)", "dcp(fsdp = 2, flat = 1)", "torch_file()", "zero0(dp = 1)"])
def test_frozen_members_that_no_file_states_are_named(target: str, tmp_path: Path) -> None:
    """The loader of torch counts a group's parameters or asks for keys."""
    ucpl.convert(idle(tmp_path), tmp_path / "made", "zero3(dp = 2)")
    (said,) = (text for text in noted(tmp_path / "made", target) if "states the groups of frozen" in text)
    assert "(frozen)" in said and "Group 0 has no other parameters" in said
    assert not any("states the groups of frozen" in text for text in noted(tmp_path / "made", "zero1(dp = 2)"))


def noted(path: Path, target: str) -> tuple[str, ...]:
    goal = ucpl.plan(str(path), target).target
    return format_named(goal.framework).advice(open_checkpoint(path), goal)


@pytest.mark.parametrize(
    "target",
    [
        "plain()",
        "torch_file()",
        "dcp(fsdp = 2)",
        "dcp(fsdp = 2, flat = 1)",
        "zero0(dp = 1)",
        "zero1(dp = 2)",
        "universal()",
    ],
)
def test_a_frozen_name_in_a_group_line_is_a_member_without_states(target: str, tmp_path: Path) -> None:
    """An engine's flat buffers have no frozen members, and refuse the line."""
    value = torch.load(source(tmp_path), weights_only=True)
    value["params"]["still"] = {"weight": torch.ones(3)}
    torch.save(value, tmp_path / "frozen.pt")
    text = Path(model(tmp_path, {"x": "a", "y": "b, still, c", "z": "d"}).removesuffix(":m")).read_text()
    (tmp_path / "still.ucpl").write_text(
        text.replace("  state fp32", "  still : 3 dtype f32 is frozen\n  state fp32", 1)
    )
    call = f"{tmp_path / 'still.ucpl'}:m"
    if target.startswith(("zero", "universal")):
        with pytest.raises(UcplError, match=r'E471: group "y" of the model has `still`, which is frozen'):
            ucpl.convert(tmp_path / "frozen.pt", tmp_path / "made", target, model=call)
        assert not (tmp_path / "made").exists()
        return
    ucpl.convert(tmp_path / "frozen.pt", tmp_path / "made", target, model=call)
    groups = open_checkpoint(tmp_path / "made").state.groups
    assert [(set(g.members), set(g.every)) for g in groups] == [
        ({"a"}, {"a"}), ({"b", "c"}, {"b", "still", "c"}), ({"d"}, {"d"})
    ]  # fmt: skip


# ---- folders of loops, written by their frameworks --------------------------------------------------------------------

FOLDERS = Path(__file__).parents[1] / "fixtures"
OF_LOOP = {
    "embed.weight": (16, 8), "mix.weight": (8, 8), "mix.bias": (8,), "up.weight": (12, 8), "head.weight": (16, 12),
    "head.bias": (16,), "n": (2, 2),
}  # fmt: skip
IN_LOOP = (("still", "embed.weight", "mix.weight"), ("mix.bias", "head.bias"), ("up.weight", "head.weight"))
FIRST, SECOND, THIRD = (", ".join(name for name in names if name != "still") for names in IN_LOOP)
LOOP_CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "renamed and in another order": ({"last": THIRD, "norms": SECOND, "first": FIRST}, {}),
    "called as others were": ({"1": FIRST, "2": "head.bias, mix.bias", "0": THIRD}, {}),
    "split": ({"x": "mix.bias", "y": FIRST, "z": "head.bias", "w": THIRD}, {}),
    "new beside old": ({"0": FIRST, "1": "mix.bias, n, head.bias", "2": THIRD}, {"fill": ["n=0"], "train": ["n"]}),
    "new in a group of its own": (
        {"0": FIRST, "new": "n", "1": SECOND, "2": THIRD},
        {"fill": ["n=0"], "train": ["n=new:1"]},
    ),
    "one dropped": ({"2": THIRD, "1": SECOND}, {"drop": ["embed.weight", "mix.weight"]}),
}


def loop_model(folder: Path, groups: dict[str, str]) -> str:
    named = [name for members in groups.values() for name in members.split(", ")]
    lines = [f'  "{n}" : {" ".join(map(str, shape))} dtype f32' for n, shape in OF_LOOP.items() if n in named]
    lines += ["  still : 3 dtype f32 is frozen"]
    lines += [f'  group "{g}" = ' + ", ".join(f'"{n}"' for n in members.split(", ")) for g, members in groups.items()]
    lines += ["  state exp_avg, exp_avg_sq : f32", "  state step : f32 scalar"]
    (folder / "loop.ucpl").write_text("ucpl 2\nmodel m {\n" + "\n".join(lines) + "\n}\n")
    return f"{folder / 'loop.ucpl'}:m"


def lightning(folder: Path) -> Path:
    """The run of the Trainer as a file of Lightning."""
    run = FOLDERS / "trainer" / "without_engine"
    weights = load_file(run / "model.safetensors")
    optimizer, schedule = (torch.load(run / f"{name}.pt", weights_only=True) for name in ("optimizer", "scheduler"))
    in_order = {name: weights[name] for name in ("still", *(name for name in OF_LOOP if name != "n"))}
    value = {"epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.6.6", "state_dict": in_order, "loops": {}}
    torch.save(value | {"optimizer_states": [optimizer], "lr_schedulers": [schedule]}, folder / "run.ckpt")
    return folder / "run.ckpt"


def run_of(kind: str, folder: Path) -> Path:
    return lightning(folder) if kind == "lightning" else FOLDERS / kind / "without_engine"


@pytest.mark.parametrize("case", LOOP_CASES)
@pytest.mark.parametrize("kind", ["trainer", "accelerate", "lightning"])
def test_torch_loads_each_parameter_of_a_loop_with_its_values(kind: str, case: str, tmp_path: Path) -> None:
    """A frozen member stays in its group; states go by name."""
    groups, how = LOOP_CASES[case]
    run = run_of(kind, tmp_path)
    before = torch.load(FOLDERS / "trainer" / "without_engine" / "optimizer.pt", weights_only=True)
    if kind == "accelerate":
        before = torch.load(run / "optimizer.bin", weights_only=True)
    numbers = dict(enumerate(name for names in IN_LOOP for name in names))
    values = {
        numbers[n]: (g["lr"], g["weight_decay"], g["initial_lr"]) for g in before["param_groups"] for n in g["params"]
    }
    states = {numbers[n]: one for n, one in before["state"].items()}
    values["n"] = values["mix.bias"]
    target = "torch_file()" if kind == "lightning" else f"{kind}(dp = 1)"
    left = [*how.get("drop", ()), *(file.name for file in run.glob("scheduler.*"))]
    ucpl.convert(run, tmp_path / "made", target, model=loop_model(tmp_path, groups), **{**how, "drop": left})
    expected = [members.split(", ") for members in groups.values()]
    for names in expected:
        if "embed.weight" in names:
            names.insert(0, "still")
    if kind == "lightning":
        found = torch.load(tmp_path / "made" / "checkpoint.pt", weights_only=False)
        loaded, (schedule,) = found["optimizer_states"][0], found["lr_schedulers"]
        assert schedule["base_lrs"] == [values[names[-1]][2] for names in expected]
        assert schedule["_last_lr"] == [values[names[-1]][0] for names in expected]
        assert "lr_scheduler" not in found
    else:
        loaded = torch.load(next((tmp_path / "made").glob("optimizer.*")), weights_only=True)
    shapes = {**OF_LOOP, "still": (3,)}
    held = {n: torch.nn.Parameter(torch.zeros(shapes[n]), requires_grad=n != "still") for ns in expected for n in ns}
    optimizer = torch.optim.AdamW([{"params": [held[name] for name in names]} for names in expected])
    optimizer.load_state_dict(loaded)
    for group, names in zip(optimizer.param_groups, expected, strict=True):
        for name in names:
            assert (group["lr"], group["weight_decay"], group["initial_lr"]) == values[name], name
            for state, value in states.get(name, {}).items():
                assert torch.equal(optimizer.state[held[name]][state], value), (name, state)


@pytest.mark.parametrize("kind", ["trainer", "accelerate", "lightning"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_run_of_a_loop_is_regrouped_for_each_form(kind: str, target: str, tmp_path: Path) -> None:
    groups, how = LOOP_CASES["called as others were"]
    run = run_of(kind, tmp_path)
    target = target if kind == "lightning" else target.replace(", flat = 1", "")  # which no loop loads (E486)
    ucpl.convert(run, tmp_path / "made", target, model=loop_model(tmp_path, groups), **how)
    of, _, _ = told(tmp_path / "made", tmp_path)
    assert {of[name]["initial_lr"] for name in FIRST.split(", ")} == {0.001}
    assert {of[name]["initial_lr"] for name in SECOND.split(", ")} == {0.002}
    assert {of[name]["initial_lr"] for name in THIRD.split(", ")} == {0.003}


@pytest.mark.parametrize("kind", ["trainer", "accelerate"])
@pytest.mark.parametrize("case", ["renamed and in another order", "new in a group of its own", "one dropped"])
def test_a_file_with_a_schedule_of_other_groups_is_refused(kind: str, case: str, tmp_path: Path) -> None:
    """Its first rates are by position; `--drop` takes it out by name."""
    groups, how = LOOP_CASES[case]
    run = run_of(kind, tmp_path)
    file = next(run.glob("scheduler.*")).name
    with pytest.raises(UcplError, match=rf"E482: {file} has base_lrs") as caught:
        ucpl.plan(str(run), f"{kind}(dp = 1)", model=loop_model(tmp_path, groups), **how)
    assert f"--drop {file}" in caught.value.diagnostics[0].remedy
    ucpl.convert(run, tmp_path / "made", f"{kind}(dp = 1)")
    assert (tmp_path / "made" / file).read_bytes() == (run / file).read_bytes()


NORMS_APART = """ucpl 2
from "dcp.ucpl" import dcp
model m {
  a : 6 4  dtype f32
  b : 6    dtype f32
  c : 5    dtype f32
  group norms = c, b
  group rest  = a
  state exp_avg, exp_avg_sq : f32
}
layout chunks() of m extends dcp(fsdp = 1) {
}
"""


@pytest.mark.parametrize("target", ["plain()", "zero1(dp = 2)", "dcp(fsdp = 3)"])
def test_groups_of_a_spec_of_the_source_are_by_parameter(target: str, tmp_path: Path) -> None:
    """The job's first group is the spec's last."""
    module = torch.nn.ParameterDict({name: torch.randn(SHAPES[name]) for name in "abc"})
    groups = [{"params": [module[n] for n in names], "lr": RATES[names[0]]} for names in ("a", "bc")]
    optimizer = torch.optim.AdamW(groups)
    sum(value.sum() for value in module.values()).backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(module, optimizer)
    save({"model": model_state, "optim": optimizer_state}, checkpoint_id=tmp_path / "job", no_dist=True)
    (tmp_path / "s.ucpl").write_text(NORMS_APART)
    ucpl.convert(tmp_path / "job", tmp_path / "made", target, layout=f"{tmp_path / 's.ucpl'}:chunks()")
    of, _, _ = told(tmp_path / "made", tmp_path)
    assert {name: group["lr"] for name, group in of.items()} == {name: RATES[name] for name in "abc"}
