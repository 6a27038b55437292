"""Written legacy folders of Megatron-LM equal its own, at any degrees.

Sources have other forms and degrees.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from tests.formats.megatron.megatron_of import FIXTURES, assert_exact
from tests.megatron_truth import truth
from ucpl.cli import main
from ucpl.errors import UcplError


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("vpp", "megatron_legacy(tp=1, pp=4, vpp=1)"),
        ("moe", "megatron_legacy(tp=1, ep=4)"),
        ("moe", "megatron_legacy(tp=2, ep=1)"),
        ("adam", "megatron_legacy(tp=2, ep=2)"),
        ("buckets", "megatron_legacy(pp=1)"),
        ("grouped", "megatron_legacy(tp=1, ep=4)"),
        ("grouped", "megatron_legacy(tp=2, ep=2)"),
    ],
)
def test_at_other_degrees(tmp_path: Path, name: str, to: str) -> None:
    ucpl.convert(FIXTURES / f"legacy_{name}", tmp_path / "made", to=to)
    assert (tmp_path / "made" / "latest_checkpointed_iteration.txt").read_text() == "10"
    ucpl.convert(tmp_path / "made", tmp_path / "plain", to="plain()")
    assert_exact(name, tmp_path / "plain" / "plain.pt")


def held(value: object, where: str = "") -> dict[str, object]:
    """Leaves by their paths.

    `_extra_state` is None in each module of Megatron's own, and missing in other frameworks.
    """
    found: dict[str, object] = {}
    if isinstance(value, dict):
        for key, inner in value.items():
            found |= held(inner, f"{where}/{key}")
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            found |= held(inner, f"{where}/{n}")
    else:
        found[where] = value
    return found


def test_through_another_framework_and_back_it_is_megatrons_own(tmp_path: Path) -> None:
    """Virtual stages, a tied embedding, buffers and groups are made anew.

    Only an empty `_extra_state` is lost.
    """
    source = FIXTURES / "legacy_vpp"
    ucpl.convert(source, tmp_path / "zero", to="zero1(dp=2)")
    ucpl.convert(tmp_path / "zero", tmp_path / "back", to="megatron_legacy(tp=2, pp=2, vpp=2)")
    for path in sorted((source / "iter_0000010").rglob("*.pt")):
        wanted = held(torch.load(path, weights_only=False))
        found = held(torch.load(tmp_path / "back" / path.relative_to(source), weights_only=False))
        assert {k for k in wanted if not k.endswith("_extra_state")} == found.keys(), path
        for key, value in found.items():
            if key == "/args":
                assert vars(value) == {**vars(wanted[key]), "use_distributed_optimizer": True}
                continue
            same = torch.equal(value, wanted[key]) if isinstance(value, torch.Tensor) else value == wanted[key]  # type: ignore[arg-type]
            assert same, f"{key} of {path}"


def test_the_order_of_a_module_is_kept(tmp_path: Path) -> None:
    """It is the order of registration, which places parameters in buffers."""
    ucpl.convert(FIXTURES / "legacy_moe", tmp_path / "made", to="megatron_legacy()")
    for rank in sorted((tmp_path / "made" / "iter_0000010").iterdir()):
        made: dict[str, Any] = torch.load(rank / "model_optim_rng.pt", weights_only=False)
        own: dict[str, Any] = torch.load(
            FIXTURES / "legacy_moe" / "iter_0000010" / rank.name / "model_optim_rng.pt", weights_only=False
        )
        tensors = [name for name, value in own["model"].items() if isinstance(value, torch.Tensor)]
        assert [name for name, value in made["model"].items() if isinstance(value, torch.Tensor)] == tensors
        assert vars(made["args"])["num_layers"] == vars(own["args"])["num_layers"], "arguments go along"


@pytest.mark.parametrize(
    ("name", "to", "message"),
    [
        ("vpp", "megatron_legacy(tp=1, pp=3, vpp=1)", "4 layers do not divide by pp = 3"),
        ("vpp", "megatron_legacy(tp=4, pp=1, vpp=1)", "num_query_groups = 2 do not divide by tp = 4"),
        ("vpp", "megatron_legacy(tp=1, pp=1, vpp=2)", "vpp = 2 on one stage"),
        ("vpp", "megatron_legacy(tp=1, pp=1, vpp=1, ep=2)", "ep = 2, and the model has no experts"),
        ("moe", "megatron_legacy(tp=1, ep=3)", "4 experts of"),
        (
            "buckets",
            "megatron_legacy(tp=2)",
            "33 positions of dim 0 of `embedding.word_embeddings.weight` do not divide by tp = 2",
        ),
        ("vpp", "megatron_legacy(tp=0)", "tp = 0: a degree is 1 or more"),
        (
            "vpp",
            'megatron_legacy(tp=1, pp=1, vpp=1, optimizer="float16")',
            "only Megatron's distributed optimizer is written",
        ),
    ],
)
def test_what_megatron_would_not_load_is_refused(tmp_path: Path, name: str, to: str, message: str) -> None:
    with pytest.raises(UcplError) as found:
        ucpl.convert(FIXTURES / f"legacy_{name}", tmp_path / "made", to=to)
    said = found.value.diagnostics[0]
    assert said.code == "E547" and message in said.message
    assert not (tmp_path / "made").exists()


def test_a_stage_without_experts_is_refused_where_they_have_an_optimizer_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UcplError, match="stage 0 has no experts at ep = 2") as found:
        ucpl.convert(FIXTURES / "dist_unstacked_moe_ep2", tmp_path / "made", to="megatron_legacy(pp=2, ep=2)")
    assert found.value.diagnostics[0].code == "E547" and not (tmp_path / "made").exists()


def test_an_embedding_that_stages_share_must_leave_its_buffer_aligned(tmp_path: Path) -> None:
    value = {
        "params": {
            name: {
                "weight": torch.randn(shape),
                "fp32": torch.randn(shape),
                "exp_avg": torch.ones(shape),
                "exp_avg_sq": torch.ones(shape),
            }
            for name, shape in {
                "embedding.word_embeddings.weight": (5, 8),
                "decoder.layers.0.mlp.linear_fc2.weight": (8, 8),
                "decoder.layers.1.mlp.linear_fc2.weight": (8, 8),
            }.items()
        }
    }
    torch.save(value, tmp_path / "tied.pt")
    with pytest.raises(UcplError) as found:
        ucpl.convert(tmp_path / "tied.pt", tmp_path / "made", to="megatron_legacy(pp=2)")
    assert (
        found.value.diagnostics[0].code == "E547" and "has 40 elements on a rank" in found.value.diagnostics[0].message
    )
    ucpl.convert(tmp_path / "tied.pt", tmp_path / "one", to="megatron_legacy()")


@pytest.mark.parametrize(
    "to", ["megatron_legacy()", 'megatron_core(ep=2, optimizer="dp_reshardable")', "megatron_fsdp(dp=2)"]
)
def test_single_experts_and_halves_of_linear_fc1_become_modules(tmp_path: Path, to: str) -> None:
    """torch_dist has a key for each (`singleton_local_shards`); each value is the formula's."""
    name = "dist_unstacked_moe_ep2"
    ucpl.convert(FIXTURES / name, tmp_path / "made", to=to)
    ucpl.convert(tmp_path / "made", tmp_path / "back", to="megatron_legacy()")
    ucpl.convert(tmp_path / "back", tmp_path / "plain.pt", to="plain()")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)["params"]
    trained = {n: states for n, states in truth(name).items() if "fp32" in states}
    assert found.keys() == trained.keys()
    for tensor, states in trained.items():
        for state in ("weight", "fp32", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[tensor][state], states[state]), (tensor, state)


def test_megatron_core_takes_it_with_its_arguments(tmp_path: Path) -> None:
    source = FIXTURES / "legacy_moe"
    ucpl.convert(source, tmp_path / "core", to="megatron_core(tp=2)")
    assert ucpl.compare(source, tmp_path / "core")
    ucpl.convert(tmp_path / "core", tmp_path / "back", to="megatron_legacy(tp=2, ep=2)")
    assert_same_tensors(source, tmp_path / "back")


def assert_same_tensors(one: Path, other: Path) -> None:
    for path in sorted((one / "iter_0000010").rglob("*.pt")):
        wanted = held(torch.load(path, weights_only=False))
        found = held(torch.load(other / path.relative_to(one), weights_only=False))
        assert {k for k, v in wanted.items() if v is not None} <= found.keys()
        assert all(torch.equal(v, found[k]) for k, v in wanted.items() if isinstance(v, torch.Tensor)), path  # type: ignore[arg-type]


def test_random_states_stay_where_ranks_are_the_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / "legacy_vpp", run)
    for path in run.rglob("model_optim_rng.pt"):
        value: dict[str, Any] = torch.load(path, weights_only=False)
        value["rng_state"] = [{"rng": torch.full((3,), len(path.parts) + int(path.parent.name[-1]))}]
        value["opt_param_scheduler"] = {"num_steps": 80}
        torch.save(value, path)
    said = []
    for name, tp in (("same", 2), ("other", 1)):
        assert main(["convert", str(run), str(tmp_path / name), "--to", f"megatron_legacy(tp={tp}, pp=2)"]) == 0
        said.append("--no-load-rng" in capsys.readouterr().out)
    assert said == [False, True]
    for path in sorted(run.rglob("model_optim_rng.pt")):
        wanted, found = (torch.load(p, weights_only=False) for p in (path, tmp_path / "same" / path.relative_to(run)))
        assert torch.equal(wanted["rng_state"][0]["rng"], found["rng_state"][0]["rng"])
    made: dict[str, Any] = torch.load(next((tmp_path / "other").rglob("model_optim_rng.pt")), weights_only=False)
    assert "rng_state" not in made and made["opt_param_scheduler"] == {"num_steps": 80}


def test_names_that_megatron_does_not_have_are_not_cut(tmp_path: Path) -> None:
    torch.save({"params": {"other.head.weight": {"weight": torch.randn(4, 4)}}}, tmp_path / "other.pt")
    with pytest.raises(UcplError) as found:
        ucpl.convert(tmp_path / "other.pt", tmp_path / "made", to="megatron_legacy(tp=2)")
    assert found.value.diagnostics[0].code == "E542"


def test_a_sink_of_each_head_is_cut_with_the_heads(tmp_path: Path) -> None:
    sink = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    params = {sink: torch.arange(6.0), "embedding.word_embeddings.weight": torch.arange(16.0).reshape(4, 4)}
    torch.save({"params": {name: {"weight": tensor} for name, tensor in params.items()}}, tmp_path / "one.pt")
    ucpl.convert(tmp_path / "one.pt", tmp_path / "made", to="megatron_legacy(tp=2)")
    made = [torch.load(p, weights_only=False)["model"][sink] for p in sorted(tmp_path.rglob("model_optim_rng.pt"))]
    assert [one.tolist() for one in made] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("to", ["megatron_core()", "megatron_fsdp()", 'megatron_core(optimizer = "dp_reshardable")'])
@pytest.mark.parametrize("name", ["mine", "iter_0000007"])
def test_a_folder_of_any_name_has_a_target_that_is_opened(tmp_path: Path, name: str, to: str) -> None:
    """A tracker cannot name a folder such as `mine`.

    The iteration of the files is used.
    """
    shutil.copytree(FIXTURES / "legacy_buckets" / "iter_0000010", tmp_path / name)
    ucpl.convert(tmp_path / name, tmp_path / "made", to=to)
    steps = [one.name for one in (tmp_path / "made").iterdir() if one.is_dir() and one.name != "ucpl"]
    assert steps == ["iter_0000010" if name == "mine" else name]
