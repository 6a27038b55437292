"""`verify` names every contradiction, and claims nothing that it did not check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ucpl
from ucpl import api
from ucpl.verification.checkpoint import WITNESS, verdict

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoint"
SPEC = """ucpl 1
model m {
  dim a = 4, b = 3
  dtype f32
  w : a b
  v : a
}
layout x(tp) of m {
  mesh tp
  framework torch()
  file weights = torch "{tp}.pt"
  w = a@tp b as "w"
  v = a as "v"
  v = a as "twin"
}
"""


def folder(top: Path, **changes: float) -> tuple[Path, str]:
    """Two ranks with halves of w, each with v under two names.

    `changes`: "v1": 9.0 puts 9 into rank 1's v[2].
    """
    (top / "spec.ucpl").write_text(SPEC)
    out = top / "files"
    out.mkdir()
    for rank in range(2):
        value = {"w": torch.arange(6.0).reshape(2, 3) + rank, "v": torch.arange(4.0), "twin": torch.arange(4.0)}
        for name in ("v", "twin"):
            if f"{name}{rank}" in changes:
                value[name][2] = changes[f"{name}{rank}"]
        torch.save(value, out / f"{rank}.pt")
    return out, f"{top / 'spec.ucpl'}:x(tp=2)"


def test_copies_over_ranks_and_under_second_names_are_all_held_against_each_other(tmp_path: Path) -> None:
    path, layout = folder(tmp_path)
    found = ucpl.verify(path, layout=layout)
    assert found and found.copied == 3 * 4 and found.rounded == 0
    assert "12 elements of copies equal each other" in found.notes
    assert "weights and masters are not both stored: nothing to hold against each other" in found.notes
    assert WITNESS in found.notes


@pytest.mark.parametrize("which", ["v1", "twin0", "twin1"])
def test_a_copy_that_differs_is_named_to_the_element_with_both_places(which: str, tmp_path: Path) -> None:
    path, layout = folder(tmp_path, **{which: 9.0})
    found = ucpl.verify(path, layout=layout)
    assert not found
    (finding,) = found.findings
    assert finding.code == "E700" and finding.message.startswith("weight of v[a=2]: copies differ, ")
    assert "9.0 " in finding.message and "2.0 " in finding.message
    places = {(label.file.rpartition("/")[2], label.where) for label in finding.labels}
    assert (f"{which[-1]}.pt", f"{which[:-1]}[2]") in places and len(places) == 2


def test_every_stored_copy_that_differs_is_a_finding(tmp_path: Path) -> None:
    path, layout = folder(tmp_path, v1=9.0, twin1=7.0)
    assert [d.message.partition(",")[0] for d in ucpl.verify(path, layout=layout).findings] == [
        "weight of v[a=2]: copies differ",
        "weight of v[a=2]: copies differ",
    ]


def test_a_copy_that_is_stored_otherwise_is_compared_with_its_elements(tmp_path: Path) -> None:
    """The copy is transposed, and stored before the read tensor."""
    path, layout = folder(tmp_path)
    head = SPEC.partition("  w = a@tp")[0]
    (tmp_path / "spec.ucpl").write_text(head + '  v = a as "v"\n  w = a b as "w"\n  w = b a as "side"\n}\n')
    for wrong in (False, True):
        for rank in range(2):
            w = torch.arange(12.0).reshape(4, 3)
            side = w.t().clone()
            side[2, 1] += wrong and rank
            torch.save({"w": w, "side": side, "v": torch.arange(4.0)}, path / f"{rank}.pt")
        found = ucpl.verify(path, layout=layout)
        assert found.copied == 4 + 3 * 12
        said = [(d.message.partition(":")[0], d.labels[0].where) for d in found.findings]
        assert said == ([("weight of w[a=1, b=2]", "side[2, 1]")] if wrong else [])


def test_members_of_a_mean_may_differ(tmp_path: Path) -> None:
    path, layout = folder(tmp_path)
    head = SPEC.partition("  v = a as")[0]
    (tmp_path / "spec.ucpl").write_text(head + '  w = a@tp b as "again"\n  v = a mean @tp as "m"\n}\n')
    for rank in range(2):
        w = torch.arange(6.0).reshape(2, 3)
        torch.save({"w": w, "again": w.clone(), "m": torch.arange(4.0) + rank}, path / f"{rank}.pt")
    found = ucpl.verify(path, layout=layout)
    assert found, found.findings
    assert found.copied == 12


def plain(top: Path, name: str = "p.pt", **steps: Any) -> dict[str, Any]:
    """Three parameters in two groups, weights rounded from masters."""
    dice = torch.Generator().manual_seed(0)
    params = {}
    for key in "abc":
        fp32 = torch.randn(3, 2, generator=dice)
        params[key] = {"weight": fp32.bfloat16(), "fp32": fp32, "exp_avg": fp32, "step": steps.get(key, 3)}
    groups = [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}]
    value = {"params": params, "groups": groups}
    torch.save(value, top / name)
    return value


def test_a_weight_that_is_not_its_master_rounded_is_named_with_both_values(tmp_path: Path) -> None:
    value = plain(tmp_path)
    found = ucpl.verify(tmp_path / "p.pt")
    assert found and found.rounded == 18 and "18 weights are their fp32 masters, rounded to nearest even" in found.notes
    value["params"]["b"]["weight"][2, 1] = 5
    torch.save(value, tmp_path / "p.pt")
    found = ucpl.verify(tmp_path / "p.pt")
    (finding,) = found.findings
    assert finding.code == "E701"
    assert finding.message.startswith("weight of b[2, 1]: the weight is not its master, rounded, 5.0 ")
    assert [label.where for label in finding.labels] == ["params/b/weight[2, 1]", "params/b/fp32[2, 1]"]
    assert not any("rounded to nearest even" in note for note in found.notes)


def test_a_weight_may_not_be_rounded_another_way(tmp_path: Path) -> None:
    """1 + 2^-8 lies half way between two bf16.

    It goes to the even one, 1, and not up.
    """
    half = torch.full((3, 2), 1 + 2.0**-8)
    for weight, good in ((half.bfloat16(), True), (torch.full((3, 2), 1 + 2.0**-7).bfloat16(), False)):
        torch.save({"params": {"a": {"weight": weight, "fp32": half}}}, tmp_path / "p.pt")
        assert bool(ucpl.verify(tmp_path / "p.pt")) is good


def test_steps_are_reported_by_group_and_where_they_differ(tmp_path: Path) -> None:
    plain(tmp_path, b=4)
    notes = ucpl.verify(tmp_path / "p.pt").notes
    assert "step differs within group 0: 3, 4" in notes and "step is 3 for the one parameter of group 1" in notes
    plain(tmp_path)
    assert "step is 3 for all 2 parameters of group 0" in ucpl.verify(tmp_path / "p.pt").notes


def test_what_is_not_there_is_reported_to_be_not_there(tmp_path: Path) -> None:
    torch.save({"params": {"a": {"weight": torch.ones(2)}}}, tmp_path / "p.pt")
    found = ucpl.verify(tmp_path / "p.pt")
    assert found and found.copied == found.rounded == 0
    assert "no copies are kept: nothing to hold against each other" in found.notes
    assert not any(note.startswith("witnessed by") for note in found.notes)


def test_the_order_that_a_checkpoint_states_is_a_witness() -> None:
    assert any(note.startswith("witnessed by stated order: ") for note in ucpl.verify(EXAMPLE).notes)


def test_bytes_that_nothing_protects_are_counted_once_and_by_kind() -> None:
    """Without a manifest, a CRC speaks for members of an archive.

    Headers and the directory are bare.
    """
    found = ucpl.verify(EXAMPLE).files
    sizes = sum(f.stat().st_size for f in api.open_checkpoint(EXAMPLE).root.rglob("*") if f.is_file())
    assert not found.manifest
    assert found.bytes_unprotected == sum(found.unprotected.values()) > 0
    assert found.bytes_protected + found.bytes_unprotected <= sizes


def test_files_that_cannot_be_read_are_findings_and_no_error(tmp_path: Path) -> None:
    path, layout = folder(tmp_path)
    opened = api.open_checkpoint(path, layout)
    placement = api.source_side(opened, layout)[0].placement
    data = (path / "1.pt").read_bytes()
    (path / "1.pt").write_bytes(data[: len(data) // 2])
    found = verdict(opened, placement)
    assert not found and {d.code for d in found.findings} >= {"E611", "E633"}
