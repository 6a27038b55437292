"""Law: states have the oracle's types in every stored tensor.

Files keep them there and back.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ucpl
from tests.laws.agreement import both
from tests.oracle import homes, mean
from tests.oracle.cells import Padding
from tests.oracle.names import Refused
from ucpl.errors import UcplError
from ucpl.graph import build
from ucpl.language import parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate

NAMES = ("a.w", "a.norm", "b.w", "b.norm", "router")
TYPES = st.sampled_from(("f32", "bf16", "f16"))
PATTERNS = st.sampled_from((*NAMES, "*", "a.*", "*norm", "*.w", "b*", "*r*"))
LINES = {
    "like": '  state * = like in optim as "{key}.{state}"',
    "flat": '  state * = pad(flat(each), 2 * dp)@dp in optim as "{state}.{dp}"',
    "of groups": "  group g = a.w, router\n  group h = all - g\n"
    '  state * of g, h = pad(flat(each), dp)@dp in optim as "{state}.{bucket}.{dp}"',
    "typed": '  state * = like in optim dtype f64 as "{key}.{state}"',
}


@st.composite
def typed_texts(draw: st.DrawFn) -> str:
    """A model whose states have types by name and glob.

    With a layout of it.
    """
    some = draw(st.lists(st.tuples(TYPES, st.lists(PATTERNS, min_size=1, max_size=3)), max_size=3))
    once: set[str] = set()
    typed = ""
    for dtype, of in some:
        fresh = [p for p in dict.fromkeys(of) if p not in once and p != "*"]
        once |= {*fresh}
        typed += f" dtype {dtype} of " + ", ".join(f'"{p}"' for p in fresh) if fresh else ""
    rows = [f'  "{name}" : {size} 2 dtype {draw(TYPES)}' for name, size in zip(NAMES, (3, 1, 4, 1, 2), strict=True)]
    model = "\n".join([*rows, f"  state m, v : {draw(TYPES)}{typed}", "  state o : f32"])
    line = LINES[draw(st.sampled_from(sorted(LINES)))]
    return f"""ucpl 1
model one {{
{model}
}}
layout x(dp) of one {{
  mesh dp
  file weights = torch "w.{{dp}}"
  file optim   = torch "o.{{dp}}"
  * = ... as "{{name}}"
{line}
}}
"""


def widest(types: set[str]) -> str:
    """f32 holds all numbers of bf16 and of f16.

    Neither of these holds those of the other.
    """
    return types.pop() if len(types) == 1 else "f32"


@given(typed_texts(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_types_of_states_are_what_the_oracle_says(text: str, dp: int) -> None:
    call = f"x(dp = {dp})"
    try:
        mean(text, call)
    except Refused:
        with pytest.raises(UcplError) as caught:
            resolve(load(("text.ucpl", text)), parse_call(call))
        assert caught.value.diagnostics[0].code == "E127"
        return
    meaning, layout = both(text, call)
    graph = build(locate(layout), locate(layout))
    found = {(t.file, "/".join(map(str, t.key))): t.dtype for t in graph.sources}
    seen = 0
    for home in homes(meaning):
        held = {c[0] for c in home.cells if not isinstance(c, Padding)}
        if home.state == "weight" or not held:
            continue
        wanted = home.dtype or widest({meaning.state_types[path, home.state] for path in held})
        assert found[home.file, home.key] == wanted, (home.file, home.key)
        seen += 1
    assert seen


@st.composite
def used_texts(draw: st.DrawFn) -> str:
    """Models with state lines of their own, one inside the other.

    Types that agree or differ, by name and by glob.
    """

    def lines(names: tuple[str, ...], prefix: str = "") -> str:
        rows = [f'  "{name}" : 2 dtype bf16' for name in names]
        pattern = draw(st.sampled_from((*names, "*w", "*", "*.norm", f"{prefix}*m")))
        typed = f' dtype {draw(TYPES)} of "{pattern}"' if pattern != "*" and draw(st.booleans()) else ""
        state = [f"  state m : {draw(TYPES)}{typed}"] if draw(st.booleans()) else []
        return "\n".join([*rows, *state])

    uses = draw(st.sampled_from(("  use inner() as i", "  use inner() as i\n  use inner() as i2", "")))
    return f"""ucpl 1
model inner {{
  w : 2 dtype bf16
  "sub.norm" : 2 dtype bf16
  state m : {draw(TYPES)}{draw(st.sampled_from(("", " dtype f16 of w", ' dtype f32 of "*norm"')))}
}}
model middle {{
{uses}
{lines(("w", "x.norm"), "i.")}
}}
model one {{
{lines(("w", "y.norm"), "eye.")}
  use middle() as eye
  use inner() as ear
}}
layout x(dp) of one {{
  mesh dp
  file weights = torch "w.{{dp}}"
  * = ... as "{{name}}"
  state * = like as "{{key}}.{{state}}"
}}
"""


@given(used_texts())
@settings(max_examples=60, deadline=None)
def test_types_of_used_models_are_of_their_own_tensors(text: str) -> None:
    try:
        meaning = mean(text, "x(dp = 1)")
    except Refused:
        with pytest.raises(UcplError) as caught:
            resolve(load(("text.ucpl", text)), parse_call("x(dp = 1)"))
        assert caught.value.diagnostics[0].code == "E127"
        return
    layout = resolve(load(("text.ucpl", text)), parse_call("x(dp = 1)"))
    assert {(path, "m"): layout.dtype_of(path, "m") for path in layout.tensors} == meaning.state_types


# ---- files -----------------------------------------------------------------------------------------------------------

TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
STATES = ("exp_avg", "exp_avg_sq")


@st.composite
def mixed(draw: st.DrawFn) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters and states; each tensor's type is drawn separately."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    number = 1
    for i in range(draw(st.integers(2, 5))):
        shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple))
        for state in ("weight", *STATES):
            count = int(torch.tensor(shape).prod())
            dtype = TORCH[draw(st.sampled_from(sorted(TORCH)))]
            out.setdefault(f"p{i}", {})[state] = torch.arange(number, number + count).reshape(shape).to(dtype)
            number += count
    return out


@settings(max_examples=10, deadline=None)
@given(mixed(), st.integers(1, 3), st.integers(1, 3))
def test_files_keep_the_type_of_each_state(
    tmp_path_factory: pytest.TempPathFactory, params: dict[str, dict[str, torch.Tensor]], first: int, second: int
) -> None:
    folder = tmp_path_factory.mktemp("types")
    groups = [{"lr": 0.1, "params": [*params]}]
    torch.save({"params": {n: {**p, "step": 5} for n, p in params.items()}, "groups": groups}, folder / "a.pt")
    ucpl.convert(folder / "a.pt", folder / "b", to=f"dcp(fsdp = {first})")
    ucpl.convert(folder / "b", folder / "c", to=f"dcp(fsdp = {second})")
    ucpl.convert(folder / "c", folder / "d", to="plain()")
    found: dict[str, Any] = torch.load(folder / "d" / "plain.pt", weights_only=True)["params"]
    for name, states in params.items():
        for state, tensor in states.items():
            assert found[name][state].dtype == tensor.dtype, (name, state)
            assert torch.equal(found[name][state], tensor), (name, state)
