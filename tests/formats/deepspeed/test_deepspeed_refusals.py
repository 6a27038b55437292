"""Contradictions in files of one step.

Each is an error with its key.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

import ucpl
from tests.fuzz.containers import pickle_of, write_torch_file
from ucpl.errors import Diagnostic, UcplError
from ucpl.extents import Extent, PickledCall, Size, StorageRef, TensorRef
from ucpl.extents.parallel_facts import CarriedByRank
from ucpl.files.pickles import loads
from ucpl.files.scalars import number_of
from ucpl.files.torch_files import read_torch_file
from ucpl.formats.deepspeed.copies import is_zero
from ucpl.formats.opening import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
Z0, Z1, Z1_BF16, Z2, Z3 = "z0_dp2_bf16", "z1_dp4", "z1_dp2_bf16opt", "z2_dp3_frozen", "z3_dp2_subgroup"
ELASTIC, DEALT, MOE, TP, PP = "z1_dp2_elastic", "z2_dp2_roundrobin", "moe_ep2_dp4_z1", "tp2_dp2_z1_uneven", "pp2_dp2_z1"
STATE = "optimizer_state_dict"
COUNTED = count()
MASTERS = "single_partition_of_fp32_groups"


def copied(name: str, tmp_path: Path) -> Path:
    target = tmp_path / name
    shutil.copytree(FIXTURES / name, target, ignore=shutil.ignore_patterns("truth*"))
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target / "global_step3"


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """Edit the value tree of a file in place; its storages stay."""
    part, raw, value = read_torch_file(path.parent, path.name), path.read_bytes(), loads(pickle_of(path))
    edit(value)
    write_torch_file(path, value, part, raw)


def refusal(folder: Path) -> Diagnostic:
    with pytest.raises(UcplError) as caught:
        open_checkpoint(folder)
    return caught.value.diagnostics[0]


def meta(rank: int | None = None, mp: int = 0) -> str:
    return f"{'' if rank is None else f'zero_pp_rank_{rank}_'}mp_rank_{mp:02d}_model_states.pt"


def optim(rank: int, mp: int = 0, prefix: str = "") -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"


def cut(tensor: TensorRef, rows: int) -> TensorRef:
    """The first rows of a tensor."""
    return TensorRef(tensor.storage, tensor.offset, (rows, *tensor.shape[1:]), tensor.stride)


def first_of(mapping: dict[str, Any]) -> str:
    return next(iter(mapping))


def shorten(listed: list[Any], i: int, by: int = 1) -> None:
    listed[i] = cut(listed[i], listed[i].shape[0] - by)


def lengthen(listed: list[Any], i: int) -> None:
    """One more element, all equal to the first, without a longer storage."""
    listed[i] = TensorRef(listed[i].storage, 0, (listed[i].shape[0] + 1,), (0,))


CASES: dict[str, tuple[str, str, Callable[[Any], object], str, str]] = {
    # name: (checkpoint, file, edit, code, text of the message)
    "a count of ranks that is too small": (
        *(Z1, optim(1), lambda v: v[STATE].update(partition_count=[4, 3]), "E454"),
        "was written by 3 data-parallel ranks",
    ),
    "a count of ranks that is too large": (
        *(Z1, optim(1), lambda v: v[STATE].update(partition_count=[5, 4]), "E454"),
        "was written by 5 data-parallel ranks",
    ),
    "a count of ranks at stage 3": (
        *(Z3, optim(1), lambda v: v[STATE].update(partition_count=4), "E454"),
        "was written by 4 data-parallel ranks",
    ),
    "a count of ranks that is no number": (
        *(Z1, optim(1), lambda v: v[STATE].update(partition_count=["x"]), "E455"),
        "optimizer_state_dict/partition_count/0 is the text 'x'",
    ),
    "a count of ranks of experts": (
        *(MOE, optim(3), lambda v: v[STATE]["partition_count"].__setitem__(-1, 3), "E454"),
        "was written by 3 data-parallel ranks",
    ),
    "paddings of another alignment": (
        *(Z1, optim(0), lambda v: v[STATE]["param_alignment_paddings"][0].__setitem__(0, 2), "E456"),
        "param_alignment_paddings",
    ),
    "paddings of a group without a tensor": (
        *(Z1, meta(), lambda v: v["param_shapes"].append({}), "E456"),
        "param_alignment_paddings",
    ),
    "an elastic shard beside a rigid one": (
        *(Z1, optim(2), lambda v: v[STATE].update(base_optimizer_state=[]), "E456"),
        "do not state the same form",
    ),
    "states that are neither a dict nor a list": (
        *(Z1, optim(0), lambda v: v[STATE].update(base_optimizer_state=Size([1])), "E455"),
        "base_optimizer_state is the shape [1], expected is a dict or a list",
    ),
    "a flat buffer too many": (
        *(Z1, optim(1), lambda v: v[STATE][MASTERS].append(v[STATE][MASTERS][0]), "E456"),
        "holds 3 flat buffers, param_shapes states 2 groups",
    ),
    "a flat buffer too few": (
        *(Z1, optim(1), lambda v: v[STATE][MASTERS].pop(), "E456"),
        "holds 1 flat buffers, param_shapes states 2 groups",
    ),
    "a flat buffer that is too short": (
        *(Z1, optim(1), lambda v: shorten(v[STATE][MASTERS], 0), "E458"),
        "the flat buffer has",
    ),
    "a flat buffer that is too long": (
        *(Z1, optim(1), lambda v: lengthen(v[STATE][MASTERS], 0), "E458"),
        "the flat buffer has",
    ),
    "a group of the optimizer too many": (
        *(Z1, optim(0), lambda v: groups(v).append(dict(groups(v)[0], params=[2])), "E456"),
        "the optimizer has 3 parameter groups, param_shapes states 2",
    ),
    "two numbers for one flat buffer": (
        *(Z1, optim(1), lambda v: groups(v)[1].update(params=[1, 2]), "E455"),
        "expected is a group of one flat buffer",
    ),
    "a group too few": (
        *(Z1, optim(1), lambda v: groups(v).pop(), "E455"),
        "expected is a group of one flat buffer",
    ),
    "a state of one shard that differs": (
        *(Z1, optim(1), lambda v: v[STATE]["base_optimizer_state"]["state"][0].update(step=7.0), "E456"),
        "ranks do not agree on step",
    ),
    "a number that is of each rank's part": (
        *(Z1, "*optim*", lambda v: v[STATE]["base_optimizer_state"]["state"][0].update(RMS=next(COUNTED)), "E460"),
        "each rank has a number RMS of its own for ",
    ),
    "a state that is of another length": (
        *(Z1, optim(1), lambda v: shorten(v[STATE]["base_optimizer_state"]["state"][0], "exp_avg"), "E460"),  # type: ignore[arg-type]
        "the state exp_avg is of shape",
    ),
    "a stage that is none": (
        *(Z1, optim(0), lambda v: v[STATE].update(zero_stage=4), "E455"),
        "zero_stage is the number 4, expected is 1, 2 or 3",
    ),
    "a shard of another stage": (
        *(Z1, optim(3), lambda v: v[STATE].update(zero_stage=2), "E456"),
        "one folder has shards of stage 1 and of stage 2",
    ),
    "shards of stage 3 without slices of the module": (
        *(Z1, "*optim*", lambda v: v[STATE].update(zero_stage=3), "E456"),
        "optimizer shards of stage 3 do not go with these model states",
    ),
    "a world of model-parallel ranks": (
        *(Z1, meta(), lambda v: v.update(mp_world_size=2), "E454"),
        "mp_world_size is 2",
    ),
    "pipeline stages without layers": (
        *(TP, meta(), lambda v: v.update(checkpoint_parallel_dimensions={"pp_degree": 2, "tp_degree": 1}), "E457"),
        "2 stages of a pipeline and no files of layers",
    ),
    "more pipeline stages than there are ranks": (
        *(Z1, meta(), lambda v: v.update(checkpoint_parallel_dimensions={"pp_degree": 3, "tp_degree": 1}), "E454"),
        "there are files of 1 model-parallel ranks, and pp_degree is 3",
    ),
    "BF16_Optimizer without ZeRO": (
        *(Z0, meta(), lambda v: v["optimizer"].update(base_optimizer_state={}), "E457"),
        "whose shards (bf16_zero_pp_rank_*) are not there",
    ),
    "flat masters of another number of groups": (
        *(Z0, meta(), lambda v: v["optimizer"].update(fp32_groups_flat=[]), "E455"),
        "expected is masters of 2 groups",
    ),
    "experts of AutoEP": (
        *(Z1, meta(), lambda v: v.update(ds_autoep_layers={"0": 4}), "E457"),
        "its experts are AutoEP's",
    ),
    "a parameter stated twice": (
        *(Z1, meta(), lambda v: v["param_shapes"][1].update([next(iter(v["param_shapes"][0].items()))]), "E456"),
        "param_shapes names a parameter twice",
    ),
    "a parameter that the module lacks": (
        *(Z1, meta(), lambda v: v["module"].pop(first_of(v["param_shapes"][0])), "E459"),
        "is in param_shapes but not in the module",
    ),
    "a frozen parameter that the module lacks": (
        *(Z2, meta(), lambda v: v["module"].pop(first_of(v["frozen_param_shapes"])), "E459"),
        "is in frozen_param_shapes but not in the module",
    ),
    "a shape that is not the module's": (
        *(Z1, meta(), lambda v: v["param_shapes"][0].update({first_of(v["param_shapes"][0]): Size([1, 2])}), "E458"),
        "in the module and [1, 2] in param_shapes",
    ),
    "a rank whose module has other names": (
        *(Z3, meta(1), lambda v: v["module"].update(more=v["module"][first_of(v["param_shapes"][0])]), "E456"),
        "do not state the same names",
    ),
    "a rank that states other shapes": (
        *(Z3, meta(1), lambda v: v["param_shapes"][0].popitem(), "E456"),
        "do not state the same parameters",
    ),
    "a fragment of another length": (
        *(Z2, meta(), lambda v: _bend(v["frozen_param_fragments"]), "E458"),
        "the frozen",
    ),
    "a second name of what is not there": (
        *(Z1, meta(), lambda v: v["shared_params"].update(x=next(iter(v["shared_params"].values()))), "E459"),
        "shared_params ties",
    ),
    "names that are second names of each other": (
        *(Z1, meta(), lambda v: v["shared_params"].update({o: a for a, o in v["shared_params"].items()}), "E455"),
        "expected is a parameter that is no second name itself",
    ),
    "a sub-group too many": (
        *(Z3, optim(1), lambda v: v[STATE]["fp32_flat_groups"].append(v[STATE]["fp32_flat_groups"][0]), "E456"),
        "sub-groups, param_shapes states",
    ),
    "a sub-group that is too short": (
        *(Z3, optim(1), lambda v: shorten(v[STATE]["fp32_flat_groups"], 0), "E458"),
        "the flat buffer has",
    ),
    "a sub-group of no group": (
        *(Z3, optim(0), lambda v: v[STATE][STATE]["param_groups"][0]["params"].pop(), "E456"),
        "the optimizer's groups name the sub-groups",
    ),
    "sub-groups of another size": (
        *(Z3, meta(0), lambda v: v["ds_config"]["zero_optimization"].update(sub_group_size=10**9), "E456"),
        "contradict sub_group_size 1000000000",
    ),
    "a master too few": (
        *(Z0, meta(), lambda v: v["optimizer"]["fp32_groups"][0].pop(), "E455"),
        "expected is a master for each parameter",
    ),
    "a master too many": (
        *(Z0, meta(), lambda v: v["optimizer"]["fp32_groups"][0].append(v["optimizer"]["fp32_groups"][0][0]), "E455"),
        "expected is a master for each parameter",
    ),
    "bf16 that the names deny": (
        *(Z1, meta(), lambda v: v["ds_config"].update(bf16={"enabled": True}), "E456"),
        "ds_config says bf16 is on",
    ),
    "experts of another count": (
        *(MOE, meta(), lambda v: v.update(num_experts=[n + 1 for n in v["num_experts"]]), "E456"),
        "num_experts is",
    ),
    "experts of which ranks hold fewer than files have": (
        *(MOE, meta(), lambda v: _without_last_local(v["param_shapes"]), "E456"),
        "parameters, and param_shapes names",
    ),
    "experts of other numbers than files have": (
        *(MOE, meta(), lambda v: _next_local(v["param_shapes"]), "E456"),
        "experts have files, and each rank holds",
    ),
    "a frozen parameter without a fragment": (
        *(Z3, "*model*", lambda v: _frozen(v), "E459"),
        "the frozen more has no fragment",
    ),
    "an expert's tensor in another's file": (
        *(MOE, "layer_1_expert_3_mp_rank_00_model_states.pt", lambda v: _renumber(v), "E455"),
        "is no tensor of expert 3",
    ),
    "layers of another shape": (
        *(PP, "layer_01-model_states.pt", lambda v: v.update({n: cut(v[n], 1) for n in list(v)[:1]}), "E458"),
        "in its layer's file and",
    ),
    "a layer on two stages": (
        *(PP, meta(mp=1), lambda v: v["param_shapes"][0].update({"1.more": Size([2])}), "E456"),
        "both say that they hold layer 1",
    ),
    "stages of other hyper-parameters": (
        *(PP, optim(0, mp=1), lambda v: groups(v)[0].update(lr=0.5), "E456"),
        "stages 0 and 1 do not agree on the hyper-parameters of group 0",
    ),
    "an order that is not the module's": (
        *(PP, meta(), lambda v: v["param_shapes"].__setitem__(0, dict(reversed(v["param_shapes"][0].items()))), "E457"),
        "are not in the order of the module on stage 0",
    ),
}


def groups(value: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = value[STATE]["base_optimizer_state"]["param_groups"]
    return found


def _bend(fragments: dict[str, TensorRef]) -> None:
    name = first_of(fragments)
    fragments[name] = cut(fragments[name], fragments[name].shape[0] - 1)


def _renumber(value: dict[str, Any]) -> None:
    for name in list(value):
        value[name.replace(".deepspeed_experts.3.", ".deepspeed_experts.4.")] = value.pop(name)


def _frozen(value: dict[str, Any]) -> None:
    """One more frozen parameter in stage 3's form, without values."""
    value["frozen_param_shapes"] = {**(value["frozen_param_shapes"] or {}), "more": Size([2])}
    value["module"]["more"] = TensorRef(StorageRef("9000", "f32", 0), 0, (0,), (1,))


MARK = "deepspeed_experts."


def _without_last_local(groups: list[dict[str, Any]]) -> None:
    last = _last_local(groups)
    for group in groups:
        for name in [name for name in group if f"{MARK}{last}." in name]:
            del group[name]


def _next_local(groups: list[dict[str, Any]]) -> None:
    last = _last_local(groups)
    for group in groups:
        for name in list(group):
            group[name.replace(f"{MARK}{last}.", f"{MARK}{last + 1}.")] = group.pop(name)


def _last_local(groups: list[dict[str, Any]]) -> int:
    return max(int(name.partition(MARK)[2].partition(".")[0]) for group in groups for name in group if MARK in name)


@pytest.mark.parametrize("name", CASES)
def test_a_contradiction_is_refused_by_its_place(name: str, tmp_path: Path) -> None:
    checkpoint, pattern, edit, code, text = CASES[name]
    folder = copied(checkpoint, tmp_path)
    for path in sorted(folder.glob(pattern)):
        change(path, edit)
    found = refusal(folder)
    assert (found.code, text in found.message) == (code, True), found.message
    assert found.labels


def test_the_files_are_good_before(tmp_path: Path) -> None:
    for name in (Z0, Z1, Z1_BF16, Z2, Z3, ELASTIC, DEALT, MOE, TP, PP):
        folder = copied(name, tmp_path)
        for path in folder.glob("*.pt"):
            change(path, lambda value: None)
        assert open_checkpoint(folder).extents


# ---- read values, compared with stated ones
# ----------------------------------------------------------------------------


def test_a_rank_beyond_the_last_is_named(tmp_path: Path) -> None:
    folder = copied(Z1, tmp_path)
    shutil.copy(folder / optim(0), folder / optim(4))
    found = refusal(folder)
    assert (found.code, found.message) == ("E454", "dp rank 4 has a file, but there are 4 ranks")


def test_numbers_of_the_first_rank_are_read_from_their_place(tmp_path: Path) -> None:
    """A number is carried once, from the first shard with it."""
    for name in (Z1, Z3):
        opened = open_checkpoint(copied(name, tmp_path))
        places = {extent.file for per in opened.scalar_extents.values() for extent in per.values()}
        assert places == {optim(0)}
        assert not {(e.file, e.key) for per in opened.scalar_extents.values() for e in per.values()} & {
            *opened.extents,
            *opened.carried_extents,
        }


def test_a_step_that_is_a_tensor_of_no_dims_is_a_number(tmp_path: Path) -> None:
    """For one element without dims, `step` looks like moments."""
    folder = copied(Z0, tmp_path)
    opened = open_checkpoint(folder)
    assert all("step" not in tensor.states for tensor in opened.state.tensors)
    assert set(opened.state.scalars) == {"step"}


def test_views_of_one_storage_at_other_places_are_two_tensors(tmp_path: Path) -> None:
    """Aliases of ZeRO-0 are names of one place, not of one storage."""
    folder = copied(Z0, tmp_path)

    def share(value: Any) -> None:
        storage = StorageRef("9000", "bf16", 8)
        value["module"]["one"] = TensorRef(storage, 0, (4,), (1,))
        value["module"]["two"] = TensorRef(storage, 4, (4,), (1,))
        value["module"]["uno"] = TensorRef(storage, 0, (4,), (1,))

    change(folder / meta(), share)
    found = open_checkpoint(folder)
    assert {name: found.state.aliases.get(name) for name in ("one", "two", "uno")} == {
        "one": None,
        "two": None,
        "uno": "one",
    }


def _zero_changed(changed: dict[str, Any], value: Any) -> None:
    value["ds_config"]["zero_optimization"].update(changed)


def test_integer_sub_group_sizes_are_used(tmp_path: Path) -> None:
    for stated, expected in ((2.5, 10**9), (2e3, 2000), (float("inf"), 10**9), ("2000", 10**9), (0, 10**9)):
        folder = copied(Z1, tmp_path / str(stated))
        changed = {"sub_group_size": stated}
        change(folder / meta(), partial(_zero_changed, changed))
        assert open_checkpoint(folder).state.settings["sub_group_size"].value == expected


def test_states_are_those_of_the_group_s_number(tmp_path: Path) -> None:
    """`params` numbers the states; the place in the list does not."""
    folder = copied(Z1, tmp_path)

    def swap(value: Any) -> None:
        base = value[STATE]["base_optimizer_state"]
        base["state"] = {0: base["state"][1], 1: base["state"][0]}
        groups(value)[0]["params"], groups(value)[1]["params"] = [1], [0]

    before = open_checkpoint(folder)
    for rank in range(4):
        change(folder / optim(rank), swap)
    after = open_checkpoint(folder)
    assert after.state.tensors == before.state.tensors
    places = {key[-2:] for _, key in after.extents if key[-1] == "exp_avg"}
    assert places == {(0, "exp_avg"), (1, "exp_avg")}
    assert {e.numel for (f, k), e in after.extents.items() if k[-2:] == (1, "exp_avg") and f == optim(0)} == {
        e.numel for (f, k), e in before.extents.items() if k[-2:] == (0, "exp_avg") and f == optim(0)
    }


def test_an_elastic_checkpoint_has_the_rates_of_its_groups(tmp_path: Path) -> None:
    folder = copied(ELASTIC, tmp_path)
    count = len(open_checkpoint(folder).state.groups)
    rates = [0.5 + g for g in range(count)]
    change(folder / meta(), lambda v: v["lr_scheduler"].update(_last_lr=rates, base_lrs=[2 * r for r in rates]))
    found = open_checkpoint(folder).state.groups
    assert [(g.hyper["lr"], g.hyper["initial_lr"]) for g in found] == [(rate, 2 * rate) for rate in rates]


def test_zero_stage_of_an_enum_and_of_a_number_is_one(tmp_path: Path) -> None:
    folder = copied(Z1, tmp_path)
    change(folder / optim(0), lambda v: v[STATE].update(zero_stage=1))
    assert open_checkpoint(folder).state.settings["stage"].value == 1
    change(
        folder / optim(0), lambda v: v[STATE].update(zero_stage=PickledCall(v[STATE]["loss_scaler"].function, (1, 2)))
    )
    assert refusal(folder).code == "E455"


def test_the_stage_of_an_optimizer_that_states_none_is_one(tmp_path: Path) -> None:
    found = open_checkpoint(copied(Z1_BF16, tmp_path)).state.settings
    assert (found["stage"].value, found["bf16_optimizer"].value) == (1, 1)


@pytest.mark.parametrize(("name", "elements"), [(Z0, 8), (Z3, 4)])
def test_alignment_is_of_sixteen_bytes_where_the_configuration_asks_for_it(
    name: str, elements: int, tmp_path: Path
) -> None:
    folder = copied(name, tmp_path)
    assert open_checkpoint(folder).state.settings["alignment"].value == 1
    for path in folder.glob("*model_states.pt"):
        change(path, partial(_zero_changed, {"parameter_alignment": True}))
    assert open_checkpoint(folder).state.settings["alignment"].value == elements


@pytest.mark.parametrize(("name", "elements"), [("z1_dp2_bf16", 8), (Z1, 4)])
def test_alignment_is_that_of_the_trained_dtype(name: str, elements: int, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    change(folder / meta(), partial(_zero_changed, {"parameter_alignment": True}))
    found = refusal(folder)
    assert (found.code, found.labels[1].text) == ("E456", f"alignment {elements}")


def test_each_parameter_of_stage_3_is_padded_separately(tmp_path: Path) -> None:
    opened = open_checkpoint(copied(Z3, tmp_path))
    dp = 2
    assert opened.state.parallel.flats
    for flat in opened.state.parallel.flats:
        numels = [prod(shape) for _, shape in flat.members]
        padded = [-(-n // dp) * dp for n in numels]
        assert flat.starts == tuple(sum(padded[:i]) for i in range(len(padded)))
        assert flat.numel == flat.starts[-1] + numels[-1]
    assert any(n % dp for flat in opened.state.parallel.flats for n in (prod(shape) for _, shape in flat.members))


def test_flats_of_experts_are_cut_by_those_who_share_them(tmp_path: Path) -> None:
    opened = open_checkpoint(copied(MOE, tmp_path))
    found = {(flat.cut, flat.coordinates.get("ep")) for flat in opened.state.parallel.flats}
    assert found == {("dp", None), ("edp", 0), ("edp", 1)}
    assert opened.state.parallel.experts is not None
    of = {name: one.number // (one.count // 2) for name, one in opened.state.parallel.experts.of.items()}
    for flat in opened.state.parallel.flats:
        if flat.cut == "edp":
            assert {of[name] for name, _ in flat.members} == {flat.coordinates["ep"]}


def zero0(path: Path, module: dict[str, torch.Tensor], optimizer: Any) -> Path:
    """A checkpoint without ZeRO, as torch saves it."""
    value = {
        "module": module,
        "buffer_names": [],
        "optimizer": optimizer,
        "param_shapes": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {"bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }
    path.mkdir()
    torch.save(value, path / meta())
    return path


def masters(*rows: list[torch.Tensor]) -> dict[str, Any]:
    numbers = iter(range(100))
    groups = [{"lr": 0.1, "params": [next(numbers) for _ in row]} for row in rows]
    return {"optimizer_state_dict": {"state": {}, "param_groups": groups}, "fp32_groups": [list(row) for row in rows]}


def test_parameters_of_one_shape_are_distinguished_by_their_masters(tmp_path: Path) -> None:
    """Weights share a storage; masters round to the even one."""
    one = torch.tensor([1.0, 2.0, 3.0, 1.0 + 2**-8])
    two = torch.tensor([4.0, 5.0, 6.0, 1.0 + 3 * 2**-8])
    both = torch.cat([one, two]).bfloat16()
    module = {"a": both[:4], "b": both[4:]}
    assert not torch.equal(module["a"].float(), one)
    found = open_checkpoint(zero0(tmp_path / "s", module, masters([two], [one])))
    assert [group.members for group in found.state.groups] == [("b",), ("a",)]


def test_indistinguishable_parameters_are_refused(tmp_path: Path) -> None:
    module = {"a": torch.ones(4).bfloat16(), "b": torch.ones(4).bfloat16()}
    found = refusal(zero0(tmp_path / "s", module, masters([torch.ones(4)], [torch.ones(4)])))
    assert (found.code, "several orders fit" in found.message) == ("E461", True)
    assert found.labels[-1].where == "module/b"
    assert found.labels[-1].text == "of shape [4], may be number 0 of group 0, or number 0 of group 1"
    none = refusal(zero0(tmp_path / "t", module, masters([torch.ones(5)])))
    assert (none.code, "none of their orders fits" in none.message) == ("E461", True)


def test_the_step_of_a_parameter_without_dims_is_a_number(tmp_path: Path) -> None:
    states = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(0.5)}
    optimizer = {"state": {0: states, 1: states}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    module = {"gain": torch.tensor(2.0), "more": torch.tensor(2.0)}
    found = open_checkpoint(zero0(tmp_path / "s", module, optimizer))
    assert [tensor.states for tensor in found.state.tensors] == [("exp_avg",), ("exp_avg",)]
    assert {name: number_of(value) for name, value in found.state.scalars["step"].items()} == {
        "gain": 3.0,
        "more": 3.0,
    }


def test_the_expert_before_the_last_is_missed(tmp_path: Path) -> None:
    folder = copied(MOE, tmp_path)
    (folder / "layer_1_expert_6_mp_rank_00_model_states.pt").unlink()
    assert refusal(folder).message == "layer_1_expert_6_mp_rank_00_model_states.pt is missing"


def test_moments_are_zero_whatever_their_sign(tmp_path: Path) -> None:
    numbers = np.array([1.0, 0.0, -0.0, 0.0, np.float32(1.8e-43), 0.0], "<f4")
    (tmp_path / "a").write_bytes(bytes(8) + numbers.tobytes())
    extent = Extent("a", ("k",), "f32", (5,), (1,), 1, "0", 8, numbers.nbytes)
    found = {(low, high): is_zero(tmp_path, extent, low, high) for low in range(5) for high in range(low + 1, 6)}
    assert {span for span, zero in found.items() if zero} == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (4, 5)}
    assert not is_zero(tmp_path, evolve(extent, stride=(2,), shape=(2,)), 0, 2)


def test_paddings_between_parameters_are_written_as_they_are_checked(tmp_path: Path) -> None:
    target = tmp_path / "there"
    ucpl.convert(str(FIXTURES / Z1), str(target), "zero1(dp=2, alignment=4)", workers=1)
    found = open_checkpoint(target)
    assert found.state.settings["alignment"].value == 4
    assert any(
        gap
        for flat in found.state.parallel.flats
        for gap in np.diff(flat.starts) - [prod(s) for _, s in flat.members[:-1]]
    )


def test_each_stage_keeps_its_own_client_state(tmp_path: Path) -> None:
    folder = copied(PP, tmp_path)
    for stage in range(2):
        change(folder / meta(mp=stage), partial(_noted, stage))
    found = open_checkpoint(folder).state.parallel.carried_by_rank
    assert (found.pp, found.tp, found.files) == (2, 1, 1)
    assert [mine["mine"] for mine in found.of] == [0, 1]
    for call, expected in (("zero1(dp=1, pp=2)", [0, 1]), ("zero1(dp=1, pp=1)", [0])):
        target = tmp_path / call
        ucpl.convert(str(folder), str(target), call, workers=1)
        assert [part["mine"] for part in open_checkpoint(target).state.parallel.carried_by_rank.of] == expected


def _noted(stage: int, value: Any) -> None:
    value["mine"] = stage


def test_callers_states_stand_by_pp_tp_and_dp() -> None:
    """The last coordinate is the fastest, as in mp_rank_NN."""
    places = [(pp, tp, dp) for pp in range(2) for tp in range(3) for dp in range(4)]
    states = CarriedByRank(tuple({"place": place} for place in places), pp=2, tp=3)
    assert states.files == 4
    assert all(states.of[states.number(place, (2, 3, 4))] == {"place": place} for place in places)
    assert states.taken(2, 3, 2) == {4 * n for n in range(6)}  # other dp ranks take that of the first
