"""Settings of a step's layout, each with its origin.

They come from ds_config, the files' names and the files' contents.
"""

from __future__ import annotations

from collections.abc import Iterable

from ucpl.errors import Label, fail
from ucpl.extents import DTYPES, TensorRef
from ucpl.files.values import Value
from ucpl.formats.deepspeed.gathered import Gathered
from ucpl.formats.deepspeed.names import optim_file
from ucpl.formats.deepspeed.order import SUB_GROUP_DEFAULT, alignment_elements
from ucpl.formats.deepspeed.topology import Topology
from ucpl.texts import is_text

_SIZE_MAX = 1 << 62


def read_settings(gathered: Gathered, topology: Topology) -> None:
    """Read all settings of the configuration.

    Readers of shards correct those that only the shards have.
    """
    first, optim = topology.first, topology.optim
    config = _config(Value.of(first))
    origin = f"ds_config of {topology.config.file}"
    zero = _section(config, "zero_optimization")
    bf16, bf16_origin = _bf16(topology, _section(config, "bf16", "bfloat16"))
    gathered.set("stage", topology.stage, f"zero_stage of {optim.file}" if optim else "there are no optimizer shards")
    counted = ", and the number of files" if optim else ""
    gathered.set("dp", topology.dp, f"dp_world_size of {first.file}{counted}")
    _set_degrees(gathered, topology)
    gathered.set("bf16", bf16, bf16_origin)
    gathered.set("fp16", _flag(_section(config, "fp16").get("enabled")), origin)
    gathered.set("round_robin", _flag(zero.get("round_robin_gradients")), origin)
    _set_sub_group(gathered, zero.get("sub_group_size"), origin)
    accumulates_wide = _section(config, "data_types").get("grad_accum_dtype") in ("fp32", "float32")
    device = _section(zero, "offload_optimizer").get("device", "none")
    offloads = device not in ("none", None) or _flag(zero.get("cpu_offload"))
    gathered.set("bf16_optimizer", int(bool(bf16 and accumulates_wide and not offloads)), origin)
    gathered.set("elastic", 0, "rigid: not elastic_checkpoint")
    optimizer = _section(config, "optimizer").get("type")
    if isinstance(optimizer, str) and is_text(optimizer):
        gathered.set("optimizer_class", optimizer, origin)
    gathered.set("parameter_alignment", _flag(zero.get("parameter_alignment")), origin)
    if topology.tp > 1:
        _set_grain(gathered, _section(config, "tensor_parallel").get("tp_grain_size"), origin)


def shards_gone(topology: Topology) -> tuple[str, ...]:
    """The missing optimizer shards at ZeRO-1 or 2, if all are missing.

    Empty: it had no optimizer, or no ZeRO. `param_shapes` are those of the optimizer's parameters, and only ZeRO writes
    them. ucpl writes them without ZeRO, too, with stage 0. With experts, releases before 0.19.4 leave them out.
    """
    if topology.optim is not None or topology.stage:
        return ()
    held = Value.of(topology.first)
    config = _config(held)
    stage = _section(config, "zero_optimization").get("stage")
    if (
        (held.mapping().get("param_shapes") is None and not topology.listing.experts)
        or held.mapping().get("optimizer") is not None
        or stage == 0
    ):
        return ()
    bf16 = bool(_flag(_section(config, "bf16", "bfloat16").get("enabled")))
    return tuple(
        optim_file(bf16, rank, shard.pp * topology.tp + shard.tp)
        for shard in topology.shards
        for rank in range(topology.dp)
    )


def set_alignment(gathered: Gathered, tensors: Iterable[TensorRef]) -> None:
    """The alignment at stages 1 and 2, from the configuration.

    The reader of the files checks it.
    """
    aligned = gathered.settings["parameter_alignment"]
    wide = max((DTYPES[tensor.storage.dtype].itemsize for tensor in tensors), default=4)
    gathered.set("alignment", alignment_elements(wide) if aligned.value else 1, aligned.origin)


def is_data_first(topology: Topology) -> bool:
    """Test whether ranks with the same experts are neighbours.

    The option is use_data_before_expert_parallelism.
    """
    return bool(_flag(_config(Value.of(topology.first)).get("use_data_before_expert_parallelism")))


def _config(meta: Value) -> dict[object, object]:
    config = meta.find("ds_config")
    return {} if config is None else config.mapping()


def _section(config: dict[object, object], *names: str) -> dict[object, object]:
    """The first of these sections that is a dict, or {}."""
    return next((found for name in names if isinstance(found := config.get(name), dict)), {})


def _flag(value: object) -> int:
    return 1 if value is True or (type(value) in (int, float) and value == 1) else 0


def _bf16(topology: Topology, section: dict[object, object]) -> tuple[int, str]:
    """The bf16 flag and its origin.

    It comes from the names of optimizer shards, and ds_config must agree with them.
    """
    optim = topology.optim
    stated = _flag(section.get("enabled"))
    if optim is None:
        return stated, f"ds_config of {topology.config.file}"
    by_name = int(topology.listing.prefix == "bf16_")
    if stated != by_name and type(section.get("enabled")) is bool:
        fail(
            "E456",
            f"ds_config says bf16 is {'on' if stated else 'off'}, the optimizer shards' names say it is not",
            Label(str(topology.config.path), f"bf16: {section.get('enabled')}", where="ds_config"),
            Label(str(optim.path)),
        )
    return by_name, f"name of {optim.file}"


def _set_degrees(gathered: Gathered, topology: Topology) -> None:
    folder, first = topology.listing.root.name, topology.first.file
    for axis in ("tp", "pp", "ep"):
        gathered.set(axis, 1, f"names of the files of {folder}")
    if topology.tp > 1:
        gathered.set("tp", topology.tp, f"names of the files of {folder}, and mp_world_size of {first}")
    if topology.listing.layers or topology.pp > 1:
        gathered.set("pp", topology.pp, f"files mp_rank_NN of {folder}, each with param_shapes of its stage")


def _set_sub_group(gathered: Gathered, size: object, origin: str) -> None:
    if isinstance(size, int | float) and 1 <= size < _SIZE_MAX and size == int(size):
        gathered.set("sub_group_size", int(size), origin)
    else:
        gathered.set("sub_group_size", SUB_GROUP_DEFAULT, "DeepSpeed's default")


def _set_grain(gathered: Gathered, grain: object, origin: str) -> None:
    if type(grain) is int and 0 < grain < _SIZE_MAX:
        gathered.set("tp_grain_size", grain, origin)
    else:
        gathered.set("tp_grain_size", 1, "DeepSpeed's default")
