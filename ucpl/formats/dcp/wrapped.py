"""Names with wrapper steps in only one dict of a run.

`model.state_dict()` of blocks that torch.compile has wrapped has `layers.0._orig_mod.w`, and `get_optimizer_state_dict`
has `layers.0.w`. Both are one parameter. Its name is the one without wrapper steps, and a target of this form has the
names of the source's dicts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from attrs import field

from ucpl.errors import UcplError
from ucpl.extents import Structure
from ucpl.files.checkpoint import Checkpoint, Own
from ucpl.files.wrappers import LOOSE, WRAPPERS, bare, has_wraps
from ucpl.formats.dcp.metadata import Metadata, Step
from ucpl.formats.dcp.numbered import with_names
from ucpl.formats.dcp.roles import ANY, NamedRoles, Roles, prefix_alone, roles_of
from ucpl.records import frozen

__all__ = ["Wrapped", "advice", "found_in", "wrapped_of"]


@frozen
class Wrapped(Own):
    """Parameter names that differ between the model's and the optimizer's dict."""

    model: dict[str, str] = field(factory=dict)
    optimizer: dict[str, str] = field(factory=dict)
    words: Set[str] = frozenset()
    numbers: dict[str, int] = field(factory=dict)  # of the parameters, if the optimizer's dict has no names
    values: dict[str, tuple[Step, ...]] = field(factory=dict)  # entries of neither dict, with their own paths

    def plain(self, name: object) -> object:
        """A parameter's name as the optimizer's groups have it, without wraps."""
        if self.numbers:
            return next((one for one, number in self.numbers.items() if number == name), name)
        return bare(name, self.words) if isinstance(name, str) and self.words else name

    def listed(self, name: str) -> object:
        """The name or number of a parameter in the optimizer's groups."""
        return self.numbers.get(name, self.optimizer.get(name, name))

    def notes(self) -> tuple[str, ...]:
        """For `inspect`."""
        if self.numbers:
            return (
                "the optimizer's numbers are named by shapes of its states, in the order of the model's state dict",
            )
        if not self.words or not (self.model or self.optimizer) or self.model == self.optimizer:
            return ()
        name, said = next(iter((self.model or self.optimizer).items()))
        whose = ("model", "optimizer") if self.model else ("optimizer", "model")
        return (f"`{name}` is `{said}` in the {whose[0]}'s names and not in the {whose[1]}'s: names are without wraps",)


def wrapped_of(checkpoint: Checkpoint) -> Wrapped:
    """The names of a checkpoint's dicts; none for files of another form."""
    return checkpoint.own if isinstance(checkpoint.own, Wrapped) else Wrapped()


def advice(source: Checkpoint, structure: Structure) -> tuple[str, ...]:
    """A note on a target whose names have wraps."""
    name = next((t.name for t in structure.tensors if has_wraps([t.name])), None)
    if name is None:
        return ()
    return (
        f"names have the steps of wrappers, as in {name}: load into module.state_dict() and optimizer.state_dict() by these"
        " names; get_state_dict of torch.distributed.checkpoint asks for names without them",
    )


def found_in(metadata: Metadata, root: Path, asked: NamedRoles = ANY) -> tuple[Metadata, Roles, Wrapped]:
    """Roles of the entries, by names without the steps of wrappers.

    Numbers of an optimizer have names. Raises: UcplError E446, E524.
    """
    less = _without(metadata, WRAPPERS) or metadata
    try:
        roles = roles_of(less, root, asked)
    except UcplError:
        for made, words, numbers in _others(metadata, less, root, asked):
            try:
                roles = roles_of(made, root, asked)
            except UcplError:
                continue
            return made, roles, _wrapped(roles, made, metadata, words, numbers)
        raise
    return less, roles, _wrapped(roles, less, metadata, WRAPPERS) if less is not metadata else Wrapped()


def _others(
    metadata: Metadata, less: Metadata, root: Path, asked: NamedRoles
) -> Iterator[tuple[Metadata, Set[str], dict[str, int]]]:
    """Metadata with names for numbers, and without `module` in names."""
    named = with_names(less, root, prefix_alone(less, asked), asked.order)
    if named is not None:
        yield named[0], WRAPPERS, named[1]
    if (loose := _without(metadata, LOOSE)) is not None:
        yield loose, LOOSE, {}


def _without(metadata: Metadata, words: Set[str]) -> Metadata | None:
    """The metadata without wrapper steps.

    None if nothing changes, or two names would be equal.
    """
    paths = {name: _steps(steps, words) for name, steps in metadata.paths.items()}
    names = {".".join(map(str, steps)) for steps in paths.values()}
    if len(names) < len(paths) or all(paths[name] == steps for name, steps in metadata.paths.items()):
        return None
    return metadata.renamed(paths)


def _steps(steps: tuple[Step, ...], words: Set[str]) -> tuple[Step, ...]:
    """A path without wrapper steps; its first step is kept."""
    out: list[Step] = []
    for n, step in enumerate(steps):
        if not isinstance(step, str):
            out.append(step)
            continue
        first, dot, rest = step.partition(".")
        less = bare(step, words) if n else first + (f".{bare(rest, words)}" if dot else "")
        if less or not step:
            out.append(less)
    return tuple(out)


def _wrapped(
    roles: Roles, made: Metadata, metadata: Metadata, words: Set[str], numbers: Mapping[str, int] | None = None
) -> Wrapped:
    """The names of both dicts in the files.

    Entries of `made` are those of `metadata`, in its order.
    """
    texts = (".".join(map(str, steps)) for steps in metadata.paths.values())
    said = dict(zip(made.paths, texts, strict=True))
    model = {name: said[entry].removeprefix(roles.prefix) for name, entry in roles.weights.items()}
    optimizer: dict[str, str] = {}
    for name, states in roles.states.items():
        for state, entry in states.items():
            owner = said[entry].removeprefix(roles.states_prefix).removesuffix(f".{state}")
            optimizer.setdefault(name, owner)
    for name, number in (numbers or {}).items():
        optimizer.setdefault(name, str(number))
    paths = dict(zip(made.paths, metadata.paths.values(), strict=True))
    values = {entry: paths[entry] for entry in roles.rest}
    return Wrapped(_changed(model), _changed(optimizer), words, dict(numbers or {}), values)


def _changed(names: Mapping[str, str]) -> dict[str, str]:
    return {name: said for name, said in names.items() if said != name}
