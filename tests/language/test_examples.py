"""Every construct of the language, compared with its expected record.

A successful parse alone proves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.language.reading import read
from ucpl.language import nodes, parse_call, parse_expr
from ucpl.language.nodes import (
    Alias,
    Any_,
    Argument,
    Assert,
    Binary,
    Binding,
    Blob,
    Call,
    Clause,
    Cut,
    DefaultDtype,
    Derive,
    Dim,
    Dimension,
    Dims,
    Domain,
    Each,
    Entry,
    Files,
    Flat,
    Framework,
    Function,
    Group,
    Import,
    Index,
    Let,
    List,
    Mesh,
    Name,
    Number,
    Pad,
    Parameter,
    Plan,
    Rest,
    Split,
    Stack,
    State,
    States,
    Tensor,
    Term,
    Text,
    Trim,
    TypedOf,
    Unary,
    Use,
)  # fmt: skip

EXAMPLES = Path(__file__).parent / "examples"


def number(value: int) -> Number:
    return Number(value)


def dims(*names: str) -> tuple[Dimension, ...]:
    return tuple(Dimension(name) for name in names)


def among(start: nodes.Expr | None, stop: nodes.Expr | None = None, step: nodes.Expr | None = None) -> nodes.Among:
    return nodes.Among((nodes.Range(start, stop, step),))


def axes(*names: str) -> tuple[Dim, ...]:
    return tuple(Dim(name) for name in names)


def run(label: str | None, *names: str) -> Term:
    return Term(label, axes(*names))


def called(key: str) -> Clause:
    return Clause("as", (key,))


def split(axis: nodes.Axis, *cuts: Split) -> Cut:
    return Cut(axis, cuts)


def times(left: int | str, right: int | str) -> Binary:
    def leaf(value: int | str) -> nodes.Expr:
        return Number(value) if isinstance(value, int) else Name(value)

    return Binary("*", leaf(left), leaf(right))


TP, DP, PP = Split("tp"), Split("dp"), Split("pp")
L = (Dim("l"),)
VOCAB = split(Pad(Dim("vocab"), times(128, "tp")), TP)
EACH = Flat(Each())

MODEL = [
    Dims(tuple(Binding(n, Number(v)) for n, v in [("l", 4), ("h", 8), ("vocab", 67), ("dense", 1)])),
    Tensor("attn.q", dims("l", "g", "r", "d", "h")),
    Tensor("moe.up", (Dimension("l", None, among(Name("dense"))), *dims("e", "f", "h"))),
    Tensor("first", (Dimension("l", None, among(None, Name("dense"))), *dims("h"))),
    Tensor("every.two", (Dimension("l", None, among(Number(1), None, Number(2))), *dims("h"))),
    Tensor("head", dims("vocab", "h"), when=Unary("not", Name("config.tie_word_embeddings"))),
    Tensor("router", dims("l", "e", "h"), "f32"),
    Tensor("blocks.0.attn.qkv.weight", (Dimension(None, 72), Dimension(None, 24))),
    Tensor("step", ()),
    Tensor("rope", dims("d"), "f32", "buffer"),
    Tensor("patch", dims("h"), None, "frozen", Name("vision")),
    Alias("lm_head.weight", "wte.weight"),
    Alias("head.copy", "head", Name("tied")),
    Group("decay", members=("attn.q", "blocks.0.attn.qkv.weight")),
    Group("nodecay", without=("decay",)),
    Group("late", members=("attn.q",), order="reversed"),
    Index("d", Stack((run(None, "two", "k"),))),
    Use(Call("vision", (Argument("h", Number(4)),)), "eye"),
    DefaultDtype("bf16"),
    State(("exp_avg", "exp_avg_sq"), "f32", False, ("decay", "nodecay")),
    State(
        ("delta",), "bf16", False, ("decay",), (TypedOf("f32", ("attn.q", "*.bias")), TypedOf("f16", ("wte.weight",)))
    ),
    State(("step",), "i64", True),
    State(("moment",), "f32", True, ("decay",)),
    Assert(Binary("==", Binary("%", Name("h"), Number(2)), Number(0)), "h = {h} is odd"),
]

LAYOUT = [
    Let((Binding("edp", Binary("/", times("dp", "tp"), Name("ep"))),)),
    Mesh("", ("pp", "dp", "tp")),
    Mesh("expert", ("pp", "edp", "ep")),
    Domain("node", "{pp}.{dp - dp % 2}"),
    Domain("process", "{rank}"),
    Index("l", split(Dim("l"), PP)),
    Index("k", split(Dim("l"), Split("pp", "sizes", (Name("stages"),)))),
    Index("m", Stack((Term(None, (Dim("lap"), split(Dim("stage"), PP), Dim("slot"))),))),
    Files("weights", "torch", "mp_rank_{tp:02}.pt", "model/{key}"),
    Files("none_of_it", None),
    Files("meta", "torch", "meta.pt", None, Binary("==", Name("pp"), Number(1))),
    Framework(Call("deepspeed", (
        Argument("stage", Number(1)), Argument("dp", Name("dp")), Argument("shard", Text("5GB")),
    ))),
    Entry("attn.qkv", L, (
        split(Stack((Term(None, (Dim("g"), Stack((run("q", "r", "d"), run("k", "d"), run("v", "d"))))),)), TP), Dim("h"),
    ), (called("layers.{l.local}.self_attention.linear_qkv.weight"),)),
    Entry("embed", (), (VOCAB, Dim("h")), (
        Clause("at", ("pp", Number(0))), called("embedding.word_embeddings.weight"),
    )),
    Entry("embed", (), (VOCAB, Dim("h")), (
        Clause("at", ("pp", Unary("-", Number(1)))), called("output_layer.weight"),
    )),
    Entry("ln1", L, axes("h"), (Clause("copies", ("mean", ("tp",))),)),
    Entry("moe.fc1", axes("l", "e"), (Stack((run("gate", "f"), run("up", "f"))), Dim("h")), (
        Clause("on", ("expert",)), Clause("in", ("experts",)),
    )),
    Entry("mlp.in", L, (Stack((
        Term("gate", (split(Dim("f"), Split("tp", "spread")),)), Term("up", (split(Dim("f"), Split("tp", "spread")),)),
    )), Dim("h"))),
    Entry("attn.q", L, (Stack((run(None, "g", "r", "k", "two"),)), Dim("h"))),
    Entry("ln", L, axes("h"), (Clause("value", (Binary("-", Name("x"), Number(1)),)),)),
    Entry("wq", (), (split(Dim("o"), TP, DP), Dim("i"))),
    Entry("uneven", (), (split(Dim("o"), Split("tp", "sizes", tuple(map(number, (7, 8, 8, 9))))), Dim("i"))),
    Entry("chunked", (), (
        split(Dim("o"), Split("tp", "chunk")), split(Dim("i"), Split("dp", "chunk", (), Number(2))),
    )),
    Entry("units", (), (split(Dim("o"), Split("tp", "spread", (), Name("d"))),)),
    Entry("rows", (), (split(Pad(Dim("vocab"), Number(128), "live"), TP), Dim("h"))),
    Entry("flatten", (), (Pad(Dim("vocab"), Number(128), "undefined"),)),
    Entry("parts", (), (Stack((
        Term(None, (split(Dim("d", among(None, Number(24))), TP),)),
        Term(None, (split(Dim("d", among(Number(24), Number(32))), TP),)),
        Term(None, (Dim("d", among(Number(32))),)),
    )), Dim("h"))),
    Entry("parts_of_any", (), (Stack((
        Term(None, (split(Any_(among(None, Name("n"))), TP),)), Term(None, (split(Any_(among(Name("n"))), TP),)),
    )), Any_())),
    Entry("scalar", (), ()),
    Entry("lossy_one", (), axes("h"), (Clause("dtype", ("bf16",)), Clause("lossy", ()))),
    Entry("gone", (), None),
    Entry("blocks.0.w", (), (split(Any_(), Split("dp", "chunk")), Rest()), (called("{name}"),)),
    Entry("*", (), (Rest(),), (called("{name}"),)),
    Entry("*", (), (Rest(),), (Clause("in", ("meta",)),), "buffer"),
    Group("decay", members=("mix", "wte", "attn.qkv", "mlp.in"), order=Name("dp")),
    Group("params", stated=("meta", "param_shapes")),
    Group("block", L, members=("attn.q", "mlp.in")),
    Group("rest", without=("decay", "params"), order="reversed"),
    Group("*", of_model=True, order=Number(2)),
    States(None, ("decay", "nodecay"), (split(Pad(EACH, times(2, "dp")), DP),), (
        Clause("in", ("optim",)), called("state/{bucket}/{state}"),
    )),
    States(("fp32",), ("decay",), (split(EACH, Split("dp", "chunk", (), Number(2))),), (Clause("in", ("optim",)),)),
    States(("exp_avg", "exp_avg_sq"), ("*",), (Flat(split(Pad(Each(), Name("dp")), DP)),), (
        Clause("in", ("optim",)), Clause("buckets", (Name("sub_group_size"),)),
    )),
    States(None, ("experts",), (Trim(Flat(Pad(Each(), Number(64)))),), (Clause("copies", ("any", ("dp", "tp"))),)),
    States(("weight",), None, "like"),
    States(("master",), None, None),
    Derive("weight", "fp32"),
    Derive("fp32", "weight", Binary("==", Name("stage"), Number(3))),
    Blob("rng", ("dp",), "keep", (Clause("in", ("meta",)), called("rng"))),
    Blob("step", (), "first"),
    Use(Call("hf_vision"), "eye", "vision_tower.{key}"),
]  # fmt: skip

STATEMENTS = [
    Import("gpt.ucpl", ("gpt", "vision")),
    None,  # the layout itself, below
    Plan(
        "grow",
        Call("megatron_zero1", (Argument("tp", Number(4)), Argument("dp", Number(8)))),
        Call("megatron_zero1", (Argument("tp", Number(2)), Argument("dp", Number(16)))),
    ),
    Plan(
        "slim",
        Call("zero1", (Argument(None, Number(2)),)),
        Call("plain"),
        ("exp_avg", "blocks.0.w", "head.*"),
        ("wte", "blocks.1.*"),
        (("ln", "decay"), ("b", "decay"), ("c", None)),
    ),
    Let((
        Binding("tp", Number(4)),
        Binding("twice", Binary("*", Unary("-", Name("tp")), Binary("+", Number(2), Number(1)))),
    )),
    Assert(Binary(
        "or",
        Binary("and", Binary("==", Binary("%", Name("tp"), Number(2)), Number(0)),
               Unary("not", Binary(">", Name("tp"), Number(8)))),
        Binary("==", Name("tp"), Number(16)),
    )),
]  # fmt: skip

model = read((EXAMPLES / "model.ucpl").read_text(), "model.ucpl").statements[0]
file = read((EXAMPLES / "layout.ucpl").read_text(), "layout.ucpl")
layout = file.statements[1]


def at(item) -> str:
    return f"line {item.span.line}"


def test_there_is_an_intended_record_for_every_line():
    assert len(model.items) == len(MODEL)
    assert len(layout.items) == len(LAYOUT)
    assert len(file.statements) == len(STATEMENTS)


@pytest.mark.parametrize(("found", "meant"), list(zip(model.items, MODEL, strict=False)), ids=map(at, model.items))
def test_a_line_of_a_model_is_the_record_that_is_meant(found, meant):
    assert found == meant


@pytest.mark.parametrize(("found", "meant"), list(zip(layout.items, LAYOUT, strict=False)), ids=map(at, layout.items))
def test_a_line_of_a_layout_is_the_record_that_is_meant(found, meant):
    assert found == meant


@pytest.mark.parametrize(
    ("found", "meant"), list(zip(file.statements[2:], STATEMENTS[2:], strict=False)), ids=map(at, file.statements[2:])
)
def test_a_statement_of_a_file_is_the_record_that_is_meant(found, meant):
    assert found == meant


def test_the_head_of_a_layout():
    assert file.statements[0] == STATEMENTS[0]
    assert (layout.name, layout.of) == ("ranks", "gpt")
    assert layout.parameters == (
        Parameter("tp"), Parameter("pp", Number(1)), Parameter("dp"), Parameter("stages", List((Number(7), Number(8)))),
    )  # fmt: skip
    assert layout.extends == Call("base", (Argument(None, Name("tp")), Argument(None, Number(1))))
    assert model.name == "gpt"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("zero1", Call("zero1")),
        ("zero1()", Call("zero1")),
        (" zero1(dp=8)\n", Call("zero1", (Argument("dp", Number(8)),))),
        ('safetensors(shard="5GB")', Call("safetensors", (Argument("shard", Text("5GB")),))),
        (
            "megatron(2, pp = [1, 2])",
            Call("megatron", (Argument(None, Number(2)), Argument("pp", List((Number(1), Number(2)))))),
        ),
    ],
)
def test_a_call_from_a_command_line(text, meant):
    assert parse_call(text) == meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("l.size + 1", Binary("+", Name("l.size"), Number(1))),
        ("tp + pp * size(tp)", Binary("+", Name("tp"), Binary("*", Name("pp"), Function("size", (Name("tp"),))))),
        ("a - b - c", Binary("-", Binary("-", Name("a"), Name("b")), Name("c"))),
        ("not a == b", Unary("not", Binary("==", Name("a"), Name("b")))),
        ("-a * b", Binary("*", Unary("-", Name("a")), Name("b"))),
        ("a or b and c", Binary("or", Name("a"), Binary("and", Name("b"), Name("c")))),
        ("default(config.head_dim, h / n)", Function(
            "default", (Name("config.head_dim"), Binary("/", Name("h"), Name("n"))))),
        (r'"a\"b\\\n\u{e9}"', Text('a"b\\\né')),
    ],
)  # fmt: skip
def test_an_expression(text, meant):
    assert parse_expr(text) == meant


# ---- traps that were met ---------------------------------------------------------------------------------------------


def only(*lines: str):
    return read("ucpl 1\nlayout x() of y {\n" + "\n".join(lines) + "\n}").statements[0].items


@pytest.mark.parametrize(
    "name", ["attn", "in_proj", "asx", "meanest", "flatten", "pad_token", "anyone", "of_x", "fileset"]
)
def test_names_may_start_like_words_of_the_language(name):
    assert only(f"  {name} = {name} h") == (Entry(name, (), axes(name, "h")),)


def test_a_policy_is_never_read_as_an_axis():
    assert only("ln = h mean @tp") == (Entry("ln", (), axes("h"), (Clause("copies", ("mean", ("tp",))),)),)


def test_a_line_that_starts_with_a_clause_continues_the_one_above():
    one = only('ln = h mean @tp at pp[-1] as "x"')
    assert one == only("ln = h  mean @tp", "   at pp[-1]", "", "   # in between", '   as "x"')
    assert len(one[0].clauses) == 3


@pytest.mark.parametrize(
    "word", ["value", "at", "on", "key", "mean", "order", "is", "lossy", "drop", "freeze", "train", "extends"]
)
def test_a_word_before_a_sign_that_only_follows_names_is_a_name(word):
    assert only("a = h", f"{word} = h", f"{word}[l] = h", f"{word}.w = h") == (
        Entry("a", (), axes("h")), Entry(word, (), axes("h")), Entry(word, L, axes("h")), Entry(f"{word}.w", (), axes("h")),
    )  # fmt: skip


def test_patterns_may_span_lines_inside_brackets_and_lists_after_commas():
    items = only("qkv = (q: r d  # queries", "  + k: d", "", "  + v: d) h", "group g = a, # one", "  b,", "  c")
    assert items == (
        Entry("qkv", (), (Stack((run("q", "r", "d"), run("k", "d"), run("v", "d"))), Dim("h"))),
        Group("g", members=("a", "b", "c")),
    )


@pytest.mark.parametrize(
    "text",
    ["ucpl 1", "ucpl 1\r\nlet a = 1\r\n", "# c\n\n  # d\nucpl 1\n\n\n\tlet a = 1  # e", "\n\nucpl 1\nlet a = 1 #"],
)
def test_blank_lines_comments_and_line_ends_do_not_matter(text):
    assert read(text).statements in ((), (Let((Binding("a", Number(1)),)),))


def test_a_quoted_name_is_the_same_name():
    assert only('"attn.q"[l] = "in" h in "file"') == (Entry("attn.q", L, axes("in", "h"), (Clause("in", ("file",)),)),)
    assert only('a = "_" _ ') == (Entry("a", (), (Dim("_"), Any_())),)


def test_spans_locate_a_record_and_do_not_take_part_in_comparison():
    text = 'ucpl 1\nlayout x() of y {\n  a[l] = (g (q: r + k))@tp h\n         as "x" when (1 + 2)\n}\n'
    entry = read(text, "x.ucpl").statements[0].items[0]

    def shown(record) -> str:
        span = record.span
        assert span.file == "x.ucpl"
        line = text.split("\n")[span.line - 1]
        assert line[span.column - 1 :].startswith(text[span.start : span.stop].split("\n")[0])
        return text[span.start : span.stop]

    assert shown(entry) == text[text.index("a[l]") : text.rindex("\n}")]
    cut, dim = entry.shape
    assert (shown(cut), shown(dim), shown(cut.axis)) == ("(g (q: r + k))@tp", "h", "(g (q: r + k))")
    assert [shown(c) for c in entry.clauses] == ['as "x"', "when (1 + 2)"]
    assert shown(entry.clauses[1].args[0]) == "(1 + 2)"
    assert shown(cut.splits[0]) == "@tp"
    assert shown(cut.axis.terms[0].axes[1].terms[0]) == "q: r"
    assert read(text.replace("  ", " ")) != read(text.replace("r", "s"))
    assert read(text.replace("  ", " "), "x.ucpl") == read(text, "x.ucpl")


def test_an_expression_inside_a_template_points_into_its_file():
    expr: Any = parse_expr("l + k", file="a.ucpl", line=7, column=20)
    assert (expr.span.file, expr.span.line, expr.span.column) == ("a.ucpl", 7, 20)
    assert (expr.right.span.line, expr.right.span.column) == (7, 24)
