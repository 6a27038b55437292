"""What the entries of a folder of DCP are: weights, the optimizer's states, its groups, and what else a run saves.

A state dict is nested dicts and lists; `.metadata` has one name for each leaf, and says how it came from them. Where there is
an optimizer, its own names of parameters say which tensors are the model; nothing is guessed from how they are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import field

from ucpl.errors import Label, fail
from ucpl.records import frozen
from ucpl.stores.dcp.metadata import METADATA, Metadata

__all__ = ["Roles", "roles_of"]

_MODELS = ("model", "module", "state_dict", "app")  # what the model's dict is called where no optimizer tells
_STATE, _GROUPS = "state", "param_groups"


@frozen
class Roles:
    """Names of `.metadata` by what they are."""

    prefix: str  # of the model's tensors: "model."
    states_prefix: str  # of the optimizer's: "optim.state."; "" where there is none
    weights: dict[str, str] = field(factory=dict)  # parameter or buffer -> name, in the model's order
    states: dict[str, dict[str, str]] = field(factory=dict)  # parameter -> state -> name
    groups: dict[int, dict[str, str]] = field(factory=dict)  # group -> hyper-parameter -> name
    hypers: dict[str, dict[str, str]] = field(factory=dict)  # parameter -> hyper-parameter -> name, of flat dicts
    rest: tuple[str, ...] = ()


def roles_of(metadata: Metadata, root: Path) -> Roles:
    """Raises: UcplError E524 where the optimizer's parameters are no tensors here."""
    texts = {name: ".".join(map(str, steps)) for name, steps in metadata.paths.items()}
    tensors = {text: name for name, text in texts.items() if name in metadata.tensors}
    found = _optimizer(texts)
    prefix = _prefix({name for name, _ in found.states}, tensors, metadata, root)
    inside = set(found.entries)
    weights = {
        texts[name].removeprefix(prefix): name
        for name, steps in metadata.paths.items()
        if name in metadata.tensors
        and name not in inside
        and (texts[name].startswith(prefix) if prefix else len(steps) == 1 or not found.states)
    }
    states: dict[str, dict[str, str]] = {}
    for (name, state), entry in found.states.items():
        states.setdefault(name, {})[state] = entry
    groups: dict[int, dict[str, str]] = {}
    hypers: dict[str, dict[str, str]] = {}
    others: list[str] = []
    for rest, entry in found.groups.items():
        owner, _, key = rest.rpartition(".")
        if owner in weights:
            hypers.setdefault(owner, {})[key] = entry
        elif (number := rest.partition("."))[0].isdecimal() and number[2]:
            groups.setdefault(int(number[0]), {})[number[2]] = entry
        else:
            others.append(entry)
    known = {*weights.values(), *inside} - set(others)
    left = tuple(name for name in metadata.paths if name not in known)
    return Roles(prefix, found.prefix, weights, states, groups, hypers, left)


@frozen
class _Optimizer:
    prefix: str = ""  # of states
    states: dict[tuple[str, str], str] = field(factory=dict)  # (parameter, state) -> entry
    groups: dict[str, str] = field(factory=dict)  # what follows `param_groups.` -> entry

    @property
    def entries(self) -> tuple[str, ...]:
        return (*self.states.values(), *self.groups.values())


def _optimizer(texts: Mapping[str, str]) -> _Optimizer:
    """The dict that has `state` and `param_groups`: all of its entries."""
    for root in dict.fromkeys(r for text in texts.values() for r in _roots(text, _GROUPS)):
        state, groups = f"{root}{_STATE}.", f"{root}{_GROUPS}."
        found: dict[tuple[str, str], str] = {}
        for name, text in texts.items():
            if text.startswith(state):
                owner, _, key = text.removeprefix(state).rpartition(".")
                found[owner, key] = name
        if found and all(owner and key for owner, key in found):
            of_groups = {t.removeprefix(groups): name for name, t in texts.items() if t.startswith(groups)}
            return _Optimizer(state, found, of_groups)
    return _Optimizer()


def _roots(text: str, word: str) -> Iterator[str]:
    """What stands before a step called `word`: "optim." of "optim.param_groups.0.lr"."""
    if text.startswith(word + "."):
        yield ""
    at = text.find(f".{word}.")
    while at >= 0:
        yield text[: at + 1]
        at = text.find(f".{word}.", at + 1)


def _prefix(trained: set[str], tensors: Mapping[str, str], metadata: Metadata, root: Path) -> str:
    """What the names of the model's tensors begin with. Raises: UcplError E524."""
    if not trained:
        tops = {str(metadata.paths[name][0]) for name in tensors.values() if len(metadata.paths[name]) > 1}
        return next((f"{top}." for top in _MODELS if top in tops), "")
    first = min(trained)
    ends = (text.removesuffix(first) for text in tensors if text.endswith(first))
    fitting = [p for p in ends if (not p or p.endswith(".")) and all(p + name in tensors for name in trained)]
    if not fitting:
        missing = next((n for n in sorted(trained) if not any(t == n or t.endswith("." + n) for t in tensors)), first)
        fail(
            "E524",
            f"the optimizer has states of `{missing}`, and no tensor of a model is called so",
            Label(str(root / METADATA), where=missing),
        )
    return min(fitting, key=lambda p: (len(p), p))
