"""Rules of lint: ids, silencing comments, the page, and the shipped files."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.cli.command import ucpl
from ucpl.conversion.checking import check, check_text
from ucpl.conversion.requests import Given
from ucpl.lint.rules import RULES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "LINT.md"
SHIPPED = sorted((*(ROOT / "specs").glob("*.ucpl"), *(ROOT / "examples").rglob("*.ucpl")))
TEXT = """ucpl 2 {header}
model m {{
  dim h = 4
  w : h
}}
{above}
layout x(tp = 1) of m {{  {layout}
  mesh tp
  file weights = torch "{{tp}}.pt"
  {line_above}
  file optim = torch "o{{tp}}.pt"  {line}
  w = h as "w"
}}
"""
ALLOW = "# ucpl: allow unused-file"


def lints(**said: str) -> list[tuple[str, int]]:
    places = dict.fromkeys(("header", "above", "layout", "line_above", "line"), "")
    found = check_text("x.ucpl", TEXT.format(**{**places, **said}), Given(), lambda path: None)
    assert found.findings == ()
    return [(one.rule, one.line) for one in found.noted]


def test_a_remark_has_its_rule_and_its_line() -> None:
    assert lints() == [("unused-file", 11)]


@pytest.mark.parametrize("place", ["header", "above", "layout", "line_above", "line"])
def test_a_comment_silences_a_rule_at_each_place(place: str) -> None:
    assert lints(**{place: ALLOW}) == []
    assert lints(**{place: f"{ALLOW}, swappable-parts: another layout has its lines"}) == []
    assert lints(**{place: "# ucpl: allow swappable-parts"}) == [("unused-file", 11)]


def test_a_comment_above_another_line_silences_nothing() -> None:
    assert lints(line_above=f"{ALLOW}\n  let k = 1\n  assert k == tp or tp > 1") != []


def test_a_rule_that_does_not_exist_is_reported() -> None:
    assert lints(line="# ucpl: allow unused-files") == [("unused-file", 11), ("unknown-rule", 11)]


def test_check_prints_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.ucpl").write_text(TEXT.format(header="", above="", layout="", line_above="", line=""))
    assert "[unused-file]" in ucpl("check", "x.ucpl").out
    (lint,) = json.loads(ucpl("check", "x.ucpl", "--json").out)["lints"]
    assert (lint["file"], lint["line"], lint["rule"]) == ("x.ucpl", 11, "unused-file")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_raise_no_rule(path: Path) -> None:
    config = path.parent / "checkpoints" / path.stem / "config.json"
    given = Given(config=json.loads(config.read_text(encoding="utf-8"))) if config.exists() else Given()
    assert [str(one) for one in check(str(path), given).noted if one.rule not in ("", "unread-config")] == []


def test_each_rule_of_the_code_is_listed() -> None:
    used = set()
    for name in ("conversion/checking.py", "lint/unused_names.py", "lint/rules.py"):
        for node in ast.walk(ast.parse((ROOT / "ucpl" / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call | ast.Tuple | ast.Yield):
                used |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and n.value in RULES}
    assert used == set(RULES)
    checking = ast.parse((ROOT / "ucpl" / "conversion" / "checking.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(checking) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "lint"]
    assert {ast.literal_eval(one.args[0]) for one in calls} <= RULES.keys()


def page() -> str:
    rows = "\n".join(f"| `{rule}` | {text} |" for rule, text in RULES.items())
    return f"""# Rules of lint

`ucpl check` and the editor print a remark with the id of its rule, as `[unused-file]`. A remark is no error.
The exit status is 0.
`# ucpl: allow RULE: reason` silences a rule: at the end of a line or alone above it for that line, at the first line of a
model or layout for all of it, and at `ucpl 2` for the file. Several rules have commas between them.

| rule | remark |
|---|---|
{rows}

No rule finds these mistakes, since the text is as good as another one. `ucpl verify MINE --against GENUINE`, or `ucpl verify`
of a folder whose class transformers has, finds the first two and the last one:

- Two dims of one size that the model and all its layouts swap, of a tensor whose bias and siblings say nothing about it.
- Two tensors of one size with each other's keys, if no word of a key is a word of a name (`w1`, `w3`).
- A line without `at pp[0]`: it has copies on all stages. A tensor without `@tp` likewise.
- A `value`, `fill` or `dtype` with a wrong number or type that fits.
- A cut of heads (`(n d)@tp`) where each part is cut on its own, if the sizes divide alike.
"""


def test_the_page_lists_the_rules() -> None:
    """After a change: `python -m tests.lint.test_rules`."""
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")


@pytest.mark.parametrize(
    ("header", "remarks"), [("ucpl 1", 1), ("ucpl 1  # ucpl: allow old-version", 0), ("ucpl 2", 0)]
)
def test_a_file_in_an_older_version_has_one_remark(header: str, remarks: int, tmp_path: Path) -> None:
    spec = tmp_path / "x.ucpl"
    spec.write_text(f"# first\n{header}\nmodel m {{\n  w : 4\n}}\n")
    found = json.loads(ucpl("check", str(spec), "--json").out)
    assert [(one["rule"], one["line"]) for one in found["lints"]] == [("old-version", 2)] * remarks
    assert len(found["remarks"]) == remarks
