"""The arguments of a Megatron run in a checkpoint: an inert argparse.Namespace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ucpl.extents import Global, NamedTensor, PickledCall
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.inert import unsafe_globals
from ucpl.files.plain_values import decode, encode
from ucpl.formats.megatron.legacy_names import EMBEDDING, layer_of, numbered

__all__ = [
    "DEGREES",
    "GROUPED_GEMM",
    "OWN",
    "arguments_in",
    "at_degrees",
    "besides_degrees",
    "has_grouped_mlp",
    "heads_advice",
    "namespace",
    "part_own",
    "sizes_of",
    "state_of",
    "values_of",
]

DEGREES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "virtual_pipeline_model_parallel_size": "vpp",
}
_EACH = "num_layers_per_virtual_pipeline_stage"
_OF_LAYOUTS = {
    *DEGREES, _EACH, "expert_tensor_parallel_size", "world_size", "data_parallel_size", "rank", "local_rank",
    "ckpt_format", "use_distributed_optimizer", "no_save_rng",
}  # fmt: skip
OWN = "megatron"  # key of carried values whose classes only Megatron has, in a form without classes
GROUPED_GEMM = "moe_grouped_gemm"
_NAMESPACE = Global("argparse", "Namespace")


def state_of(held: object) -> dict[object, object] | None:
    """The attributes of a Namespace; None where it is none."""
    if type(held) is not PickledCall or held.function != _NAMESPACE:
        return None
    if type(held.state) is dict:
        return held.state
    return dict(held.kwargs.items()) if held.state is None else None


def part_own(carried: dict[object, object]) -> None:
    """Move values of Megatron's own classes into one value without classes.

    Another framework's target could not name these classes in its pickles.
    """
    own = {key: one for key, one in carried.items() if any(n.startswith("megatron.") for n in unsafe_globals(one))}
    for key in own:
        del carried[key]
    if own:
        carried[OWN] = encode(own)


def values_of(source: Checkpoint) -> dict[object, object]:
    """A run's values besides its model, with Megatron's own values restored."""
    values = dict(source.state.carried)
    own = decode(values.pop(OWN, None))
    return {**(own if isinstance(own, dict) else {}), **values}


def besides_degrees(carried: Mapping[object, object]) -> dict[object, object]:
    """A run's values besides its model, without its degrees.

    The arguments on ranks and on the form of files are removed: a target has its own, as with shapes of shards.
    """
    out = dict(carried)
    own = decode(out.pop(OWN, None))
    out |= own if isinstance(own, dict) else {}
    arguments = state_of(out.get("args"))
    if arguments is not None and any(name in arguments for name in (*DEGREES, "no_save_rng")):
        out["args"] = namespace({key: one for key, one in arguments.items() if key not in _OF_LAYOUTS})
    return out


def arguments_in(source: Checkpoint) -> dict[object, object]:
    """The arguments of the run that wrote a checkpoint or its source.

    They are empty if it was not Megatron.
    """
    return state_of(values_of(source).get("args")) or {}


def has_grouped_mlp(arguments: Mapping[object, object]) -> bool:
    """Test for experts of GroupedMLP.

    Such a run has grouped kernels, and not those of Transformer Engine.
    """
    own = arguments.get("transformer_impl") == "local" or arguments.get("moe_use_legacy_grouped_gemm") is True
    return own and arguments.get(GROUPED_GEMM) is True


def at_degrees(
    arguments: Mapping[object, object], degree: Callable[[str], int], *, is_alike: bool
) -> dict[object, object]:
    """The arguments of a run at other degrees, with the distributed optimizer.

    degree: of an axis: "tp", "pp", "ep", "vpp". is_alike: ranks are those of the run; otherwise, counts of ranks are
    removed.
    """
    gone = () if is_alike else ("world_size", "data_parallel_size", "rank", "local_rank")
    out: dict[object, object] = {key: one for key, one in arguments.items() if key not in gone}
    for name, axis in DEGREES.items():
        out[name] = degree(axis)
    if degree("vpp") == 1:
        out["virtual_pipeline_model_parallel_size"] = None
    if not is_alike and _EACH in out:
        out[_EACH] = None  # of other stages
    if "expert_tensor_parallel_size" in out:
        out["expert_tensor_parallel_size"] = degree("tp")
    out["use_distributed_optimizer"] = True
    return out


def sizes_of(tensors: Sequence[NamedTensor]) -> dict[object, object]:
    """Arguments that Megatron-LM compares and that shapes and names determine."""
    out: dict[object, object] = {}
    prefixes = numbered([t.name for t in tensors if layer_of(t.name)])
    layers = [n for prefix, n in prefixes.items() if prefix.endswith(".layers.")]
    if len(layers) == 1:
        out["num_layers"] = layers[0]
    width = next((t.shape[1] for t in tensors if t.name == EMBEDDING and len(t.shape) == 2), None)
    return out if width is None else {**out, "hidden_size": width}


def heads_advice(source: Checkpoint, where: str) -> tuple[str, ...]:
    """Advice on compared arguments that no shape determines."""
    if "num_attention_heads" in arguments_in(source):
        return ()
    return (
        "Megatron-LM compares num_attention_heads of `args` with its own, and a source of no Megatron run does not say it: set"
        f" it in {where}; torch_dist with fully_reshardable is loaded as it is",
    )


def namespace(values: Mapping[object, object]) -> PickledCall:
    """As argparse pickles one."""
    return PickledCall(_NAMESPACE, new=True, state=dict(values))
