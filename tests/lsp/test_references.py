"""Uses of a name, and its new name.

`|` in a text is the cursor.
"""

from __future__ import annotations

import pytest

from tests.lsp.test_answers import CONFIG, LAYOUT, MODEL, PATH, WHOLE, service
from ucpl.lsp import Service
from ucpl.lsp.references import NotRenamed

# The text before the cursor, the lines of all uses, and a new name.
NAMES = {
    "a dim": ("dim l = 4, h", [6, 6, 7, 8, 9, 10, 18, 19, 19, 20, 25], "hidden"),
    "an index": ("  ln[l", [6, 7, 8, 9, 15, 15, 18, 18, 19, 19], "layer"),
    "an index at its rule": ("index l", [6, 7, 8, 9, 15, 15, 18, 18, 19, 19], "layer"),
    "a mesh axis": ("mesh pp tp", [13, 14, 16, 17, 19, 19, 24, 25], "tensor"),
    "a tensor": ("  head", [10, 20, 25], "lm_head"),
    "a tensor with labels": ("  attn.q", [8, 19], "attn.query"),
    "a file": ("file optim", [17], "states"),
    "a model": ("model gpt", [5, 13, 24], "small"),
    "a layout": ("layout parallel", [13, 24], "ranks"),
    "a name that needs quotes": ("  ln", [7, 18], "final-norm"),
}


def at(text: str, before: str, **others: str) -> tuple[Service, int]:
    """The cursor right behind the first such piece of text."""
    return service(text.replace(before, before + "|", 1), **others)


def after(made: Service, offset: int, new: str) -> str:
    edits = made.renamed(PATH, offset, new)
    text = made.texts.text(PATH) or ""
    for use, written in sorted(edits, key=lambda edit: -edit[0].start):
        text = text[: use.start] + written + text[use.stop :]
    return text


@pytest.mark.parametrize("case", NAMES)
def test_every_use_is_found(case: str) -> None:
    before, lines, _ = NAMES[case]
    made, offset = at(WHOLE, before, config=CONFIG)
    text = made.texts.text(PATH) or ""
    assert [text.count("\n", 0, use.start) + 1 for use in made.references(PATH, offset)] == lines


@pytest.mark.parametrize("case", NAMES)
def test_a_renamed_text_means_the_same(case: str) -> None:
    before, _, new = NAMES[case]
    made, offset = at(WHOLE, before, config=CONFIG)
    findings = [(one.code, one.rule, one.start[0]) for one in made.findings(PATH)]
    part = made.renamed_part(PATH, offset)
    assert part is not None
    old = WHOLE[part.start : part.stop]
    edits = [edit for edit in made.renamed(PATH, offset, new) if edit[0].start < part.start]
    moved = part.start + sum(len(written) - (use.stop - use.start) for use, written in edits)
    changed = after(made, offset, new)
    assert changed != WHOLE and changed.count("\n") == WHOLE.count("\n")
    made.put(PATH, changed)
    assert [(one.code, one.rule, one.start[0]) for one in made.findings(PATH)] == findings
    if case != "a mesh axis":  # the layout that extends this one has a `tp` of its own
        assert after(made, moved + 1, old) == WHOLE


def test_an_index_that_the_key_implies_is_renamed_in_the_key() -> None:
    text = WHOLE.replace("  ln[l] ", "  ln ")
    assert text != WHOLE
    made, offset = at(text, "index l", config=CONFIG)
    findings = [(one.code, one.rule) for one in made.findings(PATH)]
    line = text[: text.rindex("\n  ln ") + 1].count("\n") + 1
    assert line in [text.count("\n", 0, use.start) + 1 for use in made.references(PATH, offset)]
    changed = after(made, offset, "layer")
    assert "{layer" in changed.splitlines()[line - 1]
    made.put(PATH, changed)
    assert [(one.code, one.rule) for one in made.findings(PATH)] == findings


def test_a_name_is_renamed_in_the_files_that_import_it() -> None:
    text = 'ucpl 1\nfrom "gpt_model.ucpl" import gpt\n' + LAYOUT
    made, offset = at(text, "layout wide(tp) of gp", gpt_model=MODEL, config=CONFIG)
    edits = made.renamed(PATH, offset, "small")
    assert sorted(use.path for use, _ in edits) == [PATH, PATH, PATH, "/edited/gpt_model.ucpl"]
    assert {written for _, written in edits} == {"small"}


@pytest.mark.parametrize(
    ("before", "new", "why"),
    [
        ("dim l = 4, h", "f", "is a name here already"),
        ("dim l = 4, h", "mesh", "is a word of the language"),
        ("  attn.q", "query", "begins with `attn.`"),
        ('"layers.{l}.l', "x", "no name that can be renamed"),
        ("file weights", "main", "no name that can be renamed"),
        ("config.hidden", "x", "no name that can be renamed"),
    ],
)
def test_what_cannot_be_renamed_says_why(before: str, new: str, why: str) -> None:
    with pytest.raises(NotRenamed, match=why):
        after(*at(WHOLE, before, config=CONFIG), new)


def test_a_shipped_name_is_not_renamed() -> None:
    made, offset = at('ucpl 1\nfrom "zero.ucpl" import zero1\nplan p = zero', "plan p = zero")
    assert made.renamed_part(PATH, offset) is None


HANDED = """ucpl 2
model m {
  dim h = 4
  w : h
}
layout one(cut, file = "w") of m {
  mesh cut
  file weights = torch "{file}"
  w = h@cut  as "w"
}
layout two(cut, file = "v") of m extends one(cut = cut) {
}
"""


def test_a_parameter_that_extends_hands_on_keeps_its_name() -> None:
    """The base would have its default instead."""
    for before in ("one(cut, file", "two(cut, file"):
        with pytest.raises(NotRenamed, match="`two` hands `file` on"):
            after(*at(HANDED, before), "path")
    assert "extends one(cut = degree)" in after(*at(HANDED, "two(cut"), "degree")
