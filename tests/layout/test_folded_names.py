"""Names with numbers in braces: written by `folded`, read as single names."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpl.errors import UcplError
from ucpl.language import nodes, parse, print_file
from ucpl.layout import load
from ucpl.layout.folded_names import folded
from ucpl.resources import VERSION

Shapes = dict[str, tuple[int, ...]]

WORDS = st.sampled_from(["layers", "h", "experts", "w", "block", "a.b", "x_", "é", "part"])
NUMBERS = st.sampled_from([*map(str, range(14)), "007", "00", "1000000", "99"])
NAMES = st.lists(st.tuples(WORDS, NUMBERS, st.sampled_from([".", "", "_"])), min_size=1, max_size=3).map(
    lambda steps: "".join(word + mark + number + mark for word, number, mark in steps) + "end"
)


def of(shapes: Shapes, groups: tuple[tuple[str, ...], ...] = ()) -> tuple[nodes.Model, nodes.Layout]:
    tensors = [nodes.Tensor(n, tuple(nodes.Dimension(None, d) for d in s), "f32") for n, s in shapes.items()]
    named = [nodes.Group(str(n), members=members) for n, members in enumerate(groups)]
    key = nodes.Clause("as", ("{name}",))
    entries = [nodes.Entry(n, (), (nodes.Rest(),), (key,)) for n in shapes]
    file = nodes.Files("weights", "torch", "f.pt", None)
    return nodes.Model("m", (*tensors, *named)), nodes.Layout("s", (), "m", None, (file, *entries))


def again(model: nodes.Model, layout: nodes.Layout) -> tuple[Shapes, list[tuple[str, ...]], list[str], str]:
    """Shapes, groups and entries of the written text, and the text."""
    text = print_file(nodes.File("t.ucpl", VERSION, folded(model, layout)))
    library = load(("t.ucpl", text))
    read, stored = library.model("m").node, library.layout("s").node
    assert isinstance(read, nodes.Model)
    assert isinstance(stored, nodes.Layout)
    shapes = {i.path: tuple(d.size or 0 for d in i.dims) for i in read.items if isinstance(i, nodes.Tensor)}
    groups = [i.members or () for i in read.items if isinstance(i, nodes.Group)]
    return shapes, groups, [i.path for i in stored.items if isinstance(i, nodes.Entry)], text


@given(
    st.dictionaries(NAMES, st.sampled_from([(2, 3), (4,), (), (5, 2)]), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
@settings(max_examples=400, deadline=None)
def test_a_text_has_the_same_names_shapes_and_groups(shapes: Shapes, random: object) -> None:
    members = list(shapes)
    random.shuffle(members)  # type: ignore[attr-defined]
    half = len(members) // 2
    groups = tuple(filter(None, (tuple(members[:half]), tuple(members[half:]))))
    found, read, stored, _ = again(*of(shapes, groups))
    assert found == shapes and sorted(stored) == sorted(shapes) and read == list(groups)


@given(
    st.sets(st.integers(0, 9), max_size=10).map(
        lambda some: {f"h.{n}.w": ("f32", "bf16")[n in some] for n in range(10)}
    )
)
@settings(max_examples=200, deadline=None)
def test_each_tensor_keeps_the_clauses_of_its_own_line(dtypes: dict[str, str]) -> None:
    """Tensors of one form may be stored in two ways."""
    model, layout = of(dict.fromkeys(dtypes, (2, 3)))
    items = [
        evolve(i, clauses=(*i.clauses, nodes.Clause("dtype", (dtypes[i.path],)))) if isinstance(i, nodes.Entry) else i
        for i in layout.items
    ]
    text = print_file(nodes.File("t.ucpl", VERSION, folded(model, evolve(layout, items=tuple(items)))))
    stored = load(("t.ucpl", text)).layout("s").node
    assert isinstance(stored, nodes.Layout)
    entries = [i for i in stored.items if isinstance(i, nodes.Entry)]
    assert [(i.path, i.clauses[-1].args) for i in sorted(entries, key=lambda i: i.path)] == [
        (name, (dtype,)) for name, dtype in sorted(dtypes.items())
    ]


@given(st.sets(st.integers(0, 9), min_size=2), st.sets(st.integers(0, 9), min_size=2), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_group_in_the_order_of_a_program_is_short(layers: set[int], wide: set[int], is_late: bool) -> None:
    names: Shapes = {"embed": (9, 4)}
    for n in sorted(layers):
        names |= {f"h.{n}.ln": (4,), f"h.{n}.up": (8, 4) if n in wide else (6, 4)}
        names |= {f"h.{n}.experts.{e}.w": (2, 2) for e in range(3) if n in wide}
    names |= {"head": (9, 4)} if is_late else {}
    shapes, groups, stored, text = again(*of(names, (tuple(names),)))
    assert shapes == names and list(shapes) == list(names) == stored and groups == [tuple(names)]
    line = next(line for line in text.splitlines() if "group" in line)
    assert line.count(",") <= 4 and "h.0" not in text and "h.7" not in text


def deepseek(layers: int, experts: int, dense: int) -> Shapes:
    out: Shapes = {"embed": (9, 4)}
    for n in range(layers):
        out[f"layers.{n}.attn.q.weight"] = (4, 4)
        if n < dense:
            out[f"layers.{n}.mlp.up.weight"] = (8, 4)
        else:
            out |= {f"layers.{n}.mlp.experts.{e}.up.weight": (2, 4) for e in range(experts)}
    return out


@pytest.mark.parametrize(("layers", "experts", "dense"), [(61, 256, 3), (4, 2, 1), (12, 8, 2)])
def test_layers_and_experts_are_a_line_each(layers: int, experts: int, dense: int) -> None:
    names = deepseek(layers, experts, dense)
    shapes, _, _, text = again(*of(names))
    assert shapes == names and list(shapes) == list(names)
    assert [" ".join(line.split()) for line in text.splitlines()[3:] if " : " in line or "dim" in line] == [
        f"dim l = {layers}, e = {experts}",
        "embed : 9 4 dtype f32",
        '"layers.{l}.attn.q.weight" : 4 4 dtype f32',
        f'"layers.{{l[..{dense}]}}.mlp.up.weight" : 8 4 dtype f32' if dense > 1
        else '"layers.{l[0]}.mlp.up.weight" : 8 4 dtype f32',
        f'"layers.{{l[{dense}..]}}.mlp.experts.{{e}}.up.weight" : 2 4 dtype f32',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "brackets"),
    [
        (range(1, 6), "{l[1..]}"),
        ((0, 2, 4), "{l[.. by 2]}"),
        ((1, 3, 5), "{l[1.. by 2]}"),
        ((0, 1, 2, 5), "{l[..3, 5]}"),
        ((0, 1, 2, 3, 5, 6, 7, 8, 9), "{l[not 4]}"),
        ([n for n in range(14) if n % 4], "{l[not 0..13 by 4]}"),
    ],
)
def test_numbers_that_begin_at_one_or_leave_gaps_are_in_brackets(numbers: tuple[int, ...], brackets: str) -> None:
    names: Shapes = {f"h.{n}.w": (2,) for n in numbers}
    shapes, _, _, text = again(*of(names))
    assert shapes == names and f'"h.{brackets}.w" : 2' in text


@pytest.mark.parametrize(
    "names",
    [
        ["conv1.weight", "conv2.weight", "conv3.weight"],  # parts of a block, as a person writes them
        ["layer.0.w", "layer.1.w", "layer.0.b"],
        ["00.w", "01.w", "02.w", "03.w"],
    ],
)
def test_few_numbers_within_words_and_leading_zeros_stay_apart(names: list[str]) -> None:
    shapes: Shapes = {name: (n + 1 if "layer" in name else 2,) for n, name in enumerate(names)}
    found, _, _, text = again(*of(shapes))
    assert found == shapes and "{l}" not in text.replace('as "{name}"', "")


MODEL = """ucpl 2

model m {{
  dim l = 4
  {line}
}}
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('"h.{l[9]}.w" : 2', "E138"),
        ('"h.{l[..]}{l[..}" : 2', None),  # no brackets of the language: braces of a name
        ('"h.{l[@]}.w" : 2', "E001"),
        ('"h.{l}.{l}.{l}.{l}.{l}.{l}.{l}.{l}.{l}.{l}.w" : 2', "E131"),
    ],
)
def test_brackets_that_are_wrong_are_refused(line: str, code: str | None) -> None:
    if code is None:
        load(("t.ucpl", MODEL.format(line=line)))
        return
    with pytest.raises(UcplError) as caught:
        load(("t.ucpl", MODEL.format(line=line)))
    assert caught.value.diagnostics[0].code == code


def test_a_tidied_text_keeps_its_braces() -> None:
    text = MODEL.format(line='"h.{l[1..]}.w" : 2')
    assert '"h.{l[1..]}.w" : 2' in print_file(parse(text, "t.ucpl"))
