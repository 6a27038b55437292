"""Groups of Megatron's optimizer, which no file has, follow its rule."""

from __future__ import annotations

import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.formats.megatron.megatron_of import FIXTURES
from tests.gathered import plain_of
from ucpl.errors import UcplError
from ucpl.formats.dcp.metadata import ChunkedTensor, Metadata
from ucpl.formats.megatron.roles import unchained
from ucpl.formats.opening import open_checkpoint
from ucpl.registry import format_named

EMBEDDING, HEAD, NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
SHAPES = {EMBEDDING: (12, 4), "decoder.layers.0.mlp.linear_fc2.weight": (4, 6), NORM: (4,), HEAD: (12, 4)}
ADAM = ("fp32", "exp_avg", "exp_avg_sq")


def written(folder: Path, states: tuple[str, ...], groups: list[dict[str, Any]], frozen: tuple[str, ...] = ()) -> Path:
    """A plain file of an fp32 run."""
    params = {}
    for name, shape in SHAPES.items():
        made: dict[str, Any] = {"weight": torch.randn(shape)}
        if name not in frozen:
            made |= {state: made["weight"] if state == "fp32" else torch.randn(shape) for state in states}
        params[name] = made
    path = folder / "plain.pt"
    torch.save({"params": params, "buffers": {}, "aliases": {}, "groups": groups, "scalars": {}}, path)
    return path


def test_momentum_in_groups_of_adam_is_refused_before_it_is_written(tmp_path: Path) -> None:
    source = written(tmp_path, ("momentum_buffer",), [{"params": list(SHAPES), "lr": 0.1, "betas": [0.9, 0.95]}])
    with pytest.raises(UcplError, match="no loader would find it") as refused:
        ucpl.convert(source, tmp_path / "made", to="megatron_core()")
    assert refused.value.diagnostics[0].code == "E471" and not (tmp_path / "made").exists()


def test_momentum_of_sgd_is_in_groups_of_sgd(tmp_path: Path) -> None:
    said = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    source = written(tmp_path, ("momentum_buffer",), [{"params": list(SHAPES), **said}])
    ucpl.convert(source, tmp_path / "made", to="megatron_core()")
    found, wanted = plain_of(tmp_path / "made"), plain_of(source)
    for name, states in wanted["params"].items():
        assert torch.equal(found["params"][name]["momentum_buffer"], states["momentum_buffer"])
    assert {group["momentum"] for group in found["groups"]} == {0.9}


@pytest.mark.parametrize("to", ["megatron_core()", 'megatron_core(optimizer="dp_reshardable")', "megatron_legacy()"])
def test_embeddings_with_a_rate_of_their_own(tmp_path: Path, to: str) -> None:
    """--decoupled-lr: the embedding and the output layer are a group.

    The group states that it has another rate.
    """
    rest = [name for name in SHAPES if name not in (EMBEDDING, HEAD, NORM)]
    groups: list[dict[str, Any]] = [
        {"params": rest, "lr": 0.1, "weight_decay": 0.1, "wd_mult": 1.0, "default_config": True},
        {"params": [EMBEDDING, HEAD], "lr": 0.5, "weight_decay": 0.1, "wd_mult": 1.0, "default_config": False},
        {"params": [NORM], "lr": 0.1, "weight_decay": 0.0, "wd_mult": 0.0, "default_config": True},
    ]
    source = written(tmp_path, ADAM, groups)
    ucpl.convert(source, tmp_path / "made", to=to)
    found = open_checkpoint(tmp_path / "made").state.groups
    modules = {n.replace("layers.mlp", "layers.0.mlp"): g.hyper["lr"] for g in found for n in g.members}
    assert modules == {n: g["lr"] for g in groups for n in g["params"]}


def test_a_group_that_would_be_found_with_other_members_is_refused(tmp_path: Path) -> None:
    groups: list[dict[str, Any]] = [
        {"params": [EMBEDDING], "lr": 0.1, "wd_mult": 1.0, "default_config": True},
        {
            "params": [n for n in SHAPES if n not in (EMBEDDING, NORM)],
            "lr": 0.2,
            "wd_mult": 1.0,
            "default_config": True,
        },
        {"params": [NORM], "lr": 0.1, "wd_mult": 0.0, "default_config": True},
    ]
    source = written(tmp_path, ADAM, groups)
    with pytest.raises(UcplError, match="by Megatron's rule it would be found in group 0") as refused:
        ucpl.convert(source, tmp_path / "made", to="megatron_core()")
    assert refused.value.diagnostics[0].code == "E471" and not (tmp_path / "made").exists()


@pytest.mark.parametrize("frozen", [(EMBEDDING,), (HEAD, NORM)])
def test_what_is_frozen_is_in_no_buffer(tmp_path: Path, frozen: tuple[str, ...]) -> None:
    """Weights of a target share no storage, unlike Megatron's own.

    So a target states its frozen tensors.
    """
    members = [name for name in SHAPES if name not in frozen]
    source = written(tmp_path, ADAM, [{"params": members, "lr": 0.1}], frozen)
    ucpl.convert(source, tmp_path / "made", to="megatron_legacy()")
    found = open_checkpoint(tmp_path / "made")
    assert {t.name for t in found.state.tensors if t.kind == "frozen"} == set(frozen)
    made, wanted = plain_of(tmp_path / "made")["params"], plain_of(source)["params"]
    for name, states in wanted.items():
        for state, value in states.items():
            assert torch.equal(made[name][state], value), (name, state)
    ucpl.convert(tmp_path / "made", tmp_path / "again", to="megatron_legacy()")
    assert ucpl.compare(tmp_path / "made", tmp_path / "again")


def test_what_is_frozen_on_stages_and_tensor_parallel_ranks(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "legacy_vpp", tmp_path / "run")
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    ucpl.convert(tmp_path / "run", tmp_path / "made", to="megatron_legacy(tp=2, pp=4, vpp=1)", freeze=[name])
    assert {t.name for t in open_checkpoint(tmp_path / "made").state.tensors if t.kind == "frozen"} == {name}
    ucpl.convert(tmp_path / "made", tmp_path / "back", to="megatron_legacy(tp=1, pp=1, vpp=1)")
    assert ucpl.compare(tmp_path / "made", tmp_path / "back")


def in_a_chain(folder: Path, optimizer_of: dict[bool, int]) -> None:
    """States under the names that Megatron-Core gives them without `chained_optim_avoid_prefix`."""
    value = pickle.loads((folder / ".metadata").read_bytes())

    def chained(name: str) -> str:
        is_state = name.startswith("optimizer.state.")
        return f"chained_{optimizer_of['.experts.' in name]}.{name}" if is_state else name

    value.state_dict_metadata = {chained(name): one for name, one in value.state_dict_metadata.items()}
    value.storage_data = {replace(at, fqn=chained(at.fqn)): one for at, one in value.storage_data.items()}
    value.all_local_plans = None
    (folder / ".metadata").write_bytes(pickle.dumps(value))


def test_states_of_optimizers_in_a_chain_are_read(tmp_path: Path) -> None:
    """Before 0.12 optimizers of dense parameters and experts have numbers."""
    shutil.copytree(FIXTURES / "dist_moe", tmp_path / "chained")
    in_a_chain(tmp_path / "chained", {False: 0, True: 1})
    assert ucpl.compare(FIXTURES / "dist_moe", tmp_path / "chained")
    ucpl.convert(tmp_path / "chained", tmp_path / "made", to="megatron_core()")
    assert ucpl.compare(FIXTURES / "dist_moe", tmp_path / "made")


def test_a_state_of_two_optimizers_is_refused() -> None:
    both = {
        f"chained_{n}.optimizer.state.exp_avg.output_layer.weight": ChunkedTensor("f32", (4,), ()) for n in range(2)
    }
    with pytest.raises(UcplError, match="is of two optimizers") as refused:
        unchained(Metadata(both))
    assert refused.value.diagnostics[0].code == "E530"


ALL = ("megatron_core()", 'megatron_core(optimizer="dp_reshardable")', "megatron_legacy()", "megatron_fsdp()")


def advised(source: Path, target: str) -> list[str]:
    held, plan = open_checkpoint(source), ucpl.plan(str(source), target)
    return [text for text in format_named(plan.target.framework).advice(held, plan.target) if "decay" in text]


@pytest.mark.parametrize("target", ALL)
def test_weight_decays_that_the_schedule_changes_are_named(target: str, tmp_path: Path) -> None:
    rest = [name for name in SHAPES if name != NORM]
    mine = {"lr": 0.1, "betas": [0.9, 0.95]}
    one = written(tmp_path, ADAM, [{"params": list(SHAPES), **mine, "weight_decay": 0.3}])
    job, lost = advised(one, target)
    assert job.startswith("--weight-decay 0.3:") and f"{NORM} has 0.3 in the source, and loses it" in lost
    two = [{"params": rest, **mine, "weight_decay": 0.3}, {"params": [NORM], **mine, "weight_decay": 0.0}]
    assert advised(written(tmp_path, ADAM, two), target) == [job]
    two[0]["wd_mult"], two[1]["wd_mult"] = 1.0, 0.0
    assert advised(written(tmp_path, ADAM, two), target) == []


QK = "decoder.layers.0.self_attention.q_layernorm.weight"


def decays_of(folder: Path) -> dict[str, float]:
    found = plain_of(folder)["groups"]
    members = [(re.sub(r"layers\.(?=[a-z])", "layers.0.", n), g) for g in found for n in g["params"]]
    return {name.removeprefix("module."): group["weight_decay"] for name, group in members}


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize(
    "said", [{"apply_wd_to_qk_layernorm": True}, {"no_weight_decay_cond_type": "apply_wd_to_qk_layernorm"}, {}]
)
def test_norms_of_queries_decay_where_the_arguments_say_so(
    target: str, said: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, QK, (4,))
    rest = [name for name in SHAPES if name not in (NORM, QK)]
    mine = {"lr": 0.1, "betas": [0.9, 0.95]}
    groups = [{"params": rest, **mine, "weight_decay": 0.3}, {"params": [NORM, QK], **mine, "weight_decay": 0.0}]
    ucpl.convert(written(tmp_path, ADAM, groups), tmp_path / "run", to="megatron_legacy()")
    (file,) = (tmp_path / "run").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    value = torch.load(file, weights_only=False)
    vars(value["args"]).update(said)
    torch.save(value, file)
    wanted = {name: 0.0 if name == NORM or (name == QK and not said) else 0.3 for name in SHAPES}
    assert decays_of(tmp_path / "run") == wanted
    ucpl.convert(tmp_path / "run", tmp_path / "made", to=target)
    assert decays_of(tmp_path / "made") == wanted


def test_tensors_of_another_run_are_kept_from_folder_to_folder(tmp_path: Path) -> None:
    """Keep random states of legacy files in common.pt."""
    source = written(tmp_path, ADAM, [{"params": list(SHAPES), "lr": 0.1, "betas": [0.9, 0.95]}])
    ucpl.convert(source, tmp_path / "run", to="megatron_legacy()")
    (file,) = (tmp_path / "run").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    value = torch.load(file, weights_only=False)
    value["rng_state"] = [{"torch_rng_state": torch.arange(7, dtype=torch.uint8)}]
    torch.save(value, file)
    ucpl.convert(tmp_path / "run", tmp_path / "one", to="megatron_core()")
    ucpl.convert(tmp_path / "one", tmp_path / "two", to="megatron_core()")
    kept = plain_of(tmp_path / "two")["envelope"]["blobs"]["megatron_rng"]["mp_rank_00"]
    assert torch.equal(kept[0]["torch_rng_state"], value["rng_state"][0]["torch_rng_state"])
