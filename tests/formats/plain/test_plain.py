"""plain(): contents, safe loading by torch, minimal and wrong files."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucpl.errors import UcplError, catalogue
from ucpl.extents import Global, PickledCall, Size, TorchDType
from ucpl.files.pickles import attributes_of, dumps, loads, set_attributes
from ucpl.files.plain_values import decode, encode
from ucpl.files.scalars import number_of
from ucpl.formats.plain.store import Plain


def weights() -> dict[str, Any]:
    return {
        "params": {
            "w": {"weight": torch.ones(2, 3), "exp_avg": torch.zeros(2, 3), "step": torch.tensor(4.0)},
            "b": {"weight": torch.ones(3), "exp_avg": torch.zeros(3), "step": 4},
            "frozen": {"weight": torch.ones(5)},
        },
        "buffers": {"calls": torch.zeros(2)},
        "aliases": {"head": "w"},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["b"]}, {"lr": 0.2, "params": ["w"]}],
        "scalars": {"global_steps": 7},
    }


def saved(tmp_path: Path, value: Any, name: str = "plain.pt") -> Path:
    torch.save(value, tmp_path / name)
    return tmp_path / name


def test_a_file_by_hand_is_read_completely(tmp_path: Path) -> None:
    path = saved(tmp_path, weights())
    assert Plain().recognises(path)
    assert Plain().recognises(tmp_path)
    found = Plain().open(path)
    assert found.extents == Plain().open(tmp_path).extents
    assert [(t.name, t.kind, t.shape, t.states) for t in found.state.tensors] == [
        ("w", "parameter", (2, 3), ("exp_avg",)),
        ("b", "parameter", (3,), ("exp_avg",)),
        ("frozen", "frozen", (5,), ()),
        ("calls", "buffer", (2,), ()),
    ]
    assert found.state.aliases == {"head": "w"}
    assert [(g.members, g.hyper) for g in found.state.groups] == [
        (("b",), {"lr": 0.1, "betas": (0.9, 0.95)}),
        (("w",), {"lr": 0.2}),
    ]
    assert {name: number_of(v) for name, v in found.state.scalars["step"].items()} == {"w": 4.0, "b": 4}
    assert found.state.blobs == {"global_steps": 7}
    assert found.carried_extents == {}


def test_the_shortest_file(tmp_path: Path) -> None:
    found = Plain().open(saved(tmp_path, {"params": {"w": {"weight": torch.ones(2)}}}, "other.pt"))
    assert [(t.name, t.kind) for t in found.state.tensors] == [("w", "parameter")]
    assert found.state.settings["file"].value == "other.pt"
    assert found.state.settings["has_masters"].value == 0
    assert found.state.groups == ()
    assert found.remarks


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda v: v.pop("params"), "E480", "params"),
        (lambda v: v["params"].update(x=torch.ones(1)), "E481", "params/x"),
        (lambda v: v["params"]["w"].pop("weight"), "E481", "params/w"),
        (lambda v: v["params"]["w"].update(exp_avg=torch.ones(7)), "E481", "params/w/exp_avg"),
        (lambda v: v["buffers"].update(x=[1]), "E481", "buffers/x"),
        (lambda v: v["aliases"].update(x="nothing"), "E481", "aliases/x"),
        (lambda v: v["groups"].append({"params": ["w"]}), "E481", "groups/2/params"),
        (lambda v: v["groups"].append({"params": ["nothing"]}), "E481", "groups/2/params"),
        (lambda v: v.update(groups={}), "E481", "groups"),
        (lambda v: v.update(envelope={"blobs": {"a": 1, 7: 2}}), "E481", "envelope/blobs"),
    ],
)
def test_another_form_is_refused(tmp_path: Path, change: Any, code: str, where: str) -> None:
    value = weights()
    change(value)
    path = saved(tmp_path, value)
    with pytest.raises(UcplError) as caught:
        Plain().open(path)
    diagnostic = caught.value.diagnostics[0]
    assert (diagnostic.code, diagnostic.labels[0].where) == (code, where)
    assert catalogue()[code].exit_status == 3


def test_other_files_are_not_taken_for_plain(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"nothing")
    assert not Plain().recognises(tmp_path / "a.pt")
    assert not Plain().recognises(saved(tmp_path, {"w": torch.ones(2)}, "state_dict.pt"))
    assert not Plain().recognises(tmp_path / "none.pt")


# ---- values that weights_only refuses -------------------------------------------------------------------------------------

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.just(Global("torch.optim.lr_scheduler", "LambdaLR")),
    st.just(TorchDType("bf16")),
    st.lists(st.integers(0, 9), max_size=3).map(Size),
    st.complex_numbers(allow_nan=False),
    st.sets(st.integers(), max_size=3),
    st.frozensets(st.text(max_size=3), max_size=3),
)
keys = st.one_of(st.text(max_size=4), st.sampled_from(["ucpl", "name", "of"]), st.integers(-5, 5))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=2),
    ),
    max_leaves=12,
)


@given(trees)
def test_values_come_back(value: Any) -> None:
    coded = encode(value)
    assert decode(coded) == value
    assert type(decode(coded)) is type(value)
    assert loads(dumps(coded)) == coded


@given(trees)
def test_coded_values_are_safe(value: Any) -> None:
    from ucpl.files.pickles import unsafe_globals

    assert unsafe_globals(encode(value)) == []


def test_objects_come_back() -> None:
    inner = PickledCall(
        Global("m", "C"), (1,), {"k": 2}, new=True, state={"a": [1]}, list_items=[3], dict_items=[((1, 2), 4)]
    )
    shared = [1]
    mapping: OrderedDict[str, Any] = OrderedDict(a=shared, b=shared, c=inner)
    set_attributes(mapping, {"_metadata": {"version": 1}})
    back: Any = decode(encode(mapping))
    assert attributes_of(back) == {"_metadata": {"version": 1}}
    assert back["a"] is back["b"]
    call = back["c"]
    assert (call.function, call.args, call.kwargs, call.new) == (Global("m", "C"), (1,), {"k": 2}, True)
    assert (call.state, call.list_items, call.dict_items) == ({"a": [1]}, [3], [((1, 2), 4)])
