"""A folder of Megatron-FSDP as a checkpoint, under the names of modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import Extent, Key, NamedTensor, ParameterGroup, Setting
from ucpl.files.checkpoint import Checkpoint
from ucpl.formats.dcp import reading
from ucpl.formats.dcp.metadata import METADATA, read_metadata
from ucpl.formats.leaving import EMPTY, OPTIMIZER_VALUES
from ucpl.formats.megatron import fsdp_names as names
from ucpl.formats.megatron.folder import Step
from ucpl.formats.megatron.groups import is_expert
from ucpl.formats.megatron.legacy_arguments import arguments_in, part_own
from ucpl.formats.megatron.legacy_names import layer_of
from ucpl.formats.megatron.orders import registered
from ucpl.formats.megatron.roles import BUFFERS, MASTER
from ucpl.records import frozen

__all__ = ["NAME", "RNG", "TensorPlace", "halves_of", "opened"]

Shape = tuple[int, ...]
NAME = "megatron_fsdp"
RNG = "megatron_fsdp_rng"  # value of a run: random states by rank of pp and tp
_OWN_NORM = ".input_layernorm."  # a module of Megatron-Core's own blocks
_LAYERS = "decoder.layers."
_IS_EXPERT = "is_expert_parallel"
_T = TypeVar("_T")


@frozen
class TensorPlace:
    """The place of a file's tensor in one of the module."""

    name: str
    half: int | None = None


def opened(step: Step) -> Checkpoint:
    """Read the headers of all archives.

    Raises: UcplError E455, E457, E460, E520-E524, E544.
    """
    held = reading.opened(step.root, read_metadata(step.root))
    settings = held.state.settings
    prefix, states = (str(settings[name].value) for name in ("prefix", "states"))
    lead = names.LEAD if all(tensor.name.startswith(names.LEAD) for tensor in held.state.tensors) else ""
    places = halves_of({t.name: t.shape for t in held.state.tensors}, lead, held.root)
    places |= {alias: TensorPlace(names.in_modules(alias.removeprefix(lead))) for alias in held.state.aliases}
    trained = {tensor.name for tensor in held.state.tensors if tensor.states}
    shapes = {tensor.name: tensor.shape for tensor in held.state.tensors}
    extents: dict[tuple[str, Key], Extent] = {}
    for (file, key), extent in held.extents.items():
        name, state = _tensor_and_state(str(key[0]), prefix, states)
        if file != METADATA or name not in places:
            extents[file, key] = extent
            continue
        place = places[name]
        begin = [step for step in key[1:] if isinstance(step, int)]
        if place.half:
            begin[0] += shapes[name][0]
        state = MASTER if not state and name in trained else state
        made: Key = (f"{names.STATES}{state}.{place.name}" if state else place.name, *begin)
        extents[METADATA, made] = evolve(extent, key=made)
    carried = dict(held.state.carried)
    blobs = dict(held.state.blobs)
    if "rng_state" in carried:
        blobs[RNG] = carried.pop("rng_state")
    if isinstance(empty := blobs.get(EMPTY), dict):
        blobs[EMPTY] = {names.in_modules(str(name).removeprefix(lead)): one for name, one in empty.items()}
    if isinstance(others := blobs.get(OPTIMIZER_VALUES), dict):
        blobs[OPTIMIZER_VALUES] = _in_modules(others, places)
    part_own(carried)
    numbers = arguments_in(held)
    _check_all_stages(numbers, [place.name for place in places.values()], held.root)
    dtype = _dtype(states, numbers)
    scalars = {s: _renamed(values, places) for s, values in held.state.scalars.items()}
    grouped = any(names.in_modules(place) != place for place in (n.removeprefix(lead) for n in places))
    more = {
        "masters": Setting(int(bool(trained)), f"names in {METADATA}"),
        "grouped": Setting(int(grouped), f"names in {METADATA}"),
        "file": Setting(METADATA, "its name"),
    }
    if trained:
        more |= {
            "owner": Setting(states.removeprefix(names.STATES) + lead, f"names in {METADATA}"),
            "bf16": Setting(int(dtype == "bf16"), "modules around the model, and args"),
            "fp16": Setting(int(dtype == "f16"), "modules around the model, and args"),
        }
    return evolve(
        held,
        top=step.top,
        tag=step.tag,
        format=NAME,
        extents=extents,
        state=evolve(
            held.state,
            tensors=_tensors(held, places, trained, dtype),
            aliases={},
            framework=NAME if held.state.framework == held.format else held.state.framework,
            settings=more,
            groups=_groups(held, places, numbers),
            scalars=scalars,
            blobs=blobs,
            carried=carried,
        ),
        scalar_extents={s: _renamed(values, places) for s, values in held.scalar_extents.items()},
    )


def _check_all_stages(numbers: Mapping[object, object], found: list[str], root: Path) -> None:
    """Check that all layers of all stages are stored.

    Raises: UcplError E544 if several stages saved their layers under the same names, so that one value of each remains.
    """
    stages, said = numbers.get("pipeline_model_parallel_size"), numbers.get("num_layers")
    layers = {number for prefix, number in filter(None, map(layer_of, found)) if prefix == _LAYERS}
    if type(stages) is not int or type(said) is not int or stages < 2 or len(layers) == said:
        return
    fail(
        "E544",
        f"the run's arguments say {said} layers on {stages} stages, and the folder has {len(layers)}: Megatron-FSDP calls"
        " layers by the number that they have on their stage, so that those of all stages have the same names",
        Label(str(root / METADATA), f"num_layers = {said}", where="args"),
        Label(str(root / METADATA), f"{len(layers)} layers", where=_LAYERS),
        remedy="a value under such a name can be of any stage: save the run with one stage,"
        " or with --ckpt-format torch_dist, whose names are the model's",
    )


def halves_of(shapes: Mapping[str, Shape], lead: str, root: Path) -> dict[str, TensorPlace]:
    """The place of each tensor of the files.

    shapes: by their names; lead: their prefix, which modules lack. Raises: UcplError E521 if only one half of a
    linear_fc1 exists, if the halves have different shapes, or if two names are of one tensor of the module.
    """
    out: dict[str, TensorPlace] = {}
    taken: dict[TensorPlace, str] = {}
    for name, shape in shapes.items():
        found = names.halved(name)
        whole, half = (name, None) if found is None else found
        place = TensorPlace(names.in_modules(whole.removeprefix(lead)), half)
        out[name] = place
        halves = tuple(TensorPlace(place.name, half) for half in range(len(names.HALVES)))
        rivals = (place, *(halves if found is None else (TensorPlace(place.name),)))
        twice = next((taken[rival] for rival in rivals if rival in taken), None)
        if twice is not None:
            fail(
                "E521",
                f"`{twice}` and `{name}` are both `{place.name}` of the module",
                Label(str(root / METADATA), where=twice),
                Label(str(root / METADATA), where=name),
            )
        taken[place] = name
        if half is None:
            continue
        other = whole + names.HALVES[1 - half]
        if shapes.get(other) != shape or not shape:
            text = f"is {list(shapes[other])}" if other in shapes else "is not there"
            fail(
                "E521",
                f"`{name}` is {list(shape)}, and `{other}` {text}: a gated linear_fc1 has two halves of one shape",
                Label(str(root / METADATA), where=name),
            )
    return out


def _tensor_and_state(entry: str, prefix: str, states: str) -> tuple[str, str]:
    """(tensor, state) of a name in the files."""
    if states and entry.startswith(states):
        name, _, state = entry.removeprefix(states).rpartition(".")
        return name, state
    return entry.removeprefix(prefix), ""


def _renamed(values: Mapping[str, _T], places: Mapping[str, TensorPlace]) -> dict[str, _T]:
    return {places[name].name: value for name, value in values.items() if name in places}


def _in_modules(
    others: Mapping[str, Mapping[str, object]], places: Mapping[str, TensorPlace]
) -> dict[str, dict[str, object]]:
    """States of other forms by names of modules.

    Those of a half end with its mark.
    """
    out: dict[str, dict[str, object]] = {}
    for name, states in others.items():
        place = places[name]
        mark = "" if place.half is None else names.HALVES[place.half]
        out.setdefault(place.name, {}).update({f"{state}{mark}": value for state, value in states.items()})
    return out


def _dtype(states: str, numbers: Mapping[object, object]) -> str:
    """The training dtype of a run.

    If a module of 16 bits wraps the model, it is bf16 unless the run's arguments say fp16.
    """
    if states.removeprefix(names.STATES).count(names.LEAD) < len(("adapter", "Float16Module")):
        return "f32"
    return "f16" if numbers.get("fp16") is True else "bf16"


def _tensors(
    held: Checkpoint, places: Mapping[str, TensorPlace], trained: set[str], dtype: str
) -> tuple[NamedTensor, ...]:
    """Tensors in order of registration.

    A trained tensor is its master, and its weight has the training dtype.
    """
    out: dict[str, NamedTensor] = {}
    for tensor in held.state.tensors:
        place = places[tensor.name]
        shape = tensor.shape if place.half is None else (2 * tensor.shape[0], *tensor.shape[1:])
        is_trained = tensor.name in trained
        kind = "buffer" if BUFFERS.fullmatch(place.name) else "parameter" if is_trained or not trained else "frozen"
        out[place.name] = NamedTensor(
            place.name,
            shape,
            dtype if is_trained else tensor.dtype,
            kind,
            (MASTER, *tensor.states) if is_trained else (),
        )
    is_fused = not any(_OWN_NORM in name for name in out)
    return tuple(out[name] for name in registered(tuple(out), fused=is_fused))


def _groups(
    held: Checkpoint, places: Mapping[str, TensorPlace], numbers: Mapping[object, object]
) -> tuple[ParameterGroup, ...]:
    """Parameter groups, with separate ones of dealt experts.

    Groups of Megatron's other optimizers are separate, too.
    """
    ep = numbers.get("expert_model_parallel_size", 1)
    apart = type(ep) is int and ep > 1
    found: list[tuple[dict[str, object], list[str]]] = []
    for group in held.state.groups:
        members = list(dict.fromkeys(places[name].name for name in group.members))
        parts = [[n for n in members if apart and is_expert(n) is of_experts] for of_experts in (False, True)]
        for is_of_experts, mine in enumerate(parts) if apart else ((None, members),):
            if mine:
                more = {} if is_of_experts is None else {_IS_EXPERT: bool(is_of_experts)}
                found.append(({**group.hyper, **more}, mine))
    return tuple(ParameterGroup(str(n), tuple(members), hyper) for n, (hyper, members) in enumerate(found))
