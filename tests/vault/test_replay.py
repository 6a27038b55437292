"""Reads of saved gradients: the trained bits, or an error."""

from __future__ import annotations

import copy
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import ucpl
from tests.vault.trained import REPLAYS, Net, code_of, same, training
from ucpl.cli import main
from ucpl.conversion.opening import infer, open_checkpoint
from ucpl.errors import UcplError
from ucpl.planning.nets import net_from, net_json
from ucpl.runtime.resume import digest_of_plan
from ucpl.storage.reading import is_within
from ucpl.storage.resolve_url import resolve_source
from ucpl.storage.vaults import adamw, domains
from ucpl.storage.vaults.checksummed_text import read_sealed, seal, unseal
from ucpl.storage.vaults.records import Job, Shard
from ucpl.storage.vaults.snapshot_folder import open_generation
from ucpl.tables.operations import Extract, Read, Recompute, Reconstruct
from ucpl.vault import Vault
from ucpl.vault.inspect import find_damage, inspect_vault, scrub
from ucpl.vault.persisted import persist
from ucpl.vault.planning import plan_vault
from ucpl.vault.server import Server

HOW: list[dict[str, object]] = [
    {}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"fused": True}, {"capturable": False, "eps": 1e-5},
]  # fmt: skip


@pytest.mark.fault(
    "Vaults",
    "steps replayed from gradients: every flag of AdamW, groups, ties, frozen parameters, bf16",
    "the trained bits",
)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_what_is_replayed_is_what_was_trained(tmp_path, how):
    with training(tmp_path / "job", **how) as here:
        found = []
        for _ in range(REPLAYS + 3):
            here.step()
            saved = here.save()
            found.append(saved.replays)
            here.demand_same()
        assert found == [0, 1, 2, 3, 0, 1]


def test_a_bf16_model_is_replayed(tmp_path):
    with training(tmp_path / "job") as here:
        here.model.bfloat16()
        for number in range(3):
            here.optimizer.zero_grad()
            here.model(torch.randn(6, 37, dtype=torch.bfloat16)).square().mean().backward()
            here.optimizer.step()
            assert here.save().replays == number
            persist(here.vault.home, tmp_path / f"{number}")
            state = {"model": get_model_state_dict(Net().bfloat16())}
            load(state, checkpoint_id=tmp_path / f"{number}", no_dist=True)
            assert same(state["model"], dict(get_model_state_dict(here.model)))


def test_torch_loads_what_was_persisted_of_replayed_steps(tmp_path):
    """Archives have the CRCs of replayed values for zip readers."""
    with training(tmp_path / "job") as here:
        for _ in range(3):
            here.step()
            last = here.save()
        assert last.replays == 2
        persist(here.vault.home, tmp_path / "out")
        state = {"model": get_model_state_dict(Net())}
        load(state, checkpoint_id=tmp_path / "out", no_dist=True)
        assert same(state["model"], dict(get_model_state_dict(here.model)))
        here.demand_same(tmp_path / "out")
        answer = json.loads((tmp_path / "out" / "ucpl" / "state.json").read_text())
        assert answer["ranks"]["0"] == {"at": 3}
        data = (tmp_path / "out" / "__0_0.distcp").read_bytes()
        archives = [b"PK\x03\x04" + part for part in data.split(b"PK\x03\x04")[1:]]
        assert archives  # local headers; complete archives are found by their ends
        at = count = 0
        while (end := data.find(b"PK\x05\x06", at)) >= 0:
            (tmp_path / "one.zip").write_bytes(data[at : end + 22])
            with zipfile.ZipFile(tmp_path / "one.zip") as archive:
                assert archive.testzip() is None
            at, count = end + 22, count + 1
        assert count > 15


def edited(home: Path, edit: Callable[[Shard], Shard]) -> None:
    """Edit the record of rank 0 in the newest generation."""
    vault = Vault.at(home)
    newest = vault.committed()
    assert newest is not None
    other = evolve(newest, shards=(edit(newest.shards[0]), *newest.shards[1:]))
    for number in range(len(vault.job.domains)):
        vault.domain(number).commit(newest.generation).write_bytes(other.sealed())


def demand_refused(home: Path, edit: Callable[[Shard], Shard], said: str = "") -> None:
    """Check that an edited record is rejected at the read."""
    with training(home) as here:
        for _ in range(2):
            here.step()
            here.save()
        edited(home, edit)
        with pytest.raises(UcplError) as refused:
            here.demand_same()
        assert code_of(refused) == "E698" and said in str(refused.value)


WRONG: list[dict[str, object]] = [
    {}, {"groups": []}, {"groups": [{"lr": "fast"}] * 2}, {"groups": [{"betas": 3}] * 2}, {"units": {}}, {"optimizer": "SGD"},
    {"by": {}}, {"units": {"model.first.weight": {"group": 7}}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_invalid_record_of_a_step_is_rejected(tmp_path, wrong):
    def edit(shard: Shard) -> Shard:
        return evolve(shard, replay={**shard.replay, **wrong} if wrong else {})

    demand_refused(tmp_path / "job", edit)


@pytest.mark.parametrize("what", ["size", "name", "apart", "lacks"])
def test_a_value_that_replaces_no_saved_one_is_rejected(tmp_path, what):
    def edit(shard: Shard) -> Shard:
        (file,) = shard.files
        named = list(file.named)
        at = next(i for i, one in enumerate(named) if one.name.startswith("model.norm.running_mean"))
        changed: dict[str, dict[str, Any]] = {
            "size": {"size": named[at].size - 4},
            "name": {"name": "model.other@0"},
            "apart": {"at": file.size - 212},
        }
        if what == "lacks":
            del named[at]
        else:
            named[at] = evolve(named[at], **changed[what])
        return evolve(shard, files=(evolve(file, named=tuple(named)),))

    demand_refused(tmp_path / "job", edit)


def test_a_generation_without_those_that_it_is_made_of_is_refused(tmp_path):
    with training(tmp_path / "job") as here:
        for _ in range(3):
            here.step()
            here.save()
        here.vault.domain(0).commit(2).unlink()
        with pytest.raises(UcplError) as refused:
            open_generation(here.vault.home)
        assert code_of(refused) == "E692"


def test_a_vault_is_asked_for_as_it_was_made(tmp_path):
    Vault.make(tmp_path / "job", ranks=1, replays=2)
    with pytest.raises(UcplError) as refused:
        Vault.make(tmp_path / "job", ranks=1)
    assert code_of(refused) == "E694" and "2 steps replayed" in refused.value.diagnostics[0].message
    for wrong in (-1, 65):
        with pytest.raises(UcplError) as refused:
            Vault.make(tmp_path / "other", ranks=1, replays=wrong)
        assert code_of(refused) == "E690"
    told = Vault.at(tmp_path / "job").job
    assert told.replays == 2 and told.slots == 4 and Job.of(told.sealed()) == told
    assert b'"form": 1' in Vault.make(tmp_path / "plain", ranks=1).job.sealed().replace(b'"form":1', b'"form": 1')


def test_a_lost_domain_is_rebuilt_and_replayed(tmp_path):
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        for _ in range(3):
            here.step()
            assert here.save()
        whole = ucpl.plan(f"vault:{here.vault.home}", "dcp(fsdp=3)")
        shutil.move(here.vault.home / "d0", tmp_path / "away")
        here.demand_same()
        plan = ucpl.plan(f"vault:{here.vault.home}", "dcp(fsdp=3)")
        made = [node for node in plan.nodes if isinstance(node, Recompute)]
        assert made and {node.steps for node in made} == {2}
        assert sum(node.size for node in made if node.state == "weight") == sum(
            p.numel() * 4 for _, p in here.model.named_parameters(remove_duplicate=False) if p.requires_grad
        )
        both = [n for n in made if any(isinstance(p, Reconstruct) for p in plan.net.predecessors(n))]
        assert both
        for node in made:
            (before,) = plan.net.predecessors(node)
            assert isinstance(before, Read | Reconstruct) and (before.label, before.state) == (node.label, node.state)
            after = list(plan.net.successors(node))
            assert after and all(isinstance(one, Extract) for one in after)
        assert digest_of_plan(plan) == digest_of_plan(whole)
        told, columns = net_json(plan.net, plan.nodes, plan.spaces)
        net, _ = net_from(json.loads(json.dumps(told)), columns)
        assert [str(node) for node in net] == [str(node) for node in plan.nodes]
        ucpl.convert(f"vault:{here.vault.home}", tmp_path / "out", "dcp(fsdp=3)")
        here.demand_same(tmp_path / "out")


def test_what_a_domain_lost_of_all_that_counts_is_made_anew(tmp_path):
    """The complete generation and each step's gradients are rebuilt."""
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        for _ in range(3):
            here.step()
            here.save()
        assert [(one.number, one.replays) for one in inspect_vault(here.vault.home).generations] == [
            (3, 2),
            (2, 1),
            (1, 0),
        ]
        here.servers.pop(0).__exit__()
        shutil.rmtree(here.vault.home / "d0")
        with Server(here.vault.home, 0):
            assert find_damage(here.vault.home)[1] == []
            assert here.vault.domain(0).commits() == [3, 2, 1]
        shutil.move(here.vault.home / "d1", tmp_path / "away")
        here.demand_same()


@pytest.mark.parametrize("name", ["r0.s0", "r0.s2", "r0.s3", "p.s2", "p.s0"])
def test_a_flipped_bit_of_any_step_is_found_rebuilt_and_healed(tmp_path, name):
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        for _ in range(3):
            here.step()
            here.save()
        path = here.vault.home / "d0" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.write_bytes(data)
        here.demand_same()
        generation = {"0": 1, "2": 2, "3": 3}[name[-1]]
        (found,) = find_damage(here.vault.home)[1]
        assert found.what.endswith(f" in generation {generation}") and found.can_be_rebuilt
        assert scrub(here.vault.home) == (1, [])


def test_steps_are_made_for_what_is_read_alone_and_once(tmp_path, monkeypatch):
    """To open a checkpoint, the directories of all archives are read.

    They have CRCs, and need no replay. A small archive is read together with its directory.
    """
    made: list[tuple[Any, ...]] = []
    stepped = adamw.replay_step

    def counted(*words: Any) -> dict[str, memoryview]:
        made.append(words)
        return stepped(*words)

    monkeypatch.setattr(adamw, "replay_step", counted)
    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            here.save()
        reader = ucpl.StorageReader(f"vault:{here.vault.home}")
        assert len(made) == 4 and all(gradient.shape in ((53,), (37,)) for *_, gradient in made)
        made.clear()
        weight = torch.zeros_like(here.model.last.weight)
        load({"model": {"last.weight": weight}}, storage_reader=reader, no_dist=True)
        assert same(weight, here.model.last.weight.detach()) and len(made) == 1
        made.clear()
        here.demand_same()
        assert len(made) == len([p for p in here.model.parameters() if p.requires_grad])
        assert main(["verify", f"vault:{here.vault.home}"]) == 0
        # The verb reads every member, and holds those that were saved against their CRCs.
        made.clear()
        report = ucpl.convert(f"vault:{here.vault.home}", tmp_path / "out", "dcp(fsdp=2)").report
        assert (
            report.source_bytes_without_crc
            == sum(3 * p.nbytes for p in here.model.parameters() if p.requires_grad)
            + 4 * here.model.tied.weight.numel()
        )


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 4, False),
        (4, 8, True),
        (4, 9, False),
        (5, 7, True),
        (3, 8, False),
        (8, 9, False),
        (20, 30, True),
        (20, 20, False),
    ],
)
def test_the_parts_of_a_replayed_file_are_reported(low, high, found):
    assert is_within(low, high, [(4, 8), (20, 30)]) is found
    assert not is_within(low, high, [])


SPEC = """ucpl 1
model plain {
  dim h = 300, f = h
  weight : f h
  bias   : h
  dtype f32
  state exp_avg, exp_avg_sq : f32
}
"""


def test_what_gradients_take_is_foretold(tmp_path, capsys):
    """Tensors of a linear layer and its AdamW.

    A rank of two has half of all, and gradients are a third of that.
    """
    (tmp_path / "plain.ucpl").write_text(SPEC)
    call = ["vault", "plan", "dcp(fsdp = 2)", "--model", f"{tmp_path / 'plain.ucpl'}:plain", "--domains", "2", "--json"]
    assert main([*call]) == 0
    without = json.loads(capsys.readouterr().out)
    assert main([*call, "--replays", "4"]) == 0
    printed = json.loads(capsys.readouterr().out)
    whole = 3 * 4 * (300 * 300 + 300)
    assert (without["replays"], without["gradients"], without["saved"]) == (0, 0, whole)
    assert (printed["replays"], printed["gradients"], printed["replayed"], printed["saved"]) == (
        4,
        whole // 3,
        whole,
        whole,
    )
    for one, other in zip(printed["domains"], without["domains"], strict=True):
        held = other["memory"] // 2 // 3  # of a generation of gradients, with the copy of the other domain's
        # blocks of complete pages
        assert one["gradients"] == 4 * held or abs(one["gradients"] - 4 * held) < 4 * 4 * 4096
        assert one["memory"] == other["memory"] + one["gradients"]
    with training(tmp_path / "job") as here:
        here.model = nn.Linear(300, 300)  # type: ignore[assignment]
        here.optimizer = torch.optim.AdamW(here.model.parameters())
        for _ in range(2):
            here.optimizer.zero_grad()
            here.model(torch.randn(6, 300)).square().mean().backward()
            here.optimizer.step()
            here.save()
        newest = here.vault.committed()
        assert newest is not None
        tensors = [one for file in newest.shards[0].files for one in file.named if one.storage and len(one.shape)]
        assert sum(one.size for one in tensors) == printed["gradients"]
    with pytest.raises(UcplError) as refused:
        plan_vault(str(Path(__file__).parents[2] / "examples/ranks/job.ucpl") + ":job(dp=2)", 2, replays=1)
    assert code_of(refused) == "E690" and "dcp()" in refused.value.diagnostics[0].message


@pytest.mark.parametrize("lacks", ["replay", "base", "depth", "slot"])
def test_a_text_of_gradients_that_lacks_something_is_none(tmp_path, lacks):
    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            here.save()
        data = (here.vault.home / "d0" / "r0.s2.json").read_bytes()
        assert Shard.of(data) is not None
        told = unseal(data)
        assert told is not None
        del told[lacks]
        assert Shard.of(seal(told)) is None


def test_reports_of_a_checkpoint_are_the_same_before_the_replay(tmp_path):
    """CRCs find a weight with two names.

    Here the CRCs are markers instead of those of the bytes.
    """
    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            here.save()
        persist(here.vault.home, tmp_path / "out")
        told = [
            infer(open_checkpoint(path)).text()
            for path in (resolve_source(f"vault:{here.vault.home}"), tmp_path / "out")
        ]
        assert told[0] == told[1] and "tied.weight" in told[0]


def test_a_second_name_of_another_size_is_refused(tmp_path):
    def edit(shard: Shard) -> Shard:
        units = copy.deepcopy(dict(shard.replay["units"]))  # type: ignore[call-overload]
        units["model.first.weight"]["weights"].append("model.frozen.weight")
        return evolve(shard, replay={**shard.replay, "units": units})

    demand_refused(tmp_path / "job", edit, "names of one tensor have several sizes")


def test_hooks_of_all_optimizers_of_who_reads_are_none_of_a_steps(tmp_path):
    from torch.optim.optimizer import register_optimizer_step_post_hook

    with training(tmp_path / "job") as here:
        for _ in range(2):
            here.step()
            assert here.save()
        called: list[object] = []
        hook = register_optimizer_step_post_hook(lambda *words: called.append(words))
        try:
            persist(here.vault.home, tmp_path / "out")
        finally:
            hook.remove()
        assert called == []
        here.demand_same(tmp_path / "out")


def test_a_server_reads_no_text_twice_however_many_slots_there_are(tmp_path, monkeypatch):
    with training(tmp_path / "job", domains=3, protect="raim5") as here:
        for _ in range(4):
            here.step()
            here.save()
        read: list[object] = []

        def counted(path: Path) -> bytes | None:
            read.append(path)
            return read_sealed(path)

        monkeypatch.setattr(domains, "read_sealed", counted)
        for _ in range(3):
            for server in here.servers:
                server.turn()
        assert read == []
