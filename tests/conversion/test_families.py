"""Plans of tensors that are stored alike, as one: the same target.

Expected files are those of a plan that has each tensor alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from math import prod
from pathlib import Path
from types import FrameType

import pytest
import torch
from safetensors.torch import save_file

import ucpl
from tests.cli.command import FIXTURES
from ucpl import api, language
from ucpl.conversion import engine, sides
from ucpl.conversion.planning import Asked, Prepared
from ucpl.conversion.requests import Given
from ucpl.conversion.share import share_of
from ucpl.conversion.tracing import traced
from ucpl.errors import Diagnostic, UcplError
from ucpl.extents import key_text
from ucpl.files.checkpoint import Checkpoint
from ucpl.language import nodes, print_file
from ucpl.language import source as texts
from ucpl.layout import entries
from ucpl.placement import Placement
from ucpl.planning import Plan
from ucpl.planning.difference import difference
from ucpl.planning.files import load_plan, save_plan
from ucpl.runtime.compare import Comparison
from ucpl.verification import checkpoint

HOUSE = str(Path(ucpl.__file__).parent)
# Calls for each tensor more, by room. The work of these rooms is that of families: they list names alone.
CALLS_MAX = dict.fromkeys(("placement", "tables", "graph", "planning", "extents"), 20)
CALLS_MAX |= {"layout": 55, "language": 35, "inference": 5}  # they read and print each tensor of the model
TOGETHER, ALONE = 1, 10**9
Found = tuple[Comparison | None, list[Diagnostic]]
SOURCES = ("z1_dp4", "z1_dp2_bf16", "z2_dp3_frozen", "z3_dp2_subgroup")
TARGETS = (
    "dcp(fsdp = 3)", "safetensors_shards(fsdp = 2)", "zero3(dp = 3)", "zero1(dp = 2, round_robin = 1)", "universal()",
    "plain()",
)  # fmt: skip


def experts(top: Path, layers: int, of: int = 4) -> Path:
    """A folder as Hugging Face has it: `of` experts in each layer."""
    top.mkdir()
    shapes = {"gate.weight": (of, 2), "norm.weight": (2,)}
    shapes |= {f"experts.{n}.{p}.weight": s for n in range(of) for p, s in (("up", (3, 2)), ("down", (2, 3)))}
    made = {f"model.layers.{n}.{name}": torch.rand(shape) for n in range(layers) for name, shape in shapes.items()}
    save_file({"model.embed_tokens.weight": torch.rand(5, 2), **made}, top / "model.safetensors", {"format": "pt"})
    return top


def files(top: Path) -> dict[str, bytes]:
    """The target's files without those that describe the plan."""
    found = [top] if top.is_file() else [p for p in top.rglob("*") if p.is_file()]
    return {str(p.relative_to(top)): p.read_bytes() for p in found if p.parent.name != "ucpl"}


def planned(source: Path, target: str, count: int, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(sides, "FAMILIES_FROM", count)
    return api.plan(str(source), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_target_has_the_same_bytes(source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for count, bundle in ((ALONE, ALONE), (TOGETHER, ALONE), (TOGETHER, 2)):
        monkeypatch.setattr(sides, "FAMILIES_FROM", count)
        monkeypatch.setattr(entries, "BUNDLE_FROM", bundle)
        top = tmp_path / f"{count} {bundle}"
        done = api.convert(FIXTURES / source, top, target)
        made.append(files(top))
        assert done.plan.families if count == TOGETHER else not done.plan.families
    assert made[0] == made[1] == made[2] and made[0]


OWN = """ucpl 2

layout chunks(dp) of any {
  framework torch()
  mesh dp
  file weights = torch "rank_{dp}.pt"
  *                = _@chunk(dp) ...  as "{name}"
  "*bias" is trainable = ...          as "{name}"  # a copy on each rank
  * is alias       = none
  state * = like  as "{number}/{state}"
}

# Lines of single tensors have another order than the model.
layout named(dp) of any extends chunks() {
  "ln_f.bias" = ...  as "{name}"
}

layout weights(dp) of any extends chunks() {
  "model.embed_tokens.weight" = ...  as "{name}"
  state *                     = none
}
"""


@pytest.mark.parametrize(("name", "is_folded"), [("chunks", True), ("named", False), ("weights", True)])
def test_a_layout_of_ones_own_without_groups_gives_the_same_bytes(
    name: str, is_folded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.ucpl").write_text(OWN)
    source = experts(tmp_path / "hf", 2) if name == "weights" else FIXTURES / "z1_dp4"
    made = []
    for count in (ALONE, TOGETHER):
        monkeypatch.setattr(sides, "FAMILIES_FROM", count)
        top = tmp_path / str(count)
        done = api.convert(source, top, f"{tmp_path / 'own.ucpl'}:{name}(dp = 3)")
        assert bool(done.plan.families) == (is_folded and count == TOGETHER)
        made.append(files(top))
    assert made[0] == made[1] and made[0]


def test_a_text_that_is_too_large_is_refused_without_a_second_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.ucpl").write_text(OWN)
    asked: list[bool] = []

    def watched(one: Asked, given: Given) -> Prepared:
        asked.append(given.folding is not None)
        return plan(one, given)

    plan = engine._planned
    monkeypatch.setattr(engine, "_planned", watched)
    monkeypatch.setattr(texts, "TEXT_CHARACTERS_MAX", 400)
    with pytest.raises(UcplError) as caught:
        planned(experts(tmp_path / "hf", 2), f"{tmp_path / 'own.ucpl'}:chunks(dp = 3)", TOGETHER, monkeypatch)
    assert [one.code for one in caught.value.diagnostics] == ["E017"] and asked == [True]


def odd(top: Path) -> Path:
    """Tensors of one, two and three dims in turn, with different sizes."""
    top.mkdir()
    shapes = {f"part_{n}.w": [(5 + n,), (2 + n, 3), (3, n + 1, 2)][n % 3] for n in range(12)}
    made = {name: torch.rand(shape) for name, shape in shapes.items()}
    made |= {f"layers.{n}.b": torch.rand(4) for n in range(3)} | {"scale": torch.rand(())}
    save_file(made, top / "model.safetensors", {"format": "pt"})
    return top


@pytest.mark.parametrize(
    "target",
    ["dcp(fsdp = 4)", "safetensors_shards(fsdp = 3)", "zero1(dp = 3)", "zero3(dp = 3)", "torch_file()", "plain()"],
)
def test_a_bundle_gives_the_same_bytes(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have the order of the model."""
    source = odd(tmp_path / "hf")
    monkeypatch.setattr(sides, "FAMILIES_FROM", TOGETHER)
    made: dict[int, dict[str, bytes]] = {}
    nodes_of: dict[int, int] = {}
    for count in (2, ALONE):
        monkeypatch.setattr(entries, "BUNDLE_FROM", count)
        done = api.convert(source, tmp_path / str(count), target)
        made[count], nodes_of[count] = files(tmp_path / str(count)), len(done.plan.nodes)
        save_plan(done.plan, tmp_path / f"{count}.plan")
        read = load_plan(tmp_path / f"{count}.plan")
        assert list(read.targets) == list(done.plan.targets) and list(read.sources) == list(done.plan.sources)
        assert api.compare(source, tmp_path / str(count)) and api.verify(tmp_path / str(count))
    assert made[2] == made[ALONE] and made[ALONE]
    assert nodes_of[2] < nodes_of[ALONE]


@pytest.mark.parametrize("stored", ["zero3(dp = 4)", "dcp(fsdp = 4)"])
def test_a_share_of_a_bundle_has_the_same_moves(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank of the target has nothing of the first tensor."""
    source = tmp_path / "stored"
    save_file({f"part_{n}.w": torch.rand(3 + n, 2) for n in range(12)}, tmp_path / "m.safetensors", {"format": "pt"})
    api.convert(tmp_path / "m.safetensors", source, stored)
    monkeypatch.setattr(sides, "FAMILIES_FROM", TOGETHER)
    found: list[Counter[tuple[str, str, str, str, int]]] = []
    for count in (2, ALONE):
        monkeypatch.setattr(entries, "BUNDLE_FROM", count)
        plan = share_of(Asked(str(source), "dcp(fsdp = 5)"), Given(), 4).plan
        assert (count == 2) == any(shelf.block.owned is not None for shelf in plan.target_shelves.shelves)
        moved = Counter[tuple[str, str, str, str, int]]()
        for runs in plan.moves:
            for s, t, shape in zip(runs.source.tolist(), runs.target.tolist(), runs.shape.tolist(), strict=True):
                here, there = plan.sources[s], plan.targets[t]
                moved[here.file, key_text(here.key), there.file, key_text(there.key), prod(shape)] += 1
        found.append(moved)
    assert found[0] == found[1] and found[0]


@pytest.mark.parametrize("target", ["zero3(dp = 3)", "zero1(dp = 2)", "dcp(fsdp = 3)"])
def test_an_element_comes_from_the_same_place(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = (planned(FIXTURES / "z1_dp4", target, n, monkeypatch) for n in (TOGETHER, ALONE))
    names = [name for of in together.families.values() for name in of]
    assert names
    sizes = {tensor.name: tensor.shape for tensor in alone.target.tensors}
    for name in names:
        element = f"{name}[{', '.join(str(n - 1) for n in sizes[name])}]"
        ours, theirs = (Counter(map(repr, traced(plan, "a", element, None)[1])) for plan in (together, alone))
        assert ours == theirs and ours
        held = Counter[str]()
        for run in traced(together, "a", name, None)[1]:
            held[run.state] += run.elements
        assert {*held.values()} == {prod(sizes[name])}


def test_a_plan_in_a_file_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(FIXTURES / "z1_dp4", "zero3(dp = 3)", TOGETHER, monkeypatch)
    save_plan(plan, tmp_path / "a.plan")
    read = load_plan(tmp_path / "a.plan")
    assert read.families == plan.families and not difference(plan, read)
    assert list(read.targets) == list(plan.targets) and list(read.sources) == list(plan.sources)
    monkeypatch.setattr(sides, "FAMILIES_FROM", ALONE)
    api.apply(tmp_path / "a.plan", FIXTURES / "z1_dp4", tmp_path / "a")
    api.convert(FIXTURES / "z1_dp4", tmp_path / "b", "zero3(dp = 3)")
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize(
    "target", ["zero1(dp = 2, tp = 2)", "dcp(fsdp = 2, tp = 3)", 'safetensors(dtype = "f8_e4m3fn")']
)
def test_an_error_is_the_same(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, found = experts(tmp_path / "hf", 2), []
    for count in (TOGETHER, ALONE):
        with pytest.raises(UcplError) as caught:
            planned(source, target, count, monkeypatch)
        found.append(str(caught.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("source", ["z1_dp4", "z1_dp2_bf16", "z3_dp2_subgroup"])
def test_copies_are_compared_by_families(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is found once more without families."""
    made: list[bool] = []
    compared = checkpoint._compared

    def watched(opened: Checkpoint, placement: Placement, memory: int, workers: int) -> Found:
        made.append(bool(placement.layout.families))
        copies, found = compared(opened, placement, memory, workers)
        return copies, [Diagnostic("E700", str(made))] if faulty else found

    monkeypatch.setattr(checkpoint, "_compared", watched)
    faulty, found = False, []
    for count in (ALONE, TOGETHER):
        monkeypatch.setattr(sides, "FAMILIES_FROM", count)
        verdict = api.verify(FIXTURES / source)
        found.append((verdict.copied, verdict.rounded, verdict.notes, verdict.findings))
    assert found[0] == found[1] and made == [False, True]
    faulty = True
    assert "[False, True, True, False]" in [one.message for one in api.verify(FIXTURES / source).findings]


def test_few_tensors_are_planned_alone() -> None:
    assert not api.plan(str(FIXTURES / "z1_dp4"), "plain()").families


@pytest.mark.parametrize("target", ["dcp(fsdp = 4)", "zero3(dp = 4)"])
def test_work_is_that_of_families(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls more for 200 more tensors of the same families."""
    small, large = (counted(experts(tmp_path / f"{n}", n), target, monkeypatch) for n in (20, 40))
    for room, most in CALLS_MAX.items():
        assert large[room] - small[room] <= most * 20 * 10, (room, small[room], large[room])


def test_a_plan_prints_its_model_once_and_no_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []

    def watched(file: nodes.File) -> str:
        printed.append("+".join(type(one).__name__ for one in file.statements))
        return print_file(file)

    monkeypatch.setattr(language, "print_file", watched)
    plan = planned(experts(tmp_path / "hf", 2), "dcp(fsdp = 4)", TOGETHER, monkeypatch)
    assert printed == ["Model"]
    assert plan.layout_text and plan.layout_text is plan.layout_text
    assert printed == ["Model", "Model+Layout"]


def counted(source: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(HOUSE):
            calls[name[len(HOUSE) + 1 :].split("/")[0]] += 1

    monkeypatch.setattr(sides, "FAMILIES_FROM", TOGETHER)
    sys.setprofile(watch)
    try:
        plan = api.plan(str(source), target)
    finally:
        sys.setprofile(None)
    assert len(plan.tensors) < 10 < len(plan.target.tensors)
    return calls
