"""Law: globs have the oracle's meaning on every rank.

They are over tensors of any model; both refuse the same names.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.agreement import agree, both
from tests.oracle import mean
from tests.oracle.names import Refused
from ucpl.errors import UcplError
from ucpl.language import nodes, parse, parse_call
from ucpl.layout import load, resolve
from ucpl.placement import locate

WORDS = ("a", "q", "bias", "w", "norm")
names = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(".".join)
texts = st.sampled_from(("", "", "a", ".", "q", ".w", "as", "norm."))
lefts = st.lists(texts, min_size=2, max_size=3).map("*".join).filter(lambda t: t != "*")
classes = st.sampled_from(("", "", "", " of trainable", " of parameter", " of buffer", " of alias"))
shapes = st.sampled_from(("...", "_@chunk(tp) ...", "_@spread(tp) ...", "pad((...), 2 * tp)@tp", "none"))
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@st.composite
def texts_of_any(draw: st.DrawFn) -> tuple[nodes.Model, str]:
    """A model of similar names; a layout of globs, classes and names."""
    tensors = draw(
        st.dictionaries(names, st.tuples(SIZES, st.sampled_from(("", "", " is buffer"))), min_size=1, max_size=6)
    )
    rows = [f'  "{n}" : {" ".join(map(str, sizes))} dtype f32{kind}' for n, (sizes, kind) in tensors.items()]
    if draw(st.booleans()):
        rows.append(f'  alias "tied.w" = "{draw(st.sampled_from(sorted(tensors)))}"')
    (model,) = parse("ucpl 1\nmodel m {\n" + "\n".join(rows) + "\n}\n", "m").statements
    assert isinstance(model, nodes.Model)
    lines = [("*", "", draw(st.sampled_from(("...", "none"))))]
    lines += [
        (f'"{left}"', of, shape) for left, of, shape in draw(st.lists(st.tuples(lefts, classes, shapes), max_size=5))
    ]
    lines += [(f'"{n}"', "", "...") for n in draw(st.lists(st.sampled_from(sorted(tensors)), max_size=1))]
    sentences = [
        f"  {left}{of} = {shape}" + ("" if shape == "none" else f' as "{i}/{{{"alias" if "alias" in of else "name"}}}"')
        for i, (left, of, shape) in enumerate(draw(st.permutations(lines)))
    ]
    head = 'ucpl 1\nlayout g(tp) of any {\n  mesh tp\n  file weights = torch "{tp}"\n'
    return model, head + "\n".join(sentences) + "\n}\n"


@given(texts_of_any(), st.integers(1, 3))
@settings(max_examples=90, deadline=None)
def test_globs_mean_what_the_oracle_says(drawn: tuple[nodes.Model, str], tp: int) -> None:
    model, text = drawn
    call = f"g(tp = {tp})"
    try:
        mean(text, call, model=model)
    except Refused:
        with pytest.raises(UcplError) as caught:
            resolve(load(("text.ucpl", text)), parse_call(call), model=model)
        assert caught.value.diagnostics[0].code == "E127"
        return
    meaning, layout = both(text, call, model=model)
    agree(meaning, locate(layout))
