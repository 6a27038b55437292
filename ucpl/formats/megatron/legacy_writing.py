"""A legacy folder of Megatron-LM as a target.

State dicts and buffers follow the plan, groups follow Megatron's rule. Arguments are those of the source's run, with
the target's degrees; without a Megatron run, only the degrees.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from attrs import field

from ucpl.errors import Label, fail
from ucpl.extents import BY_TORCH, Key, Scalar, StoredTensor, Structure, TensorRef, TorchDType, key_text
from ucpl.files.carrying import Storages, by_place
from ucpl.files.checkpoint import Checkpoint, Skeleton, SkeletonFile
from ucpl.files.groups import each_of
from ucpl.files.pickles import unsafe_globals
from ucpl.files.scalars import number_of
from ucpl.formats.megatron import legacy_names as names
from ucpl.formats.megatron.classes import LEGACY_GLOBALS
from ucpl.formats.megatron.folder import MODEL, OPTIM, TRACKER
from ucpl.formats.megatron.groups import STEP, by_rule, decays_norms
from ucpl.formats.megatron.homes import legacy_of
from ucpl.formats.megatron.legacy_arguments import (
    GROUPED_GEMM,
    arguments_in,
    at_degrees,
    has_grouped_mlp,
    namespace,
    sizes_of,
    values_of,
)
from ucpl.formats.megatron.legacy_optimizer import FROZEN, KEPT
from ucpl.formats.megatron.legacy_reading import OPTIMIZER, RNG, WITHOUT
from ucpl.formats.megatron.orders import by_modules
from ucpl.formats.run_steps import iteration_of, steps_of
from ucpl.records import define

__all__ = ["skeleton"]

_VERSION = 3.0  # checkpoint_version: since Megatron-LM 2.4 all folders have it
_COALESCED, _SAVED = "buckets_coalesced", "numel_unpadded"


def skeleton(structure: Structure, targets: tuple[StoredTensor, ...], source: Checkpoint, tag: str | None) -> Skeleton:
    """Raises: UcplError E471, E547."""
    return _Writer(structure, targets, source).skeleton(tag)


@define(eq=False)
class _File:
    path: str
    storages: Storages
    members: list[int] = field(factory=list)
    storage_of: dict[int, str] = field(factory=dict)


@define(eq=False)
class _Writer:
    structure: Structure
    targets: tuple[StoredTensor, ...]
    source: Checkpoint
    files: dict[str, _File] = field(factory=dict)

    def degree(self, axis: str) -> int:
        value = self.structure.settings.get(axis)
        return value if type(value) is int else 1

    def skeleton(self, tag: str | None) -> Skeleton:
        if self.structure.settings.get("optimizer") != "distributed":
            said = self.structure.settings.get("optimizer")
            fail(
                "E547",
                f"optimizer = {said!r}: only Megatron's distributed optimizer is written",
                Label("<call>", where=f"optimizer = {said}"),
            )
        extents = by_place(self.source.carried_extents.values())
        for t, target in enumerate(self.targets):
            self.files.setdefault(target.file, _File(target.file, Storages(extents))).members.append(t)
        made: list[tuple[_File, object]] = []
        for path, file in sorted(self.files.items()):
            if path.endswith(MODEL):
                made.append((file, self.state(file)))
            elif path.endswith(OPTIM):
                made.append((file, self.buffers(file)))
            else:
                self.refuse(file.members[0])
        unsafe = {name for _, value in made for name in unsafe_globals(value)} - LEGACY_GLOBALS
        folder, said = self.folder(tag)
        return Skeleton(
            folder=folder,
            files=tuple(
                SkeletonFile(
                    path=file.path, value=value, storage_of=file.storage_of, carried=tuple(file.storages.carried)
                )
                for file, value in made
            ),
            texts={TRACKER: said},
            unsafe_globals=tuple(sorted(unsafe)),
        )

    def refuse(self, target: int) -> None:
        one = self.targets[target]
        fail(
            "E471",
            f"megatron_legacy() has no place for {key_text(one.key)} of {one.file}",
            Label(one.file, where=key_text(one.key)),
        )

    def folder(self, tag: str | None) -> tuple[str, str]:
        """The iteration's folder, and the tracker's text.

        Raises: UcplError E547.
        """
        steps = iteration_of(self.source.state)
        folder = tag or f"iter_{steps:07d}"
        if folder == "release":
            return folder, folder
        number = folder.removeprefix("iter_")
        if not folder.startswith("iter_") or not (number.isascii() and number.isdigit() and len(number) <= 9):
            fail(
                "E547",
                f"{folder!a} is no folder of an iteration of Megatron's",
                Label("<call>", where=folder),
                remedy=f"iter_{steps:07d}, or release",
            )
        return folder, str(int(number))

    # ---- model_optim_rng.pt ------------------------------------------------------------------------------------------

    def state(self, file: _File) -> dict[object, object]:
        blobs = self.source.state.blobs
        carried = values_of(self.source)
        carried.pop("args", None)
        for clash in ("optimizer", "rng_state", KEPT, *(key for key in carried if str(key).startswith("model"))):
            if clash in carried:
                fail(
                    "E471",
                    f"the run has a value called `{clash}`, which is Megatron's own in {MODEL}",
                    Label(MODEL, where=str(clash)),
                )
        out: dict[object, object] = {
            "args": file.storages.value(namespace(self.arguments())),
            "checkpoint_version": carried.pop("checkpoint_version", _VERSION),
            "iteration": carried.pop("iteration", steps_of(self.source.state) or 0),
        }
        out |= self.models(file)
        if self.has_optimizer:
            out["optimizer"] = self.optimizer(file)
            without = [tensor.name for tensor in self.structure.tensors if tensor.kind == "frozen"]
            if without:
                out[KEPT] = {FROZEN: without}
        out |= {key: file.storages.value(value) for key, value in carried.items()}
        random = blobs.get(RNG)
        folder = file.path.rpartition("/")[0]
        if isinstance(random, dict) and self.is_meshed_alike and folder in random:
            out["rng_state"] = file.storages.value(random[folder])
        return out

    @property
    def is_meshed_alike(self) -> bool:
        """True if the ranks are those of the source."""
        settings = self.source.state.settings
        return legacy_of(self.source) is not None and all(
            settings[axis].value == self.degree(axis) for axis in ("tp", "pp", "ep")
        )

    @property
    def has_optimizer(self) -> bool:
        return any(path.endswith(OPTIM) for path in self.files)

    def arguments(self) -> dict[object, object]:
        out = at_degrees(arguments_in(self.source), self.degree, is_alike=self.is_meshed_alike)
        if "ckpt_format" in out:
            out["ckpt_format"] = "torch"
        if has_grouped_mlp(out):  # it has no single experts
            out[GROUPED_GEMM] = False
        sizes = sizes_of(self.structure.tensors)
        out |= {name: size for name, size in sizes.items() if name == "num_layers" or name not in out}
        tensors = {t.name for t in self.structure.tensors}
        out.setdefault("untie_embeddings_and_output_weights", names.EMBEDDING not in tensors or names.OUTPUT in tensors)
        return out

    def models(self, file: _File) -> dict[object, object]:
        """State dicts in the order of registration, as in `distrib_optim.pt`.

        A tied output layer is the last.
        """
        named = tuple(tensor.name for tensor in self.structure.tensors)
        if legacy_of(self.source) is None:  # else the source's files have it
            named = by_modules(named)
        order = {name: n for n, name in enumerate(named)}

        def place(t: int) -> tuple[int, int]:
            target = self.targets[t]
            is_late = target.key[-1:] == (names.OUTPUT,) and target.label != names.OUTPUT
            return (1 if is_late else 0, order.get(target.label, len(order)))

        out: dict[str, OrderedDict[object, object]] = {}
        modules: dict[str, dict[str, str]] = {}  # of a virtual stage: module in the complete model -> here
        for t in sorted(file.members, key=place):
            target = self.targets[t]
            if len(target.key) != 2:
                self.refuse(t)
            chunk, name = str(target.key[0]), str(target.key[1])
            made = file.storages.tensor(target.dtype, target.shape)
            out.setdefault(chunk, OrderedDict())[name] = made
            if target.numel:
                file.storage_of[t] = made.storage.name
            modules.setdefault(chunk, {}).setdefault(target.label.rpartition(".")[0], name.rpartition(".")[0])
        without = self.source.state.blobs.get(WITHOUT)
        for whole in without if isinstance(without, list) else ():
            module, _, word = str(whole).rpartition(".")
            for chunk, known in modules.items():
                if module in known:
                    out[chunk][f"{known[module]}.{word}"] = None
        if self.degree("vpp") > 1:
            chunks = [f"model{c}" for c in range(self.degree("vpp"))]
            return {chunk: out.get(chunk, OrderedDict()) for chunk in chunks}
        return {"model": out.get("model", OrderedDict())}

    # ---- the optimizer -----------------------------------------------------------------------------------------------

    def optimizer(self, file: _File) -> object:
        """Parameter groups of dense parameters, and of experts dealt over ranks."""
        rest = self.source.state.blobs.get(OPTIMIZER)
        more = {k: file.storages.value(v) for k, v in rest.items()} if isinstance(rest, dict) else {}
        groups = self.groups(file)
        out = [
            {"optimizer": {"param_groups": [g for g in groups if g["is_expert_parallel"] is is_expert]}, **more}
            for is_expert in ((False, True) if self.degree("ep") > 1 else (False,))
        ]
        return out if self.degree("ep") > 1 else out[0]

    def groups(self, file: _File) -> list[dict[str, object]]:
        """The groups with their hyper-parameters.

        Raises: UcplError E471 if parameters of one of Megatron's groups have different hyper-parameters.
        """
        shapes = {t.name: t.shape for t in self.structure.tensors}
        held = each_of(self.source.state)
        hypers = []
        for _, members in self.structure.groups:
            hypers += [(name, {k: v for k, v in held.get(name, {}).items() if k != STEP}) for name in members]
        step = self.step()
        more = {STEP: step} if step is not None else {}
        norms_decay = decays_norms(arguments_in(self.source))
        made = by_rule(
            hypers,
            shapes,
            experts_apart=self.degree("ep") > 1,
            norms_decay=norms_decay,
            tensors=self.source.carried_extents.values(),
        )
        return [{**file.storages.value(group.hyper), **more} for group in made]

    def step(self) -> object:
        """Raises: UcplError E547 where parameters have taken different numbers of steps."""
        values = self.source.state.scalars.get("step", {})
        numbers = {
            number_of(value) if isinstance(value, Scalar) else value: name
            for name, value in values.items()
            if isinstance(value, Scalar | int | float)
        }
        if len(numbers) > 1:
            (one, a), (other, b) = list(numbers.items())[:2]
            fail(
                "E547",
                f"`{a}` has taken {one} steps and `{b}` {other}, and Megatron has one number for all",
                Label("<source>", where="step"),
            )
        return next(iter(numbers), None)

    # ---- distrib_optim.pt ----------------------------------------------------------------------------------------------

    def buffers(self, file: _File) -> object:
        chained = self.degree("ep") > 1
        found: dict[int, dict[object, object]] = {}
        for t in file.members:
            target = self.targets[t]
            key: Key = target.key if chained else (0, *target.key)
            if len(key) != 4 or type(key[0]) is not int or type(key[1]) is not int:
                self.refuse(t)
            made = file.storages.tensor(target.dtype, target.shape)
            file.storage_of[t] = made.storage.name
            _put(found.setdefault(int(key[0]), {}), (int(key[1]), _dtypes(str(key[2])), str(key[3])), made)
        if not chained:
            return {_COALESCED: True, **found.get(0, {})}
        is_first = file.path.rpartition("/")[0].rpartition("_")[2] == "000"
        dense: object = {_COALESCED: True, **found.get(0, {})} if is_first else None
        return [dense, {_COALESCED: True, **found.get(1, {})}]


def _put(buffers: dict[object, object], key: tuple[int, tuple[TorchDType, TorchDType], str], made: TensorRef) -> None:
    number, dtypes, state = key
    held = buffers.setdefault(number, {dtypes: {}})
    assert isinstance(held, dict)
    states = held[dtypes]
    states[state] = made
    numel = states.pop(_SAVED, prod(made.shape))
    states[_SAVED] = numel


def _dtypes(text: str) -> tuple[TorchDType, TorchDType]:
    """ "(torch.bfloat16, torch.float32)" as a pair."""
    one, _, other = text.strip("()").partition(", ")
    return tuple(TorchDType(BY_TORCH[said.removeprefix("torch.")].name) for said in (one, other))  # type: ignore[return-value]
