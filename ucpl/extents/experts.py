"""Which tensors are experts' own, and which ranks hold them: facts that a checkpoint states, before any layout says them."""

from __future__ import annotations

from attrs import field, frozen


@frozen
class Expert:
    """One tensor of one expert. `count` experts are in its layer; each rank holds a run of them."""

    file: str
    name: str  # in the file: the number is global there
    module: str  # prefix of the layer's experts: "blocks.1.mlp.deepspeed_moe.experts.deepspeed_experts."
    number: int  # of all experts of the layer
    count: int
    inner: str  # the name inside the expert: "h4.weight"


@frozen
class Experts:
    """All tensors of experts. The ranks of a stage are edp x ep (the last fastest), or ep x edp if `is_data_first`."""

    ep: int
    is_data_first: bool
    of: dict[str, Expert] = field(factory=dict)  # by tensor

    def rank(self, tensor: str, ep: int) -> int:
        """Which of `ep` ranks holds a tensor."""
        one = self.of[tensor]
        return one.number // (one.count // ep)
