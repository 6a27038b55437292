"""Complete error messages, each in a file next to its faulty text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ucpl.errors import Diagnostic, Label, UcplError, catalogue
from ucpl.errors.render import render_diagnostic, shorter
from ucpl.language import parse, parse_call, parse_expr
from ucpl.language.slips import HINTS

HERE = Path(__file__).parent
TEXTS = sorted((HERE / "errors").glob("*.ucpl"))
LIMITS = {"E010", "E011", "E012", "E013", "E014"}  # texts too large to be files: test_limits.py


def refusal(text: str, name: str = "<text>") -> UcplError:
    with pytest.raises(UcplError) as caught:
        parse(text, name)
    return caught.value


def message(path: Path) -> str:
    error = refusal(path.read_bytes().decode(), path.name)
    return "\n\n".join(render_diagnostic(d) for d in error.diagnostics) + "\n"


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_a_mistake_gets_its_message(path):
    """After a change that is meant: `python -m tests.language.test_errors`, and read the difference."""
    assert message(path) == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_every_message_belongs_to_a_text():
    assert {p.stem for p in (HERE / "errors").glob("*.txt")} == {p.stem for p in TEXTS}


def test_every_code_of_the_room_is_shown_by_a_text_and_no_other():
    shown = {code for path in TEXTS for code in re.findall(r"error\[(E\d+)\]", path.with_suffix(".txt").read_text())}
    own = {code for code in catalogue() if code < "E050"}
    assert shown | LIMITS == own
    source = "".join(p.read_text() for p in HERE.parents[1].joinpath("ucpl", "language").rglob("*.py"))
    assert set(re.findall(r'"(E\d{3})"', source)) == own


@pytest.mark.parametrize("hint", HINTS)
def test_every_text_that_makes_a_slip_gets_its_hint(hint):
    for text in HINTS[hint]:
        assert refusal(f"ucpl 1\n{text}").diagnostics[0].remedy == hint, text
        assert refusal(f"# first\n\nucpl 1\n\nlet a = 1\n{text}\n").diagnostics[0].remedy == hint, text


def test_a_slip_is_known_at_every_depth():
    for depth in range(1, 9):
        text = f"ucpl 1\nlayout x() of y {{\n  a = {'(b ' * depth}(q: g | k: d){')' * depth}\n}}"
        assert "`+`" in refusal(text).diagnostics[0].remedy


def test_a_message_points_into_the_file_of_a_template():
    with pytest.raises(UcplError) as caught:
        parse_expr("l + ;", file="a.ucpl", line=7, column=20)
    label = caught.value.diagnostics[0].labels[0]
    assert (label.file, label.line, label.column, label.source) == ("a.ucpl", 7, 24, None)


@pytest.mark.parametrize(
    "text", ["", "zero1(", "zero1(dp=8) x", "zero1 dp", "1", "zero1(dp==8)", "a() b()", "ucpl 1\nlet a = 1"]
)
def test_what_is_not_a_call_is_refused(text):
    with pytest.raises(UcplError) as caught:
        parse_call(text)
    assert caught.value.exit_status == 1
    assert caught.value.diagnostics[0].labels[0].file == "<call>"


@pytest.mark.parametrize("text", ["", "a b", "1 +", "(a", "a = b", "[1,", "not", "a\nb", "l; k"])
def test_what_is_not_an_expression_is_refused(text):
    with pytest.raises(UcplError):
        parse_expr(text)


def test_text_from_a_file_never_moves_the_cursor():
    hostile = "\x1b[2J\u202e\x07\r"
    label = Label(f"f{hostile}", f"t{hostile}", 3, 2, 4, f"s{hostile}s")
    data = Label(f"d{hostile}", where=f"w{hostile}")
    shown = render_diagnostic(Diagnostic("E001", hostile, (label, data), (hostile,), hostile))
    assert all(line.isprintable() for line in shown.split("\n"))


def test_a_name_of_any_length_is_shortened():
    """A file may contain names of any length.

    A message stays readable and keeps both ends of the name.
    """
    name = "begin" + "x" * 400_000 + "end"
    made = Diagnostic("E380", f"{name} is not there", (Label(name, name, where=name),), (name,), name)
    texts = [made.message, made.remedy, *made.notes, made.labels[0].file, made.labels[0].text, made.labels[0].where]
    assert all(len(text) <= 5000 and text.startswith("begin") and "end" in text[-20:] for text in texts)
    assert Diagnostic("E380", "y" * 4000).message == "y" * 4000


def test_a_place_in_data_has_no_line():
    labels = (Label("a/b.pt", "10 elements", where="module/wte"), Label("c.ucpl", "", 2, 3, 1, "  a = h"), Label("d"))
    shown = render_diagnostic(Diagnostic("E001", "sizes differ", labels, ("first\nsecond",), "look"))
    assert shown == (
        "error[E001]: sizes differ\n --> a/b.pt: module/wte: 10 elements\n --> c.ucpl:2:3\n  |\n2 |   a = h\n  |   ^\n"
        " --> d\n  = note: first\n    second\n  = help: look"
    )


def test_a_shorter_form_keeps_the_message_and_a_way_out():
    """Places go first, then notes, then clauses of the remedy."""
    labels = (Label("runs/a.pt", "not there"), Label("runs/b.pt", "dp is 4"))
    long = Diagnostic("E452", "a.pt is missing", labels, ("a note",), "Copy `x; y`; or leave it out. Or wait, or stop")
    forms = [render_diagnostic(one).split("\n", 1)[1].split("\n") for one in (long, *shorter(long))]
    places, note = [" --> runs/a.pt: not there", " --> runs/b.pt: dp is 4"], "  = note: a note"
    whole = "  = help: Copy `x; y`; or leave it out. Or wait, or stop"
    cut = [
        "  = help: Copy `x; y`; or leave it out. Or wait …",
        "  = help: Copy `x; y`; or leave it out …",
        "  = help: Copy `x; y` …",
    ]
    assert forms == [[*places, note, whole], [*places, note, whole], [note, whole], [whole], *([one] for one in cut)]


def test_lines_of_a_users_text_stay_in_each_form():
    own = Diagnostic(
        "E204", "3 does not divide", (Label("s.ucpl", "cut here", 2, 1, 1, "w = v@tp"),), ("a note",), "pad it"
    )
    assert {render_diagnostic(one) for one in shorter(own)} == {render_diagnostic(own)}


def test_colour_adds_nothing_but_colour():
    diagnostic = refusal("ucpl 1\nlet a = 1, a = 2").diagnostics[0]
    coloured = render_diagnostic(diagnostic, color=True)
    assert coloured != render_diagnostic(diagnostic)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render_diagnostic(diagnostic)


if __name__ == "__main__":
    for path in TEXTS:
        path.with_suffix(".txt").write_text(message(path), encoding="utf-8")
