"""States that lack dims, compared with the oracle, there and back."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.laws.agreement import check
from tests.oracle import homes, mean
from ucpl.errors import UcplError
from ucpl.testing import Example, assert_round_trip

DIMS = {"w": "l r h", "k": "l g d h", "o": "l h g d", "embed": "v h", "rot": "d", "some": "l[1..] r f"}
PATTERNS = {
    "w": ("[l] = r{a} h{b}", "[l] = h{a} r{b}", "[l] = (r h){a}", " = l r{a} h{b}", "[l] = (h r{a})"),
    "k": (
        "[l] = (g{a} d) h{b}",
        "[l] = (d g){a} h",
        "[l] = ((g copies(2)){a} d) h{b}",
        "[l] = h{b} g{a} d",
        " = (l g d){a} h",
    ),
    "o": ("[l] = h{b} (g{a} d)", "[l] = h (g d){a}", "[l] = (h{a} g d)"),
    "embed": (" = pad(v, 6){a} h{b}", " = trim(pad(v, 6)){b} h", " = h{b} v", " = (v h)", " = pad(v, 4, live) h{a}"),
    "rot": (" = (k two){a}", " = d{b}", " = (two k{a})"),
    "some": ("[l] = r{a} f", " = l (r f){a}", "[l[1]] = f{b} r", " = l f{b} r"),
}
CUTS = ("", "@spread(tp)", "@chunk(dp)", "@chunk(tp)@spread(dp)")
KEY = "{key}.{state}"


def lines_of(draw: st.DrawFn, lacked: dict[str, str]) -> list[str]:
    """The lines of a layout that the state fits."""
    out = []
    for name in DIMS:
        fitting = [p for p in PATTERNS[name] if name not in lacked or "l" not in lacked[name].split() or "[l" not in p]
        pattern = draw(st.sampled_from(fitting))
        a, b = draw(st.sampled_from(CUTS)), draw(st.sampled_from(("", "@chunk(dp)")))
        if not fitting:
            continue
        line = pattern.format(a=a, b=b if "dp" not in a or "{a}" not in pattern else "")
        key = f"{name}.{{l}}" if "[l" in line else name
        out.append(f'  {name}{line}  as "{key}"')
    return out


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A model with states that lack dims, and two layouts of it."""
    lacked: dict[str, str] = {}
    for name in draw(st.sets(st.sampled_from(sorted(DIMS)), min_size=1)):
        dims = [d.partition("[")[0] for d in DIMS[name].split()]
        some = draw(st.sets(st.sampled_from([d for d in dims if d != "l" or name in ("w", "k", "some")]), min_size=1))
        lacked[name] = " ".join(sorted(some))
    clauses = " ".join(f"without {dims} for {name}" for name, dims in lacked.items())
    model = "\n".join(f"  {name} : {dims}" for name, dims in DIMS.items())
    both = []
    for name in ("x", "y"):
        like = draw(st.sampled_from(("like", "like(1)")))
        mesh = draw(st.permutations(["dp", "tp"]))
        both += [
            f"layout {name}(dp, tp) of one {{",
            f"  mesh {' '.join(mesh)}",
            '  file weights = torch "{dp}.{tp}"',
            *lines_of(draw, lacked),
            f'  state short = {like}  as "{KEY}"',
            f'  state long = like  as "{KEY}"',
            "}",
        ]
    head = "  dim l = 2, r = 4, h = 3, g = 2, d = 4, v = 5, two = 2, k = 2, f = 2\n  index d = (two k)"
    states = f"  state long : f32\n  state short : f32  {clauses}"
    return "\n".join(["ucpl 2", "model one {", head, model, states, "}", *both, ""])


def padded(dim: str) -> str:
    """Layouts with live rows of a tensor whose state lacks a dim."""
    model = (
        f"model one {{\n  dim v = 5, h = 3\n  embed : v h\n  state long : f32\n  state short : f32  without {dim}\n}}"
    )
    items = '  mesh dp tp\n  file weights = torch "{dp}.{tp}"\n  embed = pad(v, 4, live) h  as "embed"'
    states = f'  state short = like(1)  as "{KEY}"\n  state long = like  as "{KEY}"'
    layouts = [f"layout {name}(dp, tp) of one {{\n{items}\n{states}\n}}" for name in ("x", "y")]
    return "\n".join(["ucpl 2", model, *layouts, ""])


@given(texts(), st.integers(1, 3), st.integers(1, 3))
@example(padded("v"), 1, 1)
@example(padded("h"), 1, 2)
@settings(max_examples=60, deadline=None)
def test_states_without_dims_are_what_the_oracle_says(text: str, dp: int, tp: int) -> None:
    seen = 0
    for name in ("x", "y"):
        call = f"{name}(dp = {dp}, tp = {tp})"
        try:
            seen += check(text, call)
        except UcplError as error:
            (found,) = error.diagnostics
            assert found.code == "E225" and found.remedy, found
            return
        assert {home.state for home in homes(mean(text, call))} == {"weight", "long", "short"}
    assert seen
    assert_round_trip(Example(text, f"x(dp = {dp}, tp = 1)"), Example(text, f"y(dp = 2, tp = {tp})"))
