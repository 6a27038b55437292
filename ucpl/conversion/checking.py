"""Parse, resolve and type-check all statements of one .ucpl file.

A parameter without a default is tried at 1, or at drawn lists if the text uses it as a list. Axes of the mesh are tried at the
least degrees above 1 that divide. A layout of any model is tried over the file's own model, or a small built-in one. A fault
that depends on a value (an assert, a cut) is a remark if the value was a trial, and an error if the file states the value.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path

from attrs import evolve, field

from ucpl.conversion.degrees import (
    ALONE,
    Degrees,
    ListTrial,
    call_at,
    degrees_of,
    degrees_text,
    depends_on_numbers,
    has_files,
    is_used,
    open_parameters,
    try_degrees,
)
from ucpl.conversion.drawn_lists import call_with_lists, dims_of, list_parameters, lists_text
from ucpl.conversion.drawn_sizes import ConfigList, Sizes, config_lists, lets_of
from ucpl.conversion.error_causes import depends_on_trials, same_place
from ucpl.conversion.requests import Called, Given
from ucpl.conversion.side import Side, demand_names, located
from ucpl.errors import Diagnostic, UcplError, fail
from ucpl.language import nodes, parse, parse_call, print_expr, print_file, worded
from ucpl.layout import Layout, Library, load
from ucpl.layout.by_index import whole_name
from ucpl.layout.globs import is_called
from ucpl.layout.implied import with_indices
from ucpl.layout.library import KnownStatement, Reader
from ucpl.layout.misplaced_statements import check_known
from ucpl.layout.remedies import for_buffer, for_hole
from ucpl.layout.scope import Scope, UnknownNumber, Value, at
from ucpl.layout.statements import called_model, items_of
from ucpl.lint.config_keys import odd_keys
from ucpl.lint.crossed_names import crossed_names
from ucpl.lint.dead_statements import dead_plan_names, dead_statements, dead_training
from ucpl.lint.duplicates import overlapping_parts, repeated_lines, stored_twice
from ucpl.lint.missing_tensors import (
    holes,
    states_of_some,
    tensors_without_entry,
    tensors_without_key,
    unkept_states,
)
from ucpl.lint.no_effect import (
    empty_parts,
    empty_ranges,
    foreign_texts,
    lines_without_effect,
    misspelt_states,
    odd_conditions,
    odd_tensors,
    unequal_fills,
    unknown_drops,
    unknown_parameters,
    unread_dims,
)
from ucpl.lint.plan_refusals import check_fill_types, check_nested_keys, check_plannable, odd_fills, odd_scales
from ucpl.lint.rules import Remark, old_version, silenced
from ucpl.lint.swappable_parts import swappable_parts, swappable_text, unlike_cuts
from ucpl.lint.transposed import transposed
from ucpl.lint.undealt import undealt_indices
from ucpl.lint.unknown_kinds import misspelt_kinds, unknown_kinds
from ucpl.lint.unused_names import CONFIG_UNREAD, reads_config, unused
from ucpl.lint.wrong_scope import lines_in_wrong_scope
from ucpl.records import define, frozen
from ucpl.registry import format_named
from ucpl.texts import Json, read_text, text_at

__all__ = ["Checked", "check", "check_text"]

_NO_CONFIG = "E105"
_OF_PYTHON = ("self", "cls")
_OTHER_SIZE = "E115"
_DRAWS = 8  # of sizes, until there are some that every axis divides
_FAULTS = 3  # draws that must agree before a fault is the text's
# Faults of these codes (elements stored twice, or nowhere) hold at any size; others can come from numbers that no config has.
_OF_ANY_SIZE = ("E3", "E165", "E167")  # codes, or their beginnings: elements, and texts that lead back to themselves
_OF_NAMES = ("crossed-name", "swapped-dims", "undealt-index")  # rules of names and their order
_WITHOUT_SIZES = ("E143", "E169")  # of digits and names of a dim without a size
_REPEATED = ("E215", "E392", "E204", "E313")  # whose messages have the files or degrees of a layout
_ALONE = "<nothing stored>"  # the name of no layout that a text has
OTHERS = (2, 3, 8)  # trial values of a parameter, if 1 fails for a reason that may be the trial itself
MOST_OTHERS = 12
TRIAL = "<trial>"  # the name of no model that a text has
_TRIAL = f"""ucpl 2
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
    """The findings in a file. counts: its models, layouts and plans."""

    name: str
    findings: tuple[Diagnostic, ...]
    noted: tuple[Remark, ...]
    counts: dict[str, int]
    tried: tuple[str, ...] = ()  # "megatron holds at tp = 2; pp = 2; tp = 2, pp = 2"
    unchecked: tuple[str, ...] = ()  # layouts that hold at no number that was tried: nothing is known of them
    outdated: tuple[Remark, ...] = ()  # of a file in an older version of the language

    @property
    def remarks(self) -> tuple[str, ...]:
        """The texts of the remarks."""
        return tuple(one.text for one in self.noted)


def check(asked: str, given: Given) -> Checked:
    """Check a file, or one layout of it at given degrees.

    The second form is `FILE.ucpl:layout(tp = 3)`. A file that cannot be read is a finding, too.
    """
    head, colon, text = asked.partition(".ucpl:")
    name = head + ".ucpl" if colon else asked
    try:
        call = parse_call(text, keep=True) if colon else None
        written = read_text(Path(name))
        library = load((name, written), read=text_at, keep=True)
    except UcplError as error:
        return Checked(name, error.diagnostics, (), {})
    found = _checked(library, name, given, call)
    file = library.files[name]
    return evolve(found, noted=silenced(found.noted, written, file), outdated=old_version(written, file))


def check_text(name: str, text: str, given: Given, read: Reader) -> Checked:
    """Check a text that may be unsaved.

    read: returns the texts of imported files.
    """
    try:
        library = load((name, text), read=read)
    except UcplError as error:
        return Checked(name, error.diagnostics, (), {})
    found = _checked(library, name, given, None)
    file = library.files[name]
    return evolve(found, noted=silenced(found.noted, text, file), outdated=old_version(text, file))


def _checked(library: Library, name: str, given: Given, call: nodes.Call | None) -> Checked:
    file = library.files[name]
    models = [s for s in file.statements if isinstance(s, nodes.Model)]
    try:
        own = _own(library, models, given)
    except UcplError as error:
        return Checked(name, error.diagnostics, (), {})
    checker = _Checker(library, file, evolve(given, model=own))
    checker.run(call)
    return Checked(
        name,
        tuple(checker.findings),
        tuple(checker.remarks),
        checker.counts,
        tuple(checker.tried),
        tuple(checker.unchecked),
    )


def _own(library: Library, models: Sequence[nodes.Model], given: Given) -> nodes.Model:
    """The model over which layouts of any model are tried.

    It is the file's first model, with open parameters at 1; without one, it is a built-in model.
    """
    if not models:
        return _trial()
    open_ones = [p for p in models[0].parameters if p.default is None and p.name not in given.sizes]
    arguments = tuple(nodes.Argument(p.name, nodes.Number(1)) for p in open_ones)
    return called_model(library, nodes.Call(models[0].name, arguments), given.sizes)


def _model_of(library: Library, layouts: Sequence[nodes.Layout], given: Given) -> nodes.Model:
    """The model that the first layout names, or the given one."""
    known = [library.model(node.of, node.span).node for node in layouts if node.of != "any"][:1]
    models = [node for node in known if isinstance(node, nodes.Model)]
    return _own(library, models, given) if models or given.model is None else given.model


def _trial() -> nodes.Model:
    trial = parse(_TRIAL, "<trial>", keep=True).statements[0]
    assert isinstance(trial, nodes.Model)
    return trial


def _fault(found: Diagnostic) -> tuple[object, ...]:
    """Key of a fault: its code and its line of the text.

    A layout that extends another repeats the faults of its base in files and at degrees of its own.
    """
    place = found.labels[0] if found.labels else None
    if found.code not in _REPEATED or place is None or not place.line:
        return found.code, found.message, found.labels[:1]
    return found.code, place.file, place.line, place.column


@define
class _Checker:
    library: Library
    file: nodes.File
    given: Given
    findings: list[Diagnostic] = field(factory=list)
    remarks: list[Remark] = field(factory=list)
    tried: list[str] = field(factory=list)
    unchecked: list[str] = field(factory=list)
    counts: dict[str, int] = field(factory=dict)
    held: dict[str, Side] = field(factory=dict)  # of the last layout, where it holds, by the degrees
    untried: list[Remark] = field(factory=list)  # on axes that no degree suits
    line: int = 0  # of the statement that is checked

    def run(self, call: nodes.Call | None) -> None:
        """Check every statement of the file, or only the called layout."""
        if call is not None:
            self.guarded(lambda: self.called(call))
            self.config_unread()
            return
        if not any(isinstance(s, nodes.Model | nodes.Layout) for s in self.file.statements):
            self.guarded(self.numbers)
        for statement in self.file.statements:
            self.line = statement.span.line
            match statement:
                case nodes.Model():
                    self.count("model")
                    self.guarded(partial(self.model, statement))
                case nodes.Layout():
                    self.count("layout")
                    self.guarded(partial(self.layout, statement), statement.name)
                case nodes.Plan():
                    self.count("plan")
                    self.guarded(partial(self.plan, statement), f"plan {statement.name}")
        self.line = 0
        self.lint("constant-condition", odd_conditions(self.file))
        self.lint("odd-tensor", odd_tensors(self.file))
        self.lint("dead-statement", dead_statements(self.file))
        self.lint("unknown-kind", (*unknown_kinds(self.file, self.given.config), *misspelt_kinds(self.file)))
        absent = " ".join(d.message for d in self.findings if d.code == _NO_CONFIG)  # errors that name their keys
        for path, text in odd_keys(self.file, self.given.config):
            if path.removeprefix("config.") not in absent:
                self.remark(text, "odd-key")
        for rule, text in unused(self.library, self.file):
            self.remark(text, rule)
        self.lint("repeated-line", repeated_lines(self.library, self.file))
        self.config_unread()

    def config_unread(self) -> None:
        if self.given.config is not None and not reads_config(self.library.files.values()):
            self.remark(CONFIG_UNREAD, "unread-config")

    def guarded(self, work: Callable[[], object], name: str = "") -> None:
        """Run a check and record its error.

        name: the statement's; it counts as unchecked if a config is needed and absent.
        """
        try:
            work()
        except UcplError as error:
            self.found(error)
            if name and self.lacks_config(error):
                self.unchecked.append(name)

    def lacks_config(self, error: UcplError) -> bool:
        return self.given.config is None and error.diagnostics[0].code == _NO_CONFIG

    def numbers(self) -> None:
        """Check the numbers of a file that has only plans.

        In other files, models and layouts evaluate them.
        """
        scope = Scope(given=dict(self.given.sizes), config=self.given.config or {})
        scope.bind(self.file.statements)
        check_known(self.file.statements, scope)

    def model(self, node: nodes.Model) -> None:
        """Check a model that no layout of the file stores.

        It is resolved under a layout that stores nothing.
        """
        made = _own(self.library, [node], self.given)
        if any(isinstance(s, nodes.Layout) and s.of in (node.name, "any") for s in self.file.statements):
            return
        alone = KnownStatement(nodes.Layout(_ALONE, (), "any", None, ()), self.file)
        library = evolve(self.library, known={**self.library.known, _ALONE: alone}, files=dict(self.library.files))

        def resolved(one: _Checker) -> int:
            try:
                located(Called(library, nodes.Call(_ALONE)), evolve(one.given, model=made), rank=0)
            except UcplError as error:
                if error.diagnostics[0].code != _OTHER_SIZE:  # -D speaks of the file's other models, too
                    raise
            return 0

        self.over(partial(_Drawing.of, self, node.name, (), made), resolved)

    def called(self, call: nodes.Call) -> None:
        node = Called(self.library, call).layout
        self.line = node.span.line
        self.count("layout")
        self.complete(self.located(call, rank=None), node)

    def count(self, word: str) -> None:
        self.counts[word] = self.counts.get(word, 0) + 1

    def found(self, error: UcplError) -> None:
        """Record each finding once: layouts repeat the faults of their base."""
        known = {_fault(d) for d in self.findings}
        for d in error.diagnostics:
            if d.code == _NO_CONFIG and self.given.config is None:
                self.remark(f"{d.message}: give --config to check further")
            elif _fault(d) not in known:
                self.findings.append(self.of_a_layout(d))

    def of_a_layout(self, d: Diagnostic) -> Diagnostic:
        """Add a remedy if a file-level statement uses a layout's parameter."""
        if not isinstance(d.about, UnknownNumber):
            return d
        lines = {s.span.line for s in self.file.statements if isinstance(s, nodes.Let | nodes.Assert)}
        layouts = (s for s in self.file.statements if isinstance(s, nodes.Layout))
        having = [s.name for s in layouts if d.about.name in {p.name for p in s.parameters}]
        if not having or not d.labels or d.labels[0].line not in lines:
            return d
        return evolve(d, remedy=f"`{d.about.name}` is a parameter of {having[0]}: put the line inside its braces")

    def layout(self, node: nodes.Layout) -> None:
        """Check a layout at the given sizes.

        If an absent config would give some of them, the sizes are drawn.
        """
        if not has_files(self.library, node) and is_used(self.file, node):
            return  # a part of other layouts; it is checked with them
        drawn = partial(_Drawing.of, self, node.name, (node,))
        try:
            self.over(drawn, lambda one: one.sized(node))
        except UcplError as error:
            if not self.lacks_config(error) or not (drawing := drawn()).sizes.missing:
                raise
            drawing.error = error
            message = f"{error.diagnostics[0].message}: sizes are drawn. Give --config to check at yours"
            self.at_drawn_sizes(drawing, lambda one: one.sized(node), message)

    def over(self, drawn: Callable[[], _Drawing], work: Callable[[_Checker], int]) -> None:
        """Do `work`, at drawn sizes if dims have none."""
        try:
            work(self)
        except UcplError as error:
            found, drawing = error.diagnostics[0], drawn()
            is_open = isinstance(found.about, UnknownNumber) and found.about.name in drawing.sizes.open
            if not is_open and not (drawing.sizes.open and found.code in _WITHOUT_SIZES):
                raise
            self.at_drawn_sizes(drawing, work, drawing.said(found.remedy if is_open else ""))

    def at_drawn_sizes(self, drawing: _Drawing, work: Callable[[_Checker], int], remark: str) -> None:
        """Check something with open sizes at small drawn ones.

        A fault counts if several draws have it and no draw holds.
        """
        drawn = drawing.run(work)
        if drawn.suits:
            self.tried += [f"{text}, if {_sizes_text(drawn.sizes)}" for text in drawn.tried]
            self.remark(remark)
            for one in (*drawn.untried, *drawn.remarks):
                self.remark(one)
            for text in drawing.unread(drawn):
                self.remark(text)
        elif len(drawn.faults) >= _FAULTS and all(same_place(drawn.faults[0], other) for other in drawn.faults):
            raise UcplError(drawn.faults[0])
        else:
            self.unchecked.append(drawing.name)
            why = f" ({drawn.why})" if drawn.why else ""
            message, _, _ = remark.partition(": sizes are drawn")
            self.remark(f"{message}: {drawing.name} is not checked, no drawn sizes suit it{why}. {drawing.remedy}")

    def sized(self, node: nodes.Layout) -> int:
        """Check a layout at the least degrees and at higher ones.

        A fault that depends on a trial value is a remark.

        Returns: the number of mesh axes that no degree suits.
        """
        lists = list_parameters(self.library, node)
        drawn = {one.name for one in lists}
        base = {p.name: n for p in node.parameters if (n := _first(p)) is not None and p.name not in drawn}
        self.held = {}
        self.lint("uncut-parameter", _uncut(self.library, node))
        failed = self.base_fails(node, base)
        axes = tuple(axis for axis in degrees_of(self.library, node) if axis in base)
        if self.open_numbers(node):
            axes = ()  # trial sizes of 1 cannot be divided
        tried = try_degrees(base, axes, lambda degrees: self.stored(node, degrees))
        good = "; ".join(self.held_text(self.changed(base, axes, degrees), degrees) for degrees in tried.good)
        if lists and not failed and not good:
            good = self.held_text(base, base)
        if good:
            self.tried.append(f"{node.name} holds at {good}")
        elif failed:
            self.unchecked.append(node.name)
            self.remark(
                f"{node.name} is not checked further: at {degrees_text(base)}, {failed}."
                f" Name one that holds: ucpl check '{self.file.name}:{node.name}({', '.join(f'{n} = ...' for n in base)})'"
            )
            return len(axes)
        if tried.too_many:
            self.remark(f"{node.name} is not tried with all of its {len(axes)} axes above 1: {tried.too_many}")
        if tried.hopeless:
            raise UcplError(*tried.hopeless)
        self.untried = [
            Remark.of(
                f"no {axis} from {ALONE[0]} to {ALONE[-1]} suits {node.name}: {why}."
                f" Name one that does: ucpl check '{self.file.name}:{node.name}({axis} = ...)'",
                "",
                node.span.line,
            )
            for axis, why in tried.unsuited
        ]
        for text in self.untried:
            self.remark(text)
        return len(tried.unsuited)

    def base_fails(self, node: nodes.Layout, base: Degrees) -> str:
        """The reason why an uncut layout fails, if a trial value decides.

        Empty: the layout holds.

        Raises: UcplError if it fails for another reason.
        """
        try:
            self.stored(node, base)
        except UcplError as error:
            if isinstance(error.diagnostics[0].about, ListTrial):
                return error.diagnostics[0].message
            was_tried = any(p.default is None for p in node.parameters) or self.open_numbers(node)
            if was_tried and depends_on_numbers(error) and self.may_suit_others(node, base, error.diagnostics[0]):
                return error.diagnostics[0].message
            raise
        return ""

    def may_suit_others(self, node: nodes.Layout, base: Degrees, found: Diagnostic) -> bool:
        """True if a failing layout may hold at other trial values.

        The fault depends on a trial value, or other values do not have it.
        """
        if depends_on_trials(found, self.library, self.given.sizes, has_config=self.given.config is not None):
            return True
        open_ones = [p.name for p in node.parameters if p.default is None]
        is_met = False
        for name, n in islice(product(open_ones, OTHERS), MOST_OTHERS):
            try:
                self.stored(node, {**base, name: n})
            except UcplError as error:  # an error of an earlier line is no evidence
                is_met = is_met or same_place(found, error.diagnostics[0])
                continue
            return True
        return not is_met and bool(open_ones)

    def open_numbers(self, node: nodes.Layout) -> dict[str, Value]:
        """Open parameters of a layout's model, each at the trial value 1.

        Such a layout is a base for others that give the values.
        """
        return dict.fromkeys(open_parameters(self.library, node), 1)

    @staticmethod
    def changed(base: Degrees, axes: tuple[str, ...], degrees: Degrees) -> Degrees:
        return {axis: degrees[axis] for axis in axes if degrees[axis] > 1} or base

    def stored(self, node: nodes.Layout, degrees: Degrees) -> None:
        """Check all ranks of a layout at some degrees, and its completeness."""
        call = self.with_lists(node, degrees)
        side = self.located(call, rank=None)
        self.complete(side, node)
        self.held[degrees_text(degrees)] = side

    def held_text(self, changed: Degrees, degrees: Degrees) -> str:
        """Degrees at which a layout holds, with its drawn lists."""
        lists = lists_text(self.held[degrees_text(degrees)].called.call)
        return ", ".join(filter(None, (degrees_text(changed), lists)))

    def with_lists(self, node: nodes.Layout, degrees: Degrees) -> nodes.Call:
        """The call at some degrees, with lists that suit them.

        Lists that leave out a tensor are the second choice.
        """
        lists = list_parameters(self.library, node)
        if not lists:
            return call_at(node, degrees)
        model = _model_of(self.library, (node,), self.given)
        known = {**self.open_numbers(node), **self.given.sizes}
        sizes = dims_of(model, node, self.library, known, self.given.config or {})

        def attempt(call: nodes.Call, *, all_stored: bool) -> None:
            one = _Checker(self.library, self.file, self.given)
            side = one.located(call, rank=None)
            one.complete(side, node)
            absent = tensors_without_entry(side.layout, frozenset())
            if absent and all_stored:
                raise UcplError(Diagnostic("E313", f"{node.name} stores nothing of {listed(absent)}"))

        try:
            return call_with_lists(node, degrees, lists, sizes, partial(attempt, all_stored=True))
        except UcplError:
            return call_with_lists(node, degrees, lists, sizes, partial(attempt, all_stored=False))

    def complete(self, side: Side, node: nodes.Layout) -> None:
        """Check that a layout stores the complete model.

        Absent tensors and states are remarks. A tensor that is stored in part is an error.
        """
        gone = frozenset(
            item.path
            for item in items_of(self.library, nodes.Call(node.name))
            if isinstance(item, nodes.Entry) and item.shape is None
        ).union(*(taken.names for taken in side.layout.taken if taken.is_none))
        self.lint("stored-twice", stored_twice(side.placement))
        absent = tensors_without_entry(side.layout, gone)
        if absent and "*" not in gone:
            under = _under_conditions(self.library, node, absent)
            told = tuple(name for name in absent if name not in under)
            for name, (line, condition) in under.items():
                self.remark(
                    f"{node.name} does not always store `{name}`: its line ({line}) holds when {condition}. If that is"
                    f" meant, write `{name} = none  when not ({condition})`",
                    "missing-tensor",
                    line,
                )
            if told:
                self.remark(
                    f"{node.name} stores nothing of {listed(told)}: no entry speaks of {'it' if len(told) == 1 else 'them'}."
                    f" If that is meant, write `{told[0]} = none`",
                    "missing-tensor",
                )
        nowhere = tensors_without_key(side.placement)
        if nowhere:
            self.remark(
                f"{node.name} stores nothing of {listed(nowhere)}: its line has no `as`, and no flat buffer has"
                f" {'it' if len(nowhere) == 1 else 'them'}. Write"
                f' `as "{nowhere[0]}"` behind the line, or `{nowhere[0]} = none`',
                "missing-key",
            )
        for some, left_out in states_of_some(side.placement):
            self.remark(
                f"{node.name} stores no {', '.join(some)} of {listed(left_out)}: no group that a state line is of has"
                f" {'it' if len(left_out) == 1 else 'them'}. Name {'it' if len(left_out) == 1 else 'them'} in one, or write"
                f" `group rest = {left_out[0]}` and `state * {worded(node.span, 'of', 'for')} rest = ...`",
                "missing-state",
            )
        states = unkept_states(side.placement)
        if states and side.layout.state_lines:
            text = f"{node.name} stores no {listed(states)}. If that is meant, write `state {states[0]} = none`"
            self.remark(text, "missing-state")
        twins = swappable_parts(side.layout)
        if twins:
            self.remark(
                f"of one size and side by side: {swappable_text(twins)}. Swapped, they pass every check:"
                " only `ucpl verify MINE --against GENUINE`, or other evidence, finds it",
                "swappable-parts",
                next((e.span.line for e in side.layout.entries if e.path == twins[0].entry), 0),
            )
        for text in unlike_cuts(side.layout):
            self.remark(text, "unlike-cuts")
        for span, dim, low, high in overlapping_parts(side.layout):
            fail(
                "E304",
                f"`{dim}[{low}..{high}]` is in two parts, but each index must be in one",
                at(span),
                remedy=f"let the second part begin where the first ends: {dim}[..{high}] and {dim}[{high}..]",
            )
        found = next(holes(side.placement), None)
        if found is not None:
            entry = next(e for e in side.layout.entries if found.path in e.targets.values())
            own = with_indices(node.items, items_of(self.library, nodes.Call(node.name)))
            remedy = for_hole(entry.span, own, side.layout)
            buffer = for_buffer(side.layout, found.path, found.state) if found.state != "weight" else None
            if buffer is not None:
                fail("E313", f"{found}, the first {found.first}", at(buffer[1], "stored here"), remedy=buffer[0])
            fail("E313", f"{found}, the first {found.first}", at(entry.span, "stored here"), remedy=remedy)
        check_plannable(side.placement)
        check_nested_keys(side.placement)

    def plan(self, node: nodes.Plan) -> None:
        layouts = tuple(Called(self.library, call).layout for call in (node.source, node.target))

        def planned(one: _Checker) -> int:
            one.plan_at_sizes(node)
            return 0

        self.over(partial(_Drawing.of, self, f"plan {node.name}", layouts), planned)

    def plan_at_sizes(self, node: nodes.Plan) -> None:
        from ucpl.conversion.changes import ChangeOrigin
        from ucpl.conversion.changing import demand_states_left_out
        from ucpl.conversion.planning import closed_call

        source, target = (self.located(closed_call(self.file, call, self.given)) for call in (node.source, node.target))
        self.lint("dead-change", dead_plan_names(node))
        if source.layout.model_name != TRIAL:
            self.lint("dead-change", dead_training(node, source.layout, target.layout))
            demand_states_left_out(node.drop, ChangeOrigin(node), target.placement, source.placement)
            self.drops(node, source.layout)
            self.acting(node, source.layout, target)
            for said, remedy in unknown_parameters(node, (source.layout, target.layout)):
                fail("E300", f"{said}: no parameter of that name", at(node.span), remedy=remedy)

    def drops(self, node: nodes.Plan, source: Layout) -> None:
        """Report dropped names that the source's model lacks.

        A checkpoint may have them as keys of client_state, so they are remarks for a training framework.
        """
        for name, remedy in unknown_drops(source, node.drop):
            if format_named(source.framework).has_optimizer:
                self.remark(
                    f"plan {node.name} drops `{name}`, which is no tensor or state of {source.model_name}: {remedy}."
                    " If it is a key of client_state, nothing needs to change",
                    "dead-change",
                )
            else:
                fail("E300", f"drop {name}: no tensor or state of that name", at(node.span), remedy=remedy)

    def acting(self, node: nodes.Plan, source: Layout, target: Side) -> None:
        """Check that a target with its own model has the plan's changes.

        Raises: UcplError E327, E328.
        """
        from ucpl.conversion.changes import ChangeOrigin, Changes
        from ucpl.conversion.changing import demand_acting, demand_left_out
        from ucpl.conversion.planning import closed_call

        if target.called.is_of_any:
            return

        def meant(texts: Iterable[str]) -> frozenset[str]:
            return frozenset(p for text in texts for p in source.tensors if text == p or is_called(text, whole_name(p)))

        changes = Changes(
            tensors=meant(node.drop),
            frozen=meant(node.freeze),
            trained=meant(name for name, _ in node.train),
            origin=ChangeOrigin(node),
        )
        demand_acting(changes, target.layout)
        if changes.tensors:
            all_ranks = self.located(closed_call(self.file, node.target, self.given), rank=None)
            demand_left_out(changes, all_ranks.placement)

    def lint(self, rule: str, texts: Iterable[str]) -> None:
        for text in texts:
            self.remark(text, rule)

    def remark(self, text: str | Remark, rule: str = "", line: int = 0) -> None:
        """Record each remark once."""
        one = text if isinstance(text, Remark) else Remark.of(text, rule, line or self.line)
        if all(one.text != other.text for other in self.remarks):
            self.remarks.append(one)

    def located(self, call: nodes.Call, rank: int | None = 0) -> Side:
        """The layout of one rank or all ranks.

        A glob that matches no tensor of the file's own model is a remark.
        """
        one = Called(self.library, call)
        given = evolve(self.given, sizes={**self.open_numbers(one.layout), **self.given.sizes})
        side = located(one, given, rank=rank)
        demand_names(side.layout)
        check_fill_types(side.layout)
        if self.given.model is not None and self.given.model.name != TRIAL:
            for taken in side.layout.taken:
                if not taken.names:
                    self.remark(
                        f"{side.layout.name}: {taken.glob} matches no tensor of {self.given.model.name}", "no-effect"
                    )
        self.idle(side.layout, one)
        return side

    def idle(self, layout: Layout, one: Called) -> None:
        """Report lines without effect and likely mistakes of a layout and model."""
        self.lint("foreign-text", foreign_texts(layout, one.layout.items))
        if one.is_of_any:
            self.lint("unread-dim", unread_dims(layout, one.layout.items))
        if layout.model_name == TRIAL:
            self.lint("misspelt-state", misspelt_states(one.layout.items))
            return
        items = tuple(items_of(self.library, nodes.Call(one.layout.name)))
        own = tuple(with_indices(one.layout.items, items))
        self.lint("no-effect", lines_without_effect(layout, own, of_any=one.is_of_any))
        self.lint("crossed-name", crossed_names(layout))
        self.lint("swapped-dims", transposed(layout))
        self.lint("unequal-fills", unequal_fills(layout))
        self.lint("undealt-index", () if one.is_of_any else undealt_indices(layout, items))
        self.lint("fill-type", odd_fills(layout))
        self.lint("scale-type", odd_scales(layout))
        self.lint("wrong-scope", lines_in_wrong_scope(layout, own, items))
        if not one.is_of_any and not self.open_numbers(one.layout):
            self.lint("empty-part", empty_parts(layout, own))
        models = (s for s in self.file.statements if isinstance(s, nodes.Model))
        self.lint("empty-range", empty_ranges(layout, [item for model in models for item in model.items]))


@define
class _Drawn:
    """The best draw of sizes, and the faults of failed draws."""

    suits: bool = False
    sizes: dict[str, int] = field(factory=dict)
    config: dict[str, Json] = field(factory=dict)  # of drawn lists
    held: dict[str, Side] = field(factory=dict)
    tried: list[str] = field(factory=list)
    untried: list[Remark] = field(factory=list)
    remarks: list[Remark] = field(factory=list)  # those that do not depend on the draw
    faults: list[Diagnostic] = field(factory=list)
    why: str = ""


@define
class _Drawing:
    """Drawn sizes for a statement.

    It needs a config that is absent, or its model has dims without a size.
    """

    checker: _Checker
    name: str
    layouts: tuple[nodes.Layout, ...]
    model: nodes.Model
    sizes: Sizes
    error: UcplError | None = None  # a config that is absent
    lists: tuple[ConfigList, ...] = ()  # keys of it that the texts read as lists

    @classmethod
    def of(
        cls, checker: _Checker, name: str, layouts: tuple[nodes.Layout, ...], model: nodes.Model | None = None
    ) -> _Drawing:
        library, given = checker.library, checker.given
        if model is None:
            model = _model_of(library, layouts, given)
        chain = [link.node for node in layouts for link in library.chain(node.name)]
        lets = lets_of(library)
        sizes = Sizes.of(model, chain, given.sizes, given.config or {}, lets)
        lists = config_lists((model, *chain), lets) if given.config is None else ()
        return cls(checker, name, layouts, model, sizes, lists=lists)

    @property
    def remedy(self) -> str:
        return "Give --config" if self.error is not None else f"Give {_options(self.sizes.open)}"

    def said(self, remedy: str) -> str:
        """The remark about dims without a size.

        remedy: of the first of them.
        """
        names = self.sizes.open
        has = "has" if len(names) == 1 else "have"
        remedy = remedy or f"give {_options(names)}. When a checkpoint is converted, its shapes give them"
        return f"{listed(names)} of {self.model.name} {has} no size: sizes are drawn. {remedy[0].upper()}{remedy[1:]}"

    def run(self, work: Callable[[_Checker], int]) -> _Drawn:
        """Do `work` at drawn sizes.

        Raises: `error`, if a config decides more than sizes.
        """
        checker, given = self.checker, self.checker.given
        least = sum(len(node.parameters) for node in self.layouts) + 1
        out, chance = _Drawn(), random.Random(self.name)
        for _ in range(_DRAWS):
            drawn = self.sizes.draw(chance, self.model, given.sizes, given.config or {})
            config = self.config(drawn, chance)
            if config:
                names = {name for one in self.lists for name in one.names}
                drawn = {name: n for name, n in drawn.items() if name not in names}
            sized = evolve(given, sizes={**drawn, **given.sizes}, config=config or given.config)
            one = _Checker(checker.library, checker.file, sized, line=checker.line)
            try:
                unsuited = work(one)
            except UcplError as found:
                if self.error is not None and checker.lacks_config(found):
                    raise self.error from None
                out.why = found.diagnostics[0].message
                if self.is_fault(found) and not config:  # other lists may suit
                    out.faults.append(_at_sizes(found.diagnostics[0], drawn))
                if len(out.faults) == _FAULTS and not out.suits:
                    break
                continue
            if not one.unchecked:
                out.remarks = [
                    text
                    for text in one.remarks
                    if self.error is None or text.rule in _OF_NAMES  # others depend on numbers that no config has
                    if text not in one.untried and (not out.suits or text in out.remarks)
                ]
                is_second = out.suits or self.error is not None
                if unsuited < least:
                    out.suits, out.sizes, out.tried, out.held, least = True, drawn, one.tried, one.held, unsuited
                    out.untried, out.config = one.untried, config
                if is_second and not least:
                    break
        return out

    def config(self, sizes: Mapping[str, int], chance: random.Random) -> dict[str, Json]:
        """A config of drawn lists, each of the size of its dim.

        Empty without an absent config, or if a dim has no drawn size.
        """
        out: dict[str, Json] = {}
        known = {**sizes, **{n: v for n, v in self.checker.given.sizes.items() if isinstance(v, int)}}
        if self.error is None or any(one.dim not in known for one in self.lists):
            return out
        for one in self.lists:
            *path, last = one.key.split(".")
            section = out
            for step in path:
                inner = section.setdefault(step, {})
                assert isinstance(inner, dict)
                section = inner
            section[last] = list(one.draw(chance, known[one.dim]))
        return out

    def is_fault(self, found: UcplError) -> bool:
        """True if drawn sizes do not cause an error.

        Without a config, most other errors than those of elements can come from numbers that no config has.
        """
        if depends_on_numbers(found):
            return False
        return self.error is None or found.diagnostics[0].code.startswith(_OF_ANY_SIZE)

    def unread(self, drawn: _Drawn) -> Iterator[str]:
        """A remark on open dims that no shape would give."""
        lost: dict[str, str] = {}
        for side in drawn.held.values():
            if not side.called.is_of_any:
                lost |= self.lost(side, drawn)
        if lost:
            why = next((f" ({why})" for why in lost.values() if why), "")
            yield f"{self.name} as a source needs {_options([*lost])}: no stored shape of it gives {listed([*lost])}{why}"

    def lost(self, side: Side, drawn: _Drawn) -> dict[str, str]:
        """Open dims that no shape gives, each with the reason."""
        from ucpl.inference.sizes import sizes_of_shapes

        checker, sizes, config = self.checker, drawn.sizes, drawn.config or self.checker.given.config
        given = {**sizes, **checker.given.sizes}
        stored = [("/".join(map(str, h.key)), h.shape) for part in side.placement.parts for h in part.homes]
        known = {name: size for name, size in given.items() if name not in self.sizes.open}
        try:
            found = sizes_of_shapes(stored, checker.library, side.called.call, config, known)
        except UcplError as error:
            message = error.diagnostics[0].message
            return dict.fromkeys([n for n in self.sizes.open if f"`{n}`" in message] or self.sizes.open, message)
        return {name: "" for name in self.sizes.open if name not in found or found[name][0] != sizes[name]}


def _options(names: Sequence[str]) -> str:
    return " ".join(f"-D {name}=..." for name in names)


def _under_conditions(library: Library, node: nodes.Layout, absent: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Absent tensors with a conditional line, each with line number and condition.

    The condition is false here.
    """
    found: dict[str, tuple[int, str]] = {}
    for item in items_of(library, nodes.Call(node.name)):
        if isinstance(item, nodes.Entry) and item.path in absent and item.shape is not None:
            asked = next((c.args[0] for c in item.clauses if c.word == "when"), None)
            if asked is not None:
                found.setdefault(item.path, (item.span.line, print_expr(asked)))
    return found


def _uncut(library: Library, node: nodes.Layout) -> Iterator[str]:
    """Remarks on parameters that only names of files use, or nothing.

    The likely cause is a missing mesh. A parameter is also the value of its name in the base.
    """
    found = items_of(library, nodes.Call(node.name)) if node.extends is not None else node.items
    items = tuple(evolve(i, template="") if isinstance(i, nodes.Files) and i.template else i for i in found)
    text = print_file(nodes.File("", 1, (evolve(node, parameters=(), items=items),)))
    text += " ".join(print_expr(p.default) for p in node.parameters if p.default is not None)
    whole = print_file(nodes.File("", 1, (evolve(node, parameters=(), items=tuple(found)),)))
    for p in node.parameters:
        if isinstance(p.default, nodes.Text) and not re.search(rf"(?<!\w){re.escape(p.name)}(?!\w)", whole):
            yield (f"nothing of {node.name} is made of `{p.name}`. Write `{{{p.name}}}` in a name, or take it out")
        if not isinstance(p.default, nodes.Text) and not re.search(rf"(?<![\w.]){re.escape(p.name)}(?![\w.])", text):
            yield (
                f"{p.name} of {node.name} is in no mesh, and nothing is cut by it: "
                + (
                    f"there is no `{p.name}` here, take it out"
                    if p.name in _OF_PYTHON
                    else f"ranks need `mesh {p.name}`"
                )
            )


def _first(parameter: nodes.Parameter) -> int | None:
    """The first trial value: the default, or 1.

    None: the default is no plain number; it is not changed.
    """
    match parameter.default:
        case None:
            return 1
        case nodes.Number(value=value):
            return value
    return None


def _at_sizes(d: Diagnostic, sizes: dict[str, int]) -> Diagnostic:
    return evolve(d, notes=(*d.notes, f"at drawn sizes: {_sizes_text(sizes)}"))


def _sizes_text(sizes: dict[str, int]) -> str:
    shown = [f"{name} = {n}" for name, n in sizes.items()]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more
