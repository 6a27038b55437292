"""Records of a request: a layout by its call, and further options."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attrs import evolve, field

from ucpl.errors import Diagnostic, Label, UcplError, fail
from ucpl.records import define, frozen
from ucpl.registry import Format, format_of_layout
from ucpl.texts import json_object, read_text

if TYPE_CHECKING:
    from ucpl.language import nodes
    from ucpl.layout import Library
    from ucpl.layout.entries import Kin
    from ucpl.layout.scope import Value
    from ucpl.texts import Json

__all__ = [
    "Called",
    "Config",
    "Given",
    "Inherited",
    "called",
    "called_in",
    "config_at",
    "is_checkpoint",
    "library_of",
    "model_named",
    "with_arguments",
]

_NO_PATH = "give an existing path, FILE.ucpl:LAYOUT(...), or a shipped layout, as in zero1(dp=4)"
Config = dict[str, "Json"]  # a config.json
Inherited = dict[str, tuple["Value", str]]  # values of parameters that a call leaves open, each with its origin


class Called(NamedTuple):
    """A layout by its call, and the library that contains it.

    It is a tuple, so that callers can unpack it.
    """

    library: Library
    call: nodes.Call

    @property
    def layout(self) -> nodes.Layout:
        from ucpl.language import nodes

        span = self.call.span  # of a plan's line; a call of the command line has none
        node = self.library.layout(self.call.name, span if span.file in self.library.files else nodes.NOWHERE).node
        assert isinstance(node, nodes.Layout)
        return node

    @property
    def format(self) -> Format:
        """The format whose shipped layout the call is of."""
        return format_of_layout(self.library.chain(self.call.name)[-1].node.name)

    @property
    def is_of_any(self) -> bool:
        """True if the layout needs a model from another place."""
        return self.layout.of == "any"

    def model(self, given: Given) -> nodes.Model:
        """The layout's own model, with the arguments of this call.

        The numbers of its files apply, too.
        """
        from ucpl.language import nodes
        from ucpl.layout import statements

        beside = statements.CallInputs(given.config or {}, given.sizes, given.inherited)
        opened = statements.open_layout(self.library, self.call, beside)
        return nodes.Model(opened.model.name, tuple(opened.model_items), span=opened.model.span)


@define
class Folding:
    """A wish to plan tensors that are stored alike as one."""

    is_done: bool = False  # the checkpoint has so many that both sides have families
    kin: Kin | None = None  # of a comparison: the families of the other checkpoint


@frozen(eq=False)
class Given:
    """The options of one conversion besides the layout's call."""

    model: nodes.Model | None = None  # the model for a layout of any model
    config: Config | None = None  # the values of `config.x`
    config_file: Path | None = None  # the file that it was read from
    sizes: dict[str, Value] = field(factory=dict)  # -D
    inherited: Inherited = field(factory=dict)
    fill: tuple[str, ...] = ()  # `fill` lines of the target, as NAME=VALUE
    drop: tuple[str, ...] = ()  # tensors, states and keys of client_state that are left out; globs over tensors
    freeze: tuple[str, ...] = ()  # parameters that the target does not train; globs, too
    train: tuple[str, ...] = ()  # frozen parameters that the target trains, as NAME or NAME=GROUP
    said_by: nodes.Plan | None = None  # the statement that some of drop, freeze and train come from
    order: str = ""  # a file with the names of an optimizer's numbers, or "model"
    weights_alone: bool = False  # the optimizer of the source is not read
    skipped: frozenset[str] = frozenset()  # states that cannot be read and are dropped by name
    why_skipped: str = ""  # without such an option: the fault of the optimizer
    bare: bool = False  # layouts are resolved and not located: one rank will be asked for
    folding: Folding | None = None  # tensors that are stored alike may be planned as one


def config_at(path: Path) -> Config:
    """The object of a config.json. Raises: UcplError E170, E176, E184."""
    if os.path.isfile(path / "config.json"):
        remedy = f"it is a folder: write --config {path / 'config.json'}"
        fail("E170", f"{path} cannot be read: Is a directory", Label(str(path)), remedy=remedy)
    found = json_object(read_text(path))
    if isinstance(found, str):
        fail("E176", f"{path} is no JSON object", Label(str(path), found))
    return found


def library_of(path: str | Path) -> Library:
    """The models, layouts and plans of a .ucpl file and its imports.

    The specs that ship are part of the library.

    Raises: UcplError; E170 if the file cannot be read.
    """
    from ucpl.layout import load
    from ucpl.resources import spec_files, spec_text
    from ucpl.texts import text_at

    name = str(path).removeprefix("specs/")
    if not os.path.exists(path) and name in dict(spec_files()):  # a shipped one, wherever we are
        return load((f"specs/{name}", spec_text(name)), keep=True)
    return load((str(path), read_text(Path(path))), read=text_at, keep=True)


def called(text: str | Called) -> Called:
    """Parse `zero1(dp=8)` or `path/to/file.ucpl:megatron(tp=2)`."""
    from ucpl.language import parse_call
    from ucpl.layout import load

    if isinstance(text, Called):
        return text
    head, colon, rest = text.partition(".ucpl:")
    if colon:
        return called_in(library_of(head + ".ucpl"), rest)
    library = load()
    try:
        call = parse_call(text, keep=True)
        if "(" not in text:
            library.layout(call.name)
    except UcplError as error:
        raise _no_layout(text, error) from None
    return called_in(library, text)


def called_in(library: Library, text: str) -> Called:
    """Parse the call of a library's layout.

    Words without quotes are texts where the parameter is one: `safetensors(dtype=f32)`.
    """
    from ucpl.language import nodes, parse_call

    one = Called(library, parse_call(text, keep=True))
    if not any(isinstance(a.value, nodes.Name) for a in one.call.arguments):
        return one
    try:
        known = one.layout.parameters
    except UcplError:  # no such layout, which `resolve` reports
        return one
    texts = {p.name for p in known if isinstance(p.default, nodes.Text)}
    said = tuple(
        evolve(a, value=nodes.Text(a.value.path, span=a.value.span))
        if isinstance(a.value, nodes.Name) and (a.name or (known[i].name if i < len(known) else "")) in texts
        else a
        for i, a in enumerate(one.call.arguments)
    )
    return Called(one.library, evolve(one.call, arguments=said))


def with_arguments(one: Called, given: Given) -> tuple[Called, Given]:
    """Move values of -D for parameters of the layout into its call.

    `zero3` with -D dp=3 is `zero3(dp = 3)`: a call without quotes for the shell. A `let` of that name gets the value itself.

    Raises: UcplError E177 if the call has this argument, too.
    """
    if not given.sizes:
        return one, given
    from ucpl.conversion.drawn_sizes import lets_of
    from ucpl.language import nodes
    from ucpl.layout.scope import literal

    lets = {binding.name for binding in lets_of(one.library)}
    names = [p.name for p in one.layout.parameters if p.name in given.sizes and p.name not in lets]
    has = {argument.name for argument in one.call.arguments}
    twice = next((name for name in names if name in has), None)
    if twice is not None:
        fail(
            "E177",
            f"-D {twice} is given twice: {one.call.name}({twice} = ...) has a value, too",
            Label("<command line>", where=f"-D {twice}"),
            remedy=f"leave out -D {twice}={given.sizes[twice]}, or write {one.call.name} without {twice}",
        )
    more = tuple(nodes.Argument(name, literal(given.sizes[name]), span=_option(name, given)) for name in names)
    call = evolve(one.call, arguments=(*one.call.arguments, *more))
    rest = {name: value for name, value in given.sizes.items() if name not in names}
    return Called(one.library, call), evolve(given, sizes=rest)


def _option(name: str, given: Given) -> nodes.Span:
    """The place of a value of -D."""
    from ucpl.language import nodes
    from ucpl.language.source import CALL

    text = f"-D {name}={given.sizes[name]}"
    return nodes.Span(0, len(text), 1, 1, CALL, text)


def _no_layout(text: str, error: UcplError) -> UcplError:
    """An error with a remedy for a text that names no layout.

    Usual causes are a path that does not exist, and a misspelled name of a file.
    """
    found = error.diagnostics[0]
    if ".ucpl." in text:
        remedy = f"the layout of a file follows a colon: {text.replace('.ucpl.', '.ucpl:', 1)}"
        return UcplError(evolve(found, remedy=remedy))
    file, colon, rest = text.partition(":")
    call = re.match(r"([A-Za-z_]\w*)[:,;]\s*(\w+\s*=.*)", text)  # as a shell or a URL has them
    if call is not None:
        return UcplError(evolve(found, remedy=f"write '{call[1]}({call[2]})'"))
    if colon and "(" not in file:
        return UcplError(evolve(found, remedy=f"the file of a layout ends in .ucpl: {file}.ucpl:{rest}"))
    name, opened, _ = text.partition("(")
    if found.code == "E001" and "-" in name:  # a name has no sign, and the remedy of an unknown one finds it without
        found, error = _unknown(name, error)
    if opened:
        return error
    sentence = f"there is no checkpoint at `{text}`, and no layout of that name"
    remedy = found.remedy if found.code == "E383" or (found.code == "E110" and found.about) else _NO_PATH
    if os.path.exists(text):
        sentence = f"`{text}` is a path, and a layout is called here"
        remedy = _layouts_at(text)
    return UcplError(Diagnostic("E110", sentence, (Label("<command line>", where=text),), remedy=remedy))


def _unknown(name: str, error: UcplError) -> tuple[Diagnostic, UcplError]:
    from ucpl.layout.library import load

    try:
        load().layout(name.strip())
    except UcplError as unknown:
        if unknown.diagnostics[0].about:
            error = unknown
    return error.diagnostics[0], error


def _layouts_at(path: str) -> str:
    """The remedy for a path that is given as a layout.

    For a .ucpl file, it lists the file's layouts with their required parameters.
    """
    if not path.endswith(".ucpl") or not os.path.isfile(path):
        return "write FILE.ucpl:LAYOUT(...), or a layout that ships, as in zero1(dp=4)"
    from ucpl.language import nodes

    known = [k.node for k in library_of(path).known.values() if isinstance(k.node, nodes.Layout)]
    mine = [node for node in known if node.span.file == path]
    asked = (
        f"{node.name}({', '.join(f'{p.name}=...' for p in node.parameters if p.default is None)})" for node in mine
    )
    return (
        "write " + " or ".join(f"'{path}:{call}'" for call in asked)
        if mine
        else f"{path} has no layout: name another file"
    )


def is_checkpoint(text: str) -> bool:
    """True if a LAYOUT is given as a checkpoint's path.

    The path exists, or permissions hide it.
    """
    if ".ucpl:" in text or text.endswith(")"):
        return False
    try:
        os.stat(text)
    except PermissionError:
        return os.sep in text  # a name without a folder is a layout's
    except (OSError, ValueError):
        return False
    return True


def model_named(text: str, sizes: dict[str, Value] | None = None) -> nodes.Model:
    """The model of `FILE:NAME` or `FILE:NAME(layers = 4)`.

    Raises: UcplError E178, E110, E116 to E125.
    """
    from ucpl.language import parse_call
    from ucpl.layout.statements import called_model

    head, colon, rest = text.partition(".ucpl:")
    file, _, name = (head + ".ucpl", colon, rest) if colon else text.rpartition(":")
    if not file or not name:
        fail(
            "E178",
            f"`{text}` names no model",
            Label("<command line>", where=text),
            remedy="write --model FILE.ucpl:NAME, or with arguments FILE.ucpl:NAME(layers = 4)",
        )
    return called_model(library_of(file), parse_call(name), sizes)
