"""Classes in Megatron's own files, in a module that imports quickly."""

from __future__ import annotations

from ucpl.files.inert import HOLDERS

__all__ = ["KNOWN_GLOBALS", "LEGACY_GLOBALS"]

# Classes of values in Megatron-LM's own checkpoints, which Megatron-Core registers with torch's unpickler as safe: a
# job's arguments, and arrays in random states.
KNOWN_GLOBALS = frozenset({
    "_io.BytesIO", "argparse.Namespace", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct",
    "numpy.dtype", "numpy.dtypes.UInt32DType", "numpy.ndarray", "pathlib.PosixPath", "signal.Signals", "types.SimpleNamespace",
    "megatron.core.enums.ModelType", "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic", "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState", "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
})  # fmt: skip

# Classes of a run's own values in the legacy files. torch.load(weights_only=True) refuses them, and Megatron does not use it.
LEGACY_GLOBALS = HOLDERS | frozenset(
    f"megatron.core.{name}"
    for name in (
        "enums.ModelType",
        "enums.Fp8Recipe",
        "transformer.enums.AttnBackend",
        "transformer.enums.AttnMaskType",
        "rerun_state_machine.RerunDiagnostic",
        "rerun_state_machine.RerunMode",
        "rerun_state_machine.RerunState",
    )
)
