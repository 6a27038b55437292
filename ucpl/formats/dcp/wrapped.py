"""Names with wrapper steps in only one dict of a run.

`model.state_dict()` of blocks that torch.compile has wrapped has `layers.0._orig_mod.w`, and `get_optimizer_state_dict`
has `layers.0.w`. Both are one parameter. Its name is the one without wrapper steps, and a target of this form has the
names of the source's dicts again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from attrs import evolve, field

from ucpl.errors import UcplError
from ucpl.files.checkpoint import Checkpoint, Own
from ucpl.files.wrappers import LOOSE, WRAPPERS, bare
from ucpl.formats.dcp.metadata import Metadata, Step
from ucpl.formats.dcp.roles import Roles, roles_of
from ucpl.records import frozen

__all__ = ["Wrapped", "found_in", "wrapped_of"]


@frozen
class Wrapped(Own):
    """Parameter names that differ between the model's and the optimizer's dict."""

    model: dict[str, str] = field(factory=dict)
    optimizer: dict[str, str] = field(factory=dict)
    words: Set[str] = frozenset()

    def plain(self, name: object) -> object:
        """A parameter's name as the optimizer's groups have it, without wraps."""
        return bare(name, self.words) if isinstance(name, str) and self.words else name

    def told(self) -> tuple[str, ...]:
        """For `inspect`."""
        if not self.words:
            return ()
        name, said = next(iter((self.model or self.optimizer).items()))
        whose = ("model", "optimizer") if self.model else ("optimizer", "model")
        return (f"`{name}` is `{said}` in the {whose[0]}'s names and not in the {whose[1]}'s: names are without wraps",)


def wrapped_of(checkpoint: Checkpoint) -> Wrapped:
    """The names of a checkpoint's dicts; none for files of another form."""
    return checkpoint.own if isinstance(checkpoint.own, Wrapped) else Wrapped()


def found_in(metadata: Metadata, root: Path) -> tuple[Metadata, Roles, Wrapped]:
    """Roles of the entries, by names with or without wrapper steps.

    Raises: UcplError E524.
    """
    try:
        return metadata, roles_of(metadata, root), Wrapped()
    except UcplError:
        for words in (WRAPPERS, LOOSE):
            made = _without(metadata, words)
            if made is None:
                continue
            less, names = made
            try:
                roles = roles_of(less, root)
            except UcplError:
                continue
            return less, roles, _wrapped(roles, names, metadata, words)
        raise


def _without(metadata: Metadata, words: Set[str]) -> tuple[Metadata, dict[str, str]] | None:
    """The metadata without wrapper steps, and each former name.

    None if nothing changes, or two names would be equal.
    """
    paths = {name: _steps(steps, words) for name, steps in metadata.paths.items()}
    names = {name: ".".join(map(str, steps)) for name, steps in paths.items()}
    if len(set(names.values())) < len(names) or all(paths[name] == steps for name, steps in metadata.paths.items()):
        return None
    made = evolve(
        metadata,
        tensors={names[name]: one for name, one in metadata.tensors.items()},
        objects={names[name]: one for name, one in metadata.objects.items()},
        paths={names[name]: steps for name, steps in paths.items()},
        runs_of={names[name]: shape for name, shape in metadata.runs_of.items()},
        described={names.get(name, name): file for name, file in metadata.described.items()},
    )
    return made, {new: old for old, new in names.items()}


def _steps(steps: tuple[Step, ...], words: Set[str]) -> tuple[Step, ...]:
    """A path without wrapper steps; its first step is kept."""
    out: list[Step] = []
    for n, step in enumerate(steps):
        if not isinstance(step, str):
            out.append(step)
            continue
        first, dot, rest = step.partition(".")
        less = bare(step, words) if n else first + (f".{bare(rest, words)}" if dot else "")
        if less:
            out.append(less)
    return tuple(out)


def _wrapped(roles: Roles, names: Mapping[str, str], metadata: Metadata, words: Set[str]) -> Wrapped:
    texts = {name: ".".join(map(str, steps)) for name, steps in metadata.paths.items()}
    said = {new: texts[old] for new, old in names.items()}
    model = {name: said[entry].removeprefix(roles.prefix) for name, entry in roles.weights.items()}
    optimizer: dict[str, str] = {}
    for name, states in roles.states.items():
        for state, entry in states.items():
            owner = said[entry].removeprefix(roles.states_prefix).removesuffix(f".{state}")
            optimizer.setdefault(name, owner)
    return Wrapped(_changed(model), _changed(optimizer), words)


def _changed(names: Mapping[str, str]) -> dict[str, str]:
    return {name: said for name, said in names.items() if said != name}
