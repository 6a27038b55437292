"""Data that ranks exchange if a job's tensors change their layout.

Every element is right, and no byte is sent without need. One process plans for each rank here, between dicts of
tensors; tests/interop/test_reshard.py runs real gloo jobs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ucpl.conversion.planning import Asked, described
from ucpl.conversion.requests import Given, library_of
from ucpl.conversion.share import share_of
from ucpl.errors import UcplError
from ucpl.extents import key_text
from ucpl.layout import Layout
from ucpl.placement import locate
from ucpl.planning.nets import net_json
from ucpl.ranks.exchange import dtype_of, put, seen, windows_of
from ucpl.ranks.rank_graph import Message, MessagePart, RankGraph, parse_request, rank_graph, request
from ucpl.ranks.remote_boxes import Name, Piece, RemoteBox, Transfer, pieces_of
from ucpl.ranks.reshard import _device, _given, _names, _Work, reshard
from ucpl.tables.operations import net_text

JOB = Path(__file__).parents[2] / "examples/ranks/job.ucpl"
SIZES = {"bf16": 2, "f32": 4}
CASES = [  # from, to: dp, tp, pp
    ((2, 1, 1), (3, 1, 1)), ((2, 2, 1), (1, 1, 2)), ((2, 2, 1), (1, 4, 1)), ((1, 3, 2), (2, 1, 2)), ((3, 2, 1), (2, 2, 1)),
    ((2, 1, 3), (2, 3, 1)),
]  # fmt: skip


def call(degrees) -> str:
    return f"{JOB}:job(dp={degrees[0]}, tp={degrees[1]}, pp={degrees[2]})"


@cache
def both(here, there) -> tuple[Layout, Layout]:
    source, target, _ = described(Asked(call(here), call(there)), Given())
    return source.layout, target.layout


@cache
def numbered(layout: Layout, rank: int):
    """The tensors of a rank with unique numbers as elements.

    A number encodes tensor, state and element; 0 is padding.
    """
    found: dict[Name, torch.Tensor] = {}
    if rank >= layout.ranks:
        return found
    placement = locate(layout, rank=rank)
    first = {t: 1 + i for i, t in enumerate(layout.tensors)}
    for part in placement.parts:
        homes = [torch.zeros(int(np.prod(h.shape)), dtype=torch.int32) for h in part.homes]
        state = ["weight", "fp32", "exp_avg", "exp_avg_sq"].index(part.state)
        pieces = part.pieces
        for i in range(len(pieces)):
            path = placement.tensors[int(pieces.tensor[i])]
            counts = layout.tensors[path].counts
            low, high = (a[i][: len(counts)] for a in (pieces.low, pieces.high))
            whole = torch.arange(int(np.prod(counts)), dtype=torch.int32).view(counts) * 64 + first[path] * 4 + state
            box = whole[tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))]
            there = homes[int(pieces.home[i])].as_strided(
                box.shape, pieces.stride[i][: len(counts)].tolist(), int(pieces.offset[i])
            )
            there.copy_(box)
        for home, values in zip(part.homes, homes, strict=True):
            found[home.file, home.key] = values
    return found


def held_by(layout: Layout):
    held: dict = {}
    for rank in range(layout.ranks):
        for name in numbered(layout, rank):
            held.setdefault(name, []).append(rank)
    return held


@cache
def wanted(here, there, rank):
    source, _ = both(here, there)
    return pieces_of(share_of(Asked(call(here), call(there)), Given(), rank).plan, held_by(source), rank)


@pytest.mark.parametrize(("here", "there"), CASES, ids=str)
def test_every_rank_gets_what_its_layout_holds(here, there):
    source, target = both(here, there)
    state = [numbered(source, rank) for rank in range(source.ranks)]
    for rank in range(target.ranks):
        goal = numbered(target, rank)
        made = {name: torch.zeros_like(values) for name, values in goal.items()}
        for piece in wanted(here, there, rank):
            values = seen(state[piece.peer][piece.source.name], piece.source)
            seen(made[piece.target.name], piece.target).copy_(values)
        for name, values in goal.items():
            assert torch.equal(made[name], values), (rank, name)


@pytest.mark.parametrize(("here", "there"), CASES, ids=str)
def test_nothing_is_sent_that_is_in_place_and_nothing_twice(here, there):
    source, target = both(here, there)
    for rank in range(target.ranks):
        mine = {n for values in numbered(source, rank).values() for n in values.tolist()}
        goal = numbered(target, rank)
        lacks = sorted(n for values in goal.values() for n in values.tolist() if n and n not in mine)
        state = [numbered(source, peer) for peer in range(source.ranks)]
        got = [
            seen(state[p.peer][p.source.name], p.source).reshape(-1).tolist()
            for p in wanted(here, there, rank)
            if p.peer != rank
        ]
        assert sorted(n for some in got for n in some) == lacks


def test_who_has_copies_is_asked_in_turn():
    here, there = (4, 1, 1), (1, 4, 1)  # dp 4 holds every weight four times; each has a quarter of the states
    givers = {p.peer for rank in range(4) for p in wanted(here, there, rank) if p.source.dtype == "bf16"}
    assert givers == {0, 1, 2, 3}
    assert all(p.peer == rank for rank in range(4) for p in wanted(here, there, rank) if p.source.dtype == "bf16")


def box_of(shape: list[int], offset: int) -> RemoteBox:
    """A box that is a run."""
    stride = np.cumprod([1, *shape[:0:-1]])[::-1].tolist()[: len(shape)]
    return RemoteBox(("f", ("k",)), "f32", tuple(shape), offset, tuple(stride))


boxes = st.builds(box_of, st.lists(st.integers(2, 7), max_size=3), st.integers(0, 50))
WAY = Transfer("all", "weight", "weight")


@settings(max_examples=60)
@given(st.lists(boxes, max_size=8), st.integers(4, 200))
def test_messages_are_bounded_and_have_every_element_once_in_its_order(some, most):
    graph = rank_graph([], {1: [Piece(1, box, box, WAY) for box in some]}, 0)
    flat, said = torch.arange(2000), list[int]()
    for window in windows_of(graph.given().get(1, []), most):
        assert window.parts and window.elements * 4 == window.size <= max(most, 4)
        assert window.begin == len(said)
        for part in window.parts:
            assert part.begin == len(said) and 1 not in part.box.shape
            said += seen(flat, part.box).reshape(-1).tolist()
        assert len(said) == window.begin + window.elements
    assert said == [n for box in some for n in seen(flat, box).reshape(-1).tolist()]


def test_a_box_is_split_along_its_first_dims_and_keeps_its_place_in_the_message():
    source = RemoteBox(("s", ("k",)), "f32", (6, 5), 3, (10, 1))
    a, message = torch.arange(100), torch.zeros(40, dtype=torch.int64)
    for part in MessagePart(Message(1, "f32", 40), 7, source).split(4):
        assert part.box.elements <= 4
        message[part.begin : part.begin + part.box.elements] = seen(a, part.box).reshape(-1)
    assert torch.equal(message[7:37].view(6, 5), seen(a, source))


@cache
def job(here, there) -> list[RankGraph]:
    """The graphs of all ranks."""
    source, target = both(here, there)
    every = [
        wanted(here, there, rank) if rank < target.ranks else [] for rank in range(max(source.ranks, target.ranks))
    ]
    said = [[[p for p in pieces if p.peer == peer] for peer in range(len(every))] for pieces in every]
    asked = [
        {
            peer: parse_request(request(said[peer][rank]), peer)
            for peer in range(len(every))
            if peer != rank and said[peer][rank]
        }
        for rank in range(len(every))
    ]
    return [rank_graph(every[rank], asked[rank], rank) for rank in range(len(every))]


@pytest.mark.parametrize("most", [1 << 20, 100])
@pytest.mark.parametrize(("here", "there"), CASES, ids=str)
def test_what_the_graphs_of_all_ranks_do_is_what_their_layouts_hold(here, there, most):
    source, target = both(here, there)
    state = [numbered(source, rank) for rank in range(source.ranks)]
    made = [{n: torch.zeros_like(v) for n, v in numbered(target, rank).items()} for rank in range(target.ranks)]
    graphs = job(here, there)
    sent = {
        (rank, peer): [
            torch.cat([seen(state[rank][part.box.name], part.box).reshape(-1) for part in window.parts])
            for window in windows_of(parts, most)
        ]
        for rank, graph in enumerate(graphs)
        for peer, parts in graph.given().items()
    }
    for rank, graph in enumerate(graphs):
        for mine, goal, _ in graph.kept():
            seen(made[rank][goal.name], goal).copy_(seen(state[rank][mine.name], mine))
        for peer, parts in graph.taken().items():
            for window, values in zip(windows_of(parts, most), sent.pop((peer, rank)), strict=True):
                for part in window.parts:
                    there_ = seen(made[rank][part.box.name], part.box)
                    begin = part.begin - window.begin
                    there_.copy_(values[begin : begin + part.box.elements].view(part.box.shape))
    assert not sent
    for rank, found in enumerate(made):
        for name, values in numbered(target, rank).items():
            assert torch.equal(found[name], values), (rank, name)


def test_send_and_receive_are_nodes_of_one_graph_and_of_no_plan():
    here, there = (2, 1, 1), (3, 1, 1)
    graph = job(here, there)[1]
    said = net_text(graph.net).splitlines()
    assert any("receive" in line and "from rank 0" in line for line in said)
    assert any("send" in line and "to rank 2" in line for line in said)
    for number, line in enumerate(said):
        assert int(line.split()[0]) == number
        assert all(int(n) < number for part in line.partition("  <-  ")[2].split(", ") if part for n in part.split("-"))
    with pytest.raises(ValueError, match="is in no plan"):
        net_json(graph.net, list(graph.net), graph.spaces)


def test_requested_tensors_arrive_as_requested():
    pieces = [p for p in wanted((2, 2, 1), (1, 4, 1), 3) if p.peer != 3]
    there = parse_request(request(pieces), 3)
    assert [(p.source, p.way.label, p.way.state) for p in there] == [
        (p.source, p.way.label, p.way.state) for p in pieces
    ]
    assert {p.peer for p in there} == {3}
    assert parse_request(request([]), 1) == []


def test_values_that_a_type_cannot_hold_are_refused():
    target = RemoteBox(("t", ("a",)), "bf16", (2,), 0, (1,))
    there = torch.zeros(2, dtype=torch.bfloat16)
    put(torch.tensor([1.0, float("nan")]), there, target, may_round=False)
    assert there[0] == 1
    with pytest.raises(UcplError, match="cannot hold") as caught:
        put(torch.tensor([1.0, 1.001]), there, target, may_round=False)
    assert caught.value.diagnostics[0].code == "E605"
    half = torch.zeros(2, dtype=torch.float16)
    put(torch.tensor([0.1, float("inf")]), half, target, may_round=True)
    assert half.tolist()[1] == float("inf")
    with pytest.raises(UcplError, match="infinite"):
        put(torch.tensor([0.1, 1e6]), half, target, may_round=True)


def test_what_is_given_must_be_what_the_layout_says():
    names = _names([("f", ("layer 0", "w"), (2, 3))])
    good = torch.zeros(2, 3)
    assert list(_given({"layer 0/w": good}, names, "job()")) == [("f", ("layer 0", "w"))]
    for tensors, said in (
        ({}, "it is missing"),
        ({"layer 0/w": good, "more": good}, "more of job"),
        ({"layer 0/w": good.T}, r"is \[3, 2\], the layout says \[2, 3\]"),
    ):
        with pytest.raises(UcplError, match=said) as caught:
            _given(tensors, names, "job()")
        assert caught.value.diagnostics[0].code == "E640"
    with pytest.raises(UcplError, match="two tensors of a rank have the key"):
        _names([("f", ("w",), (2,)), ("g", ("w",), (2,))])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("b = r  mean @dp", "weight of b is a mean of copies"),
        ("b = r  sum @dp", "weight of b is a sum of copies"),
        ("b = r  max @dp", "weight of b is a max of copies"),
        ("b = r  value x - 1", "weight of b is stored by another `value`"),
    ],
)
def test_what_is_made_of_several_values_is_refused(tmp_path, line, said):
    text = "ucpl 1\nmodel m {\n  dim r = 4\n  b : r dtype f32\n}\n"
    for name, how in (("one", line), ("two", "b = r")):
        text += f'layout {name}(dp) of m {{\n  mesh dp\n  file weights = torch "{{dp}}"\n  {how}  as "b"\n}}\n'
    (tmp_path / "m.ucpl").write_text(text)
    library_of(tmp_path / "m.ucpl")
    plan = share_of(Asked(f"{tmp_path}/m.ucpl:one(dp=2)", f"{tmp_path}/m.ucpl:two(dp=2)"), Given(), 0).plan
    with pytest.raises(UcplError, match=said) as caught:
        pieces_of(plan, {}, 0)
    assert caught.value.diagnostics[0].code == "E642"


def test_what_is_to_be_filled_is_refused_by_name(tmp_path):
    """On all ranks before any transfer, also on those without a share."""
    text = "ucpl 1\nmodel m {\n  dim r = 4\n  b : r dtype f32\n  c : r dtype f32\n}\n"
    text += 'layout one(dp) of m {\n  mesh dp\n  file weights = torch "{dp}"\n  b = r  as "b"\n}\n'
    text += 'layout two(dp) of m extends one(dp = dp) {\n  c = r  as "c"\n  fill c = 7\n}\n'
    (tmp_path / "m.ucpl").write_text(text)
    calls = tuple(f"{tmp_path}/m.ucpl:{name}(dp=2)" for name in ("one", "two"))
    with pytest.raises(
        UcplError, match="weight of c has 4 elements that the source lacks, to be filled with 7"
    ) as caught:
        _Work.of({"b": torch.ones(4)}, (calls[0], calls[1]), {}, (0, 2))
    assert caught.value.diagnostics[0].code == "E642"


def test_a_tensor_of_another_type_is_refused_where_it_stays_on_its_rank():
    plan = share_of(Asked(call((1, 1, 1)), call((1, 1, 1))), Given(), 0).plan
    state = {key_text(t.key): torch.ones(t.shape, dtype=dtype_of(t.dtype)) for t in plan.sources}
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        made = reshard(state, call((1, 1, 1)), call((1, 1, 1)))
        assert (made.sent, made.kept) == (0, sum(t.nbytes for t in made.values()))
        name = next(text for text, value in state.items() if value.dtype == torch.float32)
        state[name] = state[name].double()
        with pytest.raises(UcplError, match=r"is torch\.float64, the layout says f32") as caught:
            reshard(state, call((1, 1, 1)), call((1, 1, 1)))
        assert caught.value.diagnostics[0].code == "E640"
    finally:
        dist.destroy_process_group()


def test_tensors_without_owner_are_reported():
    plan = share_of(Asked(call((2, 1, 1)), call((1, 1, 1))), Given(), 0).plan
    with pytest.raises(UcplError, match="no rank holds") as caught:
        pieces_of(plan, {}, 0)
    assert caught.value.diagnostics[0].code == "E643"


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("cuda:nccl", "cuda:3"),
    ],
)
def test_messages_are_on_a_device_that_the_group_has_a_backend_for(monkeypatch, backends, device):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_backend", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert _device(None) == torch.device(device)


def test_types_have_torch_names():
    assert (dtype_of("bf16"), dtype_of("i64")) == (torch.bfloat16, torch.int64)


def test_a_group_that_is_too_small_is_refused():
    with pytest.raises(UcplError, match="has 3 ranks, the group has 2") as caught:
        _Work.of({}, (call((2, 1, 1)), call((3, 1, 1))), {}, (0, 2))
    assert caught.value.diagnostics[0].code == "E641"


def test_a_view_of_another_tensor_is_read_in_place():
    whole = torch.arange(40)
    box = RemoteBox(("s", ("a",)), "i64", (2, 3), 4, (10, 1))
    assert seen(whole[8:], box).tolist() == [[12, 13, 14], [22, 23, 24]]
    assert torch.equal(seen(whole[8:].clone(), box), seen(whole[8:], box))
