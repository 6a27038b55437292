"""DeepSpeed's folders: facts, errors, and orders of DeepSpeed's own code."""

from __future__ import annotations

import os
import random
import shutil
from collections import OrderedDict
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucpl.errors import UcplError, catalogue
from ucpl.extents import Extent, PickledCall, Scalar
from ucpl.extents.parallel_facts import pack, slice_numel
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.scalars import number_of
from ucpl.formats.deepspeed.order import deal, run, undeal
from ucpl.formats.deepspeed.store import DeepSpeed
from ucpl.formats.matching import Slots, Unclear, match

EXAMPLE = Path(__file__).parents[3] / "examples" / "checkpoint"
SHARED = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[2] / "fixtures")) / "deepspeed"
DENSE = sorted(p.parent for p in SHARED.glob("z*/latest"))
assert DENSE, f"no checkpoints in {SHARED}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example that a test may damage."""
    return shutil.copytree(EXAMPLE, tmp_path / "save")


def opened(path: Path) -> Checkpoint:
    return DeepSpeed().open(path)


def refusal(path: Path) -> Any:
    with pytest.raises(UcplError) as caught:
        opened(path)
    diagnostic = caught.value.diagnostics[0]
    assert catalogue()[diagnostic.code].exit_status == 3
    assert diagnostic.labels and diagnostic.labels[0].file
    assert diagnostic.remedy
    return diagnostic


def values(checkpoint: Checkpoint, extent: Extent) -> np.ndarray:
    raw = (checkpoint.root / extent.file).read_bytes()
    dtype = {"f32": "<f4", "bf16": "<u2", "i64": "<i8"}[extent.dtype]
    flat = np.frombuffer(
        raw, dtype, count=extent.storage_bytes // np.dtype(dtype).itemsize, offset=extent.storage_start
    )
    assert extent.is_contiguous
    return flat[extent.offset : extent.offset + extent.numel].reshape(extent.shape)


# ---- facts
# -------------------------------------------------------------------------------------------------------------


def test_a_save_folder_and_its_step_are_the_same_checkpoint() -> None:
    one, other = opened(EXAMPLE), opened(EXAMPLE / "global_step3")
    assert one.extents == other.extents
    assert (one.tag, other.tag) == ("global_step3", "global_step3")
    assert one.root == EXAMPLE / "global_step3"


def test_the_example_is_read_completely() -> None:
    found = opened(EXAMPLE)
    settings = {name: setting.value for name, setting in found.state.settings.items()}
    assert (
        settings | {"stage": 2, "dp": 4, "tp": 1, "bf16": 0, "round_robin": 0, "alignment": 1, "elastic": 0} == settings
    )
    assert all(setting.origin for setting in found.state.settings.values())
    kinds = {t.name: t.kind for t in found.state.tensors}
    assert kinds["position.weight"] == "frozen"
    assert kinds["seen"] == "buffer"
    assert found.state.aliases == {"head.weight": "token.weight"}
    assert "head.weight" not in kinds
    assert [group.hyper["weight_decay"] for group in found.state.groups] == [0.1, 0.0]
    assert found.state.groups[0].members == ("token.weight", "mix.weight", "gate_up.weight", "down.weight")
    assert {number_of(v) for v in found.state.scalars["step"].values()} == {3.0}
    assert found.state.carried["epoch"] == 1
    assert list(found.state.carried) == ["epoch", "cursor"]
    assert [key for _, key in found.carried_extents] == [("cursor",)]
    assert found.state.blobs["global_steps"] == 3
    assert isinstance(found.state.blobs["loss_scaler"], PickledCall)
    assert [t.states for t in found.state.tensors if t.name == "gate_up.weight"] == [("fp32", "exp_avg", "exp_avg_sq")]


def test_flat_buffers_hold_what_param_shapes_says() -> None:
    """Against the state that the engines themselves had."""
    truth = torch.load(EXAMPLE / "truth.pt", weights_only=True)
    found = opened(EXAMPLE)
    for flat in found.state.parallel.flats:
        for state, key in (("fp32", "single_partition_of_fp32_groups"), ("exp_avg", "base_optimizer_state")):
            parts = []
            for file in found.files[1:]:
                base = ("optimizer_state_dict", key)
                place = (*base, flat.bucket) if state == "fp32" else (*base, "state", flat.bucket, state)
                parts.append(values(found, found.extents[file, place]))
            whole = np.concatenate(parts)
            for start, (name, shape) in zip(flat.starts, flat.members, strict=True):
                size = int(np.prod(shape))
                expected = truth["params"][name][state].numpy().reshape(-1)
                assert np.array_equal(whole[start : start + size], expected), (name, state)


@pytest.mark.parametrize("path", DENSE, ids=lambda p: p.name)
def test_every_tensor_of_every_file_is_payload_carried_or_a_number(path: Path) -> None:
    found = opened(path)
    from ucpl.files.torch_files import read_torch_file

    for file in found.files:
        for extent in read_torch_file(found.root, file).extents():
            place = (file, extent.key)
            homes = (place in found.extents) + (place in found.carried_extents)
            is_number = extent.key[-1] == "step" and extent.shape == ()
            is_placeholder = extent.numel == 0 and extent.key[0] == "module"
            assert homes == (0 if is_number or is_placeholder else 1), place
    members = [name for group in found.state.groups for name in group.members]
    assert sorted(members) == sorted(t.name for t in found.state.tensors if t.kind == "parameter")
    assert {name for flat in found.state.parallel.flats for name, _ in flat.members} in (set(members), set())


def test_round_robin_is_undone() -> None:
    dealt, plain = opened(SHARED / "z2_dp2_roundrobin"), opened(SHARED / "z1_dp4")
    assert [g.members for g in dealt.state.groups] == [g.members for g in plain.state.groups]
    assert [name for name, _ in dealt.state.parallel.flats[0].members] == [*deal(plain.state.groups[0].members, 2)]


# ---- errors
# ------------------------------------------------------------------------------------------------------------


def step(folder: Path) -> Path:
    return folder / "global_step3"


def optim(folder: Path, rank: int, prefix: str = "") -> Path:
    return step(folder) / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def test_a_missing_rank_is_named(folder: Path) -> None:
    optim(folder, 2).unlink()
    found = refusal(folder)
    assert found.code == "E452"
    assert "zero_pp_rank_2_mp_rank_00_optim_states.pt" in found.message


@pytest.mark.fault(
    "Folders of DeepSpeed and Hugging Face",
    "a rank's file is missing, also the last one",
    "named; never read as fewer ranks",
)
def test_the_last_rank_missing_is_no_smaller_world(folder: Path) -> None:
    optim(folder, 3).unlink()
    assert refusal(folder).code == "E452"


def test_missing_model_states(folder: Path) -> None:
    (step(folder) / "mp_rank_00_model_states.pt").unlink()
    assert refusal(folder).code == "E452"


@pytest.mark.fault(
    "Folders of DeepSpeed and Hugging Face", "two files for one rank, shards of two precisions or stages", "refused"
)
def test_two_files_for_one_rank(folder: Path) -> None:
    shutil.copy(optim(folder, 1), step(folder) / "zero_pp_rank_01_mp_rank_00_optim_states.pt")
    found = refusal(folder)
    assert found.code == "E453"
    assert len(found.labels) == 2


def test_shards_of_two_precisions(folder: Path) -> None:
    shutil.copy(optim(folder, 1), optim(folder, 1, "bf16_"))
    assert refusal(folder).code == "E453"


def test_stages_mixed(folder: Path) -> None:
    shutil.copy(step(folder) / "mp_rank_00_model_states.pt", step(folder) / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert refusal(folder).code == "E453"


@pytest.mark.fault("Folders of DeepSpeed and Hugging Face", "a file too many, or of another run", "refused")
def test_a_rank_too_many(folder: Path) -> None:
    shutil.copy(optim(folder, 1), optim(folder, 10))
    found = refusal(folder)
    assert found.code == "E454"
    assert "dp rank 10" in found.message


@pytest.mark.fault("Folders of DeepSpeed and Hugging Face", "`latest` is missing, empty or leads outside", "refused")
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"../elsewhere", b"global_step4", b"a\nb", b"x" * 5000, b"x" * 300, b"loop"]
)
def test_a_bad_latest(folder: Path, content: bytes) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "latest").write_bytes(content)
    assert refusal(folder).code == "E451"


def test_steps_without_latest(folder: Path) -> None:
    (folder / "latest").unlink()
    found = refusal(folder)
    assert found.code == "E451"
    assert str(step(folder)) in found.remedy
    assert opened(step(folder)).tag == "global_step3"


def test_nothing_there(tmp_path: Path) -> None:
    assert refusal(tmp_path).code == "E450"
    assert refusal(tmp_path / "nothing").code == "E450"
    assert not DeepSpeed().recognises(tmp_path)


def test_a_file_of_another_kind(folder: Path) -> None:
    shutil.copy(optim(folder, 1), step(folder) / "mp_rank_00_model_states.pt")
    found = refusal(folder)
    assert (found.code, found.labels[0].where) == ("E455", "module")


def test_a_shard_of_another_run(folder: Path) -> None:
    shutil.copy(SHARED / "z1_dp4" / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", optim(folder, 1))
    assert refusal(folder).code == "E456"


@pytest.mark.fault(
    "Folders of DeepSpeed and Hugging Face", "files of a pipeline or of experts in a dense folder", "refused"
)
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("layer_00-model_states.pt", "E457"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "E452"),
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "E455"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "E457"),
    ],
)
def test_parallel_kinds_are_not_misread(folder: Path, name: str, code: str) -> None:
    shutil.copy(step(folder) / "mp_rank_00_model_states.pt", step(folder) / name)
    assert refusal(folder).code == code


def test_names_before_0_3_17(folder: Path) -> None:
    for rank in range(4):
        optim(folder, rank).rename(step(folder) / f"zero_pp_rank_{rank}_mp_rank_00optim_states.pt")
    assert refusal(folder).code == "E457"


def test_swap_files_of_an_optimizer_are_not_read(folder: Path) -> None:
    (step(folder) / "offloaded_tensors").mkdir()
    found = refusal(folder)
    assert found.code == "E457" and "NVMe" in found.message


def test_a_pipeline_with_only_its_weights_is_read_and_reported(tmp_path: Path) -> None:
    save = shutil.copytree(SHARED / "pp2_dp2_z1", tmp_path / "save")
    for shard in step(save).glob("*_optim_states.pt"):
        shard.unlink()
    found = opened(save)
    assert found.state.settings["stage"].origin == "there are no optimizer shards"
    assert {t.name for t in found.state.tensors} == {t.name for t in opened(SHARED / "pp2_dp2_z1").state.tensors}


def test_a_truncated_shard(folder: Path) -> None:
    raw = optim(folder, 0).read_bytes()
    optim(folder, 0).write_bytes(raw[: len(raw) // 2])
    assert refusal(folder).code.startswith("E4")


# ---- orders ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(), max_size=40), st.integers(1, 9))
def test_dealing_is_undone(members: list[int], ways: int) -> None:
    assert list(undeal(deal(members, ways), ways)) == members


shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=12)


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_padding_is_only_at_the_end_and_parts_are_equal(listed: list[Any], alignment: int, dp: int) -> None:
    flat = run(listed, alignment)
    numels = [int(np.prod(shape)) for shape in listed]
    assert all(start % alignment == 0 for start in flat.starts)
    assert flat.numel == flat.starts[-1] + numels[-1]
    gaps = [start - end for start, end in zip(flat.starts[1:], np.add(flat.starts, numels)[:-1], strict=True)]
    assert all(0 <= gap < alignment for gap in gaps)
    assert flat.part(dp) % 2 == 0
    assert 0 <= flat.part(dp) * dp - flat.numel < 2 * dp
    leans = [flat.lean(dp, rank) for rank in range(dp)]
    assert sum(leans) == flat.numel
    assert leans == sorted(leans, reverse=True)


@given(shapes, st.integers(1, 9), st.integers(1, 60))
def test_sub_groups_close_when_they_are_full(listed: list[Any], dp: int, size: int) -> None:
    counts = pack(listed, dp, size)
    assert sum(counts) == len(listed)
    start = 0
    for n, count in enumerate(counts):
        held = [slice_numel(shape, dp) for shape in listed[start : start + count]]
        assert sum(held[:-1]) < size
        assert sum(held) >= size or n == len(counts) - 1
        start += count


@given(st.integers(0, 10_000))
def test_zero0_is_matched_in_the_model_order_or_not_at_all(seed: int) -> None:
    chosen = random.Random(seed)
    names = [(f"p{i}", (chosen.randint(1, 3),) * chosen.randint(1, 2)) for i in range(chosen.randint(1, 12))]
    deals = [chosen.randint(-1, 1) for _ in names]  # -1: frozen
    groups = [[shape for (_, shape), d in zip(names, deals, strict=True) if d == g] for g in range(2)]
    expected = [[name for (name, _), d in zip(names, deals, strict=True) if d == g] for g in range(2)]
    found = match(names, [Slots.of(group) for group in groups])
    assert found == expected or (isinstance(found, Unclear) and found.is_several)
    if isinstance(found, Unclear):  # it has such a parameter
        assert len(set(found.places)) > 1
        shape = dict(names)[found.name]
        assert all(g == i == -1 or groups[g][i] == shape for g, i in found.places)
    told = [Slots(len(e), partial(lambda e, name, _, i: e[i] == name, e)) for e in expected]
    assert match(names, told) == expected


@given(st.integers(0, 10_000))
def test_flat_groups_are_matched_by_elements(seed: int) -> None:
    chosen = random.Random(seed)
    names = [(f"p{i}", (chosen.randint(1, 3),) * chosen.randint(1, 2)) for i in range(chosen.randint(1, 9))]
    deals = [chosen.randint(-1, 1) for _ in names]
    expected = [[name for (name, _), d in zip(names, deals, strict=True) if d == g] for g in range(2)]
    shapes = dict(names)
    starts = [dict(zip(np.cumsum([0, *(prod(shapes[n]) for n in e)]).tolist(), e, strict=False)) for e in expected]
    rooms = [sum(prod(shapes[n]) for n in e) for e in expected]
    slots = [Slots(r, partial(lambda s, n, _, at: s.get(at) == n, s)) for r, s in zip(rooms, starts, strict=True)]
    assert match(names, slots, prod) == expected


def test_a_number_that_is_a_tensor_keeps_its_bytes() -> None:
    found = opened(EXAMPLE).state.scalars["step"]["gate_up.weight"]
    assert found == Scalar("f32", (), np.float32(3).tobytes())
    assert isinstance(opened(EXAMPLE).state.blobs["module_attributes"], (dict, OrderedDict))
