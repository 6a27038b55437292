"""infer: headers as a model and the call of a layout.

Settings are taken over, and states are assigned.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from tests.inference.facts import checkpoint, with_parallel, with_state
from ucpl.errors import UcplError
from ucpl.extents import Counted, FlatBuffer, NamedTensor, ParameterGroup
from ucpl.files.checkpoint import Checkpoint
from ucpl.inference.infer import inherited_settings, layout_name, model_of, state_dtypes, stated_of
from ucpl.language import nodes, parse, parse_call, print_file
from ucpl.layout import load, resolve
from ucpl.placement import locate

TENSORS = (
    NamedTensor("a", (6, 4), "bf16", "parameter", ("exp_avg", "momentum")),
    NamedTensor("seen", (), "i64", "buffer"),
    NamedTensor("b.c", (3,), "f32", "parameter", ("exp_avg",)),
    NamedTensor("still", (2, 2), "f32", "frozen"),
    NamedTensor("d", (2,), "f32", "parameter", ("exp_avg", "momentum")),
)


def known(**settings: int | float | str | None) -> Checkpoint:
    found = checkpoint(*TENSORS, stored=None, **settings)
    groups = (ParameterGroup("0", ("a",), {}), ParameterGroup("1", ("b.c", "d"), {}), ParameterGroup("2", (), {}))
    scalars: dict[str, dict[str, Counted]] = {"step": {"a": 3, "b.c": 3}, "exp_avg": {"a": 1}}
    return with_state(found, aliases={"head": "a"}, groups=groups, scalars=scalars)


def test_a_model_has_its_tensors_in_order_aliases_groups_and_states() -> None:
    text = print_file(
        nodes.File(
            "", 1, (model_of(known(), {"momentum": {"a": "f64"}, "exp_avg": {"a": "bf16", "b.c": "f32", "d": "f32"}}),)
        )
    )
    assert [" ".join(line.split()) for line in text.splitlines()[2:] if line] == [
        "model checkpoint {",
        "a : 6 4 dtype bf16",
        "seen : () dtype i64 is buffer",
        "b.c : 3 dtype f32",
        "still : 2 2 dtype f32 is frozen",
        "d : 2 dtype f32",
        "alias head = a",
        'group "0" = a',
        'group "1" = b.c, d',
        "state exp_avg : f32 dtype bf16 of a",
        'state momentum : f64 of "0"',  # not of a group where one lacks it
        "state step : f32 scalar",
        "}",
    ]
    parse(text)


def test_settings_are_taken_over_with_their_origin_and_truth_is_a_number() -> None:
    assert inherited_settings(known(dp=4, bf16=True, fp16=False, elastic=None, name="x", rate=0.5)) == {
        "dp": (4, "origin of dp"),
        "bf16": (1, "origin of bf16"),
        "fp16": (0, "origin of fp16"),
        "name": ("x", "origin of name"),
        "rate": (0.5, "origin of rate"),
    }
    assert all(type(v) is not bool for v, _ in inherited_settings(known(bf16=True)).values())


def test_the_layout_is_the_framework_s() -> None:
    assert [layout_name(known(stage=n)) for n in range(4)] == ["zero0", "zero1", "zero2", "zero3"]
    assert layout_name(evolve(known(), format="huggingface")) == "safetensors"
    assert layout_name(evolve(known(), format="universal")) == "universal"


def test_flats_are_those_of_the_rank_and_the_bucket_in_the_order_of_buckets() -> None:
    def flat(bucket: int, tp: int) -> FlatBuffer:
        return FlatBuffer(bucket, str(bucket), {"tp": tp}, ((f"t{bucket}{tp}", (2,)),), (0,), 2)

    found = stated_of(with_parallel(known(), flats=(flat(11, 0), flat(2, 0), flat(2, 1), flat(11, 1))))
    assert found("f", "state", {"tp": 0}) == [[("t20", (2,))], [("t110", (2,))]]
    assert found("f", "state/11", {"tp": 1}) == [[("t111", (2,))]]
    assert found("f", "state/2", {"tp": 1, "dp": 5}) == [[("t21", (2,))]]
    assert found("f", "state/1", {"tp": 1}) == [] and found("f", "11/state", {"tp": 1}) == [
        [("t21", (2,))],
        [("t111", (2,))],
    ]
    assert found("f", "state/²", {"tp": 0}) == [[("t20", (2,))], [("t110", (2,))]], "no number, so no bucket"


LAYOUT = """ucpl 1
model m {
  a : 6
  b : 3
  dtype f32
  group "0" = a, b
  state momentum, exp_avg : f32
}
layout s() of m {
  file weights = torch "f"
  a = ... as "a"
  b = ... as "b"
  state * of * = like as "{name}/{state}"
}
"""


def stored_as(*dtypes: str) -> Checkpoint:
    keys = ["a", "b", "a/momentum", "b/momentum", "a/exp_avg", "b/exp_avg"]
    found = checkpoint(stored={key: (6,) if key[0] == "a" else (3,) for key in keys})
    extents = {place: evolve(e, dtype=d) for (place, e), d in zip(found.extents.items(), dtypes, strict=True)}
    return evolve(found, extents=extents)


def in_two_files(*dtypes: str) -> Checkpoint:
    """A folder with halves of a state of `a`."""
    found = checkpoint(stored={"a/exp_avg": (3,)})
    ((_, key), extent), *_ = found.extents.items()
    halves = {(f"f{i}", key): evolve(extent, file=f"f{i}", dtype=dtype) for i, dtype in enumerate(dtypes)}
    return evolve(found, extents=halves)


def test_the_dtype_of_a_state_of_a_tensor_is_what_all_its_files_say() -> None:
    library = load(("m.ucpl", LAYOUT))
    placement = locate(resolve(library, parse_call("s()")))
    assert state_dtypes(stored_as("bf16", "bf16", "f32", "f32", "bf16", "f16"), placement) == {
        "momentum": {"a": "f32", "b": "f32"},
        "exp_avg": {"a": "bf16", "b": "f16"},
    }
    halves = LAYOUT.replace("s() of m {", "s(dp = 2) of m {\n  mesh dp").replace("a = ...", "a = _@dp")
    halves = halves.replace('torch "f"', 'torch "f{dp}"')
    with pytest.raises(UcplError, match="E330: exp_avg of `a` is stored as bf16 and as f32"):
        state_dtypes(in_two_files("bf16", "f32"), locate(resolve(load(("m.ucpl", halves)), parse_call("s()"))))


def test_the_text_of_a_real_folder_is_equivalent() -> None:
    from ucpl.formats.opening import open_checkpoint
    from ucpl.inference.infer import infer

    found = infer(open_checkpoint(Path(__file__).parents[1] / "fixtures" / "deepspeed" / "z1_dp2_bf16"))
    library = load(("inferred.ucpl", found.text()))
    again = locate(resolve(library, nodes.Call("stored")))
    assert [(p.state, [(h.file, h.key, h.shape) for h in p.homes]) for p in again.parts] == [
        (p.state, [(h.file, h.key, h.shape) for h in p.homes]) for p in found.placement.parts
    ]
    assert found.inherited["bf16"][0] == 1
