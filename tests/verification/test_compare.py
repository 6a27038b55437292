"""`compare` says whatever differs, and nothing else.

Each difference is planted alone, and looked for from both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

import ucpl
from tests.cli.command import FIXTURES, good
from tests.cli.command import ucpl as command
from tests.formats.huggingface import folders
from tests.formats.huggingface.folders import llama_config, llama_shapes, random_of
from ucpl import api
from ucpl.errors import UcplError
from ucpl.extents import Global, ParameterGroup, PickledCall, Scalar, Setting, TorchDType, TrainState
from ucpl.verification.compare import Likeness, likeness
from ucpl.verification.train_states import StateComparison, _Pair
from ucpl.verification.values import ValueTensors

Value = dict[str, Any]


def state(seed: int, shape: tuple[int, ...] = (4, 3)) -> Value:
    dice = torch.Generator().manual_seed(seed)
    tensors: Value = {name: torch.randn(shape, generator=dice) for name in ("weight", "exp_avg", "exp_avg_sq")}
    return {**tensors, "step": torch.tensor(7.0)}


def scaler(**state: Any) -> Value:
    """An object, as plain files write one."""
    function = {"ucpl": "global", "name": "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler"}
    state = {"cur_scale": 65536.0, "dynamic": True, "cur_iter": 7, "dtype": {"ucpl": "dtype", "name": "f16"}, **state}
    call = {"args": (), "kwargs": {}, "state": state, "list": [1, 2], "dict": [["k", 1]]}
    return {"ucpl": "call", "function": function, "new": True, **call}


def whole() -> Value:
    """A run after some steps, with all values of a checkpoint."""
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0, "fused": None, "params": ["a", "b"]},
        {"lr": 0.2, "betas": (0.9, 0.99), "weight_decay": 0.1, "fused": None, "params": ["c"]},
    ]
    carried = {
        "rng": torch.arange(9, dtype=torch.uint8),
        "big": torch.zeros(3, 1 << 18),  # 3 MiB
        "aside": torch.zeros(1 << 18, 3).t(),  # the same, in another order of bytes
        "numbers": [1, 2.5, [3]],
        "nested": {"deep": {"er": "word"}, "flag": True, "pair": (1, 2)},
    }
    blobs = {
        "lr_scheduler": {"last_epoch": 7, "base_lrs": [0.1, 0.2]},
        "module_extra": {"a._extra_state": {"scale": 1.5}},
        "loss_scaler": scaler(),
        "dynamic_loss_scale": True,
        "clip_grad": 1.0,
    }
    return {
        "params": {"a": state(1), "b": state(2), "c": state(3, (5,)), "frozen": {"weight": torch.ones(2)}},
        "buffers": {"mask": torch.ones(2)},
        "aliases": {"head": "a"},
        "groups": groups,
        "scalars": {"global_steps": 8, "global_samples": 70, "skipped_steps": 1},
        "envelope": {"ucpl": 1, "blobs": blobs, "carried": carried},
    }


def save(path: Path, value: Value) -> Path:
    torch.save(value, path)
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("compare") / "original.pt", whole())


def said(found: Likeness) -> set[str]:
    assert not found and found.differences
    return {str(d) for d in found.differences}


def put(*path: Any, to: Any) -> Callable[[Value], None]:
    def change(value: Value) -> None:
        for step in path[:-1]:
            value = value[step]
        value[path[-1]] = to(value[path[-1]]) if callable(to) else to

    return change


def gone(*path: Any) -> Callable[[Value], None]:
    def change(value: Value) -> None:
        for step in path[:-1]:
            value = value[step]
        del value[path[-1]]

    return change


def at(index: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return change


CARRIED, BLOBS = ("envelope", "carried"), ("envelope", "blobs")
SCALER = (*BLOBS, "loss_scaler")

# The change in B, and the one expected report: (name, in A, in B).
CHANGES: dict[str, tuple[Callable[[Value], None], tuple[str, str, str]]] = {
    # tensors
    "a weight of another dtype": (
        put("params", "c", "weight", to=lambda t: t.bfloat16()), ("weight of c", "f32", "bf16")
    ),
    "a buffer of another dtype": (put("buffers", "mask", to=lambda t: t.int()), ("weight of mask", "f32", "i32")),
    "a lost state": (gone("params", "c", "exp_avg"), ("exp_avg of c", "stored", "nothing")),
    "a lost tensor": (gone("params", "frozen"), ("frozen", "frozen [2]", "nothing")),
    "a tensor of another shape": (put("params", "frozen", "weight", to=torch.ones(1, 2)), ("frozen", "[2]", "[1, 2]")),
    "a lost alias": (gone("aliases", "head"), ("head", "a second name of a", "no second name")),
    "an alias of another": (put("aliases", "head", to="b"), ("head", "a second name of a", "a second name of b")),
    "a buffer that is trained": (
        lambda v: v["params"].update(mask={"weight": v["buffers"].pop("mask")}),
        ("mask", "buffer", "frozen"),
    ),
    # groups
    "a learning rate": (put("groups", 1, "lr", to=0.3), ("group 1.lr", "0.2", "0.3")),
    "a missing lr": (gone("groups", 1, "lr"), ("group 1.lr", "0.2", "nothing")),
    "a missing weight decay of nothing": (gone("groups", 0, "weight_decay"), ("group 0.weight_decay", "0.0", "nothing")),
    "missing betas": (gone("groups", 0, "betas"), ("group 0.betas", "(0.9, 0.99)", "nothing")),
    "one of the betas": (put("groups", 0, "betas", to=(0.9, 0.999)), ("group 0.betas[1]", "0.99", "0.999")),
    "a flag that is on": (
        lambda v: v["groups"][0].update(nesterov=True), ("group 0.nesterov", "nothing", "True")
    ),
    "groups in another order": (
        put("groups", to=lambda g: g[::-1]), ("order of groups", "0, 1", "1, 0")
    ),
    # counters, steps, schedules
    "a lost counter": (gone("scalars", "global_steps"), ("global_steps", "8", "nothing")),
    "another counter": (put("scalars", "global_samples", to=71), ("global_samples", "70", "71")),
    "a counter begun anew": (put("scalars", "skipped_steps", to=0), ("skipped_steps", "1", "0")),
    "a lost step": (gone("params", "a", "step"), ("step.a", "7.0", "nothing")),
    "another step": (put("params", "a", "step", to=torch.tensor(8.0)), ("step.a", "7.0", "8.0")),
    "a lost schedule": (gone(*BLOBS, "lr_scheduler"), ("lr_scheduler", "a dict of 2", "nothing")),
    "a longer list": (
        put(*BLOBS, "lr_scheduler", "base_lrs", to=[0.1, 0.2, 0.3]), ("lr_scheduler.base_lrs", "2 values", "3 values")
    ),
    "a module's extra state": (
        put(*BLOBS, "module_extra", "a._extra_state", "scale", to=2.5),
        ("module_extra.a._extra_state.scale", "1.5", "2.5"),
    ),
    "a lost extra state": (gone(*BLOBS, "module_extra"), ("module_extra", "a dict of 1", "nothing")),
    "another gradient clipping": (put(*BLOBS, "clip_grad", to=0.5), ("clip_grad", "1.0", "0.5")),
    # the loss scaler: an object's class, its arguments, its state, its items
    "the loss scale": (put(*SCALER, "state", "cur_scale", to=1.0), ("loss_scaler.state.cur_scale", "65536.0", "1.0")),
    "a lost loss scale": (gone(*BLOBS, "loss_scaler"), ("loss_scaler", "dynamic, at 65536.0", "fixed, at 1.0")),
    "another dtype in an object": (
        put(*SCALER, "state", "dtype", "name", to="bf16"), ("loss_scaler.state.dtype", "f16", "bf16")
    ),
    "an object of another class": (
        put(*SCALER, "function", "name", to="m:C"),
        ("loss_scaler.function", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", "m.C"),
    ),
    "an object of other arguments": (put(*SCALER, "args", to=(1,)), ("loss_scaler.args", "0 values", "1 values")),
    "an object of other named arguments": (
        put(*SCALER, "kwargs", to={"x": 1}), ("loss_scaler.kwargs.x", "nothing", "1")
    ),
    "an object's items": (put(*SCALER, "list", 1, to=3), ("loss_scaler.list_items[1]", "2", "3")),
    "an object's entries": (put(*SCALER, "dict", 0, 1, to=2), ("loss_scaler.dict_items[0][1]", "1", "2")),
    # client_state
    "a lost key": (gone(*CARRIED, "numbers"), ("client_state.numbers", "[1, 2.5, [3]]", "nothing")),
    "a number deep inside": (put(*CARRIED, "numbers", 2, 0, to=4), ("client_state.numbers[2][0]", "3", "4")),
    "a word deep inside": (
        put(*CARRIED, "nested", "deep", "er", to="other"), ("client_state.nested.deep.er", "'word'", "'other'")
    ),
    "a value of another type": (put(*CARRIED, "nested", "flag", to="True"), ("client_state.nested.flag", "True", "'True'")),
    "a dict for a tuple": (put(*CARRIED, "nested", "pair", to={}), ("client_state.nested.pair", "(1, 2)", "a dict of 0")),
    "one byte of a tensor": (put(*CARRIED, "rng", to=at(8, 9)), ("client_state.rng[8]", "8", "9")),
    "a tensor of another shape beside": (
        put(*CARRIED, "rng", to=lambda t: t.reshape(3, 3)), ("client_state.rng", "a tensor u8 [9]", "a tensor u8 [3, 3]")
    ),
    "a tensor of another dtype beside": (
        put(*CARRIED, "rng", to=lambda t: t.view(torch.int8)),
        ("client_state.rng", "a tensor u8 [9]", "a tensor i8 [9]"),
    ),
    "a tensor that became a number": (put(*CARRIED, "rng", to=1), ("client_state.rng", "a tensor u8 [9]", "1")),
    "beyond the first MiB": (put(*CARRIED, "big", to=at((2, 262_143), 1)), ("client_state.big[2, 262143]", "0.0", "1.0")),
    "beyond the first MiB, strided": (
        put(*CARRIED, "aside", to=at((1, 262_000), 1)),
        ("client_state.aside[1, 262000]", "0.0", "1.0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_alone_is_reported_from_both_sides(name: str, original: Path, tmp_path: Path) -> None:
    change, (what, a, b) = CHANGES[name]
    value = copy.deepcopy(whole())
    change(value)
    other = save(tmp_path / "other.pt", value)
    assert said(ucpl.compare(original, other)) == {f"{what}: {a} in A, {b} in B"}
    assert said(ucpl.compare(other, original)) == {
        f"{what}: {b} in A, {a} in B" if what != "order of groups" else f"{what}: {a} in A, {b} in B"
    }


def test_a_value_of_a_tensor_is_reported_with_both_its_places(original: Path, tmp_path: Path) -> None:
    value = whole()
    value["params"]["b"]["exp_avg_sq"][3, 1] = 9
    (found,) = ucpl.compare(original, save(tmp_path / "b.pt", value)).differences
    assert (found.kind, found.state, found.element) == ("value", "exp_avg_sq", "b[3, 1]")
    assert found.b.startswith("9.0 ") and not found.a.startswith("9.0 ")
    assert found.a_place == "original.pt: params/b/exp_avg_sq[3, 1]" and found.b_place.startswith("b.pt: ")


def test_moments_of_another_dtype_are_reported_and_not_taken_for_equal_values(original: Path, tmp_path: Path) -> None:
    value = whole()
    for states in value["params"].values():
        states.update({name: t.double() for name, t in states.items() if name == "exp_avg"})
    found = ucpl.compare(original, save(tmp_path / "b.pt", value))
    assert said(found) == {f"exp_avg of {name}: f32 in A, f64 in B" for name in "abc"}
    assert {d.kind for d in found.differences} == {"dtype"}


def test_a_group_that_only_one_side_has_is_reported(original: Path, tmp_path: Path) -> None:
    value = whole()
    value["groups"][0]["params"] = ["a"]
    value["groups"].append({**value["groups"][0], "params": ["b"]})
    other = save(tmp_path / "b.pt", value)
    group = "2 parameters, the first a", "1 parameters, the first a", "1 parameters, the first b"
    assert said(ucpl.compare(original, other)) == {
        f"group 0: {group[0]} in A, nothing in B",
        f"group 0: nothing in A, {group[1]} in B",
        f"group 2: nothing in A, {group[2]} in B",
    }


def test_a_file_is_equal_to_itself_and_says_how_much_was_held_against_it(original: Path) -> None:
    found = ucpl.compare(original, original)
    assert found and found.unsaid == () and found.derived == ()
    assert found.tensors == 5
    assert found.elements == 3 * (12 + 12 + 5) + 2 + 2
    assert found.values == 2 * 4 + 3 + 3 + 4 + 1 + 5  # of groups, counters, steps, blobs, the scaler, client_state


def test_a_state_that_one_side_derives_is_compared_with_what_it_derives(tmp_path: Path) -> None:
    """ZeRO-3 in bf16 keeps no weights: they are its masters, rounded."""
    source = FIXTURES / "z1_dp2_bf16"
    ucpl.convert(source, tmp_path / "z3", "zero3(dp=2)")
    ucpl.convert(source, tmp_path / "p.pt", "plain()")
    value = torch.load(tmp_path / "p.pt", weights_only=True)
    assert ucpl.compare(tmp_path / "p.pt", tmp_path / "z3").derived
    value["params"]["wpe.weight"]["weight"][1, 2] += 1
    changed = save(tmp_path / "changed.pt", value)
    for pair in ((changed, tmp_path / "z3"), (tmp_path / "z3", changed)):
        found = ucpl.compare(*pair)
        assert [(d.kind, d.state, d.element) for d in found.differences] == [("value", "weight", "wpe.weight[1, 2]")]
        (one,) = found.differences
        is_a = pair[0] == changed
        assert (one.a_place if is_a else one.b_place).startswith("changed.pt: params/wpe.weight/weight[1, 2]")


# ---- missing values: ---- docs/decisions/compare-and-silence.md ----------------------------------------------------------


def bare(**more: Any) -> Value:
    """A plain file as a person writes one: no counters, no schedule."""
    groups = [{"lr": 0.1, "weight_decay": 0.0, "params": ["a", "b"]}]
    return {"params": {"a": state(1), "b": state(2)}, "groups": groups, **more}


TARGETS = ["zero0(dp=2)", "zero1(dp=2)", "zero1(dp=2, elastic=1)", "zero3(dp=3)"]


@pytest.mark.parametrize("to", TARGETS)
def test_a_plain_file_without_counters_is_equal_to_its_conversion_and_silence_is_reported(
    to: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "plain.pt", bare())
    ucpl.convert(source, tmp_path / "out", to)
    found = ucpl.compare(source, tmp_path / "out")
    assert found, found.differences
    counters = {str(one) for one in found.unsaid if one.name in ("global_steps", "global_samples", "skipped_steps")}
    assert counters == {
        "global_steps: 7 in B, nothing in A (the steps of the optimizer)",
        "skipped_steps: 0 in B, nothing in A (a run begins there)",
    }
    turned = ucpl.compare(tmp_path / "out", source)
    assert turned and {one.side for one in turned.unsaid if one.name == "global_steps"} == {"A"}


def test_a_counter_that_has_counted_is_lost_in_any_format(tmp_path: Path) -> None:
    source = save(tmp_path / "plain.pt", bare(scalars={"global_steps": 3}))
    ucpl.convert(source, tmp_path / "out", "zero1(dp=2)")
    assert ucpl.compare(source, tmp_path / "out")
    assert said(ucpl.compare(save(tmp_path / "less.pt", bare()), tmp_path / "out")) == {
        "global_steps: nothing in A, 3 in B"
    }


def test_weights_alone_are_equal_to_a_fresh_run_made_of_them_and_to_none_that_has_trained(tmp_path: Path) -> None:
    weights = save(tmp_path / "w.pt", {"params": {"a": {"weight": torch.ones(4, 3)}, "b": {"weight": torch.ones(5)}}})
    ucpl.convert(weights, tmp_path / "st", "safetensors()")
    ucpl.convert(tmp_path / "st", tmp_path / "run", "zero1(dp=2)")
    found = ucpl.compare(tmp_path / "st", tmp_path / "run")
    assert found, found.differences
    assert "group 0: 2 parameters, the first a in B, nothing in A (the other says nothing of training)" in {
        str(one) for one in found.unsaid
    }
    trained = FIXTURES / "z1_dp4"
    ucpl.convert(trained, tmp_path / "exported", "safetensors()", drop=("fp32", "exp_avg", "exp_avg_sq"))
    lost = ucpl.compare(trained, tmp_path / "exported")
    kinds = {(d.kind, d.state) for d in lost.differences}
    assert {("tensor", "exp_avg"), ("tensor", "exp_avg_sq")} <= kinds
    names = {d.name for d in lost.differences}
    assert {"lr_scheduler", "global_steps", "client_state.foo", "group 0"} <= names
    assert [str(one) for one in lost.unsaid if one.value == "buffer"] == [
        "calls: buffer in A, nothing in B (the other says nothing of training)"
    ]


def test_a_buffer_that_looks_frozen_in_the_files_is_no_difference(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 3)
    module.register_buffer("mask", torch.ones(1, 1, 9))  # FSDP cuts no dim of one row
    optimizer = torch.optim.AdamW(module.parameters())
    module.weight.sum().backward()
    module.bias.grad = torch.ones(3)
    optimizer.step()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    ucpl.convert(tmp_path / "a.pt", tmp_path / "b", "dcp(fsdp=2)")
    found = ucpl.compare(tmp_path / "a.pt", tmp_path / "b")
    assert found, found.differences
    assert "mask: buffer in A, nothing in B (a buffer and a frozen parameter look the same in these files)" in map(
        str, found.unsaid
    )


def test_values_are_compared_where_one_side_does_not_say_what_is_trained(tmp_path: Path) -> None:
    trained = FIXTURES / "z1_dp4"
    ucpl.convert(trained, tmp_path / "w", "safetensors()", drop=("fp32", "exp_avg", "exp_avg_sq"))
    from safetensors.torch import load_file, save_file

    (file,) = (tmp_path / "w").glob("*.safetensors")
    tensors = load_file(file)
    tensors["calls"] = tensors["calls"] + 1
    save_file(tensors, file)
    values = [d for d in ucpl.compare(trained, file).differences if d.kind == "value"]
    assert [d.name for d in values] == ["calls"]


def test_an_elastic_checkpoint_leaves_the_optimizers_arguments_to_the_job(tmp_path: Path) -> None:
    ucpl.convert(FIXTURES / "z1_dp2_sgdm", tmp_path / "e", "zero1(dp=3, elastic=1)")
    found = ucpl.compare(FIXTURES / "z1_dp2_sgdm", tmp_path / "e")
    assert found, found.differences
    why = {one.name: one.why for one in found.unsaid}
    assert why["group 0.momentum"] == "an elastic checkpoint leaves the optimizer's arguments to the job"
    assert why["group 1.step"] == "an elastic checkpoint keeps a step for any optimizer"


def test_the_command_prints_what_is_unsaid_and_ends_with_0(tmp_path: Path) -> None:
    source = save(tmp_path / "plain.pt", bare())
    good("convert", source, tmp_path / "out", "--to", "zero1(dp=2)")
    done = good("compare", source, tmp_path / "out")
    assert "unsaid        skipped_steps: 0 in B, nothing in A (a run begins there)" in done.out.splitlines()
    assert done.out.splitlines()[-1] == "equal"
    found = good("compare", source, tmp_path / "out", "--json").json
    assert (
        found["equal"]
        and {"name": "global_steps", "value": "7", "side": "B", "why": "the steps of the optimizer"} in found["unsaid"]
    )
    assert command("compare", save(tmp_path / "x.pt", bare(scalars={"global_steps": 1})), tmp_path / "out").status == 1


# ---- train states that no file at hand has ----------------------------------------------------------------------------


def held(a: dict[str, Any], b: dict[str, Any]) -> Likeness:
    """The example against itself, with other train states."""
    opened = api.open_checkpoint(Path(__file__).parents[2] / "examples" / "checkpoint")
    placement = api.source_side(opened, None)[0].placement
    one, other = (
        evolve(
            opened, state=TrainState("deepspeed", tensors=opened.state.tensors, parallel=opened.state.parallel, **more)
        )
        for more in (a, b)
    )
    return likeness(one, placement, other, placement)


def dynamic(**state: Any) -> PickledCall:
    state = {"cur_scale": 8.0, "dynamic": True, "cur_iter": 5, **state}
    return PickledCall(Global("deepspeed", "DynamicLossScaler"), new=True, state=state)


STATIC = PickledCall(Global("deepspeed", "LossScaler"), new=True, state={"cur_scale": 1.0, "dynamic": False})


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ({"loss_scaler": STATIC}, {}, set()),
        ({"loss_scaler": STATIC}, {"loss_scale_config": {"dynamic_loss_scale": False, "cur_iter": 4}}, set()),
        (
            {"loss_scaler": dynamic()},
            {"loss_scale_config": {"dynamic_loss_scale": True, "cur_scale": 8.0, "cur_iter": 5}},
            set(),
        ),
        (
            {"loss_scaler": dynamic()},
            {"loss_scale_config": {"dynamic_loss_scale": True, "cur_scale": 4.0, "cur_iter": 5}},
            {"loss_scaler.cur_scale: 8.0 in A, 4.0 in B"},
        ),
        (
            {"loss_scaler": dynamic(scale_window=10)},
            {"loss_scale_config": {"dynamic_loss_scale": True, "cur_scale": 8.0, "cur_iter": 5, "scale_window": 20}},
            {"loss_scaler.scale_window: 10 in A, 20 in B"},
        ),
        (
            {"loss_scale_config": {"dynamic_loss_scale": False, "cur_scale": 128.0}},
            {},
            {"loss_scaler.cur_scale: 128.0 in A, 1.0 in B"},
        ),
    ],
)
def test_a_loss_scaler_is_compared_in_whatever_form_it_is_kept(a: Any, b: Any, wanted: set[str]) -> None:
    assert {str(d) for d in held({"blobs": a}, {"blobs": b}).differences} == wanted
    turned = {str(d) for d in held({"blobs": b}, {"blobs": a}).differences}
    assert len(turned) == len(wanted)


def test_flags_that_are_off_and_names_may_be_left_out_and_numbers_may_not() -> None:
    def group(**hyper: Any) -> dict[str, Any]:
        return {"groups": (ParameterGroup("0", ("w",), {"lr": 1.0, **hyper}),)}

    found = held(group(foreach=None, amsgrad=False, name="decay"), group())
    assert found and [one.name for one in found.unsaid] == ["group 0.foreach", "group 0.amsgrad", "group 0.name"]
    assert {one.side for one in found.unsaid} == {"A"}
    for lost in ({"eps": 1e-8}, {"dampening": 0}, {"nesterov": True}, {"betas": [0, 0]}):
        assert not held(group(**lost), group()) and not held(group(), group(**lost)), lost


def test_steps_of_nothing_are_one_line_however_many_parameters() -> None:
    zero = Scalar("f32", (), bytes(4))
    found = held({"scalars": {"step": {"a": zero, "b": zero, "c": zero}}}, {})
    assert found and [str(one) for one in found.unsaid] == [
        "step of a and 2 more: 0 in A, nothing in B (a run begins there)"
    ]


def test_a_group_that_says_something_is_no_silence() -> None:
    one = ParameterGroup("0", ("w",), {})
    assert held({"groups": (one,)}, {})
    assert not held({"groups": (evolve(one, hyper={"lr": 0.1}),)}, {})
    assert not held({"groups": (one, evolve(one, members=("v",)))}, {})


def test_numbers_are_equal_by_value_and_a_nan_equals_itself() -> None:
    a = {"carried": {"x": 1, "y": float("nan"), "z": Scalar("bf16", (), b"\x80\x3f"), "t": TorchDType("f16"), "s": {1}}}
    b = {"carried": {"x": 1.0, "y": float("nan"), "z": 1, "t": TorchDType("f16"), "s": {1}}}
    assert held(a, b)
    for key, value in {"x": 1.5, "y": 0.0, "z": 2, "t": TorchDType("f32"), "s": {2}}.items():
        assert {d.name for d in held(a, {"carried": {**b["carried"], key: value}}).differences} == {
            f"client_state.{key}"
        }


def test_values_that_hold_themselves_or_share_are_compared_once() -> None:
    def cyclic(end: int) -> dict[str, Any]:
        inner: list[Any] = [end]
        inner.append(inner)
        shared: Any = [end]
        for _ in range(60):
            shared = [shared, shared]  # 2^60 paths to one number
        return {"carried": {"cycle": inner, "shared": shared}}

    assert held(cyclic(1), cyclic(1))
    assert len(held(cyclic(1), cyclic(2)).differences) == 2


def test_a_file_that_became_shorter_is_an_error_and_no_answer(tmp_path: Path) -> None:
    file = save(tmp_path / "a.pt", whole())
    opened = api.open_checkpoint(file)
    placement = api.source_side(opened, None)[0].placement
    other = api.open_checkpoint(save(tmp_path / "b.pt", whole()))
    data = file.read_bytes()
    extent = next(e for e in opened.carried_extents.values() if e.key[-1] == "aside")
    file.write_bytes(data[: extent.storage_start + extent.storage_bytes // 2])
    with pytest.raises(UcplError) as caught:
        likeness(opened, placement, other, placement)
    assert caught.value.diagnostics[0].code in ("E610", "E611")


def test_settings_of_elasticity_alone_change_nothing() -> None:
    quiet = {"settings": {"elastic": Setting(0, "the call")}}
    groups = (ParameterGroup("0", ("w",), {"lr": 1.0, "momentum": 0.9}),)
    assert not held({"groups": groups}, {"groups": (evolve(groups[0], hyper={"lr": 1.0}),), **quiet})


# ---- copies under `any` ------------------------------------------------------------------------------------------------

LOOSE = """ucpl 1
model m {{
  dim a = 4
  dtype f32
  v : a
}}
layout x(tp) of m {{
  mesh tp
  framework torch()
  file weights = torch "{{tp}}.pt"
  {firm}
  v = a any @tp as "spare"
}}
"""


def loose(
    top: Path, spare: list[list[float]], own: list[list[float]] | None = None, firm: str = 'v = a@tp as "own"'
) -> tuple[Path, str]:
    """Two ranks whose copies are under `any`, and their layout.

    There are also halves that count (`own`), or none.
    """
    top.mkdir()
    spec = top.parent / f"{top.name}.ucpl"
    spec.write_text(LOOSE.format(firm=firm if own is not None else ""))
    for rank, values in enumerate(spare):
        halves = {} if own is None else {"own": torch.tensor(own[rank])}
        torch.save({"spare": torch.tensor(values), **halves}, top / f"{rank}.pt")
    return top, f"{spec}:x(tp=2)"


def between(a: tuple[Path, str], b: tuple[Path, str]) -> Likeness:
    return ucpl.compare(a[0], b[0], a_layout=a[1], b_layout=b[1])


def test_copies_under_any_are_left_out_where_others_hold_the_tensor(tmp_path: Path) -> None:
    own = [[1.0, 2.0], [3.0, 4.0]]
    a = loose(tmp_path / "a", [[1, 2, 3, 4.0], [1, 2, 3, 4.0]], own)
    b = loose(tmp_path / "b", [[9, 9, 9, 9.0], [8, 8, 8, 8.0]], own)
    c = loose(tmp_path / "c", [[1, 2, 3, 4.0], [1, 2, 3, 4.0]], [[1.0, 2.0], [3.0, 5.0]])
    assert between(a, b) and between(b, a) and between(b, b)
    assert [d.element for d in between(a, c).differences] == ["v[a=3]"]


def test_copies_under_any_are_compared_where_nothing_else_holds_the_tensor(tmp_path: Path) -> None:
    a = loose(tmp_path / "a", [[1, 2, 3, 4.0], [1, 2, 3, 4.0]])
    c = loose(tmp_path / "c", [[1, 2, 3, 5.0], [1, 2, 3, 5.0]])
    assert between(a, a) and between(a, a).elements > 0
    assert {d.element for d in between(a, c).differences} == {"v[a=3]"}


def test_a_checkpoint_whose_copies_under_any_differ_is_equal_to_itself(tmp_path: Path) -> None:
    """One of them is read, and is the checkpoint's value."""
    a = loose(tmp_path / "a", [[1, 2, 3, 4.0], [1, 2, 3, 4.0]])
    b = loose(tmp_path / "b", [[1, 2, 3, 4.0], [9, 9, 9, 9.0]])
    c = loose(tmp_path / "c", [[9, 9, 9, 9.0], [1, 2, 3, 4.0]])
    assert between(b, b) and between(b, b).elements == 4
    assert between(c, c) and between(a, b) and between(b, a)
    assert {d.element for d in between(a, c).differences} == {"v[a=0]"}
    assert all(ucpl.verify(x[0], layout=x[1]) for x in (a, b, c))


@pytest.mark.parametrize(
    ("firm", "own", "read"),
    [
        ('v = a[..2]@tp as "own"', [[5.0], [6.0]], 4),  # half of it has a place that counts
        ('v = a[1..3]@tp as "own"', [[5.0], [6.0]], 4),
    ],
)
def test_copies_under_any_count_for_what_has_no_other_place(
    tmp_path: Path, firm: str, own: list[list[float]], read: int
) -> None:
    a = loose(tmp_path / "a", [[1, 2, 3, 4.0], [9, 9, 9, 9.0]], own, firm)
    assert between(a, a) and between(a, a).elements == read
    assert ucpl.verify(a[0], layout=a[1])
    spare = [[1, 2, 3, 4.0], [7, 7, 7, 7.0]]
    assert between(a, loose(tmp_path / "b", spare, own, firm))
    other = loose(tmp_path / "c", spare, [[5.0], [7.0]], firm)
    assert [d.element for d in between(a, other).differences] == ["v[a=1]" if "..2" in firm else "v[a=2]"]
    spare[0] = [0, 0, 3, 8.0] if "..2" in firm else [1, 0, 0, 8.0]
    assert [d.element for d in between(a, loose(tmp_path / "d", spare, own, firm)).differences] == ["v[a=3]"]


def test_a_second_name_that_counts_is_read_before_a_copy_under_any(tmp_path: Path) -> None:
    spec = tmp_path / "tied.ucpl"
    text = LOOSE.format(firm='w = a as "w"').replace("v : a", "v : a\n  alias w = v")
    spec.write_text(text)
    made = []
    for name, spare in (("a", [1.0, 2, 3, 4]), ("b", [9.0, 9, 9, 9])):
        (tmp_path / name).mkdir()
        for rank in range(2):
            torch.save({"spare": torch.tensor(spare), "w": torch.arange(1.0, 5)}, tmp_path / name / f"{rank}.pt")
        made.append((tmp_path / name, f"{spec}:x(tp=2)"))
    assert all(between(*pair) for pair in product(made, made))


def master_run(place: Path, weight: torch.dtype) -> Path:
    """A plain file of a run.

    Weights in one dtype, masters and a moment in fp32.
    """
    dice = torch.Generator().manual_seed(4)
    params = {}
    for name in "ab":
        fp32 = torch.randn(5, 4, generator=dice)
        params[name] = {"weight": fp32.to(weight), "fp32": fp32, "exp_avg": fp32 * 2, "step": 3}
    torch.save({"params": params, "groups": [{"lr": 0.1, "params": ["a", "b"]}]}, place)
    return place


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exported", [torch.float32, torch.bfloat16])
def test_weights_alone_are_compared_in_the_narrower_dtype(
    weight: torch.dtype, exported: torch.dtype, tmp_path: Path
) -> None:
    """A run with masters and its export.

    Every other state is in one of the two alone.
    """
    run = master_run(tmp_path / "run.pt", weight)
    value = torch.load(run, weights_only=True)
    (tmp_path / "hf").mkdir()
    tensors = {name: states["fp32"].to(exported) for name, states in value["params"].items()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    found = ucpl.compare(run, tmp_path / "hf")
    assert not found and found.alone == "B"
    for a, b in ((run, tmp_path / "hf"), (tmp_path / "hf", run)):
        same = ucpl.compare(a, b, weights=True)
        assert same and same.elements == 40 and same.values == 0, same.differences
        assert same.narrow == ("bf16" if weight != exported else "")
    tensors["b"][2, 1] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (wrong,) = ucpl.compare(run, tmp_path / "hf", weights=True).differences
    assert (wrong.kind, wrong.element) == ("value", "b[2, 1]")
    (other,) = ucpl.compare(tmp_path / "hf", run, weights=True).differences
    assert (other.element, other.a, other.b) == (wrong.element, wrong.b, wrong.a)


def test_weights_alone_of_other_tensors_differ(tmp_path: Path) -> None:
    for place, names in (("one", "ab"), ("two", "ac")):
        (tmp_path / place).mkdir()
        save_file({name: torch.arange(3.0) for name in names}, tmp_path / place / "model.safetensors")
    found = ucpl.compare(tmp_path / "one", tmp_path / "two", weights=True)
    assert not found and {d.name for d in found.differences} == {"b", "c"}


def test_nothing_is_not_equal_to_nothing(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        save_file({}, tmp_path / place / "model.safetensors")
    found = ucpl.compare(tmp_path / "one", tmp_path / "two")
    assert not found and found.is_empty and not found.differences


def test_a_schedule_is_one_value_wherever_a_form_keeps_it(tmp_path: Path) -> None:
    """DeepSpeed has a key for it.

    DCP's job puts it next to the model, and our target of it into DeepSpeed's key.
    """
    ours = TrainState("deepspeed", blobs={"lr_scheduler": {"last_epoch": 3}})
    theirs = TrainState("dcp", carried={"lr_scheduler": {"last_epoch": 3}, "epoch": 1})
    for a, b in ((ours, theirs), (theirs, ours)):
        pair = _Pair(a, b, ValueTensors(tmp_path, {}), ValueTensors(tmp_path, {}), StateComparison())
        pair.schedules()
        assert not pair.found.differences and pair.found.count == 1
        pair.client_state()
        assert [d.name for d in pair.found.differences] == ["client_state.epoch"]
    other = TrainState("dcp", carried={"lr_scheduler": {"last_epoch": 4}})
    pair = _Pair(ours, other, ValueTensors(tmp_path, {}), ValueTensors(tmp_path, {}), StateComparison())
    pair.schedules()
    assert [d.name for d in pair.found.differences] == ["lr_scheduler.last_epoch"]


def test_two_dialects_of_a_model_are_compared_by_the_layouts_of_both(tmp_path: Path) -> None:
    """Without layouts, the answer names the options."""
    config = llama_config(num_hidden_layers=2, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    folder = folders.save(tmp_path / "hf", random_of(llama_shapes(config)), config)
    layouts = ("llama.ucpl:hf()", "llama.ucpl:torch_dist(tp=2)")
    ucpl.convert(folder, tmp_path / "megatron", layouts[1], layout=layouts[0])
    found = command("compare", folder, tmp_path / "megatron")
    assert found.status == 1 and all(f"{way} " in found.out for way in ("--as", "--with", "--config"))
    both = ("--as", layouts[0], "--with", layouts[1], "--config", folder / "config.json")
    assert good("compare", folder, tmp_path / "megatron", *both).out.endswith("equal\n")
    weights = random_of(llama_shapes(config))
    weights["model.layers.1.mlp.up_proj.weight"][3, 1] += 1
    other = folders.save(tmp_path / "other", weights, config)
    found = command("compare", other, tmp_path / "megatron", *both)
    assert found.status == 1 and "weight of up[l=1, f=3, h=1]" in found.out and "in 1 place;" in found.out
