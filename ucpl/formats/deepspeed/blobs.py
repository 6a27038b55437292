"""Values in a step's files that are neither tensors nor structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ucpl.extents import TensorRef
from ucpl.extents.account import NotRead
from ucpl.files.carrying import lifted
from ucpl.files.pickles import attributes_of
from ucpl.files.torch_files import TorchFile
from ucpl.files.values import Value
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.module import BLOB, RankModule
from ucpl.formats.deepspeed.names import RUN_KEYS
from ucpl.formats.deepspeed.topology import not_yet

SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_RUN = (*RUN_KEYS, "ds_config", "ds_version", "universal_checkpoint_info")


def keep_run(gathered: Gathered, first: TorchFile, *more: str) -> None:
    """Fields of model states that continue a run."""
    keep_fields(gathered, Value.of(first), (*_RUN, *more))


def keep_scaling(gathered: Gathered, shard: TorchFile) -> None:
    """Keep loss scaling and clipping from a shard; None is a value."""
    state = Value.of(shard).at("optimizer_state_dict").mapping()
    for key in SCALING:
        if key in state:
            gathered.blobs[key] = lifted(state[key], shard.file)


def keep_fields(gathered: Gathered, value: Value, keys: tuple[str, ...]) -> None:
    for key in keys:
        if (found := value.find(key)) is not None:
            gathered.blobs[key] = lifted(found.held, value.file)


def keep_module_facts(gathered: Gathered, whole: RankModule, *stages: RankModule) -> None:
    """Keep the module's order, its attributes, and its other values.

    Other values are those that are no tensors, and tensors without elements.

    `whole`: the complete module. stages: the modules of its pipeline's stages, or the only one.
    """
    blobs, extra, names = gathered.blobs, dict[str, object](), dict[str, None]()
    for module in stages:
        value, file = Value.of(module.file).at("module"), module.file.file
        names |= dict.fromkeys(name for name, _ in value.named())
        extra |= extra_of(module.file)
        if isinstance(value.held, OrderedDict) and (attributes := attributes_of(value.held)):
            blobs.setdefault("module_attributes", lifted(attributes, file))
    blobs["module_names"] = [*names] if len(stages) == 1 else [*whole.tensors, *extra]  # aliases in their places
    if extra:
        blobs["module_extra"] = extra
    if whole.empty:
        blobs["empty_tensors"] = {
            name: {"dtype": dtype, "shape": list(shape), "buffer": name in whole.buffers}
            for name, (dtype, shape) in whole.empty.items()
        }


def extra_of(part: TorchFile) -> dict[str, object]:
    """Values of a file's module that are no tensors."""
    module = Value.of(part).find("module")
    named = module.named() if module is not None else ()
    return {name: lifted(one.held, part.file) for name, one in named if not isinstance(one.held, TensorRef)}


def keep_extra(gathered: Gathered, first: TorchFile, others: Iterable[TorchFile]) -> None:
    """Keep values of a universal folder's module that are no tensors.

    The first file's are kept; different ones of other ranks are reported.
    """
    if extra := extra_of(first):
        gathered.blobs["module_extra"] = extra
    why = "the values of the first rank's module are read"
    for part in others:
        gathered.not_read += (NotRead(f"{part.file}: module/{name}", why, kind="value") for name in extra_of(part))


def keep_left_out(gathered: Gathered, module: RankModule, tp: int = 1) -> None:
    """Keep names in the module without a parameter of the model.

    Raises: UcplError E457 if ranks have parts of one.
    """
    names = module.left_out.names
    cut = next((name for name, one in names.items() if one.value is not None and tp > 1), None)
    if cut is not None:
        not_yet(
            module.file.path, f"{cut} is a second name of a parameter that was left out, on {tp} tensor-parallel ranks"
        )
    if names:
        gathered.blobs[BLOB] = {name: one.noted(module.file.file) for name, one in names.items()}
    gathered.unstored += module.left_out.lines(module.file)


def keep_whole_scaling(gathered: Gathered, module: RankModule) -> None:
    """Keep ZeRO-0's numbers of loss scaling, next to the optimizer's state."""
    optimizer = Value.of(module.file).find("optimizer")
    held = optimizer.held if optimizer is not None and isinstance(optimizer.held, dict) else {}
    if "base_optimizer_state" in held:  # BF16_Optimizer's, whose shards have the same
        return
    if "clip_grad" in held:
        gathered.blobs["clip_grad"] = lifted(held["clip_grad"], module.file.file)
    rest = ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat", "state", "param_groups", "clip_grad")
    scale = {key: value for key, value in held.items() if key not in rest}
    if scale:
        gathered.blobs["loss_scale_config"] = lifted(scale, module.file.file)
