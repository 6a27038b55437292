"""The part of ds_config that must tell the truth about a target: stage, degrees, precision, batch sizes.

`engine.load_checkpoint` does not read it; people, tools and the next conversion do.
"""

from __future__ import annotations

from typing import Any

from ucpl.extents import Call, Global, TorchDType
from ucpl.stores.carrying import mapped

_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def regenerated(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The source's ds_config with the target's structure; a small one where the source has none."""
    out: dict[str, Any] = mapped(config, lambda tensor: tensor) if isinstance(config, dict) else {}
    stage, dp = settings["stage"], settings["dp"]
    zero = out["zero_optimization"] = dict(out.get("zero_optimization") or {})
    zero["stage"] = stage
    _say(zero, "elastic_checkpoint", bool(settings.get("elastic", 0)), False)
    if stage in (1, 2) and not settings.get("bf16_optimizer"):
        _say(zero, "round_robin_gradients", bool(settings.get("round_robin", 0)), False)
        _say(zero, "parameter_alignment", settings.get("alignment", 1) > 1, False)
    if stage == 3 and "sub_group_size" in settings and zero.get("sub_group_size") != settings["sub_group_size"]:
        _say(zero, "sub_group_size", settings["sub_group_size"], 1_000_000_000)
    name = "bfloat16" if "bfloat16" in out and "bf16" not in out else "bf16"
    for section, setting in ((name, "bf16"), ("fp16", "fp16")):
        if settings.get(setting) or section in out:
            out[section] = {**(out.get(section) or {}), "enabled": bool(settings.get(setting))}
    if settings.get("bf16_optimizer"):
        out["data_types"] = {**(out.get("data_types") or {}), "grad_accum_dtype": "fp32"}
    tp = int(settings.get("tp") or 1)
    if tp > 1 or "tensor_parallel" in out:  # 0 is off; DeepSpeed takes no 1
        out["tensor_parallel"] = {**(out.get("tensor_parallel") or {}), "autotp_size": tp if tp > 1 else 0}
    _batches(out, dp)
    return out


def _say(section: dict[str, Any], key: str, value: Any, default: Any) -> None:
    if value != default or key in section:
        section[key] = value


def _batches(config: dict[str, Any], dp: int) -> None:
    """train_batch_size = micro batch * accumulation steps * dp, at the target's dp.

    The whole batch is kept where the degree divides it, since learning rates are tuned to it: with the same micro batch where
    that divides too, else with one accumulation step fewer or more. Where it does not divide, the micro batch is kept.
    """
    whole, micro, steps = (config.get(key) for key in (_BATCH, _MICRO, _STEPS))
    if any(isinstance(n, str) for n in (whole, micro, steps)):
        return  # "auto": the trainer fills it in
    if whole is None and micro is None:
        config[_BATCH], config[_MICRO] = dp, 1
        return
    if whole is None:
        return  # it follows from the others
    if whole % dp == 0:
        share = whole // dp
        if micro is not None and share % micro == 0:
            steps_now = share // micro
        else:
            held = steps if steps is not None and share % steps == 0 else 1
            micro_now = share // held
            if micro is not None:
                config[_MICRO] = micro_now
            steps_now = held
        if steps is not None or (micro is not None and steps_now != 1):
            config[_STEPS] = steps_now
        return
    micro_kept = micro if micro is not None else max(1, whole // dp)
    config[_MICRO] = micro_kept
    config[_BATCH] = micro_kept * (steps or 1) * dp


# ---- loss scaling ----------------------------------------------------------------------------------------------------


def loss_scaler(blobs: dict[str, Any], config: dict[str, Any], is_fp16: bool) -> Call:
    """The object of a ZeRO shard: the source's, or one that goes on where ZeRO-0's numbers stand, or a fresh one."""
    given = blobs.get("loss_scaler")
    if isinstance(given, Call):
        return given
    kept = blobs.get("loss_scale_config")
    numbers: dict[str, Any] = kept if isinstance(kept, dict) else {}
    section = config.get("fp16") if isinstance(config.get("fp16"), dict) else {}
    fp16: dict[str, Any] = section or {}
    if not is_fp16 or not numbers.get("dynamic_loss_scale", not fp16.get("loss_scale", 0)):
        scale = float(numbers.get("cur_scale", fp16.get("loss_scale", 0) or 1.0)) if is_fp16 else 1.0
        return _object("LossScaler", {"cur_scale": scale, "dynamic": False})
    hysteresis = fp16.get("hysteresis", 2)
    return _object(
        "DynamicLossScaler",
        {
            "cur_scale": float(numbers.get("cur_scale", 2 ** fp16.get("initial_scale_power", 16))),
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


def loss_scale_numbers(blobs: dict[str, Any]) -> dict[str, Any]:
    """What ZeRO-0's optimizer wrapper keeps instead of an object."""
    kept = blobs.get("loss_scale_config")
    if isinstance(kept, dict) and "cur_scale" in kept:
        return dict(kept)
    given = blobs.get("loss_scaler")
    state: dict[str, Any] = given.state if isinstance(given, Call) and isinstance(given.state, dict) else {}
    dynamic = bool(state.get("dynamic", False))
    out = {
        "dynamic_loss_scale": dynamic,
        "cur_scale": state.get("cur_scale", 1.0),
        "cur_iter": state.get("cur_iter", blobs.get("global_steps", 0)),
    }
    if dynamic:
        out |= {key: state[key] for key in ("last_overflow_iter", "scale_factor", "scale_window") if key in state}
    return out


def _object(name: str, state: dict[str, Any]) -> Call:
    return Call(Global(_LOSS_SCALER, name), new=True, state=state)
