"""Classes that DeepSpeed's own files name, and client_state."""

from __future__ import annotations

from ucpl.files.inert import HOLDERS

__all__ = ["KNOWN_GLOBALS"]

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
