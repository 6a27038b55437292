"""Parse, resolve and type-check .ucpl files: every model, layout and plan of them. Exit 1 if anything is wrong.

A parameter without a default is tried at 1; a layout of any model, over the file's own model or a small one of ours. What only
a value can tell (an assert, a cut) is a remark where that value was a try, and an error where the file says it.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from ucpl.cli.console import diagnostic_object
from ucpl.cli.options import add_json, add_sizes, config_of, sizes_of
from ucpl.errors import Diagnostic, Exit, UcplError

if TYPE_CHECKING:
    from ucpl.cli.console import Console
    from ucpl.layout import Library
    from ucpl.layout.scope import Value
    from ucpl.syntax import nodes

EXAMPLE = "ucpl check model.ucpl\nucpl check model.ucpl --config config.json -D vocab=50257"

# Findings that hang on a number: with a number that was only tried, they say nothing of the file.
_OF_A_NUMBER = ("E108", "E140", "E141", "E143", "E144", "E160")
_NO_CONFIG = "E105"
_TRIAL = """ucpl 1
model trial {
  first : 6 4 dtype f32
  second : 5 dtype f32
  fixed : 7 dtype f32 is frozen
  table : 3 dtype f32 is buffer
  alias tied = first
  group "0" = first, second
  state fp32, exp_avg, exp_avg_sq : f32
  state step : f32 scalar
}
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE")
    add_sizes(parser)
    add_json(parser)


def run(options: Namespace, console: Console) -> int:
    sizes, config = sizes_of(options), config_of(options)
    checked = [_Checked(name, sizes, config) for name in options.files]
    for one in checked:
        one.run()
        for text in one.remarks:
            console.say(f"{one.name}: {text}")
        if one.findings:
            console.diagnostics(one.findings)
        else:
            console.say(f"{one.name}: good; {one.count()}")
    findings = [d for one in checked for d in one.findings]
    console.answer(
        {
            "good": not findings,
            "diagnostics": [diagnostic_object(d) for d in findings],
            "remarks": [f"{one.name}: {text}" for one in checked for text in one.remarks],
        }
    )
    # A file that cannot be read at all is no finding about its text.
    return UcplError(*findings).exit_status if findings else Exit.DONE


@define
class _Checked:
    name: str
    sizes: dict[str, Value]
    config: dict[str, Any] | None
    findings: list[Diagnostic] = field(factory=list)
    remarks: list[str] = field(factory=list)
    counts: dict[str, int] = field(factory=dict)

    def count(self) -> str:
        return ", ".join(f"{n} {word}{'s' if n > 1 else ''}" for word, n in self.counts.items()) or "nothing to resolve"

    def run(self) -> None:
        from ucpl.frontends.texts import read_text, text_at
        from ucpl.layout import load
        from ucpl.syntax import nodes

        try:
            library = load((self.name, read_text(Path(self.name))), read=text_at)
        except UcplError as error:
            self.findings += error.diagnostics
            return
        file = library.files[self.name]
        models = [s for s in file.statements if isinstance(s, nodes.Model)]
        for statement in file.statements:
            try:
                match statement:
                    case nodes.Model():
                        self._count("model")
                    case nodes.Layout():
                        self._count("layout")
                        self.layout(library, statement, models)
                    case nodes.Plan():
                        self._count("plan")
                        self.plan(library, statement, models)
            except UcplError as error:
                self.found(error)

    def _count(self, word: str) -> None:
        self.counts[word] = self.counts.get(word, 0) + 1

    def found(self, error: UcplError) -> None:
        """Each finding once: layouts that extend another find its faults again."""
        known = {(d.code, d.message, d.labels[:1]) for d in self.findings}
        for d in error.diagnostics:
            if d.code == _NO_CONFIG and self.config is None:
                text = f"{d.message}: give --config to check further"
                if text not in self.remarks:
                    self.remarks.append(text)
            elif (d.code, d.message, d.labels[:1]) not in known:
                self.findings.append(d)

    def layout(self, library: Library, node: nodes.Layout, models: list[nodes.Model]) -> None:
        from ucpl.syntax import nodes

        tried = [p.name for p in node.parameters if p.default is None]
        call = nodes.Call(node.name, tuple(nodes.Argument(p, nodes.Number(1)) for p in tried))
        try:
            self.located(library, call, models)
        except UcplError as error:
            code = error.diagnostics[0].code
            if not tried or not (code in _OF_A_NUMBER or code.startswith("E2")):
                raise
            said = ", ".join(f"{p} = 1" for p in tried)
            self.remarks.append(f"{node.name} is not checked further: at {said}, {error.diagnostics[0].message}")

    def plan(self, library: Library, node: nodes.Plan, models: list[nodes.Model]) -> None:
        from ucpl.api import closed_call

        for call in (node.source, node.target):
            self.located(library, closed_call(library.files[self.name], call, self.config, self.sizes), models)

    def located(self, library: Library, call: nodes.Call, models: list[nodes.Model]) -> None:
        """The layout, as rank 0 has it."""
        from ucpl.api import of_any
        from ucpl.layout import resolve
        from ucpl.regions import locate
        from ucpl.syntax import nodes, parse

        model: nodes.Model | None = None
        if of_any(library, call):
            trial = parse(_TRIAL, "<trial>").statements[0]
            assert isinstance(trial, nodes.Model)
            model = models[0] if models else trial
        locate(resolve(library, call, model=model, config=self.config, define_sizes=self.sizes), rank=0)
