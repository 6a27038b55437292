"""DeepSpeed's universal format: read from its converter, and written with equal state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file

import ucpl
from tests.formats.deepspeed.universal_of import universal_of
from ucpl import api
from ucpl.errors import UcplError
from ucpl.formats.deepspeed.store import Universal

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
WRITTEN = FIXTURES / "universal"  # by ds_to_universal of deepspeed 0.19.8
DENSE = FIXTURES / "deepspeed"


def held(path: Path) -> dict[str, dict[str, Any]]:
    return torch.load(path, weights_only=True)["params"]


@pytest.mark.parametrize("name", ["z1_dp4", "z3_dp4"])
def test_what_deepspeed_wrote_is_the_truth(name: str, tmp_path: Path) -> None:
    ucpl.convert(WRITTEN / name / "global_step3_universal", tmp_path / "plain.pt", to="plain()")
    truth = torch.load(WRITTEN / name / "truth.pt", weights_only=False)["params"]
    found = held(tmp_path / "plain.pt")
    assert set(found) == set(truth)
    for tensor, states in truth.items():
        for state, value in states.items():
            assert torch.equal(found[tensor][state], value), (tensor, state)


@pytest.mark.parametrize("target", ["universal(stage=1)", "universal(stage=3)"])
@pytest.mark.parametrize("name", ["z1_dp4", "z0_dp2_bf16", "z2_dp3_frozen", "z3_dp2_subgroup"])
def test_any_stage_goes_there_and_back_at_another_degree(name: str, target: str, tmp_path: Path) -> None:
    ucpl.convert(DENSE / name, tmp_path / "atoms", to=target)
    assert ucpl.compare(DENSE / name, tmp_path / "atoms"), f"{name} is not {target}"
    back = "zero1(dp=3)" if name.startswith("z3") else "zero3(dp=5)"
    ucpl.convert(tmp_path / "atoms", tmp_path / "back", to=back)
    assert ucpl.compare(DENSE / name, tmp_path / "back"), f"{name} came back as something else"


@pytest.mark.parametrize("target", ["universal(stage=1)", "universal(stage=3)"])
def test_masters_are_made_where_the_source_keeps_none(target: str, tmp_path: Path) -> None:
    """Without fp32.pt, DeepSpeed's loader silently keeps the old masters."""
    ucpl.convert(DENSE / "z1_dp4", tmp_path / "zero0", to="zero0(dp=2)")
    ucpl.convert(tmp_path / "zero0", tmp_path / "atoms", to=target)
    assert len(list((tmp_path / "atoms").glob("*/zero/*/fp32.pt"))) == 26
    ucpl.convert(tmp_path / "atoms", tmp_path / "back", to="zero3(dp=3)")
    assert ucpl.compare(DENSE / "z1_dp4", tmp_path / "back")


def test_each_atom_has_the_form_that_its_loader_reads(tmp_path: Path) -> None:
    """Stages 1 and 2 read shaped `param`, stage 3 flat tensors.

    Both find the global state.
    """
    for stage in (1, 3):
        ucpl.convert(DENSE / "z1_dp4", tmp_path / str(stage), to=f"universal(stage={stage})")
        root = tmp_path / str(stage) / (tmp_path / str(stage) / "latest_universal").read_text().strip()
        atom = torch.load(root / "zero" / "wte.weight" / "fp32.pt", weights_only=True)
        assert (atom["param"].shape == (67, 24)) if stage == 1 else (atom.shape == (67 * 24,))
        assert (root / "zero" / "optimizer_state.pt").is_file()
        assert (root / "zero" / "wte.weight" / "step.pt").exists() == (stage == 1)


def test_files_of_one_bare_tensor_go_through_a_plan_on_the_disk(tmp_path: Path) -> None:
    source = WRITTEN / "z3_dp4" / "global_step3_universal"
    for name, to in (("atoms", "universal(stage=3)"), ("zero", "zero1(dp=3)")):
        api.save_plan(ucpl.plan(str(source), to), tmp_path / f"{name}.plan")
        ucpl.apply(tmp_path / f"{name}.plan", source, tmp_path / name)
        assert ucpl.compare(source, tmp_path / name)
    truth = torch.load(WRITTEN / "z3_dp4" / "truth.pt", weights_only=False)["params"]
    (atom,) = (tmp_path / "atoms").glob("*/zero/wte.weight/fp32.pt")
    assert torch.equal(torch.load(atom, weights_only=True), truth["wte.weight"]["fp32"].flatten())


def test_a_layout_of_ones_own_writes_a_tensor_as_all_of_a_file(tmp_path: Path) -> None:
    text = 'ucpl 1\nlayout own() of any {\n  framework torch()\n  file one = torch "{name}.pt"\n  * = ... in one as ""\n}\n'
    (tmp_path / "own.ucpl").write_text(text, encoding="utf-8")
    source = FIXTURES.parent / "formats" / "huggingface" / "written" / "llama"
    ucpl.convert(source, tmp_path / "files", to=f"{tmp_path}/own.ucpl:own()")
    wanted = {name: value for file in source.glob("*.safetensors") for name, value in load_file(file).items()}
    found = {path.stem: torch.load(path, weights_only=True) for path in (tmp_path / "files").glob("*.pt")}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def broken(tmp_path: Path) -> Path:
    shutil.copytree(WRITTEN / "z1_dp4", tmp_path / "broken")
    return tmp_path / "broken" / "global_step3_universal"


def test_atoms_of_releases_before_0_13_are_read_to_the_bit(tmp_path: Path) -> None:
    """They have a row that pads words, and no steps or groups."""
    root = broken(tmp_path)
    (root / "zero" / "optimizer_state.pt").unlink()
    for path in (root / "zero").glob("*/*.pt"):
        if path.stem == "step":
            path.unlink()
            continue
        atom = {"param": torch.load(path, weights_only=True)["param"], "cat_dim": 0}
        if path.parent.name == "wte.weight":
            atom["vocab_divisibility_padding_tensor"] = torch.zeros(atom["param"].shape[1])
        torch.save(atom, path)
    done = ucpl.convert(root, tmp_path / "plain.pt", to="plain()")
    assert done.plan.account is not None
    whys = [one.why for one in done.plan.account.of("not read") for name in one.names if "vocab" in name]
    assert set(whys) == {"it is no tensor of the model, and in no value of the run"}
    truth, found = (
        torch.load(WRITTEN / "z1_dp4" / "truth.pt", weights_only=False)["params"],
        held(tmp_path / "plain.pt"),
    )
    for tensor, states in found.items():
        assert all(torch.equal(states[state], truth[tensor][state]) for state in ("fp32", "exp_avg", "exp_avg_sq")), (
            tensor
        )


def test_a_slash_in_a_name_makes_folders_as_deepspeed_makes_them(tmp_path: Path) -> None:
    """ds_to_universal.py joins a folder and a name to a path."""
    named = {name: torch.nn.Parameter(torch.arange(6.0) + n) for n, name in enumerate(("a", "a/b", "a/b/c"))}
    optimizer = torch.optim.AdamW(named.values())
    sum(p.sum() for p in named.values()).backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.save(
        {"model": {n: p.data for n, p in named.items()}, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt"
    )
    ucpl.convert(tmp_path / "run.pt", tmp_path / "atoms", to="universal()")
    assert len(list((tmp_path / "atoms").glob("*/zero/a/b/c/exp_avg.pt"))) == 1
    ucpl.convert(tmp_path / "atoms", tmp_path / "plain.pt", to="plain()")
    found = held(tmp_path / "plain.pt")
    assert all(torch.equal(found[name]["fp32"], p) for name, p in named.items())
    assert ucpl.compare(tmp_path / "run.pt", tmp_path / "plain.pt")


def test_a_missing_folder_of_atoms_is_named(tmp_path: Path) -> None:
    root = broken(tmp_path)
    shutil.rmtree(root / "zero" / "mix")
    with pytest.raises(UcplError, match="E452: mix is in param_shapes") as caught:
        Universal().open(root)
    assert caught.value.diagnostics[0].labels[0].file == str(root / "zero" / "mix")


def test_a_missing_state_of_one_parameter_is_named(tmp_path: Path) -> None:
    root = broken(tmp_path)
    (root / "zero" / "mix" / "exp_avg.pt").unlink()
    with pytest.raises(UcplError, match="mix"):
        ucpl.convert(root, tmp_path / "out", to="zero1(dp=2)")
    assert not (tmp_path / "out").exists()


def test_an_atom_of_another_size_is_refused(tmp_path: Path) -> None:
    root = broken(tmp_path)
    torch.save({"param": torch.zeros(3, 4)}, root / "zero" / "mix" / "fp32.pt")
    torch.save({"param": torch.zeros(3, 4)}, root / "zero" / "mix" / "exp_avg.pt")
    torch.save({"param": torch.zeros(3, 4)}, root / "zero" / "mix" / "exp_avg_sq.pt")
    with pytest.raises(UcplError, match="E458"):
        Universal().open(root)


def test_a_pointer_that_leads_out_is_refused(tmp_path: Path) -> None:
    root = broken(tmp_path)
    (root.parent / "latest_universal").write_text("../elsewhere")
    with pytest.raises(UcplError, match="E450"):
        Universal().open(root.parent)


# ---- of model-parallel checkpoints ---------------------------------------------------------------------------------------

LISTS, MUTE, PIPELINE = (DENSE / name for name in ("tp2_pp2_dp2_z1_bf16", "tp2_pp2_dp1_z1", "pp2_dp2_z1"))
LLAMA = "megatron_deepspeed.ucpl:llama()"
INFO = "universal_checkpoint_info"


def atoms(folder: Path) -> dict[str, dict[str, Any]]:
    """The other keys next to each master, for DeepSpeed's loader."""
    found = {path.parent.name: torch.load(path, weights_only=False) for path in folder.glob("*/zero/*/fp32.pt")}
    return {name: {key: value for key, value in one.items() if key != "param"} for name, one in found.items()}


def test_each_atom_says_how_a_loader_cuts_it(tmp_path: Path) -> None:
    """A pipeline with lists of patterns: rows, columns, halves, copies, and words."""
    universal_of(LISTS, tmp_path / "out")
    found = atoms(tmp_path / "out")
    assert found["1.self_attention.query_key_value.weight"] == {"cat_dim": 0}
    assert found["2.self_attention.dense.weight"] == {"cat_dim": 1}
    assert found["1.mlp.dense_h_to_4h.weight"] == {"cat_dim": 0, "param_n_sub_params": 2}
    assert found["1.input_norm.weight"] == {}
    assert found["tied_modules.embed.word_embeddings.weight"] == {"cat_dim": 0, "vocab_tensor": True}
    model = torch.load(tmp_path / "out/global_step3_universal/mp_rank_00_model_states.pt", weights_only=False)
    assert model[INFO]["parameter_with_2_sub_params_cat_dim_0"] == [r"\d+\.mlp\.dense_h_to_4h\.weight"]  # the source's


def test_a_spec_says_cuts_where_the_source_does_not_and_the_folder_keeps_them(tmp_path: Path) -> None:
    ucpl.convert(MUTE, tmp_path / "out", to="universal()", layout=LLAMA)
    found = atoms(tmp_path / "out")
    assert found["2.self_attention.dense.weight"] == {"cat_dim": 1}
    assert found["1.mlp.dense_h_to_4h.weight"] == {"cat_dim": 0, "param_n_sub_params": 2}
    assert found["3.weight"] == {}
    model = torch.load(tmp_path / "out/global_step3_universal/mp_rank_00_model_states.pt", weights_only=False)
    assert r"^1\.mlp\.dense_4h_to_h\.weight$" in model[INFO]["parameter_with_row_parallelism_patterns"]
    assert r"^3\.weight$" in model[INFO]["tp_replicated_parameter_patterns"]


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UcplError, match=r"E471: .*every rank would load the first ones") as caught:
        ucpl.convert(DENSE / "pp2_ep2_dp2_z1", tmp_path / "out", to="universal()")
    assert "zero1(...)" in caught.value.diagnostics[0].remedy


def as_deepspeed_leaves_it(source: Path, folder: Path, words: int | None = None) -> Path:
    """A universal folder with each rank's model states, as of DeepSpeed's converter.

    words: the number of rows of the vocabulary that it keeps.
    """
    universal_of(source, folder)
    root = folder / "global_step3_universal"
    for path in source.glob("global_step*/mp_rank_*"):
        shutil.copyfile(path, root / path.name)
    for path in (root / "zero").glob("*word_embeddings*/*.pt"):
        value = torch.load(path, weights_only=False)
        if words is not None and isinstance(value, dict):
            torch.save({**value, "param": value["param"][:words].clone()}, path)
    return root


def states(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    found = torch.load(path / "truth_full.pt", weights_only=False)["params"]
    return {(name, state): value for name, mine in found.items() for state, value in mine.items()}


@pytest.mark.parametrize("source, words", [(LISTS, 34), (PIPELINE, None)], ids=["lists", "pipeline"])
def test_a_pipeline_with_only_atoms(source: Path, words: int | None, tmp_path: Path) -> None:
    """Stages' files name the parameters; padded rows are in none."""
    root = as_deepspeed_leaves_it(source, tmp_path / "atoms", words)
    ucpl.convert(root, tmp_path / "plain", to="plain()")
    found, known = held(tmp_path / "plain" / "plain.pt"), states(source)
    assert set(found) == {name for name, _ in known}
    for (name, state), value in known.items():
        assert torch.equal(found[name][state], value[:words] if "word_embeddings" in name else value), (name, state)


def test_what_a_folder_of_atoms_says_of_cuts_is_enough_for_other_degrees(tmp_path: Path) -> None:
    root = as_deepspeed_leaves_it(LISTS, tmp_path / "atoms", 34)
    ucpl.convert(root, tmp_path / "cut", to="zero1(tp=2, dp=3)")
    assert ucpl.compare(root, tmp_path / "cut").differences == ()
    model = next((tmp_path / "cut").glob("*/mp_rank_01_model_states.pt"))
    cut = torch.load(model, weights_only=False)["module"]
    whole = torch.load(root / "zero" / "1.mlp.dense_h_to_4h.weight" / "fp32.pt", weights_only=False)["param"]
    gate, up = whole.bfloat16().chunk(2)
    assert torch.equal(cut["1.mlp.dense_h_to_4h.weight"], torch.cat([gate.chunk(2)[1], up.chunk(2)[1]]))


def test_atoms_alone_become_a_folder_with_weights(tmp_path: Path) -> None:
    root = as_deepspeed_leaves_it(LISTS, tmp_path / "atoms")
    ucpl.convert(root, tmp_path / "out", to="universal()")
    model = torch.load(tmp_path / "out/global_step3_universal/mp_rank_00_model_states.pt", weights_only=False)
    master = torch.load(root / "zero" / "3.weight" / "fp32.pt", weights_only=False)["param"]
    assert torch.equal(model["module"]["3.weight"], master.bfloat16())
    assert atoms(tmp_path / "out") == atoms(tmp_path / "atoms")


def test_words_without_padding_and_weights_with_it(tmp_path: Path) -> None:
    """DeepSpeed strips the masters alone: weights are rounded from those."""
    universal_of(LISTS, tmp_path / "atoms")
    for path in (tmp_path / "atoms").glob("*/zero/*word_embeddings*/*.pt"):
        value = torch.load(path, weights_only=False)
        if isinstance(value, dict):
            torch.save({**value, "param": value["param"][:34].clone()}, path)
    ucpl.convert(tmp_path / "atoms", tmp_path / "plain", to="plain()")
    words = held(tmp_path / "plain" / "plain.pt")["tied_modules.embed.word_embeddings.weight"]
    assert torch.equal(words["fp32"].bfloat16(), words["weight"]) and words["weight"].shape == (34, 16)


def test_losses_of_a_pipeline_as_atoms_are_reported(tmp_path: Path) -> None:
    root = as_deepspeed_leaves_it(LISTS, tmp_path / "atoms")
    assert any("1.self_attention.inv_freq" in remark for remark in Universal().open(root).remarks)


def test_a_target_that_a_source_has_no_place_for_by_now_is_refused() -> None:
    """A plan of an earlier source, whose module had one more name."""
    plan = api.plan(str(DENSE / "z3_dp2_subgroup"), "universal(stage=1, weights=1)")
    opened = api.open_checkpoint(DENSE / "z3_dp2_subgroup")
    one = next(t for t in plan.targets if t.key[0] == "module")
    targets = (*plan.targets, evolve(one, key=("module", "gone.weight")))
    with pytest.raises(UcplError, match=r"E471: .*gone\.weight of mp_rank_00_model_states\.pt"):
        Universal().skeleton(plan.target, targets, opened, None)


@pytest.mark.parametrize("target", ["universal()", "universal(stage = 3)"])
def test_numbers_that_the_loader_cannot_read_are_refused(target: str, tmp_path: Path) -> None:
    """NAdam's mu_product, a number that the loader cannot read.

    At stages 1 and 2 each file but step.pt must have a dict; at stage 3 it is not requested.
    """
    plain = tmp_path / "plain.pt"
    ucpl.convert(DENSE / "z1_dp4", plain, "plain()")
    held_in = torch.load(plain, weights_only=True)
    for states in held_in["params"].values():
        if "exp_avg" in states:
            states["mu_product"] = torch.tensor(0.5)
    torch.save(held_in, plain)
    with pytest.raises(UcplError, match=r"E471: .*mu_product \(a number\)") as caught:
        ucpl.convert(plain, tmp_path / "made", target)
    assert "--drop" not in caught.value.diagnostics[0].remedy  # NAdam takes no step without it
    ucpl.convert(plain, tmp_path / "kept", "zero1(dp = 2)")
    ucpl.convert(tmp_path / "kept", tmp_path / "back", "plain()")
    back = torch.load(tmp_path / "back" / "plain.pt", weights_only=True)["params"]
    assert all(float(one["mu_product"]) == 0.5 for one in back.values() if "exp_avg" in one)
