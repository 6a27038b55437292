"""The tensors of experts, and their ranks, as a checkpoint states them."""

from __future__ import annotations

from attrs import field

from ucpl.records import frozen


@frozen
class Expert:
    """One tensor of one expert.

    `count` experts are in its layer; each rank holds a run of them.
    """

    name: str  # in its file: the number is global there
    module: str  # prefix of the layer's experts: "blocks.1.mlp.deepspeed_moe.experts.deepspeed_experts."
    number: int  # of all experts of the layer
    count: int
    inner: str  # the name inside the expert: "h4.weight"
    layer: int = 0  # its layer's number among those with experts of its stage, which its file is called by
    tps: tuple[int, ...] = ()  # tensor-parallel ranks whose files hold it; none: whose ranks hold the expert
    is_fused: bool = False  # the module of a rank has all its experts in one tensor (AutoEP)

    @property
    def every(self) -> str:
        """A glob of the same tensor of all experts of its layer."""
        return f"{self.fused}.*" if self.is_fused else f"{self.module}*.{self.inner}"

    @property
    def fused(self) -> str:
        """The module's tensor of this and the rank's other experts: "blocks.1.mlp.experts.w1"."""
        return f"{self.module}{self.inner}"


@frozen
class Experts:
    """All tensors of experts.

    The ranks of a stage are edp x ep (the last fastest), or ep x edp if `is_data_first`. `is_within_tp`: the ranks of
    each tensor-parallel coordinate are dealt separately, and hold parts of the experts' tensors, or there is one
    coordinate. Otherwise all dp x tp ranks of a stage are dealt together, and hold their experts completely.
    """

    ep: int
    is_data_first: bool
    of: dict[str, Expert] = field(factory=dict)  # by tensor
    is_within_tp: bool = True

    def rank(self, tensor: str, ep: int) -> int:
        """The rank among `ep` that holds a tensor."""
        one = self.of[tensor]
        return one.number // (one.count // ep)

    @property
    def is_fused(self) -> bool:
        return any(one.is_fused for one in self.of.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """The layers with experts, by the prefixes of their names, in order."""
        return tuple(dict.fromkeys(one.module for one in self.of.values()))


def expert_file(layer: int, number: int, mp: int | str) -> str:
    """The name of an expert's file.

    mp: the model-parallel rank, or its placeholder in a template.
    """
    said = f"{mp:02}" if isinstance(mp, int) else mp
    return f"layer_{layer}_expert_{number}_mp_rank_{said}_model_states.pt"
