"""Skeletons of DeepSpeed targets equal its own files at equal degrees."""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

from tests.counted import Asked
from tests.gathered import plain_bytes
from ucpl import api
from ucpl.api import make_plan, open_checkpoint, source_side, target_side
from ucpl.errors import UcplError
from ucpl.extents import PickledCall, StoredTensor, Structure, TensorRef
from ucpl.files.checkpoint import Checkpoint, Skeleton
from ucpl.files.pickles import attributes_of
from ucpl.files.torch_files import layout_torch_file, read_torch_file
from ucpl.files.values import Value
from ucpl.formats.deepspeed.config import loss_scale_numbers, loss_scaler, regenerated
from ucpl.formats.deepspeed.store import DeepSpeed, Universal
from ucpl.planning.plan import Plan
from ucpl.registry import format_named

EXAMPLE = Path(__file__).parents[3] / "examples" / "checkpoint"
SHARED = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[2] / "fixtures")) / "deepspeed"
DENSE = [EXAMPLE, *sorted(p.parent for p in SHARED.glob("z*/latest"))]


def _advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    return format_named(structure.framework).advice(source, structure)


@cache
def planned(path: Path, call: str) -> tuple[Checkpoint, Plan]:
    checkpoint = DeepSpeed().open(path)
    source, model = source_side(checkpoint, None)
    plan = make_plan(source, target_side(call, source, model))
    return checkpoint, plan


def written(path: Path, call: str, tag: str | None = None) -> tuple[Checkpoint, Plan, Skeleton]:
    checkpoint, plan = planned(path, call)
    return checkpoint, plan, DeepSpeed().skeleton(plan.target, plan.targets, checkpoint, tag)


def own_call(checkpoint: Checkpoint) -> str:
    settings = checkpoint.state.settings
    return f"zero{settings['stage'].value}(dp={settings['dp'].value})"


def plain(value: Any) -> Any:
    """A value tree without storages: tensors by dtype, shape and requires_grad."""
    if isinstance(value, TensorRef):
        return value.storage.dtype, tuple(value.shape), value.requires_grad
    if isinstance(value, dict):
        inner = {key: plain(item) for key, item in value.items()}
        if isinstance(value, OrderedDict):
            return list(inner.items()), plain(attributes_of(value))
        return inner
    if isinstance(value, PickledCall):
        return "call", value.function, plain(value.args), value.new, plain(value.state)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def unlike(mine: Any, theirs: Any, where: str = "") -> list[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        out = [f"{where}/{key}: only on one side" for key in mine.keys() ^ theirs.keys()]
        return out + [
            d for key in mine.keys() & theirs.keys() for d in unlike(mine[key], theirs[key], f"{where}/{key}")
        ]
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        return [d for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) for d in unlike(a, b, f"{where}/{n}")]
    return [] if mine == theirs else [f"{where}: {mine!r} is not {theirs!r}"]


def assert_written_as_by_deepspeed(path: Path) -> None:
    """At its own degrees a target has DeepSpeed's files and contents."""
    checkpoint = DeepSpeed().open(path)
    _, _, skeleton = written(path, own_call(checkpoint))
    assert sorted(file.path for file in skeleton.files) == sorted(checkpoint.files)
    assert skeleton.unsafe_globals == ()
    for file in skeleton.files:
        theirs = plain(read_torch_file(checkpoint.root, file.path).value)
        assert unlike(plain(file.value), theirs) == []


def assert_described_by(spec: Path, path: Path) -> None:
    """The layout `stored()` of a spec gives the checkpoint's own facts."""
    api.convert(path, spec.parent / "b", "plain()", layout=f"{spec}:stored()")
    assert (spec.parent / "b" / "plain.pt").read_bytes() == plain_bytes(path)


def assert_same_flats(mine: Path, theirs: Path) -> None:
    """Compare masters and moments of each flat buffer, by torch."""

    def flats(path: Path) -> list[torch.Tensor]:
        optimizer = torch.load(path, weights_only=False)["optimizer_state_dict"]
        masters = optimizer["single_partition_of_fp32_groups"]
        state = optimizer["base_optimizer_state"]["state"]
        moments = [state[group][name] for group in sorted(state) for name in ("exp_avg", "exp_avg_sq")]
        assert len(moments) == 2 * len(masters)
        return [*masters, *moments]

    files = sorted(path.name for path in theirs.glob("*optim_states.pt"))
    assert files and files == sorted(path.name for path in mine.glob("*optim_states.pt"))
    for file in files:
        for a, b in zip(flats(mine / file), flats(theirs / file), strict=True):
            assert torch.equal(a, b), file


@pytest.mark.parametrize("path", DENSE, ids=lambda p: p.name)
def test_at_its_own_stage_and_degree_a_target_is_what_deepspeed_wrote(path: Path) -> None:
    checkpoint = DeepSpeed().open(path)
    _, _, skeleton = written(path, own_call(checkpoint))
    assert skeleton.folder == checkpoint.tag
    assert skeleton.texts == {"latest": checkpoint.tag}
    assert skeleton.unsafe_globals == ()
    assert [file.path for file in skeleton.files] == list(checkpoint.files)
    for file in skeleton.files:
        theirs = plain(read_torch_file(checkpoint.root, file.path).value)
        mine = plain(file.value)
        for side in (mine, theirs):
            state = side.get("optimizer_state_dict", {})
            if "roundrobin" in path.name:
                assert state.pop("param_slice_mappings", True)  # DeepSpeed's are wrong
            if "elastic" in path.name:
                state.pop("base_optimizer_state_step", None)  # which it needs, and does not write
        if path.name.startswith("z0"):  # targets name the numbers
            stated = [[name for name, _ in group] for group, _ in mine["param_shapes"]]
            assert stated == [[*group.members] for group in checkpoint.state.groups]
            mine["param_shapes"] = None
        assert unlike(mine, theirs) == []


SOME = [*DENSE[:1], *(p for p in DENSE if p.name in ("z3_dp2_subgroup", "z1_dp2_bf16"))]
INTO = [
    pytest.param(path, call, id=f"{path.name}-{call}")
    for path in SOME
    for call in ("zero0(dp=2)", "zero1(dp=3)", "zero2(dp=5)", "zero3(dp=8)")
    if path.name == "z1_dp2_bf16" or not call.startswith("zero0")  # fp32 without ZeRO keeps no masters
]


@pytest.mark.parametrize("path, call", INTO)
def test_every_target_has_one_place_and_every_storage_one_filler(path: Path, call: str) -> None:
    _, plan, skeleton = written(path, call)
    placed = [i for file in skeleton.files for i in file.storage_of]
    assert sorted(placed) == [i for i, target in enumerate(plan.targets) if target.numel]
    for file in skeleton.files:
        laid_out = layout_torch_file(file.value)
        fillers = {*file.storage_of.values(), *(c.storage for c in file.carried)}
        assert {name for name, (_, size) in laid_out.storages.items() if size} == fillers
        for i, storage in file.storage_of.items():
            target: StoredTensor = plan.targets[i]
            assert target.file == file.path
            assert laid_out.storages[storage][1] == target.numel * {"f32": 4, "bf16": 2, "i64": 8}[target.dtype]
        steps = [c.storage for c in file.carried if c.extent.key[-1] == "step"]
        assert len(steps) == len(set(steps))  # optimizers count in place: no two may share


def test_a_new_degree_is_written_everywhere() -> None:
    _, _, skeleton = written(EXAMPLE, "zero2(dp=3)", "elsewhere")
    model, *shards = skeleton.files
    assert skeleton.folder == "elsewhere"
    assert model.value["dp_world_size"] == 3
    assert model.value["ds_config"]["train_batch_size"] == 120
    assert (
        model.value["ds_config"]["train_micro_batch_size_per_gpu"]
        * model.value["ds_config"].get("gradient_accumulation_steps", 1)
        * 3
        == 120
    )
    assert len(shards) == 3
    for shard in shards:
        state = shard.value["optimizer_state_dict"]
        assert state["partition_count"] == [3, 3]
        numels = [tensor.shape[0] for tensor in state["single_partition_of_fp32_groups"]]
        for g, (numel, padding) in enumerate(zip(numels, state["group_paddings"], strict=True)):
            assert state["base_optimizer_state"]["state"][g]["exp_avg"].shape == (numel + padding,)
            held = [call.state for call in state["param_slice_mappings"][g].values()]
            assert sum(fragment["numel"] for fragment in held) == numel
            assert [f["start"] for f in held] == [sum(f["numel"] for f in held[:n]) for n in range(len(held))]


def test_stage_3_keeps_placeholders_and_writes_ties_once() -> None:
    _, _, skeleton = written(EXAMPLE, "zero3(dp=2)")
    first, second = (file.value for file in skeleton.files[:2])
    assert first["shared_params"] == {"head.weight": "token.weight"}
    assert second["shared_params"] == {}
    for meta in (first, second):
        assert meta["module"]["head.weight"].shape == (0,)
        assert meta["module"]["seen"].shape == (2,)
        assert list(meta["frozen_param_shapes"]) == ["position.weight"]
        assert meta["frozen_param_fragments"]["position.weight"].shape == (54,)
        assert meta["cursor"].shape == (3,)


def test_numbers_that_differ_in_one_flat_buffer_are_refused() -> None:
    checkpoint, plan = planned(EXAMPLE, "zero3(dp=2)")
    scalars = checkpoint.state.scalars
    kept = dict(scalars["step"])
    scalars["step"]["norm.bias"] = 7
    try:
        with pytest.raises(UcplError, match="E470"):
            DeepSpeed().skeleton(plan.target, plan.targets, checkpoint, None)
    finally:
        scalars["step"] = kept


# ---- configuration -------------------------------------------------------------------------------------------------------


def held(value: Any) -> Value:
    return Value(Path("a.pt"), "a.pt", (), value)


SETTINGS = {"stage": 1, "dp": 4, "bf16": 0, "fp16": 0}


@pytest.mark.parametrize(
    ("before", "dp", "after"),
    [
        ((32, 4, None), 8, (32, 4, None)),
        ((32, 8, None), 8, (32, 4, None)),  # the total batch is kept; a micro batch that does not divide shrinks
        ((32, 4, 2), 8, (32, 4, 1)),
        ((32, 4, 1), 2, (32, 4, 4)),
        ((32, 16, None), 1, (32, 16, 2)),
        ((8, 2, None), 3, (6, 2, None)),  # no share for each: the micro batch stays
        ((30, 10, 1), 4, (40, 10, 1)),
        (("auto", "auto", "auto"), 4, ("auto", "auto", "auto")),
        ((None, 3, 2), 4, (None, 3, 2)),
        ((None, None, None), 4, (4, 1, None)),
    ],
)
def test_batch_sizes_add_up(before: Any, dp: int, after: Any) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, before, strict=True) if value is not None}
    found: Any = regenerated(held(config), {**SETTINGS, "dp": dp})
    assert tuple(found.get(key) for key in keys) == after
    whole, micro, steps = (found.get(key) for key in keys)
    if isinstance(whole, int) and isinstance(micro, int):
        assert whole == micro * (steps or 1) * dp


def test_a_configuration_is_changed_only_where_the_layout_is() -> None:
    config = {
        "zero_optimization": {"stage": 2, "round_robin_gradients": True, "x": [1]},
        "bf16": {"enabled": True},
        "y": 1,
    }
    found = regenerated(held(config), {"stage": 3, "dp": 4, "bf16": 1, "sub_group_size": 10})
    assert found["zero_optimization"] == {"stage": 3, "round_robin_gradients": True, "x": [1], "sub_group_size": 10}
    assert found["y"] == 1
    assert config["zero_optimization"] == {"stage": 2, "round_robin_gradients": True, "x": [1]}
    aligned = regenerated(held({}), {**SETTINGS, "alignment": 8, "round_robin": 1, "bf16": 1})
    assert aligned["zero_optimization"] == {"stage": 1, "round_robin_gradients": True, "parameter_alignment": True}
    assert aligned["bf16"] == {"enabled": True}


def test_loss_scaling_goes_over_between_its_two_forms() -> None:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 12, "hysteresis": 3}}
    fresh: Any = loss_scaler(held({}), held(fp16), True)
    assert fresh.function.name == "DynamicLossScaler"
    assert (fresh.state["cur_scale"], fresh.state["delayed_shift"]) == (4096.0, 3)
    numbers = loss_scale_numbers({"loss_scaler": fresh})
    assert numbers == {
        "dynamic_loss_scale": True,
        "cur_scale": 4096.0,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
    }
    back: Any = loss_scaler(
        held({"loss_scale_config": {**numbers, "cur_scale": 64.0, "cur_iter": 9}}), held(fp16), True
    )
    assert (back.state["cur_scale"], back.state["cur_iter"]) == (64.0, 9)
    assert loss_scaler(held({}), held({}), False).state == {"cur_scale": 1.0, "dynamic": False}


def test_weights_alone_say_how_they_are_loaded() -> None:
    """A plain `load_checkpoint` needs more: see tests/interop/test_weights_alone.py."""
    fixtures = Path(__file__).parents[2] / "fixtures"
    for name, call, is_said in (
        ("containers/hf_llama.safetensors", "zero1(dp=2)", True),
        ("containers/hf_llama.safetensors", "safetensors()", False),
        ("deepspeed/z1_dp4", "zero1(dp=2)", False),
        ("deepspeed/z1_dp2_sgdm", "zero3(dp=2)", False),
        ("deepspeed/z1_dp2_elastic", "zero1(dp=3)", False),
    ):
        source = open_checkpoint(fixtures / name)
        target = api.plan(str(source.top), call).target
        assert any("load_optimizer_states=False" in text for text in _advice(source, target)) == is_said
        is_narrow = any(t.dtype == "bf16" for t in source.state.tensors)
        assert any("no masters in f32" in text for text in _advice(source, target)) == (is_said and is_narrow)
    source = open_checkpoint(fixtures / "containers/hf_llama.safetensors")
    for call in (
        "zero1(dp=2)",
        "zero1(dp=2, elastic=1)",
    ):  # one group, in the file's order: the optimizer's is not known
        target = api.plan(str(source.top), call, fill=["exp_avg=0"]).target
        assert ['`group "0" = ...`' in text for text in _advice(source, target)] == [True]


@pytest.mark.parametrize(
    ("call", "states", "said"),
    [
        ("zero3(dp=2)", {"sum"}, "no Adagrad at stage 3"),
        ("zero1(dp=2)", {"sum"}, "IndexError with 2"),
        ("zero0(dp=2)", {"sum"}, ""),
        ("zero3(dp=2)", {"square_avg"}, ""),
    ],
)
def test_states_that_no_loader_takes_are_reported(call: str, states: set[str], said: str) -> None:
    """docs/decisions/odd-optimizers.md: DeepSpeed loads none of these, but all is converted."""
    source = open_checkpoint(Path(__file__).parents[2] / "fixtures" / "deepspeed" / "z1_dp4")
    target = api.plan(str(source.top), call).target
    tensors = tuple(evolve(t, states=tuple({*t.states} & {"weight", "fp32"} | states)) for t in target.tensors)
    assert [said in text for text in _advice(source, evolve(target, tensors=tensors))] == [True] * bool(said)


def test_bool_states_that_change_at_load_are_reported() -> None:
    source = open_checkpoint(Path(__file__).parents[2] / "fixtures" / "deepspeed" / "z1_dp4")
    target = api.plan(str(source.top), "zero1(dp=2)").target
    assert _advice(source, target) == ()
    bools = {k: evolve(e, dtype="bool") if k[1][-1] == "exp_avg" else e for k, e in source.extents.items()}
    (text,) = _advice(evolve(source, extents=bools), target)
    assert text.startswith("torch's optimizers make exp_avg of the parameters' type")


@pytest.mark.parametrize("tied", [True, False])
def test_a_tie_that_only_the_config_has_is_reported(tied: bool, tmp_path: Path) -> None:
    """The module has two names, and a strict load needs both."""
    save_file({"embed.weight": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(f'{{"tie_word_embeddings": {str(tied).lower()}}}')
    source = open_checkpoint(tmp_path)
    said = _advice(source, api.plan(str(tmp_path), "zero1(dp=2)").target)
    assert any("tie_word_embeddings" in text and "load_module_strict=False" in text for text in said) == tied


@pytest.mark.parametrize(
    "call, name, value",
    [
        ("zero1(dp=3)", "stage", None),
        ("zero1(dp=3)", "dp", None),
        ("zero1(dp=3)", "alignment", "two"),
        ("zero1(dp=3)", "tp", -1),
        ("zero3(dp=3)", "sub_group_size", 0.5),
        ("universal()", "stage", "three"),
        ("universal()", "files", -1),
    ],
)
def test_settings_that_shape_the_files_are_numbers(call: str, name: str, value: Any) -> None:
    """A user's own spec, or a plan of others, can have any."""
    checkpoint, plan = planned(EXAMPLE, call)
    settings = {k: v for k, v in plan.target.settings.items() if k != name} | ({} if value is None else {name: value})
    framework = Universal() if call == "universal()" else DeepSpeed()
    with pytest.raises(UcplError) as caught:
        framework.skeleton(evolve(plan.target, settings=settings), plan.targets, checkpoint, None)
    (found,) = caught.value.diagnostics
    assert found.code == "E471" and f"`{name}`" in found.message and name in found.remedy
    assert value is None or repr(value) in found.labels[0].where


def test_tensors_that_are_new_stand_where_the_model_has_them() -> None:
    """A module registers a new parameter among the others.

    ZeRO-0 numbers them in that order.
    """
    from ucpl.formats.deepspeed.target import _with_new

    kinds: Any = dict.fromkeys(("new", "a", "more", "b", "c", "last"))
    assert _with_new(["a", "tied", "c", "b"], kinds) == ["new", "a", "more", "tied", "c", "last", "b"]
    assert _with_new([], kinds) == []


def test_new_tensors_are_put_among_many_without_looking_through_them_for_each() -> None:
    from ucpl.formats.deepspeed.target import _with_new

    Asked.times = 0
    names = [Asked(i) for i in range(1000)]
    kinds: Any = {Asked(i): None for i in range(1000)} | {"new": None}
    assert _with_new(names, kinds) == [*map(str, range(1000)), "new"]
    assert Asked.times < 10_000
