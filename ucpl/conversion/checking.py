"""Parse, resolve and type-check one .ucpl file: every model, layout and plan of it.

A parameter without a default is tried at 1; a layout of any model, over the file's own model or a small one of ours. What only
a value can tell (an assert, a cut) is a remark where that value was a try, and an error where the file says it.
"""

from __future__ import annotations

from pathlib import Path

from attrs import define, evolve, field, frozen

from ucpl.conversion.given import Called, Given
from ucpl.conversion.planning import closed_call
from ucpl.conversion.side import located
from ucpl.errors import Diagnostic, UcplError
from ucpl.layout import Library, load
from ucpl.syntax import nodes, parse
from ucpl.texts import read_text, text_at

__all__ = ["Checked", "check"]

# Findings that hang on a number: with a number that was only tried, they say nothing of the file.
_OF_A_NUMBER = ("E108", "E140", "E141", "E143", "E144", "E160")
_NO_CONFIG = "E105"
TRIAL = "<trial>"  # the name of no model that a text has
_TRIAL = f"""ucpl 1
model "{TRIAL}" {{
  first : 6 4 dtype f32
  second : 5 dtype f32
  fixed : 7 dtype f32 is frozen
  table : 3 dtype f32 is buffer
  alias tied = first
  group "0" = first, second
  state fp32, exp_avg, exp_avg_sq : f32
  state step : f32 scalar
}}
"""


@frozen
class Checked:
    """What was found in a file. `counts`: how many models, layouts and plans it has."""

    name: str
    findings: tuple[Diagnostic, ...]
    remarks: tuple[str, ...]
    counts: dict[str, int]


def check(name: str, given: Given) -> Checked:
    """Everything that is wrong with a file. A file that cannot be read is a finding, too."""
    try:
        library = load((name, read_text(Path(name))), read=text_at, keep=True)
    except UcplError as error:
        return Checked(name, error.diagnostics, (), {})
    file = library.files[name]
    models = [s for s in file.statements if isinstance(s, nodes.Model)]
    checker = _Checker(library, file, evolve(given, model=models[0] if models else _trial()))
    checker.run()
    return Checked(name, tuple(checker.findings), tuple(checker.remarks), checker.counts)


def _trial() -> nodes.Model:
    trial = parse(_TRIAL, "<trial>", keep=True).statements[0]
    assert isinstance(trial, nodes.Model)
    return trial


@define
class _Checker:
    library: Library
    file: nodes.File
    given: Given
    findings: list[Diagnostic] = field(factory=list)
    remarks: list[str] = field(factory=list)
    counts: dict[str, int] = field(factory=dict)

    def run(self) -> None:
        for statement in self.file.statements:
            try:
                match statement:
                    case nodes.Model():
                        self.count("model")
                    case nodes.Layout():
                        self.count("layout")
                        self.layout(statement)
                    case nodes.Plan():
                        self.count("plan")
                        self.plan(statement)
            except UcplError as error:
                self.found(error)

    def count(self, word: str) -> None:
        self.counts[word] = self.counts.get(word, 0) + 1

    def found(self, error: UcplError) -> None:
        """Each finding once: layouts that extend another find its faults again."""
        known = {(d.code, d.message, d.labels[:1]) for d in self.findings}
        for d in error.diagnostics:
            if d.code == _NO_CONFIG and self.given.config is None:
                text = f"{d.message}: give --config to check further"
                if text not in self.remarks:
                    self.remarks.append(text)
            elif (d.code, d.message, d.labels[:1]) not in known:
                self.findings.append(d)

    def layout(self, node: nodes.Layout) -> None:
        tried = [p.name for p in node.parameters if p.default is None]
        call = nodes.Call(node.name, tuple(nodes.Argument(p, nodes.Number(1)) for p in tried))
        try:
            self.located(call)
        except UcplError as error:
            code = error.diagnostics[0].code
            if not tried or not (code in _OF_A_NUMBER or code.startswith("E2")):
                raise
            said = ", ".join(f"{p} = 1" for p in tried)
            self.remarks.append(f"{node.name} is not checked further: at {said}, {error.diagnostics[0].message}")

    def plan(self, node: nodes.Plan) -> None:
        for call in (node.source, node.target):
            self.located(closed_call(self.file, call, self.given))

    def located(self, call: nodes.Call) -> None:
        """The layout, as rank 0 has it. A glob that matches nothing of the file's own model is a remark."""
        side = located(Called(self.library, call), self.given, rank=0)
        if self.given.model is not None and self.given.model.name != TRIAL:
            self.remarks += [
                f"{side.layout.name}: {taken.glob} matches no tensor of {self.given.model.name}"
                for taken in side.layout.taken
                if not taken.names
            ]
