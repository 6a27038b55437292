"""The part of ds_config that must fit a target.

That is stage, degrees, precision and batch sizes. `engine.load_checkpoint` does not read it; people, tools and the next
conversion do.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucpl.extents import Global, PickledCall, Plain, TorchDType
from ucpl.files.carrying import mapped
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.values import Value
from ucpl.records import frozen
from ucpl.registry.format import degree_of

_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_OF_MASTERS = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")
_SCALING = ("loss_scaler", "loss_scale_config", "dynamic_loss_scale", "overflow")
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def blobs_of(source: Checkpoint) -> Value:
    """The values that the source carries, as one Value for messages.

    They come from a file and can have any type.
    """
    return Value(source.top, source.top.name, (), source.state.blobs)


def regenerated(config: Value | None, settings: Mapping[str, Plain]) -> dict[object, object]:
    """The source's ds_config with the target's structure, or a small new one.

    Raises: UcplError E455.
    """
    out = mapped(config.mapping(), lambda tensor: tensor) if config is not None else {}
    stage = settings["stage"]
    zero = out["zero_optimization"] = _section(config, "zero_optimization")
    zero["stage"] = stage
    _set_option(zero, "elastic_checkpoint", bool(settings.get("elastic", 0)), False)
    if stage in (1, 2) and not settings.get("bf16_optimizer"):
        _set_option(zero, "round_robin_gradients", bool(settings.get("round_robin", 0)), False)
        _set_option(zero, "parameter_alignment", int(settings.get("alignment") or 1) > 1, False)
    if stage == 3 and "sub_group_size" in settings and zero.get("sub_group_size") != settings["sub_group_size"]:
        _set_option(zero, "sub_group_size", settings["sub_group_size"], 1_000_000_000)
    name = "bfloat16" if "bfloat16" in out and "bf16" not in out else "bf16"
    for section, setting in ((name, "bf16"), ("fp16", "fp16")):
        if settings.get(setting) or section in out:
            out[section] = {**_section(config, section), "enabled": bool(settings.get(setting))}
    _set_types(config, out, settings)
    tp = int(settings.get("tp") or 1)
    if tp > 1 or "tensor_parallel" in out:  # 0 is off; DeepSpeed takes no 1
        out["tensor_parallel"] = {**_section(config, "tensor_parallel"), "autotp_size": tp if tp > 1 else 0}
    if "expert_parallel" in out:  # AutoEP
        out["expert_parallel"] = {**_section(config, "expert_parallel"), "autoep_size": int(settings.get("ep") or 1)}
    out |= _batches(config, int(settings["dp"] or 1))
    return out


def _set_types(config: Value | None, out: dict[object, object], settings: Mapping[str, Plain]) -> None:
    """Change options of another training dtype, which DeepSpeed rejects."""
    for section, flag in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if not settings.get(flag) and section in out:
            known = _section(config, section)
            out[section] = {k: v for k, v in known.items() if k not in _OF_MASTERS} | {"enabled": False}
    types = _section(config, "data_types")
    if settings.get("bf16_optimizer"):
        types["grad_accum_dtype"] = "fp32"
    if "param_dtype" in types:
        types["param_dtype"] = "bf16" if settings.get("bf16") else "fp16" if settings.get("fp16") else "fp32"
    if types:
        out["data_types"] = types


def accumulates_wide(source: Checkpoint) -> bool:
    """Test whether DeepSpeed would use BF16_Optimizer at stage 1.

    That is, with bf16 added to the rest of the configuration.
    """
    config = blobs_of(source).find("ds_config")
    zero, types = _section(config, "zero_optimization"), _section(config, "data_types")
    offload = zero.get("offload_optimizer")
    device = offload.get("device") if isinstance(offload, dict) else None
    return (
        types.get("grad_accum_dtype") in ("fp32", "float32")
        and device in (None, "none")
        and not zero.get("cpu_offload")
    )


def _section(config: Value | None, name: str) -> dict[object, object]:
    found = config.find(name) if config is not None else None
    return dict(found.mapping()) if found is not None else {}


def _set_option(section: dict[object, object], key: str, value: object, default: object) -> None:
    if value != default or key in section:
        section[key] = value


def _batches(config: Value | None, dp: int) -> dict[object, object]:
    """Batch sizes that change at the target's dp.

    train_batch_size = micro batch * accumulation steps * dp. The total batch is kept if dp divides it, since learning
    rates are tuned to it. The micro batch is kept too if possible; otherwise the number of accumulation steps changes.
    If dp does not divide the total batch, the micro batch is kept.
    """
    stated = [config.find(key) if config is not None else None for key in (_BATCH, _MICRO, _STEPS)]
    if any(one is not None and isinstance(one.held, str) for one in stated):
        return {}  # "auto": the trainer fills it in
    whole, micro, steps = (one.whole(1) if one is not None else None for one in stated)
    if whole is None and micro is None:
        return {_BATCH: dp, _MICRO: 1}
    if whole is None:
        return {}  # it follows from the others
    if whole % dp:
        kept = micro if micro is not None else max(1, whole // dp)
        return {_MICRO: kept, _BATCH: kept * (steps or 1) * dp}
    share = whole // dp
    out: dict[object, object] = {}
    if micro is not None and share % micro == 0:
        steps_now = share // micro
    else:
        steps_now = steps if steps is not None and share % steps == 0 else 1
        if micro is not None:
            out[_MICRO] = share // steps_now
    if steps is not None or (micro is not None and steps_now != 1):
        out[_STEPS] = steps_now
    return out


def batch_text(source: Checkpoint, settings: Mapping[str, object]) -> str:
    """A rank's batch in the target's ds_config: `, batch per device 4`.

    Empty if the source states none.
    """
    config = blobs_of(source).find("ds_config")
    stated = {key: one.held for key in (_BATCH, _MICRO, _STEPS) if config is not None and (one := config.find(key))}
    if not any(isinstance(stated.get(key), int) for key in (_BATCH, _MICRO)):
        return ""
    values = stated | _batches(config, degree_of(settings, "dp"))
    whole, micro, steps = (values.get(key) for key in (_BATCH, _MICRO, _STEPS))
    steps = steps if isinstance(steps, int) else 1
    if not isinstance(micro, int):  # the config leaves it to DeepSpeed
        micro = whole // (degree_of(settings, "dp") * steps) if isinstance(whole, int) else 0
    if not micro:
        return ""
    before = stated.get(_BATCH)
    text = f", batch per device {micro}" + (f" in {steps} steps" if steps > 1 else "")
    return text + (f", {whole} in all and no longer {before}" if before is not None and whole != before else "")


# ---- loss scaling ----------------------------------------------------------------------------------------------------


def scaling_of(source: Checkpoint, is_fp16: bool) -> Value:
    """Carried values with new loss scaling if the target needs another one.

    Only fp16 scales losses.
    """
    blobs, known = blobs_of(source), source.state.settings.get("fp16")
    if known is None or bool(known.value) == is_fp16:
        return blobs
    rest = {key: value for key, value in source.state.blobs.items() if key not in _SCALING}
    less = Value(blobs.path, blobs.file, (), rest)
    made = loss_scaler(less, less.find("ds_config"), is_fp16)
    assert isinstance(made.state, dict)
    anew = {"loss_scaler": made, "dynamic_loss_scale": made.state["dynamic"], "overflow": False}
    return Value(blobs.path, blobs.file, (), rest | anew)


def loss_scaler(blobs: Value, config: Value | None, is_fp16: bool) -> PickledCall:
    """The object of a ZeRO shard.

    The source's, ZeRO-0's numbers, or a new one.
    """
    given = blobs.find("loss_scaler")
    if given is not None and isinstance(given.held, PickledCall):
        return given.held
    numbers = _Numbers(blobs.find("loss_scale_config"))
    fp16 = _Numbers(config.find("fp16") if config is not None else None)
    if not is_fp16 or not numbers.get("dynamic_loss_scale", not fp16.get("loss_scale", 0)):
        scale = float(numbers.get("cur_scale", fp16.get("loss_scale", 0) or 1.0)) if is_fp16 else 1.0
        return _object("LossScaler", {"cur_scale": scale, "dynamic": False})
    hysteresis = fp16.get("hysteresis", 2)
    return _object(
        "DynamicLossScaler",
        {
            "cur_scale": float(numbers.get("cur_scale", 2 ** min(fp16.get("initial_scale_power", 16), 127))),
            "dynamic": True,
            "cur_iter": numbers.get("cur_iter", 0),
            "last_overflow_iter": numbers.get("last_overflow_iter", -1),
            "scale_factor": numbers.get("scale_factor", 2.0),
            "scale_window": numbers.get("scale_window", fp16.get("loss_scale_window", 1000)),
            "min_scale": fp16.get("min_loss_scale", 1),
            "delayed_shift": hysteresis,
            "cur_hysteresis": hysteresis,
            "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
            "raise_error_at_min_scale": True,
            "dtype": TorchDType("f16"),
        },
    )


def scaling_note(source: Checkpoint, is_fp16: bool) -> str:
    """The plan's note on a target with another loss scaling."""
    blobs = scaling_of(source, is_fp16)
    config = blobs.find("ds_config")
    state = loss_scaler(blobs, config, is_fp16).state
    assert isinstance(state, dict)
    if not is_fp16:
        return "loss_scaler of fp16 training is left out: losses are not scaled"
    origin = "fp16 of ds_config" if config is not None and config.find("fp16") is not None else "DeepSpeed's defaults"
    how = f"dynamic, from {state['cur_scale']:g}" if state["dynamic"] else f"fixed at {state['cur_scale']:g}"
    return f"loss_scaler is new, for fp16 training: {how} ({origin})"


@frozen(eq=False)
class _Numbers:
    """A dict of numbers and flags, where there is one."""

    section: Value | None

    def get(self, key: str, default: float) -> float:
        found = self.section.find(key) if self.section is not None else None
        if found is None:
            return default
        held = found.held
        if type(held) is bool or ((type(held) is int or type(held) is float) and abs(held) < 1e30):
            return held
        found.wrong("a number")


def loss_scale_numbers(blobs: Mapping[str, object]) -> dict[str, object]:
    """The numbers that ZeRO-0's optimizer wrapper keeps instead of an object."""
    kept = blobs.get("loss_scale_config")
    if isinstance(kept, dict) and "cur_scale" in kept:
        return dict(kept)
    given = blobs.get("loss_scaler")
    state: dict[str, object] = given.state if isinstance(given, PickledCall) and isinstance(given.state, dict) else {}
    dynamic = state.get("dynamic", False) is True
    out = {
        "dynamic_loss_scale": dynamic,
        "cur_scale": state.get("cur_scale", 1.0),
        "cur_iter": state.get("cur_iter", blobs.get("global_steps", 0)),
    }
    if dynamic:
        out |= {key: state[key] for key in ("last_overflow_iter", "scale_factor", "scale_window") if key in state}
    return out


def _object(name: str, state: dict[str, object]) -> PickledCall:
    return PickledCall(Global(_LOSS_SCALER, name), new=True, state=state)
