"""DeepSpeed's names of files, keys and states; other keys are the caller's.

Read in deepspeed 0.19.8, runtime/engine.py (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`, `_common_checkpoint_state`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from attrs import field

from ucpl.errors import Label, fail
from ucpl.files.inert import HOLDERS
from ucpl.files.torch_files import Pickles, TorchFile, read_torch_file
from ucpl.records import frozen

# Model states: one file per model-parallel rank, or (stage 3) one per data-parallel rank too.
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt\Z")
# Optimizer shards. Before 0.3.17 there was no underscore before `optim_states`.
_OPTIM = re.compile(r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt\Z")
# A layer of a PipelineModule: one file, or one for each tensor-parallel rank.
_LAYER = re.compile(r"(?P<stem>layer_(?P<number>\d+))(?:-model_(?P<tp>\d+))?-model_states\.pt\Z")
_EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d{1,9})_)?expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt\Z"
)
# The optimizer's states of an expert-parallel rank: without ZeRO. Before 0.19.4 there is an empty one with ZeRO, too.
_EXPERTS_OPTIM = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt\Z")
_NUMBER = re.compile(r"\d+")
_DIGITS_MAX = 10  # of a layer's number

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
INFO = "universal_checkpoint_info"  # a key of model states
ATOMS = "zero"  # folder of a universal checkpoint
GLOBAL_STATE = "zero/optimizer_state.pt"
EXPERTS_OPTIMIZERS = "experts_optimizers"  # of a run whose release writes empty ones next to the shards of ZeRO

# Keys of a model-state file that DeepSpeed writes itself, in its order. All others came from client_state.
MODEL_KEYS = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "universal_checkpoint_info",
)
# Written by some releases or with mixture of experts only.
_MODEL_KEYS_SOMETIMES = (
    "num_experts",
    "ds_autoep_layers",
    "autoep_layers",
    "ds_autoep_folding",
    "sparse_tensor_module_names",
    "csr_tensor_module_names",
)
OWNED = frozenset(MODEL_KEYS + _MODEL_KEYS_SOMETIMES)

# Fields that continue a run as they are, whatever the layout.
RUN_KEYS = ("lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples")


@frozen
class StepFiles:
    """The files of one step's folder by rank.

    bf16: prefix of the optimizer's files.
    """

    root: Path
    models: dict[tuple[int | None, int], str] = field(factory=dict)  # (dp rank, or None below stage 3; mp rank)
    optims: dict[tuple[int, int], str] = field(factory=dict)  # (dp rank, mp rank)
    prefix: str = ""
    layers: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    experts_optims: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.models or self.optims or self.layers or self.experts or self.experts_optims)

    @property
    def files(self) -> tuple[str, ...]:
        models = [self.models[k] for k in sorted(self.models, key=lambda k: (k[1], -1 if k[0] is None else k[0]))]
        optims = [self.optims[k] for k in sorted(self.optims, key=lambda k: (k[1], k[0]))]
        return (*models, *optims, *self.layers, *self.experts, *self.experts_optims)


def list_files(root: Path) -> StepFiles:
    """Sort a folder's files by the ranks in their names.

    Ranks are numbers: rank 10 comes after rank 2. Raises: UcplError E450 if the folder cannot be listed, E453 if one
    rank has two files.
    """
    try:
        with os.scandir(root) as entries:  # which knows files without asking for each
            names = sorted(entry.name for entry in entries if _is_file(entry))
    except OSError as error:
        fail("E450", f"{root} cannot be listed: {error.strerror or error}", Label(str(root)))
    models: dict[tuple[int | None, int], str] = {}
    optims: dict[tuple[int, int], str] = {}
    prefixes: dict[str, str] = {}
    layers, experts, experts_optims = [], [], []
    for name in names:
        if found := _MODEL.match(name):
            model_rank = (None if found["dp"] is None else int(found["dp"]), int(found["mp"]))
            if model_rank in models:
                _twice(root, models[model_rank], name, f"model states of {_rank_text(*model_rank)}")
            models[model_rank] = name
        elif found := _OPTIM.match(name):
            optim_rank = (int(found["dp"]), int(found["mp"]))
            if optim_rank in optims:
                _twice(root, optims[optim_rank], name, f"the optimizer shard of {_rank_text(*optim_rank)}")
            optims[optim_rank] = name
            prefixes.setdefault(found["prefix"] or "", name)
        elif _EXPERT.match(name):
            experts.append(name)
        elif _EXPERTS_OPTIM.match(name):
            experts_optims.append(name)
        elif _LAYER.match(name):
            layers.append(name)
    _reject_two_runs(root, prefixes)
    _reject_two_forms(root, models)
    return StepFiles(
        root, models, optims, next(iter(prefixes), ""), tuple(layers), tuple(experts), tuple(experts_optims)
    )


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Test for a file or a link to one."""
    return entry.is_file(follow_symlinks=False) or (entry.is_symlink() and os.path.isfile(entry.path))


def _reject_two_runs(root: Path, prefixes: dict[str, str]) -> None:
    if len(prefixes) > 1:
        (_, one), (_, other) = sorted(prefixes.items())[:2]
        fail(
            "E453",
            "one folder has optimizer shards of two runs: some names begin with bf16_ and some do not",
            Label(str(root / one)),
            Label(str(root / other)),
        )


def _reject_two_forms(root: Path, models: dict[tuple[int | None, int], str]) -> None:
    whole = [name for (dp, _), name in models.items() if dp is None]
    parts = [name for (dp, _), name in models.items() if dp is not None]
    if whole and parts:
        fail(
            "E453",
            "one folder has model states of stage 3 (one file a rank) and of another stage",
            Label(str(root / parts[0]), "stage 3"),
            Label(str(root / whole[0]), "stage 0, 1 or 2"),
        )


def layer_place(name: str) -> tuple[int, str, int | None]:
    """(number, stem, tp rank) of a layer's file.

    (3, "layer_03", 1) of layer_03-model_01-model_states.pt. The tp rank is None if the name has none: a topology
    without such an axis.
    """
    found = _LAYER.match(name)
    assert found is not None, name
    return int(found["number"]), found["stem"], None if found["tp"] is None else int(found["tp"])


def is_apart(name: str) -> bool:
    """Test whether a file holds a layer or an expert."""
    return bool(_LAYER.match(name)) or is_of_expert(name)


def is_of_expert(name: str) -> bool:
    return bool(_EXPERT.match(name) or _EXPERTS_OPTIM.match(name))


def experts_optim_file(ep: int, mp: int) -> str:
    return f"expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt"


def expert_place(name: str) -> tuple[int, int, int] | None:
    """(layer, expert, mp rank) of an expert's file, or None without layers."""
    found = _EXPERT.match(name)
    if found is None or found["layer"] is None:
        return None
    return int(found["layer"]), int(found["expert"]), int(found["mp"])


@frozen
class PlaceInRun:
    """A file's kind, and the numbers of its ranks, layer and expert."""

    kind: str
    numbers: tuple[int, ...]


def place_in_run(name: str) -> PlaceInRun | None:
    """The place of a file, from its name; None for other names.

    A prefix with the dtype is ignored: names of one rank's files can differ in it.
    """
    if not any(pattern.match(name) for pattern in (_MODEL, _OPTIM, _LAYER, _EXPERT, _EXPERTS_OPTIM)):
        return None
    bare = re.sub(r"\A(?:bf16|fp16)_", "", name)
    return PlaceInRun(_NUMBER.sub("#", bare), tuple(map(int, _NUMBER.findall(bare))))


def _rank_text(dp: int | None, mp: int) -> str:
    return f"mp rank {mp}" if dp is None else f"dp rank {dp}, mp rank {mp}"


def _twice(root: Path, one: str, other: str, what: str) -> None:
    fail("E453", f"two files hold {what}", Label(str(root / one)), Label(str(root / other)))


def model_file(stage: int, dp: int, mp: int) -> str:
    """Name of the model-state file that dp rank `dp` reads."""
    return f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt" if stage == 3 else f"mp_rank_{mp:02d}_model_states.pt"


def optim_file(bf16: bool, dp: int, mp: int) -> str:
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def layer_number(name: str) -> int | None:
    """The layer that a tensor's name begins with."""
    number = name.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < _DIGITS_MAX else None


# ---- names of optimizer states -------------------------------------------------------------------------------------

# An optimizer can call a state `weight` or `fp32`, which are ucpl's names of the parameter itself and of its master.
TAKEN = frozenset({"weight", "fp32"})
_APART = "optimizer."


def state_named(state: str) -> str:
    """ucpl's name of a state, from its name in the files."""
    return _APART + state if state in TAKEN or state.startswith(_APART) else state


def state_in_file(state: str) -> str:
    """A state's name in the files, from ucpl's name."""
    return state.removeprefix(_APART)


def is_taken(state: str) -> bool:
    """Test for ucpl's name of a state whose own name is taken."""
    return state.startswith(_APART)


# ---- files under their original names --------------------------------------------------------------------------------


def read_shard(root: Path, name: str, known: Pickles | None = None) -> TorchFile:
    """The headers of one rank's file.

    Files of ranks have equal keys and shapes. So a file under another rank's name passes for that rank's file, and at
    stage 3 no other check finds it. Files of other kinds have other forms, which readers reject. An archive with a name
    of another kind, such as one that was written to memory, is not checked.

    known: pickles of other files, see `read_torch_file`. Raises: UcplError E465 where the file was written as another one,
    E400-E427.
    """
    file = read_torch_file(root, name, known=known)
    written = f"{file.archive}.pt"
    there, here = place_in_run(written), place_in_run(name)
    if there is not None and here is not None and there.kind == here.kind and there.numbers != here.numbers:
        from ucpl.formats.as_written import reject

        reject(file)
    return file


def read_atom(root: Path, path: Path) -> TorchFile:
    """The headers of one state of a parameter, in the universal format.

    Raises: as `read_shard`, of states.
    """
    file = read_torch_file(root, path.relative_to(root).as_posix())
    if file.archive != path.stem and path.with_name(f"{file.archive}.pt").is_file():
        from ucpl.formats.as_written import reject

        reject(file)
    return file


# torch.load(weights_only=True) refuses them, and DeepSpeed does not use it.
KNOWN_GLOBALS = HOLDERS | frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
