"""Plans from a vault with a lost part.

The graph has the rebuilt parts, and the run reports the rebuilt bytes.
"""

from __future__ import annotations

import json
import shutil

import pytest

import ucpl
from tests.cli.command import good
from tests.vault.states import Truth, call, memory
from ucpl.conversion.lost_bytes import losses_of
from ucpl.conversion.opening import open_checkpoint
from ucpl.conversion.requests import called
from ucpl.planning.nets import net_from, net_json
from ucpl.planning.plan import Plan
from ucpl.runtime.resume import digest_of_plan
from ucpl.storage.resolve_url import resolve_source
from ucpl.storage.vaults.snapshot_folder import SnapshotFile, open_generation
from ucpl.tables.operations import Extract, Read, Reconstruct

DEGREES, GOAL = "dp=2, tp=2", "dp=3, pp=2"


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return Truth(tmp_path_factory.mktemp("truth"), DEGREES, (1,))


def rebuilt(plan: Plan) -> list[Reconstruct]:
    return [node for node in plan.nodes if isinstance(node, Reconstruct)]


@pytest.mark.parametrize(
    ("protect", "lost", "others", "times"),
    [
        ("raim5", {2}, (0, 1, 3), 3),
        ("mirror", {1}, (0,), 1),
        ("rs(2, 2)", {0, 3}, (1, 2), 2),
        ("raim5(2)", {0, 3}, (1, 2), 1),
    ],
)
def test_the_graph_says_what_is_made_of_what(tmp_path, truth, protect, lost, others, times):
    with memory(tmp_path / "job", truth, domains=4, protect=protect) as here:
        here.save(truth, 1)
        here.turn()
        whole = ucpl.plan(here.url, call(GOAL))
        assert not rebuilt(whole)
        for number in lost:
            shutil.move(here.vault.home / f"d{number}", tmp_path / f"away{number}")
        plan = ucpl.plan(here.url, call(GOAL))
        found = rebuilt(plan)
        assert found and {d for node in found for d in node.lost} == lost
        assert {node.scheme for node in found} == {protect.replace("mirror", "mirror(1)")}
        assert {node.times for node in found} == {times}
        assert tuple(sorted({d for node in found for d in node.others})) == others
        # Each is between a read and its consumer; the rest of the graph is unchanged.
        for node in found:
            (read,) = plan.net.predecessors(node)
            assert isinstance(read, Read) and (read.label, read.state) == (node.label, node.state)
            after = list(plan.net.successors(node))
            assert after and all(isinstance(one, Extract) for one in after)
            assert not [one for one in plan.net.successors(read) if isinstance(one, Extract)]
        assert digest_of_plan(plan) == digest_of_plan(whole)
        texts = [str(node) for node in plan.nodes if not isinstance(node, Reconstruct)]
        assert texts == [str(node) for node in whole.nodes]
        # It is kept with the plan, and holds for the files as they are when it runs.
        told, columns = net_json(plan.net, plan.nodes, plan.spaces)
        net, spaces = net_from(json.loads(json.dumps(told)), columns)
        assert [str(node) for node in net] == [str(node) for node in plan.nodes] and spaces == plan.spaces
        done = ucpl.convert(here.url, tmp_path / "out", call(GOAL)).report
        assert done.bytes_rebuilt >= sum(node.size for node in found) > 0
        for number in lost:
            shutil.move(tmp_path / f"away{number}", here.vault.home / f"d{number}")
        again = ucpl.convert(here.url, tmp_path / "again", call(GOAL)).report
        assert again.bytes_rebuilt == 0
        for path in sorted((tmp_path / "again").glob("*.pt")):
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_rebuilt_bytes_are_the_saved_ones(tmp_path, truth):
    """One rank saves each file, except for replicated weights.

    The expected bytes come from the names of the files.
    """
    with memory(tmp_path / "job", truth, domains=4, protect="raim5") as here:
        here.save(truth, 1)
        here.turn()
        shutil.rmtree(here.vault.home / "d1")
        plan = ucpl.plan(here.url, call(GOAL))
        memory_ = open_generation(here.vault.home)
        shard = memory_.commit.shards[1]
        memory_.close()
        alone = {f.name for f in shard.files} - {f.name for s in memory_.commit.shards if s.rank != 1 for f in s.files}
        assert alone
        counted = sum(t.numel * 4 for t in plan.sources if t.file in alone)
        states = {node.state: node.size for node in rebuilt(plan) if node.state != "weight"}
        assert sum(states.values()) == counted and set(states) == {"fp32", "exp_avg", "exp_avg_sq"}
        weights = sum(node.size for node in rebuilt(plan) if node.state == "weight")
        both = sum(t.numel * 2 for t in plan.sources if t.file in {f.name for f in shard.files} - alone)
        assert 0 < weights < both  # of these the other rank saved a part


def test_of_a_tensor_those_bytes_count_that_are_lost(tmp_path, truth, monkeypatch):
    with memory(tmp_path / "job", truth, domains=4, protect="raim5") as here:
        here.save(truth, 1)
        here.turn()
        opened = open_checkpoint(resolve_source(here.url), called(truth.layout))
    place, extent = next((p, e) for p, e in opened.extents.items() if e.dtype == "f32")
    low, high = extent.storage_start, extent.storage_start + extent.storage_bytes
    spans = [(low - 70, low + 10, 0), (low + 20, low + 50, 0), (high - 6, high + 100, 2), (high, high + 9, 3)]
    monkeypatch.setattr(SnapshotFile, "lost", property(lambda stored: spans if stored.name == extent.file else []))
    losses = losses_of(opened)
    assert losses is not None and losses.bytes_of[place] == {0: 40, 2: 6}


def test_rebuilt_bytes_are_reported_for_a_target_in_a_store(tmp_path, truth):
    with memory(tmp_path / "job", truth, domains=4, protect="raim5") as here:
        here.save(truth, 1)
        here.turn()
        shutil.rmtree(here.vault.home / "d2")
        done = ucpl.convert(here.url, f"memory://{tmp_path.name}/out", call(GOAL)).report
        assert done.bytes_rebuilt == ucpl.convert(here.url, tmp_path / "out", call(GOAL)).report.bytes_rebuilt > 0


def test_verbs_say_it(tmp_path, truth):
    with memory(tmp_path / "job", truth, domains=4, protect="raim5") as here:
        here.save(truth, 1)
        here.turn()
        shutil.rmtree(here.vault.home / "d2")

        def told(*words: str) -> str:
            return good(*words).out

        text = "bytes that d2 lost, from d0, d1, d3, by raim5"
        kept = str(tmp_path / "kept.plan")
        assert f"{text}: 3 are read for each" in told("plan", "--from", here.url, "--to", call(GOAL), "-o", kept)
        shown = told("show", kept)
        assert f"reconstruct fp32 of group all: 23,616 {text}  <-  " in shown
        out = told("apply", kept, here.url, str(tmp_path / "out"))
        assert "rebuilt " in out and "bytes, from other domains" in out
        answer = json.loads(told("--json", "convert", here.url, str(tmp_path / "b"), "--to", call(GOAL)))
        assert answer["report"]["bytes_rebuilt"] > 0 and text in answer["plan"]["rebuilds"][0]
        told("show", kept, "--svg", str(tmp_path / "p.svg"))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: [*one[:3], 0, *one[4:]],  # no bytes
        lambda one: [*one[:4], [], *one[5:]],  # of no domain
        lambda one: [*one[:5], one[4], *one[6:]],  # made of itself
        lambda one: [*one[:7], 0, one[8]],  # of nothing
        lambda one: [*one[:8], []],  # no read uses it
        lambda one: one[:4],
    ],
)
def test_a_plan_that_makes_something_otherwise_is_refused(tmp_path, truth, change):
    with memory(tmp_path / "job", truth, domains=4, protect="raim5") as here:
        here.save(truth, 1)
        here.turn()
        shutil.rmtree(here.vault.home / "d2")
        plan = ucpl.plan(here.url, call(GOAL))
    told, columns = net_json(plan.net, plan.nodes, plan.spaces)
    raw = json.loads(json.dumps(told))
    at = next(i for i, one in enumerate(raw["nodes"]) if one[0] == "reconstruct")
    net_from(raw, columns)
    raw["nodes"][at] = change(raw["nodes"][at])
    with pytest.raises((ValueError, TypeError, KeyError)):
        net_from(raw, columns)
