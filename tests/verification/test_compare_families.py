"""Comparisons of tensors that are stored alike, as one: the same findings.

Expected findings are those of a comparison that has each tensor alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.sparse import MAKERS, tensors_like
from tests.cli.command import FIXTURES
from tests.counted import calls
from ucpl import api
from ucpl.conversion import sides
from ucpl.conversion.side import Side
from ucpl.files.torch_files import TorchFile, read_torch_file
from ucpl.formats.plain import store
from ucpl.placement import Placement
from ucpl.runtime.assemble import Assembler
from ucpl.verification import compare as room

TWICE = """ucpl 2
layout twice(dp = 2) of any {
  framework torch()
  mesh dp
  file weights = torch "rank{dp}.pt"
  group * = model
  * = ... as "{name}"
}
"""

Tensors = dict[str, torch.Tensor]
TOGETHER, ALONE = 1, 10**9
PER_TENSOR = 700  # calls at most, of one tensor more in a comparison of two files; 3,000 without families


def model(layers: int = 12) -> Tensors:
    """Layers in the model's order: `layers.10` comes behind `layers.9`."""
    dice = torch.Generator().manual_seed(7)
    shapes = {"gate.weight": (4, 2), "up.weight": (3, 2), "down.weight": (2, 3), "norm.weight": (2,)}
    made = {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in shapes.items()}
    every = {"embed.weight": (5, 2), "head_a.weight": (6, 2), "head_b.weight": (6, 2), **made}
    return {name: torch.randn(shape, generator=dice) for name, shape in every.items()}


def element(*names: str) -> Callable[[Tensors], None]:
    """Other last elements of these tensors."""

    def change(held: Tensors) -> None:
        for name in names:
            held[name].view(-1)[-1] += 1

    return change


def lacking(name: str) -> Callable[[Tensors], None]:
    return lambda held: held.update() if held.pop(name, None) is None else None


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda held: held.update({name: value(held[name])})


def half(held: Tensors) -> None:
    held.update({name: value.bfloat16() for name, value in held.items()})


UP = "layers.{}.up.weight"
CHANGES: dict[str, tuple[Callable[[Tensors], None], ...]] = {
    "nothing": (),
    "one element": (element(UP.format(10)),),
    "several": (element(UP.format(10), UP.format(2), "layers.11.norm.weight", "head_b.weight"),),
    "a tensor less": (lacking(UP.format(3)), element(UP.format(9))),
    "a tensor more": (lambda held: held.update({UP.format(12): torch.zeros(3, 2)}),),
    "a shape": (put(UP.format(4), lambda one: one.T.contiguous()), element(UP.format(5))),
    "a dtype": (put(UP.format(4), torch.Tensor.half), element(UP.format(5), "layers.4.down.weight")),
    "all dtypes": (half,),
    "all dtypes and an element": (element(UP.format(7)), half),
}


def found(a: Path, b: Path, count: int, monkeypatch: pytest.MonkeyPatch, **how: Any) -> dict[str, Any]:
    """Findings of a comparison, and the families that it had."""
    seen: list[int] = []
    alike = room._alike

    def watched(*given: Any) -> Any:
        made = alike(*given)
        seen.append(len(made[0].layout.families))
        return made

    monkeypatch.setattr(sides, "FAMILIES_FROM", count)
    monkeypatch.setattr(room, "_alike", watched)
    made = attrs.asdict(api.compare(a, b, **how))
    monkeypatch.setattr(room, "_alike", alike)
    return {name: value for name, value in made.items() if name not in ("seconds", "bytes_live_max", "bytes_read")} | {
        "of": seen
    }


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_findings_are_the_same(name: str, weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of safetensors has its names in another order."""
    changed = model()
    for change in CHANGES[name]:
        change(changed)
    (tmp_path / "a").mkdir()
    save_file(model(), tmp_path / "a" / "model.safetensors", {"format": "pt"})
    torch.save({"model": changed}, tmp_path / "b.pt")
    for a, b in (("a", "b.pt"), ("b.pt", "a")):
        ours, theirs = (found(tmp_path / a, tmp_path / b, n, monkeypatch, weights=weights) for n in (TOGETHER, ALONE))
        assert min(ours.pop("of")) > 1 and not max(theirs.pop("of"))
        assert ours == theirs
        assert bool(ours["differences"]) == (name != "nothing" and not (weights and name == "all dtypes"))


@pytest.mark.parametrize(("source", "target"), [("z1_dp4", "zero3(dp = 3)"), ("z1_dp2_bf16", "zero1(dp = 3)"),
    ("z3_dp2_subgroup", "zero1(dp = 2)"), ("z2_dp3_frozen", "universal()")])  # fmt: skip
def test_findings_of_states_are_the_same(
    source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of the target are others, in two places each."""
    api.convert(FIXTURES / source, tmp_path / "b", target)
    largest = sorted((p for p in (tmp_path / "b").rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)[:2]
    for is_changed in (False, True):
        if is_changed:
            for path in largest:
                with path.open("r+b") as file:
                    for part in (2, 3):
                        file.seek(path.stat().st_size * part // 5)
                        byte = file.read(1)
                        file.seek(-1, 1)
                        file.write(bytes([byte[0] ^ 64]))
        ours, theirs = (found(FIXTURES / source, tmp_path / "b", n, monkeypatch) for n in (TOGETHER, ALONE))
        ours.pop("of"), theirs.pop("of")
        assert ours == theirs and bool(ours["differences"]) == is_changed


@pytest.mark.parametrize("gap", [1, 6144])
def test_runs_of_bytes_are_compared_in_any_order(gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are too far apart are read in parts."""
    shapes = {f"layers.{n}.weight": (1 + n % 3, 700) for n in range(600)}
    dice = torch.Generator().manual_seed(7)
    held = {name: torch.randn(shape, generator=dice) for name, shape in shapes.items()}
    torch.save({"model": held}, tmp_path / "a.pt")
    shuffled = [*held]
    shuffled.sort(key=lambda name: hash((len(name), name[::-1])))
    for name in (shuffled[1], shuffled[599]):
        held[name] = held[name].clone()
        held[name][0, 1] += 1
    torch.save({"model": {name: held[name] for name in shuffled}}, tmp_path / "b.pt")
    monkeypatch.setattr("ucpl.runtime.equal_runs.CALL_BYTES", gap)
    made = api.compare(tmp_path / "a.pt", tmp_path / "b.pt", memory=1 << 20)
    assert {d.element for d in made.differences} == {f"{name}[0, 1]" for name in (shuffled[1], shuffled[599])}


def test_one_more_tensor_takes_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile is assembled where runs of bytes are equal."""
    monkeypatch.setattr(sides, "FAMILIES_FROM", 100)
    assembled: list[int] = []
    assemble = Assembler.assemble

    def watched(self: Assembler, target: int, *given: Any) -> int | None:
        assembled.append(target)
        return assemble(self, target, *given)

    monkeypatch.setattr(Assembler, "assemble", watched)
    counts = []
    for count in (300, 600):
        folder, file = tmp_path / f"{count}", tmp_path / f"{count}.pt"
        MAKERS["huggingface"](folder, tensors_like(count, (2, 2)), 8)
        api.convert(folder, file, "plain()")
        assembled.clear()
        assert api.compare(folder, file)  # imports, and texts that are kept
        counts.append(calls(lambda a=folder, b=file: api.compare(a, b)))  # type: ignore[misc]
        assert not assembled
    assert counts[1] - counts[0] <= PER_TENSOR * 300, counts


@pytest.mark.parametrize("is_odd", [False, True])
def test_a_verification_is_the_same(is_odd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An element of a copy that differs is named."""
    dice = torch.Generator().manual_seed(7)
    held = {f"layers.{n}.up.weight": torch.randn(4, 2, generator=dice) for n in range(12)}
    source, target = tmp_path / "a.pt", tmp_path / "b"
    torch.save({"model": held}, source)
    (tmp_path / "twice.ucpl").write_text(TWICE)
    api.convert(source, target, f"{tmp_path / 'twice.ucpl'}:twice()")
    if is_odd:
        value = torch.load(target / "rank1.pt")
        value["layers.10.up.weight"][3, 1] += 1
        torch.save(value, target / "rank1.pt")
    made: list[tuple[Any, ...]] = []
    asked: list[Side] = []
    whole = sides.without_families

    def watched(side: Side) -> Placement:
        asked.append(side)
        return whole(side)

    monkeypatch.setattr(api, "without_families", watched)
    for count in (ALONE, TOGETHER):
        monkeypatch.setattr(sides, "FAMILIES_FROM", count)
        verdict = api.verify(target, layout=f"{tmp_path / 'twice.ucpl'}:twice()")
        made.append((bool(verdict), verdict.copied, verdict.rounded, verdict.notes, verdict.findings))
    assert made[0] == made[1] and made[0][0] is not is_odd
    assert len(asked) == is_odd and made[0][1] > 0
    assert not is_odd or any("layers.10.up.weight[3, 1]" in str(one) for one in made[0][4])


def test_a_plain_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is another by then is parsed again."""
    parsed: list[str] = []

    def watched(root: Path, name: str) -> TorchFile:
        parsed.append(name)
        return read_torch_file(root, name)

    monkeypatch.setattr(store, "read_torch_file", watched)
    for count in (3, 4):
        MAKERS["plain"](tmp_path / "a.pt", tensors_like(count, (2, 2)), 1)
        opened = api.open_checkpoint(tmp_path / "a.pt")
        assert len(opened.state.tensors) == count and parsed == ["a.pt"]
        parsed.clear()
    assert store.Plain().recognises(tmp_path / "a.pt")
    MAKERS["plain"](tmp_path / "a.pt", tensors_like(5, (2, 2)), 1)
    assert len(store.Plain().open(tmp_path / "a.pt").state.tensors) == 5
