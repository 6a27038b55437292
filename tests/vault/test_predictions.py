"""The predictions of `ucpl vault plan` are true.

They are the place of each tensor, and the tensors that are lost with domains.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

import ucpl
from tests.vault.states import JOB, Truth, call, memory
from ucpl.cli import main
from ucpl.storage.vaults.domains import LocalDomain
from ucpl.storage.vaults.memory import DomainData
from ucpl.storage.vaults.protection import Protection
from ucpl.storage.vaults.snapshot_folder import open_generation
from ucpl.vault import Vault
from ucpl.vault.planning import VaultPlan, plan_vault
from ucpl.vault.rank_schemes import rank_schemes
from ucpl.vault.server import Server
from ucpl.vault.survival import Survival

MIB = 1 << 20
# Of each rank, in turn: bytes of two tensors. One has next to nothing, one many chunks, one ends just behind a chunk.
FIRST = (MIB + 17, 40, 700_000, 2 * MIB, 3, 300_000, MIB - 1, 5000)
SECOND = (5, 3, MIB, 60_000, 1, 2 * MIB + 1, 9, 70_000)
LEAST = {"none": 1, "mirror": 2, "mirror(2)": 3, "raim5": 2, "raim5(4)": 4, "rs(2, 2)": 4, "rs(3, 2)": 5, "rs(6, 2)": 8}


def uneven(top: Path, ranks: int) -> str:
    """A layout whose ranks hold unlike amounts, in files of either form."""
    first, second = FIRST[:ranks], SECOND[:ranks]
    file = top / "uneven.ucpl"
    file.write_text(
        f"ucpl 1\nmodel m {{\n  dim a = {sum(first)}, b = {sum(second)}\n  w : a dtype u8\n  v : b dtype u8\n}}\n"
        f'layout job() of m {{\n  framework torch()\n  mesh dp\n  let dp = {ranks}\n  domain node = "{{dp}}"\n'
        '  file weights = memory "w_{dp}"\n  file more = torch "more/{dp}.pt"\n'
        f'  w = a@dp[{", ".join(map(str, first))}]  as "block/w"\n'
        f'  v = b@dp[{", ".join(map(str, second))}] in more as "v"\n}}\n'
    )
    return f"{file}:job()"


def values(plan: VaultPlan) -> list[dict[str, torch.Tensor]]:
    """Random bytes for each tensor of each rank."""
    numbers = torch.Generator().manual_seed(7)
    return [
        {"/".join(map(str, k.tensor.key)): torch.randint(0, 256, k.tensor.shape, generator=numbers, dtype=torch.uint8)
         for k in kept}
        for kept in plan.foreseen.kept
    ]  # fmt: skip


@pytest.mark.fault(
    "Vaults",
    "each set of one and two lost domains of 4, 5 and 8, with unequal shards",
    "the bytes, or refused, as `vault plan` predicts",
)
@pytest.mark.parametrize(
    ("domains", "protect"), [(n, protect) for n in (4, 5, 8) for protect, least in LEAST.items() if n >= least]
)
def test_what_is_gone_with_any_two_domains_is_what_was_foretold(tmp_path, domains, protect):
    layout = uneven(tmp_path, domains)
    plan = plan_vault(layout, protect=protect)
    assert plan.domains == tuple((d,) for d in range(domains))
    given = values(plan)
    with ExitStack() as ends:
        vault = Vault.make(tmp_path / "job", layout=layout, protect=protect)
        assert vault.job.domains == plan.domains
        for rank in range(domains):
            writer = ends.enter_context(vault.writer(rank, layout=layout, run="one", strict=True))
            assert writer.save(1, given[rank])
        servers = [ends.enter_context(Server(vault.home, d)) for d in range(domains)]
        for server in [*servers, *servers]:
            server.turn()
    assert [(tmp_path / "job" / f"d{d}" / "p.s0").stat().st_size for d in range(domains)] == [
        r.for_others for r in plan.rooms
    ]
    whole = {1: 0, 2: 0}
    for count in (1, 2):
        for lost in combinations(range(domains), count):
            found = lacking(vault.home, plan, given, frozenset(lost))
            assert found == plan.lacking(lost), lost
            assert plan.guarded.loses(lost) == bool(plan.guarded.gone(lost))
            whole[count] += not found
    # Bytes of files outside tensors may be the only loss: they count in the proof too.
    for one in plan.scheme.survived:
        assert one.whole <= whole[one.lost] and one.is_counted
        assert (one.example is None) == (one.whole == one.of)
        if one.example is not None:
            assert plan.guarded.gone(one.example)


def lacking(home: Path, plan: VaultPlan, given: list[dict[str, torch.Tensor]], lost: frozenset[int]) -> set:
    """Tensors that cannot be read without some domains.

    The others are compared with the saved values.
    """
    found = set()
    made = open_generation(home)
    made.lost = lost
    try:
        for rank, kept in enumerate(plan.foreseen.kept):
            for one in kept:
                key = "/".join(map(str, one.tensor.key))
                room = bytearray(one.size)
                try:
                    made.fill(rank, memoryview(room), one.at)
                except ucpl.UcplError as error:
                    assert error.diagnostics[0].code == "E691"
                    found.add((rank, one.tensor.file, key))
                else:
                    assert bytes(room) == given[rank][key].numpy().tobytes(), (rank, key)
    finally:
        made.close()
    return found


@pytest.mark.parametrize("degrees", ["dp=2, tp=2", "dp=3, pp=2", "dp=1, tp=3", "dp=4"])
def test_tensors_are_at_the_predicted_places(tmp_path, degrees):
    """Files that several ranks have are distributed as predicted."""
    truth = Truth(tmp_path / "truth", degrees, (1,))
    plan = plan_vault(truth.layout, 1, "none")
    with memory(tmp_path / "job", truth, domains=1, protect="none") as here:
        assert all(here.save(truth, 1))
        for rank, kept in enumerate(plan.foreseen.kept):
            shard = here.vault.domain(0).shard_in(rank, 0)
            assert shard is not None and shard[0].size == plan.foreseen.sizes[rank]
            data = LocalDomain(here.vault.home, 0).arena(rank, 0).read_bytes()
            for one in kept:
                value = truth.cut[1][rank]["/".join(map(str, one.tensor.key))]
                assert data[one.at : one.at + one.size] == value.contiguous().view(torch.uint8).numpy().tobytes()
    saved = sum(k.size for kept in plan.foreseen.kept for k in kept)
    held = sum(t.numel() * t.element_size() for some in truth.cut[1] for t in some.values())
    assert held == saved + plan.foreseen.spared
    assert (plan.foreseen.spared > 0) == (truth.layout.count("dp=1") == 0 and "dp" in degrees)


def test_the_first_elements_that_are_gone_are_named(tmp_path):
    plan = plan_vault(call("dp=2, tp=2"), 4, "raim5")
    loss = plan.loss((1, 3))
    assert loss.domains == (1, 3) and loss.bytes == sum(plan.foreseen.sizes[r] for r in (1, 3))
    # the first tensor of rank 1: the second half
    assert loss.first == "weight of embed[v=31, h=0] to embed[v=60, h=23]"
    assert loss.tensors[0] == "embed in weights_0_1.pt" and len(set(loss.tensors)) == len(loss.tensors)
    assert plan.loss((2,)).tensors == () and plan.loss((2,)).bytes == 0


def test_the_least_memory_that_survives_what_is_asked_comes_first():
    even = [DomainData.of((d,), (1 << 20,)) for d in range(8)]
    assert [str(rank_schemes(even[:n], 1, 2)[0].protection) for n in (1, 2, 3, 8)] == [
        "none",
        "mirror(1)",
        "raim5",
        "raim5",
    ]
    assert [str(rank_schemes(even[:n], 2, 2)[0].protection) for n in (3, 4, 8)] == ["mirror(2)", "rs(2, 2)", "rs(6, 2)"]
    first, *others = rank_schemes(even, 1, 2)
    assert first.for_others < min(s.for_others for s in others if s.safe >= 1)
    assert all(a.safe >= 1 or b.safe < 1 for a, b in pairwise(others))
    assert str(rank_schemes(even, 1, 2, "mirror(2)")[0].protection) == "mirror(2)"


def test_sets_that_are_too_large_to_count_are_reported():
    many = tuple(DomainData.of((d,), (4096 * 30,)) for d in range(1200))
    three = Survival(Protection.parse("rs(30, 2)"), many[:32]).survived(3)
    assert three.whole == 0 and three.of == 4960 and three.is_counted
    less = tuple(DomainData.of((d,), (4096,)) for d in range(32))  # of 30 blocks one has something in it
    three = Survival(Protection.parse("rs(30, 2)"), less).survived(3)
    assert three.whole == 4960 - 32 and three.example == (0, 1, 2)
    pairs = Survival(Protection.parse("raim5(4)"), many).survived(2)
    assert pairs.of - pairs.whole == 300 * 6 and pairs.is_counted
    whole = Survival(Protection.parse("raim5"), many).survived(2)
    assert (whole.whole, whole.is_counted, whole.example) == (0, False, (0, 1))


def told(capsys, *words: object) -> tuple[int, dict]:
    capsys.readouterr()
    status = main(["vault", "plan", *map(str, words), "--json"])
    out = capsys.readouterr().out
    return status, json.loads(out) if out else {}


def test_the_verb_ends_with_no_where_what_is_asked_is_not_survived(tmp_path, capsys):
    layout = call("dp=4, tp=2")
    assert told(capsys, layout, "--domains", 4)[0] == 0
    status, found = told(capsys, layout, "--domains", 4, "--lose", 2)
    assert (status, found["protect"]) == (0, "rs(2, 2)")
    status, found = told(capsys, layout, "--domains", 4, "--lose", 2, "--protect", "raim5")
    assert (status, found["protect"], found["losses"][0]["domains"]) == (1, "raim5", [0, 1])
    assert found["losses"][0]["first"].startswith("weight of embed[v=0, h=0]")
    assert told(capsys, layout, "--domains", "0,1,2,3/4,5,6,7", "--lose", 1)[1]["protect"] == "mirror(1)"
    assert told(capsys, layout, "--domains", 4, "--room", "100M")[0] == 0
    assert main(["vault", "plan", layout, "--domains", "4", "--room", "1K"]) == 4
    assert "E696" in capsys.readouterr().err
    assert told(capsys, layout)[0] == 2  # nothing says the domains


def test_protections_that_do_not_fit_are_rejected_and_unsurvivable_losses_are_reported(capsys):
    layout = call("dp=3")
    for lose, more in (("4", ["--domains", "3"]), ("2", ["--domains", "1", "--protect", "none"])):
        count = more[1]
        assert main(["vault", "plan", layout, "--lose", lose, *more]) == 2
        printed = capsys.readouterr().err
        assert (
            f"E690]: {lose} of {count} domains cannot be lost" in printed and f"write --lose {count} or less" in printed
        )
    assert main(["vault", "plan", layout, "--lose", "3", "--domains", "3"]) == 1
    assert ": no protection brings all back, whichever 3 of 3 domains are lost; " in capsys.readouterr().out
    assert main(["vault", "plan", layout, "--domains", "1"]) == 0
    capsys.readouterr()
    assert main(["vault", "plan", layout, "--domains", "0/1,3"]) == 2
    assert (
        f"each rank of {layout}, which has 3, must be in one domain: rank 2 is in none, rank 3 does not exist\n"
        in capsys.readouterr().err
    )


def test_the_ranks_of_domains_are_taken_from_the_layout(tmp_path, capsys):
    text = JOB.read_text().replace("ucpl 2\n", "ucpl 1\n").replace(" for all =", " of all =")
    text = text.replace("  mesh pp dp tp\n", '  mesh pp dp tp\n  domain node = "{pp}.{dp - dp % 2}"\n')
    file = tmp_path / "job.ucpl"
    file.write_text(text)
    layout = f"{file}:job(dp=4, pp=2)"
    status, found = told(capsys, layout)
    assert status == 0 and [d["ranks"] for d in found["domains"]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    main(["vault", "plan", layout])
    assert f"ucpl vault serve ROOT/JOB --layout '{layout}' --protect 'raim5' --domain 0" in capsys.readouterr().out


def test_a_framework_s_own_layout_is_reckoned_by_its_tensors(tmp_path, capsys):
    """ZeRO-1: the first rank of each saves weights, all the optimizer.

    Each stored tensor is counted once.
    """
    file = tmp_path / "m.ucpl"
    file.write_text(
        "ucpl 1\nmodel m {\n  dim h = 64, k = 32\n  w : h k dtype bf16\n  state fp32, exp_avg, exp_avg_sq : f32\n}\n"
    )
    status, found = told(capsys, "zero1(dp=4)", "--model", f"{file}:m", "--domains", 4)
    assert status == 0 and not found["exact"] and found["protect"] == "raim5"
    least = 64 * 32 * (2 + 3 * 4)
    assert least <= found["saved"] <= least * 1.2
    assert [d["ranks"] for d in found["domains"]] == [[0], [1], [2], [3]]


def test_the_manual_shows_what_is_foretold(capsys, monkeypatch):
    """Its example, number for number."""
    root = Path(__file__).parents[2]
    shown = (root / "docs/VAULT.md").read_text().split("```text\nlayout ")[1].split("```")[0].splitlines()
    monkeypatch.chdir(root / "examples/ranks")
    assert main(["vault", "plan", "job.ucpl:job(dp=4, tp=2)", "--domains", "4"]) == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    wanted = ["layout " + shown[0], *shown[1:]]
    assert len(wanted) > 10
    for line in wanted:
        assert line == "..." or line.strip() in printed, line
