"""Parameters of a target keep their hyper-parameters in any grouping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
    assert [(group["lr"], len(group["params"])) for group in groups] == [(5.0, 1), (0.1, 1), (0.02, 2), (0.003, 1)]


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
