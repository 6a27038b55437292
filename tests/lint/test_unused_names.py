"""A used declaration gets no remark, for every kind of use.

Uses are a condition, a base, a template, another layout.
"""

from __future__ import annotations

import pytest

from ucpl.conversion.checking import check_text
from ucpl.conversion.requests import Given

MODEL = """
model m {
  dim l = 4, h = 8
  w : l h
  b : h
  state m : f32
}
"""


def remarks(text: str, others: dict[str, str] | None = None) -> tuple[str, ...]:
    found = check_text("x.ucpl", f"ucpl 1\n{text}", Given(), (others or {}).get)
    assert found.findings == ()
    return found.remarks


def layout(*lines: str) -> str:
    """A layout x of m with these lines, ended by `;`.

    Those that store tensors without a line come last.
    """
    said = "; ".join(lines).split("; ")
    rest = {"w = ": 'w = l h as "w"', "b = ": 'b = h as "b"', "state ": "state * = none"}
    said += [
        line
        for start, line in rest.items()
        if not any(one.startswith((start, start.replace(" ", "["))) for one in said)
    ]
    return (
        "\n  ".join([f"{MODEL}layout x(tp = 1) of m {{", "mesh tp", 'file weights = torch "{tp}.pt"', *said]) + "\n}\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        layout('file rest = torch "r{tp}.pt"; b = h in rest as "b" when tp > 7; b = h as "b"'),
        layout('file optim = torch "o{tp}.pt"; state * = like as "{name}"'),
        layout('file each = torch "{tp}/{name}.pt" key "param"; w = l h in each as "w"; b = h in each as "b"'),
        layout('file bare = torch "{tp}b.pt" key "b"; b = h in bare as ""'),
        layout('file one = torch "{tp}l.pt" key "layer{l}"; w[l] = h same @tp in one as "w"'),
        layout('index l = l@tp; w[l[..2]] = h as "w{l}"; w[l[2..]] = h as "v{l}"'),
        layout(
            'index l = l@tp; group g[l] = w; w[l] = h as "w{l}"; state * of g = flat(each) as "s{l}"',
            'group o = b; state * of o = like as "o"',
        ),
        layout('dim two = 2, k = 4; index h = (two k); w = l (k two) as "w"'),
        layout('mesh expert: ep; let ep = tp; file more = torch "{ep}.pt"; b = h in more as "b"'),
        layout('mesh expert: ep; let ep = tp; b = h@ep on expert as "b{ep}"'),
        layout('let a = 3; assert tp > 0, "not {a}"'),
        layout('let a = 8; b = pad(h, a) as "b"'),
        layout('let a = 8; b = h as "b{size(a)}"'),
        layout('file more = torch "m{tp}.pt"', "let a = 2")
        + 'layout y(tp = 2) of m extends x(tp = tp) {\n  b = h in more as "b{a}"\n}\n',
    ],
)
def test_what_is_used_is_not_remarked_on(text: str) -> None:
    assert remarks(text) == ()


def test_a_group_that_another_leaves_out_is_used() -> None:
    found = remarks(layout('group g = b; group rest = all - g; state * of rest = flat(each) as "s"'))
    assert [text.partition(":")[0] for text in found] == ["x stores no m of `b`"]


def test_a_text_that_others_import_declares_for_them() -> None:
    assert remarks("let a = 3\nmodel m {\n  dim h = 2, k = 3\n  w : h\n}") == ()
    assert remarks('from "y.ucpl" import a', {"y.ucpl": "ucpl 1\nmodel a {\n  dim h = 2, k = 3\n  w : h\n}"}) == ()


def test_what_a_layout_over_another_uses_is_used_there_alone() -> None:
    """A second layout over the same base leaves declarations unused."""
    base = layout('file more = torch "m{tp}.pt"')
    one = 'layout one(tp = 1) of m extends x(tp = tp) {\n  file more = torch "n{tp}.pt"\n}\n'
    two = 'layout two(tp = 1) of m extends x(tp = tp) {\n  b = h in more as "b"\n}\n'
    said = [text for text in remarks(base + one + two) if "no line is in" in text]
    assert [text.partition(":")[0] for text in said] == ["one"]


def test_a_section_of_the_config_is_used_by_its_keys() -> None:
    text = MODEL.replace("l = 4, h = 8", "l = 4, h = t.width").replace(
        "\nmodel", "\nlet t = config.text_config\nmodel", 1
    )
    text += 'layout x() of m {\n  file weights = torch "w.pt"\n  w = l h as "w"\n  b = h as "b"\n  state * = none\n}\n'
    found = check_text("x.ucpl", f"ucpl 1\n{text}", Given(config={"text_config": {"width": 8}}), lambda path: None)
    assert (found.findings, found.remarks) == ((), ())
