"""Roles of a DCP folder's entries: weights, states, groups, others.

A state dict is nested dicts and lists. `.metadata` has one name for each leaf, and its path. If there is an optimizer,
its names of parameters identify the model's tensors; no role is guessed from a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from attrs import field

from ucpl.errors import Label, UcplError, fail
from ucpl.files.checkpoint import Order
from ucpl.files.skipping import skips_optimizer
from ucpl.formats.dcp.folders import has_chunks, is_apart, joined_by
from ucpl.formats.dcp.metadata import Metadata, Step
from ucpl.records import frozen
from ucpl.storage.joined import parts_of

__all__ = ["ANY", "NamedRoles", "Roles", "prefix_alone", "roles_of"]

_MODELS = ("model", "module", "state_dict", "app")  # names of the model's dict, used if there is no optimizer
_STATE, _GROUPS = "state", "param_groups"
_METAS = "param_to_group_meta"  # of Megatron-FSDP: the hyper-parameters of each parameter, with its steps
_STEP = "step"
_HALVES = (
    "",
    "_w",
    "_v",
)  # Megatron-FSDP saves the gate and the up projection of a SwiGLU apart, and one meta for both
_LEADS_MAX = 4  # modules around a model
_LOOKED_AT_MAX = 10_000  # names among which the nearest is looked for
_NAMED_MAX = 4  # optimizers that a message names
_ROOTS_MAX = 100  # places of a dict called `param_groups` that are looked at
_NUMBERED = re.compile(r"(?P<group>[0-9]{1,9})\.(?P<key>.+)", re.DOTALL)


@frozen
class NamedRoles:
    """The model and the optimizer that a source's call names."""

    prefix: str = ""  # of the model's tensors: "gen."; "": not named
    states: str = ""  # of the optimizer's states: "opt_gen.state."; "": not named
    order: Order | None = None  # of the parameters, if the optimizer has numbers


ANY = NamedRoles()


@frozen
class Roles:
    """Names of `.metadata` by role."""

    prefix: str  # of the model's tensors: "model."
    states_prefix: str  # of the optimizer's: "optim.state."; "" where there is none
    weights: dict[str, str] = field(factory=dict)  # parameter or buffer -> name, in the model's order
    states: dict[str, dict[str, str]] = field(factory=dict)  # parameter -> state -> name
    groups: dict[int, dict[str, str]] = field(factory=dict)  # group -> hyper-parameter -> name
    hypers: dict[str, dict[str, str]] = field(factory=dict)  # parameter -> hyper-parameter -> name, of flat dicts
    list_of_groups: str = ""  # name of all groups as one value, as torch before 2.4 has them
    rest: tuple[str, ...] = ()


def roles_of(metadata: Metadata, root: Path, asked: NamedRoles = ANY) -> Roles:
    """Raises: UcplError E524 if no model, or several, fit the optimizer."""
    try:
        return _roles_of(metadata, root, asked)
    except UcplError:
        if not skips_optimizer(*dict.fromkeys(map(_kind_of, filter(_is_optimizer(metadata), metadata.paths)))):
            raise
    is_gone = _is_optimizer(metadata)
    return _roles_of(metadata.without(is_gone), root, asked)


def _kind_of(name: str) -> str:
    """The text behind a parameter's name."""
    return name.rpartition(".")[2]


def _is_optimizer(metadata: Metadata) -> Callable[[str], bool]:
    """A test for names of groups or states of an optimizer."""
    texts = {name: ".".join(map(str, steps)) for name, steps in metadata.paths.items()}
    tops = {root for text in texts.values() for root in islice(_roots(text, _GROUPS), _ROOTS_MAX)}
    heads = tuple(f"{top}{word}." for top in tops for word in (_STATE, _GROUPS))
    return lambda name: f"{texts.get(name, name)}.".startswith(heads)


def _roles_of(metadata: Metadata, root: Path, asked: NamedRoles) -> Roles:
    texts = {name: ".".join(map(str, steps)) for name, steps in metadata.paths.items()}
    tensors = {text: name for name, text in texts.items() if name in metadata.tensors}
    found = _optimizer(texts, tensors, root, metadata, asked)
    inside = set(found.entries)
    prefix = found.model if found.states else _prefix_alone(tensors, metadata, asked)
    trained = {prefix + name for name, _ in found.states}
    tops = {
        metadata.paths[tensors[text]][0] for text in trained
    }  # dicts that the model's tensors are in, without a prefix
    weights = {
        texts[name].removeprefix(prefix): name
        for name, steps in metadata.paths.items()
        if name in metadata.tensors
        and name not in inside
        and (texts[name].startswith(prefix) if prefix else len(steps) == 1 or not trained or steps[0] in tops)
    }
    states: dict[str, dict[str, str]] = {}
    for (name, state), entry in found.states.items():
        states.setdefault(name, {})[state] = entry
    groups: dict[int, dict[str, str]] = {}
    hypers: dict[str, dict[str, str]] = {}
    others: list[str] = []
    # Flat dicts have no lists of parameters: `0.lr` is of a parameter that is called 0 there.
    is_listed = any((match := _NUMBERED.fullmatch(rest)) and match["key"] == "params" for rest in found.groups)
    for rest, entry in found.groups.items():
        if not rest:
            continue
        owner, _, key = rest.rpartition(".")
        held = [owner + half for half in _HALVES if owner + half in weights] if not is_listed else []
        for one in held:
            into = states if key == _STEP and found.has_metas and one in states else hypers
            into.setdefault(one, {})[key] = entry
        if held:
            continue
        if (match := _NUMBERED.fullmatch(rest)) is not None:
            groups.setdefault(int(match["group"]), {})[match["key"]] = entry
        else:
            others.append(entry)
    known = {*weights.values(), *inside} - set(others)
    left = tuple(name for name in metadata.paths if name not in known)
    return Roles(prefix, found.prefix, weights, states, groups, hypers, found.groups.get("", ""), left)


_FOLDERS = ("model", "pretrained_model", "model_0", "pytorch_model_fsdp_0", "weights")  # next to an optimizer's


@frozen
class _Optimizer:
    prefix: str = ""  # of states
    states: dict[tuple[str, str], str] = field(factory=dict)  # (parameter, state) -> entry
    groups: dict[str, str] = field(factory=dict)  # the name after `param_groups.` -> entry; "": of the list itself
    model: str = ""  # prefix of the trained tensors' names
    has_metas: bool = False

    @property
    def entries(self) -> tuple[str, ...]:
        return (*self.states.values(), *self.groups.values())


def _optimizer(
    texts: Mapping[str, str], tensors: Mapping[str, str], root: Path, metadata: Metadata, asked: NamedRoles
) -> _Optimizer:
    """All entries of the dict that has `state` and `param_groups`.

    Modules of a model can have these names, too: an optimizer is a dict whose names under `state` are tensors of a
    model. Raises: UcplError E524.
    """
    found: list[_Optimizer] = []
    refused: list[tuple[str, str, str]] = []
    words = [word for word in (_GROUPS, _METAS) if any(word in text for text in texts.values())]
    roots = dict.fromkeys(
        (r, word) for word in words for text in texts.values() for r in islice(_roots(text, word), _ROOTS_MAX)
    )
    for top, word in sorted(islice(roots, _ROOTS_MAX), key=lambda r: r[0].count(".")):
        one = _with_states(texts, tensors, metadata, (top, word), asked)
        if isinstance(one, _Optimizer):
            found += [one] if all(one.prefix != other.prefix for other in found) else []
        elif one is not None:
            refused.append(one)
    named = [one for one in found if one.prefix == asked.states] or found
    named = [one for one in named if one.model == asked.prefix] or named
    if len(named) == 1:
        return named[0]
    if named:
        message, remedy, where = _several(named)
    elif refused:
        message, remedy, where = refused[0]
    else:
        return _without_states(texts, _prefix_alone(tensors, metadata, asked))
    described = metadata.describes(next(name for name, text in texts.items() if text.startswith(where)))
    fail("E524", message, Label(str(root / described), where=where), remedy=remedy or _model_next_to(root))


def _with_states(
    texts: Mapping[str, str], tensors: Mapping[str, str], metadata: Metadata, place: tuple[str, str], asked: NamedRoles
) -> _Optimizer | tuple[str, str, str] | None:
    """The optimizer at a place, or a fault.

    A fault comes with a remedy and its place. None: the dict at this place has no states of parameters.

    place: the text before the dict's keys, and the key of its groups.
    """
    top, word = place
    state, groups = f"{top}{_STATE}.", f"{top}{word}."
    found: dict[tuple[str, str], str] = {}
    for name, text in texts.items():
        if text.startswith(state):
            found[_owned(metadata.paths[name], text, state)] = name
    if not found or not all(owner and key for owner, key in found):
        return None
    refused: tuple[str, str, str] | None = None
    for lead in _leads({owner for owner, _ in found}):
        mine = {(owner.removeprefix(lead), key): name for (owner, key), name in found.items()}
        fitting, *unmatched = _prefixes({owner for owner, _ in mine}, tensors, set(mine.values()), top, asked)
        if len(fitting) == 1:
            of_groups = {
                t.removeprefix(groups).removeprefix(lead): name for name, t in texts.items() if t.startswith(groups)
            }
            as_one = next((name for name in metadata.objects if texts[name] == groups[:-1]), None)
            of_groups |= {"": as_one} if as_one else {}
            return _Optimizer(state + lead, mine, of_groups, fitting[0], word == _METAS)
        refused = refused or (unmatched[0], unmatched[1], state)
    return refused


def _several(found: list[_Optimizer]) -> tuple[str, str, str]:
    """The fault of several optimizers, a remedy, and its place."""
    names = ", ".join(f"`{one.prefix}`" for one in found[:_NAMED_MAX])
    ways = ", or ".join(
        f'--from \'dcp(prefix = "{one.model}", states = "{one.prefix}")\'' for one in found[:_NAMED_MAX]
    )
    remedy = f"give {ways}; the others are carried as values; --weights-alone needs no choice"
    return f"the folder has {len(found)} optimizers: {names}", remedy, found[0].prefix


def _without_states(texts: Mapping[str, str], model: str) -> _Optimizer:
    """An optimizer that keeps no states, such as SGD without momentum.

    model: prefix of the tensors.
    """
    roots = dict.fromkeys(root for text in texts.values() for root in islice(_roots(text, _GROUPS), _ROOTS_MAX))
    for top in islice(roots, _ROOTS_MAX):
        groups = f"{top}{_GROUPS}."
        found = {text.removeprefix(groups): name for name, text in texts.items() if text.startswith(groups)}
        keys = [match["key"] for rest in found if (match := _NUMBERED.fullmatch(rest))]
        owned = [rest for rest in found if model + rest.rpartition(".")[0] in texts]
        if (len(keys) == len(found) and "params" in keys) or (owned and len(owned) == len(found)):
            return _Optimizer(f"{top}{_STATE}.", {}, found, model)
    return _Optimizer()


def _model_next_to(root: Path) -> str:
    """A remedy that names the model's separate folder, or ""."""
    joined = parts_of(root)
    if len(joined) == 2 and has_chunks(joined[1]) and not has_chunks(joined[0]):
        return joined_by(*joined)
    top = root.resolve()
    if is_apart(top.parent):
        return f"this folder holds the optimizer alone: name {root.parent}, whose folders hold model and optimizer"
    found = (top.parents[n] / name for n in range(min(2, len(top.parents))) for name in _FOLDERS)
    model = next((one for one in found if one != top and os.path.isdir(one)), None)
    return f"this folder holds the optimizer alone: {joined_by(model, top)}" if model else ""


def _owned(steps: tuple[Step, ...], text: str, state: str) -> tuple[str, str]:
    """(parameter, state) of an entry of the optimizer's dict.

    If a state is itself a dict or list, the state's name has several steps: `GG.0` of SOAP.
    """
    for n in range(1, len(steps) - 1):
        owner = steps[n]
        if isinstance(owner, str) and ".".join(map(str, steps[:n])) + "." == state:
            return owner, ".".join(map(str, steps[n + 1 :]))
    owner, _, key = text.removeprefix(state).rpartition(".")
    return owner, key


def _roots(text: str, word: str) -> Iterator[str]:
    """Texts before a step called `word`: "optim." of "optim.param_groups.0.lr"."""
    text += "."
    if text.startswith(word + "."):
        yield ""
    at = text.find(f".{word}.")
    while at >= 0:
        yield text[: at + 1]
        at = text.find(f".{word}.", at + 1)


def _leads(owners: set[str]) -> Iterator[str]:
    """Candidate prefixes that only the optimizer's names of parameters have.

    A candidate is empty, or the first steps of all names, such as those of a wrapped model (`module.module.` of
    Megatron-FSDP).
    """
    steps = min(owners).split(".")[:-1]
    for n in range(min(len(steps), _LEADS_MAX) + 1):
        lead = "".join(f"{step}." for step in steps[:n])
        if all(owner.startswith(lead) for owner in owners):
            yield lead


def _prefixes(
    trained: set[str], tensors: Mapping[str, str], states: set[str], top: str, asked: NamedRoles
) -> tuple[list[str], str, str]:
    """The prefix of the model's tensors, or a fault and a remedy.

    If several models have the same names, as with averages of weights, the model next to the optimizer (at `top`) is
    used, then the named one, then the one with the name of a model.
    """
    first = min(trained)
    ends = [text.removesuffix(first) for text, name in tensors.items() if text.endswith(first) and name not in states]
    ends = [p for p in ends if not p or p.endswith(".")]
    fitting = [p for p in ends if all(p + name in tensors for name in trained)]
    if len(fitting) > 1:
        near = _nearest(fitting, top)
        called = [p for p in near if not p or p.split(".")[-2] in _MODELS]
        chosen = next((some for some in (near, [p for p in near if p == asked.prefix], called) if len(some) == 1), None)
        chosen = chosen or [p for p in fitting if p == asked.prefix]
        if len(chosen) != 1:
            names = " and ".join(f"`{p}{first}`" for p in (called or near)[:2])
            remedy = (
                "give "
                + ", or ".join(f"--from 'dcp(prefix = \"{p}\")'" for p in near[:_NAMED_MAX] if p)
                + ": the trained model; the others are carried as values"
            )
            return fitting, f"the optimizer has states of `{first}`, and several models have one: {names}", remedy
        return chosen, "", ""
    nearest = ends[0] if ends else ""
    missing = next((name for name in sorted(trained) if nearest + name not in tensors), first)
    texts = [text for text, name in islice(tensors.items(), _LOOKED_AT_MAX) if name not in states]
    close = get_close_matches(missing, texts, 1)
    more = f"; the nearest is `{close[0]}`" if close else ""
    return fitting, f"the optimizer has states of `{missing}`, and no tensor of a model is called so{more}", ""


def _nearest(prefixes: list[str], top: str) -> list[str]:
    """The prefixes that share the most steps with the optimizer's place."""
    steps = top.split(".")

    def shared(prefix: str) -> int:
        return next((n for n, (a, b) in enumerate(zip(prefix.split("."), steps, strict=False)) if a != b), 0)

    most = max(map(shared, prefixes))
    return [p for p in prefixes if shared(p) == most]


def prefix_alone(metadata: Metadata, asked: NamedRoles) -> str:
    """The prefix of the model's tensor names, by dict names alone."""
    texts = {".".join(map(str, steps)): name for name, steps in metadata.paths.items() if name in metadata.tensors}
    return _prefix_alone(texts, metadata, asked)


def _prefix_alone(tensors: Mapping[str, str], metadata: Metadata, asked: NamedRoles) -> str:
    """The prefix of the model's tensor names if there is no optimizer."""
    if asked.prefix and any(text.startswith(asked.prefix) for text in tensors):
        return asked.prefix
    tops = {str(metadata.paths[name][0]) for name in tensors.values() if len(metadata.paths[name]) > 1}
    return next((f"{top}." for top in _MODELS if top in tops), "")
