"""Folders of the Trainer and of Accelerate with complete tensors.

    model.safetensors, its shards, or pytorch_model.bin      of DDP and one process
    pytorch_model_fsdp.bin                                   of FSDP with FULL_STATE_DICT
    optimizer.pt of the Trainer, optimizer.bin of Accelerate and of FSDP; optimizer_1.bin, ... of several optimizers

Names are those of the modules, without the steps of wrappers. The optimizer's numbers get names. All other files of the folder
are next to these, as they are next to an engine's shards (formats.folders). Sources: transformers 5.23, trainer.py; accelerate
1.15, checkpointing.py and utils/fsdp_utils.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TypeVar

from attrs import evolve, field

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import (
    Extent,
    Key,
    NamedTensor,
    Setting,
    StorageRef,
    TensorRef,
    TrainState,
    in_elements,
)
from ucpl.extents.account import NotRead
from ucpl.files.carrying import lifted, strides
from ucpl.files.checkpoint import Checkpoint, Order, Own
from ucpl.files.header_watch import watched
from ucpl.files.model_texts import TEXT_BYTES_MAX, TEXTS, config_at
from ucpl.files.skipping import skips_optimizer
from ucpl.files.texts import read_small
from ucpl.files.torch_files import read_torch_file
from ucpl.files.values import Value
from ucpl.files.wrappers import bare
from ucpl.formats.folders.kinds import ACCELERATE, TRAINER
from ucpl.formats.huggingface.store import HuggingFace
from ucpl.formats.huggingface.weight_files import PICKLE
from ucpl.formats.leaving import OPTIMIZERS, empty_tensors
from ucpl.formats.matching import Unclear
from ucpl.formats.peft_names import in_run
from ucpl.formats.run_steps import STEPS
from ucpl.formats.torch_dicts import NamedTensors, dicts_of, is_optimizer, named_tensors
from ucpl.formats.torch_optimizer import (
    EXTRA,
    REMEDY,
    NamedOptimizer,
    OptimizerFacts,
    named_optimizers,
    noted_empty,
    read_facts,
)
from ucpl.formats.trainer.orders import ORDERS_MAX, orders_of, tied_head
from ucpl.records import define, frozen

__all__ = ["FSDP", "OPTIMIZER", "WEIGHTS", "OwnNames", "opened", "own_files", "recognised"]

T = TypeVar("T")
WEIGHTS, OPTIMIZER = "weights", "optimizer"  # the files in layouts, whatever their names in a folder are
FSDP = "pytorch_model_fsdp.bin"
_ACCELERATE = "accelerate"
_MODEL = re.compile(r"(?:model|adapter_model)(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
_OTHER_MODEL = re.compile(r"(?:model|pytorch_model|pytorch_model_fsdp)_\d+\.(?:safetensors|bin)")
_OPTIMIZER = {
    "trainer": re.compile(r"optimizer\.(?:pt|bin)"),
    "accelerate": re.compile(r"optimizer(?:_[1-9]\d*)?\.bin"),
}
_KINDS = {"trainer": TRAINER, "accelerate": ACCELERATE}
_RANK = {"trainer": re.compile(r"rng_state_(\d+)\.pth"), "accelerate": re.compile(r"random_states_(\d+)\.pkl")}
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_CONVENTIONAL = ("weight", "bias")  # ends of names of parameters in modules of torch
_FLOATS = ("f", "bf", "c")


@frozen
class OwnNames(Own):
    """Names in the file that differ from the tensors' own."""

    stored: dict[str, str]


def own_files(kind: str, root: Path) -> tuple[str, ...]:
    """Files of a folder that this reader takes."""
    names = sorted(os.listdir(root)) if root.is_dir() else []
    mine = [name for name in names if _OPTIMIZER[kind].fullmatch(name)]
    if FSDP in names:
        return (FSDP, *mine)
    return (*(name for name in names if _MODEL.fullmatch(name) or PICKLE.fullmatch(name)), *mine)


def recognised(kind: str, path: Path) -> bool:
    """Test for a folder of this kind, by names of files."""
    if not path.is_dir():
        return False
    names = os.listdir(path)
    if FSDP in names and kind == _ACCELERATE:  # which the Trainer calls to save it
        return True
    optimizers = [name for name in names if _OPTIMIZER[kind].fullmatch(name)]
    if any(map(_KINDS[kind].is_marked_by, names)):
        return FSDP in names or bool(optimizers)
    if kind == _ACCELERATE or any(map(ACCELERATE.is_marked_by, names)) or len(optimizers) != 1:
        return False
    has_weights = any(_MODEL.fullmatch(name) or PICKLE.fullmatch(name) for name in names)
    return has_weights and _has_optimizer(path, optimizers[0])


def _has_optimizer(folder: Path, name: str) -> bool:
    """Test for one optimizer of torch in a file."""
    try:
        return len(dicts_of(Value.of(read_torch_file(folder, name))).optimizers) == 1
    except UcplError as error:
        if error.is_of_the_disk:
            raise
        return False


@watched
def opened(kind: str, path: Path, order: Order | None) -> Checkpoint:
    """Read all headers.

    Raises: UcplError E380, E446, E466, E487, and errors of reading files.
    """
    return _Opened(kind, path, order).checkpoint()


@define(eq=False)
class _Opened:
    kind: str
    root: Path
    order: Order | None
    notes: list[str] = field(factory=list)
    odd: list[str] = field(factory=list)
    not_read: list[NotRead] = field(factory=list)
    carried: dict[tuple[str, Key], Extent] = field(factory=dict)
    values: dict[object, object] = field(factory=dict)  # of a script's run

    def checkpoint(self) -> Checkpoint:
        names = sorted(os.listdir(self.root))
        others = [name for name in names if _OTHER_MODEL.fullmatch(name)]
        if others:
            fail(
                "E487",
                f"{self.root} has {1 + len(others)} models: {', '.join(others[:4])} next to the first",
                Label(str(self.root / others[0])),
                remedy=f"convert the weights of each by its own file, such as {self.root / others[0]}{self.first_pair()}",
            )
        model = self.full() if FSDP in names else self.weights()
        optimizers = [name for name in names if _OPTIMIZER[self.kind].fullmatch(name)]
        facts, files = self.optimizer(model, optimizers)
        model = self.tied(model, facts)
        empty = noted_empty(model.named, facts)
        extents: dict[tuple[str, Key], Extent] = {
            (WEIGHTS, (name,)): one for name, one in model.extents.items() if one.numel
        }
        extents |= {(OPTIMIZER, key): one for key, one in facts.payload.items()}
        return Checkpoint(
            top=self.root,
            root=self.root,
            tag=None,
            format=self.kind,
            version="",
            extents=extents,
            carried_extents=self.carried,
            state=TrainState(
                self.kind,
                "",
                tensors=tuple(self.tensors(model, facts)),
                aliases=model.named.aliases,
                settings=self.settings(names),
                groups=facts.groups,
                scalars=facts.scalars,
                blobs=self.blobs(facts, files) | empty,
                carried=self.values,
            ),
            files=(*model.files, *files),
            notes=tuple(self.notes),
            remarks=tuple(self.odd),
            not_read=tuple(self.not_read),
            scalar_extents=facts.scalar_extents,
            own=OwnNames({name: said for name, said in model.named.stored.items() if said != name}),
        )

    def first_pair(self) -> str:
        """A remedy for the first model with its optimizer."""
        mine = own_files(self.kind, self.root)
        optimizers = [name for name in mine if _OPTIMIZER[self.kind].fullmatch(name)]
        if not optimizers or len(mine) != 1 + len(optimizers):
            return ""
        return f"; {self.root / mine[0]}+{self.root / optimizers[0]} names the first and its optimizer"

    def settings(self, names: list[str]) -> dict[str, Setting]:
        ranks = [int(found[1]) for name in names if (found := _RANK[self.kind].fullmatch(name)) is not None]
        full = int(FSDP in names)
        return {
            "dp": Setting(1 + max(ranks, default=0), "files of random numbers"),
            "full": Setting(full, FSDP if full else "no " + FSDP),
        }

    def blobs(self, facts: OptimizerFacts, files: tuple[str, ...]) -> dict[str, object]:
        """States of other forms, the optimizer of each group, and steps."""
        of = [group.name.rpartition("/")[0] for group in facts.groups]
        several: dict[str, object] = {OPTIMIZERS: of} if len(files) > 1 else {}
        return ({EXTRA: facts.extra} if facts.extra else {}) | several | self.steps()

    def steps(self) -> dict[str, object]:
        """Steps that the Trainer counts."""
        said = _json_of(self.root / "trainer_state.json").get("global_step")
        return {STEPS: said} if type(said) is int else {}

    # ---- weights ---------------------------------------------------------------------------------------------------

    def full(self) -> _Model:
        """FSDP's full state dict."""
        part = read_torch_file(self.root, FSDP)
        named = named_tensors(Value.of(part), "")
        self.not_read += [NotRead(f"{FSDP}: {name}", "it is no tensor", kind="value") for name in named.extra]
        own = {n: one for n, one in named.tensors.items() if n not in named.aliases}
        extents = {name: part.extent((name,), one) for name, one in own.items()}
        return _Model(named, extents, (FSDP,), is_ordered=True)

    def weights(self) -> _Model:
        """The weights as a loader of transformers finds them."""
        opened = HuggingFace().open(self.root)
        texts = opened.state.blobs.get(TEXTS)
        files = tuple(name for name in opened.files if not isinstance(texts, dict) or name not in texts)
        self.notes += opened.notes
        self.odd += opened.remarks
        self.not_read += [one for one in opened.not_read if one.kind == "value"]
        extents = {str(key[0]): extent for (_, key), extent in opened.extents.items()}
        is_adapter = any(name in files for name in _ADAPTER)
        refs = {name: _ref(one) for name, one in extents.items()}
        is_ordered = all(name.endswith((".bin", ".bin.index.json")) for name in files)
        if empty := empty_tensors(opened.state, self.root):
            refs |= {name: _of(one.dtype, one.shape) for name, one in empty.items()}
            order = self.keys(files) if is_ordered else []
            refs = {name: refs[name] for name in (*(n for n in order if n in refs), *refs)}
        names = dict(_module_names([*refs, *opened.state.aliases], self.root, is_adapter=is_adapter))
        tensors = {names[name]: one for name, one in refs.items()}
        aliases = {names[alias]: names[owner] for alias, owner in opened.state.aliases.items()}
        for alias, owner in tied_head(tensors, config_at(self.root)).items() if not is_adapter else ():
            aliases[alias] = owner
            self.notes.append(f"{alias} is {owner}: the class of config.json has it, and the file does not")
        tensors |= {alias: tensors[owner] for alias, owner in aliases.items()}
        stored = {made: name for name, made in names.items()}
        named = NamedTensors(tensors, stored, aliases, {}, "", names)
        return _Model(named, {names[n]: one for n, one in extents.items()}, files, is_ordered)

    def keys(self, files: tuple[str, ...]) -> list[str]:
        """Names in pickled files, in the order of the module's state dict."""
        parts = [Value.of(read_torch_file(self.root, name)) for name in files if name.endswith(".bin")]
        return [str(name) for part in parts for name, _ in part.named()]

    def tensors(self, model: _Model, facts: OptimizerFacts) -> Iterator[NamedTensor]:
        """The model's tensors, with their states; those of no group are frozen."""
        listed = {name for group in facts.groups for name in group.every}
        trained = {name for group in facts.groups for name in group.members}
        order = [*dict.fromkeys((*model.order, *model.extents))]
        for name in order:
            one = model.extents[name]
            shape = in_elements(one.dtype, one.shape)
            if not prod(shape):
                continue
            kind = "parameter" if name in trained else "frozen"
            if name not in listed and not (one.dtype.startswith(_FLOATS) and name.endswith(_CONVENTIONAL)):
                kind = "buffer"
            elif not facts.groups:
                kind = "parameter"
            yield NamedTensor(name, shape, one.dtype, kind, facts.states.get(name, ()))

    def tied(self, model: _Model, facts: OptimizerFacts) -> _Model:
        """The model with second names of matrices that are stored twice.

        A matrix without an optimizer is a second name if its bytes have the CRC of a trained matrix of its shape.
        """
        trained: dict[tuple[int | None, str, tuple[int, ...]], str] = {
            (one.crc, one.dtype, one.shape): name
            for group in facts.groups
            for name in group.every
            if (one := model.extents.get(name)) is not None and one.crc is not None and len(one.shape) > 1
        }
        listed = {*trained.values()}
        twice = {
            name: owner
            for name, one in model.extents.items()
            if name not in listed and (owner := trained.get((one.crc, one.dtype, one.shape))) is not None
        }
        for name, owner in twice.items():
            self.notes.append(f"{name} is taken for {owner}: their bytes are equal, and the optimizer has one of them")
        extents = {name: one for name, one in model.extents.items() if name not in twice}
        named = evolve(model.named, aliases={**model.named.aliases, **twice})
        return evolve(model, named=named, extents=extents)

    # ---- the optimizer ---------------------------------------------------------------------------------------------

    def optimizer(self, model: _Model, files: list[str]) -> tuple[OptimizerFacts, tuple[str, ...]]:
        """The states of all optimizers, with names."""
        if not files or skips_optimizer(files[0], kind="file"):
            return OptimizerFacts(), ()
        parts = [read_torch_file(self.root, name) for name in files]
        values = [self.state_dict(Value.of(part)) for part in parts]
        made = self.named(model, values)
        shapes = {name: one.shape for name, one in model.named.tensors.items()}
        words = [str(n) if len(files) > 1 else "" for n in range(len(files))]
        found = OptimizerFacts()
        for part, word, one in zip(parts, words, made, strict=True):
            mine = read_facts(part, {word: one}, shapes, ())
            self.not_read += mine.not_read
            known = {extent.key for extents in mine.scalar_extents.values() for extent in extents.values()}
            self.carried |= {
                (part.file, e.key): e for e in part.extents() if e.key not in known and not _is_payload(e, mine)
            }
            found = OptimizerFacts(
                {**found.payload, **mine.payload},
                _joined(found.scalars, mine.scalars),
                _joined(found.scalar_extents, mine.scalar_extents),
                {**found.states, **mine.states},
                (*found.groups, *mine.groups),
                {**found.extra, **mine.extra},
                empty={**found.empty, **mine.empty},
            )
        return found, tuple(files)

    def state_dict(self, value: Value) -> Value:
        """The optimizer in a file.

        In a script's own file, values of the run may be next to it.
        """
        found = {(): value} if is_optimizer(value.held) else dicts_of(value).optimizers
        if len(found) != 1 or (found.keys() != {()} and self.is_marked):
            value.wrong("the state dict of an optimizer of torch")
        ((place, one),) = found.items()
        held = value.held if isinstance(value.held, dict) else {}
        for key, inner in held.items() if place else ():
            if key != place[0]:
                self.values[key] = lifted(inner, value.file)
            elif len(place) > 1:
                self.not_read.append(NotRead(f"{value.file}: {key}", "only the optimizer in it is read", kind="value"))
        return one

    @property
    def is_marked(self) -> bool:
        return any(map(_KINDS[self.kind].is_marked_by, os.listdir(self.root)))

    def named(self, model: _Model, values: list[Value]) -> tuple[NamedOptimizer, ...]:
        """Names for the numbers, by the order of registration.

        Raises: UcplError E446, E466.
        """
        groups = [group for value in values for group in value.at("param_groups").items()]
        has_names = all(
            group.find("param_names") is not None
            or all(isinstance(one.held, str) for one in group.at("params").items())
            for group in groups
        )
        if has_names or model.is_ordered or (self.order is not None and self.order.names):
            made = named_optimizers(values, model.named, self.order)
            self.note_evidence(made, "")
            return made
        names = [name for name in model.named.tensors if name not in model.named.aliases]
        stated = self.order.take_config() if self.order is not None else None
        order = None if stated is not None else self.order
        orders, count, evidence = orders_of(names, stated or config_at(self.root))
        found: dict[object, tuple[NamedOptimizer, ...]] = {}
        refused: UcplError | None = None
        for one in orders:
            tried = evolve(model.named, tensors={name: model.named.tensors[name] for name in one})
            try:
                made = named_optimizers(values, tried, order)
            except UcplError as error:
                if count == 1:
                    raise
                is_several = isinstance(error.diagnostics[0].about, Unclear)
                refused = error if is_several or refused is None else refused
                if is_several:
                    raise
                continue
            found.setdefault(tuple(optimizer.groups for optimizer in made), made)
            if len(found) > 1:
                break
        if len(found) == 1:
            (made,) = found.values()
            self.note_evidence(made, evidence)
            return made
        if refused is not None and not found and count <= ORDERS_MAX:
            raise refused
        fail(
            "E446",
            f"{values[0].file} numbers its parameters in the order of the modules, and safetensors sorts names: no class of"
            " config.json gives this order, and the shapes fit several",
            Label(str(values[0].path), where="param_groups"),
            remedy=f"--order BASE/config.json gives the order of the base model's class, if ucpl knows it. {REMEDY}"
            if any(name in model.files for name in _ADAPTER)
            else REMEDY,
        )

    def note_evidence(self, made: tuple[NamedOptimizer, ...], evidence: str) -> None:
        if made and not evidence:
            evidence = made[0].evidence
        self.notes.append(f"names of the optimizer's parameters: {evidence}")


@frozen(eq=False)
class _Model:
    """A folder's weights under the modules' names."""

    named: NamedTensors
    extents: dict[str, Extent]
    files: tuple[str, ...]
    is_ordered: bool

    @property
    def order(self) -> list[str]:
        return [name for name in self.named.tensors if name in self.extents]


def _ref(one: Extent) -> TensorRef:
    shape = in_elements(one.dtype, one.shape)
    return TensorRef(StorageRef(one.storage, one.dtype, prod(shape)), 0, shape, strides(shape))


def _of(dtype: str, shape: tuple[int, ...]) -> TensorRef:
    """A tensor without elements."""
    return TensorRef(StorageRef("", dtype, 0), 0, shape, strides(shape))


def _module_names(names: list[str], root: Path, *, is_adapter: bool) -> Iterator[tuple[str, str]]:
    """The name in the module of each stored name.

    PEFT's files leave out the adapter's name; Accelerate's keep the steps of wrappers.
    """
    saved = _modules_to_save(root) if is_adapter else ()
    lead = "module." if names and all(name.startswith("module.") for name in names) else ""
    for name in names:
        made = bare(name.removeprefix(lead))
        yield name, in_run(made, saved) if is_adapter else made


def _json_of(path: Path) -> dict[str, object]:
    """A small JSON object; empty if there is none."""
    raw = read_small(path, TEXT_BYTES_MAX) if path.is_file() else None
    try:
        value = json.loads(raw or b"")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _modules_to_save(root: Path) -> tuple[str, ...]:
    said = _json_of(root / "adapter_config.json").get("modules_to_save")
    return tuple(one for one in said if isinstance(one, str)) if isinstance(said, list) else ()


def _is_payload(extent: Extent, facts: OptimizerFacts) -> bool:
    return any(e.storage == extent.storage and e.offset == extent.offset for e in facts.payload.values())


def _joined(a: Mapping[str, Mapping[str, T]], b: Mapping[str, Mapping[str, T]]) -> dict[str, dict[str, T]]:
    return {state: {**a.get(state, {}), **b.get(state, {})} for state in dict.fromkeys((*a, *b))}
