"""Parameters that are dropped, frozen or newly trained, at every stage.

All other values stay bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.cli.command import ucpl as command
from tests.gathered import plain_of
from ucpl.api import open_checkpoint
from ucpl.conversion.changes import Changes, Dealt
from ucpl.conversion.changing import changed_model
from ucpl.errors import UcplError
from ucpl.language import nodes, parse

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed"
FROZEN = FIXTURES / "z2_dp3_frozen"
TARGETS = ["zero0(dp = 2)", "zero1(dp = 2)", "zero2(dp = 4)", "zero3(dp = 2, sub_group_size = 900)"]
MOMENTS = ("exp_avg", "exp_avg_sq")


def truth_of(source: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Full tensors, gathered from the engines that wrote the checkpoint."""
    found: dict[str, dict[str, torch.Tensor]] = torch.load(source / "truth.pt", weights_only=False)["params"]
    return found


def held(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """The content of a checkpoint, as one plain file."""
    ucpl.convert(checkpoint, folder / "plain.pt", "plain()")
    found: dict[str, Any] = torch.load(folder / "plain.pt", weights_only=True)
    return found


def kept(found: dict[str, Any], truth: dict[str, dict[str, torch.Tensor]], names: set[str]) -> list[str]:
    """Names of values that differ from those of the engines."""
    return [
        f"{state} of {name}"
        for name in names
        for state in ("fp32", *MOMENTS)
        if not torch.equal(
            found["params"][name][state if state in found["params"][name] else "weight"], truth[name][state]
        )
    ]


def members(found: dict[str, Any]) -> list[list[str]]:
    return [list(group["params"]) for group in found["groups"]]


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_frozen_is_trained_from_here_on(target: str, tmp_path: Path) -> None:
    made = ucpl.convert(FROZEN, tmp_path / "new", target, train=["wpe.weight"])
    (said,) = made.plan.changed
    assert said.startswith("trained by --train wpe.weight: wpe.weight, 216 elements, in group 0 (where all trained")
    found, truth = held(tmp_path / "new", tmp_path), truth_of(FROZEN)
    assert members(found)[0][:3] == ["mix", "wte.weight", "wpe.weight"], "where the model has it"
    mine = found["params"]["wpe.weight"]
    assert torch.equal(mine["weight"], truth["wpe.weight"]["frozen"])
    assert "fp32" not in mine or torch.equal(mine["fp32"], mine["weight"])
    assert not any(mine[state].count_nonzero() for state in MOMENTS)
    assert float(mine["step"]) == 3.0, "as the others'"
    assert kept(found, truth, set(truth) - {"wpe.weight"}) == []


@pytest.mark.parametrize("target", TARGETS[1:])
def test_what_is_frozen_keeps_its_weight_and_nothing_else(target: str, tmp_path: Path) -> None:
    made = ucpl.convert(FROZEN, tmp_path / "new", target, freeze=["*.mlp.*", "wte.weight"])
    assert "frozen by --freeze *.mlp.*: 6 tensors, 5,376 elements" in made.plan.changed[0]
    found, truth = held(tmp_path / "new", tmp_path), truth_of(FROZEN)
    gone = {name for name in truth if ".mlp." in name} | {"wte.weight"}
    for name in gone:
        assert set(found["params"][name]) == {"weight"}
        assert torch.equal(found["params"][name]["weight"], truth[name]["fp32"])
    assert gone.isdisjoint({name for group in members(found) for name in group})
    assert found["aliases"] == {"lm_head.weight": "wte.weight"}
    assert kept(found, truth, set(truth) - gone - {"wpe.weight"}) == []


def test_numbers_that_have_frozen_ones_of_their_shape_are_read_again(tmp_path: Path) -> None:
    """ZeRO-0 numbers its parameters.

    Targets written here also name them, where DeepSpeed does not look.
    """
    ucpl.convert(FROZEN, tmp_path / "new", "zero0(dp = 2)", freeze=["*.mlp.*"])
    found, truth = held(tmp_path / "new", tmp_path), truth_of(FROZEN)
    gone = {name for name in truth if ".mlp." in name}
    assert {name for name in truth if set(found["params"][name]) == {"weight"}} == gone | {"wpe.weight"}
    assert kept(found, truth, set(truth) - gone - {"wpe.weight"}) == []
    new = torch.load(next((tmp_path / "new").glob("*/mp_rank_00_model_states.pt")), weights_only=False)
    assert [len(group["params"]) for group in new["optimizer"]["param_groups"]] == [6, 13]
    truth = truth_of(FROZEN)
    state = new["optimizer"]["state"]
    assert torch.equal(state[1]["exp_avg"], truth["wte.weight"]["exp_avg"])
    assert torch.equal(state[5]["exp_avg_sq"], truth["blocks.1.attn.o_proj.weight"]["exp_avg_sq"])


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_dropped_is_gone_and_counted(target: str, tmp_path: Path) -> None:
    made = ucpl.convert(FROZEN, tmp_path / "new", target, drop=["blocks.1.*", "calls", "lm_head.weight"])
    assert made.plan.changed == (
        "left out by --drop blocks.1.*: 10 tensors, 4,360 elements (blocks.1.ln1.weight, blocks.1.ln1.bias,"
        " blocks.1.attn.qkv.weight and 7 more)",
        "left out by --drop calls: 1 tensor, 3 elements (calls)",
        "left out by --drop lm_head.weight: the second name lm_head.weight; its numbers stay, as wte.weight",
    )
    found, truth = held(tmp_path / "new", tmp_path), truth_of(FROZEN)
    left = {name for name in truth if not name.startswith("blocks.1.")}
    assert set(found["params"]) == left and not found["buffers"] and not found["aliases"]
    assert {name for group in members(found) for name in group} == left - {"wpe.weight"}
    assert kept(found, truth, left - {"wpe.weight"}) == []
    likeness = ucpl.compare(FROZEN, tmp_path / "new")
    assert not likeness and "blocks.1.ln1.bias" in {d.name for d in likeness.differences}, "compare says it"


def test_a_group_without_a_parameter_goes_with_its_place_in_the_schedule(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "examples" / "checkpoint"
    made = ucpl.convert(source, tmp_path / "new", "zero1(dp = 3)", freeze=["*.bias", "norm.weight"], drop=["seen"])
    assert made.plan.changed[-2:] == (
        "left out: group 1 and its hyper-parameters, since it has no parameter left",
        "left out: the places of these groups in lr_scheduler (base_lrs, _last_lr, lr_lambdas)",
    )
    new = torch.load(next((tmp_path / "new").glob("*/mp_rank_00_model_states.pt")), weights_only=False)
    old = torch.load(source / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)
    assert new["lr_scheduler"]["base_lrs"] == old["lr_scheduler"]["base_lrs"][:1]
    assert new["lr_scheduler"]["last_epoch"] == old["lr_scheduler"]["last_epoch"]
    assert len(new["param_shapes"]) == 1 and "seen" not in new["module"] and new["buffer_names"] == []
    again = ucpl.plan(str(tmp_path / "new"), "zero1(dp = 1)", train=["norm.*"])
    assert "in group 0 (the only one)" in again.changed[0]


@pytest.mark.parametrize("target", TARGETS)
def test_a_new_group_has_the_hyper_parameters_of_another(target: str, tmp_path: Path) -> None:
    """It is behind the others, with a place in the schedule.

    A plan of a file says it, too.
    """
    plan = ucpl.plan(str(FROZEN), target, train=["wpe.weight=mine:1"])
    assert "group mine is new, behind the others, with the hyper-parameters of 1" in plan.changed
    assert plan.changed[-1].startswith("new groups have places in lr_scheduler (base_lrs")
    ucpl.save_plan(plan, tmp_path / "a.plan")
    ucpl.apply(tmp_path / "a.plan", FROZEN, tmp_path / "new")
    before, after = plain_of(FROZEN), held(tmp_path / "new", tmp_path)
    assert members(after) == [*members(before), ["wpe.weight"]]
    hyper = [{k: v for k, v in group.items() if k not in ("params", "name")} for group in after["groups"]]
    assert hyper[2] == hyper[1] != hyper[0]
    schedule = open_checkpoint(tmp_path / "new").state.blobs["lr_scheduler"]
    assert isinstance(schedule, dict) and schedule["base_lrs"][2] == schedule["base_lrs"][1] != schedule["base_lrs"][0]
    assert len(schedule["base_lrs"]) == 3


@pytest.mark.parametrize(
    ("train", "text"),
    [
        (["wpe.weight=2:7"], "there is no group 7 whose hyper-parameters group 2 could have"),
        (["wpe.weight=1:0"], "group 1 is there"),
        (["wpe.weight=:0"], "a new one has a name of its own"),
    ],
)
def test_a_new_group_is_like_one_that_there_is(train: list[str], text: str) -> None:
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(FROZEN), "zero1(dp = 2)", train=train)
    assert caught.value.diagnostics[0].code == "E329" and text in caught.value.diagnostics[0].message


def test_a_plan_is_applied_where_nothing_else_is_known(tmp_path: Path) -> None:
    plan = ucpl.plan(str(FROZEN), "zero3(dp = 2)", train=["wpe.weight=1"], drop=["calls"], freeze=["mix"])
    ucpl.save_plan(plan, tmp_path / "a.plan")
    assert ucpl.load_plan(tmp_path / "a.plan").gone == plan.gone
    assert ucpl.load_plan(tmp_path / "a.plan").changed == plan.changed
    ucpl.apply(tmp_path / "a.plan", FROZEN, tmp_path / "new")
    found = held(tmp_path / "new", tmp_path)
    assert members(found)[1][:2] == ["temp", "wpe.weight"], "given"
    assert "mix" not in members(found)[0] and "step" not in found["params"]["mix"]


def test_bf16_masters_are_made_of_the_weights_that_were_frozen(tmp_path: Path) -> None:
    source = FIXTURES / "z1_dp2_bf16opt"
    ucpl.convert(source, tmp_path / "frozen", "zero1(dp = 3)", freeze=["wpe.weight", "ln_f.*"])
    ucpl.convert(tmp_path / "frozen", tmp_path / "new", "zero3(dp = 2)", train=["wpe.weight", "ln_f.*"])
    found, truth = held(tmp_path / "new", tmp_path), truth_of(source)
    was = {name for group in members(plain_of(source)) for name in group}
    assert {name for group in members(found) for name in group} == was
    for name in ("wpe.weight", "ln_f.weight", "ln_f.bias"):
        rounded = truth[name]["fp32"].bfloat16()
        assert torch.equal(found["params"][name]["weight"], rounded)
        assert torch.equal(found["params"][name]["fp32"], rounded.float())
    assert kept(found, truth, was - {"wpe.weight", "ln_f.weight", "ln_f.bias"}) == []


def test_a_number_of_ones_own_wins(tmp_path: Path) -> None:
    plan = ucpl.plan(str(FROZEN), "zero0(dp = 1)", train=["wpe.weight"], fill=["exp_avg=1", "state step=0"])
    assert plan.begun == {"step": {"wpe.weight": 0.0}}
    assert plan.filled[:2] == (
        "exp_avg with 1: 216 elements of `wpe.weight` (the source lacks them)",
        "exp_avg_sq with 0: 216 elements of `wpe.weight` (the source lacks them)",
    )


def test_moments_that_all_lack_are_not_made_in_silence(tmp_path: Path) -> None:
    ucpl.convert(FROZEN, tmp_path / "weights.pt", "plain()", drop=[*MOMENTS, "step"])
    plan = ucpl.plan(str(tmp_path / "weights.pt"), "zero1(dp = 2)", train=["wpe.weight"])
    assert plan.filled == () and "exp_avg" not in {s.state for s in plan.target_shelves.shelves}


REFUSED = [
    ({"drop": ["wte.weight"]}, "E328", "lm_head.weight is a second name of it that is not"),
    ({"drop": ["*"]}, "E328", "every tensor is dropped"),
    ({"freeze": ["*"]}, "E328", "no trained parameter is left"),
    ({"drop": ["x.*"]}, "E300", "it matches no tensor"),
    ({"freeze": ["wpf.weight"]}, "E300", "no parameter of that name"),
    ({"freeze": ["wpe.weight"]}, "E327", "frozen already"),
    ({"freeze": ["calls"]}, "E327", "a buffer"),
    ({"train": ["mix"]}, "E327", "trained already"),
    ({"train": ["wpe.weight"], "drop": ["wpe.*"]}, "E327", "is dropped"),
    ({"freeze": ["mix"], "drop": ["mix"]}, "E327", "is dropped"),
    ({"train": ["wpe.weight=0", "wpe.*=1"]}, "E327", "in two groups"),
    ({"train": ["wpe.weight=decay"]}, "E329", "no group decay"),
]


@pytest.mark.parametrize(("how", "code", "text"), REFUSED)
def test_what_cannot_be_is_refused_with_what_to_write(how: Any, code: str, text: str) -> None:
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(FROZEN), "zero1(dp = 2)", **how)
    (said,) = caught.value.diagnostics
    assert said.code == code and text in said.message, said


def test_of_several_groups_that_it_could_be_in_one_is_named(tmp_path: Path) -> None:
    source = tmp_path / "two.pt"
    w = {"weight": torch.ones(2, 2), "exp_avg": torch.ones(2, 2), "step": 1}
    torch.save(
        {
            "params": {"a": w, "b": {**w, "step": 2}, "c": {"weight": w["weight"]}},
            "groups": [{"params": ["a"]}, {"params": ["b"]}],
        },
        source,
    )
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(source), "plain()", train=["c"])
    assert caught.value.diagnostics[0].code == "E329" and "write --train c=0" in (
        caught.value.diagnostics[0].remedy or ""
    )
    plan = ucpl.plan(str(source), "plain()", train=["c=1"])
    assert plan.begun == {"step": {"c": 2.0}}, "as the others of its group"


MODELS = """
model tuned extends checkpoint() {{
  wpe.weight : 9 24 dtype f32
  mix        : 3 5  dtype f32 is frozen
  group "0"  = {}
}}
layout tuned3(dp) of tuned extends zero3(dp = dp) {{
}}
"""


def test_a_model_of_ones_own_says_the_same(tmp_path: Path) -> None:
    """The model may define the trained parameters.

    Parameters that a name then leaves out must still be named.
    """
    text, _, _ = ucpl.infer(FROZEN).text().partition("layout ")
    order = ["wte.weight", "wpe.weight", *members(plain_of(FROZEN))[0][2:]]
    spec = tmp_path / "spec.ucpl"
    spec.write_text(text + MODELS.format(", ".join(f'"{name}"' for name in order)))
    call = f"{spec}:tuned3(dp = 2)"
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(FROZEN), call, train=["wpe.weight"])
    assert caught.value.diagnostics[0].code == "E310" and "--freeze mix" in (caught.value.diagnostics[0].remedy or "")
    made = ucpl.convert(FROZEN, tmp_path / "new", call, train=["wpe.weight"], freeze=["mix"])
    assert "exp_avg with 0: 216 elements of `wpe.weight` (the source lacks them)" in made.plan.filled
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(FROZEN), call, freeze=["wte.weight"], train=["wpe.weight"])
    assert caught.value.diagnostics[0].code == "E327"


GROWN = """
  adapter.down : 4 24  dtype f32
  adapter.bias : 4     dtype f32
"""


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_new_is_a_line_of_the_model(target: str, tmp_path: Path) -> None:
    """The inferred model with lines more is all there is to write.

    Layouts, settings and states are as they were.
    """
    model, fill = grown(tmp_path), ["adapter.down=0.5", "adapter.bias=0"]
    made = ucpl.convert(FROZEN, tmp_path / "new", target, model=model, fill=fill, train=["adapter.*", "wpe.weight"])
    assert made.plan.changed == (
        "trained by --train adapter.*: adapter.down, adapter.bias, as checkpoint has it",
        "trained by --train wpe.weight: wpe.weight, as checkpoint has it",
    )
    found, truth = held(tmp_path / "new", tmp_path), truth_of(FROZEN)
    assert members(found)[0][:4] == ["adapter.down", "mix", "wte.weight", "wpe.weight"]
    assert torch.equal(found["params"]["adapter.down"]["weight"], torch.full((4, 24), 0.5))
    for name in ("adapter.down", "adapter.bias", "wpe.weight"):
        assert not any(found["params"][name][state].count_nonzero() for state in MOMENTS)
        assert float(found["params"][name]["step"]) == 3.0
    assert kept(found, truth, set(truth) - {"wpe.weight"}) == []


def grown(folder: Path) -> str:
    """The inferred model of the fixture, with an additional adapter."""
    text, _, _ = ucpl.infer(FROZEN).text().partition("layout ")
    text = text.replace("checkpoint {\n", "checkpoint {" + GROWN, 1).replace('"0" = mix', '"0" = adapter.down, mix')
    text = text.replace('"1" = temp', '"1" = adapter.bias, temp').replace(" is frozen", "")
    text = text.replace("mix, wte.weight, ", "mix, wte.weight, wpe.weight, ")
    (folder / "grown.ucpl").write_text(text)
    return f"{folder}/grown.ucpl:checkpoint"


def test_what_is_new_is_begun_where_somebody_says_so_and_is_in_the_model_s_group(tmp_path: Path) -> None:
    model, fill, target = grown(tmp_path), ["adapter.down=0.5", "adapter.bias=0"], "zero1(dp = 2)"
    with pytest.raises(UcplError) as caught:  # undeclared parameters are not begun
        ucpl.plan(str(FROZEN), target, model=model, fill=fill, train=["wpe.weight"])
    assert caught.value.diagnostics[0].code == "E303"
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(FROZEN), target, model=model, fill=fill, train=["adapter.*=1", "wpe.weight"])
    assert caught.value.diagnostics[0].code == "E327"


PLAN = """ucpl 1

plan tune = zero2(dp = 3) -> zero3(dp = 2)
  drop "blocks.1.*", calls
  freeze "ln_f.*"
  train wpe.weight in "1"
"""


def test_a_plan_of_a_file_says_the_same(tmp_path: Path) -> None:
    spec = tmp_path / "tune.ucpl"
    spec.write_text(PLAN)
    done = command("plan", str(spec), "tune", "--checkpoint", str(FROZEN), "-o", str(tmp_path / "a.plan"))
    assert done.status == 0, done.err
    plan = ucpl.load_plan(tmp_path / "a.plan")
    options = {"drop": ["blocks.1.*", "calls"], "freeze": ["ln_f.*"], "train": ["wpe.weight=1"]}
    assert plan.changed == ucpl.plan(str(FROZEN), "zero3(dp = 2)", **options).changed  # type: ignore[arg-type]
    assert "changed    frozen by --freeze ln_f.*: 2 tensors, 48 elements (ln_f.weight, ln_f.bias)" in done.out
    ucpl.apply(tmp_path / "a.plan", FROZEN, tmp_path / "new")
    assert members(held(tmp_path / "new", tmp_path))[1][:2] == ["temp", "wpe.weight"]


CHECKED = """ucpl 1

model small {
  w   : 6 2
  pos : 6 is frozen
  alias head = w
}
layout one() of small {
  file weights = torch "one.pt"
  w   = ...  as "w"
  pos = ...  as "pos"
}
plan tune = one() -> one()
  %s
"""


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("freeze w", "freeze v"),
        ("freeze head", "freeze heat"),
        ('train "p*"', 'train "x*"'),
        ('drop "p*", head', 'drop "x*", head'),
        ("train pos in decay", "train poz in decay"),
    ],
)
def test_names_of_a_plan_are_looked_up_by_check(line: str, wrong: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.ucpl"
    spec.write_text(CHECKED % line)
    assert (
        "E300" not in command("check", str(spec)).err
    )  # the name is one; its model's statements about it are checked, too
    spec.write_text(CHECKED % wrong)
    done = command("check", str(spec))
    assert done.status != 0 and "E300" in done.err, done.err


def test_the_command_line_says_it(tmp_path: Path) -> None:
    options = ["--train", "wpe.weight", "--freeze", "ln_f.*", "--drop", "mix"]
    done = command("convert", str(FROZEN), str(tmp_path / "new"), "--to", "zero1(dp=2)", *options)
    assert done.status == 0, done.err
    assert "changed       left out by --drop mix: 1 tensor, 15 elements (mix)" in done.out
    assert "changed       frozen by --freeze ln_f.*: 2 tensors, 48 elements (ln_f.weight, ln_f.bias)" in done.out
    assert "left out      exp_avg of ln_f.weight, ln_f.bias: frozen by name" in done.out


PIPELINE, EXPERTS, TENSOR = (FIXTURES / name for name in ("pp2_dp2_z1", "moe_ep2_dp2_z1", "tp2_dp2_z1_uneven"))
MOE = "blocks.1.mlp.moe.deepspeed_moe.experts.deepspeed_experts."
PARALLEL: list[tuple[Path, str, dict[str, Any], int]] = [
    (PIPELINE, "zero1(dp = 1, pp = 2)", {"freeze": ["1.mlp.*"], "drop": ["2.mlp.down.bias"]}, 3),
    (PIPELINE, "zero3(dp = 2)", {"freeze": ["2.*"], "drop": ["3.*"]}, 10),
    (EXPERTS, "zero1(dp = 4, ep = 4)", {"freeze": ["wpe.weight", f"{MOE}*.h.weight"], "drop": ["calls"]}, 5),
    (EXPERTS, "zero2(dp = 2, ep = 1)", {"freeze": ["mix"], "drop": [f"{MOE}*.h4.weight"]}, 1),
    (TENSOR, "zero1(dp = 3, tp = 1)", {"freeze": ["wte.weight"], "drop": ["calls"]}, 1),
    (TENSOR, "zero3(dp = 2, tp = 2)", {"freeze": ["*.mlp.*"], "drop": ["lm_head.weight"]}, 6),
]


@pytest.mark.parametrize(("source", "target", "how", "frozen"), PARALLEL)
def test_parameters_on_model_parallel_ranks(
    source: Path, target: str, how: dict[str, Any], frozen: int, tmp_path: Path
) -> None:
    """There, and back: the frozen parameter is trained again."""
    before = plain_of(source)["params"]
    ucpl.convert(source, tmp_path / "new", target, **how)
    after = held(tmp_path / "new", tmp_path)["params"]
    assert set(after) <= set(before)
    still = [name for name in after if "exp_avg" not in after[name] and "exp_avg" in before[name]]
    assert len(still) == frozen
    unlike = [
        (name, state)
        for name, states in after.items()
        for state, value in states.items()
        if torch.is_tensor(value) and not torch.equal(value, before[name][state])
    ]
    assert unlike == []


@pytest.mark.parametrize(
    ("source", "how", "text"),
    [
        (PIPELINE, {"drop": ["3.*"]}, "all tensors of layer 3 of the pipeline are dropped"),
        (EXPERTS, {"drop": [f"{MOE}0.h.weight"]}, "of another expert of the layer is not"),
        (EXPERTS, {"freeze": [f"{MOE}*"]}, "DeepSpeed identifies experts by their groups"),
    ],
)
def test_what_ranks_cannot_hold_is_refused(source: Path, how: dict[str, Any], text: str) -> None:
    with pytest.raises(UcplError) as caught:
        ucpl.plan(str(source), "zero1(dp = 2)", **how)
    assert caught.value.diagnostics[0].code == "E328" and text in caught.value.diagnostics[0].message


def test_states_of_some_groups_are_those_of_a_new_one_like_them() -> None:
    text = "ucpl 1\nmodel m {\n  a : 4\n  b : 4\n  c : 4\n"
    text += '  group "0" = a\n  group "1" = b\n  state x : f32 of "0"\n  state y : f32 of "1"\n}\n'
    (model,) = (item for item in parse(text, "m.ucpl").statements if isinstance(item, nodes.Model))
    dealt = Dealt(members={"2": ("c",)}, new={"2": "0"})
    made = changed_model(model, Changes(trained=frozenset({"c"}), dealt=dealt))
    assert [s.groups for s in made.items if isinstance(s, nodes.State)] == [("0", "2"), ("1",)]
    assert [(g.name, g.members) for g in made.items if isinstance(g, nodes.Group)][-1] == ("2", ("c",))
