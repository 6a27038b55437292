"""Mistakes that authors make, as data.

None passes in silence, and each message has its remedy.

`*.toml`: the table's name is the text's place in the frame below (`files`: alone). `says`: parts of the message;
`write`: a line that it offers, with which the same place is good; `code`, if the code matters. `lines.txt` has lines
that the parser refuses.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from attrs import frozen

from ucpl.conversion.checking import Checked, check
from ucpl.conversion.requests import Given
from ucpl.errors import Diagnostic, UcplError, catalogue
from ucpl.language import parse

HERE = Path(__file__).parent
FRAME = """ucpl 1
model m {
  dim l = 4, n = 4, g = 2, d = 4, h = 8, f = 6, v = 20, e = 4, tie = 0
  embed : v h
  "my-embed" : v h
  attn.q : l n d h
  attn.k : l g d h
  attn.v : l g d h
  ln : l h
  mlp.gate : f h
  mlp.up : f h
  gate : f h
  up : f h
  mlp.moe : l e f h
  norm : h
  MODEL
  state fp32, exp_avg, exp_avg_sq : f32
  state step : f32 scalar
}
layout x(tp = 2, pp = 2, dp = 2) of m {
  mesh pp dp tp
  file weights = torch "rank_{pp}_{dp}_{tp}.pt"
  file optim = torch "optim_{pp}_{dp}_{tp}.pt"
  LAYOUT
}
TOP
"""
PLACES = {"model": "  MODEL", "layout": "  LAYOUT", "top": "TOP"}
# Messages about the frame itself: its other tensors, and the names that it has for texts to use.
UNSAID = re.compile(
    r"no entry speaks of them|no line is in `file (weights|optim)` \(line 2\d\)|`dim (d|g|n|e|tie) = |has all of `l` of"
)
GENERAL = catalogue()["E001"].remedy


@frozen
class Mistake:
    place: str
    name: str
    text: str
    says: tuple[str, ...]
    write: str = ""
    code: str = ""
    config: str = ""  # a config.json, where one is given
    version: int = 1  # of the language
    line: int = 0  # of the text: the one that the message points at, where that is not the first

    @property
    def whole(self) -> str:
        return framed(self.place, self.text, self.version)


def framed(place: str, text: str, version: int = 1) -> str:
    if place == "files":
        return text
    out = FRAME.replace("ucpl 1", f"ucpl {version}")
    for one, mark in PLACES.items():
        out = out.replace(mark, text.strip("\n") if one == place else "")
    return out


def mistakes() -> list[Mistake]:
    return [
        Mistake(path.stem, name, row.pop("text"), tuple(row.pop("says", ())), **row)
        for path in sorted(HERE.glob("*.toml"))
        for name, row in tomllib.loads(path.read_text(encoding="utf-8")).items()
    ]


MISTAKES = mistakes()


SIGNS = {"t": "top", "m": "model", "l": "layout"}
LINES = [
    (SIGNS[line[0]], line[4:].rpartition("||")[0].strip(), line.rpartition("||")[2].strip())
    for line in (HERE / "lines.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def checked(mistake: Mistake, text: str, folder: Path) -> Checked:
    (folder / "x.ucpl").write_text(text, encoding="utf-8")
    config = json.loads(mistake.config) if mistake.config else None
    return check(str(folder / "x.ucpl"), Given(config=config))


def is_unsaid(mistake: Mistake, remark: str) -> bool:
    return mistake.place != "files" and UNSAID.search(remark) is not None


def told(finding: Diagnostic) -> str:
    return "\n".join([finding.message, *(label.text for label in finding.labels), *finding.notes, finding.remedy])


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.place}.{m.name}")
def test_a_mistake_is_reported_with_what_to_write_instead(mistake: Mistake, tmp_path: Path) -> None:
    found = checked(mistake, mistake.whole, tmp_path)
    sentence = "\n".join(
        [*map(told, found.findings), *(text for text in found.remarks if not is_unsaid(mistake, text))]
    )
    assert sentence, "it passes in silence"
    assert "internal" not in sentence and GENERAL not in sentence
    assert all(finding.remedy for finding in found.findings)
    assert [one for one in mistake.says if one not in sentence] == [], sentence
    if mistake.line:
        above = mistake.whole.split(mistake.text.strip("\n").split("\n")[0])[0].count("\n")
        assert found.findings[0].labels[0].line == above + mistake.line
    if mistake.code:
        assert mistake.code in {finding.code for finding in found.findings}
    if mistake.write:
        assert f"write: {mistake.write}".replace("\n", "\n       ") in sentence, sentence


@pytest.mark.parametrize(
    "mistake", [m for m in MISTAKES if m.write and m.place != "files"], ids=lambda m: f"{m.place}.{m.name}"
)
def test_what_is_offered_is_good_in_that_place(mistake: Mistake, tmp_path: Path) -> None:
    _, *rest = mistake.text.strip("\n").split("\n")
    fixed = "\n".join([mistake.write, *rest])
    assert checked(mistake, framed(mistake.place, fixed, mistake.version), tmp_path).findings == ()


@pytest.mark.parametrize(("place", "line", "write"), LINES, ids=lambda one: one.replace("/", "_") or "how")
def test_a_line_that_is_refused_has_its_remedy(place: str, line: str, write: str) -> None:
    text = framed(place, line)
    with pytest.raises(UcplError) as caught:
        parse(text)
    (found,) = caught.value.diagnostics
    place_of = framed(place, "HERE").split("\n").index("HERE") + 1
    assert found.labels[0].line in (place_of, place_of + 1)  # the line, or the one in which its bracket closes nothing
    assert found.remedy and found.remedy != GENERAL and found.code in catalogue()
    assert found.remedy.partition("\nwrite: ")[2].replace("\n       ", "\n") == write.replace("\\n", "\n")
    if write:
        try:
            parse(framed(place, write.replace("\\n", "\n")))
        except UcplError as error:
            assert error.diagnostics[0].code == "E008"  # the frame has a mesh and files of these names


def test_every_mistake_says_what_its_message_has() -> None:
    assert [m.name for m in MISTAKES if not (m.write or m.says)] == []
    assert len(MISTAKES) + len(LINES) >= 250
    assert all(m.code in catalogue() for m in MISTAKES if m.code)


def test_a_fault_of_a_base_is_found_once(tmp_path: Path) -> None:
    mistake = next(m for m in MISTAKES if m.name == "fault_of_a_base_said_once")
    assert len(checked(mistake, mistake.whole, tmp_path).findings) == 1


def test_a_key_that_an_error_names_has_no_remark(tmp_path: Path) -> None:
    mistake = next(m for m in MISTAKES if m.name == "forgotten_key_of_the_config")
    assert [text for text in checked(mistake, mistake.whole, tmp_path).remarks if "hiden_size" in text] == []


def test_the_frame_is_good(tmp_path: Path) -> None:
    frame = next(m for m in MISTAKES if m.place == "layout")
    found = checked(frame, framed("layout", ""), tmp_path)
    assert (found.findings, [text for text in found.remarks if not is_unsaid(frame, text)]) == ((), [])
