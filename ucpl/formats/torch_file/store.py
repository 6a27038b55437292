"""Files of torch.save with state dicts of a model and its optimizers.

    {"model": {name: tensor}, "optimizer": {"state": {number: {...}}, "param_groups": [...]}, "epoch": 3, ...}

Keys have any names, and a state dict of a model can be the complete file. State dicts are found by their structure; all other
values are values of the run. Names are those of the model without the steps of wrappers. Numbers of an optimizer get names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NoReturn

from attrs import field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import (
    Extent,
    Key,
    NamedTensor,
    Setting,
    StoredTensor,
    Structure,
    TensorRef,
    TrainState,
    in_elements,
    key_text,
)
from ucpl.files.carrying import lifted
from ucpl.files.checkpoint import Checkpoint, Order, Skeleton
from ucpl.files.demands import Demands
from ucpl.files.pickles import attributes_of
from ucpl.files.plain_values import decode
from ucpl.files.skipping import skips_optimizer
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.leaving import EXTRA as MODULE_EXTRA
from ucpl.formats.leaving import OPTIMIZERS
from ucpl.formats.torch_dicts import (
    Dicts,
    NamedTensors,
    dicts_of,
    is_average,
    is_model,
    is_of_module,
    is_schedule,
    joined,
    named_tensors,
)
from ucpl.formats.torch_file.masters import MasterList, masters_in
from ucpl.formats.torch_file.modules import not_read_in, read
from ucpl.formats.torch_file.writing import ENVELOPE, MASTER, MODEL, NAME, OPTIMIZER, OTHERS, skeleton_of
from ucpl.formats.torch_optimizer import (
    EXTRA,
    NamedOptimizer,
    OptimizerFacts,
    candidates_of,
    fits,
    is_conventional,
    named_optimizers,
    noted_empty,
    read_facts,
    trains_all,
)
from ucpl.records import define

__all__ = ["TorchFiles"]

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_FILES_MAX = 32  # files of a folder that are looked at
_SHOWN = 6  # dicts that an error names
_CALLED = ("model", "state_dict", "model_state_dict", "module", "net", "network", "weights", "params", "app")
_LIGHTNING = "pytorch-lightning_version"  # a key of each checkpoint of Lightning's Trainer
_TRAINED = "current_model_state"  # of its callbacks that average weights: `state_dict` has the averages then
_FLOATS = ("f", "bf", "c")
_SCHEDULE = "lr_scheduler"


class TorchFiles:
    name = NAME
    demands = Demands()

    def recognises(self, path: Path) -> bool:
        try:
            return bool(_parts(path))
        except UcplError as error:
            if error.is_of_the_disk:
                raise
            return False

    def open(self, path: Path, order: Order | None = None, arguments: Mapping[str, object] | None = None) -> Checkpoint:
        """Read the headers.

        arguments: those of the source's call. Raises: UcplError E439, E446, E447, E466.
        """
        return _Opened(path, _parts(path), dict(arguments or {})).checkpoint(order)

    def skeleton(
        self, structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None
    ) -> Skeleton:
        """The file of a target. Raises: UcplError E471."""
        return skeleton_of(structure, targets, source)


def _parts(path: Path) -> tuple[TorchFile, ...]:
    """The torch files of a path, the model's first.

    Empty if it is no such path.
    """
    if path.is_file():
        part = read(path.parent, path.name)
        return (part,) if _is_ours(part) else ()
    names = sorted(p.name for p in path.iterdir() if p.suffix in _SUFFIXES)
    if not 0 < len(names) <= _FILES_MAX:
        return ()
    parts = tuple(read(path, name) for name in names)
    models = [part for part in parts if _is_ours(part) and dicts_of(Value.of(part)).models]
    return (*models, *(part for part in parts if part is not models[0])) if len(models) == 1 else ()


def _is_ours(part: TorchFile) -> bool:
    held = part.value
    if isinstance(held, list | tuple):
        return bool(dicts_of(Value.of(part)).models)
    if not isinstance(held, dict) or (ENVELOPE not in held and not OTHERS.isdisjoint(held)):
        return False  # a file of ucpl's own may carry such a key as a value of the run
    found = dicts_of(Value.of(part))
    return bool(found.models or found.optimizers) or _is_mixed(held)


def _entries(held: object) -> dict[object, object]:
    """The values of a dict, or those of a list by number."""
    return held if isinstance(held, dict) else dict(enumerate(held)) if isinstance(held, list | tuple) else {}


def _is_mixed(held: object) -> bool:
    """Test for tensors of a model among values of other kinds."""
    if not isinstance(held, dict) or is_model(held):
        return False
    tensors = {name: one for name, one in held.items() if isinstance(one, TensorRef)}
    return is_model(tensors) and not any(isinstance(one, dict) and is_model(one) for one in held.values())


# ---- reading ---------------------------------------------------------------------------------------------------------


@define(eq=False)
class _Opened:
    top: Path
    parts: tuple[TorchFile, ...]  # the model's first
    said: dict[str, object]
    models: dict[Key, Value] = field(factory=dict)  # by place; several are read as one
    named: NamedTensors | None = None
    optimizers: dict[Key, Value] = field(factory=dict)
    optimizer_part: TorchFile | None = None
    masters: MasterList | None = None
    skipped: tuple[Key, ...] = ()  # optimizers that the call leaves out
    notes: list[str] = field(factory=list)

    @property
    def part(self) -> TorchFile:
        return self.parts[0]

    # ---- choices ---------------------------------------------------------------------------------------------------

    def choose(self, order: Order | None) -> None:
        """The model, and its optimizers."""
        found = dicts_of(Value.of(self.part))
        held = self.part.value if isinstance(self.part.value, dict) else {}
        if isinstance(stated := held.get(ENVELOPE), dict):
            self.said = {key: stated[key] for key in ("model", "optimizer", "wrap") if key in stated} | self.said
        if not found.models and _is_mixed(self.part.value):
            found.models[()] = Value.of(self.part)
        for part in self.parts[1:]:
            inner = dicts_of(Value.of(part)).optimizers
            if inner:
                if found.optimizers:
                    self.several("optimizer", [*map(key_text, found.optimizers), part.file])
                found.optimizers.update(inner)
                self.optimizer_part = part
        if not found.models:
            fail(
                "E439",
                f"{self.part.file} has the state of an optimizer, and no model",
                Label(str(self.part.path), where=key_text(next(iter(found.optimizers), ()))),
                remedy="name the file of the model, the folder with both files, or both, as MODEL.pt+OPTIMIZER.pt",
            )
        self.models = {place: found.models[place] for place in self.chosen_models(found)}
        self.named = self.names()
        if found.optimizers and skips_optimizer(*(key_text(place) or OPTIMIZER for place in found.optimizers)):
            self.skipped = tuple(found.optimizers)
            found = Dicts(found.models)
        self.optimizers = self.chosen_optimizers(found, self.named, order)
        for kind, all_, mine in (
            ("model", found.models, {*self.models}),
            ("optimizer", found.optimizers, {*self.optimizers}),
        ):
            for place in all_:
                if place not in mine:
                    self.notes.append(f"`{key_text(place)}` is another {kind}: it is a value of the run")

    @property
    def is_lightning(self) -> bool:
        """True for a file of Lightning's Trainer."""
        return isinstance(self.part.value, dict) and _LIGHTNING in self.part.value

    def names(self) -> NamedTensors:
        wrap = self.said.get("wrap")
        lead = wrap if isinstance(wrap, str) else None
        made = {place: named_tensors(one, lead, any_lead=self.is_lightning) for place, one in self.models.items()}
        for place, one in made.items():
            if one.lead:
                where = f"`{key_text(place)}`" if len(made) > 1 else "the file"
                self.notes.append(f"names are without `{one.lead}`, with which all names of {where} begin")
        return joined(made) if len(made) > 1 else next(iter(made.values()))

    def chosen_models(self, found: Dicts) -> list[Key]:
        """The place of the model.

        Several are read as one. Raises: UcplError E447.
        """
        asked = self.said.get("model")
        if asked:
            known = {key_text(place) for place in found.models}
            texts = [str(asked)] if str(asked) in known else [one.strip() for one in str(asked).split(",")]
            return [self.asked("model", one, found.models) for one in texts]
        models = [place for place in found.models if not is_average(place)] or [*found.models]
        if self.is_lightning and (_TRAINED,) in models:
            models = [(_TRAINED,)]
        if len(models) > 1 and found.optimizers:
            fitting = [m for m in models if fits([*found.optimizers.values()], named_tensors(found.models[m]))]
            models = fitting if len(fitting) == 1 else models
        if len(models) > 1 and len(found.optimizers) == 1:
            named = {place: named_tensors(found.models[place]) for place in models}
            if trains_all(next(iter(found.optimizers.values())), named):
                self.notes.append(f"the optimizer trains {len(models)} models, which are read as one")
                return models
        if len(models) > 1 and len(found.optimizers) < 2:
            called = [place for place in models if place and str(place[-1]) in _CALLED]
            models = called if len(called) == 1 else models
        if len(models) > 1:
            first = named_tensors(found.models[models[0]])
            its = sorted(found.optimizers, key=lambda place: not fits([found.optimizers[place]], first))
            self.several("model", [*map(key_text, models)], [*map(key_text, its)])
        return models

    def chosen_optimizers(self, found: Dicts, named: NamedTensors, order: Order | None) -> dict[Key, Value]:
        """The optimizers of the model. Raises: UcplError E447."""
        asked = self.said.get("optimizer")
        if asked == OPTIMIZER and len(found.optimizers) > 1 and (OPTIMIZER,) not in found.optimizers:
            asked = asked if any(isinstance(place[-1], int) for place in found.optimizers) else None  # of a target
        if asked and found.optimizers and self.optimizer_part is None:
            keys = (str(asked), *(["optimizers"] if asked == OPTIMIZER else []))  # a target's list of several
            listed = {place: one for place, one in found.optimizers.items() if key_text(place[:-1]) in keys}
            if listed and all(isinstance(place[-1], int) for place in listed):
                return listed
            places = [self.asked("optimizer", one.strip(), found.optimizers) for one in str(asked).split(",")]
            return {place: found.optimizers[place] for place in places}
        if len(found.optimizers) < 2 or order is not None or fits([*found.optimizers.values()], named):
            return found.optimizers
        mine = {place: one for place, one in found.optimizers.items() if fits([one], named)}
        others = [named_tensors(one) for place, one in found.models.items() if place not in self.models]
        rest = [one for place, one in found.optimizers.items() if place not in mine]
        if len(mine) != 1 or not all(any(fits([one], other) for other in others) for one in rest):
            self.several("optimizer", [*map(key_text, found.optimizers)])
        return mine

    def asked(self, kind: str, text: str, known: Mapping[Key, Value]) -> Key:
        place = next((place for place in known if key_text(place) == text), None)
        if place is None:
            self.several(kind, [*map(key_text, known)], missing=text)
        return place

    def several(self, kind: str, names: list[str], others: list[str] | None = None, missing: str = "") -> NoReturn:
        rest = len(names) - _SHOWN
        shown = ", ".join(f"`{name}`" for name in names[:_SHOWN]) + f", and {rest} more" * (rest > 0)
        more = f', optimizer="{others[0]}"' if others and len(others) > 1 else ""
        message = (
            f"no {kind} at `{missing}`; there are {shown}" if missing else f"{len(names)} dicts of {_a(kind)}: {shown}"
        )
        all_of = f'; model="{",".join(names)}" reads all as one'
        if kind == OPTIMIZER:
            all_of = "; --order names.txt, with the parameters of all in their order, reads all"
        fail(
            "E447",
            f"{self.part.file} has {message}",
            Label(str(self.part.path), where=names[0]),
            remedy=f"--from '{NAME}({kind}=\"{names[0]}\"{more})' reads one; the others are values of the run{all_of}",
        )

    def stored_names(self) -> list[str]:
        """The names of the models' values, as stored.

        They begin with the place of the model if there are several.
        """
        ways = {place: ".".join(map(str, place)) + "." if len(self.models) > 1 else "" for place in self.models}
        return [ways[place] + name for place, model in self.models.items() for name, _ in model.named()]

    # ---- the checkpoint --------------------------------------------------------------------------------------------

    def checkpoint(self, order: Order | None) -> Checkpoint:
        self.choose(order)
        assert self.named is not None
        named, part = self.named, self.part
        words = self.words()
        facts = self.facts(named, order, words)
        payload: dict[tuple[str, Key], Extent] = {
            (part.file, (MODEL, name)): part.extent((MODEL, name), ref) for name, ref in self.weights().items()
        }
        where = self.optimizer_part or part
        payload |= {(where.file, key): extent for key, extent in facts.payload.items()}
        blobs, carried = self.values(named, facts)
        state = TrainState(
            framework=NAME,
            tensors=self.tensors(named, facts),
            aliases={a: o for a, o in named.aliases.items() if prod(named.tensors[o].shape)},
            groups=facts.groups,
            scalars=facts.scalars,
            settings=self.settings(facts),
            blobs=blobs,
            carried=carried,
        )
        files = {p.file: p for p in self.parts}
        return Checkpoint(
            top=self.top,
            root=part.root,
            tag=None,
            format=NAME,
            version="",
            extents={place: extent for place, extent in payload.items() if extent.numel},
            carried_extents=self.others(facts),
            state=state,
            files=tuple(files),
            not_read=(*(one for p in self.parts for one in not_read_in(p)), *facts.not_read),
            notes=tuple(self.notes),
            remarks=tuple(self.notes),
            scalar_extents=facts.scalar_extents,
        )

    def words(self) -> dict[str, Value]:
        """The optimizers by their place in one list, or by their keys."""
        if len(self.optimizers) < 2:
            return dict(zip([""], self.optimizers.values(), strict=False))
        is_listed = len({place[:-1] for place in self.optimizers}) == 1 and all(
            isinstance(place[-1], int) for place in self.optimizers
        )
        return {str(place[-1]) if is_listed else key_text(place): one for place, one in self.optimizers.items()}

    def facts(self, named: NamedTensors, order: Order | None, words: Mapping[str, Value]) -> OptimizerFacts:
        """The optimizers' states and groups. Raises: UcplError E446, E466."""
        if not words:
            return OptimizerFacts()
        made = named_optimizers([*words.values()], named, order)
        shapes = {name: one.shape for name, one in named.tensors.items()}
        by_word: dict[str, NamedOptimizer] = dict(zip(words, made, strict=True))
        where = self.optimizer_part or self.part
        facts = read_facts(where, by_word, shapes, (OPTIMIZER,))
        groups = [group.every for group in facts.groups]
        if all(extent.dtype == "f32" for extent in facts.payload.values()):
            self.masters = masters_in(where.value, named.tensors, groups)
        for name, (place, one) in self.masters.tensors.items() if self.masters is not None else ():
            key = (OPTIMIZER, name, MASTER)
            facts.payload[key] = where.extent(key, one)
            facts.states[name] = (*facts.states.get(name, ()), MASTER)
            facts.read.add(place)
        return facts

    def weights(self) -> dict[str, TensorRef]:
        assert self.named is not None
        return {name: one for name, one in self.named.tensors.items() if name not in self.named.aliases}

    def tensors(self, named: NamedTensors, facts: OptimizerFacts) -> tuple[NamedTensor, ...]:
        listed = {name for group in facts.groups for name in group.every}
        trained = {name for group in facts.groups for name in group.members}
        candidates = candidates_of(named)
        out = []
        for name, one in self.weights().items():
            if prod(one.shape):
                kind = (
                    _kind(name, candidates)
                    if not trained
                    else "parameter"
                    if name in trained
                    else _idle(name, one, listed)
                )
                dtype = one.storage.dtype
                out.append(NamedTensor(name, in_elements(dtype, one.shape), dtype, kind, facts.states.get(name, ())))
        return tuple(out)

    def settings(self, facts: OptimizerFacts) -> dict[str, Setting]:
        part = self.part
        origin = f"the keys of {part.file}"
        out = {"file": Setting(part.file, "its name")}
        is_list = isinstance(part.value, list | tuple)
        # a target has keys of its own for the items of a list; a state dict alone has no place for other values
        if not is_list and not (() in self.models and _is_mixed(part.value)):
            out["model"] = Setting(",".join(map(key_text, self.models)), origin)
        places = [*self.optimizers]
        if is_list and self.optimizer_part is None:
            self.notes.append(f"{part.file} is a list: a target is a dict with the keys `{MODEL}` and `{OPTIMIZER}`")
        elif len(places) == 1:
            out["optimizer"] = Setting(key_text(places[0]), origin)
        elif places and all(isinstance(place[-1], int) for place in places):
            out["optimizer"] = Setting(key_text(places[0][:-1]), origin)
        rows = [group for one in self.optimizers.values() for group in one.at("param_groups").items()]
        names = [name.held for group in rows for name in group.at("params").items()]
        if names and all(isinstance(name, str) for name in names):
            out["named"] = Setting(1, f"the optimizer of {part.file}")
        if self.is_lightning and self.named is not None and self.named.lead:
            out["wrap"] = Setting(self.named.lead, f"names in {part.file}")
        if self.optimizer_part is not None:
            out["optimizer_file"] = Setting(Path(self.optimizer_part.file).name, "its name")
        if (key := self.schedule()) is not None:
            out["scheduler"] = Setting(key, origin)
        if self.masters is not None:
            out["master_list"] = Setting(self.masters.key, origin)
        out["masters"] = Setting(int(any(MASTER in states for states in facts.states.values())), origin)
        return out

    # ---- values of the run -----------------------------------------------------------------------------------------

    def schedule(self) -> str | None:
        """The key of the only schedule at the top."""
        held = self.part.value if isinstance(self.part.value, dict) else {}
        found = [key for key, one in held.items() if isinstance(key, str) and is_schedule(one)]
        return found[0] if len(found) == 1 else None

    def values(self, named: NamedTensors, facts: OptimizerFacts) -> tuple[dict[str, object], dict[object, object]]:
        """Values by their keys: those that frameworks share, and the caller's."""
        part, schedule = self.part, self.schedule()
        mine = {*self.optimizers, *self.skipped}
        of_masters = {self.masters.place} if self.masters is not None else set()
        taken = {*self.models, *(mine | of_masters if self.optimizer_part is None else ())}
        carried: dict[object, object] = {}
        blobs: dict[str, object] = {}
        extra = {name: one for name, one in named.extra.items() if is_of_module(name, one)}
        held = _entries(part.value)
        for key, value in held.items():
            rest = _without(value, (key if isinstance(key, str | int) else str(key),), taken)
            if () in self.models and (key in extra or key not in named.extra):
                continue  # a value of the model
            if key == ENVELOPE and isinstance(value, dict):
                blobs |= self.kept(Value.of(part).at(ENVELOPE))
            elif key == schedule:
                blobs[_SCHEDULE] = lifted(value, part.file)
            elif rest is not _NOTHING:
                carried[key if held is part.value else str(key)] = lifted(rest, part.file)
        for other in self.parts[1:]:
            rest = _without(other.value, (), mine | of_masters if other is self.optimizer_part else set())
            if rest is not _NOTHING:
                carried[Path(other.file).stem] = lifted(rest, other.file)
        if extra:
            blobs[MODULE_EXTRA] = {name: lifted(one, part.file) for name, one in extra.items()}
        if len(self.optimizers) > 1:
            blobs[OPTIMIZERS] = [group.name.rpartition("/")[0] for group in facts.groups]
        if facts.extra:
            blobs[EXTRA] = facts.extra
        blobs |= self.of_module(named, facts)
        return blobs, carried

    def kept(self, envelope: Value) -> dict[str, object]:
        """Values of a run that a conversion kept, as torch.load takes them."""
        if envelope.find("blobs") is None:
            return {}
        made = decode(lifted(envelope.at("blobs").held, self.part.file))
        if not isinstance(made, dict) or not all(isinstance(key, str) for key in made):
            envelope.at("blobs").wrong("a dict whose keys are texts")
        return made

    def of_module(self, named: NamedTensors, facts: OptimizerFacts) -> dict[str, object]:
        """The state dict's order, attributes and tensors without elements."""
        out: dict[str, object] = {"module_names": [named.by_stored.get(name, name) for name in self.stored_names()]}
        held = next(iter(self.models.values())).held if len(self.models) == 1 else None
        is_as_stored = all(name == said for name, said in named.stored.items())
        if is_as_stored and isinstance(held, OrderedDict) and (attributes := attributes_of(held)):
            out["module_attributes"] = lifted(attributes, self.part.file)
        return out | noted_empty(named, facts)

    def others(self, facts: OptimizerFacts) -> dict[tuple[str, Key], Extent]:
        """Tensors within values of the run."""
        tensors = {(*place, name): one.held for place, model in self.models.items() for name, one in model.named()}
        weights = {key for key, one in tensors.items() if isinstance(one, TensorRef)}
        where = (self.optimizer_part or self.part).file
        out = {}
        for part in self.parts:
            for extent in part.extents():
                is_weight = part is self.part and extent.key in weights
                if not is_weight and not (part.file == where and extent.key in facts.read):
                    out[part.file, extent.key] = extent
        if self.skipped:
            heads = [(*place,) for place in self.skipped]
            out = {at: one for at, one in out.items() if at[0] != where or not any(at[1][: len(h)] == h for h in heads)}
        return out


class _Nothing:
    """The absence of a rest."""


_NOTHING = _Nothing()


def _a(kind: str) -> str:
    return f"an {kind}" if kind == OPTIMIZER else f"a {kind}"


def _without(value: object, at: Key, taken: set[Key]) -> object:
    """A value without the state dicts at these places, or _NOTHING."""
    if at in taken:
        return _NOTHING
    if not any(place[: len(at)] == at for place in taken):
        return value
    if isinstance(value, dict):
        kept = {key: _without(one, (*at, key), taken) for key, one in value.items()}
        rest = {key: one for key, one in kept.items() if one is not _NOTHING}
        return rest or _NOTHING
    if isinstance(value, list | tuple):
        listed = [one for n, item in enumerate(value) if (one := _without(item, (*at, n), taken)) is not _NOTHING]
        return listed or _NOTHING
    return value


def _kind(name: str, candidates: Mapping[str, object]) -> str:
    """The kind of a tensor without an optimizer.

    Integers and statistics of norms are buffers.
    """
    return "parameter" if name in candidates else "buffer"


def _idle(name: str, one: TensorRef, listed: set[str]) -> str:
    """The kind of a tensor that is not trained.

    Modules of torch call parameters `weight` and `bias`; others are buffers, if the optimizer does not list them.
    """
    if name in listed:
        return "frozen"
    is_float = one.storage.dtype.startswith(_FLOATS)
    return "frozen" if is_float and is_conventional(name, one.shape) else "buffer"
