"""The answers for an editor at a place.

`|` in a text is the cursor; it is taken out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ucpl.lsp import Service
from ucpl.lsp.findings import Finding
from ucpl.lsp.words import FUNCTIONS, WORDS
from ucpl.resources import spec_files

MODEL = """ucpl 2

let heads = 8

model gpt {
  dim l = 4, h = config.hidden_size, f = 4 * h
  ln     : l h
  attn.q : l h f
  attn.k : l h f
  head   : h
}
"""
LAYOUT = """
layout parallel(tp, pp = 1) of gpt {
  mesh pp tp
  index l = l@pp
  file weights = torch "rank_{tp}_{pp}.pt"
  file optim   = torch "optim_{tp}.pt"
  ln[l]      = h  as "layers.{l}.ln"
  attn.qk[l] = (q: h@tp + k: h@tp) f  as "layers.{l}.qk"
  head       = h
      in weights as "head"
}

layout wide(tp) of gpt extends parallel(tp = tp) {
  head = h@tp  as "head"
}
"""
CONFIG = '{"hidden_size": 64, "vocab_size": 100, "rope": {"theta": 5, "kind": "x"}}'
PATH = "/edited/gpt.ucpl"


def service(text: str, *, config: str | None = None, **others: str) -> tuple[Service, int]:
    """Open a text without its cursor mark; return the cursor's place."""
    made = Service()
    for name, other in others.items():
        made.put(f"/edited/{name}.ucpl", other)
    if config is not None:
        made.put("/edited/config.json", config)
    offset = text.find("|")
    made.put(PATH, text.replace("|", "", 1) if offset >= 0 else text)
    return made, offset


def at(text: str, before: str, **others: str) -> tuple[Service, int]:
    """The cursor right behind a piece of text that occurs once."""
    assert text.count(before) == 1, before
    return service(text.replace(before, before + "|"), **others)


def labels(text: str, **others: str) -> list[str]:
    made, offset = service(text, **others)
    return [c.label for c in made.completions(PATH, offset)]


def target(made: Service, offset: int) -> list[tuple[str, str, int]]:
    """File, text and line of each definition."""
    found = []
    for one in made.targets(PATH, offset):
        text = made.texts.text(one.path) or ""
        found.append((Path(one.path).name, text[one.start : one.stop], text.count("\n", 0, one.start) + 1))
    return found


# ---- where a name is defined -----------------------------------------------------------------------------------------

WHOLE = MODEL + LAYOUT
DEFINED = {
    "a dim of a tensor": ("ln     : l h", ("gpt.ucpl", "h", 6)),
    "a dim of an entry": ("head = h", ("gpt.ucpl", "h", 6)),
    "an index in brackets": ("  ln[l", ("gpt.ucpl", "l", 6)),
    "a label beside the entry": ("(q", ("gpt.ucpl", "attn.q", 8)),
    "a mesh axis": ("(q: h@t", ("gpt.ucpl", "tp", 14)),
    "a mesh axis in a template": ("rank_{t", ("gpt.ucpl", "tp", 14)),
    "a file": ("in weigh", ("gpt.ucpl", "weights", 16)),
    "a model": ("layout wide(tp) of gp", ("gpt.ucpl", "gpt", 5)),
    "a layout": ("extends para", ("gpt.ucpl", "parallel", 13)),
    "a parameter": ("parallel(tp = t", ("gpt.ucpl", "tp", 24)),
    "a number": ("f = 4 * h", ("gpt.ucpl", "h", 6)),
}


@pytest.mark.parametrize("case", DEFINED)
def test_a_name_leads_to_its_definition(case: str) -> None:
    before, wanted = DEFINED[case]
    assert target(*at(WHOLE, before)) == [wanted]


def test_an_entry_leads_to_its_tensor_and_an_argument_to_its_parameter() -> None:
    made, offset = service(WHOLE.replace("  ln[l]", "  l|n[l]"))
    assert target(made, offset) == [("gpt.ucpl", "ln", 7)]
    made, offset = service(WHOLE.replace("parallel(tp = tp)", "parallel(t|p = tp)"))
    assert target(made, offset) == [("gpt.ucpl", "tp", 13)]


def test_a_key_and_a_message_lead_nowhere() -> None:
    assert target(*at(WHOLE, '"layers.{l}.l')) == []
    assert target(*at(WHOLE, 'in weights as "he')) == []


def test_names_of_other_files_are_found_saved_or_not() -> None:
    other = 'ucpl 1\nfrom "gpt_model.ucpl" import gpt\n' + LAYOUT.replace("of gpt", "of gpt", 1)
    made, offset = at(other, "layout parallel(tp, pp = 1) of gp", gpt_model=MODEL)
    assert target(made, offset) == [("gpt_model.ucpl", "gpt", 5)]
    made, offset = at(other, 'from "gpt_mod', gpt_model=MODEL)
    assert [Path(t.path).name for t in made.targets(PATH, offset)] == ["gpt_model.ucpl"]
    made, offset = at(other, "import gp", gpt_model=MODEL)
    assert target(made, offset) == [("gpt_model.ucpl", "gpt", 5)]
    made, offset = at(other, "index l = l", gpt_model=MODEL)
    assert target(made, offset) == [("gpt_model.ucpl", "l", 6)]


def test_shipped_layouts_are_found_where_they_are() -> None:
    text = "ucpl 1\nlayout mine(dp) of any extends zero1|(dp = dp) {\n  file weights = none\n}\n"
    made, offset = service(text)
    (found,) = made.targets(PATH, offset)
    path = dict(spec_files())["deepspeed.ucpl"]
    assert Path(found.path) == path
    assert path.read_text(encoding="utf-8")[found.start : found.stop] == "zero1"


def test_a_used_models_names_are_known_under_their_prefix() -> None:
    text = "ucpl 1\nmodel eye {\n  dim p = 3\n  patch : p\n}\nmodel all {\n  use eye() as e\n}\n"
    text += "layout x() of all {\n  e.pa|tch = e.p\n}\n"
    made, offset = service(text)
    assert target(made, offset) == [("gpt.ucpl", "patch", 4)]


def test_a_key_of_the_config_leads_into_it() -> None:
    made, offset = at(WHOLE, "config.hid", config=CONFIG)
    assert target(made, offset) == [("config.json", '"hidden_size"', 1)]


@pytest.mark.parametrize(("key", "line"), [("config.inner.h|", 4), ("config.h|", 2), ("config.inner.x|", None)])
def test_a_key_inside_another_is_found_behind_it(key: str, line: int | None) -> None:
    text = f"ucpl 1\nmodel m {{\n  dim a = {key}\n  w : a\n}}\n"
    made, offset = service(text, config='{\n  "h": 1,\n  "inner": {\n    "h": 2\n  }\n}\n')
    assert [place[2] for place in target(made, offset)] == ([line] if line is not None else [])


# ---- hovers --------------------------------------------------------------------------------------------------------


def shown(before: str, text: str = WHOLE, config: str | None = CONFIG) -> str:
    made, offset = at(text, before, **({"config": config} if config is not None else {}))
    found = made.hover(PATH, offset)
    assert found is not None
    return found.text


def test_a_dim_has_its_size_and_where_it_is_from() -> None:
    text = shown("ln     : l h")
    assert "dim l = 4, h = config.hidden_size, f = 4 * h" in text
    assert "dim `h` = **64**, with /edited/config.json" in text
    assert "has no value: there is no config.json" in shown("ln     : l h", config=None)


def test_a_tensor_has_its_size_and_what_a_rank_holds_in_each_layout() -> None:
    text = shown("  attn.k : l h f\n  hea")
    assert "h 64 = **64** elements" in text
    assert "| `parallel(tp = 2, pp = 2)` of 4 ranks | all of it | [64] `rank_0_0.pt: head` |" in text
    assert "| `wide(tp = 2)` of 2 ranks | 32 elements | [32] `rank_0_0.pt: head` |" in text


def test_an_entry_says_what_a_rank_holds_of_it() -> None:
    text = shown("  ln     : l h\n  attn")  # of the model: a part of the fused tensor
    assert (
        "| `parallel(tp = 2, pp = 2)` of 4 ranks | 16,384 elements | 2 × [64, 256] `rank_0_0.pt: layers.0.qk` … |"
        in text
    )
    made, offset = service(WHOLE.replace("attn.qk[l]", "attn.q|k[l]"), config=CONFIG)
    found = made.hover(PATH, offset)
    assert found is not None and "32,768 elements | 2 × [64, 256]" in found.text


def test_the_least_degree_is_one_that_divides() -> None:
    odd = CONFIG.replace("64", "9")
    assert "`wide(tp = 3)` of 3 ranks | 3 elements | [3]" in shown("  attn.k : l h f\n  hea", config=odd)


def test_a_mesh_axis_and_a_key_of_the_config_have_values() -> None:
    assert "mesh axis `tp` = **2**, in parallel(tp = 2, pp = 2)" in shown("(q: h@t")
    assert "`config.hidden_size` = `64`" in shown("config.hid")
    assert "index `l` = **4**" in shown("index l").replace("dim `l`", "index `l`")


def test_a_model_without_a_layout_has_sizes_too_and_those_of_its_base() -> None:
    base = "ucpl 1\nmodel small(n = 3) {\n  dim h = 2 * n\n  w : h\n}\n"
    assert "dim `h` = **6**" in shown("  w : h", text=base, config=None)
    assert "h 6 = **6** elements" in shown("  w", text=base, config=None)
    more = base + "model large(m = 5) extends small(n = m) {\n  v : h\n}\n"
    assert "dim `h` = **10**" in shown("  v : h", text=more, config=None)
    needs = base.replace("n = 3", "n")
    assert "`h` has no value" in shown("  w : h", text=needs, config=None)


def test_a_word_says_what_it_is_for() -> None:
    assert shown("in weights a", config=None).startswith("**as**: the key in the file")


def test_sizes_are_known_while_another_line_is_wrong() -> None:
    broken = WHOLE.replace("  head = h@tp", "  head = h@@tp")
    assert "dim `h` = **64**" in shown("ln     : l h", text=broken)


def test_what_is_reported_of_words_is_reported_of_words_of_the_language() -> None:
    from editors.textmate import keywords
    from ucpl.layout.arithmetic import FUNCTIONS as known

    assert set(WORDS) - keywords() == set() and set(FUNCTIONS) - set(known) == set()
    assert len(set(WORDS) & keywords()) > 50


# ---- completions ----------------------------------------------------------------------------------------------------


def test_after_a_cut_stand_the_axes_of_the_mesh() -> None:
    assert labels(WHOLE.replace("head = h@tp", "head = h@|"))[:2] == ["pp", "tp"]
    assert {"chunk", "spread"} <= set(labels(WHOLE.replace("head = h@tp", "head = h@|")))
    assert labels(WHOLE.replace("head = h@tp", "head = h@chunk(|"))[:2] == ["pp", "tp"]


def test_in_a_pattern_stand_the_dims_of_the_tensor_that_are_left() -> None:
    found = labels(WHOLE.replace("ln[l]      = h", "ln[l]      = |"))
    assert found[0] == "h" and "l" not in found and {"pad", "flat", "none"} <= set(found)
    assert "as" not in found
    found = labels(WHOLE.replace("ln[l]      = h  as", "ln[l]      = h  |as"))
    assert {"as", "in", "at", "dtype", "when", "mean"} <= set(found)
    assert "q:" in labels(WHOLE.replace("(q: h@tp", "(|"))


def test_a_new_line_has_tensors_that_are_not_stored_and_words() -> None:
    found = labels(WHOLE.replace("  head       = h\n      in weights as", "  |\n  gone = h in weights as"))
    assert found[:3] == ["attn.q", "attn.k", "head"]
    assert {"mesh", "file", "state"} <= set(found)
    found = labels(WHOLE.replace('as "layers.{l}.ln"\n', 'as "layers.{l}.ln"\n      |\n'))
    assert {"when", "in"} <= set(found) and "as" in found


def test_config_keys_come_from_the_config() -> None:
    text = WHOLE.replace("config.hidden_size", "config.|")
    assert labels(text, config=CONFIG) == ["config.hidden_size", "config.vocab_size", "config.rope"]
    assert labels(WHOLE.replace("config.hidden_size", "config.rope.|"), config=CONFIG) == [
        "config.rope.theta",
        "config.rope.kind",
    ]
    assert labels(text) == []
    made, offset = service(text)
    made.put("/elsewhere/c.json", '{"a": 1}')
    made.configure("/elsewhere/c.json")
    assert [c.label for c in made.completions(PATH, offset)] == ["config.a"]


def test_layouts_models_files_and_arguments_are_proposed_where_they_stand() -> None:
    assert {"parallel", "zero1"} <= set(labels(WHOLE.replace("extends parallel", "extends |")))
    of_mine = WHOLE.replace("model gpt", "model mine").replace(
        " of gpt", " of mine"
    )  # a layout that ships is called gpt
    assert "mine" not in labels(of_mine.replace("extends parallel", "extends |"))
    assert labels(WHOLE.replace("wide(tp) of gpt", "wide(tp) of |"))[:2] == ["gpt", "any"]
    assert labels(WHOLE.replace("in weights", "in |"))[:2] == ["weights", "optim"]
    assert labels(WHOLE.replace("extends parallel(tp = tp)", "extends parallel(|)"))[:2] == ["tp = ", "pp = "]
    assert {"f32", "bf16"} <= set(labels(WHOLE.replace("ln     : l h", "ln     : l h dtype |")))
    assert labels(WHOLE.replace("ln     : l h", "ln     : l h is |")) == ["buffer", "frozen", "scale"]


def test_in_braces_of_a_template_stand_coordinates_and_indices() -> None:
    found = labels(WHOLE.replace('"layers.{l}.ln"', '"layers.{|}.ln"'))
    assert {"l", "tp", "pp", "rank", "name"} <= set(found)
    assert labels(WHOLE.replace('"layers.{l}.ln"', '"lay|ers.{l}.ln"')) == []


def test_a_proposal_replaces_what_is_typed_and_quotes_what_needs_it() -> None:
    text = 'ucpl 1\nmodel m {\n  "a.0.w" : h\n}\nlayout x() of m {\n  |\n}\n'
    made, offset = service(text)
    found = next(c for c in made.completions(PATH, offset) if c.label == "a.0.w")
    assert found.text == '"a.0.w"'
    made, offset = service(WHOLE.replace("in weights", "in wei|ghts"))
    one = made.completions(PATH, offset)[0]
    assert (made.texts.text(PATH) or "")[one.start : one.stop] == "weights"


def test_nothing_is_proposed_in_a_comment() -> None:
    assert labels(WHOLE.replace("  mesh pp tp", "  mesh pp tp  # the |")) == []


# ---- diagnostics ----------------------------------------------------------------------------------------------------


def wrong(text: str, **others: str) -> list[Finding]:
    made, _ = service(text, **others)
    return made.findings(PATH)


def test_a_text_without_faults_has_none() -> None:
    assert [f for f in wrong(WHOLE, config=CONFIG) if f.code] == []


def test_every_statement_that_is_wrong_alone_is_found() -> None:
    text = (
        WHOLE.replace("attn.k : l h f", "attn.k = l h f")
        .replace("head = h@tp", "head = h@4")
        .replace("mesh pp tp", "mesh pp,tp")
    )
    found = wrong(text)
    lines = [text.split("\n")[f.start[0]].strip() for f in found]
    assert lines == ["attn.k = l h f", "mesh pp,tp", 'head = h@4  as "head"']
    assert all("help: " in f.message for f in found)
    start, stop = found[0].start, found[0].stop
    assert text.split("\n")[start[0]][start[1] : stop[1]] == "="


def test_names_and_numbers_are_checked_once_the_text_is_right() -> None:
    (found,) = [f for f in wrong(WHOLE.replace("@tp + k: h@tp", "@tp + k: h@tq"), config=CONFIG) if f.code]
    assert found.code.startswith("E1") and "tq" in found.message and "help: " in found.message


def test_the_second_place_is_reported_too() -> None:
    (found,) = wrong(WHOLE.replace("  head   : h", "  head   : h\n  head   : l"))
    assert found.code == "E008"
    (other,) = found.related
    assert (other.path, other.start[0]) == (PATH, 9) and "first defined here" in other.message


def test_what_is_wrong_in_an_imported_text_is_shown_at_the_import() -> None:
    other = 'ucpl 1\nfrom "gpt_model.ucpl" import gpt\n' + LAYOUT
    assert [f for f in wrong(other, gpt_model=MODEL, config=CONFIG) if f.code] == []
    (found,) = wrong(other, gpt_model=MODEL.replace("head   : h", "head   = h"))
    assert found.start == (1, 5) and found.related[0].path == "/edited/gpt_model.ucpl"
    assert found.related[0].start[0] == 9


def test_a_remark_has_no_code() -> None:
    said = wrong(WHOLE)
    assert {f.code for f in said} == {""} and "Give --config" in said[0].message


def test_a_remark_about_a_line_is_shown_there() -> None:
    spec = "ucpl 2\nmodel m {\n  w : 4\n}\nlayout x() of m {\n"
    spec += '  file weights = torch "a"\n  file more = torch "b"\n  w = _ as "w"\n}\n'
    (found,) = wrong(spec)
    assert "no line is in `file more`" in found.message
    assert (found.start, found.stop) == ((6, 2), (6, 23))


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_symbols_are_models_and_layouts_with_what_they_define() -> None:
    made, _ = service(WHOLE)
    found = made.symbols(PATH)
    assert [(s.kind, s.name) for s in found] == [
        ("let", "heads"),
        ("model", "gpt"),
        ("layout", "parallel"),
        ("layout", "wide"),
    ]
    assert [s.name for s in found[1].children if s.kind == "tensor"] == ["ln", "attn.q", "attn.k", "head"]


def test_formatting_is_fmt_and_touches_only_what_changes() -> None:
    from ucpl.language import format_text

    text = MODEL.replace("  head   : h", "  head : h")
    made, _ = service(text)
    (edit,) = made.formatting(PATH)
    lines = text.split("\n")
    lines[edit.first : edit.last] = edit.text.split("\n")[:-1]
    assert "\n".join(lines) == format_text(text) == MODEL
    assert (edit.first, edit.last) == (9, 10)
    assert service(MODEL)[0].formatting(PATH) == []
    assert service(MODEL + "model {")[0].formatting(PATH) == []


def test_a_text_that_is_closed_counts_as_it_is_on_the_disk(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ucpl")
    Path(path).write_text(MODEL)
    made = Service()
    assert [s.name for s in made.symbols(path)] == ["heads", "gpt"]
    made.put(path, "ucpl 1\n")
    assert made.symbols(path) == []
    made.put(path, None)
    assert [s.name for s in made.symbols(path)] == ["heads", "gpt"]
