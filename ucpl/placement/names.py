"""Templates of files and keys closed over a block.

They are literal text, and slots that change with coordinate or choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, field

from ucpl.layout import FileRule
from ucpl.layout.templates import Hole, Template, key_steps, render
from ucpl.records import define, frozen
from ucpl.tables import I64
from ucpl.tables.blocks import CHOICE, COORDINATE, Listed, Name, Slot

__all__ = ["MixedError", "Namer", "Variables"]

Texts = tuple[str, ...]


class MixedError(Exception):
    """Error: an expression needs coordinates and choices at once.

    The block must be one coordinate.
    """


@frozen(eq=False)
class Variables:
    """Variables of a block's templates.

    They are constants, columns of coordinates, columns of choices. Later ones win.
    """

    constants: Mapping[str, int | str]
    coordinates: Mapping[str, I64 | Texts | Listed]
    choices: Mapping[str, I64 | Texts]
    coordinate_count: int
    choice_count: int
    # Results of templates without constants, cached for other tensors or states with the same columns.
    named: dict[int, tuple[Template, Name]] = field(factory=dict)

    def axis_of(self, name: str) -> int | None:
        if name in self.choices:
            return CHOICE
        return COORDINATE if name in self.coordinates and name not in self.constants else None

    def at(self, axis: int, i: int) -> dict[str, int | str]:
        """Variables at one coordinate, or one choice.

        Those that change with the other are left out.
        """
        out: dict[str, int | str] = {}
        column: I64 | Texts | Listed
        for name, column in (self.choices if axis == CHOICE else self.coordinates).items():
            value = column[i]
            out[name] = value if isinstance(value, str) else int(value)
        if axis == COORDINATE:
            return {**out, **self.constants}
        return {**self.constants, **out}


Place = tuple[Name, tuple[Name, ...], tuple[bool, ...]]
ONE_STEP = ("safetensors", "memory")  # forms that have names of tensors, and no dicts: a `/` is part of one


@define
class Namer:
    """Closes templates; remembers how keys fall into steps."""

    steps_of: dict[int, tuple[Template, tuple[Template, ...]]] = field(factory=dict)

    def steps(self, template: Template) -> tuple[Template, ...]:
        known = self.steps_of.get(id(template))
        if known is None:  # the template is kept: another one could have its number after it is gone
            known = template, key_steps(template) if template.text else ()  # "": the file is the tensor
            self.steps_of[id(template)] = known
        return known[1]

    def in_file(self, rule: FileRule, key: Template, variables: Variables) -> Place:
        """File, steps of the key, and which steps count. Raises MixedError."""
        assert rule.path is not None
        file, steps, counted = self.place(rule.path, rule.key, key, variables)
        if rule.form in ONE_STEP and len(steps) > 1:
            return file, (_joined(steps),), (False,)
        return file, steps, counted

    def place(self, path: Template, outer: Template | None, key: Template, variables: Variables) -> Place:
        """Template of any file.

        `outer`: the file's own template of keys. Raises MixedError.
        """
        inner = tuple(self.name(step, variables) for step in self.steps(key))
        counted = tuple(counts(step) for step in self.steps(key))
        if outer is None:
            return self.name(path, variables, inner), inner, counted
        names: list[Name] = []
        counting: list[bool] = []
        for step in self.steps(outer):
            only = step.parts[0] if len(step.parts) == 1 else None
            if isinstance(only, Hole) and only.path == "key":
                names += inner
                counting += counted
            else:
                names.append(self.name(step, variables, inner))
                counting.append(counts(step))
        return self.name(path, variables, inner), tuple(names), tuple(counting)

    def name(self, template: Template, variables: Variables, key: Sequence[Name] = ()) -> Name:
        """One text. `key`: the steps that `{key}` inserts."""
        if "key" in template.names or not variables.constants.keys().isdisjoint(template.names):
            return self._name(template, variables, key)
        known = variables.named.get(id(template))
        if known is None:
            known = variables.named[id(template)] = template, self._name(template, variables, key)
        return known[1]

    def _name(self, template: Template, variables: Variables, key: Sequence[Name]) -> Name:
        out: list[str | Slot] = []
        for part in template.parts:
            if isinstance(part, str):
                out.append(part)
            elif part.path == "key" and key:
                out += _joined(key)
            else:
                out.append(self.hole(part, template, variables))
        return _merged(out)

    def hole(self, hole: Hole, template: Template, variables: Variables) -> str | Slot:
        axes = {a for name in hole.names if (a := variables.axis_of(name)) is not None}
        if not axes and hole.path is not None and hole.path in variables.constants and not hole.format:
            return str(variables.constants[hole.path])  # most are a name and no more
        alone = evolve(template, parts=(hole,))
        if not axes:
            return render(alone, dict(variables.constants))
        if len(axes) > 1:
            if variables.coordinate_count == 1:
                here = variables.at(COORDINATE, 0)
                return self.hole(hole, template, Variables(here, {}, variables.choices, 1, variables.choice_count))
            raise MixedError
        axis = axes.pop()
        count = variables.choice_count if axis == CHOICE else variables.coordinate_count
        columns = variables.choices if axis == CHOICE else variables.coordinates
        if hole.path is not None and hole.path in columns:
            return Slot(axis, columns[hole.path], hole.format)
        named = [columns[n] for n in sorted(hole.names) if n in columns]
        known: dict[tuple[object, ...], str] = {}
        texts = []
        for i in range(count):
            mark = tuple(c[i] for c in named)
            if mark not in known:
                known[mark] = render(alone, variables.at(axis, i))
            texts.append(known[mark])
        return Slot(axis, tuple(texts))


def counts(step: Template) -> bool:
    """True if integers in this step of a key are positions.

    The template writes or counts it as one number. Tensors' names are texts; so are digits put together, `{pp}{tp}`, or
    in a form of their own, `{l:02}`.
    """
    if len(step.parts) > 1 or any(isinstance(part, Hole) and part.format for part in step.parts):
        return False
    return not (step.names & {"name", "alias", "owner"})


def _joined(steps: Sequence[Name]) -> Name:
    out: list[str | Slot] = []
    for i, step in enumerate(steps):
        out += [*(["/"] if i else []), *step]
    return _merged(out)


def _merged(parts: Sequence[str | Slot]) -> Name:
    """Literal parts that follow each other as one."""
    out: list[str | Slot] = []
    for part in parts:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        elif part != "":
            out.append(part)
    return tuple(out)
