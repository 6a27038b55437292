"""An item planted in a source is named, refused or kept."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from tests.conversion.planting import Place, places, plant
from tests.conversion.test_account_of_fixtures import ALONE, FIXTURES, REFUSALS, SOURCES, TARGETS
from ucpl.api import open_checkpoint
from ucpl.extents.account import FATES, Account
from ucpl.files.checkpoint import Checkpoint
from ucpl.formats.leaving import DESCRIBING

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = sorted(path.name for path in (EXAMPLES / "architectures" / "checkpoints").iterdir() if path.is_dir())
ALL = [*SOURCES, "examples/checkpoint", *(f"examples/architectures/checkpoints/{name}" for name in MODELS)]
MARK = "planted_3c9e"
DRAWS = 6
WORDS = ("the module", "the loss scaling", "the optimizer", "the ranks' objects")


def drawn(top: Path, name: str, number: int) -> tuple[Place, str]:
    """A place and a target. Kinds are drawn first: dicts are many.

    Targets that take few sources are drawn for these alone, after the others.
    """
    dice = random.Random(f"{name}/{number}")
    alone = [target for source, target in ALONE if source == name]
    found = places(top)
    kind = dice.choice(sorted({place.kind for place in found}))
    place = dice.choice([place for place in found if place.kind == kind])
    return place, dice.choice(TARGETS if number < DRAWS or not alone else alone)


def copied(top: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint in a folder of its own."""
    target = tmp_path / "run" / top.name
    target.parent.mkdir()
    return Path(shutil.copytree(top, target) if top.is_dir() else shutil.copy(top, target))


DRAWN = [(name, number) for name in ALL for number in range(DRAWS)]
DRAWN += [(name, DRAWS + number) for name in dict.fromkeys(name for name, _ in ALONE) for number in range(DRAWS)]


@pytest.mark.parametrize(("name", "number"), DRAWN)
def test_what_is_planted_is_kept_named_or_refused(name: str, number: int, tmp_path: Path) -> None:
    top = EXAMPLES.parent / name if name.startswith("examples") else FIXTURES / name
    place, target = drawn(top, name, number)
    source = copied(top, tmp_path)
    plant(source, place, MARK)
    demand_not_lost(name, source, place, target, tmp_path)


def demand_not_lost(name: str, source: Path, place: Place, target: str, tmp_path: Path) -> None:
    """Fail if the account, the refusal and the target lack the item."""
    sentence = f"{place}, to {target}"
    try:
        account = ucpl.plan(str(source), target).account
    except ucpl.UcplError as error:
        assert is_refused(error, name, "plan", place, target), f"{sentence}: {error}"
        return
    assert account is not None and account.items == account.count(*FATES)
    if is_named(account, place):
        return
    try:
        holders = holders_of(open_checkpoint(source))
    except ucpl.UcplError as error:  # a plan for weights skipped the optimizer, and its account has it by name
        if MARK in str(error) and any(e.kind == "value" for e in account.of("not read")):
            return
        holders = []  # the target's files must have the item
    left = {one for e in account.of("dropped", "not read") for one in e.names} | DESCRIBING  # these are derived
    if any(left & names for names, text in holders if MARK in text):
        return
    try:
        ucpl.convert(source, tmp_path / "target", target, allow_globals=["*"])
    except ucpl.UcplError as error:
        assert is_refused(error, name, "convert", place, target), f"{sentence}: {error}"
        return
    found = [tmp_path / "target"] if (tmp_path / "target").is_file() else sorted((tmp_path / "target").rglob("*"))
    assert any(MARK in file.as_posix() or (file.is_file() and MARK.encode() in file.read_bytes()) for file in found), (
        sentence
    )


def is_named(account: Account, place: Place) -> bool:
    """Look for the item, its group or its file in the account."""
    left = account.of("dropped", "derived", "not read")
    names = [one for e in account.entries for one in e.names]
    if any(MARK in one for one in names):
        return True
    if place.kind == "group" and any("param_groups/" in one for one in names):
        return True
    way = "/".join(str(step) for _, step in place.way)
    values = [one.rpartition(": ")[2] for e in account.of("not read") if e.kind == "value" for one in e.names]
    if any(f"{way}/".startswith(f"{one}/") for one in values):
        return True
    files = [one.removeprefix("../") for e in left if e.kind == "file" for one in e.names]
    return any(place.file == one or place.file.startswith(one) or place.file.endswith(f"/{one}") for one in files)


def is_refused(error: ucpl.UcplError, name: str, verb: str, place: Place, target: str) -> bool:
    """Look for the item or its file in a refusal."""
    known = REFUSALS[verb].get(name, {})
    text = " ".join(str(d) for d in error.diagnostics)
    is_same = error.diagnostics[0].code == known.get(target, known.get("*"))
    is_same |= place.kind == "group" and error.diagnostics[0].code == "E482"  # the schedule has no value for that group
    return is_same or MARK in text or Path(place.file).name in text or name.startswith("examples/arch")


def _items(value: object) -> list[tuple[object, object]]:
    return list(value.items()) if isinstance(value, dict) else []


def holders_of(opened: Checkpoint) -> list[tuple[set[str], str]]:
    """Values of a run by their names in an account."""
    train_state = opened.state
    found = [({str(key)}, f"{key}{value!r}") for key, value in train_state.carried.items()]
    for rank, mine in enumerate(opened.state.parallel.carried_by_rank.of):
        found += [({f"{key} of rank {rank}"}, f"{key}{value!r}") for key, value in mine.items()]
    for name, value in train_state.blobs.items():
        found += [({name}, f"{name}{value!r}")]
        found += [({f"{key} of {words}" for words in WORDS}, f"{key}{held!r}") for key, held in _items(value)]
    found += [({group.name}, repr(group)) for group in train_state.groups]
    return found


# ---- single places ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "at"),
    [
        ("accelerate/without_engine", "optimizer.bin", ()),
        ("trainer/without_engine", "optimizer.pt", ()),
        ("meta/run.pt", "", ("optimizer",)),
    ],
)
def test_a_key_that_torchs_optimizer_has_with_its_parameters_is_named(
    name: str, file: str, at: tuple[str, ...], tmp_path: Path
) -> None:
    source = copied(FIXTURES / name, tmp_path)
    path = source / file if file else source
    held = torch.load(path, weights_only=False)
    optimizer = held
    for step in at:
        optimizer = optimizer[step]
    optimizer["state"][f"{MARK}_state"] = {"k": 1}
    optimizer[f"{MARK}_top"] = "kept nowhere"
    torch.save(held, path)
    lead = "".join(f"{step}/" for step in at)
    found = {one.partition(": ")[2] for one in names_of(source) if MARK in one}
    assert found == {f"{lead}state/{MARK}_state", f"{lead}{MARK}_top"}


def names_of(source: Path, target: str = "plain()") -> list[str]:
    account = ucpl.plan(str(source), target).account
    assert account is not None
    return [name for e in account.of("dropped", "not read") for name in e.names]


def test_entries_of_a_header_and_of_an_index_are_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "run" / "model-00001-of-00001.safetensors", {"format": "pt", MARK: "1"})
    index = {"metadata": {"total_size": 8, f"{MARK}_m": 1}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "run" / "model.safetensors.index.json").write_text(json.dumps({**index, f"{MARK}_i": 1}))
    assert sorted(name for name in names_of(tmp_path / "run") if MARK in name) == [
        f"model-00001-of-00001.safetensors: __metadata__/{MARK}",
        f"model.safetensors.index.json: metadata/{MARK}_m",
        f"model.safetensors.index.json: {MARK}_i",
    ]


def test_a_value_in_the_module_of_a_universal_folder_is_kept(tmp_path: Path) -> None:
    source = copied(FIXTURES / "universal" / "z1_dp4" / "global_step3_universal", tmp_path)
    plant(source, Place("key", "mp_rank_00_model_states.pt", (("k", "module"),)), MARK)
    assert f"{MARK} of the module" in names_of(source, "safetensors()")
    assert not any(MARK in name for name in names_of(source, "zero1(dp=2)"))
    ucpl.convert(source, tmp_path / "target", "zero1(dp=2)")
    assert open_checkpoint(tmp_path / "target").state.blobs["module_extra"] == {MARK: 1}


def test_one_group_more_in_the_optimizer_of_a_universal_folder_is_named(tmp_path: Path) -> None:
    source = copied(FIXTURES / "universal" / "z1_dp4" / "global_step3_universal", tmp_path)
    plant(source, Place("group", "zero/optimizer_state.pt", (("k", "param_groups"),)), MARK)
    assert any("zero/optimizer_state.pt: param_groups/" in name for name in names_of(source))


def test_keys_of_the_backend_s_file_are_named(tmp_path: Path) -> None:
    source = copied(FIXTURES / "megatron" / "dist_moe", tmp_path)
    plant(source, Place("json", "metadata.json"), MARK)
    assert f"metadata.json: {MARK}" in names_of(source)


@pytest.mark.parametrize("entry", ["optimizer", "per_bucket_numel"])
def test_keys_of_objects_that_describe_buckets_are_named(tmp_path: Path, entry: str) -> None:
    source = copied(FIXTURES / "megatron" / "dist_buckets", tmp_path)
    name = f"optimizer.distributed.dp_group_idx_1.{entry}/shard_0_1"
    place = next(p for p in places(source) if p.kind == "key" and p.way[:1] == (("e", name),))
    plant(source, place, MARK)
    assert any(MARK in one and name in one for one in names_of(source))


@pytest.mark.parametrize("rank", [0, 1])  # the second one's bucket has copies of the first one's parameters alone
def test_a_chunk_of_a_bucket_without_others_is_refused(rank: int, tmp_path: Path) -> None:
    source = copied(FIXTURES / "megatron" / "dist_buckets", tmp_path)
    lead = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_{rank}."
    found = [p for p in places(source) if p.kind == "entry" and p.way[0][1].startswith(lead)]
    place = next(p for p in found if p.way[0][1].endswith("bucket_idx_0"))
    plant(source, place, MARK)
    with pytest.raises(ucpl.UcplError, match=MARK) as caught:
        open_checkpoint(source)
    assert caught.value.diagnostics[0].code == "E533"


def test_names_that_ranks_do_not_share_are_in_the_refusal(tmp_path: Path) -> None:
    source = copied(FIXTURES / "deepspeed" / "z3_dp2_subgroup", tmp_path)
    plant(source, Place("key", "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt", (("k", "module"),)), MARK)
    with pytest.raises(ucpl.UcplError, match=rf"E456.*\({MARK}\)"):
        open_checkpoint(source)


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("name", ["dist_adam_tp2", "dist_dp_reshardable_tp2", "dist_moe_buckets", "dist_of_0_19"])
def test_a_tensor_among_hyper_parameters_is_kept(name: str, target: str, tmp_path: Path) -> None:
    source = copied(FIXTURES / "megatron" / name, tmp_path)
    found = [p for p in places(source) if p.kind == "tensor" and ("k", "param_groups") in p.way and p.way[-1][0] == "k"]
    groups = [place for place in found if isinstance(place.way[-1][1], int)]
    assert groups
    for place in groups:
        plant(source, place, MARK)
    ucpl.convert(source, tmp_path / "target", target)
    ucpl.convert(tmp_path / "target", tmp_path / "all.pt", "plain()")
    held = torch.load(tmp_path / "all.pt", weights_only=False)["groups"]
    assert held
    assert all(torch.equal(group[MARK], torch.arange(5.0)) for group in held)


def test_a_hyper_parameter_of_one_parameter_is_in_the_refusal(tmp_path: Path) -> None:
    source = copied(FIXTURES / "megatron" / "fsdp_tp2", tmp_path)
    lead = "optimizer.param_to_group_meta.module.module.module.decoder.layers.0.mlp.linear_fc1.weight"
    plant(source, Place("blob", ".metadata", (("p", lead),)), MARK)
    for target in ("megatron_core(dp=2)", "megatron_legacy()"):
        with pytest.raises(ucpl.UcplError, match=MARK) as caught:
            ucpl.convert(source, tmp_path / "target", target)
        assert caught.value.diagnostics[0].code == "E471"


def test_one_group_more_next_to_sliced_experts_is_kept(tmp_path: Path) -> None:
    source = copied(FIXTURES / "deepspeed" / "autoep_ep2_dp4_z3", tmp_path)
    way = tuple(("k", key) for key in ("optimizer_state_dict", "optimizer_state_dict", "param_groups"))
    plant(source, Place("group", "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt", way), MARK)
    groups = open_checkpoint(source).state.groups
    assert [(group.name, bool(group.members)) for group in groups] == [("0", True), ("1", True), ("2", False)]
    assert MARK in groups[2].hyper


def test_a_value_in_a_layer_s_file_of_a_later_rank_is_named(tmp_path: Path) -> None:
    source = copied(FIXTURES / "deepspeed" / "tp2_pp2_dp2_z1_bf16", tmp_path)
    plant(source, Place("key", "global_step3/layer_03-model_01-model_states.pt"), MARK)
    assert any(name.endswith(f"layer_03-model_01-model_states.pt: {MARK}") for name in names_of(source))
