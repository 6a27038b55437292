"""AutoTP's folders: full tensors, cuts in the language, and other degrees."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from tests.files.refusals import refusal
from tests.formats.deepspeed.test_deepspeed_writing import plain, unlike
from ucpl.api import compare, convert, infer, open_checkpoint, plan
from ucpl.errors import UcplError, catalogue
from ucpl.extents import DTYPES, Section, Sharding, key_text
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.files.values import Value
from ucpl.formats.deepspeed.cuts import info_of, shardings_of
from ucpl.inference.parallel import pattern, recut, rule, split
from ucpl.language import parse, print_axis, print_file
from ucpl.layout.axes import Split, piece_of
from ucpl.layout.scope import Scope

FIXTURE = Path(__file__).parents[2] / "fixtures" / "deepspeed" / "tp2_dp2_z1_uneven"
STEP = "global_step3"
INFO = "universal_checkpoint_info"
QKV, UP, DOWN = "blocks.0.attn.qkv.weight", "blocks.0.mlp.gate_up.weight", "blocks.0.mlp.down.weight"

CUTS = """ucpl 1

layout cut(dp, tp) of any extends zero1(dp = dp, tp = tp) {
LINES
}
"""


def spec(tmp_path: Path, **changed: str) -> Path:
    """A layout with the cuts of the fixture's model."""
    fused = "(_[..24]@spread(tp) + _[24..32]@spread(tp) + _[32..]@spread(tp))"
    lines = []
    for l in (0, 1):
        said = {
            f"blocks.{l}.attn.qkv.weight": f"{fused} ...",
            f"blocks.{l}.attn.qkv.bias": fused,
            f"blocks.{l}.attn.o_proj.weight": "_ _@spread(tp)",
            f"blocks.{l}.mlp.gate_up.weight": changed.get("up", "(_[..37]@spread(tp) + _[37..]@spread(tp)) ..."),
            f"blocks.{l}.mlp.down.weight": "_ _@spread(tp)",
        }
        lines += [f'  "{name}" = {axes} as "{name}"' for name, axes in said.items()]
    path = tmp_path / "cut.ucpl"
    path.write_text(CUTS.replace("LINES", "\n".join(lines)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(FIXTURE, tmp_path / "save")


def edited(folder: Path, change: Callable[[dict[str, Any]], None], ranks: tuple[int, ...] = (0, 1)) -> Path:
    for rank in ranks:
        file = folder / STEP / f"mp_rank_{rank:02}_model_states.pt"
        value = torch.load(file, weights_only=False)
        change(value)
        torch.save(value, file)
    return folder


def digests(params: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """SHA-256 of each tensor; weights in place of missing masters."""
    out = {}
    for name, states in params.items():
        kept = {"fp32": states["weight"], **states}
        wanted = ("fp32", "exp_avg", "exp_avg_sq")
        out[name] = {s: hashlib.sha256(kept[s].contiguous().numpy().tobytes()).hexdigest() for s in wanted}
    return out


# ---- read ----------------------------------------------------------------------------------------------------------------


def test_plain_holds_the_full_tensors_bit_for_bit(tmp_path: Path) -> None:
    convert(FIXTURE, tmp_path / "plain.pt", to="plain()")
    made = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert digests(made["params"]) == json.loads((FIXTURE / "truth.json").read_text())
    assert all(torch.equal(p["weight"], p["fp32"]) for p in made["params"].values())  # trained in fp32
    assert made["aliases"] == {"lm_head.weight": "wte.weight"}


def test_cuts_are_written_in_the_shortest_true_way() -> None:
    lines = [" ".join(line.split()) for line in infer(FIXTURE).text().splitlines()]
    qkv, up, down = (name.replace("0", "{l}", 1) for name in (QKV, UP, DOWN))  # of both blocks
    assert f'"{qkv}" = (_[..24]@tp + _[24..32]@tp + _[32..]@tp) ... as "{{name}}"' in lines
    assert f'"{up}" = (_[..37]@spread(tp) + _[37..]@spread(tp)) ... as "{{name}}"' in lines
    assert f'"{down}" = _ _@spread(tp) as "{{name}}"' in lines


def test_origins_of_the_cuts_are_in_the_plan() -> None:
    made = plan(str(FIXTURE), "zero1(dp=1)")
    told = {o.name: (o.value, o.origin) for o in made.origins}
    assert told["tp"][0] == 2
    assert "mp_world_size" in told["tp"][1]
    source = infer(FIXTURE).layout.origins
    assert ("cuts over tp", "10 tensors", "affine_map of mp_rank_00_model_states.pt") in source


def test_the_inferred_text_parses_and_converts_identically(tmp_path: Path) -> None:
    text = infer(FIXTURE).text()
    assert print_file(parse(text, "again.ucpl")) == text
    (tmp_path / "closed.ucpl").write_text(text)
    one = convert(FIXTURE, tmp_path / "one", to="zero3(dp=3, tp=1)")
    other = convert(FIXTURE, tmp_path / "other", to="zero3(dp=3, tp=1)", layout=f"{tmp_path / 'closed.ucpl'}:stored()")
    assert [(m.kind, m.state, m.tensor.tolist()) for m in one.plan.moves] == [
        (m.kind, m.state, m.tensor.tolist()) for m in other.plan.moves
    ]
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one" / STEP).iterdir())
    assert files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_a_swapped_pair_of_widths_is_named(folder: Path) -> None:
    def swap(value: dict[str, Any]) -> None:
        ranks = value[INFO]["affine_map"]["params"][r"^blocks\.1\.mlp\.down\.weight$"]["ranks"]
        ranks[0], ranks[1] = ranks[1], ranks[0]

    found = refusal(lambda: open_checkpoint(edited(folder, swap)), "E462")
    assert "blocks.1.mlp.down.weight" in found.message


def test_widths_that_are_not_those_of_the_shards_are_named(folder: Path) -> None:
    def narrow(value: dict[str, Any]) -> None:
        del value[INFO]["affine_map"]
        value[INFO]["sub_param_shard_widths"][rf"^{UP}$".replace(".", r"\.")] = [[18, 19], [18, 19]]

    found = refusal(lambda: open_checkpoint(edited(folder, narrow)), "E463")
    assert UP in found.message
    assert "[38, 24]" in found.message
    assert "[36, 24]" in found.message


def test_a_swap_of_widths_in_a_spec_is_named(tmp_path: Path) -> None:
    swapped = spec(tmp_path, up="(_[..37]@tp[18, 19] + _[37..]@tp[18, 19]) ...")
    found = refusal(lambda: plan(f"{swapped}:cut(dp=2, tp=2)", "plain()", checkpoint=FIXTURE), "E322")
    assert UP in found.message


def test_lists_of_patterns_say_the_same_as_the_map(folder: Path) -> None:
    known = open_checkpoint(FIXTURE).state.parallel.shardings
    edited(folder, lambda value: value[INFO].pop("affine_map"))
    found = open_checkpoint(folder).state.parallel.shardings
    assert {n: evolve(s, origin="") for n, s in found.items()} == {n: evolve(s, origin="") for n, s in known.items()}
    assert "parameter_with_row_parallelism_patterns" in found[DOWN].origin


def test_without_metadata_a_spec_is_asked_for_and_enough(folder: Path, tmp_path: Path) -> None:
    edited(folder, lambda value: value.pop(INFO))
    found = refusal(lambda: infer(folder), "E464")
    assert "--from" in (found.remedy or catalogue()["E464"].remedy)
    text = f"{spec(tmp_path)}:cut(dp=2, tp=2)"
    convert(folder, tmp_path / "plain.pt", to="plain()", layout=text)
    made = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert digests(made["params"]) == json.loads((FIXTURE / "truth.json").read_text())


def test_copies_that_differ_are_found(folder: Path, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["module"]["blocks.1.ln2.bias"][3] += 1

    with pytest.raises(UcplError) as caught:
        convert(edited(folder, change, ranks=(1,)), tmp_path / "plain.pt", to="plain()")
    assert "blocks.1.ln2.bias" in caught.value.diagnostics[0].message


def test_ranks_with_other_tensors_are_refused(folder: Path) -> None:
    found = refusal(
        lambda: open_checkpoint(edited(folder, lambda v: v["module"].pop("lm_head.weight"), ranks=(1,))), "E459"
    )
    assert "lm_head.weight" in found.message

    def rename(value: dict[str, Any]) -> None:
        value["module"]["more"] = value["module"]["temp"].clone()

    edited(folder.parent / shutil.copytree(FIXTURE, folder.parent / "two").name, rename, ranks=(1,))
    assert "more" in refusal(lambda: open_checkpoint(folder.parent / "two"), "E463").message


def test_a_missing_rank_is_named(folder: Path) -> None:
    (folder / STEP / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    assert "dp rank 1" in refusal(lambda: open_checkpoint(folder), "E452").message


# ---- written -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "zero1(tp=1)",
        "zero1(tp=3, kv_heads=0)",
        "zero2(tp=4, dp=3, kv_heads=0)",
        "zero3(dp=3)",
        "zero3(tp=3, dp=1, kv_heads=0)",
        "zero0(dp=1)",
        "zero0(dp=3, tp=3, kv_heads=0)",
        "zero3(tp=1, dp=5)",
        "zero2(dp=3, round_robin=1, alignment=4)",
        "zero3(tp=3, kv_heads=0, sub_group_size=700)",
    ],
)
def test_other_degrees_hold_the_same_state(call: str, tmp_path: Path) -> None:
    convert(FIXTURE, tmp_path / "made", to=call)
    assert compare(FIXTURE, tmp_path / "made")
    convert(tmp_path / "made", tmp_path / "plain.pt", to="plain()")
    made = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert digests(made["params"]) == json.loads((FIXTURE / "truth.json").read_text())


def test_the_same_degree_again_gives_what_deepspeed_wrote(tmp_path: Path) -> None:
    """Through ZeRO-3 at another degree: every tensor, and DeepSpeed's cuts."""
    convert(FIXTURE, tmp_path / "a", to="zero3(tp=4, dp=3, kv_heads=0)")
    convert(tmp_path / "a", tmp_path / "b", to="zero1(tp=2, dp=2)")
    for file in open_checkpoint(FIXTURE).files:
        mine, theirs = read_torch_file(tmp_path / "b" / STEP, file), read_torch_file(FIXTURE / STEP, file)
        assert unlike(plain(mine.value), plain(theirs.value)) == [], file
        assert tensors(mine) == tensors(theirs), file


def tensors(file: TorchFile) -> dict[str, bytes]:
    raw = file.path.read_bytes()
    out = {}
    for extent in file.extents():
        assert extent.is_contiguous
        itemsize = DTYPES[extent.dtype].itemsize
        start = extent.storage_start + extent.offset * itemsize
        out[key_text(extent.key)] = raw[start : start + extent.numel * itemsize]
    return out


def test_tp_1_is_plain_dense_deepspeed(tmp_path: Path) -> None:
    convert(FIXTURE, tmp_path / "made", to="zero1(tp=1)")
    value = torch.load(tmp_path / "made" / STEP / "mp_rank_00_model_states.pt", weights_only=False)
    assert INFO not in value
    assert value["mp_world_size"] == 1
    assert value["ds_config"]["tensor_parallel"]["autotp_size"] == 0
    assert open_checkpoint(tmp_path / "made").state.parallel.shardings == {}


def test_by_way_of_plain_nothing_of_the_ranks_is_left(tmp_path: Path) -> None:
    convert(FIXTURE, tmp_path / "plain.pt", to="plain()")
    convert(tmp_path / "plain.pt", tmp_path / "made", to="zero1(dp=2)")
    value = torch.load(tmp_path / "made" / STEP / "mp_rank_00_model_states.pt", weights_only=False)
    assert INFO not in value
    assert value["mp_world_size"] == 1
    assert compare(FIXTURE, tmp_path / "made")


def test_a_dense_source_needs_a_layout_that_cuts(tmp_path: Path) -> None:
    convert(FIXTURE, tmp_path / "dense", to="zero1(tp=1)")
    refusal(lambda: convert(tmp_path / "dense", tmp_path / "no", to="zero1(tp=2)"), "E472")
    convert(tmp_path / "dense", tmp_path / "made", to=f"{spec(tmp_path)}:cut(dp=2, tp=2)")
    assert compare(FIXTURE, tmp_path / "made")
    made = torch.load(tmp_path / "made" / STEP / "mp_rank_01_model_states.pt", weights_only=False)
    theirs = torch.load(FIXTURE / STEP / "mp_rank_01_model_states.pt", weights_only=False)
    assert list(made["module"]) == list(theirs["module"])
    assert all(torch.equal(made["module"][name], theirs["module"][name]) for name in theirs["module"])
    assert made[INFO]["affine_map"] == theirs[INFO]["affine_map"]


def test_a_section_that_every_rank_holds_completely(tmp_path: Path) -> None:
    """GPTBigCode's keys and values: copies are checked, and are in the map."""
    convert(FIXTURE, tmp_path / "dense", to="zero1(tp=1)")
    shared = spec(tmp_path, up="(_[..37]@spread(tp) + _[37..]) ...")
    convert(tmp_path / "dense", tmp_path / "made", to=f"{shared}:cut(dp=2, tp=3)")
    found = open_checkpoint(tmp_path / "made")
    assert found.state.parallel.shardings[UP].sections == (Section(37, (13, 12, 12)), Section(37, None))
    back = convert(tmp_path / "made", tmp_path / "plain.pt", to="plain()")
    made = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert digests(made["params"]) == json.loads((FIXTURE / "truth.json").read_text())
    place = back.plan.tensors.index(UP)
    assert (
        sum(int((m.tensor == place).sum()) for m in back.plan.moves if m.kind == "check" and m.state == "weight") == 2
    )
    file = tmp_path / "made" / STEP / "mp_rank_02_model_states.pt"
    value = torch.load(file, weights_only=False)
    value["module"][UP][12, 3] += 1  # the first row of the section that all hold
    torch.save(value, file)
    with pytest.raises(UcplError) as caught:
        convert(tmp_path / "made", tmp_path / "no.pt", to="plain()")
    assert UP in caught.value.diagnostics[0].message


def test_a_tied_tensor_is_cut_under_both_names(tmp_path: Path) -> None:
    """As a vocabulary that is cut over ranks."""
    convert(FIXTURE, tmp_path / "dense", to="zero1(tp=1)")
    path = spec(tmp_path)
    rows = [
        '  wte.weight = _@spread(tp) ... as "wte.weight"',
        '  lm_head.weight = _@spread(tp) ... as "lm_head.weight"',
    ]
    path.write_text(path.read_text().replace(" {\n", " {\n" + "\n".join(rows) + "\n", 1))
    convert(tmp_path / "dense", tmp_path / "made", to=f"{path}:cut(dp=2, tp=3)")
    found = infer(tmp_path / "made")
    assert 'lm_head.weight = _@spread(tp) ... as "lm_head.weight"' in " ".join(found.text().split())
    value = torch.load(tmp_path / "made" / STEP / "mp_rank_01_model_states.pt", weights_only=False)
    one, other = value["module"]["wte.weight"], value["module"]["lm_head.weight"]
    assert one.shape == (22, 24)
    assert one.data_ptr() == other.data_ptr()
    convert(tmp_path / "made", tmp_path / "again", to="zero3(tp=2, dp=3, kv_heads=0)")
    assert compare(FIXTURE, tmp_path / "again")


# ---- DeepSpeed's rule ------------------------------------------------------------------------------------------------------


def test_heads_with_an_effect_have_a_reported_default() -> None:
    made = plan(str(FIXTURE), "zero1(tp=4)")
    (origin,) = [o for o in made.origins if o.name == "kv_heads"]
    assert origin.value == 0
    assert origin.origin.startswith("default") and "kv_heads=N" in origin.origin
    assert {t.shape[0] for t in made.targets if str(t.key[-1]).endswith("o_proj.weight")} == {24}
    assert {t.shape[1] for t in made.targets if str(t.key[-1]).endswith("o_proj.weight")} == {6}
    refusal(lambda: plan(str(FIXTURE), "zero1(tp=4, kv_heads=2)"), "E473")  # a rank would hold nothing
    refusal(lambda: plan(str(FIXTURE), "zero1(tp=2147483648)"), "E473")  # and so many are not counted
    refusal(lambda: plan(str(FIXTURE), "zero1(tp=0)"), "E140")


def test_heads_that_the_source_shows_need_no_saying() -> None:
    by_heads = {"w": Sharding((24, 2), 0, (Section(24, (16, 8)),))}  # three heads of eight rows: no even cut
    made, _ = recut(by_heads, 3, None)
    assert made["w"].sections == (Section(24, (8, 8, 8)),)


def test_heads_that_do_not_matter_are_not() -> None:
    four = {"w": Sharding((32, 2), 0, (Section(32, (8, 8, 8, 8)),)), "n": Sharding((2,))}
    made, notes = recut(four, 2, None)
    assert made["w"].sections == (Section(32, (16, 16)),)
    assert made["n"].dim is None
    assert "only cut" in {name: origin for name, _, origin in notes}["kv_heads"]


def test_heads_that_contradict_the_source_are_refused() -> None:
    found = refusal(lambda: plan(str(FIXTURE), "zero1(tp=3, kv_heads=1)"), "E473")
    assert "[24, 0]" in found.message
    assert "[12, 12]" in found.message


def test_widths_that_no_rule_makes_are_reported() -> None:
    odd = {"w": Sharding((7, 2), 0, (Section(7, (2, 5)),))}
    assert "[2, 5] of 7" in refusal(lambda: recut(odd, 3, None), "E473").message


def test_a_rank_that_would_hold_nothing_is_refused() -> None:
    assert "tp rank 2" in refusal(lambda: plan(str(FIXTURE), "zero1(tp=3, kv_heads=2)"), "E473").message


def test_the_config_of_the_model_says_the_heads() -> None:
    made = plan(str(FIXTURE), "zero1(tp=2, dp=1)", config={"num_key_value_heads": 2})
    assert made.target.settings["tp"] == 2
    with pytest.raises(UcplError) as caught:
        plan(str(FIXTURE), "zero1(tp=3)", config={"num_key_value_heads": 2})
    assert "kv_heads = 2" in caught.value.diagnostics[0].labels[0].where


@pytest.mark.parametrize(
    ("size", "degree", "heads", "grain", "module", "widths"),
    [
        (24, 3, 4, 1, "attn.qkv", (12, 6, 6)),
        (24, 3, 0, 1, "attn.qkv", (8, 8, 8)),
        (24, 3, 4, 1, "mlp.up", (8, 8, 8)),
        (24, 3, 4, 1, "layer.up_proj", (8, 8, 8)),
        (24, 3, 4, 1, "lm_head", (8, 8, 8)),
        (25, 3, 4, 1, "attn.qkv", (9, 8, 8)),
        (67, 2, 0, 16, "attn.out", (32, 35)),
        (10, 4, 0, 64, "attn.out", (3, 3, 2, 2)),
    ],
)
def test_widths_are_deepspeeds(
    size: int, degree: int, heads: int, grain: int, module: str, widths: tuple[int, ...]
) -> None:
    assert rule(size, degree, heads, grain, module) == widths


@pytest.mark.parametrize(
    ("widths", "text"),
    [
        ((4, 4, 4), "@tp"),
        ((5, 4, 4), "@spread(tp)"),
        ((12, 6, 6), "@spread(tp, 6)"),
        ((4, 5), "@tp[4, 5]"),
        ((7, 4), "@tp[7, 4]"),
        ((5, 4, 3), "@tp[5, 4, 3]"),
        ((32, 35), "@tp[32, 35]"),
    ],
)
def test_widths_as_the_language_says_them(widths: tuple[int, ...], text: str) -> None:
    made = split(widths)
    (axis,) = pattern(Sharding((sum(widths),), 0, (Section(sum(widths), widths),)))
    assert print_axis(axis) == "_" + text
    scope = Scope()
    numbers = tuple(map(scope.integer, made.sizes))
    closed = Split("tp", made.kind, numbers, 1 if made.grain is None else scope.integer(made.grain))
    ends = [piece_of(closed, sum(widths), len(widths), here) for here in range(len(widths))]
    assert tuple(b - a for a, b in ends) == widths


# ---- DeepSpeed's metadata ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file() -> TorchFile:
    return read_torch_file(FIXTURE / STEP, "mp_rank_00_model_states.pt")


CASES = {
    "copy": Sharding((3, 5)),
    "one": Sharding((1,)),
    "rows": Sharding((7, 5), 0, (Section(7, (3, 2, 2)),)),
    "columns": Sharding((5, 7), 1, (Section(7, (3, 2, 2)),)),
    "fused": Sharding((14, 2), 0, (Section(8, (4, 2, 2)), Section(6, (2, 2, 2)))),
    "middle": Sharding((2, 6, 3), 1, (Section(6, (2, 2, 2)),)),
    "shared": Sharding((10, 2), 0, (Section(6, (2, 2, 2)), Section(4, None))),
    "bias": Sharding((7,), 0, (Section(7, (3, 2, 2)),)),
    "lean": Sharding((7, 2), 0, (Section(4, (2, 2, 0)), Section(3, (1, 1, 1)))),
}


@pytest.mark.parametrize("name", CASES)
def test_maps_are_read_as_they_are_written(name: str, file: TorchFile) -> None:
    given = CASES[name]
    made = info_of({name: given}, 3, {})
    info = Value(file.path, file.file, (INFO,), made)
    found = shardings_of(file, info, {name: [given.local(tp) for tp in range(3)]})
    assert evolve(found[name], origin="") == given


def test_what_autotp_published_is_written_again(file: TorchFile) -> None:
    held: Any = file.value
    theirs = held[INFO]
    known = open_checkpoint(FIXTURE)
    parameters = {t.name: known.state.parallel.shardings[t.name] for t in known.state.tensors if t.kind != "buffer"}
    assert info_of(parameters, 2, theirs) == theirs
    assert info_of(parameters, 2, {}) == theirs


def test_what_the_source_says_of_vocabularies_stays_as_it_is() -> None:
    """Each tensor-parallel file uses it: none has additions of the one before."""
    kept = {"vocabulary_parameter_patterns": ["^old$"]}
    table = {"embed.weight": Sharding((6, 2), 0, (Section(6, (3, 3)),))}
    both = [info_of(table, 2, kept)["vocabulary_parameter_patterns"] for _ in range(2)]
    assert both == [["^old$", r"^embed\.weight$"]] * 2
    assert kept == {"vocabulary_parameter_patterns": ["^old$"]}


def _one_row_on(entry: Any) -> list[Any]:
    start, steps = entry["ranks"][1]["pieces"][0]["source"]
    return [start + steps[0], steps]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: e["ranks"][0]["pieces"][0].update(scale=0.5), "scaled"),
        (lambda e: e["ranks"][0]["pieces"][0].update(source=[0, [48, 1]]), "strides"),
        (lambda e: e["ranks"][0]["pieces"].reverse(), "not in its turn"),
        (lambda e: e["ranks"][0]["pieces"].pop(), "positions make up a shard"),
        (lambda e: e["ranks"].pop(1), "of 1 ranks"),
        (lambda e: e["ranks"][1]["pieces"][0].update(source=_one_row_on(e)), "a piece begins at"),
        (lambda e: e.update(logical_shape=[41, 24]), "end at 40 of 41"),
    ],
)
def test_what_is_no_section_is_refused(change: Callable[[Any], Any], why: str, folder: Path) -> None:
    def damage(value: dict[str, Any]) -> None:
        change(value[INFO]["affine_map"]["params"][rf"^{QKV}$".replace(".", r"\.")])

    found = refusal(lambda: open_checkpoint(edited(folder, damage)), "E462")
    assert QKV in found.message
    assert why in found.message


def test_a_map_of_another_form_is_refused_by_its_key(folder: Path) -> None:
    def damage(value: dict[str, Any]) -> None:
        del value[INFO]["affine_map"]["params"][rf"^{QKV}$".replace(".", r"\.")]["logical_shape"]

    found = refusal(lambda: open_checkpoint(edited(folder, damage)), "E455")
    assert "logical_shape is not there" in found.message


def test_patterns_that_may_take_too_long_are_refused(folder: Path) -> None:
    def hostile(value: dict[str, Any]) -> None:
        del value[INFO]["affine_map"]
        value[INFO]["tp_replicated_parameter_patterns"].insert(0, "(a+)+$")

    refusal(lambda: open_checkpoint(edited(folder, hostile)), "E462")


def test_lists_of_patterns_cut_each_part_separately(file: TorchFile) -> None:
    """Releases before affine_map: halves of one dim, and divisible parts."""

    def read(**lists: Any) -> Any:
        info = Value(file.path, file.file, (INFO,), {"tp_replicated_parameter_patterns": ["^all$"], **lists})
        return shardings_of(file, info, {"w": [(4, 3), (4, 3)], "all": [(2,), (2,)]})

    halves = read(parameter_with_2_sub_params_cat_dim_0=["^w$"])["w"]
    assert (halves.shape, halves.dim, [s.widths for s in halves.sections]) == ((8, 3), 0, [(2, 2), (2, 2)])
    rows = read(parameter_with_row_parallelism_patterns=["^w$"])["w"]
    assert (rows.shape, rows.dim) == ((4, 6), 1)
    assert (read()["w"].shape, read()["all"].dim) == ((8, 3), None)
    fused = {"patterns": ["^w$"], "shape": [(6, 2), -1], "partition_dim": 0}
    parts = read(parameter_with_sub_params=[fused])["w"]
    assert [(s.size, s.widths) for s in parts.sections] == [(6, (3, 3)), (2, (1, 1))]
    odd = {**fused, "shape": [(5, 3), -1]}
    assert "no sub_param_shard_widths" in refusal(lambda: read(parameter_with_sub_params=[odd]), "E462").message
