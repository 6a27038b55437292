"""Any word of the language can be a name of anything.

Printing quotes it if necessary.
"""

from __future__ import annotations

from typing import Any

import pytest

from ucpl.errors import UcplError
from ucpl.language import nodes, parse, print_file
from ucpl.language.tables import tables
from ucpl.language.walk import lowest_version

parse("ucpl 1")
WORDS = sorted(
    {t.pattern.value for t in tables().lark.terminals if t.pattern.type == "str" and t.pattern.value.isidentifier()}
)
H = nodes.Dim("h")
CALL = nodes.Call("f")
TWO = nodes.Number(2)


def layout(*items: nodes.LayoutItem) -> nodes.Statement:
    return nodes.Layout("x", (), "any", None, items)


def model(*items: nodes.ModelItem) -> nodes.Statement:
    return nodes.Model("m", items)


def entry(*shape: nodes.Axis, **more) -> nodes.Statement:
    return layout(nodes.Entry("w", more.pop("indices", ()), shape, **more))


def stack(*axes: nodes.Axis, label: str | None = None) -> nodes.Axis:
    return nodes.Stack((nodes.Term(label, axes), nodes.Term(label, axes)))


def dim(name: str, *bounds: Any) -> nodes.Dimension:
    return nodes.Dimension(name, None, nodes.Among((nodes.Range(*bounds),)) if bounds else None)


PLACES = {
    "entry": lambda w: layout(nodes.Entry(w, (), (H,))),
    "entry, dotted": lambda w: layout(nodes.Entry(f"{w}.x", (), (H,)), nodes.Entry(f"x.{w}", (), (H,))),
    "entry, indexed": lambda w: layout(nodes.Entry(w, (H,), (H,))),
    "axis": lambda w: entry(nodes.Dim(w), nodes.Dim(w)),
    "axis, dotted": lambda w: entry(nodes.Dim(f"{w}.x"), nodes.Dim(f"{w}.x")),
    "axis, cut": lambda w: entry(nodes.Cut(nodes.Dim(w), (nodes.Split(w),)), nodes.Dim(w)),
    "axis in a stack": lambda w: entry(stack(nodes.Dim(w), nodes.Dim(w))),
    "label": lambda w: entry(stack(H, label=w)),
    "label, dotted": lambda w: entry(stack(H, label=f"{w}.x")),
    "axis in pad": lambda w: entry(nodes.Pad(nodes.Dim(w), nodes.Name(w) if w != "not" else TWO, "live")),
    "axis in trim": lambda w: entry(nodes.Trim(nodes.Dim(w))),
    "axis in flat": lambda w: entry(nodes.Flat(nodes.Dim(w))),
    "index of an entry": lambda w: entry(H, indices=(nodes.Dim(w), nodes.Dim(w))),
    "split": lambda w: entry(
        nodes.Cut(H, (nodes.Split(w), nodes.Split(w, "chunk", (), TWO), nodes.Split(w, "spread"))), H
    ),
    "clauses": lambda w: entry(
        H,
        clauses=(
            nodes.Clause("copies", ("mean", (w, w))),
            nodes.Clause("at", (w, TWO)),
            nodes.Clause("on", (w,)),
            nodes.Clause("in", (w,)),
        ),
    ),
    "mesh": lambda w: layout(nodes.Mesh("", (w, f"{w}2", f"x{w}"))),
    "mesh, second": lambda w: layout(nodes.Mesh(w, ("a", w))),
    "index": lambda w: layout(nodes.Index(w, nodes.Dim(w)), nodes.Index(w, nodes.Dim(w), TWO)),
    "file": lambda w: layout(nodes.Files(w, "torch", "a.pt")),
    "file, form": lambda w: layout(nodes.Files("f", w if w != "none" else "torch", "a.pt")),
    "group": lambda w: layout(nodes.Group(w, (nodes.Dim(w),), members=(w, w, f"{w}.x"), order="reversed")),
    "group without": lambda w: layout(nodes.Group("g", without=(w, w), order=nodes.Number(2))),
    "group stated": lambda w: layout(nodes.Group("g", stated=(w, "k"))),
    "states": lambda w: layout(nodes.States((w, w), (w, w), (nodes.Dim(w),))),
    "derive": lambda w: layout(nodes.Derive(w, w, nodes.Number(1))),
    "fill": lambda w: layout(
        nodes.Fill(w, (H,), TWO),
        nodes.Fill(f"{w}.x", (), TWO),
        nodes.FillStates((w, w), (w, w), TWO),
    ),
    "blob": lambda w: layout(nodes.Blob(w, (w,), "keep", (nodes.Clause("in", (w,)),))),
    "use": lambda w: layout(
        nodes.Use(nodes.Call(w), w, "k"), nodes.Use(CALL, f"{w}2", None, (nodes.Clause("at", (w, TWO)),))
    ),
    "framework": lambda w: layout(nodes.Framework(nodes.Call(w, (nodes.Argument(w, TWO),)))),
    "parameter": lambda w: nodes.Layout(w, (nodes.Parameter(w), nodes.Parameter("a", TWO)), w, nodes.Call(w), ()),
    "tensor": lambda w: model(nodes.Tensor(w, (dim("h"),)), nodes.Tensor(f"{w}.x", ())),
    "dims": lambda w: model(nodes.Tensor("t", (dim(w), dim(w)), "f32", "frozen", TWO)),
    "dims, ranged": lambda w: model(nodes.Tensor("t", (dim(w, None, None, TWO), dim(w, TWO)))),
    "alias": lambda w: model(nodes.Alias(w, w, TWO)),
    "state": lambda w: model(nodes.State((w, f"{w}2"), "f32", True, (w, w))),
    "sizes": lambda w: model(nodes.Dims((nodes.Binding(w, TWO, w),)), nodes.Let((nodes.Binding(f"{w}2", TWO),))),
    "model": lambda w: nodes.Model(w, ()),
    "import": lambda w: nodes.Import("a.ucpl", (w, f"{w}2")),
    "plan": lambda w: nodes.Plan(
        w, nodes.Call(w), nodes.Call(w), (w, f"{w}.x"), (f"{w}.y", w), ((w, w), (f"{w}.x", None))
    ),
}
NUMBERS = {
    "number": lambda w: nodes.Let((nodes.Binding("a", nodes.Name(w)),)),
    "number, dotted": lambda w: nodes.Let((nodes.Binding("a", nodes.Name(f"x.{w}")),)),
    "sum": lambda w: nodes.Assert(nodes.Binary("+", nodes.Name(w), nodes.Name(w))),
    "negated": lambda w: nodes.Assert(nodes.Unary("not", nodes.Name(w))),
    "function": lambda w: nodes.Assert(nodes.Function(w, (nodes.Name(w), nodes.Name(w)))),
    "argument": lambda w: nodes.Plan("p", nodes.Call("a", (nodes.Argument(None, nodes.Name(w)),)), CALL),
    "range": lambda w: model(nodes.Tensor("t", (dim("h", nodes.Name(w), nodes.Name(w), nodes.Name(w)),))),
    "sizes of a cut": lambda w: entry(nodes.Cut(H, (nodes.Split("a", "sizes", (nodes.Name(w), nodes.Name(w))),)), H),
    "number of copies": lambda w: entry(H, nodes.Copies(nodes.Name(w))),
    "filled": lambda w: layout(nodes.Fill("a", (), nodes.Name(w)), nodes.FillStates(("a",), None, TWO, nodes.Name(w))),
    "when": lambda w: entry(H, clauses=(nodes.Clause("when", (nodes.Name(w),)), nodes.Clause("in", (w,)))),
    "dealt": lambda w: layout(nodes.Group("g", members=("a",), order=nodes.Name(w))),
}


def survives(statement: Any) -> None:
    file = nodes.File("<text>", lowest_version(statement), (statement,))
    assert parse(print_file(file)) == file


def test_the_words_are_those_of_the_grammar():
    assert {"model", "layout", "plan", "as", "chunk", "flat", "by", "alias", "lossy", "framework"} <= set(WORDS)


@pytest.mark.parametrize("place", PLACES)
def test_every_word_can_be_a_name(place):
    for word in [*WORDS, "_", "Ünïcode", 'quo"ted', "back\\slash", "new\nline", "a b", "0", "7.x", "a..b"]:
        statement = PLACES[place](word)
        if word not in WORDS and place.split(",")[0] in (
            "axis",
            "axis in a stack",
            "axis in pad",
            "axis in trim",
            "axis in flat",
            "index of an entry",
            "index",
            "states",
            "group",
            "file",
        ):
            continue  # the name of an axis is plain; so is the form of a file
        if place == "model" and word == "any":
            continue  # `of any` means every model
        survives(statement)


def test_no_model_is_called_any() -> None:
    with pytest.raises(UcplError) as caught:
        parse("ucpl 1\nmodel any {}\n", "x.ucpl")
    assert caught.value.diagnostics[0].code == "E008"
    assert caught.value.diagnostics[0].message == "a model is called `any`, and `of any` means a layout of every model"


@pytest.mark.parametrize("place", NUMBERS)
def test_every_word_but_not_can_be_a_number(place):
    for word in WORDS:
        if word != "not":
            survives(NUMBERS[place](word))
