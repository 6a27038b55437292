"""Folders of Megatron-Core equal their truth, by torch's own reader."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.megatron_truth import FIXTURES, NAMES, described, stored, truth

STATE = {"param": "fp32", "fp32_param": "fp32"}  # with DistributedOptimizer and without


def parted(key: str) -> tuple[str, str]:
    """(the parameter's key, the state): `optimizer.state.exp_avg.KEY`."""
    if not key.startswith("optimizer.state."):
        return key, "weight"
    state, name = key.removeprefix("optimizer.state.").split(".", 1)
    return name, STATE.get(state, state)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_what_the_formula_says(name: str) -> None:
    (step,) = (FIXTURES / name).glob("iter_*")
    kept = FileSystemReader(step).read_metadata().state_dict_metadata
    tensors = {
        k: torch.full(tuple(v.size), -1, dtype=v.properties.dtype)
        for k, v in kept.items()
        if isinstance(v, TensorStorageMetadata) and "gbuf_idx" not in k  # buckets: DistributedOptimizer's own order
    }
    load(dict(tensors), checkpoint_id=step, no_dist=True)
    told = described(name)
    wanted = stored(truth(name), told["run"], told["saved"].get("unstacked", False))
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        parameter, state = parted(key)
        found.setdefault(parameter, {})[state] = tensor
    assert found.keys() == wanted.keys()
    for parameter, states in found.items():
        drawn = {s: v for s, v in wanted[parameter].items() if torch.is_tensor(v)}
        if told["saved"].get("kind") == "dp_reshardable":
            drawn = {"weight": drawn["weight"]}
        assert states.keys() == drawn.keys(), parameter
        wrong = [s for s, v in drawn.items() if states[s].dtype != v.dtype or not torch.equal(states[s], v)]
        assert not wrong, parameter
