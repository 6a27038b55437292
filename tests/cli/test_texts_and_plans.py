"""check, plan, roundtrip and the arguments that several verbs share.

The effect of each word, and the message without it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.command import FIXTURES, ROOT, good, ucpl
from tests.cli.fuzz import SPEC
from ucpl.cli.options import memory_of, sizes_of
from ucpl.errors import UcplError
from ucpl.planning.files import load_plan
from ucpl.texts import json_object

SOURCE = FIXTURES / "z1_dp4"


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.ucpl").write_text(SPEC)
    (tmp_path / "config.json").write_text('{"width": 8, "has_norm": true}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- check ---------------------------------------------------------------------------------------------------------


def test_check_reports_the_values_that_a_config_would_give(spec: Path) -> None:
    done = good("check", "own.ucpl")
    tried, drawn, remark, said = done.out.splitlines()
    assert tried.startswith("own.ucpl: cut holds at tp = 2; pp = 2; tp = 2, pp = 2, if ")
    (none,) = {text.partition(": there is no config")[0] for text in (drawn, remark)}
    assert none == "own.ucpl: `config.width` has no value"
    assert drawn.endswith("sizes are drawn. Give --config to check at yours"), "once, not for each layout"
    assert remark.endswith("give --config to check further"), "a plan is of the sizes that there are"
    assert said == "own.ucpl: good, except for unchecked parts (plan grow), 2 remarks; 1 model, 2 layouts, 1 plan"
    tried, said = good("check", "own.ucpl", "--config", "config.json").out.splitlines()
    assert tried.startswith("own.ucpl: cut holds at tp = 2")
    assert said == "own.ucpl: good; 1 model, 2 layouts, 1 plan"
    assert good("check", "own.ucpl", "--json").json["remarks"] == [drawn, remark]


def test_of_several_files_one_that_reads_the_config_is_enough(spec: Path) -> None:
    (spec / "plain.ucpl").write_text(SPEC.replace("config.width", "8").replace("config.has_norm", "1"))
    unread = "nothing here reads the config"
    assert f"plain.ucpl: {unread}" in good("check", "plain.ucpl", "--config", "config.json").out
    assert unread not in good("check", "plain.ucpl", "own.ucpl", "--config", "config.json").out


def test_check_says_of_a_layout_that_no_degree_tried_suits_it(spec: Path) -> None:
    text = SPEC.replace("  mesh pp tp\n", '  mesh pp tp\n  assert tp > 64, "many"\n')
    (spec / "own.ucpl").write_text(text.partition("plan ")[0])
    told = good("check", "own.ucpl", "--config", "config.json", "--json").json
    (remark,) = told["remarks"]
    assert remark.startswith("own.ucpl: cut is not checked further: at tp = 1, ")
    assert remark.endswith("Name one that holds: ucpl check 'own.ucpl:cut(tp = ..., pp = ...)'")
    assert told["unchecked"] == ["own.ucpl:cut"]
    assert (
        "own.ucpl: good, except for unchecked parts (cut), " in good("check", "own.ucpl", "--config", "config.json").out
    )
    (spec / "own.ucpl").write_text(SPEC.replace("-> cut(tp = 2)", "-> cut(tp = 2, pp = 0)"))
    done = ucpl("check", "own.ucpl", "--config", "config.json", "--json")
    assert done.status == 1 and done.json["diagnostics"], "a plan's own numbers are no try"


FOREIGN, INSIDE = '  framework hugging()\n  w = a  as "w"\n', '  w = a  as "w"\n  v = a  as "w/v"\n'


@pytest.mark.parametrize(
    ("verb", "code", "lines"),
    [("check", "E436", FOREIGN), ("roundtrip", "E436", FOREIGN), ("check", "E392", INSIDE)],
)
def test_a_finding_at_a_line_of_the_text_is_the_answer_no(verb: str, code: str, lines: str, tmp_path: Path) -> None:
    text = "ucpl 2\nmodel m {\n  dim a = 3\n  w, v : a\n}\nlayout x(tp = 2) of m {\n  mesh tp\n"
    (tmp_path / "own.ucpl").write_text(f'{text}  file weights = torch "{{tp}}"\n{lines}}}\n')
    done = ucpl(verb, str(tmp_path / "own.ucpl"))
    assert (done.status, done.err.partition("[")[2][:4]) == (1, code)
    assert ucpl(verb, f"{tmp_path / 'own.ucpl'}:x(tp = two)").status == 2, "the call's own fault"


def test_check_of_a_plan_knows_the_numbers_of_its_file_and_of_the_caller(spec: Path) -> None:
    (spec / "own.ucpl").write_text(
        SPEC.replace("let wide = 4", "let wide = 4, ranks = 2").replace("tp = 2)", "tp = ranks)")
    )
    assert ucpl("check", "own.ucpl", "--config", "config.json").status == 0
    assert ucpl("check", "own.ucpl", "--config", "config.json", "-D", "wide=8").status == 0
    assert ucpl("check", "own.ucpl", "--config", "config.json", "-D", "nosuch=8").status == 2


def test_check_of_several_files_finds_a_fault_once(spec: Path) -> None:
    broken = SPEC.replace('up   = l f h  as "up"', 'upp  = l f h  as "up"')
    broken += "layout again() of own extends whole() {\n}\n"
    (spec / "broken.ucpl").write_text(broken)
    (spec / "empty.ucpl").write_text("ucpl 2\n")
    done = ucpl("check", "own.ucpl", "broken.ucpl", "empty.ucpl", "--config", "config.json", "--json")
    assert done.status == 1 and not done.json["good"]
    assert len(done.json["diagnostics"]) == 1, done.json["diagnostics"]
    text = ucpl("check", "broken.ucpl", "empty.ucpl", "--config", "config.json")
    assert "empty.ucpl: good; nothing to resolve" in text.out and text.err.count("error[") == 1
    assert ucpl("check", "own.ucpl", "nowhere.ucpl", "--config", "config.json").status == 3


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("64M", 64 << 20),
        ("64 MiB", 64 << 20),
        ("1.5g", 3 << 29),
        ("2kb", 2048),
        ("1T", 1 << 40),
        ("1", 1),
    ],
)
def test_memory_is_a_number_with_a_unit(text: str, size: int) -> None:
    assert memory_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.0M", "0.5", "M", "1X", "-1M", "1e9", "²M", "9" * 400, "5000000T", "nan"])
def test_other_memory_is_refused(text: str) -> None:
    with pytest.raises(UcplError, match="E173"):
        memory_of(text)


def test_sizes_are_numbers_or_words() -> None:
    assert sizes_of(["a=5", "b=-7", "c=x", "d= 8 ", "e=1_000", "f=1.5", "g=a=b"]) == {
        "a": 5, "b": -7, "c": "x", "d": 8, "e": 1000, "f": "1.5", "g": "a=b",
    }  # fmt: skip
    assert type(sizes_of(["a=999999999999999999"])["a"]) is int


@pytest.mark.parametrize(
    "texts", [["a"], ["=5"], ["a="], ["1a=5"], ["a-b=5"], ["ä=5"], ["a=5", "a=6"], ["a=" + "1" * 19]]
)
def test_other_sizes_are_refused(texts: list[str]) -> None:
    with pytest.raises(UcplError, match="E177"):
        sizes_of(texts)


def test_numbers_of_a_config_that_are_no_sizes_are_no_whole_numbers() -> None:
    found = json_object('{"a": ' + "9" * 18 + ', "b": ' + "9" * 19 + ', "c": -' + "9" * 5000 + "}")
    assert found == {"a": 10**18 - 1, "b": 1e19, "c": float("-inf")}
    assert isinstance(found, dict) and type(found["b"]) is float
    assert json_object("[1]") == "no JSON object" and "Expecting" in str(json_object("{"))


def test_a_list_of_a_layout_is_the_same_in_every_round_trip(spec: Path) -> None:
    """Lists are no degrees: the call says them, and --degrees the rest."""
    text = """ucpl 1
model tables {
  dim t = 4, n = 6
  table : t n
}
layout owned(w, owner) of tables {
  mesh w
  file weights = torch "{w}.pt"
  table[t[where(owner, 0)]] = n  at w[0] as "{t}"
  table[t[where(owner, 1)]] = n  at w[1] as "{t}" when w > 1
  table[t[where(owner, 9)]] = n@w        as "{t}"
}
"""
    (spec / "tables.ucpl").write_text(text)
    done = good("roundtrip", "tables.ucpl:owned(owner = [9, 0, 9, 0])", "--degrees", "w=1,2,3")
    assert "owned(w = 1) -> owned(w = 2)" in done.out.replace(
        "owned(w = 2) -> owned(w = 1)", "owned(w = 1) -> owned(w = 2)"
    )
    refused = ucpl("roundtrip", "tables.ucpl:owned(w=2, owner=[9,0,9,0])")
    assert refused.status == 2
    assert "roundtrip 'tables.ucpl:owned(owner = [9, 0, 9, 0])' --degrees w=2,1" in refused.err
    assert "roundtrip tables.ucpl:owned --degrees tp=1,2" in ucpl("roundtrip", "tables.ucpl:owned(").err


def test_a_text_goes_where_it_can_or_nowhere(spec: Path) -> None:
    (spec / "locked").write_text("a file, no folder")
    assert ucpl("infer", SOURCE, "-o", "locked/x.ucpl").status == 4
    assert ucpl("infer", SOURCE, "-o", spec).status == 4
    assert sorted(p.name for p in spec.iterdir()) == ["config.json", "locked", "own.ucpl"]


# ---- plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        ["own.ucpl"],
        ["own.ucpl", "grow", "--from", "plain()"],
        ["own.ucpl", "grow", "--to", "plain()"],
        [],
        ["--from", "plain()"],
    ],
)
def test_a_plan_is_a_statement_or_two_layouts(line: list[str], spec: Path) -> None:
    done = ucpl("plan", *line)
    assert done.status == 2 and "error[E178]" in done.err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["run", "out.plan", "--from", "zero1(dp = 2)"], "--from 'zero1(dp = 2)' --to run -o out.plan"),
        (["run", "--to", "plain()"], "--from run --to 'plain()'"),
        (["run", "--to", "plain()", "-o", "x.plan"], "--from run --to 'plain()' -o x.plan"),
        (["a", "b", "--to", "plain()", "--from", "run"], "--from run --to 'plain()'"),
    ],
)
def test_words_next_to_the_sides_are_reported_with_what_was_meant(line: list[str], meant: str) -> None:
    done = ucpl("plan", *line)
    assert done.status == 2 and "` conflicts with --" in done.err and f"write ucpl plan {meant}\n" in done.err


def test_a_statement_is_what_its_layouts_are(spec: Path) -> None:
    plane = ("--config", "config.json", "--json")
    stated = good("plan", "own.ucpl", "grow", *plane).json["plan"]
    called = good("plan", "--from", "own.ucpl:whole()", "--to", "own.ucpl:cut(tp = 2)", *plane).json["plan"]
    assert stated["name"] == "grow" and called["name"] == "convert"
    assert {k: v for k, v in stated.items() if k != "name"} == {k: v for k, v in called.items() if k != "name"}


def test_what_a_statement_drops_and_what_the_caller_drops_is_dropped(spec: Path) -> None:
    less = "layout less() of own extends whole() {\n  up = none\n  norm = none\n}\n"
    less += "plan fewer = whole() -> less() drop up\n"
    more = SPEC.replace("  up   : l f h\n", "  up   : l f h\n  kept : h\n")
    more = more.replace('  up   = l f h  as "up"\n', '  up   = l f h  as "up"\n  kept = h  as "kept"\n')
    more = more.replace("  up[l] = ", '  kept = h  as "kept"\n  up[l] = ')
    (spec / "own.ucpl").write_text(more + less)
    line = ("plan", "own.ucpl", "fewer", "--config", "config.json")
    done = ucpl(*line)
    assert done.status == 1 and "norm" in done.err and "`up`" not in done.err
    made = good(*line, "--drop", "norm", "--json").json["plan"]
    assert {text.partition(":")[0] for text in made["dropped"]} == {"weight of up", "weight of norm"}


def test_a_rank_s_part_of_a_plan(spec: Path) -> None:
    line = ("plan", "--from", "own.ucpl:whole()", "--to", "own.ucpl:cut(tp = 2)", "--config", "config.json")
    shown = [text for text in good(*line, "--rank", "1").out.splitlines() if text.startswith("rank 1")]
    assert shown and all(" to stage_0_01.pt " in text for text in shown)
    assert any("up weight: " in text and "from whole.pt up[16..]" in text for text in shown), shown
    for rank in ("2", "-1"):
        done = ucpl(*line, "--rank", rank)
        assert done.status == 2 and f"--rank {rank}: cut(tp = 2, pp = 1) has ranks 0 to 1" in done.err


def test_a_plan_of_a_described_checkpoint(spec: Path) -> None:
    good("infer", SOURCE, "-o", "source.ucpl")
    made = good(
        "plan",
        "--from",
        "source.ucpl:stored()",
        "--checkpoint",
        SOURCE,
        "--to",
        "zero2(dp=2)",
        "--prove",
        "-o",
        "a.plan",
    )
    assert "written    a.plan" in made.out
    good("apply", "a.plan", SOURCE, "made")
    good("compare", SOURCE, "made")


# ---- roundtrip -----------------------------------------------------------------------------------------------------


def test_roundtrip_says_what_was_tried(spec: Path) -> None:
    done = good("roundtrip", "own.ucpl:cut", "--config", "config.json", "--examples", "3", "--seed", "5", "--json").json
    (layout,) = done["layouts"]
    assert done["good"] and layout["layout"] == "cut" and layout["tried"] and layout["elements"] > 0
    assert "cut" in good("roundtrip", "own.ucpl", "--config", "config.json", "--examples", "2").out


def test_roundtrip_takes_degrees(spec: Path) -> None:
    argv = ("roundtrip", "own.ucpl:cut", "--config", "config.json", "--examples", "2", "--json")
    (layout,) = good(*argv, "--degrees", "tp=2,4").json["layouts"]
    assert {"tp = 2", "tp = 4"} == {f"tp = {n}" for n in range(9) if f"tp = {n}" in str(layout["tried"])}
    assert ucpl(*argv, "--degrees", "tp").status == 2 and ucpl(*argv, "--degrees", "tp=2,x").status == 2


def test_roundtrip_names_an_element_that_does_not_come_back(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: object, **__: object) -> None:
        raise AssertionError("up[0, 1, 2] is up[0, 2, 1]")

    monkeypatch.setattr("ucpl.testing.roundtrip", differs)
    done = ucpl("roundtrip", "own.ucpl", "--json")
    assert done.status == 1 and done.json == {"good": False, "difference": "up[0, 1, 2] is up[0, 2, 1]"}


def test_roundtrip_of_sizes_that_no_degree_suits(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucpl.testing import Report

    nothing = Report("cut", (), ("cut(tp = 2)",), {}, 0)
    monkeypatch.setattr("ucpl.testing.roundtrip", lambda *_, **__: (nothing,))
    done = ucpl("roundtrip", "own.ucpl")
    assert done.status == 1 and "no pair of degrees suits the sizes" in done.out


def test_roundtrip_says_degrees_that_a_size_divides_by_where_sizes_are_numbers(tmp_path: Path) -> None:
    """`-D` would not help: the text has no size by name."""
    layout = 'layout x(tp) of m {\n  mesh tp\n  file weights = torch "{tp}"\n  w = _@tp _  as "w"\n}\n'
    text = "ucpl 1\nmodel m {\n  w : SIZE 5\n}\n" + layout
    (tmp_path / "a.ucpl").write_text(text.replace("SIZE", "11"))
    done = ucpl("roundtrip", tmp_path / "a.ucpl")
    assert done.status == 1 and "11 divides by 11, write --degrees tp=1,11; the text has its sizes as" in done.out
    assert "-D" not in done.out
    good("roundtrip", tmp_path / "a.ucpl", "--degrees", "tp=1,11")
    (tmp_path / "b.ucpl").write_text(text.replace("  w : SIZE", "  dim s = 11\n  w : s"))
    done = ucpl("roundtrip", tmp_path / "b.ucpl")
    assert done.status == 1 and "write --degrees tp=1,11, or give other sizes with -D" in done.out
    good("roundtrip", tmp_path / "b.ucpl", "-D", "s=12")


def test_roundtrip_of_one_degree_of_each_axis_says_which_to_give(spec: Path) -> None:
    argv = ("roundtrip", "own.ucpl:cut", "--config", "config.json", "--degrees", "tp=2", "--degrees", "pp=1")
    done = ucpl(*argv)
    assert done.status == 1
    assert "cut was tried at one degree of each axis alone" in done.out
    assert "write --degrees tp=1,2 --degrees pp=1" in done.out
    good(*argv[:4], "--degrees", "tp=1,2", "--degrees", "pp=1")


# ---- remarks of plan and convert, as of check --------------------------------------------------------------------------


def test_a_config_that_no_text_reads_is_reported(spec: Path) -> None:
    unread = "nothing here reads the config"
    line = ("plan", "--from", "own.ucpl:whole()", "--to", "own.ucpl:cut(tp = 2)", "--config", "config.json")
    assert unread not in good(*line).out
    (spec / "plain.ucpl").write_text(SPEC.replace("config.width", "8").replace("config.has_norm", "1"))
    said = good(*(text.replace("own", "plain") for text in line))
    assert f"remark     {unread}" in said.out
    good("infer", SOURCE, "-o", "source.ucpl")
    ours = ("--from", "source.ucpl:stored()", "--to", "source.ucpl:stored()", "--config", "config.json", "--dry-run")
    assert f"remark        {unread}" in good("convert", SOURCE, "made", *ours).out
    class_of = ("--to", "zero1(dp=2)", "--config", "config.json", "--dry-run")
    assert unread not in good("convert", SOURCE, "made", *class_of).out, "its class may be asked for ties and cuts"


def test_a_drop_of_a_state_that_the_target_stores_is_refused(spec: Path) -> None:
    line = ("plan", "--from", "own.ucpl:whole()", "--to", "own.ucpl:cut(tp = 2)", "--config", "config.json")
    assert "error[E327]: --drop weight: cut stores weight of each parameter" in ucpl(*line, "--drop", "weight").err
    (spec / "own.ucpl").write_text(SPEC.replace("-> cut(tp = 2)", "-> cut(tp = 2) drop weight"))
    for verb in (("plan", "own.ucpl", "grow"), ("check", "own.ucpl")):
        assert "error[E327]: drop weight: cut stores weight" in ucpl(*verb, "--config", "config.json").err


def test_a_rank_s_share_reports_what_it_reads(spec: Path) -> None:
    line = ("plan", "--from", "own.ucpl:whole()", "--to", "own.ucpl:cut(tp = 2)", "--config", "config.json")
    alone, beside = good(*line, "--rank", "1"), good(*line, "--rank", "1", "--prove")
    told = [text for text in alone.out.splitlines() if text.startswith("rank 1 ")]
    assert told and told == [text for text in beside.out.splitlines() if text.startswith("rank 1 ")]
    assert "reads      " in alone.out and "in 1 file" in alone.out and "\n\n" not in alone.out
    made = good(*line, "--rank", "1", "--json").json
    assert made["rank"] == 1 and made["plan"]["writes"] < good(*line, "--json").json["plan"]["writes"]


def test_a_rank_s_share_is_a_plan_to_look_at_and_not_to_run(spec: Path) -> None:
    line = ("plan", "--from", "own.ucpl:whole()", "--to", "own.ucpl:cut(tp = 2)", "--config", "config.json")
    good(*line, "-o", "whole.plan")
    for more in ((), ("--prove",)):
        printed = good(*line, "--rank", "1", "-o", "share.plan", *more).out
        assert "written    share.plan" in printed
        share, whole = load_plan(Path("share.plan")), load_plan(Path("whole.plan"))
        assert (share.rank, whole.rank) == (1, None)
        held = {(t.file, t.key) for t in share.targets}
        assert held == {(t.file, t.key) for t in whole.targets if t.file == "stage_0_01.pt"}
    shown = good("show", "share.plan").out
    assert "rank       1: its share alone" in shown
    assert next(text for text in shown.splitlines() if text.startswith("reads ")) in good(*line, "--rank", "1").out
    told = ucpl("diff", "whole.plan", "share.plan")
    assert told.status == 1 and "rank       all\n           1 alone\n" in told.out
    done = ucpl("apply", "share.plan", "whole.pt", "out")
    assert done.status == 5 and "error[E608]: the plan is the share of rank 1 alone" in done.err
    assert "without --rank" in done.err and not Path("out").exists()


@pytest.mark.parametrize(
    ("call", "files"), [("zero1(dp=3)", 4), ("dcp(fsdp=3)", None), ('safetensors(shard="9KB")', None)]
)
def test_files_are_counted_where_a_layout_names_them_alone(call: str, files: int | None) -> None:
    """A format with files of its own distributes tensors when it writes."""
    line = ("plan", "--from", FIXTURES / "z1_dp4", "--to", call)
    (writes,) = (text for text in good(*line).out.splitlines() if text.startswith("writes"))
    assert ("file" in writes) == (files is not None)
    cost = good(*line, "--json").json["cost"]
    assert cost["files_written"] == files and cost["files_read"] in (1, 5)  # weights alone are in one file


def test_a_fault_of_a_shipped_spec_is_the_calls_and_of_the_users_own_folder_is_its_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's `specs/gpt2.ucpl` has the name of a shipped one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"n_layer": 2, "n_embd": 16, "vocab_size": 7, "n_positions": 8, "n_head": 3}'
    )
    shipped = ucpl("plan", "--from", "gpt2.ucpl:hf", "--to", "gpt2.ucpl:hf", "--config", "config.json")
    (tmp_path / "specs").mkdir()
    shutil.copy(ROOT / "specs" / "gpt2.ucpl", tmp_path / "specs")
    own = ucpl("plan", "--from", "specs/gpt2.ucpl:hf", "--to", "specs/gpt2.ucpl:hf", "--config", "config.json")
    assert (shipped.status, own.status) == (2, 1)
    assert all("E108" in one.err and "--> specs/gpt2.ucpl:9:30" in one.err for one in (shipped, own))
