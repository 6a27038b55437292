"""The graph: tensors that are stored alike are joined once.

Tensors that cannot be joined are refused with their place.
"""

from __future__ import annotations

import sys

import networkx as nx
import pytest

from tests.laws.moves import fills
from ucpl.errors import UcplError
from ucpl.graph import build, drawn
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import Placement, locate
from ucpl.planning import order
from ucpl.planning.files import plan_bytes
from ucpl.tables.operations import Check, Extract, Fill, Merge, Read, Split, Write
from ucpl.verification.proof.coverage import prove

LAYERS = """ucpl 1
model m {
  dim l = {layers}, h = 12, i = 12, v = 7
  dtype f32
  embed : v h
  w     : l h i
  b     : l h
  state exp_avg, exp_avg_sq : f32
}
layout fsdp(dp) of m {
  mesh dp
  file weights = torch "rank_{dp}.pt" key "model/{key}"
  file optim   = torch "rank_{dp}.pt" key "optim/{key}/{state}"
  embed = v@chunk(dp) h as "embed"
  w[l]  = h@chunk(dp) i as "layers.{l}.w"
  b[l]  = h@chunk(dp)   as "layers.{l}.b"
  state * = like in optim
}
layout stages(pp, tp) of m {
  mesh pp tp
  index l = l@spread(pp)
  file weights = torch "stage_{pp}_{tp}.pt" key "model/{key}"
  file optim   = torch "stage_{pp}_{tp}.pt" key "optim/{key}/{state}"
  embed = v h at pp[0]  as "embed"
  w[l]  = h@tp i        as "{l.local}.w"
  b[l]  = h             as "{l.local}.b"
  state * = like in optim
}
"""


def located(call: str, layers: int = 6) -> Placement:
    text = LAYERS.replace("{layers}", str(layers))
    return locate(resolve(load(("m.ucpl", text)), parse_call(call)))


def test_layers_and_states_that_are_stored_alike_are_joined_once() -> None:
    """Tables and plans do not grow with the number of layers."""
    sizes, rows = [], []
    for layers in (6, 60):
        graph = build(located("fsdp(dp = 4)", layers), located("fsdp(dp = 3)", layers))
        prove(graph)
        extracts = [n for n in graph.net if isinstance(n, Extract)]
        assert {tuple(lane.state for lane in n.lanes) for n in extracts} == {("weight", "exp_avg", "exp_avg_sq")}
        assert len(extracts) == 3
        rows.append([len(n.boxes) for n in extracts])
        plan = order(graph)
        assert sum(len(m) for m in plan.moves) == 3 * (layers * sum(rows[-1][1:]) + rows[-1][0])
        sizes.append(len(plan_bytes(plan)))
    assert rows[0] == rows[1]
    assert sizes[1] < 1.05 * sizes[0]


def test_stages_hold_other_runs_of_layers_on_both_sides() -> None:
    graph = build(located("stages(pp = 4, tp = 2)", 7), located("stages(pp = 3, tp = 1)", 7))
    prove(graph)
    (w,) = (f for f in graph.flows if f.kind == "copy" and f.place.label == "w")
    # Stages of 2, 2, 2, 1 layers and of 3, 2, 2: six runs, each cut in two along h.
    assert len(w.moves) == 2 * 6
    checks = [n for n in graph.net if isinstance(n, Check)]
    assert {n.label for n in checks} == {"embed", "b"}


def test_states_whose_parts_are_read_at_other_distances_are_distinct() -> None:
    """`m` of `b` is numbered before `m` of `a`, unlike `n`.

    The reason: `k` of `b` is made from `m`.
    """
    text = """ucpl 1
model t {
  dim i = 4
  dtype f32
  a : i
  b : i
  group just = b
  state m, n : f32
  state k : f32 of just
}
layout one() of t {
  file weights = torch "w"
  file optim = torch "s" key "{state}/{key}"
  a = i as "a"
  b = i as "b"
  state m, n = like in optim
  derive k from m
}
layout two(tp) of t {
  mesh tp
  file weights = torch "w{tp}"
  file optim = torch "{tp}" key "{state}/{key}"
  a = i@tp as "a"
  b = i as "b"
  state k of just = flat(each) in optim as "k"
  state m, n = like in optim
}
"""
    one, two = (locate(resolve(load(("t.ucpl", text)), parse_call(call))) for call in ("one()", "two(tp = 2)"))
    graph = build(one, two)
    prove(graph)
    assert {(f.state, f.source[0][1]) for f in fills(order(graph))} == {
        *(("weight", name) for name in ("a", "b")),
        *((state, f"{state}/{name}") for state in ("m", "n") for name in ("a", "b")),
        ("k", "m/b"),
    }


def test_the_graph_runs_from_what_is_read_to_what_is_written() -> None:
    graph = build(located("fsdp(dp = 2)"), located("stages(pp = 2, tp = 3)"))
    net = graph.net
    assert nx.is_directed_acyclic_graph(net)
    for node in net:
        needs = {type(p) for p in net.predecessors(node)}
        match node:
            case Read() | Fill():
                assert not needs
            case Extract():
                assert needs == {Read}
            case Merge() | Check():
                assert needs == {Extract}
            case Split():
                assert needs == {Merge}
            case Write():
                assert needs and needs <= {Split, Check, Fill}
    assert str(graph).splitlines()[0].split()[:2] == ["0", "read"]
    # For one entry of the target, its ancestors are all that it needs.
    write = next(n for n in net if isinstance(n, Write) and (n.label, n.state) == ("w", "exp_avg"))
    reads = [n for n in nx.ancestors(net, write) if isinstance(n, Read)]
    assert [(n.label, n.state) for n in reads if n.state == "exp_avg"] == [("w", "exp_avg")]


def test_before_any_pass_the_graph_says_what_is_extracted_and_split() -> None:
    text = str(drawn(located("fsdp(dp = 2)"), located("fsdp(dp = 3)")))
    assert "extract w: 2 boxes, 864 elements" in text
    assert "split   w: 3 boxes, 864 elements" in text


def test_more_than_positions_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ucpl.tables.space"], "BITS_MAX", 10)
    with pytest.raises(UcplError) as caught:
        build(located("fsdp(dp = 2)"), located("fsdp(dp = 3)"))
    (found,) = caught.value.diagnostics
    assert found.code == "E312" and "stored tensors" in found.message


def test_what_is_padding_alone_has_the_dtype_of_its_part() -> None:
    """Ranks beyond the end of a tensor hold none of its elements."""
    text = (
        "ucpl 1\nmodel m {\n  dim a = 2\n  w : a\n}\n"
        'layout x(tp) of m {\n  mesh tp\n  file weights = torch "{tp}.pt"\n  w = pad(a, 4)@tp as "w"\n}\n'
    )
    a, b = (locate(resolve(load(("m.ucpl", text)), parse_call(call))) for call in ("x(tp = 2)", "x(tp = 4)"))
    assert [t.dtype for t in order(build(a, b, dtype_of=lambda file, key: "bf16")).targets] == ["bf16"] * 4

    c = locate(resolve(load(("m.ucpl", text.replace("pad(a, 4)@tp", "a@tp"))), parse_call("x(tp = 2)")))
    mixed = order(build(c, b, dtype_of=lambda file, key: {"0.pt": "bf16", "1.pt": "f32"}[file]))
    assert [t.dtype for t in mixed.targets] == ["bf16", "f32", "bf16", "bf16"]
